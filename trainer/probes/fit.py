"""Fit and score both probes of a frozen encoder: the linear probe, and the vote of the nearest neighbours.

Guarantees: neither the encoder nor the view policy is changed. The order of an epoch, every online overlay and every
view depend only on (config.seed, epoch, sample index). The global random states of torch and numpy are not used.

Shapes: N samples, F features of the linear probe, C pooled channels.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.probes.features import FeatureEncoder, LabelSpace, Pictures, ViewFunction, encode, extract, frozen
from trainer.probes.knn import knn_classes
from trainer.probes.linear import (
    LinearProbe,
    ProbeConfig,
    Target,
    check_ranks,
    drawn_batches,
    fit_linear_probe,
    stored_batches,
)


@dataclass(frozen=True)
class Fitted:
    """Both probes of one label. `knn_N` are the classes that the vote gives to the test samples, (N,) int64."""

    target: Target
    linear: LinearProbe
    knn_N: Tensor


def fit(
    encoder: FeatureEncoder,
    *,
    view_policy: ViewFunction,
    train: Pictures,
    test: Pictures,
    targets: Mapping[LabelSpace, Target],
    config: ProbeConfig,
    device: torch.device,
    on_epoch: Callable[[int, Mapping[LabelSpace, float]], None] = lambda epoch, accuracies: None,
) -> dict[LabelSpace, Fitted]:
    """Fit and score both probes for every target. Every rank calls this with the same arguments.

    kNN and the test of the linear probe see samples without views, which are encoded once. Overlays are drawn again in
    every epoch of a fit on views, as in training. `on_epoch` is that of `fit_linear_probe`. Raises `UserError` for
    `batch_norm="train"` on several ranks, if a head diverges, or if features are not finite.
    """
    check_ranks(config)
    live = copy.deepcopy(encoder) if config.batch_norm == "train" else encoder
    with frozen(encoder, live, view_policy):
        test_NF, test_NC = encode(encoder, test, device=device)
        if config.views == "none" and live is encoder:
            train_NF, train_NC = encode(encoder, train, device=device)
            batches = stored_batches(train_NF, targets, config=config, device=device)
        else:
            train_NC = extract(lambda x_BCHW: encoder.features_and_pooled(x_BCHW)[1], train, device=device)
            batches = drawn_batches(live, view_policy, train, labels=list(targets), config=config, device=device)

        def test_features() -> Tensor:
            if live is encoder:
                return test_NF
            return extract(lambda x_BCHW: live.features_and_pooled(x_BCHW)[0], test, device=device)

        linear = fit_linear_probe(
            batches, test_features=test_features, targets=targets, config=config, on_epoch=on_epoch
        )
        knn = knn_classes(train_NC.to(device), test_NC, targets)
    return {space: Fitted(target, linear[space], knn[space]) for space, target in targets.items()}
