"""Summarise what a device does in training steps, from torch's profiler: numbers only, no trace files."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_stages.session import Outcome, Setting, Stage, Task
from benchmarks.record import rounded
from configs import resolve_recipe
from data_pipeline.core.batch import Batch
from data_pipeline.core.sample import NO_LABEL
from trainer.build import build_training

_NUM_KERNELS: Final = 20
_MAX_NAME: Final = 120  # characters of a kernel's name
_RECIPES: Final = {"simclr:digits": "debug:image", "viewmaker:digits": "debug:viewmaker"}  # and their form in a dry run
_HOW: Final = {"recorded": "step", "plain": "false", "compiled and recorded": "both"}
_LAUNCHES: Final = ("cudaLaunch", "cuLaunch", "cudaGraphLaunch", "cudaMemcpyAsync", "cudaMemsetAsync")


@dataclass(frozen=True)
class Kernel:
    """A kernel, a copy or a fill on the device: its name, and when it began and ended, in microseconds."""

    name: str
    begin: float
    end: float


def trace_steps(setting: Setting, step: Callable[[], object], *, num_steps: int) -> tuple[list[Kernel], int]:
    """Return the kernels of some steps, and by how many calls the host launched them; a recorded step is one call.

    There are no kernels if the profiler may not see the GPU. On a CPU, they are the operations.
    """
    is_cuda = setting.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]
    setting.wait()
    with profile(activities=activities, acc_events=True) as profiler:
        for _ in range(num_steps):
            step()
        setting.wait()
    events = list(profiler.events() or ())
    kernels = [
        Kernel(event.name, event.time_range.start, event.time_range.end)
        for event in events
        if (event.device_type.name == "CUDA") == is_cuda and not event.is_user_annotation
    ]
    num_launches = sum(event.device_type.name == "CPU" and event.name.startswith(_LAUNCHES) for event in events)
    return kernels, num_launches


def busy_microseconds(kernels: Iterable[Kernel]) -> float:
    """Return the time in which at least one kernel ran.

    Examples:
        >>> busy_microseconds([Kernel("a", 0, 4), Kernel("b", 2, 5), Kernel("c", 8, 9)])
        6.0
    """
    busy, until = 0.0, float("-inf")
    for kernel in sorted(kernels, key=lambda each: each.begin):
        busy += max(0.0, kernel.end - max(kernel.begin, until))
        until = max(until, kernel.end)
    return busy


def summary(kernels: Sequence[Kernel], *, num_launches: int, num_steps: int) -> dict[str, Any]:
    """Return the kernels that take most of the time, and the share of the time in which none ran.

    Raises `RuntimeError` if there is no kernel.
    """
    if not kernels:
        raise RuntimeError("torch's profiler saw no kernel; check that this user may profile the GPU")
    seconds: defaultdict[str, list[float]] = defaultdict(list)
    for kernel in kernels:
        seconds[kernel.name].append(kernel.end - kernel.begin)
    whole = sum(map(sum, seconds.values()))
    span = max(kernel.end for kernel in kernels) - min(kernel.begin for kernel in kernels)
    slowest = sorted(seconds, key=lambda name: -sum(seconds[name]))[:_NUM_KERNELS]
    return {
        "kernels_a_step": rounded(len(kernels) / num_steps),
        "launches_a_step": rounded(num_launches / num_steps),
        "microseconds_a_step": rounded(span / num_steps),
        "idle_share": rounded(1 - busy_microseconds(kernels) / span),
        "slowest": [
            {
                "kernel": name[:_MAX_NAME],
                "share": rounded(sum(seconds[name]) / whole),
                "calls_a_step": rounded(len(seconds[name]) / num_steps),
                "microseconds_a_step": rounded(sum(seconds[name]) / num_steps),
            }
            for name in slowest
        ],
    }


def tasks(setting: Setting) -> Mapping[str, Task]:
    """Return the traces."""
    return {
        f"{recipe}, {how}": Task(partial(measure, setting, recipe, compiled), needs_seconds=25)
        for how, compiled in _HOW.items()
        for recipe in _RECIPES
    }


def measure(setting: Setting, recipe: str, compiled: str) -> Outcome:
    """Trace some steps of a recipe on one batch of noise."""
    num_warm_up, num_steps, size = (1, 1, 8) if setting.is_tiny else (10, 5, 256)
    form = ["precision=bfloat16", f"compile={compiled}"]
    config = resolve_recipe(_RECIPES[recipe] if setting.is_tiny else recipe, [f"global_batch_size={size}", *form])
    training = build_training(config, num_samples=50_000, device=setting.device)
    rates = training.learning_rates(0, num_steps=1)
    pictures = torch.randint(0, 256, (size, 3, 32, 32), dtype=torch.uint8)
    labels = dict.fromkeys(("base", "overlay"), torch.full((size,), NO_LABEL))
    batch = Batch(0, 0, torch.arange(size), pictures, pictures, None, None, labels).to(setting.device)

    def step() -> None:
        training.step(batch, learning_rates=rates)

    for _ in range(num_warm_up):
        step()
    kernels, num_launches = trace_steps(setting, step, num_steps=num_steps)
    return Outcome(summary(kernels, num_launches=num_launches, num_steps=num_steps))


STAGE: Final = Stage("trace", tasks)
