"""Write and compare source digests: a short hash of the clean picture or sound from which each sample was made.

A build writes them beside the shards. They show whether two datasets were made from the same pictures or sounds,
whatever the file names and overlays, and no sample has to be read.

Shapes: N samples, M samples of another dataset, R records of the source.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from data_pipeline.core.sample import sample_key
from data_pipeline.remote.cache import path_beside
from data_pipeline.remote.fetch import RemoteConfig
from data_pipeline.storage.manifest import SOURCE_DIGESTS_NAME, Manifest, read_file

NUM_CONTENT_BYTES: Final = 32  # of a `content_digest`
_DTYPE: Final = np.dtype("<u8")  # of a short digest, the first 8 bytes of a `content_digest`
_NUM_EXAMPLES: Final = 2


def content_digest(content: NDArray[Any]) -> bytes:
    """Return the sha256 of the dtype, shape and values of a decoded picture or sound, 32 bytes."""
    kind = repr((content.dtype.str, content.shape)).encode()
    return hashlib.sha256(kind + content.tobytes()).digest()


def write_source_digests(path: Path, content_digests: bytes, *, num_samples: int) -> None:
    """Write the short digests of `num_samples` samples.

    `content_digests` holds the digests of R records, end to end. Sample `i` shows record `i % R` of them.
    """
    long_R = np.frombuffer(content_digests, dtype=np.uint8).reshape(-1, NUM_CONTENT_BYTES)
    short_R = np.ascontiguousarray(long_R[:, : _DTYPE.itemsize]).view(_DTYPE)[:, 0]
    path.write_bytes(np.resize(short_R, num_samples).tobytes())


def read_source_digests(location: str | Path, manifest: Manifest, *, remote: RemoteConfig) -> NDArray[np.uint64] | None:
    """Read the short digests of the dataset at `location`, (N,); return None if it has none.

    Raises `UserError` if the file cannot be read, or is not the file that the manifest names.
    """
    if (entry := manifest.files.get(SOURCE_DIGESTS_NAME)) is None:
        return None
    path = path_beside(location, SOURCE_DIGESTS_NAME, manifest, config=remote)
    return np.frombuffer(read_file(path, sha256=entry.sha256), dtype=_DTYPE)


@dataclass(frozen=True)
class SharedSources:
    """The number of test samples, of `num_test`, that were made from a picture or sound of the train set.

    `examples` has up to two pairs of keys: a test sample, and a train sample that was made from the same picture.
    """

    num_test: int
    num_shared: int
    examples: tuple[tuple[str, str], ...]

    @property
    def share(self) -> float:
        """Return `num_shared` as a share of the test samples, from 0 to 1."""
        return self.num_shared / max(self.num_test, 1)


def shared_sources(train_N: NDArray[np.uint64], test_M: NDArray[np.uint64]) -> SharedSources:
    """Count the test samples whose digest is also in the train set."""
    shared = np.flatnonzero(np.isin(test_M, train_N))
    examples = tuple(
        (sample_key(index), sample_key(int(np.flatnonzero(train_N == test_M[index])[0])))
        for index in shared[:_NUM_EXAMPLES].tolist()
    )
    return SharedSources(len(test_M), len(shared), examples)
