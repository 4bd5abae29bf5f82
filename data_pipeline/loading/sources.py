"""The datasets of a stream, and what is checked of them before the first step."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from data_pipeline.core.batch import Batch
from data_pipeline.core.errors import UserError
from data_pipeline.core.sample import BadSample
from data_pipeline.loading.collate import BatchMaker
from data_pipeline.loading.decode import DecodedSamples
from data_pipeline.loading.order import Rows
from data_pipeline.loading.placement import DataPlacement
from data_pipeline.remote.fetch import RemoteConfig
from data_pipeline.storage.store import SampleStore


@dataclass(frozen=True)
class StreamSource:
    """A dataset of a stream: its samples, the maker of its batches, and the place of its samples.

    `number` counts the datasets of the stream, and `first` the samples of those before this one. `prefix` stands before
    the names of its shards: `NAME/` for a source of a mixture, and nothing for one dataset.
    """

    number: int
    first: int
    prefix: str
    store: SampleStore
    maker: BatchMaker
    placed: DataPlacement

    def named(self, bad: BadSample) -> BadSample:
        """Return a bad sample of this dataset under its index among the samples of all."""
        return replace(bad, index=self.first + bad.index, shard=f"{self.prefix}{bad.shard}", first=self.first)

    def collate(self, samples: DecodedSamples, rows: Rows, *, step: int, index_B: torch.Tensor) -> Batch:
        """Return a batch without the online overlay. `index_B` holds `rows.key_index_R`, beside the samples."""
        named = replace(samples, index_B=index_B)
        return self.maker.collate(named, step=step, epoch=rows.key_epoch, bad=tuple(map(self.named, rows.bad)))


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


def check_crops(stores: Sequence[SampleStore]) -> None:
    """Raise `UserError` if a dataset is read as whole pictures, so that no crop can be cut when one is decoded."""
    for store in stores:
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


def check_cache(stores: Sequence[SampleStore], remote: RemoteConfig, *, shuffle_shards: int | None) -> None:
    """Raise `UserError` if the cache is too small for the reading order of remote datasets that are read together."""
    stores = [store for store in stores if store.is_remote]
    num_bytes = [int(_cached_at_once(store, shuffle_shards).sum()) for store in stores]
    needed = sum(math.ceil(1.05 * num / 1e7) / 100 for num in num_bytes)  # with the indexes of the shards
    # Without a directory of their own choice, each has a cache of its own.
    limit = math.inf if remote.cache_dir is None or remote.cache_gigabytes is None else remote.cache_gigabytes
    each_fits = all(fits_cache(store, shuffle_shards=shuffle_shards) for store in stores)
    if not each_fits or (len(stores) > 1 and needed > limit):
        raise UserError(
            f"{' and '.join(str(store.location) for store in stores)}: the shuffling needs {needed:g} GB of shards in "
            "the cache at once; raise data.remote.cache_gigabytes to that, or lower data.shuffle_shards"
        )
