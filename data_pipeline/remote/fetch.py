"""One file from elsewhere: a URL comes in, checked bytes go out to an open file, and it never takes for ever.

WebDataset's own openers bring the bytes: `curl` for http(s), a shell for `pipe:`. They have no limit of time that holds
(their `Pipe` waits two hours for its process) and do not say whether a file is whole; both are seen to here.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import select
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from typing import IO, BinaryIO, Final

import pydantic_core
from webdataset.gopen import Pipe, gopen_error, gopen_schemes, rewrite_url

from data_pipeline.core.errors import UserError

logger = logging.getLogger(__name__)

_BLOCK: Final = 1 << 20
_PROBE_SECONDS: Final = 10.0
_GRACE_SECONDS: Final = 2.0  # after a command should have been killed here
_STOP_SECONDS: Final = 0.2  # how soon a fetch sees that it is to stop
_MAX_BYTES_UNKNOWN: Final = 1 << 30  # of a file whose size nobody told: an endless answer must not fill the disk
_LASTING_STATUS: Final = frozenset(range(400, 500)) - {408, 425, 429}  # the server would say the same next time
_LASTING_EXIT: Final = (126, 127)  # of a shell: the command cannot be run, is not installed
_NO_SERVER: Final = (3, 6, 7)  # of curl: not a URL, no such host, nobody listens


@dataclass(frozen=True)
class Limits:
    """How long to try.

    Attributes:
        stall_seconds: an attempt may bring no byte for so long.
        num_attempts: how many.
        deadline: when all must be done, by `time.monotonic()`.
        stop: once set, from another thread, no more is tried.
    """

    stall_seconds: float
    num_attempts: int
    deadline: float
    stop: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True)
class Expected:
    """The known properties of a file before it is fetched.

    Attributes:
        num_bytes: its size; None if it is not known.
        sha256: of its content; None if it is not known.
        is_json: that it is JSON, if that is all there is to tell a whole file by.
        max_bytes: an answer that goes on for longer is broken off; `num_bytes` if that is known.
    """

    num_bytes: int | None = None
    sha256: str | None = None
    is_json: bool = False
    max_bytes: int = _MAX_BYTES_UNKNOWN


class _AttemptError(Exception):
    """One attempt did not bring the file; `is_final`: nor would another; `is_silent`: not a byte came to say why."""

    def __init__(self, reason: str, *, is_final: bool = False, is_silent: bool = False) -> None:
        super().__init__(reason)
        self.is_final = is_final
        self.is_silent = is_silent


def fetch(url: str, file: BinaryIO, *, expected: Expected, limits: Limits) -> None:
    """Fill `file` with what is at `url`, trying again after a pause where an attempt fails.

    Size and hash are as expected when this returns. Raises `UserError` that says what the last attempt met: at once
    where another cannot fare better (no such file, no such command), else by `limits`; `OSError` where `file` cannot be
    written.
    """
    start = time.monotonic()
    for attempt in range(1, limits.num_attempts + 1):
        try:
            return _attempt(url, file, expected=expected, limits=limits)
        except _AttemptError as error:
            pause = min(0.5 * 2 ** (attempt - 1), 8.0)
            is_last = attempt == limits.num_attempts or time.monotonic() + pause >= limits.deadline
            if error.is_final or is_last:
                tries = f"{attempt} attempt{'s' * (attempt > 1)} in {time.monotonic() - start:.0f} s"
                reason = str(error)
                if error.is_silent and _is_http(url):
                    reason += f", and to a request for one byte: {_ask(url, stall_seconds=limits.stall_seconds).text}"
                raise UserError(
                    f"{url} could not be fetched: {reason} ({tries}); check the location and the server that holds it"
                ) from None
            logger.warning("%s: %s; attempt %d of %d failed", url, error, attempt, limits.num_attempts)
            limits.stop.wait(pause)
    raise AssertionError("the last attempt returns or raises")


def check_answers(url: str, *, stall_seconds: float) -> None:
    """Raise `UserError` where nobody will ever answer at `url`; the opener's curl would try for a minute first."""
    if _is_http(url):
        answer = _ask(url, stall_seconds=stall_seconds)
        if answer.curl_exit in _NO_SERVER or answer.is_lasting:
            raise UserError(f"{url} cannot be read: {answer.text}; check the location and the server that holds it")


def _is_http(url: str) -> bool:
    return str(rewrite_url(url)).startswith(("http:", "https:"))


def _attempt(url: str, file: BinaryIO, *, expected: Expected, limits: Limits) -> None:
    num_bytes, digest = 0, hashlib.sha256()
    max_bytes = expected.max_bytes if expected.num_bytes is None else expected.num_bytes
    file.seek(0)
    with tempfile.NamedTemporaryFile() as complaints:
        pipe = _open(
            url, seconds=max(0.0, limits.deadline - time.monotonic()) + _GRACE_SECONDS, complaints=Path(complaints.name)
        )
        try:
            for block in _blocks(pipe, limits):
                num_bytes += len(block)
                if num_bytes > max_bytes:
                    raise _AttemptError(f"it is longer than the {max_bytes} bytes that it may have")
                digest.update(block)
                file.write(block)
            file.truncate()
            file.flush()
            if expected.sha256 == digest.hexdigest():
                return
            _check_exit(pipe, url=url, num_bytes=num_bytes, complaints=complaints, limits=limits)
        finally:
            _stop(pipe)
    if expected.num_bytes is not None and num_bytes < expected.num_bytes:
        raise _AttemptError(f"it ended after {num_bytes} of {expected.num_bytes} bytes")
    if expected.sha256 is not None:
        raise _AttemptError(
            "what came is not the file that the manifest names (sha256), so one of the two was replaced"
        )
    if expected.is_json:
        file.seek(0)
        try:
            pydantic_core.from_json(file.read())  # bounds how deep the text may nest
        except ValueError:
            raise _AttemptError(f"the {num_bytes} bytes that came are not whole JSON") from None


