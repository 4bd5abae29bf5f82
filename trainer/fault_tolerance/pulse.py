"""Write and read the page of memory through which a rank tells its sidecar that it is alive, and what it does.

Imports only the standard library, because `trainer.fault_tolerance.sidecar` imports it.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass

_NUMBERS = struct.Struct("<Qqd?")  # beats, step, patience in seconds, closed
_SIZES = {"doing": 64, "shards": 1024, "ending": 1024}  # bytes of text after the numbers
# Written many times a step, at its own offset: signs of life, whether the rank waits for others, stage.
_SIGN = struct.Struct("<Q?15s")
_SIGN_OFFSET = 4096 - _SIGN.size
MEMORY_BYTES = 4096


@dataclass(frozen=True)
class Pulse:
    """The last message of a rank.

    Attributes:
        beats: the number of parts of steps that it has begun; all ranks begin the same parts.
        step: the number of the present step.
        patience: the seconds without a sign of life that it has announced; 0 if none.
        closed: whether it has left; `ending` is then its exception, or empty after the last step.
        doing: the present part of the step, such as "reading".
        shards: the shards that it reads.
        signs: the number of signs of life inside steps, which may differ between ranks.
        waits: whether it waits for other ranks or for its device.
        stage: the stage of the step; empty between stages.
    """

    beats: int
    step: int
    patience: float
    closed: bool
    doing: str
    shards: str
    ending: str
    signs: int = 0
    waits: bool = False
    stage: str = ""

    @property
    def place(self) -> str:
        """Return the part and stage of the step: "training, forward"."""
        return f"{self.doing}, {self.stage}" if self.stage else self.doing


def write_numbers(memory: mmap.mmap, *, beats: int, step: int, patience: float, closed: bool = False) -> None:
    """Write the numbers that change at each beat."""
    _NUMBERS.pack_into(memory, 0, beats, step, patience, closed)


def write_sign(memory: mmap.mmap, signs: int, waits: bool, stage: bytes) -> None:
    """Write one sign of life; `stage` is cut to 15 bytes."""
    _SIGN.pack_into(memory, _SIGN_OFFSET, signs, waits, stage)


def write_text(memory: mmap.mmap, **texts: str) -> None:
    """Write `doing`, `shards` or `ending`, each cut to its `_SIZES`."""
    start = _NUMBERS.size
    for name, size in _SIZES.items():
        if name in texts:
            memory[start : start + size] = texts[name].encode()[:size].ljust(size, b"\0")
        start += size


def read_pulse(memory: mmap.mmap) -> Pulse:
    """Return the last message that the rank has written."""
    beats, step, patience, closed = _NUMBERS.unpack_from(memory, 0)
    signs, waits, stage = _SIGN.unpack_from(memory, _SIGN_OFFSET)
    start, texts = _NUMBERS.size, {}
    for name, size in _SIZES.items():
        texts[name] = memory[start : start + size].rstrip(b"\0").decode(errors="ignore")
        start += size
    name = stage.rstrip(b"\0").decode(errors="ignore")
    return Pulse(beats, step, patience, closed, **texts, signs=signs, waits=waits, stage=name)
