"""Measure on a machine that is lent for a short time: within a budget, each result filed at once, none measured twice.

A session goes through stages, and a stage through its measurements. Each stage runs in a process of its own, which
begins again after a failure, because an error of CUDA spoils the process that it happens in.

Guarantees: a measurement that has ended is in the record, whatever ends the session. A measurement begins only if the
time that is left is enough for it, and a failed or hanging one costs no other.
"""

from __future__ import annotations

import contextlib
import gc
import json
import multiprocessing
import signal
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import torch
from pydantic import Field

from data_pipeline.core.schema import Schema
from trainer.run_dir import read_object, write_atomically

RESULTS: Final = Path(__file__).parents[1] / "results"
_MAX_REASON = 400  # characters of an error
_SECONDS_TO_STOP, _SECONDS_TO_END = 90, 5  # for a training that saves its checkpoint, and for anything else


@dataclass(frozen=True)
class Setting:
    """The device, the places and the sizes of a session.

    Attributes:
        device: the device under test.
        out: the directory of the record, and of the runs that were cut into pieces.
        data: the directory of built datasets.
        runs: the directory of run directories.
        root: the directory of pictures (train/, test/ or CIFAR-10's files) and MNIST/raw, to build datasets from; None
            if they are built already.
        digits: the digits to draw, as in `python -m data_pipeline build --digits`.
        is_tiny: whether this is a dry run, with tiny sizes.
        ends_at: the end of the session, in seconds of `time.time`.
        only: parts of names; measurements with none of them in their names are left out. Empty for all.
        num_epochs: how many epochs the runs of `science` train; None for as many as their recipes say.
        known: the records of earlier sessions, which this session does not write.
    """

    device: torch.device
    out: Path
    data: Path
    runs: Path
    root: Path | None = None
    digits: str = "mnist"
    is_tiny: bool = False
    ends_at: float = float("inf")
    only: tuple[str, ...] = ()
    num_epochs: int | None = None
    known: tuple[Path, ...] = ()

    @property
    def record(self) -> Path:
        """Return the file of the record; dry runs have their own."""
        return self.out / ("gpu_tiny.json" if self.is_tiny else "gpu.json")

    @property
    def seconds_left(self) -> float:
        return self.ends_at - time.time()

    def wait(self) -> None:
        """Wait for all kernels that were launched."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def free_memory(self) -> None:
        """Free what earlier measurements left on the device, and count its peak from here on."""
        if self.device.type == "cuda":
            gc.collect()
            torch.cuda.init()  # type: ignore[no-untyped-call]
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    @property
    def peak_bytes(self) -> int:
        """Return the most bytes of all tensors since `free_memory`; 0 on a CPU, where they are not counted."""
        return torch.cuda.max_memory_allocated() if self.device.type == "cuda" else 0


@dataclass(frozen=True)
class Outcome:
    """The result of a measurement.

    Attributes:
        values: what was measured, as JSON.
        holds: whether the claim that it checks is true; None if it checks none.
        is_finished: false for a run that goes on in the next session.
    """

    values: Mapping[str, Any]
    holds: bool | None = None
    is_finished: bool = True


class Interrupted(KeyboardInterrupt):
    """A measurement was stopped from outside, and has an outcome to be filed."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__()
        self.outcome = outcome


@dataclass(frozen=True)
class Task:
    """A measurement that can be made.

    Attributes:
        run: makes it.
        needs_seconds: the least time in which it is worth beginning.
        limit_seconds: the time after which its process is ended; None if it ends itself with the session.
    """

    run: Callable[[], Outcome]
    needs_seconds: float
    limit_seconds: float | None


def task(run: Callable[[], Outcome], *, needs_seconds: float) -> Task:
    """Return a task that is ended if it takes far longer than expected."""
    return Task(run, needs_seconds, 60 + 5 * needs_seconds)


