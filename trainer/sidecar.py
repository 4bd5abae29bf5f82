"""The process that watches one rank of a training run, and tells why when it stands still.

`trainer.watchdog` starts it beside each rank, as a script that imports nothing but the standard library: a few
megabytes that sleep. Comes in: a page of memory in which the rank counts its signs of life. Goes out: nothing, unless a
rank stops counting or dies; then RUN_DIR/stalled/START/rank_0003.txt from every rank, joined into RUN_DIR/stalled.txt
by the first of them, and the end of the ranks. What may never happen: a sidecar that outlives its rank, or one that is
held up by the file system that holds up its rank.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import re
import select
import signal
import struct
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

DUMP_SIGNAL = signal.SIGRTMIN + 5  # nobody's: jobs are warned with USR1, USR2 and TERM
COLLECT_SECONDS = 6.0  # that the ranks have to report once one has raised the alarm
MERGE_SECONDS = 3.0  # and the first of them to join the reports
DUMP_SECONDS = 2.0  # that a process has to write down its stacks
CHILDREN_SECONDS = 3.0  # and all those that a rank has forked
ALARM_SECONDS = 2.0  # in which the alarm of another rank is seen that met the same trouble
ENDING_SECONDS = 5.0  # that a rank with an exception has to print it and leave
ENDING = (signal.SIGTERM, signal.SIGHUP)  # by which a process is asked to end
LONGEST_INTERVALS = 5  # silence is no stall before it is so many times the longest that was none

_NUMBERS = struct.Struct("<Qqd?")  # beats, step, patience in seconds, closed
_SIZES = {"doing": 64, "shards": 1024, "ending": 1024}  # bytes of text behind the numbers
MEMORY_BYTES = 4096

_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "in a system call that cannot be interrupted",
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "Z": "dead",
}
# Where a rank stands that waits for the others: in a collective, in a backward that sends gradients, for its GPU.
_WAITS = re.compile(r"torch/distributed/|distributed/collectives|deepspeed/comm/|torch/cuda/|in _engine_run_backward")


@dataclass(frozen=True)
class Pulse:
    """What a rank last said of itself. `patience` is how long it asked to be left alone, in seconds; 0: not at all.

    `ending` says how it left, where `closed`: empty after the last step, else its exception.
    """

    beats: int
    step: int
    patience: float
    closed: bool
    doing: str
    shards: str
    ending: str


def write_numbers(memory: mmap.mmap, *, beats: int, step: int, patience: float, closed: bool = False) -> None:
    _NUMBERS.pack_into(memory, 0, beats, step, patience, closed)


def write_text(memory: mmap.mmap, **texts: str) -> None:
    """`doing`, `shards` or `ending`, cut to the room that there is."""
    start = _NUMBERS.size
    for name, size in _SIZES.items():
        if name in texts:
            memory[start : start + size] = texts[name].encode()[:size].ljust(size, b"\0")
        start += size


def read_pulse(memory: mmap.mmap) -> Pulse:
    beats, step, patience, closed = _NUMBERS.unpack_from(memory, 0)
    start, texts = _NUMBERS.size, {}
    for name, size in _SIZES.items():
        texts[name] = memory[start : start + size].rstrip(b"\0").decode(errors="ignore")
        start += size
    return Pulse(beats, step, patience, closed, **texts)


class Silence:
    """How long a rank has shown no sign of life, and how long it may.

    Only time in which the sidecar itself ran is counted: where a whole job is suspended, nobody is late afterwards.
    """

    def __init__(self, *, limit_seconds: float) -> None:
        self._limit_seconds = limit_seconds
        self._longest = 0.0
        self._last: Pulse | None = None
        self.seconds = 0.0

    def is_too_long(self, pulse: Pulse, *, elapsed: float) -> bool:
        """To be called every moment or so, with the seconds since the last call."""
        before, self._last = self._last, pulse
        self.seconds += elapsed
        if before is None or pulse.beats != before.beats:
            if before is not None and not before.patience and not pulse.patience:
                self._longest = max(self._longest, self.seconds)
            self.seconds = 0.0
        return self.seconds > self.limit(pulse)

    def limit(self, pulse: Pulse) -> float:
        return max(self._limit_seconds, LONGEST_INTERVALS * self._longest, pulse.patience)


@dataclass(frozen=True)
class RankReport:
    """What is known of one rank; a file of "name: value" lines and its stacks.

    Attributes:
        why: `silent`, `dead` (it was killed), `ended` (by an exception, or because it was asked to), or `asked`: it was
            well, but another rank raised the alarm.
        state: what the system says of the process, or how it ended.
        beats: how often it has shown a sign of life since the start; the same for all ranks that are equally far.
        silent: seconds since the last of them.
        stacks: the Python stacks of all its threads and of the processes that read for it, or why there are none.
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

    def text(self) -> str:
        head = {name: value for name, value in vars(self).items() if name != "stacks"}
        return "".join(f"{name}: {value}\n" for name, value in head.items()) + "\n" + self.stacks

    @classmethod
    def parse(cls, text: str) -> RankReport:
        head, _, stacks = text.partition("\n\n")
        values = dict(line.split(": ", 1) for line in head.splitlines())
        return cls(
            rank=int(values["rank"]),
            host=values["host"],
            pid=int(values["pid"]),
            why=values["why"],
            state=values["state"],
            beats=int(values["beats"]),
            step=int(values["step"]),
            doing=values["doing"],
            silent=float(values["silent"]),
            shards=values["shards"],
            stacks=stacks,
        )

    @property
    def waits_for_others(self) -> bool:
        """Whether the main thread, the last of the first process's stacks, stands where ranks wait for each other."""
        threads = re.split(r"^(?=(?:Current thread|Thread) 0x)", self.stacks.partition("\nprocess ")[0], flags=re.M)
        return _WAITS.search(threads[-1]) is not None


