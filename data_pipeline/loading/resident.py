"""Resident data: a dataset that fits is read once and stays in memory, so that no step waits for data.

Comes in: a store. Goes out: every sample as it is stored, on the training device or in host memory that the ranks of a
node share. What is in a batch, and what is drawn on it, is decided elsewhere, from the same numbers as for data that is
streamed. What may never happen: memory that outlives the processes which hold it, or a rank that waits for one that
gave up.

Shapes: B batch, N all samples, C channels, H height, W width, X points of all sounds laid end to end.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from data_pipeline.core.errors import UserError
from data_pipeline.core.progress import Progress
from data_pipeline.core.sample import BadSample
from data_pipeline.core.schema import Schema
from data_pipeline.storage.manifest import Manifest
from data_pipeline.storage.store import SampleStore, Stored

Placement = Literal["stream", "host", "device"]

SHARED: Final = Path("/dev/shm")  # memory that looks like files, of one machine or container

_CHUNK: Final = 512  # samples that a thread decodes at a time
_MAX_THREADS: Final = 16
_ALIGNED: Final = 64  # where tensors begin in shared memory
_PLAIN_BYTES: Final = 200  # of the reason why a sample is bad, where it is told to other ranks


@dataclass(frozen=True)
class NodeShare:
    """How the ranks that see the same `SHARED` hold one copy of resident data together.

    Attributes:
        local_rank: this rank's number among them, from 0; number 0 reads for all.
        barrier: returns once every rank of the run has called it; all ranks make the same number of calls.
        token: a file name for this run and dataset, the same on all of them.
    """

    local_rank: int
    barrier: Callable[[], None]
    token: str


def shared_memory_identity() -> str:
    """The same for two processes exactly where they see the same `SHARED`, and so can hold data together."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {SHARED.stat().st_dev}"
    except OSError:
        return f"{os.uname().nodename} {os.getpid()}"