@dataclass(frozen=True)
class Stage:
    """A group of measurements, in the order of their worth.

    Attributes:
        name: its name in the record.
        tasks: returns the measurements by name, and must be cheap.
        is_of_the_gpu: whether the results are about this GPU, so that another GPU has to measure again.
    """

    name: str
    tasks: Callable[[Setting], Mapping[str, Task]]
    is_of_the_gpu: bool = True


class Measurement(Schema):
    """A measurement in the record. `session` is the number of its session, `failed` the error that ended it."""

    session: int
    seconds: float
    values: dict[str, Any] = Field(default_factory=dict)
    holds: bool | None = None
    is_finished: bool = True
    failed: str | None = None

    @property
    def is_done(self) -> bool:
        """Return whether no later session has to repeat it, as it does after a failure or a claim that is not true."""
        return self.is_finished and self.failed is None and self.holds is not False


class Record(Schema):
    """The file of a record: the circumstances of each session, and the measurements by stage and name."""

    sessions: tuple[dict[str, Any], ...] = ()
    stages: dict[str, dict[str, Measurement]] = Field(default_factory=dict)

    def measurement(self, stage: str, name: str) -> Measurement | None:
        return self.stages.get(stage, {}).get(name)

    def device_of(self, session: int) -> str | None:
        """Return the name of the device of a session; None if it was not noted."""
        return self.sessions[session].get("device") if session < len(self.sessions) else None


def read_record(path: Path) -> Record:
    """Return the record in a file, empty if there is no file. Raises `UserError` if the file is damaged."""
    if not path.exists():
        return Record()
    return Record.parse(read_object(path, mend="move it away, or pass another --out"), where=str(path))


def begin_session(setting: Setting, circumstances: Mapping[str, Any]) -> int:
    """Add a session to the record, and return its number."""
    record = read_record(setting.record)
    _write(setting, record.model_copy(update={"sessions": (*record.sessions, dict(circumstances))}))
    return len(record.sessions)


def add_measurement(setting: Setting, stage: str, name: str, measurement: Measurement) -> None:
    """File a measurement. It replaces an earlier one of the same name."""
    record = read_record(setting.record)
    of_stage = {**record.stages.get(stage, {}), name: measurement}
    _write(setting, record.model_copy(update={"stages": {**record.stages, stage: of_stage}}))


def _write(setting: Setting, record: Record) -> None:
    write_atomically(setting.record, json.dumps(record.model_dump(mode="json"), indent=1) + "\n")


@dataclass
class Tally:
    """The measurements of a stage in this session, by name: those that ended, failed, did not hold or did not begin."""

    done: list[str] = field(default_factory=list)
    earlier: list[str] = field(default_factory=list)
    untrue: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        parts = [f"{len(self.done)} measured"]
        parts += [f"{len(self.earlier)} from an earlier session"] if self.earlier else []
        parts += [f"NOT TRUE: {', '.join(self.untrue)}"] if self.untrue else []
        parts += [f"FAILED: {', '.join(self.failed)}"] if self.failed else []
        parts += [f"left for another session: {', '.join(self.left)}"] if self.left else []
        return "; ".join(parts)


def run_stage(stage: Stage, setting: Setting, *, session: int, is_isolated: bool, again: bool = False) -> Tally:
    """Make the measurements of a stage that no earlier session has filed, and return what became of them.

    `is_isolated` runs them in another process. `again` also repeats what is filed.
    """
    records = [read_record(path) for path in (setting.record, *setting.known)]
    device = records[0].device_of(session)

    def is_done(name: str) -> bool:
        filed = ((record, record.measurement(stage.name, name)) for record in records)
        return any(
            made is not None and made.is_done and (not stage.is_of_the_gpu or record.device_of(made.session) == device)
            for record, made in filed
        )

    tasks = stage.tasks(setting)
    wanted = [name for name in tasks if not setting.only or any(part in name for part in setting.only)]
    names = [name for name in wanted if again or not is_done(name)]
    tally = Tally(earlier=[name for name in wanted if name not in names])
    attempt = _attempt_elsewhere if is_isolated else _attempt
    open_names = list(names)
    while open_names:
        failed = attempt(stage, setting, open_names, session)
        if failed is None:
            break
        open_names = open_names[open_names.index(failed) + 1 :]
    record = read_record(setting.record)
    for name in names:
        made = record.measurement(stage.name, name)
        if made is None or made.session != session:
            tally.left.append(name)
        else:
            kind = tally.failed if made.failed else tally.untrue if made.holds is False else tally.done
            kind.append(name)
    return tally


