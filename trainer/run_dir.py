"""The run directory: the only link from training to probe, analysis, report and restart.

RUN_DIR/ config.json  provenance.json  metrics.jsonl  bad_samples.jsonl  stalled/  wandb/  wandb_run_id
         job.json  code/  logs/  (submitted jobs only)
         ended.json  (if the last start ended early)
         checkpoints/step_00010000/ ...  LATEST  analysis/*.json *.png  report.html
         probes/step_00010000/base.json overlay.json heads.safetensors ...
         probes/data_1a2b3c4d/step_00010000/ ...  (on other data than those of the run)
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import secrets
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from data_pipeline.core.errors import UserError, filename_in_errors, printable

logger = logging.getLogger(__name__)

LOCK_NAME = ".lock"
_BEAT_SECONDS, _WATCH_SECONDS = 2.0, 10.0  # between two heartbeats of the owner of a directory, and for seeing one
# The process ids of a container are its own, although it may have the name of its host.
_HERE = f" on {socket.gethostname()} ({Path('/proc/self/ns/pid').resolve().name}),"
_END_BYTES = 2**15  # of metrics.jsonl, which `RunDir.read_last_metrics` reads: a hundred lines or more


class RunDir:
    """The paths of a run directory; creates nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.json"
        self.provenance = path / "provenance.json"
        self.metrics = path / "metrics.jsonl"
        self.bad_samples = path / "bad_samples.jsonl"
        self.wandb_run_id = path / "wandb_run_id"
        self.stalled = path / "stalled"
        self.checkpoints = path / "checkpoints"
        self.latest = path / "LATEST"
        self.analysis = path / "analysis"
        self.report = path / "report.html"
        self.ended = path / "ended.json"  # why the last start ended early
        self.all_probes = path / "probes"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / step_name(step)

    def probes(self, step: int) -> Path:
        return self.all_probes / step_name(step)

    def latest_step(self) -> int | None:
        """Return the step of the newest complete checkpoint, by `LATEST`; None if that file is missing or damaged."""
        text = self.latest.read_bytes() if self.latest.is_file() else b""
        match = re.fullmatch(rb"step_([0-9]{1,18})\s*", text)
        return int(match[1]) if match else None

    def read_metrics(self) -> list[dict[str, Any]]:
        """Return the entries of metrics.jsonl by ascending step: {"step": int, "epoch": int, "train/loss": float, ...}.

        Numbers that are not finite are left out, and so is a last line that a kill cut short. If a restart repeated a
        step, its last line counts. Raises `UserError` if a line is damaged.
        """
        return _metrics_in(self.metrics, self.metrics.read_bytes()) if self.metrics.is_file() else []

    def read_last_metrics(self) -> list[dict[str, Any]]:
        """Return the last entries of metrics.jsonl, as `read_metrics` does, without reading a long file whole."""
        if not self.metrics.is_file():
            return []
        with self.metrics.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _END_BYTES))
            if size > _END_BYTES:
                file.readline()  # the end of a line
            return _metrics_in(self.metrics, file.read())

    def read_provenance(self) -> dict[str, Any]:
        """Return the facts of provenance.json; none if it is missing. Raises `UserError` if it is damaged."""
        return read_object(self.provenance, mend="restore the file") if self.provenance.is_file() else {}

    def run_id(self) -> str | None:
        """Return the id of the run in provenance.json; None if it has none."""
        return self.read_provenance().get("run_id")


def _metrics_in(path: Path, lines: bytes) -> list[dict[str, Any]]:
    """Return the entries in lines of the metrics.jsonl at `path`."""
    by_step: dict[int, dict[str, Any]] = {}
    *whole, _ = lines.split(b"\n")
    for line in whole:
        try:
            entry = {name: number for name, number in json.loads(line).items() if math.isfinite(number)}
            by_step[entry["step"]] = by_step.get(entry["step"], {}) | entry
        except (ValueError, TypeError, AttributeError, KeyError):
            raise UserError(f"{path} has a damaged line, {line[:40]!a}; remove that line") from None
    return [by_step[step] for step in sorted(by_step)]


def step_name(step: int) -> str:
    """Return the name of the directory of a step, such as step_00000500."""
    return f"step_{step:08d}"


def steps_in(directory: Path) -> list[int]:
    """Return the steps with a directory such as step_00000500 in `directory`, ascending.

    Logs and skips other names that begin with "step_".
    """
    steps = []
    for path in sorted(directory.glob("step_*")):
        match = re.fullmatch(r"step_([0-9]{8,18})", path.name)
        if match and path.is_dir() and path.name == step_name(int(match[1])):
            steps.append(int(match[1]))
        else:
            logger.warning("%s is not the directory of a step, such as step_00000500; skipping it", path)
    return steps


class TakenError(UserError):
    """Another process has taken the run directory of this one."""


