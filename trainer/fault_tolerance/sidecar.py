"""The process that watches one rank of a training run, and reports why when the rank stands still.

`trainer.fault_tolerance.watchdog` starts it beside each rank, as a script that imports nothing but the standard
library: a few megabytes that sleep. Input: a page of memory in which the rank counts its signs of life. Output:
nothing, unless a rank stands still or dies. Then every rank writes RUN_DIR/stalled/START/rank_0003.txt, the first rank
joins these into RUN_DIR/stalled.txt, and all ranks are ended. `SilenceTimer` decides whether a rank stands still.

Invariant: a sidecar never outlives its rank, and is never held up by the file system that holds up its rank.
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import FrameType
from typing import Any, Literal

DUMP_SIGNAL = signal.SIGRTMIN + 5  # nobody's: jobs are warned with USR1, USR2 and TERM
COLLECT_SECONDS = 6.0  # that the ranks have to report once one has raised the alarm
MERGE_SECONDS = 3.0  # and the first of them to join the reports
DUMP_SECONDS = 2.0  # that a process has to write down its stacks
CHILDREN_SECONDS = 3.0  # and all those that a rank has forked
ALARM_SECONDS = 2.0  # in which the alarm of another rank is seen that met the same trouble
ENDING_SECONDS = 5.0  # that a rank with an exception has to print it and leave
ENDING = (signal.SIGTERM, signal.SIGHUP)  # by which a process is asked to end
WORKING_SHARE = 0.05  # of a processor: whoever uses less is not at work
READING = "read"  # the stage in which data workers and other threads work for the rank

_NUMBERS = struct.Struct("<Qqd?")  # beats, step, patience in seconds, closed
_SIZES = {"doing": 64, "shards": 1024, "ending": 1024}  # bytes of text behind the numbers
# Written many times a step, so it has a place of its own: signs of life, whether the rank waits for others, stage.
_SIGN = struct.Struct("<Q?15s")
_SIGN_OFFSET = 4096 - _SIGN.size
MEMORY_BYTES = 4096

_CLOCK_TICKS = os.sysconf("SC_CLK_TCK")  # a second, in which the system counts processor time

Activity = Literal["idle", "waiting", "working"]

_PARSERS: dict[object, Callable[[str], Any]] = {"int": int, "float": float, "str": str}  # by annotation

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
    """What a rank last said of itself.

    Attributes:
        beats: how often it began something that all ranks do alike.
        patience: how long it asked to be left alone, in seconds; 0: not at all.
        closed: it has left; `ending` is then its exception, or empty after the last step.
        signs: the signs of life inside a step. Ranks need not give equally many.
        waits: it waits for other ranks or for its device.
        stage: the stage of the step; empty between stages.
    """

    beats: int
    step: int
    patience: float
    closed: bool
    doing: str
    shards: str
    ending: str
    signs: int = 0
    waits: bool = False
    stage: str = ""

    @property
    def place(self) -> str:
        """What the rank does: "training, forward"."""
        return f"{self.doing}, {self.stage}" if self.stage else self.doing


def write_numbers(memory: mmap.mmap, *, beats: int, step: int, patience: float, closed: bool = False) -> None:
    """Write all numbers that a beat changes."""
    _NUMBERS.pack_into(memory, 0, beats, step, patience, closed)


def write_sign(memory: mmap.mmap, signs: int, waits: bool, stage: bytes) -> None:
    """Write one sign of life; `stage` is cut to 15 bytes."""
    _SIGN.pack_into(memory, _SIGN_OFFSET, signs, waits, stage)


def write_text(memory: mmap.mmap, **texts: str) -> None:
    """`doing`, `shards` or `ending`, cut to the room that there is."""
    start = _NUMBERS.size
    for name, size in _SIZES.items():
        if name in texts:
            memory[start : start + size] = texts[name].encode()[:size].ljust(size, b"\0")
        start += size


def read_pulse(memory: mmap.mmap) -> Pulse:
    beats, step, patience, closed = _NUMBERS.unpack_from(memory, 0)
    signs, waits, stage = _SIGN.unpack_from(memory, _SIGN_OFFSET)
    start, texts = _NUMBERS.size, {}
    for name, size in _SIZES.items():
        texts[name] = memory[start : start + size].rstrip(b"\0").decode(errors="ignore")
        start += size
    name = stage.rstrip(b"\0").decode(errors="ignore")
    return Pulse(beats, step, patience, closed, **texts, signs=signs, waits=waits, stage=name)


class SilenceTimer:
    """How long a rank has given no sign of life, and whether that is too long.

    Each moment without a sign is one of three kinds. `limits` holds a limit in seconds for each:

    - working: its main thread uses the processor, or would if it got one. While it reads data, so do its other threads
      and its data workers. One large convolution is such a silence.
    - waiting: it is in a collective, or waits for its device. Another rank is late, and that rank's own sidecar judges
      it. This limit alone ends what no other sidecar sees: a host that is gone, a kernel that never ends.
    - idle: all else. A process that a signal has stopped is idle wherever it was.

    A patience that the rank has announced raises all three. Invariant: a rank that gave a sign, or worked, within its
    limits is never reported. Only time in which the sidecar itself ran is counted: if a whole job is suspended, no rank
    is late afterwards.
    """

    def __init__(self, limits: Mapping[Activity, float]) -> None:
        self._limits = limits
        self._silent: dict[Activity, float] = {}
        self._last = (-1, -1)

    @property
    def seconds(self) -> float:
        """Seconds since the last sign of life, of all kinds."""
        return sum(self._silent.values())

    def too_long(self, pulse: Pulse, *, elapsed: float, activity: Activity = "idle") -> Activity | None:
        """Return the kind of silence that is too long now; None if there is none.

        Call it every second or so. `elapsed` is in seconds, since the last call; `activity` is how the rank spent them.
        """
        before, self._last = self._last, (pulse.beats, pulse.signs)
        if self._last != before:
            self._silent.clear()
            return None
        silent = self._silent[activity] = self._silent.get(activity, 0.0) + elapsed
        return activity if silent > max(self._limits[activity], pulse.patience) else None


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
        limit: of a silent rank, the setting that it exceeded: "watchdog.limit_seconds=40".
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
        """Whether the main thread, the last of the first process's stacks, stands where ranks wait for each other."""
        threads = re.split(r"^(?=(?:Current thread|Thread) 0x)", self.stacks.partition("\nprocess ")[0], flags=re.M)
        return _WAITS.search(threads[-1]) is not None


def name_the_culprits(reports: Sequence[RankReport], *, world_size: int) -> str:
    """Return one sentence: which ranks hold up the others, how that is known, and what to set if they are only slow."""
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
    return f"{name_the_culprits(reports, world_size=world_size)}\n\n" + "\n".join(table) + f"\n\nwritten {written}\n"


def _ranks(numbers: Sequence[int]) -> str:
    named = ", ".join(map(str, numbers[:8])) + (" ..." if len(numbers) > 8 else "")
    return f"rank{'s' if len(numbers) > 1 else ''} {named}"


class Rank:
    """The watched process, which is the parent of this one."""

    def __init__(self, pid: int, *, stacks: int) -> None:
        self.pid, self._stacks = pid, stacks
        self._used: dict[str, float] = {}  # seconds of processor that each thread or process had used
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

    def activity(self, pulse: Pulse, *, elapsed: float, thorough: bool = True) -> Activity:
        """Return what it did in the `elapsed` seconds since the last call.

        Its main thread counts. While it reads, its other threads and its data workers count too, if `thorough`: to find
        them costs some milliseconds.
        """
        paths = [f"/proc/{self.pid}/task/{self.pid}"]
        if thorough and pulse.stage == READING:
            paths += [f"/proc/{pid}" for pid in (self.pid, *_forks(self.pid)) if pid != os.getpid()]
        stats = {path: fields for path in paths if (fields := _stat(path))}
        before, self._used = self._used, {path: _processor_seconds(fields) for path, fields in stats.items()}
        if stats and _STATES.get(stats[paths[0]][0]) == _STATES["T"]:
            return "idle"
        if pulse.waits:
            return "waiting"
        used = [seconds - before.get(path, seconds) for path, seconds in self._used.items()]
        runs = any(fields[0] == "R" for fields in stats.values())
        return "working" if runs or max(used, default=0.0) >= WORKING_SHARE * elapsed > 0 else "idle"

    def exit_signal(self) -> int:
        """The signal that ended it; 0 if none did, or where its parent has taken note of the end before us."""
        fields = _stat(f"/proc/{self.pid}")
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


def _stat(directory: str) -> list[str]:
    """Return the fields of a process's or thread's `stat` from the state on; none if it is gone."""
    try:
        return Path(f"{directory}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _processor_seconds(fields: Sequence[str]) -> float:
    """Return the processor time of `_stat`'s process, in itself and in the system, in seconds."""
    return (int(fields[11]) + int(fields[12])) / _CLOCK_TICKS


def _state(pid: int) -> str:
    fields = _stat(f"/proc/{pid}")
    return _STATES.get(fields[0], fields[0]) if fields else "dead"


def _forks(pid: int) -> list[int]:
    """The children of a process that run the same program."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        fields = _stat(str(path))
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
        self._limits: dict[Activity, float] = {
            "idle": float(task["limit_seconds"]),
            "waiting": float(task["waiting_seconds"]),
            "working": float(task["working_seconds"]),
        }
        self._silence = SilenceTimer(self._limits)
        self._exceeded: Activity | None = None
        self._tick = min(1.0, self._limits["idle"] / 10)
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
            activity = self._rank.activity(pulse, elapsed=elapsed, thorough=self._silence.seconds > 2 * self._tick)
            self._exceeded = self._silence.too_long(pulse, elapsed=elapsed, activity=activity)
            if self._exceeded is not None and self._rank.state() != _STATES["t"]:
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
            doing=" ".join(pulse.place.split()),
            silent=round(self._silence.seconds, 1),
            shards=" ".join(pulse.shards.split()),
            stacks=stacks,
            limit=self._limit_exceeded(),
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

    def _limit_exceeded(self) -> str:
        if self._exceeded is None:
            return ""
        setting = "limit_seconds" if self._exceeded == "idle" else f"{self._exceeded}_seconds"
        return f"watchdog.{setting}={self._limits[self._exceeded]:g}"

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
