"""Measure the kNN accuracy of a frozen encoder by a weighted vote of the nearest train pictures (Huang et al. 2023).

With several ranks, each classifies its share of the queries. The result has the same bits on any number of ranks.

Shapes: N bank pictures, Q queries, B queries at a time, C pooled channels, K classes, L labels, R neighbours (the k of
kNN).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from data_pipeline.core.sample import NO_LABEL
from data_pipeline.core.schema import Schema
from trainer.probes.features import FeatureEncoder, LabelSpace, Pictures, extract, frozen, shared_rows
from trainer.probes.linear import Spread, Target, accuracy, num_labelled, spread

NUM_NEIGHBORS = 200
TEMPERATURE = 0.1
_QUERIES_AT_ONCE = 512  # a constant, because bits may depend on it


class KNNResult(Schema):
    """Test accuracy in [0, 1] and its settings.

    `num_neighbors` is at most the size of the train set. `draws` is None if the test overlays were drawn once.
    """

    accuracy: float
    num_neighbors: int
    temperature: float
    draws: Spread | None = None


def nearest(bank_NC: Tensor, queries_BC: Tensor, *, num_neighbors: int) -> tuple[Tensor, Tensor]:
    """Return the largest cosines (B, R) of each query with the bank, in no order, and their rows (B, R) of the bank.

    If the bank has fewer rows than `num_neighbors`, all of them are neighbours. Features are normalised here, in
    float32.
    """
    bank_NC, queries_BC = F.normalize(bank_NC.float(), dim=1), F.normalize(queries_BC.float(), dim=1)
    cosine_BR, neighbor_BR = (queries_BC @ bank_NC.T).topk(min(num_neighbors, len(bank_NC)), dim=1, sorted=False)
    return cosine_BR, neighbor_BR


def vote(cosine_BR: Tensor, label_BR: Tensor, *, num_classes: int, temperature: float = TEMPERATURE) -> Tensor:
    """Return classes (B,) int64: argmax over classes of the sum of exp(cosine / temperature) over the neighbours."""
    # A product, because a scatter on a GPU adds in another order each time.
    is_class_BRK = F.one_hot(label_BR, num_classes).to(cosine_BR.dtype)
    return torch.einsum("br,brk->bk", (cosine_BR / temperature).exp(), is_class_BRK).argmax(1)


def knn_classes(
    bank_NC: Tensor, queries_QC: Tensor, targets: Mapping[LabelSpace, Target], *, chunk_size: int = _QUERIES_AT_ONCE
) -> dict[LabelSpace, Tensor]:
    """Return the class that the vote gives to each test picture, (Q,) int64, for every target. Every rank calls this.

    Takes features of train and test pictures. The neighbours of a label that some train pictures lack are those of the
    others.
    """
    voters: list[tuple[Tensor | None, Tensor, int]] = []
    for target in targets.values():
        label_N = target.train_N.to(bank_NC.device)
        labelled = None if target.is_in_all else (label_N != NO_LABEL).nonzero()[:, 0]
        bank = None if labelled is None else bank_NC[labelled]
        voters.append((bank, label_N if labelled is None else label_N[labelled], target.num_classes))
    is_shared = any(bank is None for bank, _, _ in voters)

    def predict(chunk_BC: Tensor) -> Tensor:
        shared = nearest(bank_NC, chunk_BC, num_neighbors=NUM_NEIGHBORS) if is_shared else None
        votes = []
        for bank, label_N, num_classes in voters:
            found = shared if bank is None else nearest(bank, chunk_BC, num_neighbors=NUM_NEIGHBORS)
            assert found is not None
            cosine_BR, neighbor_BR = found
            votes.append(vote(cosine_BR, label_N[neighbor_BR], num_classes=num_classes))
        return torch.stack(votes, dim=1)

    with torch.no_grad():
        predicted_QL = shared_rows(predict, queries_QC, chunk_size=chunk_size)
    return dict(zip(targets, predicted_QL.unbind(1), strict=True))


def knn_accuracies(
    bank_NC: Tensor, queries_QC: Tensor, targets: Mapping[LabelSpace, Target], *, chunk_size: int = _QUERIES_AT_ONCE
) -> dict[LabelSpace, float]:
    """Return the test accuracy of every target, from features of train and test pictures. Every rank calls this."""
    classes = knn_classes(bank_NC, queries_QC, targets, chunk_size=chunk_size)
    return {name: accuracy(class_Q, targets[name].test_N) for name, class_Q in classes.items()}


@dataclass(frozen=True)
class KNNProbe:
    """The result of the vote, and the classes that it gives to the test samples, (N,) int64."""

    result: KNNResult
    predicted_N: Tensor


def probe_knn(
    encoder: FeatureEncoder,
    *,
    train: Pictures,
    test: Pictures,
    targets: Mapping[LabelSpace, Target],
    device: torch.device,
    other_draws: Sequence[Pictures] = (),
) -> dict[LabelSpace, KNNProbe]:
    """Measure kNN accuracy for every target, from pooled features of pictures without views.

    The encoder stays unchanged. `other_draws` are the test pictures under other overlays. Every rank calls this with
    the same arguments.
    """
    accuracies: dict[LabelSpace, list[float]] = {name: [] for name in targets}
    predicted: dict[LabelSpace, Tensor] = {}
    with frozen(encoder):
        bank_NC = extract(encoder.pooled, train.images_NCHW, device=device)
        for pictures in (test, *other_draws):
            queries_QC = extract(encoder.pooled, pictures.images_NCHW, device=device)
            for name, class_Q in knn_classes(bank_NC, queries_QC, targets).items():
                accuracies[name].append(accuracy(class_Q, pictures.labels(name)))
                predicted.setdefault(name, class_Q)
    results = {
        name: KNNResult(
            accuracy=values[0],
            num_neighbors=min(NUM_NEIGHBORS, num_labelled(targets[name].train_N)),
            temperature=TEMPERATURE,
            draws=spread(values),
        )
        for name, values in accuracies.items()
    }
    return {name: KNNProbe(result, predicted[name]) for name, result in results.items()}
