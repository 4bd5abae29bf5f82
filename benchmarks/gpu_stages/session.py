"""Measure on a machine that is lent for a short time: within a budget, each result filed at once, none measured twice.

A session goes through stages, and a stage through its measurements. Each stage runs in a process of its own, which
begins again after a failure, because an error of CUDA spoils the process that it happens in.

Guarantees: a measurement that has ended is in the record, whatever ends the session. A measurement begins only if the
time that is left is enough for it, and a failed or hanging one costs no other.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import multiprocessing
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from pydantic import Field

from data_pipeline.core.schema import Schema
from trainer.run_dir import read_object, write_atomically

_MAX_REASON: Final = 400  # characters of an error
_BEGUN: Final = "it did not end: its process crashed, hung or was stopped"


@dataclass(frozen=True)
class Setting:
    """The device, the places and the sizes of a session.

    Attributes:
        device: the device under test.
        out: the directory of the record.
        data: the directory of built datasets.
        is_tiny: whether this is a dry run, with tiny sizes.
        ends_at: the end of the session, in seconds of `time.time`.
        only: parts of names; measurements with none of them in their names are left out. Empty for all.
    """

    device: torch.device
    out: Path
    data: Path
    is_tiny: bool = False
    ends_at: float = float("inf")
    only: tuple[str, ...] = ()

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
    """

    values: Mapping[str, Any]
    holds: bool | None = None


@dataclass(frozen=True)
class Task:
    """A measurement that can be made: `run` makes it, and `needs_seconds` is the least time in which it can end."""

    run: Callable[[], Outcome]
    needs_seconds: float

    @property
    def limit_seconds(self) -> float:
        """Return the time after which it is ended, because it takes far longer than expected."""
        return 60 + 5 * self.needs_seconds


@dataclass(frozen=True)
class Stage:
    """A group of measurements by name, in the order of their worth. `tasks` returns them, and must be cheap."""

    name: str
    tasks: Callable[[Setting], Mapping[str, Task]]


class Measurement(Schema):
    """A measurement in the record. `session` is the number of its session, `failed` the error that ended it."""

    session: int
    seconds: float
    values: dict[str, Any] = Field(default_factory=dict)
    holds: bool | None = None
    failed: str | None = None

    @property
    def is_done(self) -> bool:
        """Return whether no later session has to repeat it, as it does after a failure or a claim that is not true."""
        return self.failed is None and self.holds is not False


class Record(Schema):
    """The file of a record: the circumstances of each session, and the measurements by stage and name."""

    sessions: tuple[dict[str, Any], ...] = ()
    stages: dict[str, dict[str, Measurement]] = Field(default_factory=dict)

    def is_done(self, stage: str, name: str) -> bool:
        """Return whether a measurement is done, on the device of the newest session."""
        made = self.stages.get(stage, {}).get(name)
        if made is None or not made.is_done:
            return False
        return self.sessions[made.session].get("device") == self.sessions[-1].get("device")


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


def run_stage(stage: Stage, setting: Setting, *, session: int, is_isolated: bool) -> dict[str, list[str]]:
    """Make the measurements of a stage that the record lacks, and return their names by what became of them.

    `is_isolated` runs them in another process.
    """
    record = read_record(setting.record)
    wanted = [name for name in stage.tasks(setting) if not setting.only or any(part in name for part in setting.only)]
    missing = [name for name in wanted if not record.is_done(stage.name, name)]
    attempt = _attempt_elsewhere if is_isolated else _attempt
    open_names = missing
    while open_names:
        attempt(stage, setting, open_names, session)
        made = _made_now(stage, setting, session)
        failed = [place for place, name in enumerate(open_names) if name in made and made[name].failed]
        open_names = open_names[failed[-1] + 1 :] if failed else []
    made = _made_now(stage, setting, session)
    return {
        "measured": [name for name, one in made.items() if one.is_done],
        "from an earlier session": [name for name in wanted if name not in missing],
        "NOT TRUE": [name for name, one in made.items() if one.holds is False],
        "FAILED": [name for name, one in made.items() if one.failed],
        "left for another session": [name for name in missing if name not in made],
    }


def _made_now(stage: Stage, setting: Setting, session: int) -> dict[str, Measurement]:
    of_stage = read_record(setting.record).stages.get(stage.name, {})
    return {name: made for name, made in of_stage.items() if made.session == session}


def _attempt(stage: Stage, setting: Setting, names: Sequence[str], session: int) -> None:
    """Make the named measurements up to the first that fails. Each is filed as failed before it begins."""
    tasks = stage.tasks(setting)
    for name in names:
        if setting.seconds_left < tasks[name].needs_seconds:
            continue
        add_measurement(setting, stage.name, name, Measurement(session=session, seconds=0, failed=_BEGUN))
        outcome, failed, start = Outcome({}), None, time.monotonic()
        faulthandler.dump_traceback_later(tasks[name].limit_seconds, exit=True)
        try:
            setting.free_memory()
            outcome = tasks[name].run()
        except Exception as error:
            traceback.print_exc()
            failed = f"{type(error).__name__}: {' '.join(str(error).split())}"[:_MAX_REASON]
        finally:
            faulthandler.cancel_dump_traceback_later()
        seconds = round(time.monotonic() - start, 1)
        measured = Measurement(
            session=session, seconds=seconds, values=dict(outcome.values), holds=outcome.holds, failed=failed
        )
        add_measurement(setting, stage.name, name, measured)
        if failed is not None:
            return


def _attempt_elsewhere(stage: Stage, setting: Setting, names: Sequence[str], session: int) -> None:
    """Do as `_attempt`, in a process of its own. Raises `RuntimeError` if that ends before it begins a measurement."""
    process = multiprocessing.get_context("spawn").Process(  # CUDA cannot be used after a fork
        target=_attempt, args=(stage, setting, names, session)
    )
    process.start()
    try:
        process.join()
    finally:
        process.kill()  # if the session is interrupted
    if process.exitcode and not any(name in _made_now(stage, setting, session) for name in names):
        raise RuntimeError(f"the process of the stage {stage.name} ended with exit code {process.exitcode}")
