"""Measure on a machine that is lent for a short time: within a budget, each result filed at once, none measured twice.

A session goes through stages, and a stage through its measurements. A stage that computes on the GPU by itself runs in
a process of its own, which begins again after a failure, because an error of CUDA spoils the process that it happens
in.

Guarantees: a measurement that has ended is in the record, whatever ends the session. A measurement begins only if the
time that is left is enough for it, and a failed or hanging one costs no other.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import STDOUT, Popen, TimeoutExpired
from typing import Any, Final

import torch
from pydantic import Field

from data_pipeline.core.schema import Schema
from trainer.run_dir import read_object, write_atomically

FILED: Final = Path(__file__).parents[1] / "results"  # the records of earlier sessions
ROOT: Final = Path(__file__).parents[2]
_MAX_REASON: Final = 400  # characters of an error
_SECONDS_TO_STOP: Final = 30  # for a training that saves a checkpoint
_BEGUN: Final = "it did not end: its process crashed, hung or was stopped"


@dataclass(frozen=True)
class Setting:
    """The device, the places and the sizes of a session.

    Attributes:
        device: the device under test.
        out: the directory of the record, and of the runs.
        data: the directory of built datasets.
        root: the directory of the files from which datasets are built; see `benchmarks.gpu_stages.data`.
        is_tiny: whether this is a dry run, with tiny sizes.
        ends_at: the end of the session, in seconds of `time.time`.
        only: parts of names; measurements with none of them in their names are left out. Empty for all.
    """

    device: torch.device
    out: Path
    data: Path
    root: Path = Path(".data")
    is_tiny: bool = False
    ends_at: float = float("inf")
    only: tuple[str, ...] = ()

    @property
    def record(self) -> Path:
        """Return the file of the record, which is named after the card; dry runs have their own."""
        return self.out / ("gpu_tiny.json" if self.is_tiny else f"gpu_{self._card}.json")

    @property
    def _card(self) -> str:
        """Return a short name of the card: "h100" for "NVIDIA H100 80GB HBM3"."""
        if self.device.type != "cuda":
            return self.device.type
        words = torch.cuda.get_device_name(self.device).lower().split()
        return next((word for word in words if any(map(str.isdigit, word))), words[-1])

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
    """A measurement that can be made.

    Attributes:
        run: makes it.
        needs_seconds: the time without which it does not begin.
        expected_seconds: the time that it is expected to take, if that is another: a training goes on later.
        is_ready: returns whether what it reads is there.
    """

    run: Callable[[], Outcome]
    needs_seconds: float
    expected_seconds: float | None = None
    is_ready: Callable[[], bool] = lambda: True


@dataclass(frozen=True)
class Stage:
    """A group of measurements by name, in the order of their worth.

    Attributes:
        name: its name in the record.
        tasks: returns the measurements, and must be cheap.
        is_about_speed: whether results hold for one card and one commit only. All others hold for every card.
        runs_commands: whether the measurements are commands, which are processes already and end with the session.
    """

    name: str
    tasks: Callable[[Setting], Mapping[str, Task]]
    is_about_speed: bool = True
    runs_commands: bool = False

    def wanted(self, setting: Setting) -> dict[str, Task]:
        """Return the measurements that the session asks for."""
        tasks = self.tasks(setting).items()
        return {name: task for name, task in tasks if not setting.only or any(part in name for part in setting.only)}


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

    def done(self, stage: str, name: str) -> Mapping[str, Any] | None:
        """Return the circumstances in which a measurement was made; None if it is not done."""
        made = self.stages.get(stage, {}).get(name)
        return None if made is None or not made.is_done else self.sessions[made.session]


def read_record(path: Path) -> Record:
    """Return the record in a file; if there is no file, the filed record of that name, or else an empty one.

    Raises `UserError` if the file is damaged.
    """
    found = path if path.exists() else FILED / path.name
    if not found.exists():
        return Record()
    return Record.parse(read_object(found, mend="move it away, or pass another --out"), where=str(found))


def done_where(stage: str, name: str, setting: Setting) -> Mapping[str, Any] | None:
    """Return the circumstances in which a measurement was made, here or on another card; None if it is not done."""
    others = [] if setting.is_tiny else sorted({*setting.out.glob("gpu_*.json"), *FILED.glob("gpu_*.json")})
    found = (read_record(path).done(stage, name) for path in (setting.record, *others))
    return next((where for where in found if where is not None), None)


def _is_needed(stage: Stage, name: str, setting: Setting) -> bool:
    """Return whether the newest session has to make a measurement, which is of its card and commit if it is speed."""
    if not stage.is_about_speed:
        return done_where(stage.name, name, setting) is None
    record = read_record(setting.record)
    where, now = record.done(stage.name, name), record.sessions[-1]
    return where is None or any(where.get(fact) != now.get(fact) for fact in ("device", "git_commit"))


def begin_session(setting: Setting, circumstances: Mapping[str, Any]) -> int:
    """Add a session to the record, and return its number."""
    record = read_record(setting.record)
    write_record(setting.record, record.model_copy(update={"sessions": (*record.sessions, dict(circumstances))}))
    return len(record.sessions)


def add_measurement(setting: Setting, stage: str, name: str, measurement: Measurement) -> None:
    """File a measurement. It replaces an earlier one of the same name."""
    record = read_record(setting.record)
    of_stage = {**record.stages.get(stage, {}), name: measurement}
    write_record(setting.record, record.model_copy(update={"stages": {**record.stages, stage: of_stage}}))


def write_record(path: Path, record: Record) -> None:
    """Write a record to a file, and make its directory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(record.model_dump(mode="json"), indent=1) + "\n")


