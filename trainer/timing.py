"""Where the wall time of the training loop goes."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from data_pipeline.sample import Batch


class Clock:
    """Splits the loop's wall time into waiting for data and the rest, since the last reading."""

    def __init__(self) -> None:
        self._started = self._last = time.perf_counter()
        self._waited, self._num_steps = 0.0, 0

    @property
    def total_seconds(self) -> float:
        return time.perf_counter() - self._started

    def timed(self, stream: Iterable[Batch]) -> Iterator[Batch]:
        batches = iter(stream)
        while True:
            asked = time.perf_counter()
            try:
                batch = next(batches)
            except StopIteration:
                return
            self._waited += time.perf_counter() - asked
            self._num_steps += 1
            yield batch

    def read(self, *, num_samples: int) -> dict[str, float]:
        """Metrics since the last reading; `num_samples` is the size of a global batch."""
        now = time.perf_counter()
        seconds = now - self._last
        metrics = {
            "time_seconds": now - self._started,
            "perf/samples_per_second": self._num_steps * num_samples / seconds,
            "perf/data_wait_fraction": self._waited / seconds,
        }
        self._last, self._waited, self._num_steps = now, 0.0, 0
        return metrics
