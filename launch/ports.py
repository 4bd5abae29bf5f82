"""Find free ports of this machine, for a launcher that must name a port before any process listens there."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack

from data_pipeline.core.errors import UserError
from trainer.distributed.rendezvous import PORTS


def free_ports(count: int) -> list[int]:
    """Return `count` different free ports.

    They are drawn at random, so that two callers at the same time hardly ever get the same. Raises `UserError`
    if there are fewer.
    """
    found: list[int] = []
    with ExitStack() as stack:
        for port in random.sample(PORTS, len(PORTS)):
            if len(found) == count:
                return found
            probe = stack.enter_context(socket.socket())
            try:
                probe.bind(("", port))
            except OSError:
                continue
            found.append(port)
    raise UserError(
        f"there are not {count} free ports from {PORTS.start} to {PORTS.stop - 1} on this machine; end a process that "
        "holds some"
    )
