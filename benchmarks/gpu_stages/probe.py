"""Measure the parts of a probe on features in memory: the fit and kNN."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu_stages.session import Outcome, Setting, Stage, Task
from benchmarks.record import rounded
from trainer.probes.knn import knn_classes, neighbors_of
from trainer.probes.linear import ProbeConfig, Target, epoch_rows, fit_linear_probe, stored_batches


def tasks(setting: Setting) -> Mapping[str, Task]:
    """Return the measurement, with as many samples and features as C+Digits gives with a ResNet-18."""
    sizes = (64, 16, 8, 4) if setting.is_tiny else (50_000, 10_000, 8_192, 512)
    run = partial(measure_probe, setting, *sizes, num_epochs=2 if setting.is_tiny else ProbeConfig().num_epochs)
    return {f"{sizes[0]} x {sizes[2]}": Task(run, needs_seconds=60)}


def measure_probe(
    setting: Setting, num_train: int, num_test: int, num_features: int, num_pooled: int, *, num_epochs: int
) -> Outcome:
    """Return the seconds of a linear probe and of kNN, both of two labels of ten classes, on noise."""
    device, config = setting.device, ProbeConfig(views="none", num_epochs=num_epochs)
    train_NF, test_MF = (torch.randn(num, num_features, device=device) for num in (num_train, num_test))

    def classes(num: int) -> Tensor:
        return torch.randint(0, 10, (num,), device=device)

    targets = {name: Target(classes(num_train), classes(num_test), num_classes=10) for name in ("base", "overlay")}

    batches = stored_batches(train_NF, targets, config=config, device=device)

    def seconds(run: Callable[[], object]) -> float:
        setting.wait()
        start = time.perf_counter()
        run()
        setting.wait()
        return time.perf_counter() - start

    fit = partial(fit_linear_probe, batches, test_features=lambda: test_MF, targets=targets, config=config)
    linear, num_steps = seconds(fit), num_epochs * len(epoch_rows(num_train, epoch=0, config=config))
    bank_NC, queries_MC = (features_NF[:, :num_pooled].contiguous() for features_NF in (train_NF, test_MF))
    neighbors = neighbors_of(targets, config.num_neighbors)

    def vote() -> None:
        for name, target in targets.items():
            knn_classes(bank_NC, queries_MC, target, num_neighbors=neighbors[name])

    return Outcome(
        {
            "seconds_linear": rounded(linear),
            "microseconds_a_step": rounded(1e6 * linear / num_steps),
            "seconds_knn": rounded(seconds(vote)),
            "peak_bytes": setting.peak_bytes or None,
        }
    )


STAGE = Stage("probe", tasks)
