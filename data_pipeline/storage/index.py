"""The files of an index of tars: where the members of each sample lie, and what its labels are.

The index of a dataset lies beside its manifest:

    tars.txt        the path or URL of each tar, a line each; a path in the index's own directory is relative
    tars.bin        (num_tars, 2) int64: the samples up to its end, and its size in bytes
    tars.sha256     the sha256 of each tar, 32 bytes, if `build` wrote the tars or they are remote; else empty
    tars.times      (num_tars,) int64: when each local tar of others was changed last, in nanoseconds
    samples.bin     (num_samples, num_members) int64: where each member lies in its tar, and its size (`pack`)
    label_NAME.bin  for each label, such as `base`: int32 for each sample, the number of its class, -1 if it has none

All numbers are little-endian. `data_pipeline.storage.store` reads them.

Shapes: B samples to read, N samples of a tar, M members of a sample.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from data_pipeline.core.errors import UserError, printable
from data_pipeline.storage.locations import TARS_NAME, is_remote
from data_pipeline.storage.tar_headers import BLOCK

NUMBERS_NAME: Final = "tars.bin"
HASHES_NAME: Final = "tars.sha256"
TIMES_NAME: Final = "tars.times"
SAMPLES_NAME: Final = "samples.bin"
_SIZE_BITS: Final = 28  # and 35 bits for the offset in blocks: tars of up to 16 TiB
MAX_MEMBER_BYTES: Final = (1 << _SIZE_BITS) - 1


def labels_name(label: str) -> str:
    """Return the name of the file of a label.

    Examples:
        >>> labels_name("base")
        'label_base.bin'
    """
    return f"label_{label}.bin"


def pack(offsets: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return one int64 for each member, of its offset in bytes and its size, `MAX_MEMBER_BYTES` at most.

    An offset is a whole number of blocks of a tar.
    """
    return (offsets // BLOCK << _SIZE_BITS) | sizes


@dataclass(frozen=True)
class OpenTar:
    """A tar in memory.

    Attributes:
        first: the index of its first sample in the dataset.
        packed_NM: from `pack`, for the members of its samples.
        is_checked: (N,) bool, whether the tar's headers were compared with the index.
    """

    path: Path
    data: memoryview
    first: int
    packed_NM: NDArray[np.int64]
    is_checked: NDArray[np.bool_]

    def places(self, rows_B: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the offsets and the sizes of the members of some samples of the tar, (B, M) each."""
        packed_BM = self.packed_NM[rows_B].astype(np.int64)
        return (packed_BM >> _SIZE_BITS) * BLOCK, packed_BM & MAX_MEMBER_BYTES


def has_remote_tars(directory: Path) -> bool:
    """Return whether a local directory is an index of remote tars."""
    names = directory / TARS_NAME
    return names.is_file() and is_remote(names.read_text(encoding="utf-8").partition("\n")[0])


def map_file(path: Path) -> memoryview:
    """Map a file copy-on-write, so that writing to the memory does not change the file. Leaves no descriptor open.

    Raises `FileNotFoundError` if the file has been removed, and `UserError` if it cannot be mapped for another reason.
    """
    import torch  # here, because `look` at a folder needs none; Python's own mmap keeps a descriptor

    num_bytes = path.stat().st_size
    if num_bytes == 0:
        return memoryview(bytearray())
    try:
        mapped = torch.from_file(str(path), shared=False, size=num_bytes, dtype=torch.uint8)
    except RuntimeError as error:
        path.stat()
        raise UserError(f"{path} cannot be mapped into memory ({printable(str(error))}); read another copy") from None
    return mapped.numpy().data
