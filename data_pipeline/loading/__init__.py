"""Read a dataset as batches.

A sample passes these modules in this order:

    order        seed, step, rank           -> (B,) indices of samples
    storage      `SampleStore.read`         -> `StoredSamples`: bytes in a memory-mapped shard; a remote one is fetched
    decode       `decode`                   -> `DecodedSamples`: pictures or sounds, masks, labels, bad samples
    collate      `BatchMaker.collate`       -> `Batch`: sounds have one length; no online overlay yet
    collate      `BatchMaker.apply_overlay` -> `Batch`: with the online overlay, on the training device
    placement    `place_data`               -> the whole dataset as one `DecodedSamples` in memory, if it fits
    stream       `Stream`                   -> one finished `Batch` for each step

A dataset in memory is read and decoded once; each step then takes its rows by index and collates them as above. Probes
(`trainer.probes.features`) call the same functions without an order.
"""

from typing import TYPE_CHECKING

from data_pipeline.core.imports import imported_when_used

if TYPE_CHECKING:
    from data_pipeline.loading.stream import ReadConfig, Stream
    from data_pipeline.loading.whole import read_all
else:
    __getattr__ = imported_when_used(__name__, {"stream": "ReadConfig Stream", "whole": "read_all"})

__all__ = ["ReadConfig", "Stream", "read_all"]
