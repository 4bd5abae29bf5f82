"""A file server on the loopback address that fails in the ways in which servers and networks do."""

from __future__ import annotations

import base64
import socket
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal

# drop: the connection is reset half-way. truncate: the answer, of unsaid length, ends half-way as if it were whole.
# corrupt: one bit is another. stall: half comes, then nothing. mute: not even a status line. trickle: ten bytes a
# second. A number is the status of an empty answer.
Fault = Literal["drop", "truncate", "corrupt", "stall", "mute", "trickle"] | int


class FaultyServer(ThreadingHTTPServer):
    """Serves `directory` at `url`.

    Attributes:
        faults: by file name, what happens to the next requests, in order; the last happens for ever if `for_ever`.
        password: USER:PASSWORD that each request must have.
        headers: more headers of each answer.
        redirections: file names that are elsewhere: another file name for each.
        requests: the file names that were asked for, in order.
    """

    daemon_threads = True

    def __init__(self, directory: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.directory = directory
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.faults: defaultdict[str, list[Fault | None]] = defaultdict(list)
        self.for_ever = False
        self.password: str | None = None
        self.headers: dict[str, str] = {}
        self.redirections: dict[str, str] = {}
        self.requests: list[str] = []
        self.is_closing = threading.Event()
        self.lock = threading.Lock()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a client that has hung up, also at a later test whose stderr this would be."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    def next_fault(self, name: str) -> Fault | None:
        with self.lock:
            self.requests.append(name)
            faults = self.faults[name]
            if not faults:
                return None
            return faults[0] if self.for_ever and len(faults) == 1 else faults.pop(0)


class _Handler(BaseHTTPRequestHandler):
    server: FaultyServer

    def do_GET(self) -> None:
        name = self.path.removeprefix("/")
        fault = self.server.next_fault(name)
        if (password := self.server.password) is not None:
            basic = f"Basic {base64.b64encode(password.encode()).decode()}"
            fault = fault if self.headers.get("Authorization") == basic else 401
        with suppress(ConnectionError):
            if (target := self.server.redirections.get(name)) is not None:
                self.send_response(302)
                self.send_header("Location", f"{self.server.url}/{target}")
                self.end_headers()
                return
            self._answer(self.server.directory / name, fault)

    def _answer(self, path: Path, fault: Fault | None) -> None:
        if fault == "mute":
            self.server.is_closing.wait()
            return
        if isinstance(fault, int) or not path.is_file():
            self.send_response(fault if isinstance(fault, int) else 404)
            self.send_header("Content-Length", "0")
            self._end_headers()
            return
        content = path.read_bytes()
        half = len(content) // 2
        self.send_response(200)
        if fault != "truncate":
            self.send_header("Content-Length", str(len(content)))
        self._end_headers()
        if fault == "corrupt":
            content = content[:half] + bytes([content[half] ^ 1]) + content[half + 1 :]
        if fault == "trickle":
            for byte in content:
                self.wfile.write(bytes([byte]))
                if self.server.is_closing.wait(0.1):
                    return
        self.wfile.write(content if fault in (None, "corrupt") else content[:half])
        self.wfile.flush()
        if fault == "stall":
            self.server.is_closing.wait()
        if fault == "drop":
            self.connection.shutdown(socket.SHUT_RDWR)

    def _end_headers(self) -> None:
        for name, value in self.server.headers.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serve(directory: Path) -> Iterator[FaultyServer]:
    """A server of `directory` while the block runs."""
    with FaultyServer(directory) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        try:
            yield server
        finally:
            server.is_closing.set()
            server.shutdown()


def closed_port() -> int:
    """A port of the loopback address on which nobody listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port
