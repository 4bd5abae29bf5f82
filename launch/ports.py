"""Find free ports of this machine, for a launcher that must name a port before any process listens there."""

from __future__ import annotations

import contextlib
import random
import socket

from trainer.distributed.environment import PORTS


def free_ports(count: int) -> list[int]:
    """Return different free ports, `count` if there are so many.

    They are drawn at random, so that two callers at the same time hardly ever get the same.
    """
    found: list[int] = []
    for port in random.sample(PORTS, len(PORTS)):
        if len(found) == count:
            break
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            found.append(port)
    return found