def call(setting: Setting, *arguments: str) -> None:
    """Run a command of the project, `python ARGUMENTS`, and stop it at the end of the session.

    Its output goes to commands.log in the directory of the record. Raises `RuntimeError`, with the last line that it
    has printed, if it fails or is stopped.
    """
    environ = os.environ | ({"CUDA_VISIBLE_DEVICES": ""} if setting.device.type == "cpu" else {})
    environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [environ.get("PYTHONPATH")])])
    setting.out.mkdir(parents=True, exist_ok=True)
    with (setting.out / "commands.log").open("a+", encoding="utf-8") as log:
        log.write(f"\n$ python {' '.join(arguments)}\n")
        log.flush()
        start = log.tell()
        process = Popen([sys.executable, *arguments], cwd=ROOT, env=environ, stdout=log, stderr=STDOUT)
        try:
            process.wait(max(1.0, setting.seconds_left - _SECONDS_TO_STOP / 2))
        except TimeoutExpired:
            pass
        finally:
            process.terminate()
            try:
                process.wait(_SECONDS_TO_STOP)
            finally:
                process.kill()
        if process.returncode != 0:
            log.seek(start)
            *_, last = ["", *filter(None, map(str.strip, log.read().splitlines()))]
            raise RuntimeError(last or f"it ended with exit status {process.returncode}")


def run_stage(stage: Stage, setting: Setting, *, session: int, is_isolated: bool) -> dict[str, list[str]]:
    """Make the measurements of a stage that the record lacks, and return their names by what became of them.

    `is_isolated` runs them in another process.
    """
    wanted = list(stage.wanted(setting))
    missing = [name for name in wanted if _is_needed(stage, name, setting)]
    attempt = _attempt_elsewhere if is_isolated and not stage.runs_commands else _attempt
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
        "FAILED": [f"{name} ({one.failed})" for name, one in made.items() if one.failed],
        "left for another session": [name for name in missing if name not in made],
    }


def _made_now(stage: Stage, setting: Setting, session: int) -> dict[str, Measurement]:
    of_stage = read_record(setting.record).stages.get(stage.name, {})
    return {name: made for name, made in of_stage.items() if made.session == session}


def _attempt(stage: Stage, setting: Setting, names: Sequence[str], session: int) -> None:
    """Make the named measurements up to the first that fails. Each is filed as failed before it begins."""
    tasks = stage.tasks(setting)
    for name in names:
        task = tasks[name]
        if setting.seconds_left < task.needs_seconds or not task.is_ready():
            continue
        add_measurement(setting, stage.name, name, Measurement(session=session, seconds=0, failed=_BEGUN))
        outcome, failed, start = Outcome({}), None, time.monotonic()
        if not stage.runs_commands:  # one that takes far longer than expected hangs
            faulthandler.dump_traceback_later(60 + 5 * task.needs_seconds, exit=True)
        try:
            setting.free_memory()
            outcome = task.run()
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
