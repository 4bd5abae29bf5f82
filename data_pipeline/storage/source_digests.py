"""Write and compare source digests: a short hash of the clean picture or sound that each sample was made from.

A build writes them beside the shards. They show whether two datasets were made from the same pictures or sounds,
whatever the names of the files and the overlays, without reading the samples.

Shapes: N samples, R records of the source.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from data_pipeline.core.errors import UserError
from data_pipeline.core.sample import sample_key
from data_pipeline.remote.cache import RemoteConfig, RemoteShards, is_remote
from data_pipeline.storage.files import read_regular
from data_pipeline.storage.manifest import SOURCE_DIGESTS_NAME, Manifest

NUM_CONTENT_BYTES: Final = 32  # of `content_digest`
_DTYPE: Final = np.dtype("<u8")  # of a short digest: the first 8 bytes of the long one
_NUM_EXAMPLES: Final = 2


def content_digest(content: NDArray[Any]) -> bytes:
    """Return the sha256 of a decoded picture or sound: of its dtype, shape and values; 32 bytes."""
    kind = repr((content.dtype.str, content.shape)).encode()
    return hashlib.sha256(kind + content.tobytes()).digest()


def write_source_digests(path: Path, content_digests: bytes, *, num_samples: int) -> str:
    """Write the short digests of `num_samples` samples; return the sha256 of the file.

    `content_digests` holds the digests of the R records, end to end. Sample `i` shows record `i % R`.
    """
    long_R = np.frombuffer(content_digests, dtype=np.uint8).reshape(-1, NUM_CONTENT_BYTES)
    short_R = np.ascontiguousarray(long_R[:, : _DTYPE.itemsize]).view(_DTYPE)[:, 0]
    data = np.resize(short_R, num_samples).tobytes()
    path.write_bytes(data)
    return hashlib.sha256(data).hexdigest()


def num_digest_bytes(manifest: Manifest) -> int:
    """Return the size of the file of short digests of a dataset."""
    return manifest.num_samples * _DTYPE.itemsize


def check_source_digests(path: Path, manifest: Manifest) -> NDArray[np.uint64]:
    """Read and check the short digests of a dataset, (N,).

    Raises `UserError` if the file is missing, or is not the one that the manifest names.
    """
    try:
        data = read_regular(path, max_bytes=num_digest_bytes(manifest) + 1)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); copy or build the dataset again") from None
    if hashlib.sha256(data).hexdigest() != manifest.source_digests_sha256:
        raise UserError(f"{path} is not the file that the manifest names by sha256; copy or build the dataset again")
    if len(data) != num_digest_bytes(manifest):
        raise UserError(
            f"{path} has {len(data)} bytes, not {_DTYPE.itemsize} for each of the {manifest.num_samples} samples; "
            "copy or build the dataset again"
        )
    return np.frombuffer(data, dtype=_DTYPE)


def read_source_digests(location: str | Path, manifest: Manifest, *, remote: RemoteConfig) -> NDArray[np.uint64] | None:
    """Read the short digests of the dataset at `location`, (N,); None if its `manifest` names none.

    Raises `UserError` if the file cannot be fetched or is not the one that the manifest names.
    """
    if manifest.source_digests_sha256 is None:
        return None
    if is_remote(location):
        path = RemoteShards(str(location), config=remote).path(SOURCE_DIGESTS_NAME)
    else:
        path = Path(location) / SOURCE_DIGESTS_NAME
    return check_source_digests(path, manifest)


@dataclass(frozen=True)
class SharedSources:
    """How many of `num_test` test samples were made from a source that the train set has too.

    `examples` are the keys of such a test sample and of a train sample with the same source, for up to two of them.
    """

    num_test: int
    num_shared: int
    examples: tuple[tuple[str, str], ...]

    @property
    def share(self) -> float:
        """Return the share of the test samples, from 0 to 1."""
        return self.num_shared / max(self.num_test, 1)


def shared_sources(train_N: NDArray[np.uint64], test_M: NDArray[np.uint64]) -> SharedSources:
    """Compare the digests of a train set with those of a test set."""
    shared = np.flatnonzero(np.isin(test_M, train_N))
    examples = tuple(
        (sample_key(index), sample_key(int(np.flatnonzero(train_N == test_M[index])[0])))
        for index in shared[:_NUM_EXAMPLES].tolist()
    )
    return SharedSources(len(test_M), len(shared), examples)
