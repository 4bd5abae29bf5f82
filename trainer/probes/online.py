"""Probe the encoder during training: measure accuracies on some test samples at regular steps.

Input: the encoder in training, and some samples of the train and test set without views, which are chosen once. Output:
for each label the accuracy of kNN and of ridge regression, both on the same pooled features.

Invariant: no weight, gradient, running statistic, mode or random state of training changes.

Shapes: N bank pictures, M test pictures, C pooled channels, K classes.
"""

from __future__ import annotations

import logging
import math
import time

import torch
from torch import Tensor
from torch.nn import functional as F

from data_pipeline.core.sample import NO_LABEL
from trainer.data import DataConfig
from trainer.models.activation_checkpointing import buffers_untouched
from trainer.models.batch_norm import share_running_statistics
from trainer.models.encoder import Encoder
from trainer.probes.features import TRAIN_DRAW, Pictures, encode, frozen, read_some
from trainer.probes.knn import knn_classes, neighbors_of
from trainer.probes.linear import ProbeConfig, Target, accuracy, best_classes
from trainer.probes.targets import label_targets

logger = logging.getLogger(__name__)

RIDGE_PENALTY = 1e-3
_DEFAULT = ProbeConfig()


def ridge_predict(
    train_NC: Tensor, label_N: Tensor, test_MC: Tensor, *, num_classes: int, penalty: float = RIDGE_PENALTY
) -> Tensor:
    """Predict classes (M,) int64 by ridge regression of the one-hot classes on features and an intercept, in float64.

    Features are scaled so that the mean variance of their channels is 1, and `penalty` is relative to N. This is the
    linear head with the least squared error, in closed form. It needs no learning rate and no random draws, and is much
    faster than training a head. A class is negative if features are not finite, see `best_classes`.
    """
    train_NC, test_MC = train_NC.double(), test_MC.double()
    mean_C = train_NC.mean(0)
    scale = (train_NC - mean_C).square().mean().sqrt().clamp_min(1e-12)
    x_NC, x_MC = (train_NC - mean_C) / scale, (test_MC - mean_C) / scale
    y_NK = F.one_hot(label_N, num_classes).double()
    share_K = y_NK.mean(0)
    penalties_CC = penalty * torch.eye(x_NC.shape[1], dtype=torch.float64, device=x_NC.device)
    gram_CC = x_NC.T @ x_NC / len(x_NC) + penalties_CC
    # `solve_ex` does not check its result; for a check the host would wait. Features that are not finite must not end
    # the training.
    weight_CK = torch.linalg.solve_ex(gram_CC, x_NC.T @ (y_NK - share_K) / len(x_NC)).result
    score_MK: Tensor = x_MC @ weight_CK + share_K
    return best_classes(score_MK)


class OnlineProbe:
    """A probe of `encoder` on fixed samples; every rank calls it at the same steps.

    Each rank encodes its share of the samples, with the running statistics that a checkpoint would hold. So the
    accuracies of an encoder are the same on any number of ranks.
    """

    def __init__(
        self,
        encoder: Encoder,
        *,
        train: Pictures,
        test: Pictures,
        device: torch.device,
        dtype: torch.dtype,
        config: ProbeConfig = _DEFAULT,
    ) -> None:
        """Place the samples on the device.

        `dtype` is the type of the convolutions: bfloat16 by autocast, as in training. Of the config, labels and
        num_neighbors count. Raises `UserError` if train and test samples have different classes.
        """
        targets = label_targets(train, test, wanted=config.labels)
        self._encoder, self._device, self._dtype = encoder, device, dtype
        self._targets = {
            space: Target(target.train_N.to(device), target.test_N.to(device), num_classes=target.num_classes)
            for space, target in targets.items()
        }
        self._neighbors = neighbors_of(targets, config.num_neighbors)
        self._num_train = len(train)
        images = [each.images(torch.arange(len(each))) for each in (train, test)]
        self._images_NCHW = torch.cat(images).to(device)

    def __call__(self) -> dict[str, float]:
        """Return probe/LABEL/knn and probe/LABEL/ridge in [0, 1] for each label, and probe/seconds of this rank.

        Leaves out a label if features are not finite: they must not end the training.
        """
        started = time.perf_counter()
        encoder = self._encoder
        with buffers_untouched(encoder), frozen(encoder):
            # On copies, which are dropped: every rank encodes with the encoder that a checkpoint would hold.
            share_running_statistics(encoder)
            with torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=self._dtype == torch.bfloat16):
                [features] = encode(lambda x_BCHW: [encoder.pooled(x_BCHW)], self._images_NCHW, device=self._device)
            features = features.float()
            bank_NC, queries_MC = features[: self._num_train], features[self._num_train :]
            metrics: dict[str, float] = {}
            for space, target in self._targets.items():
                knn_M = knn_classes(bank_NC, queries_MC, target, num_neighbors=self._neighbors[space])
                in_N = target.train_N != NO_LABEL
                ridge_M = ridge_predict(bank_NC[in_N], target.train_N[in_N], queries_MC, num_classes=target.num_classes)
                metrics[f"probe/{space}/knn"] = accuracy(knn_M, target.test_N)
                metrics[f"probe/{space}/ridge"] = accuracy(ridge_M, target.test_N)
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        return finite | {"probe/seconds": time.perf_counter() - started}


def online_probe(
    config: ProbeConfig, encoder: Encoder, *, data: DataConfig, precision: str, device: torch.device
) -> OnlineProbe | None:
    """Return the online probe of a config, with its samples read; None if the config has none, or the data no label.

    Raises `UserError` if the samples cannot be read.
    """
    if config.online_every_steps is None:
        return None
    train = read_some(data.probed_dir, num=config.online_num_train, read=data, draw=TRAIN_DRAW)
    test = read_some(data.test_dir, num=config.online_num_test, read=data)
    if not set(train.manifest.labels) & set(test.manifest.labels):
        logger.warning(
            "%s and %s have no label in common, so there is nothing to probe during training; build them with one, or "
            "index their tars again with --label",
            data.probed_dir,
            data.test_dir,
        )
        return None
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    return OnlineProbe(encoder, train=train, test=test, device=device, dtype=dtype, config=config)
