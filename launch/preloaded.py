"""Start the runs of a study on this machine without waiting for their imports.

A preloaded process imports what a run needs, from the copy of the code. It computes nothing, so no thread is at work
and no GPU is in use when it forks. For each run it forks a controller, in place of the one that submitit's local
executor starts, and the controller forks the process that trains. Each run has its own environment, log, time limit,
signals and exit status.

Guarantees: a run computes the same bits as in a new Python process. If the preloaded process ends, the runs go on, and
later runs are started by submitit.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import submitit
from submitit.core.submission import process_job
from submitit.core.utils import JobPaths
from submitit.local.local import LOCAL_REQUEUE_RETURN_CODE, Controller, LocalJob

from launch.job import MAX_TIMEOUTS_HERE  # and with it all that a run imports
from launch.submitted import is_job_here

# Modules that a run imports for its networks (and so torch._dynamo), and when W&B starts.
_IMPORTED_LATE = ("torchvision.models", "wandb.sdk.launch")
_NUM_WAITS, _WAIT_SECONDS = 100, 0.01


class PreloadedProcess:
    """The preloaded process of a study, seen from its launcher. It starts with the first run, and ends on leaving."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def fork(self, folder: Path, environ: Mapping[str, str]) -> int | None:
        """Fork the controller of a job of submitit, and return its process id; None if the process has ended."""
        pipe = subprocess.PIPE
        if self._process is None:
            command = [sys.executable, "-u", "-m", "launch.preloaded"]
            self._process = subprocess.Popen(command, env=environ, stdin=pipe, stdout=pipe, encoding="utf-8")
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            print(json.dumps([str(folder), dict(environ)]), file=self._process.stdin, flush=True)
            return int(self._process.stdout.readline())
        except (OSError, ValueError):
            return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()  # it holds nothing, and its children are not told
            self._process.communicate()


@dataclass(frozen=True)
class _ControllerProcess:
    """The part of `subprocess.Popen` that submitit asks of a controller, which is no child of this process."""

    pid: int

    def poll(self) -> int | None:
        return None if is_job_here(str(self.pid)) else 0


class ForkingExecutor(submitit.LocalExecutor):
    """Submitit's local executor for jobs of one rank, whose controllers are forked from a preloaded process."""

    def __init__(self, folder: Path, *, preloaded: PreloadedProcess, max_num_timeout: int) -> None:
        super().__init__(folder, max_num_timeout=max_num_timeout)
        self._preloaded = preloaded

    def _submit_command(self, command: str) -> LocalJob[Any]:
        """Fork the controller with the variables that `submitit.local.local.start_controller` sets."""
        environ = {
            **os.environ,
            "SUBMITIT_EXECUTOR": "local",
            "SUBMITIT_LOCAL_COMMAND": command,
            "SUBMITIT_LOCAL_NTASKS": "1",
            "SUBMITIT_LOCAL_LOCALID": "0",
            "SUBMITIT_LOCAL_GLOBALID": "0",
            "SUBMITIT_LOCAL_NODEID": "0",
            "SUBMITIT_LOCAL_JOB_NUM_NODES": "1",
            "SUBMITIT_LOCAL_TIMEOUT_S": str(60 * self.parameters["timeout_min"]),
            "SUBMITIT_LOCAL_SIGNAL_DELAY_S": str(self.parameters["signal_delay_s"]),
            "SUBMITIT_LOCAL_WITH_SHELL": "",
            "SUBMITIT_STDERR_TO_STDOUT": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        pid = self._preloaded.fork(self.folder, environ)
        if pid is None:
            return super()._submit_command(command)
        process: Any = _ControllerProcess(pid)
        return LocalJob(self.folder, job_id=str(pid), tasks=[0], process=process)


def main() -> None:
    """Fork a controller for each line of stdin, and print its process id."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system forgets a controller that has ended
    for module in _IMPORTED_LATE:
        with contextlib.suppress(Exception):  # W&B need not be installed; a run says what is wrong with it
            importlib.import_module(module)
    gc.freeze()  # no garbage collection of a run copies the memory of the modules
    while line := sys.stdin.readline():
        pid = os.fork()
        if pid == 0:
            _run(*json.loads(line))
            return
        print(pid, flush=True)


def _run(folder: str, environ: Mapping[str, str]) -> None:
    """Do the work of submitit's two processes of a job, as two forks. Returns in the process that trained."""
    os.environ.clear()
    os.environ.update(environ, SUBMITIT_LOCAL_JOB_ID=str(os.getpid()))
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    _control(Path(folder))
    process_job(folder)


def _control(folder: Path) -> None:
    """Fork the process that trains, which returns, and end this process after it.

    Sends the signals of `Controller`, and forks again after a time limit.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    controller = Controller(folder)  # passes SIGTERM on
    for _ in range(1 + MAX_TIMEOUTS_HERE):
        pid = os.fork()
        if pid == 0:
            _become_a_run(JobPaths(folder, controller.pid, 0))
            return
        run: Any = _RunProcess(pid)
        controller.tasks = [run]
        has_to_go_on = LOCAL_REQUEUE_RETURN_CODE in controller.wait()
        controller.kill_tasks()
        if not has_to_go_on:
            break
    os._exit(0)


def _become_a_run(paths: JobPaths) -> None:
    """Set the handlers of signals, the output and the random state of a new process. Wait until the job is written."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with paths.stdout.open("a", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    random.seed()
    for _ in range(_NUM_WAITS):  # the launcher names the file after the process; submitit looks for it once a second
        if paths.submitted_pickle.exists():
            break
        time.sleep(_WAIT_SECONDS)


class _RunProcess:
    """The part of `subprocess.Popen` that a controller uses, for a forked child."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._status: int | None = None

    def poll(self) -> int | None:
        if self._status is None:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            self._status = os.waitstatus_to_exitcode(status) if pid else None
        return self._status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self._pid, number)


if __name__ == "__main__":
    main()
