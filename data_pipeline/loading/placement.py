"""Decide whether to keep the samples of a dataset in memory, and read them into memory once.

The whole dataset is then one `DecodedSamples`, on the training device or in host memory. Batches have the same bits
wherever the samples are.

Shapes: B batch, N all samples, C channels, H height, W width, X points of all sounds end to end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from data_pipeline.core.errors import UserError
from data_pipeline.core.progress import Progress
from data_pipeline.core.sample import BadSample
from data_pipeline.core.system import free_host_bytes, num_cores
from data_pipeline.loading.decode import DecodedSamples, decode_ahead, sound_dtype
from data_pipeline.storage.manifest import Manifest
from data_pipeline.storage.store import SampleStore

_CPU: Final = torch.device("cpu")
_CHUNK: Final = 512  # samples that a thread decodes at a time
_MAX_THREADS: Final = 16


@dataclass(frozen=True)
class DataPlacement:
    """The place of the samples of a dataset.

    Attributes:
        kind: `stream` decodes samples at each step; `host` and `device` hold all of them in memory.
        reason: the reason for `kind`, in words.
        samples: the whole dataset, where row i is sample i; None for `stream`.
    """

    kind: Literal["stream", "host", "device"]
    reason: str
    samples: DecodedSamples | None = None


def resident_bytes(manifest: Manifest) -> int:
    """Return the size of a dataset in memory, in bytes: exact for pictures, an upper bound for sounds."""
    whole = _unfilled(manifest, torch.device("meta"))
    values = (*vars(whole).values(), *whole.labels.values())
    return sum(value.nbytes for value in values if isinstance(value, Tensor))


def place_data(
    store: SampleStore,
    *,
    wanted: Literal["auto", "stream", "host", "device"],
    resident_gigabytes: float,
    device: torch.device,
    show_progress: bool,
    ranks_on_node: int = 1,
) -> DataPlacement:
    """Read a dataset into memory if `wanted` says so, or if `wanted` is `auto` and the dataset fits.

    `auto` keeps at most `resident_gigabytes` (10^9 bytes), and never more than half of the free memory; what a GPU has
    no room for is kept on the host. There, each of `ranks_on_node` has a copy.

    Raises `UserError` if `host` or `device` is wanted and memory is too small, or if a shard cannot be fetched.
    """
    if wanted == "stream":
        return DataPlacement("stream", "data.placement is stream")
    num_bytes = resident_bytes(store.manifest)
    size = f"{num_bytes / 1e9:.3g} GB in memory"
    if wanted == "auto" and num_bytes > resident_gigabytes * 1e9:
        return DataPlacement("stream", f"{size} are more than the {resident_gigabytes:g} of data.resident_gigabytes")
    places = {"auto": tuple(dict.fromkeys((device, _CPU))), "device": (device,), "host": (_CPU,)}[wanted]
    reason = "data.placement says so" if wanted != "auto" else f"within data.resident_gigabytes {resident_gigabytes:g}"
    for place in places:
        lack = shortage(num_bytes, place, ranks_on_node=ranks_on_node)
        if not lack:
            kind: Literal["device", "host"] = "host" if place.type == "cpu" and wanted != "device" else "device"
            samples = read_whole(store, place, show_progress=show_progress)
            return DataPlacement(kind, f"{size}, {reason}", samples)
        reason += f", because {lack}"
    if wanted == "auto":
        return DataPlacement("stream", f"{size}, and {lack}")
    instead = "host or stream" if wanted == "device" else "stream"
    raise UserError(f"{store.location} needs {size}, but {lack}; set data.placement to {instead}, or free some memory")


def read_whole(store: SampleStore, device: torch.device, *, show_progress: bool = False) -> DecodedSamples:
    """Read a whole dataset into the memory of this process, on `device`, in stored order; row i is sample i."""
    whole = _unfilled(store.manifest, device)
    bad: dict[int, BadSample] = {}
    longest = num_points = 0
    with Progress(f"read {store.location}", total=len(store), enabled=show_progress) as progress:
        chunks = stored_order(store, range(len(store.shard_ends)))
        for chunk in decode_ahead(store, chunks, num_threads=min(num_cores(), _MAX_THREADS)):
            first = int(chunk.index_B[0])
            rows = slice(first, first + len(chunk))
            for name, label_N in whole.labels.items():
                label_N[rows] = chunk.labels[name]
            for name in ("pictures_BCHW", "masks_BHW", "start_B", "length_B"):
                if (tensor := getattr(whole, name)) is not None:
                    tensor[rows] = getattr(chunk, name)
            if whole.points_X is not None and whole.start_B is not None and chunk.points_X is not None:
                whole.start_B[rows] += num_points
                whole.points_X[num_points : num_points + len(chunk.points_X)] = chunk.points_X
                num_points += len(chunk.points_X)
            longest = max(longest, chunk.longest)
            bad |= {sample.index: sample for sample in chunk.bad.values()}
            progress.advance(len(chunk))
    return replace(whole, bad=bad, longest=longest)


def _unfilled(manifest: Manifest, device: torch.device) -> DecodedSamples:
    """Return memory for the samples of a whole dataset, in which only `index_B` has values."""
    num_samples = manifest.num_samples

    def numbers() -> Tensor:
        return torch.empty(num_samples, dtype=torch.int64, device=device)

    def pixels(*shape: int) -> Tensor:
        return torch.empty(num_samples, *shape, dtype=torch.uint8, device=device)

    whole = DecodedSamples(torch.arange(num_samples, device=device), {name: numbers() for name in manifest.labels})
    if manifest.medium == "picture":
        masks_BHW = pixels(*manifest.input_shape[1:]) if manifest.has_mask else None
        return replace(whole, pictures_BCHW=pixels(*manifest.input_shape), masks_BHW=masks_BHW)
    dtype = sound_dtype(manifest)
    points_X = torch.empty(manifest.num_bytes // dtype.itemsize, dtype=dtype, device=device)
    return replace(whole, points_X=points_X, start_B=numbers(), length_B=numbers())


def stored_order(store: SampleStore, shards: range, *, num_at_once: int = _CHUNK) -> Iterator[NDArray[np.int64]]:
    """Yield the indices of some shards in stored order, up to `num_at_once` of one shard at a time.

    Begins to fetch the next shard of a remote dataset.
    """
    fits_one_more = store.max_shards is None or store.max_shards > 2
    for shard in shards:
        samples = store.samples_of(shard)
        if fits_one_more and shard + 1 < shards.stop:
            store.prefetch([shard, shard + 1])
        for first in range(samples.start, samples.stop, num_at_once):
            yield np.arange(first, min(first + num_at_once, samples.stop), dtype=np.int64)


def shortage(num_bytes: int, device: torch.device, *, ranks_on_node: int) -> str:
    """Return why a dataset of that size does not fit into the memory of a device; an empty text if it fits."""
    if device.type == "cuda":
        free, where, num_copies = free_device_bytes(device), f"on {device}", 1
    else:
        free, where, num_copies = free_host_bytes(), "in host memory", ranks_on_node
    if 2 * num_copies * num_bytes <= free:
        return ""
    user = "it" if num_copies == 1 else f"the copies of {num_copies} ranks"
    return f"only {free / 1e9:.3g} GB are free {where}, of which {user} may use half"


def free_device_bytes(device: torch.device) -> int:
    """Return the bytes that this process can still allocate on a GPU, with what its allocator keeps of freed tensors.

    The driver counts those as used: after one probe or run in a process, the GPU would look full for the next.
    """
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept
