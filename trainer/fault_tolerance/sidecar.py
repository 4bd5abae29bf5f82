"""The sidecar: a process that watches one rank of a training run, and reports a rank that freezes or dies.

`trainer.fault_tolerance.watchdog` starts a sidecar for each rank. It imports only the standard library, so it takes a
few megabytes, and it sleeps most of the time. Input: a page of memory in which the rank counts its signs of life
(`pulse`). Output: nothing, unless a rank freezes or dies. Then the sidecar of every rank writes
RUN_DIR/stalled/START/rank_0003.txt (`stall_report`), the sidecar of the first rank joins these files into
RUN_DIR/stalled.txt, and all ranks are killed. `SilenceTimer` decides when a rank is frozen.

Invariant: a sidecar ends with its rank, and does not hang on a file system on which its rank hangs.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import re
import select
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Literal

from trainer.fault_tolerance.pulse import MEMORY_BYTES, Pulse, read_pulse
from trainer.fault_tolerance.stall_report import RankReport, merge, summary

# Batch systems send USR1, USR2 and TERM. macOS has no such signals, and starts no sidecar.
DUMP_SIGNAL = getattr(signal, "SIGRTMIN", 0) + 5
COLLECT_SECONDS = 6.0  # for all sidecars to report after an alarm
MERGE_SECONDS = 3.0  # for the first sidecar to join the reports
DUMP_SECONDS = 2.0  # for a process to write its stacks
CHILDREN_SECONDS = 3.0  # for all processes that a rank has forked to write their stacks
ALARM_SECONDS = 2.0  # to wait for the alarm of another sidecar when a rank has ended
ENDING_SECONDS = 5.0  # for a rank with an exception to print it and leave
ENDING = (signal.SIGTERM, signal.SIGHUP)  # requests to end
IGNORED = (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)  # by the sidecar; they are for its rank
ANSWERED = (*IGNORED, signal.SIGTERM)  # the signals for which the sidecar has handlers
WORKING_SHARE = 0.05  # of a processor; a process that uses less does not work
READING = "read"  # the stage in which data workers and other threads work for the rank

_CLOCK_TICKS = os.sysconf("SC_CLK_TCK")  # per second, the system's unit of processor time

Activity = Literal["idle", "waiting", "working"]
_SETTINGS: dict[Activity, str] = {  # of `WatchdogConfig`
    "idle": "limit_seconds",
    "waiting": "waiting_seconds",
    "working": "working_seconds",
}

_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "in a system call that cannot be interrupted",
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "Z": "dead",
}


class SilenceTimer:
    """A timer of the seconds since the last sign of life of a rank, with limits.

    The time without a sign is of three kinds, each with its limit in seconds in `limits`:

    - working: the main thread uses the processor, or is ready to run. While the rank reads data, its other threads and
      its data workers count too. One large convolution takes such time.
    - waiting: the rank is in a collective, or waits for its device. Then another rank is late, and its own sidecar
      judges it. This limit is only for what no sidecar sees: a host that is gone, or a kernel that never ends.
    - idle: everything else. A process that a signal has stopped is always idle.

    A patience that the rank has announced raises all three limits. Invariant: a rank that stays within its limits is
    never reported. Only time in which the sidecar itself ran counts, so a job that was suspended as a whole has no late
    rank afterwards.
    """

    def __init__(self, limits: Mapping[Activity, float]) -> None:
        self._limits = limits
        self._silent: dict[Activity, float] = {}
        self._last = (-1, -1)

    @property
    def seconds(self) -> float:
        """Return the seconds since the last sign of life, of all kinds together."""
        return sum(self._silent.values())

    def exceeded(self, pulse: Pulse, *, elapsed: float, activity: Activity = "idle") -> Activity | None:
        """Return the kind of time that is above its limit; None if there is none.

        Call it about every second. `elapsed` is the seconds since the last call, and `activity` what the rank did then.
        """
        before, self._last = self._last, (pulse.beats, pulse.signs)
        if self._last != before:
            self._silent.clear()
            return None
        silent = self._silent[activity] = self._silent.get(activity, 0.0) + elapsed
        return activity if silent > max(self._limits[activity], pulse.patience) else None


class Rank:
    """The watched process, which is the parent of this one."""

    def __init__(self, pid: int, *, stacks: int) -> None:
        self.pid, self._stacks = pid, stacks
        self._used: dict[str, float] = {}  # seconds of processor time of each thread or process
        try:
            self.pidfd: int | None = os.pidfd_open(pid)
        except OSError:  # a kernel before 5.3, or a process that is dead already
            self.pidfd = None

    @property
    def is_alive(self) -> bool:
        return os.getppid() == self.pid

    def send(self, number: int) -> None:
        if self.is_alive:  # otherwise its id may now belong to another process
            os.kill(self.pid, number)

    def state(self) -> str:
        return _state(self.pid)

    def activity(self, pulse: Pulse, *, elapsed: float, thorough: bool = True) -> Activity:
        """Return what the rank did in the `elapsed` seconds since the last call.

        Looks at the main thread. While the rank reads, it also looks at the other threads and the data workers if
        `thorough`, because finding them takes some milliseconds.
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
        """Return the signal that ended the rank; 0 if there was none, or if its parent has collected it already."""
        fields = _stat(f"/proc/{self.pid}")
        return int(fields[-1]) & 0x7F if fields and fields[0] == "Z" else 0

    def own_dump(self) -> str:
        """Return the stacks that the rank wrote itself on a request to end."""
        return os.pread(self._stacks, os.fstat(self._stacks).st_size, 0).decode(errors="replace")

    def dump(self) -> str:
        """Return the Python stacks of all threads of the rank, and of processes that it forked, such as data workers.

        faulthandler needs no Python lock for this. Continues a stopped process for a moment, because it cannot answer.
        """
        state = self.state()
        text = self._dump_one(self.pid, was_stopped=state == _STATES["T"])
        parts = [text or self.own_dump() or f"no stacks: the process is {state}, and did not answer\n"]
        deadline = time.monotonic() + CHILDREN_SECONDS
        for child in _forks(self.pid):
            if time.monotonic() < deadline and _handles_signal(child, DUMP_SIGNAL):
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
    """Return the fields of the `stat` of a process or thread, from the state on; none if it is gone."""
    try:
        # Linux cuts the name of a process after 15 bytes, also inside a character.
        text = Path(f"{directory}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()


def _processor_seconds(fields: Sequence[str]) -> float:
    """Return the processor time from the fields of `_stat`, user and system together, in seconds."""
    return (int(fields[11]) + int(fields[12])) / _CLOCK_TICKS


def _state(pid: int) -> str:
    fields = _stat(f"/proc/{pid}")
    return _STATES.get(fields[0], fields[0]) if fields else "dead"


def _forks(pid: int) -> list[int]:
    """Return the children of a process that run the same program."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        fields = _stat(str(path))
        if fields and int(fields[1]) == pid:
            with contextlib.suppress(OSError):  # it has ended since, or belongs to another user
                if (path / "exe").samefile(f"/proc/{pid}/exe"):
                    found.append(int(path.name))
    return sorted(found)


def _handles_signal(pid: int, number: int) -> bool:
    """Return whether a process has a handler for a signal, so that the signal does not end it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    caught = re.search(r"^SigCgt:\s*(\w+)", status, flags=re.M)
    return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)


