"""Fetching one file: from a server and from commands that fail in every way, within limits of time that hold."""

from __future__ import annotations

import errno
import hashlib
import io
import itertools
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import botocore.exceptions
import numpy as np
import pytest
import requests
import s3fs.errors
from fsspec.implementations.memory import MemoryFileSystem
from huggingface_hub.errors import HfHubHTTPError

from data_pipeline.core.errors import UserError
from data_pipeline.remote.fetch import OBJECT_STORES, Expected, Limits, ObjectStore, fetch, json_problem
from tests.data_pipeline.remote.http_server import Fault, FaultyServer, closed_port, serve

CONTENT = np.random.default_rng(0).bytes(300_000)
WHOLE = Expected(num_bytes=len(CONTENT), sha256=hashlib.sha256(CONTENT).hexdigest())


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FaultyServer]:
    (tmp_path / "file").write_bytes(CONTENT)
    with serve(tmp_path) as server:
        yield server


def limits(*, stall: float = 10.0, attempts: int = 2, seconds: float = 20.0, must_answer: bool = False) -> Limits:
    deadline = time.monotonic() + seconds
    return Limits(stall_seconds=stall, num_attempts=attempts, deadline=deadline, must_answer=must_answer)


def fetched(url: str, *, expected: Expected = WHOLE, within: Limits | None = None) -> bytes:
    file = io.BytesIO()
    fetch(url, file, expected=expected, limits=within or limits())
    return file.getvalue()


