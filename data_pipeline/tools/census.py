"""Examine all files of a place: what they are, what is wrong with them, and which are equal.

Worker processes examine some files at a time. In this process a file takes 8 bytes and its name.

Shapes: N files.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import IO, Any, Final

import numpy as np
from numpy.typing import NDArray

from data_pipeline.building.pool import run_all
from data_pipeline.core.progress import Progress
from data_pipeline.core.sample import Medium
from data_pipeline.sources.examine import Examined, examine
from data_pipeline.sources.files import Files, medium_of

BAD: Final = "bad"  # the remark of files that cannot be used
_NUM_DECODED_BYTES: Final = 500_000_000  # of all files together
_NUM_AT_ONCE: Final = 200  # files
_EDGE: Final = 1 << 16  # bytes at each end of a file by which equal files are found


@dataclass
class Census:
    """What some files are.

    Attributes:
        kinds: how many are alike, as `Examined` with a length in whole tenths of a second, and no reason.
        num_bytes: the size of all files together.
        remarks: for each finding, and `BAD`, the names of the files, with the reasons of bad ones.
        digest_N: (N,) uint64, equal for files with one size and equal ends of 64 KiB, and hardly ever for others.
    """

    kinds: Counter[Examined] = field(default_factory=Counter)
    num_bytes: int = 0
    remarks: dict[str, dict[str, str]] = field(default_factory=dict)
    digest_N: NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, np.uint64))

    def count(self, medium: Medium, *facts: str) -> Counter[tuple[Any, ...]]:
        """Return how many files of a medium that can be used have each value of these attributes of `Examined`."""
        found: Counter[tuple[Any, ...]] = Counter()
        for kind, num in self.kinds.items():
            values = tuple(getattr(kind, fact) for fact in facts)
            if kind.medium == medium and not kind.is_bad and None not in values:
                found[values] += num
        return found

    @property
    def bad(self) -> dict[str, str]:
        """Return the files that cannot be used, with the reasons."""
        return self.remarks.get(BAD, {})

    def add(self, name: str, found: Examined, num_bytes: int) -> None:
        """Count one file."""
        self.num_bytes += num_bytes
        nameless = ("no ending",) if found.medium is not None and medium_of(name) is None else ()
        for remark in (BAD,) if found.is_bad else (*found.findings, *nameless):
            self.remarks.setdefault(remark, {})[name] = found.reason
        seconds = None if found.seconds is None else round(found.seconds, 1)
        self.kinds[replace(found, seconds=seconds, reason="")] += 1


def take_census(files: Files, *, num_workers: int, title: str) -> Census:
    """Examine all files of a place, and decode some, spread evenly. A build decodes all, and names the bad ones."""
    starts = range(0, len(files.names), _NUM_AT_ONCE)
    quota = _NUM_DECODED_BYTES // max(len(starts), 1)
    census, digests = Census(), []
    parts = run_all(_examine_some, (files, quota), starts, num_workers=num_workers)
    with Progress(title, total=len(files.names)) as progress:
        for start, part in zip(starts, parts, strict=True):
            for name, (found, num_bytes, digest) in zip(files.names[start : start + len(part)], part, strict=True):
                census.add(name, found, num_bytes)
                digests.append(digest)
            progress.advance(len(part))
    census.digest_N = np.array(digests, dtype=np.uint64)
    return census


def _examine_some(inputs: tuple[Files, int], start: int) -> list[tuple[Examined, int, int]]:
    """Examine the files from number `start` on. A worker process calls this.

    Returns what each file is, its size, and a number that equal files share.
    """
    (files, quota), num_decoded_bytes = inputs, 0
    names = files.names[start : start + _NUM_AT_ONCE]
    part = []
    for number, name in enumerate(names):
        try:
            with files.open(name) as file:
                num_bytes, digest = _edges(file)
                full = num_decoded_bytes + num_bytes <= quota * (number + 1) / len(names)
                num_decoded_bytes += num_bytes if full else 0
                part.append((examine(name, file, full=full), num_bytes, digest))
        except (OSError, ValueError) as error:
            unread = Examined(medium_of(name), is_bad=True, reason=f"it cannot be read ({error})")
            part.append((unread, 0, start + number))
    return part


def _edges(file: IO[bytes]) -> tuple[int, int]:
    """Return the size of a file, and a number by its size and both of its ends. Goes back to its beginning."""
    num_bytes = file.seek(0, os.SEEK_END)
    digest = hashlib.blake2b(num_bytes.to_bytes(8, "little"), digest_size=8)
    for position in (0, max(_EDGE, num_bytes - _EDGE)):
        file.seek(position)
        digest.update(file.read(_EDGE))
    file.seek(0)
    return num_bytes, int.from_bytes(digest.digest(), "little")


def equal_files(censuses: Sequence[Census]) -> Iterator[list[tuple[int, int]]]:
    """Yield the files that are equal to each other, each as the numbers of its place and of its name there."""
    equal: dict[int, list[tuple[int, int]]] = {}
    digests = [np.zeros(0, np.uint64), *(census.digest_N for census in censuses)]
    values, counts = np.unique(np.concatenate(digests), return_counts=True)
    for place, census in enumerate(censuses):
        for name in np.flatnonzero(np.isin(census.digest_N, values[counts > 1])).tolist():
            equal.setdefault(int(census.digest_N[name]), []).append((place, name))
    yield from equal.values()
