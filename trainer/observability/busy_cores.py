"""Notice that other programs keep the cores busy that this training would compute on.

Each operation of torch waits for its slowest thread. A thread without a core of its own then delays all others, and a
step can take many times as long as with fewer threads.
"""

from __future__ import annotations

import time
from pathlib import Path

from data_pipeline.core.system import PROC

_SECONDS = 0.05
_IDLE = (3, 4)  # fields of a line of PROC/stat: idle, and waiting for a disk


def busy_cores(stat: Path = PROC / "stat") -> float:
    """Return how many cores of this machine are busy while this process sleeps for a moment; 0 if that is unknown."""
    before = _ticks(stat)
    time.sleep(_SECONDS)
    after = _ticks(stat)
    if len(before) != len(after):
        return 0.0
    shares = [
        1 - (idle - idle_before) / max(1, total - total_before)
        for (total_before, idle_before), (total, idle) in zip(before, after, strict=True)
        if total > total_before
    ]
    return sum(shares)


def _ticks(stat: Path) -> list[tuple[int, int]]:
    """Return for each core all ticks since the machine started, and those in which it did nothing."""
    try:
        lines = [line.split() for line in stat.read_text(encoding="utf-8").splitlines()]
        fields = [list(map(int, words[1:])) for words in lines if words[0].startswith("cpu") and words[0] != "cpu"]
        return [(sum(ticks), sum(ticks[number] for number in _IDLE)) for ticks in fields]
    except (OSError, ValueError, IndexError):
        return []


def busy_hint(num_threads: int, *, cpus: int, num_busy: float) -> str:
    """Return a warning if fewer cores are free than threads compute; an empty text if there are enough.

    Examples:
        >>> busy_hint(4, cpus=4, num_busy=2.9)
        '2.9 of 4 cores are busy with other work, and training computes with 4 threads, which wait for each other; \
OMP_NUM_THREADS=1 in front of the command may be many times as fast'
        >>> busy_hint(4, cpus=8, num_busy=2.9), busy_hint(1, cpus=2, num_busy=2.0)
        ('', '')
    """
    free = max(1, round(cpus - num_busy))
    if num_threads <= free:
        return ""
    return (
        f"{num_busy:.1f} of {cpus} cores are busy with other work, and training computes with {num_threads} threads, "
        f"which wait for each other; OMP_NUM_THREADS={free} in front of the command may be many times as fast"
    )
