"""Fit and score both probes on the features of a frozen encoder: a linear probe, and a vote of nearest neighbours.

Guarantees: neither the encoder nor the view policy is changed, and no result depends on the number of ranks. The order
of an epoch, every online overlay and every view depend only on (config.seed, epoch, sample index). The global random
states of torch and numpy are not used.

Shapes: N samples, F features of the linear probe, C features of kNN.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.probes.features import FeatureEncoder, LabelSpace, Pictures, ViewFunction, encode, extract, frozen
from trainer.probes.knn import knn_classes, neighbors_of
from trainer.probes.linear import (
    FeatureBatch,
    LinearProbe,
    ProbeConfig,
    Target,
    check_ranks,
    drawn_batches,
    finite_accuracy,
    fit_linear_probe,
    stored_batches,
)


@dataclass(frozen=True)
class Fitted:
    """Both probes of one label.

    knn_N: the classes that the vote gives to the test samples, (N,) int64.
    knn_accuracy: their accuracy.
    num_neighbors: how many neighbours vote.
    """

    target: Target
    linear: LinearProbe
    knn_N: Tensor
    knn_accuracy: float
    num_neighbors: int


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
        test_features = encode(encoder, test, device=device)
        if config.views == "none" and live is encoder:
            train_features = encode(encoder, train, device=device)
            return fit_stored(train_features, test_features, targets=targets, config=config, device=device)
        train_NC = extract(lambda x_BCHW: encoder.features_and_pooled(x_BCHW)[1], train, device=device)
        batches = drawn_batches(live, view_policy, train, labels=list(targets), config=config, device=device)

        def features_of_test() -> Tensor:
            if live is encoder:
                return test_features[0]
            return extract(lambda x_BCHW: live.features_and_pooled(x_BCHW)[0], test, device=device)

        return _fit(batches, features_of_test, train_NC.to(device), test_features[1], targets=targets, config=config)


def fit_stored(
    train: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    *,
    targets: Mapping[LabelSpace, Target],
    config: ProbeConfig,
    device: torch.device,
) -> dict[LabelSpace, Fitted]:
    """Fit and score both probes, as `fit` does, on the features (N, F) and pooled features (N, C) of both sets."""
    batches = stored_batches(train[0], targets, config=config, device=device)
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
        class_N = knn_classes(bank_NC, queries_NC, target, num_neighbors=neighbors[space])
        knn_accuracy = finite_accuracy(class_N, target.test_N, name=space)
        fitted[space] = Fitted(target, linear[space], class_N, knn_accuracy, neighbors[space])
    return fitted
