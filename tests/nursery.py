"""Start `python SCRIPT ...`, `python -m MODULE ...` and `python -c CODE ...` without waiting for their imports.

A nursery is a process of one thread that has imported torch and the trainer. It forks each command, which then has all
that a new interpreter would have: its own session, working directory, environment, arguments, search path of modules,
signal handlers, open files, random state, exit status, and the process that asked for it as its parent. So it can be
signalled, killed and waited for like any other. Ranks of torchrun come from a nursery of that torchrun. The workers of
pytest-xdist come from a nursery of pytest's first process, and have one each: so `make test` imports most of what its
tests need once.

Three things differ: modules are imported already, sets have the same order in all processes (PYTHONHASHSEED), and torch
has the threads of the nursery if a command is given no OMP_NUM_THREADS. A test whose claim is about one of these starts
a new interpreter.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import io
import json
import os
import pickle
import random
import runpy
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, AnyStr, NoReturn

from tests.processes import kill_tree

# Not wandb, and so not timm: when a process ends, it removes a directory that was made at the import. And not what asks
# torch for the number of GPUs, because a process that is forked after that cannot use one.
FOR_COMMANDS = [
    *("torch", "torch.distributed", "torch.nn.parallel", "torch.distributed.run", "torchvision", "numpy", "pydantic"),
    *("scipy.io", "trainer.train", "trainer.probed_runs.probing", "configs", "launch.rank", "launch.slurm_command"),
    "data_pipeline.building.build",
]
FOR_TESTS = ["pytest", "scipy.stats", "matplotlib.figure", "hypothesis"]
FOR_WORKERS = [
    *(*FOR_COMMANDS, *FOR_TESTS, "boto3", "moto.server", "optuna", "s3fs", "torchaudio", "torchvision.transforms.v2"),
    *("sklearn.datasets", "sklearn.ensemble", "sklearn.isotonic", "sklearn.manifold"),
]
_PR_SET_CHILD_SUBREAPER = 36
_NUMBER = struct.Struct("!q")
_PADDING = "-" * 16_384  # room for what the commands show in /proc
_ROOT = Path(__file__).parents[1]
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class _Command:
    """What a new interpreter is given."""

    words: list[str]
    cwd: str
    environ: dict[str, str]
    in_new_session: bool
    is_worker: bool  # of pytest-xdist


class Nursery:
    """The process from which commands are forked, seen from the process that asks for them."""

    def __init__(self, asks: socket.socket, process: subprocess.Popen[bytes] | None = None) -> None:
        self._asks = asks
        self._process = process  # kept, because Popen warns of a process that nobody can wait for
        self._lock = threading.Lock()

    def start(self, command: _Command, files: Sequence[int]) -> int:
        """Fork a process that runs `command` with `files` as its standard files; return its id.

        It becomes a child of this process: the process between the two ends, and this one adopts its children.
        """
        payload = pickle.dumps(command)
        with self._lock, _adopting():
            socket.send_fds(self._asks, [_NUMBER.pack(len(payload))], list(files))
            self._asks.sendall(payload)
            (pid,) = _NUMBER.unpack(_receive(self._asks, _NUMBER.size))
        return int(pid)


class PythonProcess(subprocess.Popen[AnyStr]):
    """A `subprocess.Popen` of a command that begins with `sys.executable`, forked from the nursery of this process."""

    is_worker = False

    def _execute_child(
        self,
        args: Sequence[str | Path],
        executable: str | None,
        preexec_fn: object,
        close_fds: bool,
        pass_fds: Sequence[int],
        cwd: str | Path | None,
        env: Mapping[str, str] | None,
        startupinfo: object,
        creationflags: int,
        shell: bool,
        p2cread: int,
        p2cwrite: int,
        c2pread: int,
        c2pwrite: int,
        errread: int,
        errwrite: int,
        restore_signals: bool,
        gid: object,
        gids: object,
        uid: object,
        umask: int,
        start_new_session: bool,
        *others: object,
    ) -> None:
        words = [os.fspath(word) for word in args]
        assert words[0] == sys.executable, f"{words[0]} is not {sys.executable}"
        assert not pass_fds
        assert preexec_fn is None
        files = [number if ours == -1 else ours for number, ours in enumerate((p2cread, c2pwrite, errwrite))]
        sys.audit("subprocess.Popen", words[0], words, cwd, env)  # as Popen does
        environ = dict(os.environ if env is None else env)
        command = _Command(words, str(Path(cwd or ".").absolute()), environ, start_new_session, self.is_worker)
        self.pid = _nursery(self.is_worker).start(command, files)
        self._child_created = True
        close: Any = getattr(self, "_close_pipe_fds")  # noqa: B009  # the stubs of mypy leave it out
        close(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)


class _Worker(PythonProcess[bytes]):
    is_worker = True


def fork_workers() -> None:
    """Let pytest-xdist, in this process, fork its workers from a nursery."""
    from execnet import gateway_base

    module = SimpleNamespace(PIPE=subprocess.PIPE, Popen=_Worker)
    setattr(gateway_base.ThreadExecModel, "subprocess", module)  # noqa: B010


def run_python(
    words: Sequence[str | Path],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 300.0,
) -> subprocess.CompletedProcess[str]:
    """Run a command that begins with `sys.executable` to its end, as `subprocess.run` does, and keep its output."""
    pipe = subprocess.PIPE
    process = PythonProcess(words, cwd=cwd, env=env, stdout=pipe, stderr=pipe, text=True)
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    finally:
        kill_tree(process)
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


@functools.cache
def _nursery(for_workers: bool = False) -> Nursery:
    """Start the nursery of this process, which ends with it."""
    ours, theirs = socket.socketpair()
    names = FOR_WORKERS if for_workers else FOR_COMMANDS
    call = f"begin({theirs.fileno()}, {names})"
    code = f"import sys; sys.path.insert(0, {str(_ROOT)!r}); from tests.nursery import begin; {call}"
    process = subprocess.Popen(
        [sys.executable, "-c", code, _PADDING],
        cwd=_ROOT,
        env=os.environ | {"NURSERY_PADDING": _PADDING},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=[theirs.fileno()],
    )
    theirs.close()
    return Nursery(ours, process)


def preload(names: list[str]) -> None:
    """Import modules. Leaves out packages that are not installed: tests that need them say so themselves."""
    for name in names:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)


def begin(descriptor: int, names: list[str]) -> NoReturn:
    """Import modules, and fork commands until the process that asks for them ends."""
    preload(names)
    _serve(socket.socket(fileno=descriptor), search_path=_search_path())


def _search_path() -> list[str]:
    """Return the `sys.path` of a new interpreter after its first entry."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    code = "import json, sys; print(json.dumps(sys.path[1:]))"
    found: list[str] = json.loads(subprocess.check_output([sys.executable, "-c", code], env=environ))
    return found


