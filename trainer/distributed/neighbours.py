"""Collectives between CPU ranks of one machine, through memory that they share.

Between ranks that are neighbours, gloo needs 0.5 to 1 ms of both processors for a few hundred numbers, and synchronised
batch norm asks for them in every layer, forward and backward. Here a rank writes its numbers into memory that all ranks
have mapped, tells the others by one byte through a socket, and reads theirs: some 0.1 ms. Sums are added up in
the order of the ranks, so they are those of `collectives.sum_in_rank_order`, bit for bit.

The memory has no name in any file system and the sockets have none either: nothing is left after kill -9, and a rank
that has died is noticed at once.

Shapes: W ranks, N numbers of one rank.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import sys
import uuid
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from data_pipeline.core.errors import UserError

# Every rank has two slots and writes to them in turn: who has heard from all others in a round knows that they have
# read what was written in the round before it. A longer tensor takes several rounds. Pages are only used once written.
SLOT_BYTES = 1 << 22
_NUM_SLOTS = 2
_MEETING_SECONDS = 30.0  # less than the process group's limit, within which the others are told that it failed
_HELLO = b"."


class Neighbours:
    """All ranks of one machine, in rank order. Every rank must make the same calls in the same order, in one thread.

    A call raises `RuntimeError` if another rank has ended, or does not come within the time limit; it hangs up first.
    """

    def __init__(self, rank: int, lines: Sequence[socket.socket | None], memories: Sequence[mmap.mmap]) -> None:
        """`lines`: a connected socket for each rank, None for this one; `memories`: of each rank, this one's too."""
        self._rank = rank
        self._lines = lines
        self._slots = [torch.frombuffer(memory, dtype=torch.uint8).view(_NUM_SLOTS, SLOT_BYTES) for memory in memories]
        self._turn = 0
        self._views_by_key: dict[tuple[int, int, torch.dtype], list[Tensor]] = {}

    def all_gather(self, out_WN: Tensor, x_N: Tensor) -> None:
        """Every rank's `x_N` into the rows of `out_WN`; both contiguous, on the CPU, of one dtype."""
        for part, views in self._rounds(x_N):
            torch.stack(views, out=out_WN[:, part])

    def all_reduce_sum(self, x_N: Tensor) -> Tensor:
        """The sum over the ranks, (N,), each number added up in the order of the ranks."""
        totals = []
        for _, (first, second, *others) in self._rounds(x_N):
            total = first + second
            for other in others:
                total += other
            totals.append(total)
        return totals[0] if len(totals) == 1 else torch.cat(totals)

    def close(self) -> None:
        """Hang up."""
        for line in self._lines:
            if line is not None:
                line.close()

    def _rounds(self, x_N: Tensor) -> Iterator[tuple[slice, list[Tensor]]]:
        """What all ranks wrote, in rank order, piece by piece; a piece may be read until the next one is asked for."""
        num = SLOT_BYTES // x_N.element_size()
        for start in range(0, max(len(x_N), 1), num):
            part = slice(start, min(start + num, len(x_N)))
            views = self._views(part.stop - part.start, x_N.dtype)
            views[self._rank].copy_(x_N[part])
            self._turn = (self._turn + 1) % _NUM_SLOTS
            self._meet()
            yield part, views

    def _views(self, num: int, dtype: torch.dtype) -> list[Tensor]:
        """So many numbers of every rank's slot. A step asks for the same ones again and again."""
        key = self._turn, num, dtype
        if key not in self._views_by_key:
            size = num * dtype.itemsize
            self._views_by_key[key] = [slots[self._turn, :size].view(dtype) for slots in self._slots]
        return self._views_by_key[key]

    def _meet(self) -> None:
        """Tell all others, then hear from all. A rank that cannot go on hangs up, so that none waits for it."""
        for line in self._lines:
            if line is not None:
                with contextlib.suppress(OSError):  # whoever has hung up: what is heard below tells who was first
                    line.sendall(_HELLO)
        for rank, line in enumerate(self._lines):
            if line is not None:
                try:
                    heard = line.recv(1)
                except TimeoutError as error:
                    seconds = line.gettimeout()
                    self.close()
                    raise RuntimeError(f"rank {rank} did not come to a collective in {seconds} s") from error
                except OSError:
                    heard = b""
                if heard != _HELLO:
                    self.close()
                    raise RuntimeError(
                        f"rank {rank} has hung up while this one waits for it: it has ended, or another rank has"
                    )


def can_be_neighbours() -> bool:
    """Whether this system has what it takes: nameless shared memory and nameless sockets, which is Linux."""
    return sys.platform == "linux"


class Doorbell:
    """Where one rank can be called; its `name` is what the others must know."""

    def __init__(self, rank: int) -> None:
        self.name = f"\0feature-dropout-{uuid.uuid4().hex}"
        self._rank = rank
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.name)
        self._listener.listen(1024)

    def connect(self, names: Sequence[str], *, timeout_seconds: float) -> Neighbours:
        """Meet all ranks, whose `names` are in rank order; every rank does so, once. Raises `UserError` if it fails.

        `timeout_seconds` bounds each exchange later; to meet, who all call this now, takes no more than a few seconds.
        """
        lines: list[socket.socket | None] = [None] * len(names)
        with self._listener:
            meeting_seconds = min(timeout_seconds, _MEETING_SECONDS)
            self._listener.settimeout(meeting_seconds)
            try:
                for rank in range(self._rank):
                    lines[rank] = line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                    line.settimeout(meeting_seconds)
                    line.connect(names[rank])
                    line.sendall(self._rank.to_bytes(4, "little"))
                for _ in range(self._rank + 1, len(names)):
                    line, _ = self._listener.accept()
                    line.settimeout(meeting_seconds)
                    lines[int.from_bytes(line.recv(4, socket.MSG_WAITALL), "little")] = line
                memories = _share_memory(self._rank, lines)
                for each in lines:
                    if each is not None:
                        each.settimeout(timeout_seconds)
                return Neighbours(self._rank, lines, memories)
            except OSError as error:
                raise UserError(
                    f"rank {self._rank} could not connect to the other ranks of {socket.gethostname()} ({error}); see "
                    "whether one of them has ended"
                ) from error


def _share_memory(rank: int, lines: Sequence[socket.socket | None]) -> list[mmap.mmap]:
    """The memory of every rank, mapped, in rank order."""
    mine = os.memfd_create("neighbours")
    try:
        os.ftruncate(mine, _NUM_SLOTS * SLOT_BYTES)
        for line in lines:
            if line is not None:
                socket.send_fds(line, [_HELLO], [mine])
        memories = []
        for line in lines:
            if line is None:
                memories.append(mmap.mmap(mine, _NUM_SLOTS * SLOT_BYTES))
                continue
            _, files, _, _ = socket.recv_fds(line, 1, 1)
            if not files:
                raise OSError("a rank has hung up")
            memories.append(mmap.mmap(files[0], _NUM_SLOTS * SLOT_BYTES))
            os.close(files[0])
        return memories
    finally:
        os.close(mine)