class Hold:
    """A run directory that this process has taken, until `close` or the end of the process; a context manager.

    A file names the process, and its time of change is a heartbeat. So two processes never mix their checkpoints, on
    any file system and on any machines: the start of the second sees the heartbeat, and a process that was frozen
    meanwhile sees by `check` that another took its place.
    """

    def __init__(self, path: Path) -> None:
        """Make the file. Raises `FileExistsError` if there is one."""
        self._path, self._file = path, path.open("x", encoding="utf-8")
        self._name = f"process {os.getpid()}{_HERE} start {secrets.token_hex(4)}"
        self._is_closing = threading.Event()
        self._file.write(self._name)
        self._file.flush()
        os.fsync(self._file.fileno())  # for other machines
        threading.Thread(target=self._beat, name="lock", daemon=True).start()

    def check(self) -> None:
        """Raise `TakenError` if another process has taken the directory."""
        if (owner := _owner(self._path)) not in {"", self._name}:
            raise TakenError(
                f"another process trains in {self._path.parent} now: {owner}; this one, {self._name}, ends, and saves "
                "no checkpoint there"
            )

    def close(self) -> None:
        """Give the directory back."""
        self._is_closing.set()
        self._file.close()
        with contextlib.suppress(OSError):
            if _owner(self._path) == self._name:
                self._path.unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _beat(self) -> None:
        while not self._is_closing.wait(_BEAT_SECONDS):
            with contextlib.suppress(OSError, ValueError):  # the disk fails, or the file was closed just now
                os.utime(self._file.fileno(), (time.time(), time.time()))  # the time of this machine, not of a server


def hold(run_dir: RunDir) -> Hold:
    """Take the run directory for this process. Raises `UserError` if another process trains there.

    Waits for some seconds if the last owner did not give the directory back, unless it has ended on this machine.
    """
    run_dir.path.mkdir(parents=True, exist_ok=True)
    path = run_dir.path / LOCK_NAME
    try:
        if _beats(path):
            raise FileExistsError
        path.unlink(missing_ok=True)
        return Hold(path)
    except FileExistsError:
        raise UserError(
            f"another process is training in {run_dir.path}: {_owner(path)}; wait for it, end it by `kill` on that "
            "host (all its ranks save a checkpoint and end), or pass another --run-dir"
        ) from None


def is_held(run_dir: RunDir) -> bool:
    """Return whether a process is training in the run directory, by its heartbeat; change nothing."""
    path = run_dir.path / LOCK_NAME
    try:
        return time.time() - _last_beat(path) < _WATCH_SECONDS and _may_live(path)
    except OSError:
        return False


def _beats(path: Path) -> bool:
    """Return whether the process that a lock file names gives a sign of life; wait for one for some seconds."""
    if not _may_live(path):
        return False
    try:
        before, deadline = _last_beat(path), time.monotonic() + _WATCH_SECONDS
        while _last_beat(path) == before and time.monotonic() < deadline:
            time.sleep(_BEAT_SECONDS / 4)
        return _last_beat(path) != before
    except FileNotFoundError:  # it was given back just now
        return False


def _last_beat(path: Path) -> float:
    """Return the time of a lock file. Opens it, because NFS and sshfs keep the times of a file that is not opened."""
    with path.open("rb") as file:
        return os.fstat(file.fileno()).st_mtime


def _may_live(path: Path) -> bool:
    """Return whether a lock file names a process that may still run: one of another machine may."""
    owner = _owner(path)
    here = re.match(f"process ([0-9]{{1,9}}){re.escape(_HERE)}", owner)
    if here is None:
        return bool(owner)
    try:
        os.kill(int(here[1]), 0)
    except OSError as error:
        return isinstance(error, PermissionError)  # it belongs to another user
    return True


def _owner(path: Path) -> str:
    """Return the process that a lock file names; "" if none."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")[:300].strip()
    except FileNotFoundError:
        return ""


def open_run(path: Path) -> RunDir:
    """Return the run directory at `path`. Raises `UserError` if there is none."""
    run_dir = RunDir(path)
    if not run_dir.config.is_file():
        raise UserError(f"{path} is not a run directory: it has no config.json; pass the --run-dir of a training run")
    return run_dir


def runs_of(paths: Sequence[Path]) -> list[Path]:
    """Return the paths, with a directory of run directories (a study) replaced by its run directories, by name.

    A run and a link to it in the same study count once.
    """
    found: list[Path] = []
    for path in paths:
        inner = [] if RunDir(path).config.is_file() else [config.parent for config in path.glob("*/config.json")]
        # Links come first, so that the run's own path takes their place.
        once = {run.resolve(): run for run in sorted(inner, key=lambda run: (not run.is_symlink(), run))}
        found += sorted(once.values()) or [path]
    return found


def say_what_is_left_out(paths: Sequence[Path]) -> None:
    """Print which directories `runs_of` leaves out although they hold runs, such as studies, or may hold some."""
    outer = [path for path in paths if not RunDir(path).config.is_file()]
    inner = {config.parent.parent for path in outer for config in path.glob("*/*/config.json")}
    named = {path.resolve() for path in paths}
    studies = [path for path in sorted(inner) if not RunDir(path).config.is_file() and path.resolve() not in named]
    closed = sorted(place for path in outer for place in path.glob("*/") if not os.access(place, os.X_OK))
    for places, why in (
        (studies, "left out, because they hold runs of their own: {}; pass the path of each"),
        (closed, "left out, because you may not open them: {}; ask their owner"),
    ):
        if places:
            print(why.format(printable(", ".join(map(str, places)))), file=sys.stderr)


def read_object(path: Path, *, mend: str) -> dict[str, Any]:
    """Return the JSON object in a file. Raises `UserError`, which ends with the advice `mend`, if there is none."""
    if not path.is_file():
        raise UserError(f"{path} is not a file; {mend}")
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON ({error}); {mend}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} does not hold a JSON object; {mend}")
    return value


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write `content` so that a reader sees the old file or the new file, never a part, even after a power cut.

    Characters that UTF-8 cannot encode, such as odd bytes of a file name, are written with backslashes.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with filename_in_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with partial.open("wb") as file:
                file.write(content.encode(errors="backslashreplace") if isinstance(content, str) else content)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON object with `write_atomically`."""
    write_atomically(path, json.dumps(value, indent=2) + "\n")