class Sidecar:
    """The watch over a rank until it closes its watchdog or dies, or until some rank has to be reported.

    Only threads touch the run directory, and the main thread waits for them only up to a limit, because the disk may
    hang.
    """

    def __init__(self, task: Mapping[str, str | int | float]) -> None:
        self._number, self._world_size = int(task["rank"]), int(task["world_size"])
        self._directory, self._merged = Path(str(task["directory"])), Path(str(task["merged"]))
        self._memory = mmap.mmap(int(task["memory"]), MEMORY_BYTES)
        self._rank = Rank(int(task["pid"]), stacks=int(task["stacks"]))
        self._control = int(task["control"])
        self._limits: dict[Activity, float] = {kind: float(task[name]) for kind, name in _SETTINGS.items()}
        self._silence = SilenceTimer(self._limits)
        self._exceeded: Activity | None = None
        self._tick = min(1.0, self._limits["idle"] / 10)
        self._was_asked_to_end = False
        self._end = _STATES["Z"]
        self._alarm = threading.Event()

    def run(self) -> None:
        for number in IGNORED:
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._note_end_request)  # batch systems send it to all processes of a job
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ANSWERED)  # the rank blocked them for the start
        threading.Thread(target=self._wait_for_alarm, daemon=True).start()
        why = self._watch()
        if not why:
            return
        threading.Thread(target=self._raise_alarm, daemon=True).start()
        self._report(why)
        if why == "ended":
            deadline = time.monotonic() + ENDING_SECONDS
            while self._rank.is_alive and time.monotonic() < deadline:
                time.sleep(self._tick)
        self._rank.send(signal.SIGKILL)

    def _watch(self) -> str:
        """Watch the rank. Return the reason for a report, as in `RankReport.why`; "" for no report."""
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        if self._rank.pidfd is not None:
            poll.register(self._rank.pidfd, select.POLLIN)
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
            self._exceeded = self._silence.exceeded(pulse, elapsed=elapsed, activity=activity)
            if self._exceeded is not None and self._rank.state() != _STATES["t"]:
                return "silent"

    def _judge_death(self) -> str:
        number = self._rank.exit_signal()
        if self._rank.own_dump() or self._was_asked_to_end or number in ENDING:
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
            stacks = self._rank.own_dump() or "no stacks: the process is gone\n"
        else:
            if state == _STATES["T"]:
                time.sleep(DUMP_SECONDS)  # the dump wakes it; before, the others dump where they wait for it
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
        """Write this rank's report. The first rank with a report joins all reports and prints the summary."""
        try:
            self._raise_alarm()
            _write(self._path(own.rank), own.text())
            deadline = time.monotonic() + COLLECT_SECONDS
            while time.monotonic() < deadline and len(self._written()) < self._world_size:
                time.sleep(0.1)
            if min(self._written(), default=own.rank) < own.rank:
                while time.monotonic() < deadline + MERGE_SECONDS and not (self._directory / "all.txt").exists():
                    time.sleep(0.1)
                return
            reports = [RankReport.parse(self._path(rank).read_text(encoding="utf-8")) for rank in self._written()]
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
        return f"watchdog.{_SETTINGS[self._exceeded]}={self._limits[self._exceeded]:g}"

    def _path(self, rank: int) -> Path:
        return self._directory / f"rank_{rank:04d}.txt"

    def _written(self) -> list[int]:
        return [rank for rank in range(self._world_size) if self._path(rank).exists()]

    def _raise_alarm(self) -> None:
        """Make the directory that the sidecars of the other ranks wait for."""
        with contextlib.suppress(OSError):  # `_file` prints the error when it cannot write the report
            self._directory.mkdir(parents=True, exist_ok=True)

    def _wait_for_alarm(self) -> None:
        while not self._directory.exists():
            time.sleep(self._tick)
        self._alarm.set()

    def _note_end_request(self, _number: int, _frame: FrameType | None) -> None:
        self._was_asked_to_end = True


def _write(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def _signal_name(number: int) -> str:
    if number == 0:
        return "killed, or it left without a message"
    name = signal.Signals(number).name
    note = " (the system sends it when memory has run out; so does kill -9)" if number == signal.SIGKILL else ""
    return f"killed by {name}{note}"


def main() -> None:
    """Run the sidecar with the task in the first argument of the command line, as JSON."""
    Sidecar(json.loads(sys.argv[1])).run()
