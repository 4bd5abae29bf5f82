"""Measure the kNN accuracy of a frozen encoder by a weighted vote of the nearest train pictures (Huang et al. 2023).

The search is exact. If the train pictures are streamed, or their features do not fit on the GPU, the bank is read in
parts, each for many queries at a time. A cosine may then differ in its last bit from one computed at once.

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
from trainer.probes.features import FeatureEncoder, FrozenFeatures, LabelSpace, Pictures, frozen, shared_rows
from trainer.probes.linear import Spread, Target, accuracy, best_classes, finite_accuracy, num_labelled, spread

NUM_NEIGHBORS = 200
TEMPERATURE = 0.1
_QUERIES_AT_ONCE = 512  # a constant, because bits may depend on it
_BANK_AT_ONCE = 4_096  # of a streamed train set
_QUERIES_OF_BANK = 16_384  # for which the bank of a streamed train set is read once


class KNNResult(Schema):
    """Test accuracy in [0, 1] and its settings.

    `num_neighbors` is at most the size of the train set. `draws` is None if the test overlays were drawn once.
    """

    accuracy: float
    num_neighbors: int
    temperature: float
    draws: Spread | None = None


def nearest(
    bank_NC: Tensor,
    queries_BC: Tensor,
    *,
    num_neighbors: int,
    bank_at_once: int | None = None,
    chosen_N: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the largest cosines (B, R) of each query with the bank, in no order, and their rows (B, R) of the bank.

    If the bank has fewer rows than `num_neighbors`, all of them are neighbours. Features are normalised here, in
    float32. With `bank_at_once`, only so many rows of the bank at a time are moved to the device of the queries.
    `chosen_N`, bool on the device of the bank, leaves out the other rows.
    """
    queries_BC = F.normalize(queries_BC.float(), dim=1)
    cosine_BR = queries_BC.new_empty(len(queries_BC), 0)
    neighbor_BR = cosine_BR.long()
    first = 0
    for part_MC in torch.split(bank_NC, bank_at_once or len(bank_NC)):
        rows_M = torch.arange(first, first + len(part_MC), device=part_MC.device)
        first += len(part_MC)
        if chosen_N is not None:
            rows_M = rows_M[chosen_N[rows_M]]
            part_MC = bank_NC[rows_M]
        part_MC = F.normalize(part_MC.to(queries_BC.device).float(), dim=1)
        num = min(num_neighbors, len(part_MC))
        found_BM, place_BM = (queries_BC @ part_MC.T).topk(num, dim=1, sorted=False)
        row_BM = rows_M.to(queries_BC.device)[place_BM]
        cosine_BR, neighbor_BR = torch.cat([cosine_BR, found_BM], 1), torch.cat([neighbor_BR, row_BM], 1)
        if cosine_BR.shape[1] > num_neighbors:
            cosine_BR, best_BR = cosine_BR.topk(num_neighbors, dim=1, sorted=False)
            neighbor_BR = neighbor_BR.gather(1, best_BR)
    return cosine_BR, neighbor_BR


def vote(cosine_BR: Tensor, label_BR: Tensor, *, num_classes: int, temperature: float = TEMPERATURE) -> Tensor:
    """Return the `best_classes` (B,) by the sum of exp(cosine / temperature) over the neighbours of each class."""
    # A product, because a scatter on a GPU adds in another order each time.
    is_class_BRK = F.one_hot(label_BR, num_classes).to(cosine_BR.dtype)
    return best_classes(torch.einsum("br,brk->bk", (cosine_BR / temperature).exp(), is_class_BRK))


def knn_classes(
    bank_NC: Tensor,
    queries_QC: Tensor,
    targets: Mapping[LabelSpace, Target],
    *,
    chunk_size: int = _QUERIES_AT_ONCE,
    bank_at_once: int | None = None,
    device: torch.device | None = None,
) -> dict[LabelSpace, Tensor]:
    """Return the class that the vote gives to each test picture, (Q,) int64, for every target. Every rank calls this.

    Takes features of train and test pictures, which may lie on another device than `device`, which computes. The
    neighbours of a label that some train pictures lack are those of the others. `bank_at_once` is that of `nearest`.
    """
    device = bank_NC.device if device is None else device
    labels: list[tuple[Tensor, Tensor | None, int]] = []
    for target in targets.values():
        chosen_N = None if target.is_in_all else (target.train_N != NO_LABEL).to(bank_NC.device)
        labels.append((target.train_N.to(device), chosen_N, target.num_classes))
    is_shared = any(chosen_N is None for _, chosen_N, _ in labels)

    def predict(chunk_BC: Tensor) -> Tensor:
        queries_BC = chunk_BC.to(device)

        def neighbours(chosen_N: Tensor | None) -> tuple[Tensor, Tensor]:
            return nearest(
                bank_NC, queries_BC, num_neighbors=NUM_NEIGHBORS, bank_at_once=bank_at_once, chosen_N=chosen_N
            )

        shared = neighbours(None) if is_shared else None
        votes = []
        for label_N, chosen_N, num_classes in labels:
            found = shared if chosen_N is None else neighbours(chosen_N)
            assert found is not None
            parts = zip(*(torch.split(each_BR, _QUERIES_AT_ONCE) for each_BR in found), strict=True)
            votes.append(
                torch.cat([vote(cosine_BR, label_N[row_BR], num_classes=num_classes) for cosine_BR, row_BR in parts])
            )
        return torch.stack(votes, dim=1)

    with torch.no_grad():
        predicted_QL = shared_rows(predict, queries_QC, chunk_size=chunk_size)
    return dict(zip(targets, predicted_QL.unbind(1), strict=True))


def knn_accuracies(
    bank_NC: Tensor, queries_QC: Tensor, targets: Mapping[LabelSpace, Target], *, chunk_size: int = _QUERIES_AT_ONCE
) -> dict[LabelSpace, float]:
    """Return the test accuracy of every target, from features of train and test pictures. Every rank calls this.

    An accuracy is nan if features are not finite.
    """
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
    without_views: FrozenFeatures | None = None,
) -> dict[LabelSpace, KNNProbe]:
    """Measure kNN accuracy for every target, from pooled features of pictures without views.

    The encoder stays unchanged. `other_draws` are the test pictures under other overlays. `without_views` may have
    the features of `encoder` from another probe. Every rank calls this with the same arguments.
    """
    accuracies: dict[LabelSpace, list[float]] = {name: [] for name in targets}
    predicted: dict[LabelSpace, Tensor] = {}
    without_views = without_views or FrozenFeatures(encoder, device=device)
    with frozen(encoder):
        bank_NC = without_views.pooled(train)
        is_whole = train.streamed is None and bank_NC.device.type == device.type
        chunk_size, bank_at_once = (_QUERIES_AT_ONCE, None) if is_whole else (_QUERIES_OF_BANK, _BANK_AT_ONCE)
        for pictures in (test, *other_draws):
            queries_QC = without_views.pooled(pictures)
            classes = knn_classes(
                bank_NC, queries_QC, targets, chunk_size=chunk_size, bank_at_once=bank_at_once, device=device
            )
            for name, class_Q in classes.items():
                accuracies[name].append(finite_accuracy(class_Q, pictures.labels(name), name=name))
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