class Clock(threading.Event):
    """The event that stops a fetch, and a clock that goes on only while the fetch waits for that event."""

    now = 0.0

    def wait(self, timeout: float | None = None) -> bool:
        self.now += timeout or 0.0
        return False

    def limits(self, *, attempts: int = 2, seconds: float = 600.0) -> Limits:
        return Limits(stall_seconds=10.0, num_attempts=attempts, deadline=self.now + seconds, stop=self)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("data_pipeline.remote.fetch.time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def running(marker: str) -> list[str]:
    """The command lines of this machine's processes that hold `marker`."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(path.read_text(errors="replace"))
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended since the directory was listed
    return [line for line in lines if marker in line]


def test_a_file_comes_whole(server: FaultyServer) -> None:
    path = server.directory / "file"
    assert fetched(f"{server.url}/file") == fetched(f"pipe:cat {path}") == CONTENT
    assert fetched(f"pipe:cat {path}", expected=Expected()) == CONTENT
    assert fetched(f"pipe:gzip -c '{path}' | gunzip", expected=Expected()) == CONTENT


def test_a_webdataset_rewriting_rule_is_obeyed(server: FaultyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOPEN_REWRITE", f"http://elsewhere/={server.url}/")
    assert fetched("http://elsewhere/file") == CONTENT
    monkeypatch.setenv("GOPEN_REWRITE", f"http://elsewhere/=pipe:cat {server.directory}/")
    assert fetched("http://elsewhere/file") == CONTENT


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["drop", "truncate", "corrupt", "stall", "mute", 500])
def test_a_failure_that_passes_is_survived(server: FaultyServer, fault: Fault) -> None:
    server.faults["file"] = [fault]
    stall = 1.5 if fault in ("stall", "mute") else 10.0
    assert fetched(f"{server.url}/file", within=limits(stall=stall)) == CONTENT
    assert server.requests == ["file", "file"]


@pytest.mark.slow
def test_a_failed_attempt_leaves_nothing_of_itself(server: FaultyServer) -> None:
    """A longer wrong answer before a right one."""
    (server.directory / "switch").write_text(
        f"test -e done && cat {server.directory}/file || {{ touch done; cat long; }}"
    )
    (server.directory / "long").write_bytes(CONTENT * 2)
    command = f"cd {server.directory} && sh switch"
    assert fetched(f"pipe:{command}") == CONTENT
    (server.directory / "done").unlink()
    (server.directory / "long").write_bytes(CONTENT + b"x" * 100_000)
    file = io.BytesIO(b"y" * 900_000)
    fetch(f"pipe:{command}", file, expected=WHOLE, limits=limits())
    assert file.getvalue() == CONTENT


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "stall", "said"),
    [
        ("drop", 10.0, "broke off after 150000 bytes"),
        ("truncate", 10.0, "ended after 150000 of 300000 bytes"),
        ("corrupt", 10.0, "not the file that the manifest names"),
        ("stall", 1.0, r"after 1\d{5} bytes, none came for 1 s"),
        ("mute", 0.3, "after 0 bytes, none came for 0.3 s"),
    ],
)
def test_a_failure_that_stays_is_told(server: FaultyServer, fault: Fault, stall: float, said: str) -> None:
    server.faults["file"], server.for_ever = [fault], True
    start = time.monotonic()
    with pytest.raises(UserError, match=f"{server.url}/file could not be fetched: .*{said}.* \\(2 attempts in"):
        fetched(f"{server.url}/file", within=limits(stall=stall))
    assert time.monotonic() - start < 8.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "stall", "seconds"), [("mute", 0.4, 2.2), ("trickle", 0.4, 2.2), ("pipe", 1.0, 3.0)]
)
def test_the_limit_of_a_file_holds_over_all_attempts(
    server: FaultyServer, source: str, stall: float, seconds: float
) -> None:
    """Where no byte comes, two attempts stall, and the pause before a third would be too long."""
    url = f"{server.url}/file"
    if source == "pipe":
        url = "pipe:while true; do echo ten bytes; sleep 0.1; done"  # never stalls
    else:
        server.faults["file"], server.for_ever = ["mute" if source == "mute" else "trickle"], True
    start = time.monotonic()
    with pytest.raises(UserError, match="none came for" if source == "mute" else "bytes came in the time"):
        fetched(url, within=limits(stall=stall, attempts=100, seconds=seconds))
    assert stall < time.monotonic() - start < seconds + 3.0


@pytest.mark.parametrize("status", [401, 403, 404, 410])
def test_a_status_that_will_stay_is_not_tried_again(server: FaultyServer, status: int) -> None:
    server.faults["file"], server.for_ever = [status], True
    start = time.monotonic()
    with pytest.raises(UserError, match=f"answers {status} .* .1 attempt"):
        fetched(f"{server.url}/file", within=limits(attempts=5))
    assert server.requests == ["file"]
    assert time.monotonic() - start < 2.0


def test_a_place_where_nobody_answers_is_told_at_once(server: FaultyServer) -> None:
    start = time.monotonic()
    for url, said in [
        (f"http://127.0.0.1:{closed_port()}/file", "Connection refused"),
        ("http://no-such-host.invalid/file", "no host of that name"),
        (f"{server.url}/no-such-file", "404"),
        ("http://[/file", "URL"),
    ]:
        with pytest.raises(UserError, match=f"{said}.* .1 attempt"):
            fetched(url, within=limits(attempts=5, must_answer=True))
    assert time.monotonic() - start < 3.0


def test_a_server_that_is_started_again_is_waited_for(
    server: FaultyServer, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    get = requests.get

    def refused_at_first(*arguments: Any, **options: Any) -> requests.Response:
        if clock.now < 300.0:
            raise requests.exceptions.ConnectionError("Connection refused")
        return get(*arguments, **options)

    monkeypatch.setattr("data_pipeline.remote.fetch.requests.get", refused_at_first)
    assert fetched(f"{server.url}/file", within=clock.limits()) == CONTENT
    assert 300.0 <= clock.now < 308.0


@pytest.mark.parametrize("status", [429, 500, 502, 503])
def test_a_server_that_is_busy_for_minutes_is_waited_for(server: FaultyServer, clock: Clock, status: int) -> None:
    """Answers that are wrong count beside it."""
    server.faults["file"] = [status, "truncate", *[status] * 30]
    assert fetched(f"{server.url}/file", within=clock.limits()) == CONTENT
    assert len(server.requests) == 33
    assert 200.0 < clock.now < 300.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "num_requests"),
    [
        ("20", 30),
        ("Fri, 01 Jan 2100 00:00:00 GMT", 78),
        ("3600", 78),
        ("0", 78),
        ("-1", 78),
        ("soon", 78),
        ("9" * 5000, 78),
    ],
)
def test_a_busy_server_is_asked_again_when_it_says_and_told_in_the_end(
    server: FaultyServer, clock: Clock, asked: str, num_requests: int
) -> None:
    """A wait that the time for the file does not allow is not kept."""
    server.faults["file"], server.for_ever = [503], True
    server.headers["Retry-After"] = asked
    with pytest.raises(UserError, match=r"answers 503 Service Unavailable \(\d+ attempts in (59\d|600) s\); check"):
        fetched(f"{server.url}/file", within=clock.limits())
    assert abs(len(server.requests) - num_requests) <= 2
    assert 570.0 <= clock.now < 600.0


def test_a_server_that_stays_away_is_told_when_the_time_is_over(clock: Clock) -> None:
    url = f"http://127.0.0.1:{closed_port()}/file"
    with pytest.raises(
        UserError, match=r"no connection to the server .*Connection refused\) \(\d+ attempts in 600 s\)"
    ):
        fetched(url, within=clock.limits())


def test_wrong_answers_are_limited_by_their_number(server: FaultyServer, clock: Clock) -> None:
    server.faults["file"], server.for_ever = ["truncate"], True
    with pytest.raises(UserError, match=r"ended after 150000 of 300000 bytes \(3 attempts in 2 s\)"):
        fetched(f"{server.url}/file", within=clock.limits(attempts=3))


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "stall"), [(503, 5.0), ("mute", 0.5)])
def test_a_server_in_trouble_is_left_to_the_retries(server: FaultyServer, fault: Fault, stall: float) -> None:
    server.faults["file"] = [fault]
    assert fetched(f"{server.url}/file", within=limits(stall=stall, must_answer=True)) == CONTENT


@pytest.mark.parametrize("encoding", ["gzip", "br", "aws-chunked, gzip"])
def test_an_answer_that_is_compressed_unasked_is_refused(server: FaultyServer, encoding: str) -> None:
    server.headers["Content-Encoding"] = encoding
    with pytest.raises(UserError, match=rf"compresses the file unasked \(Content-Encoding: {encoding}\) \(1 attempt"):
        fetched(f"{server.url}/file", expected=Expected())


@pytest.mark.parametrize("encoding", ["identity", "aws-chunked", ""])
def test_an_answer_with_another_encoding_is_the_file(server: FaultyServer, encoding: str) -> None:
    """Some object stores keep the header `aws-chunked` of an upload, and answer with the plain file."""
    server.headers["Content-Encoding"] = encoding
    assert fetched(f"{server.url}/file") == CONTENT


def test_a_redirection_is_followed(server: FaultyServer) -> None:
    server.redirections["elsewhere"] = "file"
    assert fetched(f"{server.url}/elsewhere") == CONTENT
    assert server.requests == ["elsewhere", "file"]


def test_a_rule_that_rewrites_to_another_scheme_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOPEN_REWRITE", "http://elsewhere/=ftp://host/")
    with pytest.raises(UserError, match=r"ftp://host/file by GOPEN_REWRITE"):
        fetched("http://elsewhere/file")


def test_commands_that_fail_are_quoted() -> None:
    with pytest.raises(UserError, match=r"exit status 1 \(cat: /no/file: No such file.*2 attempts"):
        fetched("pipe:cat /no/file")
    with pytest.raises(UserError, match=r"exit status 127 .*no-such-command.*1 attempt"):
        fetched("pipe:no-such-command x", within=limits(attempts=5))
    with pytest.raises(UserError, match=r"exit status 3 \(without a message\)"):
        fetched("pipe:printf '{}'; exit 3", expected=Expected(problem=json_problem), within=limits(attempts=1))
    with pytest.raises(UserError, match="the answer of 5 bytes is not whole JSON"):
        fetched("pipe:printf '{\"a\":'", expected=Expected(problem=json_problem), within=limits(attempts=1))
    with pytest.raises(UserError, match="longer than 300000 bytes"):
        fetched("pipe:yes", within=limits(attempts=1))


def test_a_pipeline_that_stalls_is_killed_as_a_whole() -> None:
    """Also one whose last byte came, and which goes on."""
    marker = f"86400.{uuid4().int % 10**12}"
    start = time.monotonic()
    with pytest.raises(UserError, match=r"none came for 0\.3 s"):
        fetched(f"pipe:sleep {marker} | sleep {marker} | cat", within=limits(stall=0.3, attempts=1))
    with pytest.raises(UserError, match=r"none came for 0\.3 s"):
        fetched(f"pipe:echo; exec >&-; sleep {marker}", expected=Expected(), within=limits(stall=0.3, attempts=1))
    with pytest.raises(UserError, match=r"none came for 0\.3 s"):
        fetched(f"pipe:trap '' TERM INT HUP; sleep {marker}; sleep {marker}", within=limits(stall=0.3, attempts=1))
    deadline = start + 5.0
    assert time.monotonic() < deadline
    while running(marker) and time.monotonic() < deadline:
        time.sleep(0.02)  # what was killed is gone when a core has had the time for it
    assert not running(marker)


def test_a_fetch_can_be_stopped(server: FaultyServer) -> None:
    server.faults["file"], server.for_ever = ["mute"], True
    within = limits(stall=20.0)
    threading.Timer(0.3, within.stop.set).start()
    start = time.monotonic()
    with pytest.raises(UserError, match="the fetch was stopped"):
        fetched(f"{server.url}/file", within=within)
    assert time.monotonic() - start < 2.0


@pytest.mark.slow
def test_a_command_ends_in_time_where_its_reader_was_killed(tmp_path: Path) -> None:
    """SIGKILL ends the reader, so it cannot stop the command that it started."""
    marker = f"86400.{uuid4().int % 10**12}"
    reader = os.fork()
    if reader == 0:
        try:
            fetched(f"pipe:sleep {marker}", within=limits(seconds=3.0))
        finally:  # whatever happens, the reader must not go on as its parent
            os._exit(0)
    deadline = time.monotonic() + 15.0
    while not running(marker) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert running(marker)
    os.kill(reader, 9)
    _, status = os.waitpid(reader, 0)
    assert os.WIFSIGNALED(status), "the reader ended by itself, and may have stopped the command"
    while running(marker) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not running(marker)


@pytest.mark.slow
def test_no_descriptor_or_process_is_left(server: FaultyServer) -> None:
    def descriptors() -> list[str]:
        links = [str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
        return [link for link in links if not link.startswith(("socket:", "/proc/"))]  # the server's own connections

    before = descriptors()
    for _ in range(2):
        server.faults["file"] = ["stall", "drop"]
        fetched(f"{server.url}/file", within=limits(stall=0.3, attempts=10))
    assert sorted(descriptors()) == sorted(before)
    assert not running(f"{server.url}/file")


# Object stores


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryFileSystem]:
    """A store in memory with one object, `memory://bucket/file`; objects are asked for in ranges of 70,000 bytes."""
    monkeypatch.setitem(OBJECT_STORES, "memory", ObjectStore("fsspec", "NOTHING"))
    monkeypatch.setattr("data_pipeline.remote.fetch._RANGE", 70_000)
    store = MemoryFileSystem()
    store.pipe_file("/bucket/file", CONTENT)
    yield store
    store.rm("/bucket", recursive=True)


def test_an_object_of_known_size_is_asked_for_in_ranges_and_for_nothing_else(
    stored: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []

    def cat_file(self: MemoryFileSystem, path: str, start: int, end: int) -> bytes:
        asked.append((start, end))
        return CONTENT[start:end]

    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "cat_file", cat_file)
        patch.setattr(MemoryFileSystem, "info", None)
        patch.setattr(MemoryFileSystem, "open", None)
        assert fetched("memory://bucket/file") == CONTENT
    assert asked == [(0, 70_000), (70_000, 140_000), (140_000, 210_000), (210_000, 280_000), (280_000, 300_000)]
    assert fetched("memory://bucket/file") == fetched("memory://bucket/file", expected=Expected()) == CONTENT


def s3_answers(status: int) -> Exception:
    """Return the error that s3fs raises for an answer of S3."""
    answer = {"ResponseMetadata": {"HTTPStatusCode": status}, "Error": {"Code": str(status), "Message": "no"}}
    error: Exception = s3fs.errors.translate_boto_error(botocore.exceptions.ClientError(answer, "GetObject"))
    return error


def s3_is_away(cause: Exception) -> Exception:
    error: Exception = botocore.exceptions.EndpointConnectionError(endpoint_url="https://s3")
    error.__cause__ = cause
    return error


def hub_answers(status: int) -> Exception:
    response: Any = SimpleNamespace(status_code=status, headers={}, request=None)
    return HfHubHTTPError(f"answers {status}", response=response)


def failing(monkeypatch: pytest.MonkeyPatch, error: Exception, *, num_times: int) -> None:
    """Make the store in memory raise an error, so many times."""
    asked = itertools.count()

    def cat_file(self: MemoryFileSystem, path: str, start: int, end: int) -> bytes:
        if next(asked) < num_times:
            raise error
        return CONTENT[start:end]

    monkeypatch.setattr(MemoryFileSystem, "cat_file", cat_file)


@pytest.mark.parametrize(
    "error",
    [
        s3_answers(503),
        s3_answers(500),
        s3_answers(429),
        s3_is_away(ConnectionRefusedError(errno.ECONNREFUSED, "refused")),
        s3_is_away(socket.gaierror(socket.EAI_NONAME, "Name or service not known")),
        hub_answers(502),
    ],
    ids=["s3 503", "s3 500", "s3 429", "refused", "no such host", "hub 502"],
)
def test_a_store_that_is_busy_or_away_for_minutes_is_waited_for(
    error: Exception, stored: MemoryFileSystem, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, error, num_times=30)
    assert fetched("memory://bucket/file", within=clock.limits()) == CONTENT
    assert 200.0 < clock.now < 300.0


@pytest.mark.parametrize("error", [s3_answers(416), hub_answers(409), ValueError("no")], ids=["416", "409", "other"])
def test_another_error_of_a_store_counts_as_an_attempt(
    error: Exception, stored: MemoryFileSystem, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, error, num_times=30)
    with pytest.raises(UserError, match=r"could not be fetched: .* \(3 attempts in 2 s\)"):
        fetched("memory://bucket/file", within=clock.limits(attempts=3))


def test_a_store_that_is_away_is_told_at_once_before_training(
    stored: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, s3_is_away(ConnectionRefusedError(errno.ECONNREFUSED, "refused")), num_times=30)
    with pytest.raises(UserError, match=r"EndpointConnectionError: .* \(1 attempt in 0 s\)"):
        fetched("memory://bucket/file", within=limits(must_answer=True))


def test_an_object_that_is_shorter_longer_or_missing_is_one_sentence(stored: MemoryFileSystem) -> None:
    once = limits(attempts=1)
    stored.pipe_file("/bucket/file", CONTENT[:100_000])
    with pytest.raises(UserError, match="it ended after 100000 of 300000 bytes"):
        fetched("memory://bucket/file", within=once)
    stored.pipe_file("/bucket/file", CONTENT[1:] + b"xx")
    with pytest.raises(UserError, match="the answer is not the file that the manifest names"):
        fetched("memory://bucket/file", within=once)
    with pytest.raises(UserError, match="there is no such object"):
        fetched("memory://bucket/other")
