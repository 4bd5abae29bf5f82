"""Fit and score both probes on the features of a frozen encoder: a linear probe, and a vote of nearest neighbours.

Guarantees: neither the encoder nor the view policy is changed, and no result depends on the number of ranks. The order
of an epoch, every online overlay and every view depend only on (config.seed, epoch, sample index). The global random
states of torch and numpy are not used.

Shapes: N samples, F features of the linear probe, C features of kNN.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.probes.features import FeatureEncoder, LabelSpace, Pictures, ViewFunction, encode, frozen
from trainer.probes.knn import knn_classes, neighbors_of
from trainer.probes.linear import (
    FeatureBatch,
    LinearHead,
    LinearResult,
    ProbeConfig,
    Target,
    accuracy,
    check_finite,
    check_ranks,
    drawn_batches,
    epoch_rows,
    fit_linear_probe,
)


@dataclass(frozen=True)
class Fitted:
    """Both probes of one label.

    linear: the result of the linear probe.
    num_neighbors: how many neighbours vote.
    predicted: by method, "linear" and "knn", the classes of the test samples, (N,) int64.
    head: of the linear probe.
    """

    target: Target
    linear: LinearResult
    knn_accuracy: float
    num_neighbors: int
    predicted: Mapping[str, Tensor]
    head: LinearHead


def fit(
    encoder: FeatureEncoder,
    *,
    view_policy: ViewFunction,
    train: Pictures,
    test: Pictures,
    targets: Mapping[LabelSpace, Target],
    config: ProbeConfig,
    device: torch.device,
) -> dict[LabelSpace, Fitted]:
    """Fit and score both probes for every target. Every rank calls this with the same arguments.

    kNN and the test of the linear probe see samples without views, which are encoded once. Overlays are drawn again in
    every epoch of a fit on views, as in training. Raises `UserError` for `batch_norm="train"` on several ranks, if a
    head diverges, or if features are not finite.
    """
    check_ranks(config)
    live = copy.deepcopy(encoder) if config.batch_norm == "train" else encoder
    with frozen(encoder, live, view_policy):
        test_features = encode(encoder.features_and_pooled, test, device=device)
        if config.views == "none" and live is encoder:
            train_features = encode(encoder.features_and_pooled, train, device=device)
            return fit_stored(train_features, test_features, targets=targets, config=config, device=device)
        [train_NC] = encode(lambda x_BCHW: encoder.features_and_pooled(x_BCHW)[1:], train, device=device)
        batches = drawn_batches(live, view_policy, train, labels=list(targets), config=config, device=device)

        def features_of_test() -> Tensor:
            if live is encoder:
                return test_features[0]
            return encode(lambda x_BCHW: live.features_and_pooled(x_BCHW)[:1], test, device=device)[0]

        return _fit(batches, features_of_test, train_NC.to(device), test_features[1], targets=targets, config=config)


def fit_stored(
    train: Sequence[Tensor],
    test: Sequence[Tensor],
    *,
    targets: Mapping[LabelSpace, Target],
    config: ProbeConfig,
    device: torch.device,
) -> dict[LabelSpace, Fitted]:
    """Fit and score both probes, as `fit` does, on the features (N, F) and pooled features (N, C) of both sets."""
    features_NF = train[0]
    labels = {space: target.train_N.to(device) for space, target in targets.items()}

    def batches(epoch: int) -> Iterator[FeatureBatch]:
        for row_B in epoch_rows(len(features_NF), epoch=epoch, config=config, device=features_NF.device):
            here_B = row_B.to(device)
            yield features_NF[row_B].to(device), {space: label_N[here_B] for space, label_N in labels.items()}

    return _fit(batches, lambda: test[0], train[1].to(device), test[1], targets=targets, config=config)


def _fit(
    batches: Callable[[int], Iterable[FeatureBatch]],
    features_of_test: Callable[[], Tensor],
    bank_NC: Tensor,
    queries_NC: Tensor,
    *,
    targets: Mapping[LabelSpace, Target],
    config: ProbeConfig,
) -> dict[LabelSpace, Fitted]:
    linear = fit_linear_probe(batches, test_features=features_of_test, targets=targets, config=config)
    neighbors = neighbors_of(targets, config.num_neighbors)
    fitted = {}
    for space, target in targets.items():
        knn_N = knn_classes(bank_NC, queries_NC, target, num_neighbors=neighbors[space])
        probe, of_knn = linear[space], check_finite(accuracy(knn_N, target.test_N), name=space)
        predicted = {"linear": probe.predicted_N, "knn": knn_N}
        fitted[space] = Fitted(target, probe.result, of_knn, neighbors[space], predicted, probe.head)
    return fitted