@dataclass(frozen=True)
class Rows:
    """Samples as they are stored, in memory: some of a dataset, or all of it.

    Attributes:
        index_B: (B,) int64 dataset indices.
        label_base_B, label_overlay_B: (B,) int64.
        pictures_BCHW: uint8; None for sounds.
        masks_BHW: uint8; None where nothing is drawn into the shards.
        points_X: the sounds, int16 or float32, end to end, maybe with others between them; None for pictures.
        start_B, length_B: (B,) int64, where each sound lies in `points_X`; None for pictures.
        longest: no sound has more points than this.
    """

    index_B: Tensor
    label_base_B: Tensor
    label_overlay_B: Tensor
    pictures_BCHW: Tensor | None
    masks_BHW: Tensor | None
    points_X: Tensor | None = None
    start_B: Tensor | None = None
    length_B: Tensor | None = None
    longest: int = 0

    @classmethod
    def of(cls, stored: Stored, manifest: Manifest) -> Rows:
        """The rows of a store's answer, bad ones too. Raises `UserError` where a sound is of the wrong type."""
        points_X = start_B = length_B = None
        if stored.clips is not None:
            due = _sound_dtype(manifest)
            for row, clip in enumerate(stored.clips):
                if clip.dtype != due and row not in stored.bad:
                    key = f"{int(stored.index_B[row]):08d}"
                    raise UserError(f"sample {key} holds {clip.dtype} but should hold {due}; build the dataset again")
            length_B = torch.tensor([len(clip) for clip in stored.clips])
            start_B = length_B.cumsum(0) - length_B
            points_X = torch.cat(stored.clips).to(due)  # a bad one may be of another type
        return cls(
            index_B=stored.index_B,
            label_base_B=stored.label_base_B,
            label_overlay_B=stored.label_overlay_B,
            pictures_BCHW=stored.pictures_BCHW,
            masks_BHW=stored.masks_BHW if "mask.png" in manifest.members else None,
            points_X=points_X,
            start_B=start_B,
            length_B=length_B,
            longest=0 if length_B is None else int(length_B.max()),
        )

    def take(self, row_B: Tensor) -> Rows:
        """The rows numbered `row_B`, (B,) int64 on the same device, in that order."""

        def select(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.index_select(0, row_B)

        return Rows(
            index_B=self.index_B.index_select(0, row_B),
            label_base_B=self.label_base_B.index_select(0, row_B),
            label_overlay_B=self.label_overlay_B.index_select(0, row_B),
            pictures_BCHW=select(self.pictures_BCHW),
            masks_BHW=select(self.masks_BHW),
            points_X=self.points_X,
            start_B=select(self.start_B),
            length_B=select(self.length_B),
            longest=self.longest,
        )


@dataclass(frozen=True)
class Resident:
    """A whole dataset in memory: row i is sample i; what is in a row whose index is in `bad` means nothing."""

    rows: Rows
    bad: Mapping[int, BadSample]

    def to(self, device: torch.device) -> Resident:
        """The same on another device."""
        rows = self.rows

        def move(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(device)

        return Resident(
            Rows(
                index_B=rows.index_B.to(device),
                label_base_B=rows.label_base_B.to(device),
                label_overlay_B=rows.label_overlay_B.to(device),
                pictures_BCHW=move(rows.pictures_BCHW),
                masks_BHW=move(rows.masks_BHW),
                points_X=move(rows.points_X),
                start_B=move(rows.start_B),
                length_B=move(rows.length_B),
                longest=rows.longest,
            ),
            self.bad,
        )


@dataclass(frozen=True)
class Placed:
    """Where the samples of a dataset are, and why, in words; `resident` is None where they are streamed."""

    placement: Placement
    reason: str
    resident: Resident | None = None


def decoded(store: SampleStore, chunks: Iterable[NDArray[np.int64]], *, num_threads: int) -> Iterator[Stored]:
    """The samples of each chunk of indices, in their order; as many chunks as threads are decoded ahead."""
    with ThreadPoolExecutor(num_threads) as pool:
        waiting: deque[Future[Stored]] = deque()
        for chunk in chunks:
            waiting.append(pool.submit(store.decode, chunk))
            if len(waiting) > num_threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def num_cores() -> int:
    """The cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def resident_bytes(manifest: Manifest) -> int:
    """The size of a dataset in memory: exact for pictures; for sounds an upper limit, from the size of its shards."""
    return sum(field.num_bytes for field in _fields(manifest).values())


def place(
    store: SampleStore,
    *,
    wanted: Literal["auto", "stream", "host", "device"],
    resident_gigabytes: float,
    device: torch.device,
    share: NodeShare | None,
    show_progress: bool,
) -> Placed:
    """Read a dataset into memory where that is wanted, or where `auto` finds that it fits.

    `auto` keeps at most `resident_gigabytes` (10^9 bytes), and never more than half of the memory that is free. With a
    `share`, every rank of the run calls this with the same arguments.

    Raises `UserError` where `host` or `device` is wanted and memory is too small, or a shard cannot be had.
    """
    if wanted == "stream":
        return Placed("stream", "data.placement is stream")
    num_bytes = resident_bytes(store.manifest)
    size = f"{num_bytes / 1e9:.3g} GB in memory"
    if wanted == "auto" and num_bytes > resident_gigabytes * 1e9:
        return Placed("stream", f"{size} are more than the {resident_gigabytes:g} of data.resident_gigabytes")
    on_device = device.type != "cpu" if wanted == "auto" else wanted == "device"
    target = device if on_device else torch.device("cpu")
    placement: Placement = "device" if on_device else "host"
    # From here to the end of `_read_shared` nothing may depend on how much memory this machine has: all ranks of the
    # run meet at its barriers.
    shared = None if share is None else _read_shared(store, share, show_progress=show_progress)
    shortage = "" if isinstance(shared, Resident) and not on_device else _shortage(num_bytes, target)
    if isinstance(shared, str) and not on_device:
        shortage = shared
    if shortage:
        if wanted == "auto":
            return Placed("stream", f"{size}, and {shortage}")
        raise UserError(
            f"{store.location} needs {size} but {shortage}; set data.placement to stream, or free some memory"
        )
    if isinstance(shared, Resident):
        resident, how = shared.to(target), ", read once for all ranks of the machine"
    else:
        resident, how = _read(store, target, show_progress=show_progress), ""
    reason = "data.placement says so" if wanted != "auto" else f"within data.resident_gigabytes {resident_gigabytes:g}"
    return Placed(placement, f"{size}, {reason}{how}", resident)


@dataclass(frozen=True)
class _Field:
    """One tensor of `Rows` for a whole dataset."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def _fields(manifest: Manifest) -> dict[str, _Field]:
    num_samples = manifest.num_samples
    numbers = ["label_base_B", "label_overlay_B"]
    fields: dict[str, _Field] = {}
    if manifest.medium == "picture":
        fields["pictures_BCHW"] = _Field((num_samples, *manifest.input_shape), torch.uint8)
        if "mask.png" in manifest.members:
            fields["masks_BHW"] = _Field((num_samples, *manifest.input_shape[1:]), torch.uint8)
    else:
        dtype = _sound_dtype(manifest)
        num_bytes = sum(shard.num_bytes for shard in manifest.shards)
        fields["points_X"] = _Field((num_bytes // dtype.itemsize,), dtype)
        numbers += ["start_B", "length_B"]
    return fields | dict.fromkeys(numbers, _Field((num_samples,), torch.int64))


def _sound_dtype(manifest: Manifest) -> torch.dtype:
    return torch.float32 if manifest.overlay is not None and not manifest.is_online else torch.int16


def _read(store: SampleStore, device: torch.device, *, show_progress: bool) -> Resident:
    """The whole dataset in memory of this process, on `device`."""
    tensors = {
        name: torch.empty(field.shape, dtype=field.dtype, device=device)
        for name, field in _fields(store.manifest).items()
    }
    bad, longest = _fill(store, tensors, show_progress=show_progress)
    return _resident(store, tensors, bad=bad, longest=longest)


def _fill(
    store: SampleStore, tensors: Mapping[str, Tensor], *, show_progress: bool
) -> tuple[dict[int, BadSample], int]:
    """Decode all samples into `tensors`, in stored order; the bad ones by index, and the longest sound."""
    bad: dict[int, BadSample] = {}
    longest = num_points = 0
    with Progress(f"read {store.location}", total=len(store), enabled=show_progress) as progress:
        for stored in decoded(store, _chunks(store), num_threads=min(num_cores(), _MAX_THREADS)):
            rows = Rows.of(stored, store.manifest)
            first, num_rows = int(rows.index_B[0]), len(rows.index_B)
            for name, tensor in tensors.items():
                part = getattr(rows, name)
                if name == "points_X":
                    tensor[num_points : num_points + len(part)] = part
                else:
                    tensor[first : first + num_rows] = part + num_points if name == "start_B" else part
            if rows.points_X is not None:
                num_points += len(rows.points_X)
            longest = max(longest, rows.longest)
            bad |= {sample.index: sample for sample in stored.bad.values()}
            progress.advance(num_rows)
    return bad, longest


def _chunks(store: SampleStore) -> Iterator[NDArray[np.int64]]:
    """All indices in stored order, shard by shard; the next shard of a remote dataset is fetched meanwhile."""
    num_shards = len(store.shard_ends)
    fits_one_more = store.max_shards is None or store.max_shards > 2
    for shard, (start, end) in enumerate(pairwise([0, *store.shard_ends.tolist()])):
        if fits_one_more and shard + 1 < num_shards:
            store.prefetch([shard, shard + 1])
        for first in range(start, end, _CHUNK):
            yield np.arange(first, min(first + _CHUNK, end), dtype=np.int64)


def _resident(
    store: SampleStore, tensors: Mapping[str, Tensor], *, bad: Mapping[int, BadSample], longest: int
) -> Resident:
    device = tensors["label_base_B"].device
    rows = Rows(
        index_B=torch.arange(len(store), device=device),
        label_base_B=tensors["label_base_B"],
        label_overlay_B=tensors["label_overlay_B"],
        pictures_BCHW=tensors.get("pictures_BCHW"),
        masks_BHW=tensors.get("masks_BHW"),
        points_X=tensors.get("points_X"),
        start_B=tensors.get("start_B"),
        length_B=tensors.get("length_B"),
        longest=longest,
    )
    return Resident(rows, bad)


def _read_shared(store: SampleStore, share: NodeShare, *, show_progress: bool) -> Resident | str:
    """The whole dataset in `SHARED`, read by the first rank for all that see it; or why that cannot be, in words.

    The file has left its directory before a sample is in it, so the memory ends with the processes that hold it,
    however they end. Every rank passes three barriers, whatever happens. Raises on all ranks where the first fails.
    """
    memory = _SharedMemory(store.manifest, SHARED / share.token)
    is_first = share.local_rank == 0
    error: Exception | None = None
    problem = ""
    if is_first:
        problem = _shortage(memory.num_bytes, torch.device("cpu")) or memory.create()
    share.barrier()
    problem = problem or memory.open()
    share.barrier()
    if is_first and not (problem := problem or memory.reserve()):
        try:
            bad, longest = _fill(store, memory.tensors, show_progress=show_progress)
            reasons = {index: _plain(sample.reason) for index, sample in bad.items()}
            memory.tell(_Told(error="", bad=reasons, longest=longest))
        except Exception as caught:
            error = caught
            memory.tell(_Told(error=str(caught)[:_PLAIN_BYTES], bad={}, longest=0))
    share.barrier()
    memory.close()
    if error is not None:
        raise error
    if problem:
        return problem
    told = memory.told()
    if told is None:
        return "the first rank of this machine found no room for it"
    if told.error:
        raise UserError(told.error)
    return _resident(store, memory.tensors, bad=_bad_samples(store, told.bad), longest=told.longest)


def _plain(reason: str) -> str:
    """In letters that JSON writes in two bytes at most, and short, so that the room for all of them can be known."""
    return "".join(letter if letter.isprintable() and letter.isascii() else "?" for letter in reason)[:_PLAIN_BYTES]


def _bad_samples(store: SampleStore, reasons: Mapping[int, str]) -> dict[int, BadSample]:
    shards = np.searchsorted(store.shard_ends, list(reasons), side="right").tolist()
    names = [store.manifest.shards[shard].name for shard in shards]
    return {index: BadSample(index, name, reason) for (index, reason), name in zip(reasons.items(), names, strict=True)}


class _Told(Schema):
    """What the first rank of a machine tells the others: that it failed, or which samples are bad."""

    error: str
    bad: dict[int, str]
    longest: int


class _SharedMemory:
    """The tensors of a dataset in one file of `SHARED`, and behind them what the first rank has to tell."""

    def __init__(self, manifest: Manifest, path: Path) -> None:
        self._path = path
        self._places: dict[str, tuple[_Field, int]] = {}
        self.num_bytes = 0
        for name, field in _fields(manifest).items():
            self._places[name] = (field, self.num_bytes)
            self.num_bytes += -(-field.num_bytes // _ALIGNED) * _ALIGNED
        # Room to tell of every sample that it is bad: what is not written to takes no memory.
        self._size = self.num_bytes + 4 * _PLAIN_BYTES * (manifest.num_samples + 1)
        self._file = -1

    def create(self) -> str:
        """Make the file, which takes no memory yet; or why that cannot be."""
        try:
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            os.ftruncate(self._file, self._size)
        except OSError as error:
            return f"{self._path} cannot be made ({error.strerror})"
        return ""

    def open(self) -> str:
        """Map the file; or why that cannot be."""
        if not self._path.exists():
            return f"the first rank of this machine did not make {self._path}"
        self._mapped = torch.from_file(str(self._path), shared=True, size=self._size, dtype=torch.uint8)
        self.tensors = {
            name: self._mapped[start : start + field.num_bytes].view(field.dtype).view(field.shape)
            for name, (field, start) in self._places.items()
        }
        return ""

    def reserve(self) -> str:
        """Take the file out of its directory, and memory for the tensors; or why there is none.

        A write to a page for which there is none would end the process without a word.
        """
        self._path.unlink()
        try:
            os.posix_fallocate(self._file, 0, self.num_bytes)
        except OSError as error:
            return f"{self._path.parent} has no room for it ({error.strerror})"
        return ""

    def tell(self, told: _Told) -> None:
        """For all ranks that have mapped the file."""
        text = told.model_dump_json().encode()
        os.pwrite(self._file, len(text).to_bytes(8, "little") + text, self.num_bytes)

    def told(self) -> _Told | None:
        """What the first rank told; None if nothing."""
        data = self._mapped.numpy().data[self.num_bytes :]
        length = int.from_bytes(data[:8], "little")
        return _Told.model_validate_json(bytes(data[8 : 8 + length])) if length else None

    def close(self) -> None:
        """The mapping stays as long as its tensors."""
        if self._file >= 0:
            os.close(self._file)


def _shortage(num_bytes: int, device: torch.device) -> str:
    """Why a dataset of that size may not stay in the memory of a device; empty if it may."""
    if device.type == "cuda":
        free, where = torch.cuda.mem_get_info(device)[0], f"on {device}"
    else:
        free, where = free_host_bytes(), "in host memory"
    return f"only {free / 1e9:.3g} GB are free {where}, of which it may take half" if 2 * num_bytes > free else ""


def free_host_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory that this process may still take: of the machine, and of the job's share of it (cgroups 1 and 2)."""
    fields = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
    free = int(fields["MemAvailable"].split()[0]) * 1024
    for line in (proc / "self/cgroup").read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            root, names = cgroups, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root, names = cgroups / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        directory = root / group.lstrip("/")
        while directory.is_relative_to(root):
            free = int(min(free, _free_in_group(directory, *names)))
            directory = directory.parent
    return max(free, 0)


def _free_in_group(directory: Path, limit: str, used: str, cached: str) -> float:
    """What a cgroup leaves free in bytes, the files that it caches among it; infinity where it sets no limit."""
    try:
        most, now = (directory / limit).read_text().strip(), int((directory / used).read_text())
        stat = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
    except OSError:
        return math.inf
    return math.inf if most == "max" else int(most) - now + int(stat.get(cached, 0))
