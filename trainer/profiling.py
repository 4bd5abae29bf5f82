"""Measure the wall time of the stages of the training loop. Each moment belongs to one stage.

    read -> decode -> overlay -> transfer -> views -> forward -> backward -> optimizer;  communication, replay, other

"replay" is a recorded step as a whole (`trainer.recorded_step`), whose stages cannot be timed.

Code enters a `trainer.liveness.stage` around its work. The time of an inner stage does not count for the outer stage.

On the CPU, the clock times a stage. On a GPU, events in its stream time a stage, only in steps that are logged, so that
nothing waits. There, "read" is the time that the GPU waits for a batch. Communication in parallel to computation (DDP's
sums) counts only while the computation waits for it.
"""

from __future__ import annotations

import resource
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import get_args

import torch

from data_pipeline.core.batch import Batch
from trainer import liveness
from trainer.distributed.collectives import all_gather_rows, message_device
from trainer.liveness import Listener, Stage, stage

_NAMES: tuple[Stage, ...] = get_args(Stage)
_DATA = _NAMES[:4]
_BEFORE_BACKWARD = _NAMES[:6]
_RATIO_SAID = 1.3  # of a rank's time to that of the others, from which the log names it


@contextmanager
def untimed() -> Iterator[None]:
    """Let no clock time the stages inside: the events of a recorded step cannot be read."""
    clocks = [listener for listener in liveness.listeners if isinstance(listener, Clock)]
    for clock in clocks:
        liveness.listeners.remove(clock)
    try:
        yield
    finally:
        liveness.listeners.extend(clocks)


class Clock(Listener):
    """A clock for a loop over batches. `is_read` returns whether the clock will be read after a number of steps.

    `time_seconds` is all time since the clock was made. The other metrics leave out what is done while it is `paused`.
    """

    def __init__(
        self,
        *,
        device: torch.device | None = None,
        start_step: int = 0,
        is_read: Callable[[int], bool] = lambda num_done: True,
    ) -> None:
        self._is_cuda = device is not None and device.type == "cuda"
        self._is_read = is_read
        self._num_done = start_step
        self._started = self._last_reading = self._last = time.perf_counter()
        self._num_steps = 0
        self._stages: list[str] = ["other"]
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._marks: list[tuple[str, torch.cuda.Event]] = []
        self._is_split = not self._is_cuda

    def timed(self, stream: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches. Divides the waiting time for a batch among the stages that made it, by their seconds."""
        batches = iter(stream)
        liveness.listeners.append(self)
        try:
            while True:
                self._is_split = not self._is_cuda or self._is_read(self._num_done + 1)
                with stage("read"):
                    before = self._seconds["read"]
                    try:
                        batch = next(batches)
                    except StopIteration:
                        return
                self._share_out(batch, self._seconds["read"] - before)
                self._num_steps += 1
                self._num_done += 1
                yield batch
        finally:
            liveness.listeners.remove(self)

    def enter(self, stage: str) -> None:
        """Begin a stage. One that is not timed counts for the stage around it."""
        self._mark()
        self._stages.append(stage if stage in _NAMES else self._stages[-1])

    def leave(self) -> None:
        """End the innermost stage."""
        self._mark()
        self._stages.pop()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the time inside, which is not of the steps, such as that of an online probe.

        Waits for the GPU first, so that what was launched before counts for the steps.
        """
        if self._is_cuda:
            torch.cuda.synchronize()
        self._mark()
        self._read_marks()
        began = time.perf_counter()
        with untimed():
            yield
        now = time.perf_counter()
        self._last_reading += now - began
        self._last = now
        if self._is_cuda and self._is_split:
            self._mark()

    def read(self, *, num_samples: int) -> dict[str, float]:
        """Return the metrics since the last reading. `num_samples` is the global batch size. Fractions add up to 1.

        Only a recorded step has a fraction of "replay".
        """
        self._mark()
        self._read_marks()
        now = time.perf_counter()
        seconds = now - self._last_reading
        whole = sum(self._seconds.values()) or 1.0
        names = [name for name in _NAMES if name != "replay" or self._seconds[name]]
        fractions = {name: self._seconds[name] / whole for name in names}
        metrics = {
            "time_seconds": now - self._started,
            "perf/samples_per_second": self._num_steps * num_samples / seconds,
            "perf/data_wait_fraction": sum(fractions[name] for name in _DATA),
        }
        self._last_reading, self._num_steps = now, 0
        self._seconds.clear()
        return metrics | {f"perf/{name}_fraction": fraction for name, fraction in fractions.items()}

    def _mark(self) -> None:
        """Add the time since the last mark to the present stage."""
        if not self._is_cuda:
            now = time.perf_counter()
            self._seconds[self._stages[-1]] += now - self._last
            self._last = now
        elif self._is_split:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._marks.append((self._stages[-1], event))

    def _read_marks(self) -> None:
        if self._marks:
            self._marks[-1][1].synchronize()
            for (_, begun), (name, ended) in zip(self._marks, self._marks[1:], strict=False):
                self._seconds[name] += begun.elapsed_time(ended) / 1e3
            self._marks.clear()

    def _share_out(self, batch: Batch, waited: float) -> None:
        making = sum(batch.seconds.values())
        if not self._is_cuda and making > 0:
            self._seconds["read"] -= waited
            for name in _DATA:
                self._seconds[name] += waited * batch.seconds.get(name, 0.0) / making


def slowest(metrics: dict[str, float]) -> str:
    """Return the stage that takes most of the time in the metrics of `Clock.read`, such as "backward 52 %".

    Adds a rank that is much slower than the others, which `slowest_rank` finds.
    """
    name = max(_NAMES, key=lambda stage: metrics.get(f"perf/{stage}_fraction", 0.0))
    said = f"{name} {100 * metrics[f'perf/{name}_fraction']:.0f} %"
    if (ratio := metrics.get("perf/slowest_rank_ratio", 1.0)) < _RATIO_SAID:
        return said
    return f"{said}, rank {metrics['perf/slowest_rank']:.0f} takes {ratio:.1f} times as long as the others"


def slowest_rank(fractions: dict[str, float]) -> dict[str, float]:
    """Return the slowest of several ranks, and the ratio of its time to the mean of the others, as metrics.

    A rank's time is that of the stages up to the forward pass, without communication: from the backward pass on, it may
    wait for the others. `fractions` are the metrics of `Clock.read` of this rank. Every rank must call this at the same
    time.
    """
    own = sum(fractions[f"perf/{name}_fraction"] for name in _BEFORE_BACKWARD)
    times_W = all_gather_rows(torch.tensor([own], dtype=torch.float64, device=message_device()))
    if len(times_W) == 1:
        return {}
    slowest, number = times_W.max(0)
    others = (times_W.sum() - slowest) / (len(times_W) - 1)
    return {"perf/slowest_rank": float(number), "perf/slowest_rank_ratio": float(slowest / others)}


def memory_in_use(device: torch.device) -> dict[str, float]:
    """Return the largest memory of this process so far as metrics, in gigabytes of 10^9 bytes.

    On a GPU, also returns the largest memory of its tensors.
    """
    kibibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    metrics = {"memory/resident_gigabytes": kibibytes * 1024 / 1e9}
    if device.type == "cuda":
        metrics["memory/gpu_gigabytes"] = torch.cuda.max_memory_allocated(device) / 1e9
    return metrics
