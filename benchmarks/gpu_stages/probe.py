"""Measure the parts of a probe: views and features of a frozen encoder, and the fit and kNN on features in memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

import torch
from torch import Tensor

from benchmarks.gpu_stages.checks import RECIPES, batch_of, config_of
from benchmarks.gpu_stages.session import Outcome, Setting, Stage, Task
from benchmarks.record import rounded
from data_pipeline.core.pixels import from_bytes
from trainer.modules import build_modules
from trainer.probes.features import frozen
from trainer.probes.knn import knn_classes
from trainer.probes.linear import PROBE_VIEW, ProbeConfig, Target, epoch_rows, fit_linear_probe, stored_batches

_NUM_CALLS: Final = 10  # between two waits for the GPU


def tasks(setting: Setting) -> Mapping[str, Task]:
    """Return the measurement, with as many samples and features as C+Digits gives with a ResNet-18."""
    sizes = (64, 16, 8, 4) if setting.is_tiny else (50_000, 10_000, 8_192, 512)
    run = partial(measure_probe, setting, *sizes, num_epochs=2 if setting.is_tiny else ProbeConfig().num_epochs)
    return {
        **{
            f"views and features, {each}": Task(partial(measure_inputs, setting, each), needs_seconds=20)
            for each in RECIPES
        },
        f"{sizes[0]} x {sizes[2]}": Task(run, needs_seconds=60),
    }


def measure_inputs(setting: Setting, recipe: str) -> Outcome:
    """Return the samples a second of a recipe's views and of its encoder's features, without gradients.

    In float32, as probes compute them, and in bfloat16, which would be faster.
    """
    config = config_of(setting, recipe, "channels_last=true")
    modules = build_modules(config).to(setting.device)
    batch = batch_of(config, step=0, device=setting.device)
    pictures_BCHW = from_bytes(batch.inputs_a)
    rates = {}
    with frozen(modules.encoder, modules.view_policy):
        keys = batch.draw_keys(seed=config.seed, view=PROBE_VIEW)
        parts: dict[str, Callable[[], object]] = {
            "views": lambda: modules.view_policy(pictures_BCHW, keys),
            "features": lambda: modules.encoder.features(pictures_BCHW),
        }
        for precision, dtype in {"float32": torch.float32, "bfloat16": torch.bfloat16}.items():
            with torch.autocast(setting.device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
                for name, run in parts.items():
                    rates[f"{name}_{precision}"] = rounded(len(pictures_BCHW) / _seconds_of_one(run, setting))
    return Outcome({"batch_size": len(pictures_BCHW), "samples_per_second": rates})


def _seconds_of_one(run: Callable[[], object], setting: Setting) -> float:
    """Return the median seconds of a call, each of which is waited for."""
    num = 1 if setting.is_tiny else _NUM_CALLS
    found = []
    for _ in range(num + 2):
        setting.wait()
        start = time.perf_counter()
        for _ in range(num):
            run()
        setting.wait()
        found.append((time.perf_counter() - start) / num)
    return statistics.median(found[2:])


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
    vote = partial(knn_classes, train_NF[:, :num_pooled].contiguous(), test_MF[:, :num_pooled].contiguous(), targets)
    return Outcome(
        {
            "seconds_linear": rounded(linear),
            "microseconds_a_step": rounded(1e6 * linear / num_steps),
            "seconds_knn": rounded(seconds(vote)),
            "peak_bytes": setting.peak_bytes or None,
        }
    )


STAGE = Stage("probe", tasks)
