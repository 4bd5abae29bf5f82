"""Summarise what a device does in training steps, from torch's profiler: numbers only, no trace files."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_stages.checks import RECIPES, batch_of, config_of
from benchmarks.gpu_stages.session import Outcome, Setting, Stage, Task
from benchmarks.record import rounded
from trainer.build import build_training

_NUM_KERNELS: Final = 20
_MAX_NAME: Final = 120  # characters of a kernel's name
_HOW: Final = {"recorded": "step", "eager": "false", "compiled and recorded": "both"}
_LAUNCHES: Final = ("cudaLaunch", "cuLaunch", "cudaGraphLaunch", "cudaMemcpyAsync", "cudaMemsetAsync")


@dataclass(frozen=True)
class Kernel:
    """A kernel, a copy or a fill on the device: its name, and when it began and ended, in microseconds."""

    name: str
    begin: float
    end: float


@dataclass(frozen=True)
class Trace:
    """The kernels of some steps, and the names of the calls by which the host launched them; a recorded step is one."""

    kernels: Sequence[Kernel]
    launches: Sequence[str]


def trace_steps(setting: Setting, step: Callable[[], object], *, num_steps: int) -> Trace:
    """Return the trace of some steps. On a CPU, the operations stand for kernels.

    It is empty if the profiler may not see the GPU.
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
    launches = [event.name for event in events if event.device_type.name == "CPU"]
    return Trace(kernels, [name for name in launches if name.startswith(_LAUNCHES)])


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


def summary(trace: Trace, *, num_steps: int) -> dict[str, Any]:
    """Return the kernels that take most of the time, and the share of the time in which none ran.

    Raises `RuntimeError` if the trace has no kernel.
    """
    if not trace.kernels:
        raise RuntimeError("torch's profiler saw no kernel; check that this user may profile the GPU")
    seconds: defaultdict[str, list[float]] = defaultdict(list)
    for kernel in trace.kernels:
        seconds[kernel.name].append(kernel.end - kernel.begin)
    whole = sum(map(sum, seconds.values()))
    span = max(kernel.end for kernel in trace.kernels) - min(kernel.begin for kernel in trace.kernels)
    slowest = sorted(seconds, key=lambda name: -sum(seconds[name]))[:_NUM_KERNELS]
    return {
        "kernels_a_step": rounded(len(trace.kernels) / num_steps),
        "launches_a_step": rounded(len(trace.launches) / num_steps),
        "microseconds_a_step": rounded(span / num_steps),
        "idle_share": rounded(1 - busy_microseconds(trace.kernels) / span),
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
        f"{recipe}, {how}": Task(partial(measure, setting, recipe, compile_setting), needs_seconds=25)
        for how, compile_setting in _HOW.items()
        for recipe in RECIPES
    }


def measure(setting: Setting, recipe: str, compile_setting: str) -> Outcome:
    """Trace some steps of a recipe on one batch in memory."""
    num_warm_up, num_steps = (1, 1) if setting.is_tiny else (10, 5)
    form = ["precision=bfloat16", "channels_last=true", f"compile={compile_setting}"]
    config = config_of(setting, recipe, *form)
    training = build_training(config, num_samples=50_000, device=setting.device)
    batch = batch_of(config, step=0, device=setting.device)
    rates = training.learning_rates(0, num_steps=1)

    def step() -> None:
        training.step(batch, learning_rates=rates)

    for _ in range(num_warm_up):
        step()
    trace = trace_steps(setting, step, num_steps=num_steps)
    return Outcome(summary(trace, num_steps=num_steps))


STAGE = Stage("trace", tasks)
