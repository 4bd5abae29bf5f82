"""What is checked of a dataset before the first step."""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data_pipeline.core.errors import UserError
from data_pipeline.core.sample import BadSample
from data_pipeline.storage.store import SampleStore


def check_bad_share(bad: Collection[BadSample], *, num_samples: int, max_share: float, where: str | Path) -> None:
    """Raise `UserError`, with the first bad samples, if more than `max_share` (0 to 1) of all samples are `bad`.

    `where` is the dataset as the user named it. A sample that is listed twice counts once.
    """
    by_index = {sample.index: sample for sample in bad}
    if len(by_index) <= max_share * num_samples:
        return
    first = [by_index[index] for index in sorted(by_index)[:3]]
    named = ", ".join(f"{sample.key} in {sample.shard} ({sample.reason})" for sample in first)
    raise UserError(
        f"{where}: {len(by_index)} of {num_samples} samples ({len(by_index) / num_samples:.2%}) cannot be read, more "
        f"than the {max_share:.2%} of data.max_bad_share, the first being {named}; run "
        "`python -m data_pipeline verify` on it, then build or copy it again"
    )


def check_crops(store: SampleStore) -> None:
    """Raise `UserError` if a dataset is read as whole pictures, so that no crop can be cut when one is decoded."""
    if not store.manifest.any_size or store.overlay is not None:
        why = "they have one size" if store.overlay is None else "its overlay is drawn on whole pictures"
        raise UserError(
            f"no crops can be cut out of the stored pictures of {store.location}, because {why}; leave out `crops` "
            "and let the views crop"
        )


def fits_cache(store: SampleStore, *, shuffle_shards: int | None) -> bool:
    """Return whether the cache of a remote dataset is large enough for its reading order."""
    return store.max_shards is None or len(_cached_at_once(store, shuffle_shards)) <= store.max_shards


def _cached_at_once(store: SampleStore, shuffle_shards: int | None) -> NDArray[np.int64]:
    """Return the sizes of the largest shards that are cached at once: all, or the window being read and the next."""
    return np.sort(store.shard_bytes)[::-1][: None if shuffle_shards is None else 2 * shuffle_shards]


def check_cache(store: SampleStore, *, shuffle_shards: int | None) -> None:
    """Raise `UserError` if the cache is too small for the reading order of a remote dataset."""
    if not fits_cache(store, shuffle_shards=shuffle_shards):
        num_bytes = int(_cached_at_once(store, shuffle_shards).sum())
        needed = math.ceil(1.05 * num_bytes / 1e7) / 100  # with the indexes of the shards
        raise UserError(
            f"{store.location}: the shuffling needs {needed:g} GB of shards in the cache at once; raise "
            "data.remote.cache_gigabytes to that, or lower data.shuffle_shards"
        )
