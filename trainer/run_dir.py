"""The run directory: the only link from training to probe, analysis, report and restart.

RUN_DIR/ config.json  provenance.json  metrics.jsonl  bad_samples.jsonl  nonfinite/  stalled/  wandb/  wandb_run_id
         job.json  code/  logs/  (submitted jobs only)
         ended.json  (if the last start ended early)
         checkpoints/step_00010000/ ...  LATEST  analysis/*.json *.png  report.html
         probes/step_00010000/base.json overlay.json heads.safetensors ...
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import math
import os
import re
import socket
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from data_pipeline.core.errors import UserError, filename_in_errors, printable

logger = logging.getLogger(__name__)

LOCK_NAME = ".lock"
_LOCK_TRIES, _LOCK_SECONDS = 10, 0.02
_END_BYTES = 2**18  # of metrics.jsonl, which `RunDir.read_last_metrics` reads: some hundred lines
_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP}  # the answers of a file system without locks


@dataclass(frozen=True)
class RunDir:
    """The paths of a run directory; creates nothing."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.json"

    @property
    def provenance(self) -> Path:
        return self.path / "provenance.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def bad_samples(self) -> Path:
        return self.path / "bad_samples.jsonl"

    @property
    def wandb_run_id(self) -> Path:
        return self.path / "wandb_run_id"

    @property
    def stalled(self) -> Path:
        return self.path / "stalled"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def latest(self) -> Path:
        return self.path / "LATEST"

    @property
    def analysis(self) -> Path:
        return self.path / "analysis"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def ended(self) -> Path:
        """Return the path of the file that says why the last start ended early."""
        return self.path / "ended.json"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step_{step:08d}"

    @property
    def all_probes(self) -> Path:
        return self.path / "probes"

    def probes(self, step: int) -> Path:
        return self.all_probes / f"step_{step:08d}"

    def probe_steps(self) -> list[int]:
        """Return the steps that have probe results, ascending."""
        return steps_in(self.all_probes)

    def latest_step(self) -> int | None:
        """Return the step of the newest complete checkpoint, by `LATEST`; None if that file is missing or damaged."""
        text = self.latest.read_bytes() if self.latest.is_file() else b""
        match = re.fullmatch(rb"step_([0-9]{1,18})\s*", text)
        return int(match[1]) if match else None

    def read_config(self) -> dict[str, Any]:
        """Return the config as data, without its classes. Raises `UserError` if the file holds no JSON object."""
        return read_object(self.config, mend="restore the file")

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


def steps_in(directory: Path) -> list[int]:
    """Return the steps with a directory such as step_00000500 in `directory`, ascending.

    Logs and skips other names that begin with "step_".
    """
    steps = []
    for path in sorted(directory.glob("step_*")):
        match = re.fullmatch(r"step_([0-9]{8,18})", path.name)
        if match and path.is_dir() and path.name == f"step_{int(match[1]):08d}":
            steps.append(int(match[1]))
        else:
            logger.warning("%s is not the directory of a step, such as step_00000500; skipping it", path)
    return steps


def hold(run_dir: RunDir) -> TextIO:
    """Lock the run directory for this process, until the returned file is closed or the process ends in any way.

    On a file system without locks, logs a warning and locks nothing. Raises `UserError` if another process holds the
    lock: two processes that train in one directory would mix their checkpoints.
    """
    run_dir.path.mkdir(parents=True, exist_ok=True)
    file = (run_dir.path / LOCK_NAME).open("a+", encoding="utf-8", errors="replace")
    try:
        _lock(file)
    except BlockingIOError:
        with file:
            file.seek(0)
            raise UserError(
                f"another process is training in {run_dir.path}: {file.read(300).strip()}; wait for it, end it "
                "by `kill` on that host (all its ranks save a checkpoint and end), or pass another --run-dir"
            ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        logger.warning(
            "the file system of %s has no locks (%s): make sure that no other process trains there",
            run_dir.path,
            error.strerror,
        )
    with contextlib.suppress(OSError):  # on a full disk the lock still holds
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
    _held.add(file)
    return file


def is_held(run_dir: RunDir) -> bool:
    """Return whether a process is training in the run directory, by its lock; change nothing.

    Returns False if the directory has no lock file, or if its file system has no locks.
    """
    try:
        # The file may be read-only for this user; O_NONBLOCK, because a pipe in its place would block.
        descriptor = os.open(run_dir.path / LOCK_NAME, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return False
    finally:
        os.close(descriptor)
    return False


def _lock(file: TextIO) -> None:
    """Lock a file. Raises BlockingIOError if another process holds the lock for longer than a call of `is_held`."""
    for _ in range(_LOCK_TRIES):
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(_LOCK_SECONDS)
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


_held: weakref.WeakSet[TextIO] = weakref.WeakSet()


def _close_inherited_locks() -> None:
    """Close the lock files in a forked process; otherwise it would keep the lock after its parent has ended."""
    for file in _held:
        file.close()


os.register_at_fork(after_in_child=_close_inherited_locks)


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
    """Print which directories `runs_of` leaves out although they hold runs, such as studies in runs/; if there are."""
    inner = [child for path in paths if not RunDir(path).config.is_file() for child in sorted(path.glob("*/"))]
    named = {path.resolve() for path in paths}
    studies = [
        printable(str(child))
        for child in inner
        if not RunDir(child).config.is_file() and child.resolve() not in named and any(child.glob("*/config.json"))
    ]
    if studies:
        print(
            f"left out, because they hold runs of their own: {', '.join(studies)}; pass the path of each",
            file=sys.stderr,
        )


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

    Characters that UTF-8 cannot encode, such as odd bytes of a file name, are written with backslashes. An `OSError`
    has `path` as its file name.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
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
    except OSError as error:
        if error.filename == str(partial):
            error.filename = str(path)
        raise


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON object with `write_atomically`."""
    write_atomically(path, json.dumps(value, indent=2) + "\n")
