"""Decide whether to keep the samples of a dataset in memory, and read them into memory once.

The whole dataset is then one `DecodedSamples`, on the training device or in host memory that the ranks of a node share
(`data_pipeline.loading.shared_memory`). Batches have the same bits wherever the samples are.

Guarantees: the memory is free again when the processes end, and no rank waits for a rank that gave up.

Shapes: B batch, N all samples, C channels, H height, W width, X points of all sounds end to end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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
from data_pipeline.loading.shared_memory import NodeShare, SharedTensors, TensorLayout
from data_pipeline.storage.manifest import Manifest
from data_pipeline.storage.store import SampleStore

_CPU: Final = torch.device("cpu")
_CHUNK: Final = 512  # samples that a thread decodes at a time
_MAX_THREADS: Final = 16
_LABEL: Final = "label/"  # before the name of a label, in the name of its tensor


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
    return sum(layout.num_bytes for layout in _layouts(manifest).values())


def place_data(
    store: SampleStore,
    *,
    wanted: Literal["auto", "stream", "host", "device"],
    resident_gigabytes: float,
    device: torch.device,
    share: NodeShare | None,
    show_progress: bool,
) -> DataPlacement:
    """Read a dataset into memory if `wanted` says so, or if `wanted` is `auto` and the dataset fits.

    `auto` keeps at most `resident_gigabytes` (10^9 bytes), and never more than half of the free memory; what a GPU has
    no room for is kept on the host. With a `share`, every rank of the run must call this with the same arguments.

    Raises `UserError` if `host` or `device` is wanted and memory is too small, or if a shard cannot be fetched.
    """
    if wanted == "stream":
        return DataPlacement("stream", "data.placement is stream")
    num_bytes = resident_bytes(store.manifest)
    size = f"{num_bytes / 1e9:.3g} GB in memory"
    if wanted == "auto" and num_bytes > resident_gigabytes * 1e9:
        return DataPlacement("stream", f"{size} are more than the {resident_gigabytes:g} of data.resident_gigabytes")
    on_device = device.type != "cpu" if wanted == "auto" else wanted == "device"
    # Until `_read_shared` has ended, nothing may depend on the memory of this machine: all ranks of the run must reach
    # its exchanges.
    shared = None if share is None else _read_shared(store, share, show_progress=show_progress)
    of_device = _shortage(num_bytes, device) if on_device else ""
    if of_device and wanted == "auto":
        on_device = False
    target = device if on_device else _CPU
    shortage = "" if isinstance(shared, DecodedSamples) and not on_device else _shortage(num_bytes, target)
    if isinstance(shared, str) and not on_device:
        shortage = shared
    if shortage:
        if wanted == "auto":
            return DataPlacement("stream", f"{size}, and {shortage}")
        instead = "host or stream" if on_device else "stream"
        raise UserError(
            f"{store.location} needs {size}, but {shortage}; set data.placement to {instead}, or free some memory"
        )
    if isinstance(shared, DecodedSamples):
        samples, how = shared.to(target), ", read once for all ranks of the machine"
    else:
        samples, how = read_whole(store, target, show_progress=show_progress), ""
    reason = "data.placement says so" if wanted != "auto" else f"within data.resident_gigabytes {resident_gigabytes:g}"
    why_not_there = f", because {of_device}" if of_device else ""
    return DataPlacement("device" if on_device else "host", f"{size}, {reason}{how}{why_not_there}", samples)


def read_whole(store: SampleStore, device: torch.device, *, show_progress: bool = False) -> DecodedSamples:
    """Read a whole dataset into the memory of this process, on `device`; row i is sample i."""
    tensors = {
        name: torch.empty(layout.shape, dtype=layout.dtype, device=device)
        for name, layout in _layouts(store.manifest).items()
    }
    bad, longest = _fill(store, tensors, show_progress=show_progress)
    return _whole(tensors, num_samples=len(store), bad=bad, longest=longest, device=device)


def _layouts(manifest: Manifest) -> dict[str, TensorLayout]:
    """Return the layouts of the tensors of `DecodedSamples` for a whole dataset, by name, without `index_B`."""
    num_samples = manifest.num_samples
    numbers = [f"{_LABEL}{name}" for name in manifest.labels]
    layouts: dict[str, TensorLayout] = {}
    if manifest.medium == "picture":
        layouts["pictures_BCHW"] = TensorLayout((num_samples, *manifest.input_shape), torch.uint8)
        if manifest.has_mask:
            layouts["masks_BHW"] = TensorLayout((num_samples, *manifest.input_shape[1:]), torch.uint8)
    else:
        dtype = sound_dtype(manifest)
        num_bytes = manifest.num_bytes
        layouts["points_X"] = TensorLayout((num_bytes // dtype.itemsize,), dtype)
        numbers += ["start_B", "length_B"]
    return layouts | dict.fromkeys(numbers, TensorLayout((num_samples,), torch.int64))


def _fill(
    store: SampleStore, tensors: Mapping[str, Tensor], *, show_progress: bool
) -> tuple[dict[int, BadSample], int]:
    """Decode all samples into `tensors`, in stored order. Return the bad samples by index, and the longest length."""
    bad: dict[int, BadSample] = {}
    longest = num_points = 0
    with Progress(f"read {store.location}", total=len(store), enabled=show_progress) as progress:
        chunks = stored_order(store, range(len(store.shard_ends)))
        for chunk in decode_ahead(store, chunks, num_threads=min(num_cores(), _MAX_THREADS)):
            first = int(chunk.index_B[0])
            for name, tensor in tensors.items():
                is_label = name.startswith(_LABEL)
                part = chunk.labels[name.removeprefix(_LABEL)] if is_label else getattr(chunk, name)
                if name == "points_X":
                    tensor[num_points : num_points + len(part)] = part
                else:
                    tensor[first : first + len(chunk)] = part + num_points if name == "start_B" else part
            if chunk.points_X is not None:
                num_points += len(chunk.points_X)
            longest = max(longest, chunk.longest)
            bad |= {sample.index: sample for sample in chunk.bad.values()}
            progress.advance(len(chunk))
    return bad, longest


def stored_order(store: SampleStore, shards: range, *, num_at_once: int = _CHUNK) -> Iterator[NDArray[np.int64]]:
    """Yield the indices of some shards in stored order, up to `num_at_once` of one shard at a time.

    Begins to fetch the next shard of a remote dataset.
    """
    fits_one_more = store.max_shards is None or store.max_shards > 2
    for shard in shards:
        start, end = int(store.shard_ends[shard - 1]) if shard else 0, int(store.shard_ends[shard])
        if fits_one_more and shard + 1 < shards.stop:
            store.prefetch([shard, shard + 1])
        for first in range(start, end, num_at_once):
            yield np.arange(first, min(first + num_at_once, end), dtype=np.int64)


def _whole(
    tensors: Mapping[str, Tensor],
    *,
    num_samples: int,
    bad: Mapping[int, BadSample],
    longest: int,
    device: torch.device = _CPU,
) -> DecodedSamples:
    return DecodedSamples(
        index_B=torch.arange(num_samples, device=device),
        labels={name.removeprefix(_LABEL): label_N for name, label_N in tensors.items() if name.startswith(_LABEL)},
        pictures_BCHW=tensors.get("pictures_BCHW"),
        masks_BHW=tensors.get("masks_BHW"),
        points_X=tensors.get("points_X"),
        start_B=tensors.get("start_B"),
        length_B=tensors.get("length_B"),
        longest=longest,
        bad=bad,
    )


def _read_shared(store: SampleStore, share: NodeShare, *, show_progress: bool) -> DecodedSamples | str:
    """Let the first rank of each node read the dataset into shared memory. Return the samples, or why that failed.

    Every rank exchanges three values, whatever happens. If reading fails, raises `UserError` on all ranks of the node.
    """
    memory = SharedTensors(_layouts(store.manifest), token=share.token)
    problem: str = ""
    if share.is_first:
        problem = _shortage(memory.num_bytes, _CPU) or memory.create()
    problem = share.from_first(problem)
    if not problem:
        memory.open()
    share.from_first(None)  # all have mapped the file
    outcome: str | UserError | tuple[dict[int, BadSample], int] = problem
    if share.is_first and not (outcome := problem or memory.reserve()):
        try:
            outcome = _fill(store, memory.tensors, show_progress=show_progress)
        except UserError as error:
            outcome = error
    outcome = share.from_first(outcome)
    if isinstance(outcome, UserError):
        raise outcome
    if isinstance(outcome, str):
        return outcome
    bad, longest = outcome
    return _whole(memory.tensors, num_samples=len(store), bad=bad, longest=longest)


def _shortage(num_bytes: int, device: torch.device) -> str:
    """Return why a dataset of that size does not fit into the memory of a device; an empty text if it fits."""
    if device.type == "cuda":
        free, where = free_device_bytes(device), f"on {device}"
    else:
        free, where = free_host_bytes(), "in host memory"
    return f"only {free / 1e9:.3g} GB are free {where}, of which it may use half" if 2 * num_bytes > free else ""


def free_device_bytes(device: torch.device) -> int:
    """Return the bytes that this process can still allocate on a GPU, with what its allocator keeps of freed tensors.

    The driver counts those as used: after one probe or run in a process, the GPU would look full for the next.
    """
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept
