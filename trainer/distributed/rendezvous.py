"""Let the ranks of a job find rank 0, even if another program uses the port that they derive.

Rank 0 listens at the first free port of several derived ports, and tells every caller the port of the real store, which
the system chose. The other ranks ask at these ports in turn. They accept an answer only with the token of this start,
and ignore another job, an earlier start of this job, or any other server.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator, Sequence

from data_pipeline.core.errors import UserError

# Below Linux's ephemeral range (from 32768), so that no outgoing connection takes one of them before it is used.
PORTS = range(20_000, 32_000)
_ANSWER_SECONDS = 2.0
_PAUSE_SECONDS = 0.2
_MAX_ANSWER_BYTES = 200


@contextlib.contextmanager
def answering(ports: Sequence[int], *, token: str, answer: int) -> Iterator[int]:
    """Inside the block, tell every caller at the first free port of `ports` the port `answer`. Yields the free port.

    Raises `UserError` if no port is free.
    """
    with _listen(ports) as listener:
        threading.Thread(target=_answer_all, args=(listener, f"{token} {answer}\n".encode()), daemon=True).start()
        try:
            yield listener.getsockname()[1]
        finally:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes the thread


def ask(host: str, ports: Sequence[int], *, token: str, timeout_seconds: float) -> int:
    """Return the port that `answering` with the same token sends from `host`.

    Raises `TimeoutError` if no such answer comes in time.
    """
    deadline = time.monotonic() + timeout_seconds
    while True:
        for port in ports:
            words = _read_greeting(host, port).split()
            if len(words) == 2 and words[0] == token and words[1].isdecimal():
                return int(words[1])
        if time.monotonic() > deadline:
            raise TimeoutError("no port gave the answer of this job")
        time.sleep(_PAUSE_SECONDS)


def _listen(ports: Sequence[int]) -> socket.socket:
    both = socket.has_dualstack_ipv6()
    for port in ports:
        with contextlib.suppress(OSError):
            family = socket.AF_INET6 if both else socket.AF_INET
            return socket.create_server(("", port), family=family, dualstack_ipv6=both, backlog=1024)
    raise UserError(
        f"the ports {', '.join(map(str, ports))} on {socket.gethostname()} are all in use, so the ranks cannot connect "
        "to rank 0; set MASTER_PORT to a free port for all ranks"
    )


def _answer_all(listener: socket.socket, message: bytes) -> None:
    while True:
        try:
            caller, _ = listener.accept()
        except OSError:  # closed
            return
        with caller, contextlib.suppress(OSError):
            caller.settimeout(_ANSWER_SECONDS)
            caller.sendall(message)


def _read_greeting(host: str, port: int) -> str:
    """Read the greeting that a server sends on connect; "" if there is none."""
    received = b""
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=_ANSWER_SECONDS) as connection:
        while not received.endswith(b"\n") and len(received) < _MAX_ANSWER_BYTES:
            part = connection.recv(_MAX_ANSWER_BYTES)
            if not part:
                break
            received += part
    return received.decode(errors="replace")