def _open(url: str, *, seconds: float, complaints: Path) -> Pipe:
    """What WebDataset's `gopen` opens, with a leash on a command."""
    url = rewrite_url(url)
    scheme, _, command = url.partition(":")
    if scheme == "pipe":
        # `timeout` makes a process group, so that a stalled pipeline is killed as a whole, and ends it where we were
        # killed ourselves. What the command complains of goes into the error.
        limit = f"timeout --kill-after=1 {seconds:.0f} " if shutil.which("timeout") else ""
        url = f"pipe:exec {limit}sh -c {quote(command)} </dev/null 2>{quote(str(complaints))}"
    try:
        return gopen_schemes.get(scheme, gopen_error)(url, "rb", 0)
    except FileNotFoundError as error:
        raise UserError(
            f"{url} is read by the command {error.filename}, which is not installed; install it, or give the location "
            "as pipe:COMMAND with {name} where the file name goes"
        ) from None


def _blocks(pipe: Pipe, limits: Limits) -> Iterator[bytes]:
    """What comes through the pipe, as it comes."""
    descriptor = pipe.stream.fileno()
    with suppress(AttributeError, OSError):  # Linux only, and a user has a share of such memory
        fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, _BLOCK)
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    num_bytes = 0
    last_byte = time.monotonic()
    while True:
        now = time.monotonic()
        if limits.stop.is_set():
            raise _AttemptError("it is no longer wanted", is_final=True)
        if now >= limits.deadline:
            raise _AttemptError(
                f"only {num_bytes} bytes came in the time that a file has (file_seconds)", is_final=True
            )
        if now >= last_byte + limits.stall_seconds:
            reason = f"after {num_bytes} bytes nothing came for {limits.stall_seconds:g} s (stall_seconds)"
            raise _AttemptError(reason, is_silent=num_bytes == 0)
        seconds = min(last_byte + limits.stall_seconds - now, limits.deadline - now, _STOP_SECONDS)
        if not poller.poll(1000 * seconds):
            continue
        block = os.read(descriptor, _BLOCK)
        if not block:
            return
        num_bytes += len(block)
        yield block
        last_byte = time.monotonic()


def _check_exit(pipe: Pipe, *, url: str, num_bytes: int, complaints: IO[bytes], limits: Limits) -> None:
    """Raise where the process behind a pipe that has ended did not end well; the openers ignore some of these."""
    seconds = max(0.1, min(limits.stall_seconds, limits.deadline - time.monotonic()))
    try:
        status = pipe.proc.wait(seconds)
    except subprocess.TimeoutExpired:
        raise _AttemptError(f"the command did not end within {seconds:.0f} s of its last byte") from None
    if status == 0:
        return
    if not _is_http(url):
        complaints.seek(0)
        lines = complaints.read().decode(errors="replace").split("\n")
        said = next((line.strip() for line in reversed(lines) if line.strip()), "no word of why")
        raise _AttemptError(f"the command ended with exit status {status} ({said})", is_final=status in _LASTING_EXIT)
    if num_bytes:
        raise _AttemptError(f"the connection broke off after {num_bytes} bytes (curl's exit status {status})")
    answer = _ask(url, stall_seconds=limits.stall_seconds)
    raise _AttemptError(answer.text, is_final=answer.is_lasting)


@dataclass(frozen=True)
class _Answer:
    curl_exit: int
    text: str
    is_lasting: bool  # the server answers, and will say the same the next time


def _ask(url: str, *, stall_seconds: float) -> _Answer:
    """What a server says to a request for one byte: the opener's curl is silent and hides the status."""
    url = rewrite_url(url)
    seconds = min(stall_seconds, _PROBE_SECONDS)
    command = ["curl", "-sSfL", "-o", os.devnull, "-r", "0-0", "-w", "%{http_code}", "--max-time", str(seconds), url]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds + 5)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return _Answer(curl_exit=-1, text="it cannot be asked why", is_lasting=False)
    text = done.stderr.strip().removeprefix(f"curl: ({done.returncode}) ") or "it failed, and answers now"
    is_lasting = done.stdout.isdecimal() and int(done.stdout) in _LASTING_STATUS
    return _Answer(curl_exit=done.returncode, text=text, is_lasting=is_lasting)


def _stop(pipe: Pipe) -> None:
    """End the process behind a pipe with all that it started, and close the pipe: none of this can wait for long."""
    process = pipe.proc
    with suppress(ProcessLookupError):
        if os.getpgid(process.pid) == process.pid:
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    pipe.stream.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(5.0)
