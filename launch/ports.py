"""Ports of this machine that are free now, for who needs a number before anybody can listen there."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack

from data_pipeline.core.errors import UserError

# Below Linux's ephemeral range (from 32768), so that no outgoing connection takes one of them before it is used.
RANGE = range(20_000, 32_000)


def free_ports(count: int) -> list[int]:
    """Different ones, drawn at random, so that two who ask at the same time hardly ever get the same.

    Raises `UserError` if there are not so many.
    """
    found: list[int] = []
    with ExitStack() as stack:
        for port in random.sample(RANGE, len(RANGE)):
            if len(found) == count:
                return found
            probe = stack.enter_context(socket.socket())
            try:
                probe.bind(("", port))
            except OSError:
                continue
            found.append(port)
    raise UserError(f"{count} free ports from {RANGE.start} to {RANGE.stop - 1} are not to be had; end what holds them")
