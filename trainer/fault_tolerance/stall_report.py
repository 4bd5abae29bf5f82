"""Reports of ranks that froze or died: one for each rank, and a summary of one sentence and a table.

Imports only the standard library, because `trainer.fault_tolerance.sidecar` imports it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

_PARSERS: dict[object, Callable[[str], Any]] = {"int": int, "float": float, "str": str}  # by annotation
# Frames of a rank that waits: in a collective, in a backward pass that sends gradients, or for its GPU.
_WAITS = re.compile(r"torch/distributed/|distributed/collectives|deepspeed/comm/|torch/cuda/|in _engine_run_backward")


@dataclass(frozen=True)
class RankReport:
    """The report of one rank: a file of "name: value" lines, followed by its stacks.

    Attributes:
        why: `silent`, `dead` (it was killed), `ended` (by an exception, or on request), or `asked` (it was well, but
            the sidecar of another rank raised the alarm).
        state: the state of the process, or how it ended.
        beats: the `beats` of `Pulse`; equal for ranks that are equally far.
        silent: seconds since its last sign of life.
        stacks: the Python stacks of all its threads and of its data workers, or why there are none.
        limit: the setting that a silent rank exceeded, such as "watchdog.limit_seconds=40".
    """

    rank: int
    host: str
    pid: int
    why: str
    state: str
    beats: int
    step: int
    doing: str
    silent: float
    shards: str
    stacks: str
    limit: str = ""

    def text(self) -> str:
        head = {name: value for name, value in vars(self).items() if name != "stacks"}
        return "".join(f"{name}: {value}\n" for name, value in head.items()) + "\n" + self.stacks

    @classmethod
    def parse(cls, text: str) -> RankReport:
        head, _, stacks = text.partition("\n\n")
        values = dict(line.split(": ", 1) for line in head.splitlines())
        names = {field.name: _PARSERS[field.type] for field in fields(cls) if field.name != "stacks"}
        return cls(stacks=stacks, **{name: parser(values[name]) for name, parser in names.items()})

    @property
    def waits_for_others(self) -> bool:
        """Return whether the main thread, the last thread of the first process, waits for other ranks."""
        threads = re.split(r"^(?=(?:Current thread|Thread) 0x)", self.stacks.partition("\nprocess ")[0], flags=re.M)
        return _WAITS.search(threads[-1]) is not None


def describe_culprits(reports: Sequence[RankReport], *, world_size: int) -> str:
    """Return a sentence that names the ranks that hold up the others, with the evidence and the setting to raise."""
    exceeded = sorted({report.limit for report in reports if report.why == "silent" and report.limit})
    advice = f"; if the run is only slow, raise {' and '.join(exceeded)}" if exceeded else ""
    return _culprits(reports, world_size=world_size) + advice


def _culprits(reports: Sequence[RankReport], *, world_size: int) -> str:
    missing = sorted(set(range(world_size)) - {report.rank for report in reports})
    no_report = f"; {_ranks(missing)} left no report" if missing else ""
    alive = [report for report in reports if report.why in {"silent", "asked"}]
    most = max((report.beats for report in alive), default=0)
    waiting = [report for report in alive if report.waits_for_others]
    signs = {
        "is": [report for report in reports if report.why == "dead"]
        or [report for report in alive if report.state.startswith("stopped")],
        "is behind the others:": [report for report in alive if report.beats < most],
        "does not wait for the others, which wait for it:": [
            report for report in alive if waiting and report not in waiting
        ],
    }
    for sign, culprits in signs.items():
        if culprits:
            named = [f"rank {report.rank} on {report.host} {sign} {_place(report)}" for report in culprits[:4]]
            more = f" and {len(culprits) - 4} more" if len(culprits) > 4 else ""
            return "; ".join(named) + more + no_report
    if world_size == 1:
        report = reports[0]
        return f"rank 0 on {report.host} shows no sign of life for {report.silent:.0f} s: {_place(report)}"
    if missing:
        return f"{_ranks(missing)} left no report, and the others wait: a host that died or cannot be reached"
    return "all ranks stand still, and none of them stands out; their stacks show where"


def _place(report: RankReport) -> str:
    reading = f", reading {report.shards}" if report.shards else ""
    return f"{report.state}, in step {report.step} ({report.doing}){reading}"


def merge(reports: Sequence[RankReport], *, world_size: int) -> str:
    """Return the text of RUN_DIR/stalled.txt: the summary, then the stacks of each rank."""
    return summary(reports, world_size=world_size) + "".join(
        f"\n=== rank {report.rank} on {report.host}, process {report.pid} ===\n{report.stacks.rstrip()}\n"
        for report in sorted(reports, key=lambda report: report.rank)
    )


def summary(reports: Sequence[RankReport], *, world_size: int) -> str:
    """Return the sentence of `describe_culprits`, and a table of the ranks."""
    header = ("rank", "host", "process", "found", "state", "step", "doing", "silent for", "open shards")
    by_rank = {report.rank: report for report in reports}
    rows = [header]
    for rank in range(world_size):
        if (one := by_rank.get(rank)) is None:
            rows.append((str(rank), "", "", "no report", "", "", "", "", ""))
        else:
            silent, shards = f"{one.silent:.1f} s", one.shards or "none"
            rows.append(
                (str(rank), one.host, str(one.pid), one.why, one.state, str(one.step), one.doing, silent, shards)
            )
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    table = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    written = time.strftime("%Y-%m-%d %H:%M:%S")
    return f"{describe_culprits(reports, world_size=world_size)}\n\n" + "\n".join(table) + f"\n\nwritten {written}\n"


def _ranks(numbers: Sequence[int]) -> str:
    named = ", ".join(map(str, numbers[:8])) + (" ..." if len(numbers) > 8 else "")
    return f"rank{'s' if len(numbers) > 1 else ''} {named}"
