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
import re
import socket
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO, TypeVar

from data_pipeline.core.errors import UserError, about
from trainer.observability.records import Metrics, Provenance, read_metrics, read_provenance

logger = logging.getLogger(__name__)

LOCK_NAME = ".lock"
_LOOKS, _LOOK_SECONDS = 10, 0.02
ALLOW_PIPE_HELP = "Execute the pipe: locations in the config of the run. Use it only for runs of people you trust."
_WITHOUT_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP}  # what such a file system answers


@dataclass(frozen=True)
class RunDir:
    """Names of everything in a run directory; creates nothing by itself.

    `probes_at` is where results of probes are, if not in `probes/` of the run directory, which may be read-only.
    """

    path: Path
    probes_at: Path | None = None

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

    @property
    def all_probes(self) -> Path:
        return self.probes_at or self.path / "probes"

    def probes(self, step: int) -> Path:
        return self.all_probes / f"step_{step:08d}"

    def probe_steps(self) -> list[int]:
        """Return the steps that have probe results, ascending."""
        return steps_in(self.all_probes)

    def latest_step(self) -> int | None:
        """Return the step of the newest complete checkpoint, by `LATEST`; None if it is not there, or is damaged."""
        text = self.latest.read_bytes() if self.latest.is_file() else b""
        match = re.fullmatch(rb"step_([0-9]{1,18})\s*", text)
        return int(match[1]) if match else None

    def read_metrics(self) -> list[dict[str, Any]]:
        """Return the entries of metrics.jsonl by ascending step, as `trainer.observability.records` reads them.

        Logs which lines are damaged and left out.
        """
        return _logged(read_metrics(self.metrics)).entries

    def read_provenance(self) -> dict[str, Any]:
        """Return the facts of provenance.json; log what is damaged and left out (`trainer.observability.records`)."""
        return _logged(read_provenance(self.provenance)).facts


def steps_in(directory: Path) -> list[int]:
    """Return the steps that have a directory step_00000500 or so in `directory`, ascending.

    Anything else whose name begins with "step_" is named in the log and passed over.
    """
    steps = []
    for path in sorted(directory.glob("step_*")):
        match = re.fullmatch(r"step_([0-9]{8,18})", path.name)
        if match and path.is_dir() and path.name == f"step_{int(match[1]):08d}":
            steps.append(int(match[1]))
        else:
            logger.warning("%s is no directory of a step, such as step_00000500; passing over it", path)
    return steps


_Read = TypeVar("_Read", Metrics, Provenance)


def _logged(read: _Read) -> _Read:
    for problem in read.problems:
        logger.warning("%s", problem)
    return read


def hold(run_dir: RunDir) -> TextIO:
    """Take the run directory for this process, until the returned file is closed or the process ends, however it ends.

    Where the file system knows no locks, the log says so, and nothing is taken. Raises `UserError` while another
    process holds it: two that train in one directory would mix their checkpoints.
    """
    run_dir.path.mkdir(parents=True, exist_ok=True)
    file = (run_dir.path / LOCK_NAME).open("a+", errors="replace")
    try:
        _lock(file)
    except BlockingIOError:
        with file:
            raise UserError(_refusal(run_dir, file)) from None
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise
        logger.warning(
            "the file system of %s knows no locks (%s): see to it that no other process trains there",
            run_dir.path,
            error.strerror,
        )
    with contextlib.suppress(OSError):  # a full disk: the lock holds all the same
        file.truncate(0)
        file.write(f"{os.getpid()} {socket.gethostname()}\n")
        file.flush()
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


def _refusal(run_dir: RunDir, lock: TextIO) -> str:
    """Return which process holds the run directory, by what it wrote into `lock`, and how to end it."""
    lock.seek(0)
    holder = re.fullmatch(r"(\d+) ([\w.-]+)\n", lock.read(300))
    if holder is None:
        return f"another process is training in {run_dir.path}; wait for it or end it, or pass another --run-dir"
    pid, host = holder.groups()
    return (
        f"another process is training in {run_dir.path}: process {pid} on {host}; wait for it, stop it by `kill {pid}` "
        "on that host (all its ranks save a checkpoint and end), or pass another --run-dir"
    )


_held: weakref.WeakSet[TextIO] = weakref.WeakSet()


def _let_go_of_what_the_parent_holds() -> None:
    """A lock belongs to all processes that have its file open: a data worker must not keep that of a rank that died."""
    for file in _held:
        file.close()


os.register_at_fork(after_in_child=_let_go_of_what_the_parent_holds)


def open_run(path: Path) -> RunDir:
    """Return the run directory at `path`; raises `UserError` if there is none."""
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


def places_of_probes(run_dirs: Sequence[RunDir], directory: Path) -> list[RunDir]:
    """Return the run directories with their probe results in `directory`, by the name of each.

    Raises `UserError` if two have the same name.
    """
    names = [run_dir.path.resolve().name for run_dir in run_dirs]
    for run_dir, name in zip(run_dirs, names, strict=True):
        if names.count(name) > 1:
            raise UserError(f"{run_dir.path} is not the only run called {name}; give each a directory of its own")
    return [replace(run_dir, probes_at=directory / name) for run_dir, name in zip(run_dirs, names, strict=True)]


def read_object(path: Path, *, mend: str) -> dict[str, Any]:
    """Return the JSON object that a file holds; raises `UserError`, which ends with `mend`, if it holds none."""
    if not path.is_file():
        raise UserError(f"{path} is no file; {mend}")
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else " ".join(str(error).split())
        raise UserError(f"{path} is not valid JSON ({reason}); {mend}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} does not hold a JSON object; {mend}")
    return value


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write `content` so that a reader sees the old file or the new one, never a part, even after a power cut.

    Text that UTF-8 cannot hold, such as a file name of other bytes, is written with backslashes. An `OSError` names
    `path`.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with about(path):
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
    write_atomically(path, json.dumps(value, indent=2) + "\n")