def _attempt(
    stage: Stage,
    setting: Setting,
    names: Sequence[str],
    session: int,
    begin: Callable[[str], None] = lambda name: None,
) -> str | None:
    """Make the named measurements up to the first that fails. Return its name; None if none failed.

    Calls `begin` with the name of each before it begins.
    """
    tasks = stage.tasks(setting)
    for name in names:
        if setting.seconds_left < tasks[name].needs_seconds:
            continue
        begin(name)
        start = time.monotonic()

        def add(outcome: Outcome | None, failed: str | None = None, name: str = name, start: float = start) -> None:
            seconds = round(time.monotonic() - start, 1)
            measured = Measurement(session=session, seconds=seconds, failed=failed, is_finished=failed is None)
            if outcome is not None:
                values = {"values": dict(outcome.values), "holds": outcome.holds, "is_finished": outcome.is_finished}
                measured = measured.model_copy(update=values)
            add_measurement(setting, stage.name, name, measured)

        try:
            setting.free_memory()
            outcome = tasks[name].run()
        except Interrupted as error:
            add(error.outcome)
            raise
        except Exception as error:
            traceback.print_exc()
            add(None, _reason(error))
            return name
        add(outcome)
    return None


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:_MAX_REASON]


def _in_child(stage: Stage, setting: Setting, names: Sequence[str], session: int, sender: Connection) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
    try:
        failed = _attempt(stage, setting, names, session, sender.send)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    raise SystemExit(0 if failed is None else 1)


def _attempt_elsewhere(stage: Stage, setting: Setting, names: Sequence[str], session: int) -> str | None:
    """Do as `_attempt`, in a process of its own; one that crashes or takes too long has failed."""
    context = multiprocessing.get_context("spawn")  # CUDA cannot be used after a fork
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_in_child, args=(stage, setting, names, session, sender))
    process.start()
    sender.close()
    tasks = stage.tasks(setting)
    current, begun = names[0], time.monotonic()
    reason: str | None = None
    try:
        is_alive = True
        while is_alive:
            is_alive = process.is_alive()  # before the last messages are read
            with contextlib.suppress(EOFError):
                while receiver.poll(0.2 if is_alive else 0):
                    current, begun = receiver.recv(), time.monotonic()
            limit = tasks[current].limit_seconds
            if limit is not None and time.monotonic() - begun > limit:
                reason = f"it took more than {limit:.0f} s"
            elif setting.seconds_left < -_SECONDS_TO_STOP:
                reason = "it went on after the end of the session"
            if is_alive and reason is not None:
                # One that hangs would not hear a polite request; one without a limit has something to save.
                _end(process, seconds=_SECONDS_TO_STOP if limit is None else _SECONDS_TO_END)
            process.join(0.1)
    except KeyboardInterrupt:
        _end(process, seconds=_SECONDS_TO_STOP)
        raise
    code = process.exitcode
    if code == 130 and reason is None:
        raise KeyboardInterrupt
    if code == 0 and reason is None:
        return None
    filed = read_record(setting.record).measurement(stage.name, current)
    if filed is None or filed.session != session:  # it could not file its failure itself
        reason = reason or f"its process ended with exit code {code}"
        seconds = round(time.monotonic() - begun, 1)
        failure = Measurement(session=session, seconds=seconds, is_finished=False, failed=reason)
        add_measurement(setting, stage.name, current, failure)
    return current


def _end(process: Any, *, seconds: float) -> None:
    """End a process: by a signal at which training saves a checkpoint, and after some seconds by force."""
    process.terminate()
    process.join(seconds)
    if process.is_alive():
        process.kill()
        process.join()
