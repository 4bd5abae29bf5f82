"""Fetch one file from http(s), from a store that fsspec opens, or from a command that prints it, into an open file.

Guarantees: `fetch` returns within its time limits, and the file is then whole. A server that drops the connection,
stalls, trickles, truncates or corrupts an answer costs attempts, never a wrong byte.

`requests` reads http(s) in a thread: its timeouts hold for one read of a socket, and a server that trickles never
reaches them. fsspec, which reads s3://, gs://, hf:// and others, has no timeouts of its own, so it reads in a thread
too. A command runs in a shell, in a process group of its own.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import itertools
import logging
import os
import queue
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import BinaryIO, Final, Protocol

import fsspec
import pydantic_core
import requests
import urllib3
from webdataset.gopen import rewrite_url

from data_pipeline.core.errors import UserError

logger = logging.getLogger(__name__)

_BLOCK: Final = 1 << 20
_RANGE: Final = 1 << 23  # of an object that is asked for at a time
_MAX_BLOCKS: Final = 8  # that wait to be written
_GRACE_SECONDS: Final = 2.0  # before a command or thread that should have ended is stopped
_POLL_SECONDS: Final = 0.2  # the longest time until a fetch notices that it should stop
_MAX_BYTES_UNKNOWN: Final = 1 << 30  # of a file of unknown size: an endless answer must not fill the disk
_LONGEST_PAUSE: Final = 8.0  # seconds between two attempts, if the server asks for none
_BUSY_STATUS: Final = frozenset({408, 425, 429, *range(500, 600)})  # a later attempt may get the file
_LASTING_STATUS: Final = frozenset(range(400, 500)) - _BUSY_STATUS  # another attempt would get the same answer
_UNREACHABLE: Final = frozenset(
    {errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ETIMEDOUT}
)
_COMPRESSIONS: Final = frozenset({"gzip", "x-gzip", "deflate", "compress", "x-compress", "br", "zstd"})
_LASTING_EXIT: Final = (126, 127)  # of a shell: the command cannot be run, or is not installed
_NOT_A_URL: Final = (
    requests.exceptions.InvalidURL,
    requests.exceptions.InvalidSchema,
    requests.exceptions.MissingSchema,
    requests.exceptions.TooManyRedirects,
)


@dataclass(frozen=True)
class ObjectStore:
    """The package with which fsspec reads a store, and the variables that hold its credentials."""

    package: str
    variables: str


OBJECT_STORES: Final = {
    "s3": ObjectStore("s3fs", "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"),
    "gs": ObjectStore("gcsfs", "GOOGLE_APPLICATION_CREDENTIALS"),
    "hf": ObjectStore("huggingface_hub", "HF_TOKEN"),
    "az": ObjectStore("adlfs", "AZURE_STORAGE_CONNECTION_STRING"),
    "oci": ObjectStore("ocifs", "OCIFS_IAM_TYPE"),
}


@dataclass(frozen=True)
class Limits:
    """The limits of a fetch.

    Attributes:
        stall_seconds: an attempt that receives no byte for this time is given up.
        num_attempts: the largest number of attempts that get a wrong answer or only a part of one.
        deadline: the end of all attempts, in the time of `time.monotonic()`.
        stop: another thread can set it to end the fetch.
        must_answer: whether the fetch ends at the first attempt if the host cannot be found or reached.
        waits: whether a server that cannot be reached or is busy is waited for until the deadline; else such attempts
            count for `num_attempts` too.
    """

    stall_seconds: float
    num_attempts: int
    deadline: float
    stop: threading.Event = field(default_factory=threading.Event)
    must_answer: bool = False
    waits: bool = True


@dataclass(frozen=True)
class Expected:
    """The known properties of a file before it is fetched.

    Attributes:
        num_bytes: its size; None if it is not known.
        sha256: the sha256 of its content; None if it is not known.
        problem: for a file with unknown size and hash; returns what is wrong with the content, or None.
        max_bytes: a longer answer is refused; ignored if `num_bytes` is known.
    """

    num_bytes: int | None = None
    sha256: str | None = None
    problem: Callable[[BinaryIO], str | None] | None = None
    max_bytes: int = _MAX_BYTES_UNKNOWN


class _AttemptError(Exception):
    """An attempt did not deliver the file.

    Attributes:
        is_final: whether another attempt would fail too.
        is_unanswered: whether the host could not be found or reached.
        is_unavailable: whether the host could not be reached, or answered that it cannot deliver the file now.
        asked_seconds: the pause before the next attempt that the server asks for.
    """

    def __init__(
        self,
        reason: str,
        *,
        is_final: bool = False,
        is_unanswered: bool = False,
        is_busy: bool = False,
        asked_seconds: float = 0.0,
    ) -> None:
        super().__init__(reason)
        self.is_final = is_final
        self.is_unanswered = is_unanswered
        self.is_unavailable = is_unanswered or is_busy
        self.asked_seconds = asked_seconds


class _Source(Protocol):
    """The bytes of one attempt."""

    def read(self, seconds: float) -> bytes | None:
        """Return the next bytes, b"" at the end, or None if none came within `seconds`."""

    def check_end(self, *, seconds: float) -> None:
        """Raise `_AttemptError` if the source ended with an error. Waits at most `seconds`."""

    def stop(self) -> None:
        """Free all resources. May be called at any time; returns soon."""


def fetch(url: str, file: BinaryIO, *, expected: Expected, limits: Limits) -> None:
    """Fill `file` with the content at `url`; try again after a pause if an attempt fails.

    When this returns, size and hash are as `expected`. Raises `UserError` with the reason of the last attempt: at once
    if another attempt would fail too (no such file, no such command), else when `limits` are reached. Raises `OSError`
    if `file` cannot be written.
    """
    start = time.monotonic()
    num_counted = 0
    for attempt in itertools.count(1):
        try:
            return _attempt(url, file, expected=expected, limits=limits)
        except _AttemptError as error:
            num_counted += not (error.is_unavailable and limits.waits)
            left = limits.deadline - time.monotonic()
            pause = _pause(attempt, asked=error.asked_seconds, left=left)
            is_last = num_counted == limits.num_attempts or pause >= left
            if error.is_final or is_last or (error.is_unanswered and limits.must_answer):
                tries = f"{attempt} attempt{'s' * (attempt > 1)} in {time.monotonic() - start:.0f} s"
                raise UserError(
                    f"{url} could not be fetched: {error} ({tries}); check the location and the server that holds it"
                ) from None
            logger.warning("%s: %s; attempt %d failed, the next one begins in %.3g s", url, error, attempt, pause)
            limits.stop.wait(pause)
    raise AssertionError("the last attempt returns or raises")


def _pause(attempt: int, *, asked: float, left: float) -> float:
    """Return the seconds before the next attempt, of which `left` are left: as the server asks if the time allows it.

    Examples:
        >>> [_pause(attempt, asked=0.0, left=60.0) for attempt in (1, 2, 5, 9_999)]
        [0.5, 1.0, 8.0, 8.0]
        >>> _pause(1, asked=30.0, left=60.0), _pause(1, asked=90.0, left=60.0)
        (30.0, 0.5)
    """
    usual = min(0.5 * 2.0 ** min(attempt - 1, 9), _LONGEST_PAUSE)
    return max(usual, asked) if asked < left else usual


def _attempt(url: str, file: BinaryIO, *, expected: Expected, limits: Limits) -> None:
    num_bytes, digest = 0, hashlib.sha256()
    max_bytes = expected.max_bytes if expected.num_bytes is None else expected.num_bytes
    file.seek(0)
    source = _open(url, limits, num_bytes=expected.num_bytes)
    try:
        for block in _blocks(source, limits):
            num_bytes += len(block)
            if num_bytes > max_bytes:
                raise _AttemptError(f"it is longer than {max_bytes} bytes")
            digest.update(block)
            file.write(block)
        file.truncate()
        file.flush()
        if expected.sha256 == digest.hexdigest():
            return
        seconds = max(0.1, min(limits.stall_seconds, limits.deadline - time.monotonic()))
        source.check_end(seconds=seconds)
    finally:
        source.stop()
    if expected.num_bytes is not None and num_bytes < expected.num_bytes:
        raise _AttemptError(f"it ended after {num_bytes} of {expected.num_bytes} bytes")
    if expected.sha256 is not None:
        raise _AttemptError(
            "the answer is not the file that the manifest names (sha256), so one of the two was replaced"
        )
    if expected.problem is not None:
        file.seek(0)
        if (problem := expected.problem(file)) is not None:
            raise _AttemptError(problem)


def json_problem(file: BinaryIO) -> str | None:
    """Return what is wrong with a file that must be JSON; None if it is."""
    content = file.read()
    try:
        pydantic_core.from_json(content)  # limits the depth
    except ValueError:
        return f"the answer of {len(content)} bytes is not whole JSON"
    return None


def _open(url: str, limits: Limits, *, num_bytes: int | None) -> _Source:
    """Open a URL, rewritten by the rules of WebDataset in GOPEN_REWRITE."""
    rewritten: str = rewrite_url(url)
    scheme, _, rest = rewritten.partition(":")
    if scheme == "pipe":
        return _Command(rest, seconds=max(0.0, limits.deadline - time.monotonic()) + _GRACE_SECONDS)
    if scheme in ("http", "https"):
        return _Download(rewritten, stall_seconds=limits.stall_seconds)
    if scheme in OBJECT_STORES:
        return _Object(rewritten, num_bytes)
    raise UserError(f"{url} is rewritten to {rewritten} by GOPEN_REWRITE; rewrite it to a location that can be read")


def _blocks(source: _Source, limits: Limits) -> Iterator[bytes]:
    """Yield bytes as they come; raise `_AttemptError` if `limits` are reached first."""
    num_bytes = 0
    last_byte = time.monotonic()
    while True:
        now = time.monotonic()
        if limits.stop.is_set():
            raise _AttemptError("the fetch was stopped", is_final=True)
        if now >= limits.deadline:
            raise _AttemptError(f"only {num_bytes} bytes came in the time for one file (file_seconds)", is_final=True)
        if now >= last_byte + limits.stall_seconds:
            raise _AttemptError(f"after {num_bytes} bytes, none came for {limits.stall_seconds:g} s (stall_seconds)")
        block = source.read(min(last_byte + limits.stall_seconds - now, limits.deadline - now, _POLL_SECONDS))
        if block is None:
            continue
        if not block:
            return
        num_bytes += len(block)
        yield block
        last_byte = time.monotonic()


class _ReadInThread:
    """Bytes that a thread reads.

    They pass through a queue and not a pipe, because a process that is forked meanwhile would keep a pipe open.
    """

    def __init__(self) -> None:
        self._blocks: queue.Queue[bytes] = queue.Queue(_MAX_BLOCKS)
        self._is_stopped = threading.Event()
        self._error: _AttemptError | None = None
        threading.Thread(target=self._run, name="download", daemon=True).start()

    def read(self, seconds: float) -> bytes | None:
        try:
            return self._blocks.get(timeout=seconds)
        except queue.Empty:
            return None

    def check_end(self, *, seconds: float) -> None:
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        self._is_stopped.set()

    def _run(self) -> None:
        try:
            self._download()
        except _AttemptError as error:
            self._error = error
        self._put(b"")

    def _download(self) -> None:
        """Read all bytes and `_put` them. Raises `_AttemptError`."""
        raise NotImplementedError

    def _put(self, block: bytes) -> None:
        while not self._is_stopped.is_set():
            try:
                self._blocks.put(block, timeout=_POLL_SECONDS)
            except queue.Full:
                continue
            return


class _Download(_ReadInThread):
    """The answer of a web server."""

    def __init__(self, url: str, *, stall_seconds: float) -> None:
        self._url = url
        # `_blocks` gives up before this timeout, which then ends the thread.
        self._socket_seconds = stall_seconds + _GRACE_SECONDS
        self._answer: requests.Response | None = None
        super().__init__()

    def stop(self) -> None:
        super().stop()
        if self._answer is not None:
            with suppress(ValueError, RuntimeError, OSError):  # the answer has ended
                self._answer.raw.shutdown()

    def _download(self) -> None:
        try:
            self._read_answer()
        except _NOT_A_URL as error:
            raise _AttemptError(f"its URL does not work ({error})", is_final=True) from None
        except requests.exceptions.ConnectionError as error:
            raise _AttemptError(_connection_problem(error), is_unanswered=True) from None
        except (requests.exceptions.RequestException, urllib3.exceptions.HTTPError, OSError, ValueError) as error:
            raise _AttemptError(f"the connection broke off ({error})") from None

    def _read_answer(self) -> None:
        with requests.get(
            self._url, stream=True, timeout=self._socket_seconds, headers={"Accept-Encoding": "identity"}
        ) as answer:
            if not answer.ok:
                is_final = answer.status_code in _LASTING_STATUS
                raise _AttemptError(
                    f"the server answers {answer.status_code} {answer.reason}",
                    is_final=is_final,
                    is_busy=not is_final,
                    asked_seconds=_retry_after(answer),
                )
            encoding = answer.headers.get("Content-Encoding", "")
            if any(word.strip().lower() in _COMPRESSIONS for word in encoding.split(",")):
                reason = f"the server compresses the file unasked (Content-Encoding: {encoding})"
                raise _AttemptError(reason, is_final=True)
            self._answer = answer
            num_bytes = 0
            try:
                while not self._is_stopped.is_set() and (block := answer.raw.read1(_BLOCK, decode_content=False)):
                    num_bytes += len(block)
                    self._put(block)
            except (urllib3.exceptions.HTTPError, OSError) as error:
                raise _AttemptError(f"the connection broke off after {num_bytes} bytes ({error})") from None


def _retry_after(answer: requests.Response) -> float:
    """Return the seconds that an answer asks to wait (Retry-After, a number or a date); 0 if it does not say."""
    with suppress(urllib3.exceptions.InvalidHeader, ValueError, OverflowError):
        return float(urllib3.Retry().get_retry_after(answer.raw) or 0.0)
    return 0.0


class _Object(_ReadInThread):
    """An object of a store, read by fsspec.

    An object of known size is asked for in ranges, so nothing asks for its size first, and a slow store still delivers
    a range within `stall_seconds`.
    """

    def __init__(self, url: str, num_bytes: int | None) -> None:
        self._url, self._num_bytes = url, num_bytes
        super().__init__()

    def _download(self) -> None:
        store = OBJECT_STORES[self._url.partition(":")[0]]
        try:
            for content in self._parts():
                for first in range(0, len(content), _BLOCK):
                    self._put(content[first : first + _BLOCK])
                if self._is_stopped.is_set():
                    return
        except ImportError:
            raise _AttemptError(f"it needs `pip install {store.package}`", is_final=True) from None
        except FileNotFoundError:
            raise _AttemptError("there is no such object", is_final=True) from None
        except Exception as error:  # each store has errors of its own
            is_final = isinstance(error, PermissionError) or "credential" in f"{type(error).__name__} {error}".lower()
            mend = f"; set {store.variables}" if is_final else ""
            causes = list(_causes(error))
            raise _AttemptError(
                f"{type(error).__name__}: {error}{mend}",
                is_final=is_final,
                is_unanswered=any(map(_is_unreachable, causes)),
                is_busy=not _BUSY_STATUS.isdisjoint(map(_http_status, causes)),
            ) from None

    def _parts(self) -> Iterator[bytes]:
        if self._num_bytes is None:
            with fsspec.open(self._url, "rb") as file:
                while content := file.read(_BLOCK):
                    yield content
            return
        store, path = fsspec.url_to_fs(self._url)
        for first in range(0, self._num_bytes, _RANGE):
            yield store.cat_file(path, start=first, end=min(first + _RANGE, self._num_bytes))


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, the one that led to it, and so on."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def _is_unreachable(error: BaseException) -> bool:
    return isinstance(error, socket.gaierror) or (isinstance(error, OSError) and error.errno in _UNREACHABLE)


def _http_status(error: BaseException) -> int | None:
    """Return the status of the answer that a client of a store could not use; None if its error has none.

    botocore has it in a mapping, the clients of Google, Azure and Hugging Face in an attribute.
    """
    response = getattr(error, "response", None)
    in_mapping = response.get("ResponseMetadata", {}).get("HTTPStatusCode") if isinstance(response, dict) else None
    in_attributes = [getattr(each, name, None) for each in (response, error) for name in ("status_code", "code")]
    found = [in_mapping, *in_attributes]
    return next((status for status in found if isinstance(status, int)), None)


def _connection_problem(error: requests.exceptions.ConnectionError) -> str:
    """Return the innermost reason of an error of `requests`, without the addresses of its objects."""
    reason = getattr(error.args[0], "reason", error.args[0]) if error.args else error
    if isinstance(reason, urllib3.exceptions.NameResolutionError):
        return "there is no host of that name"
    cause = reason.__cause__ if isinstance(reason, BaseException) else None
    return f"no connection to the server ({cause or reason})"


class _Command:
    """The output of a shell command."""

    def __init__(self, command: str, *, seconds: float) -> None:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  (`stop` closes it)
        # `timeout` makes a process group, so that a stalled pipeline can be killed as a whole. It also ends the group
        # if this process is killed.
        limit = ["timeout", "--kill-after=1", f"{seconds:.0f}"] if shutil.which("timeout") else []
        self._process = subprocess.Popen(
            [*limit, "sh", "-c", command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            bufsize=0,
        )
        assert self._process.stdout is not None
        self._output = self._process.stdout
        with suppress(AttributeError, OSError):  # exists on Linux only, and each user has a limit
            fcntl.fcntl(self._output, fcntl.F_SETPIPE_SZ, _BLOCK)
        self._poller = select.poll()
        self._poller.register(self._output, select.POLLIN)

    def read(self, seconds: float) -> bytes | None:
        return os.read(self._output.fileno(), _BLOCK) if self._poller.poll(1000 * seconds) else None

    def check_end(self, *, seconds: float) -> None:
        try:
            status = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise _AttemptError(f"the command did not end within {seconds:.0f} s of its last byte") from None
        if status == 0:
            return
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").split("\n")
        said = next((line.strip() for line in reversed(lines) if line.strip()), "without a message")
        raise _AttemptError(f"the command ended with exit status {status} ({said})", is_final=status in _LASTING_EXIT)

    def stop(self) -> None:
        """Kill the command and all processes that it started."""
        process = self._process
        with suppress(ProcessLookupError):
            if os.getpgid(process.pid) == process.pid:
                os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        self._output.close()
        self._stderr.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(5.0)