def _serve(asked: socket.socket, *, search_path: list[str]) -> NoReturn:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.collect()
    gc.freeze()  # what is there now is neither searched nor copied by the garbage collection of the commands
    while True:
        header, files, *_ = socket.recv_fds(asked, _NUMBER.size, 3)
        if not header:
            os._exit(0)
        command: _Command = pickle.loads(_receive(asked, _NUMBER.unpack(header)[0]))
        reads, writes = os.pipe()
        between = os.fork()
        if between == 0:
            between = os.getpid()
            pid = os.fork()
            if pid == 0:
                _become(command, files, between=between, search_path=search_path)
            os.write(writes, _NUMBER.pack(pid))
            os._exit(0)
        os.close(writes)
        reply = os.read(reads, _NUMBER.size)
        os.close(reads)
        os.waitpid(between, 0)
        for file in files:
            os.close(file)
        asked.sendall(reply)


def _receive(asked: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        part = asked.recv(size - len(found))
        if not part:
            raise EOFError("the other process has ended")
        found += part
    return found


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Become the parent of every process below this one whose parent ends inside the block."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _become(command: _Command, files: Sequence[int], *, between: int, search_path: list[str]) -> NoReturn:
    """Run a command in this process, which then ends with its status.

    `between` is the process that forked this one. It ends at once, maybe before this line.
    """
    status = 1
    try:
        while os.getppid() == between:
            time.sleep(0.001)
        flags, words = _split_flags(command.words[1:])
        _take_over(command, files, search_path=search_path, is_unbuffered="-u" in flags)
        if command.is_worker:
            _found_nursery(command, search_path)
        status = _run(command, words, search_path=search_path)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(status)


def _split_flags(words: list[str]) -> tuple[list[str], list[str]]:
    number = next(number for number, word in enumerate(words) if word != "-u")
    return words[:number], words[number:]


def _take_over(command: _Command, files: Sequence[int], *, search_path: list[str], is_unbuffered: bool) -> None:
    for handled in signal.valid_signals():
        if callable(signal.getsignal(handled)):
            signal.signal(handled, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if command.in_new_session:
        os.setsid()
    for number, file in enumerate(files):
        os.dup2(file, number)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    if is_unbuffered:
        for stream in (sys.stdout, sys.stderr):
            assert isinstance(stream, io.TextIOWrapper)
            stream.reconfigure(write_through=True)
    threads = os.environ.get("OMP_NUM_THREADS")
    assert command.environ.get("OMP_NUM_THREADS", threads) == threads, "torch has read it already"
    os.environ.clear()
    os.environ.update(command.environ)
    _show_in_proc(command)
    os.chdir(command.cwd)
    more = [entry for entry in command.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[:] = [*more, *search_path]
    sys.orig_argv = list(command.words)
    random.seed()
    sys.modules["numpy"].random.seed()


def _show_in_proc(command: _Command) -> None:
    """Let /proc/PID/cmdline and /proc/PID/environ show the command. The kernel reads both from this memory."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    places = [int(field) for field in fields[45:49]]  # arg_start, arg_end, env_start, env_end; see proc_pid_stat(5)
    lines = command.words, [f"{name}={value}" for name, value in command.environ.items()]
    for start, end, words in zip(places[::2], places[1::2], lines, strict=True):
        content = b"".join(os.fsencode(word) + b"\0" for word in words)
        assert len(content) <= end - start, "the command is longer than _PADDING"
        ctypes.memset(start, 0, end - start)
        ctypes.memmove(start, content, len(content))


def _run(command: _Command, words: list[str], *, search_path: list[str]) -> int:
    """Run a script, `-m` a module or `-c` a program as the main module; return the exit status."""
    status: object = 0
    interrupted = False
    try:
        match words:
            case ["-c", code, *arguments]:
                sys.argv[:] = ["-c", *arguments]
                sys.path.insert(0, "")
                main = sys.modules["__main__"]
                vars(main).pop("__file__", None)
                exec(compile(code, "<string>", "exec"), vars(main))
            case ["-m", module, *arguments]:
                sys.argv[:] = ["-m", *arguments]
                sys.path.insert(0, str(Path.cwd()))
                if module == "torch.distributed.run":
                    _found_nursery(command, search_path)
                    _let_torchrun_fork()
                sys.modules.pop(module, None)  # it becomes the main module, and has no other copy
                runpy.run_module(module, run_name="__main__", alter_sys=True)
            case [script, *arguments]:
                sys.argv[:] = [script, *arguments]
                sys.path.insert(0, str(Path(script).resolve().parent))
                runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        status = end.code
    except BaseException as error:
        interrupted = isinstance(error, KeyboardInterrupt)
        sys.excepthook(*sys.exc_info())
        status = 1
    if status is not None and not isinstance(status, int):
        print(status, file=sys.stderr)
        status = 1
    shut_down: Any = getattr(threading, "_shutdown")  # noqa: B009
    run_exits: Any = getattr(atexit, "_run_exitfuncs")  # noqa: B009
    for end_part in (shut_down, run_exits, sys.stdout.flush, sys.stderr.flush):
        with contextlib.suppress(Exception):
            end_part()
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    return (status or 0) & 0xFF


def _found_nursery(command: _Command, search_path: list[str]) -> None:
    """Fork the nursery of this process, which has no thread yet."""
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in range(3):
            os.dup2(nothing, number)
        # Whoever looks for the ranks among the children of torchrun must not take this process for one of them.
        _show_in_proc(replace(command, words=[sys.executable, "nursery"]))
        _serve(theirs, search_path=search_path)
    theirs.close()
    nursery = Nursery(ours)
    globals()["_nursery"] = lambda *_: nursery


def _let_torchrun_fork() -> None:
    """Make the torchrun in this process start its ranks from the nursery."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    setattr(subprocess_handler, "Popen", PythonProcess)  # noqa: B010
