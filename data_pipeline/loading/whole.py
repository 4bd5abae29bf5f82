"""Read every sample of a dataset once, in stored order, for evaluation."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
import torch

from data_pipeline.core.batch import Batch
from data_pipeline.core.sample import BadSample
from data_pipeline.core.system import num_cores
from data_pipeline.loading.collate import BatchMaker
from data_pipeline.loading.decode import decode_ahead
from data_pipeline.loading.sources import check_bad_share
from data_pipeline.overlays import evaluation_keys
from data_pipeline.remote.fetch import RemoteConfig
from data_pipeline.storage.store import SampleStore

logger = logging.getLogger(__name__)

_CPU: Final = torch.device("cpu")
_REMOTE: Final = RemoteConfig()
_NUM_THREADS: Final = 4


def read_all(
    dataset: str | Path | SampleStore,
    *,
    batch_size: int,
    draw: int | None = 0,
    device: torch.device = _CPU,
    remote: RemoteConfig = _REMOTE,
    max_bad_share: float = 0.001,
) -> Iterator[Batch]:
    """Yield every good sample once, in stored order, on `device`; for evaluation. Some batches may be smaller.

    An online overlay is drawn with `evaluation_keys`, so it is the same in every run. Each `draw` gives another
    overlay, and None gives clean samples. Leaves out and logs the samples that cannot be read.

    Raises `UserError` if the dataset is incomplete, or if more than `max_bad_share` of its samples cannot be read.
    """
    store = dataset if isinstance(dataset, SampleStore) else SampleStore(dataset, remote=remote)
    maker = BatchMaker(
        store.manifest,
        None if store.overlay is None or draw is None else store.overlay.to(device),
        lambda index_B, epoch, view: evaluation_keys(index_B, draw=draw or 0),
    )
    bad: list[BadSample] = []
    starts = range(0, len(store), batch_size)
    chunks = (np.arange(start, min(start + batch_size, len(store)), dtype=np.int64) for start in starts)
    for step, samples in enumerate(decode_ahead(store, chunks, num_threads=min(num_cores(), _NUM_THREADS))):
        found = tuple(samples.bad.values())
        if found:
            bad += found
            check_bad_share(bad, num_samples=len(store), max_share=max_bad_share, where=store.location)
            for sample in found:
                logger.warning("%s: %s in %s is left out: %s", store.location, sample.key, sample.shard, sample.reason)
        if len(found) < len(samples):
            good = samples.without_bad()
            yield maker.apply_overlay(maker.collate(good, step=step, bad=found).to(device))
