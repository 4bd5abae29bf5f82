"""Measure the kNN accuracy of a frozen encoder by a weighted vote of the nearest train pictures (Huang et al. 2023).

The search is exact.

With several ranks, each classifies its share of the queries. The result has the same bits on any number of ranks.

Shapes: N bank pictures, Q queries, B queries at a time, C pooled channels, K classes, L labels, R neighbours (the k of
kNN).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from data_pipeline.core.sample import NO_LABEL
from data_pipeline.core.schema import Schema
from trainer.probes.features import LabelSpace, shared_rows
from trainer.probes.linear import Target, accuracy, best_classes

NUM_NEIGHBORS = 200
TEMPERATURE = 0.1
_QUERIES_AT_ONCE = 512  # a constant, because bits may depend on it


class KNNResult(Schema):
    """Test accuracy in [0, 1] and its settings.

    `num_neighbors` is at most the size of the train set.
    """

    accuracy: float
    num_neighbors: int
    temperature: float


def nearest(
    bank_NC: Tensor, queries_BC: Tensor, *, num_neighbors: int, chosen_N: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the largest cosines (B, R) of each query with the bank, in no order, and their rows (B, R) of the bank.

    If the bank has fewer rows than `num_neighbors`, all of them are neighbours. Features are normalised here, in
    float32. `chosen_N`, bool, leaves out the other rows of the bank.
    """
    queries_BC = F.normalize(queries_BC.float(), dim=1)
    rows_M = torch.arange(len(bank_NC), device=bank_NC.device)
    if chosen_N is not None:
        rows_M = rows_M[chosen_N]
    bank_MC = F.normalize((bank_NC if chosen_N is None else bank_NC[rows_M]).float(), dim=1)
    cosine_BR, place_BR = (queries_BC @ bank_MC.T).topk(min(num_neighbors, len(bank_MC)), dim=1, sorted=False)
    return cosine_BR, rows_M[place_BR]


def vote(cosine_BR: Tensor, label_BR: Tensor, *, num_classes: int, temperature: float = TEMPERATURE) -> Tensor:
    """Return the `best_classes` (B,) by the sum of exp(cosine / temperature) over the neighbours of each class."""
    # A product, because a scatter on a GPU adds in another order each time.
    is_class_BRK = F.one_hot(label_BR, num_classes).to(cosine_BR.dtype)
    return best_classes(torch.einsum("br,brk->bk", (cosine_BR / temperature).exp(), is_class_BRK))


def knn_classes(
    bank_NC: Tensor, queries_QC: Tensor, targets: Mapping[LabelSpace, Target], *, chunk_size: int = _QUERIES_AT_ONCE
) -> dict[LabelSpace, Tensor]:
    """Return the class that the vote gives to each test picture, (Q,) int64, for every target. Every rank calls this.

    Takes features of train and test pictures. The device of the train features computes. The neighbours of a label that
    some train pictures lack are those of the others.
    """
    device = bank_NC.device
    labels: list[tuple[Tensor, Tensor | None, int]] = []
    for target in targets.values():
        label_N = target.train_N.to(device)
        labels.append((label_N, None if target.is_in_all else label_N != NO_LABEL, target.num_classes))

    def predict(chunk_BC: Tensor) -> list[Tensor]:
        queries_BC = chunk_BC.to(device)
        of_all: tuple[Tensor, Tensor] | None = None
        votes = []
        for label_N, chosen_N, num_classes in labels:
            if chosen_N is not None:
                found = nearest(bank_NC, queries_BC, num_neighbors=NUM_NEIGHBORS, chosen_N=chosen_N)
            else:
                found = of_all = of_all or nearest(bank_NC, queries_BC, num_neighbors=NUM_NEIGHBORS)
            cosine_BR, row_BR = found
            votes.append(vote(cosine_BR, label_N[row_BR], num_classes=num_classes))
        return [torch.stack(votes, dim=1)]

    with torch.no_grad():
        [predicted_QL] = shared_rows(predict, queries_QC, chunk_size=chunk_size)
    return dict(zip(targets, predicted_QL.unbind(1), strict=True))


def knn_accuracies(
    bank_NC: Tensor, queries_QC: Tensor, targets: Mapping[LabelSpace, Target], *, chunk_size: int = _QUERIES_AT_ONCE
) -> dict[LabelSpace, float]:
    """Return the test accuracy of every target, from features of train and test pictures. Every rank calls this.

    An accuracy is nan if features are not finite.
    """
    classes = knn_classes(bank_NC, queries_QC, targets, chunk_size=chunk_size)
    return {name: accuracy(class_Q, targets[name].test_N) for name, class_Q in classes.items()}