def name_the_culprits(reports: Sequence[RankReport], *, world_size: int) -> str:
    """One sentence: which ranks hold up the others, and how that is known."""
    missing = sorted(set(range(world_size)) - {report.rank for report in reports})
    no_report = f"; {_ranks(missing)} left no report" if missing else ""
    alive = [report for report in reports if report.why in {"silent", "asked"}]
    most = max((report.beats for report in alive), default=0)
    waiting = [report for report in alive if report.waits_for_others]
    signs = {
        "is": [report for report in reports if report.why == "dead"]
        or [report for report in alive if report.state.startswith("stopped")],
        "is behind the others:": [report for report in alive if report.beats < most],
        "does not wait for the others, as they do for it:": [
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
        return f"{_ranks(missing)} left no report, and the others wait: a host that died, or that others cannot reach"
    return "all ranks stand still, and none of them stands out; their stacks say where"


def _place(report: RankReport) -> str:
    reading = f", reading {report.shards}" if report.shards else ""
    return f"{report.state}, in step {report.step} ({report.doing}){reading}"


def merge(reports: Sequence[RankReport], *, world_size: int) -> str:
    """RUN_DIR/stalled.txt: the sentence, a table of the ranks, and the stacks of each."""
    return summary(reports, world_size=world_size) + "".join(
        f"\n=== rank {report.rank} on {report.host}, process {report.pid} ===\n{report.stacks.rstrip()}\n"
        for report in sorted(reports, key=lambda report: report.rank)
    )


def summary(reports: Sequence[RankReport], *, world_size: int) -> str:
    header = ("rank", "host", "process", "found", "state", "step", "doing", "silent for", "open shards")
    rows = [header]
    by_rank = {report.rank: report for report in reports}
    for rank in range(world_size):
        report = by_rank.get(rank)
        if report is None:
            rows.append((str(rank), "", "", "no report", "", "", "", "", ""))
            continue
        rows.append(
            (
                str(rank),
                report.host,
                str(report.pid),
                report.why,
                report.state,
                str(report.step),
                report.doing,
                f"{report.silent:.1f} s",
                report.shards or "none",
            )
        )
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    table = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    written = time.strftime("%Y-%m-%d %H:%M:%S")
    return f"{name_the_culprits(reports, world_size=world_size)}\n\n" + "\n".join(table) + f"\n\nwritten {written}\n"


def _ranks(numbers: Sequence[int]) -> str:
    named = ", ".join(map(str, numbers[:8])) + (" ..." if len(numbers) > 8 else "")
    return f"rank{'s' if len(numbers) > 1 else ''} {named}"


class Rank:
    """The watched process, which is the parent of this one."""

    def __init__(self, pid: int, *, stacks: int) -> None:
        self.pid, self._stacks = pid, stacks
        try:
            self.ends: int | None = os.pidfd_open(pid)
        except OSError:  # a kernel before 5.3, or a process that is dead already
            self.ends = None

    @property
    def is_alive(self) -> bool:
        return os.getppid() == self.pid

    def send(self, number: int) -> None:
        if self.is_alive:  # otherwise the number may be another's by now
            os.kill(self.pid, number)

    def state(self) -> str:
        return _state(self.pid)

    def exit_signal(self) -> int:
        """The signal that ended it; 0 if none did, or where its parent has taken note of the end before us."""
        fields = _stat(self.pid)
        return int(fields[-1]) & 0x7F if fields and fields[0] == "Z" else 0

    def last_words(self) -> str:
        """The stacks that it left by itself, because it was asked to end."""
        return os.pread(self._stacks, os.fstat(self._stacks).st_size, 0).decode(errors="replace")

    def dump(self) -> str:
        """The Python stacks of all its threads, and of the processes that it forked, such as data workers.

        faulthandler answers without Python's lock. A stopped process answers when it goes on, so it is woken for that
        moment.
        """
        state = self.state()
        text = self._dump_one(self.pid, was_stopped=state == _STATES["T"])
        parts = [text or self.last_words() or f"no stacks: the process is {state}, and did not answer\n"]
        deadline = time.monotonic() + CHILDREN_SECONDS
        for child in _forks(self.pid):
            if time.monotonic() < deadline and _catches(child, DUMP_SIGNAL):
                state = _state(child)
                text = self._dump_one(child, was_stopped=state == _STATES["T"])
                parts.append(f"process {child}, started by {self.pid}: {state}\n{text or 'no stacks'}")
        return "\n".join(parts)

    def _dump_one(self, pid: int, *, was_stopped: bool) -> str:
        start = size = os.fstat(self._stacks).st_size
        try:
            os.kill(pid, DUMP_SIGNAL)
            if was_stopped:
                os.kill(pid, signal.SIGCONT)
            deadline = time.monotonic() + DUMP_SECONDS
            while time.monotonic() < deadline:
                time.sleep(0.1)
                before, size = size, os.fstat(self._stacks).st_size
                if start < before == size:
                    break
            if was_stopped:
                os.kill(pid, signal.SIGSTOP)
        except ProcessLookupError:
            pass
        return os.pread(self._stacks, size - start, start).decode(errors="replace")


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; none where there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _state(pid: int) -> str:
    fields = _stat(pid)
    return _STATES.get(fields[0], fields[0]) if fields else "dead"


def _forks(pid: int) -> list[int]:
    """The children of a process that run the same program."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        fields = _stat(int(path.name))
        if fields and int(fields[1]) == pid:
            with contextlib.suppress(OSError):  # one that ended meanwhile, or is somebody else's
                if (path / "exe").samefile(f"/proc/{pid}/exe"):
                    found.append(int(path.name))
    return sorted(found)


def _catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal, so that it can be sent without ending it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = re.search(r"^SigCgt:\s*(\w+)", status, flags=re.M)
    return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)


class Sidecar:
    """Watches until the rank has closed its watchdog or is dead, or until a rank has to be reported.

    Everything that touches the run directory is done in threads, for which nothing here waits longer than it may.
    """

    def __init__(self, task: Mapping[str, str | int | float]) -> None:
        self._number, self._world_size = int(task["rank"]), int(task["world_size"])
        self._directory, self._merged = Path(str(task["directory"])), Path(str(task["merged"]))
        self._memory = mmap.mmap(int(task["memory"]), MEMORY_BYTES)
        self._rank = Rank(int(task["pid"]), stacks=int(task["stacks"]))
        self._control = int(task["control"])
        self._silence = Silence(limit_seconds=float(task["limit_seconds"]))
        self._tick = min(1.0, float(task["limit_seconds"]) / 10)
        self._was_asked_to_end = False
        self._end = _STATES["Z"]
        self._alarm = threading.Event()

    def run(self) -> None:
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._note_the_end)  # it comes to all processes of a job; the rank decides
        threading.Thread(target=self._look_for_the_alarm, daemon=True).start()
        why = self._watch()
        if not why:
            return
        threading.Thread(target=self._raise_the_alarm, daemon=True).start()
        self._report(why)
        if why == "ended":
            deadline = time.monotonic() + ENDING_SECONDS
            while self._rank.is_alive and time.monotonic() < deadline:
                time.sleep(self._tick)
        self._rank.send(signal.SIGKILL)

    def _watch(self) -> str:
        """Returns why there is to be a report; empty: there is none."""
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        if self._rank.ends is not None:
            poll.register(self._rank.ends, select.POLLIN)
        before = time.monotonic()
        while True:
            poll.poll(1000 * self._tick)
            pulse = read_pulse(self._memory)
            if pulse.closed:
                return "ended" if pulse.ending and self._alarm.wait(ALARM_SECONDS) else ""
            if not self._rank.is_alive:
                return self._judge_death()
            if self._alarm.is_set():
                return "asked"
            now = time.monotonic()
            elapsed, before = min(now - before, 2 * self._tick), now
            if self._silence.is_too_long(pulse, elapsed=elapsed) and self._rank.state() != _STATES["t"]:
                return "silent"

    def _judge_death(self) -> str:
        number = self._rank.exit_signal()
        if self._rank.last_words() or self._was_asked_to_end or number in ENDING:
            self._end = "dead (it was asked to end)"
        else:
            self._end = f"dead ({_signal_name(number)})"
            return "dead"
        return "ended" if self._alarm.wait(ALARM_SECONDS) else ""

    def _report(self, why: str) -> None:
        pulse, state = read_pulse(self._memory), self._rank.state()
        if not self._rank.is_alive:
            state = self._end
        if pulse.ending:
            stacks = f"no stacks: it was ending with\n{pulse.ending}\n"
        elif not self._rank.is_alive:
            stacks = self._rank.last_words() or "no stacks: the process is gone\n"
        else:
            if state == _STATES["T"]:
                time.sleep(DUMP_SECONDS)  # once it is woken, the others may go on from where they wait for it
            stacks = self._rank.dump()
        own = RankReport(
            rank=self._number,
            host=os.uname().nodename,
            pid=self._rank.pid,
            why=why,
            state=state,
            beats=pulse.beats,
            step=pulse.step,
            doing=" ".join(pulse.doing.split()),
            silent=round(self._silence.seconds, 1),
            shards=" ".join(pulse.shards.split()),
            stacks=stacks,
        )
        filing = threading.Thread(target=self._file, args=(own,), daemon=True)
        filing.start()
        filing.join(COLLECT_SECONDS + MERGE_SECONDS)
        if filing.is_alive():
            print(f"{self._directory} does not answer\n{merge([own], world_size=self._world_size)}", file=sys.stderr)

    def _file(self, own: RankReport) -> None:
        """Write this rank's report; the first rank that has one joins those of all and says what they say."""
        try:
            self._raise_the_alarm()
            _write(self._path(own.rank), own.text())
            deadline = time.monotonic() + COLLECT_SECONDS
            while time.monotonic() < deadline and len(self._written()) < self._world_size:
                time.sleep(0.1)
            if min(self._written(), default=own.rank) < own.rank:
                while time.monotonic() < deadline + MERGE_SECONDS and not (self._directory / "all.txt").exists():
                    time.sleep(0.1)
                return
            reports = [RankReport.parse(self._path(rank).read_text()) for rank in self._written()]
            text = merge(reports, world_size=self._world_size)
            _write(self._merged, text)
            print(summary(reports, world_size=self._world_size), file=sys.stderr)
            print(f"the stacks of all ranks: {self._merged}", file=sys.stderr, flush=True)
            _write(self._directory / "all.txt", text)
        except OSError as error:
            print(f"{error}\n{merge([own], world_size=self._world_size)}", file=sys.stderr, flush=True)

    def _path(self, rank: int) -> Path:
        return self._directory / f"rank_{rank:04d}.txt"

    def _written(self) -> list[int]:
        return [rank for rank in range(self._world_size) if self._path(rank).exists()]

    def _raise_the_alarm(self) -> None:
        """The sidecars of the other ranks watch for this directory."""
        with contextlib.suppress(OSError):  # which is told when the report cannot be written
            self._directory.mkdir(parents=True, exist_ok=True)

    def _look_for_the_alarm(self) -> None:
        while not self._directory.exists():
            time.sleep(self._tick)
        self._alarm.set()

    def _note_the_end(self, _number: int, _frame: FrameType | None) -> None:
        self._was_asked_to_end = True


def _write(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_text(text)
    partial.replace(path)


def _signal_name(number: int) -> str:
    if number == 0:
        return "killed, or it left without a word"
    name = signal.Signals(number).name
    note = ", which the system sends where memory has run out" if number == signal.SIGKILL else ""
    return f"killed by {name}{note}"


if __name__ == "__main__":
    Sidecar(json.loads(sys.argv[1])).run()
