"""Where the ranks of a Slurm job find rank 0, although any port that all of them can derive may be taken.

Rank 0 stands at the first free one of some derived ports and tells who asks the port of the real store, which the
system chose. The others ask at these ports in turn. An answer counts only with this start's own token, so another job,
an earlier start of this one, or whatever else listens there is passed over.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator, Sequence

from data_pipeline.core.errors import UserError

_ANSWER_SECONDS = 2.0
_PAUSE_SECONDS = 0.2
_MAX_ANSWER_BYTES = 200


@contextlib.contextmanager
def answering(ports: Sequence[int], *, token: str, answer: int) -> Iterator[int]:
    """Tell everyone who comes to the first free one of `ports` the port `answer`, while open; gives that free port.

    Raises `UserError` if none of them is free.
    """
    with _listen(ports) as listener:
        threading.Thread(target=_answer_all, args=(listener, f"{token} {answer}\n".encode()), daemon=True).start()
        try:
            yield listener.getsockname()[1]
        finally:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes the thread


def ask(host: str, ports: Sequence[int], *, token: str, timeout_seconds: float) -> int:
    """The port that `answering` with the same token tells at `host`; raises `TimeoutError` if nobody does in time."""
    deadline = time.monotonic() + timeout_seconds
    while True:
        for port in ports:
            said = _hear(host, port).split()
            if len(said) == 2 and said[0] == token and said[1].isdecimal():
                return int(said[1])
        if time.monotonic() > deadline:
            raise TimeoutError("nobody answered for this job")
        time.sleep(_PAUSE_SECONDS)


def _listen(ports: Sequence[int]) -> socket.socket:
    both = socket.has_dualstack_ipv6()
    for port in ports:
        with contextlib.suppress(OSError):
            family = socket.AF_INET6 if both else socket.AF_INET
            return socket.create_server(("", port), family=family, dualstack_ipv6=both, backlog=1024)
    raise UserError(
        f"the ports {', '.join(map(str, ports))} on {socket.gethostname()} are all in use, so the ranks cannot meet "
        "there; set MASTER_PORT to a free port for all ranks"
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


def _hear(host: str, port: int) -> str:
    """What is said at a port without being asked; "" where nobody speaks."""
    heard = b""
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=_ANSWER_SECONDS) as line:
        while not heard.endswith(b"\n") and len(heard) < _MAX_ANSWER_BYTES:
            part = line.recv(_MAX_ANSWER_BYTES)
            if not part:
                break
            heard += part
    return heard.decode(errors="replace")
