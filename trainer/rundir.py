"""The run directory: the only thing that passes from training to probe, analysis, report and restart.

RUN_DIR/ config.json  provenance.json  metrics.jsonl  bad_samples.jsonl  nonfinite/  stalled.txt  wandb/  wandb_run_id
         job.json  code/  logs/  (of a job that was submitted)  ended.json  (of a run that was not)
         checkpoints/step_00010000/ ...  LATEST  analysis/*.json *.png  report.html
         probes/step_00010000/base.json overlay.json heads.safetensors ...  probes/curves.json
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from data_pipeline.errors import UserError

logger = logging.getLogger(__name__)

LOCK_NAME = ".lock"
_LOOKS, _LOOK_SECONDS = 10, 0.02
_WITHOUT_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP}  # what such a file system answers


@dataclass(frozen=True)
class RunDir:
    """Names of everything in a run directory; creates nothing by itself."""

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

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step_{step:08d}"

    def probes(self, step: int) -> Path:
        return self.path / "probes" / f"step_{step:08d}"

    def probe_steps(self) -> list[int]:
        """Steps that have probe results, ascending."""
        return sorted(int(path.name.removeprefix("step_")) for path in (self.path / "probes").glob("step_*"))

    def latest_step(self) -> int | None:
        """Step of the newest complete checkpoint, by `LATEST`; None where nothing was saved yet."""
        if not self.latest.is_file():
            return None
        return int(self.latest.read_text().strip().removeprefix("step_"))

    def read_metrics(self) -> list[dict[str, Any]]:
        """Lines of metrics.jsonl, in order: {"step": int, "epoch": int, "train/loss": float, ...}.

        A line cut short by a kill is left out; where a restart repeated a step, its last line wins.
        """
        by_step: dict[int, dict[str, Any]] = {}
        if self.metrics.is_file():
            for line in self.metrics.read_text().splitlines():
                try:
                    entry = json.loads(line)
                except ValueError:
                    continue
                by_step[entry["step"]] = by_step.get(entry["step"], {}) | entry
        return [by_step[step] for step in sorted(by_step)]


def hold(run_dir: RunDir) -> TextIO:
    """Take the run directory for this process, until the returned file is closed or the process ends, however it ends.

    Where the file system knows no locks, the log says so, and nothing is taken. Raises `UserError` while another
    process holds it: two that train in one directory would mix their checkpoints.
    """
    run_dir.path.mkdir(parents=True, exist_ok=True)
    file = (run_dir.path / LOCK_NAME).open("a")
    try:
        _lock(file)
    except BlockingIOError:
        file.close()
        raise UserError(
            f"another process is training in {run_dir.path}; wait for it or end it, or pass another --run-dir"
        ) from None
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise
        logger.warning(
            "the file system of %s knows no locks (%s): see to it that no other process trains there",
            run_dir.path,
            error.strerror,
        )
    _held.add(file)
    return file


def is_held(run_dir: RunDir) -> bool:
    """Tell whether a process trains in the run directory now, by its lock; changes nothing there.

    False if the directory has no lock file, or if its file system knows no locks.
    """
    try:
        # The file may be read-only for this user, and without O_NONBLOCK a pipe in its place would block.
        descriptor = os.open(run_dir.path / LOCK_NAME, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise
        return False
    finally:
        os.close(descriptor)
    return False


def _lock(file: TextIO) -> None:
    """Raise BlockingIOError if another process holds the lock for longer than `is_held` needs to look at it."""
    for _ in range(_LOOKS):
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(_LOOK_SECONDS)
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


_held: weakref.WeakSet[TextIO] = weakref.WeakSet()


def _let_go_of_what_the_parent_holds() -> None:
    """A lock belongs to all processes that have its file open: a data worker must not keep that of a rank that died."""
    for file in _held:
        file.close()


os.register_at_fork(after_in_child=_let_go_of_what_the_parent_holds)


def open_run(path: Path) -> RunDir:
    """The run directory at `path`; raises `UserError` if there is none."""
    run_dir = RunDir(path)
    if not run_dir.config.is_file():
        raise UserError(f"{path} is not a run directory: it holds no config.json; pass the --run-dir of a training run")
    return run_dir


def runs_of(paths: Sequence[Path]) -> list[Path]:
    """The paths, with a directory that holds run directories (a study's) replaced by these, in order of their names."""
    found: list[Path] = []
    for path in paths:
        inner = [] if RunDir(path).config.is_file() else sorted(config.parent for config in path.glob("*/config.json"))
        found += inner or [path]
    return found


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write `content` so that a reader sees the old file or the new one, never a part, even after a power cut."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    write_atomically(path, json.dumps(value, indent=2) + "\n")
