from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Barrier
from typing import Any, Literal

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from data_pipeline.core.errors import UserError
from data_pipeline.core.sample import Batch
from data_pipeline.core.system import SHARED, free_host_bytes
from data_pipeline.loading import placement, shared_memory
from data_pipeline.loading.placement import resident_bytes
from data_pipeline.loading.shared_memory import NodeShare
from data_pipeline.loading.stream import ReadConfig, Stream
from data_pipeline.overlays.noise import Noise
from data_pipeline.storage.store import SampleStore
from tests.data_pipeline.loading.test_stream import noise
from tests.tiny_data import damage, write_tiny_dataset, write_tiny_sounds

NUM_SAMPLES = 42
KINDS = ("baked", "online", "none", "sounds", "mixed sounds", "noise")
NUM_RANKS = 3
BAD = (5, 17)


def write(directory: Path, kind: str) -> Path:
    """A dataset of some kind, two of its samples bad."""
    match kind:
        case "baked" | "online" | "none":
            write_tiny_dataset(directory, num_samples=NUM_SAMPLES, overlay=kind)
        case _:
            overlays: dict[str, Noise | Literal["baked", "none"]] = {"sounds": "none", "mixed sounds": "baked"}
            write_tiny_sounds(directory, num_samples=NUM_SAMPLES, overlay=overlays.get(kind) or noise())
    damage(directory, BAD)
    return directory


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("datasets")
    return {kind: write(root / kind, kind) for kind in KINDS}


def stream(
    location: Path, *, share: NodeShare | None = None, rank: int = 1, start_step: int = 0, **read: Any
) -> Stream:
    """Steps of more than an epoch."""
    return Stream(
        location,
        read=ReadConfig(**{"num_workers": 0, "max_bad_share": 0.1, **read}),
        global_batch_size=4 * NUM_RANKS,
        seed=3,
        rank=rank,
        world_size=NUM_RANKS,
        start_step=start_step,
        end_step=8,
        overlay_draw="per_view" if location.name in ("online", "noise") else "per_item",
        share=share,
    )


def assert_same(ours: Iterable[Batch], theirs: Iterable[Batch]) -> None:
    """Bit for bit."""
    num = 0
    for batch, other in zip(ours, theirs, strict=True):
        num += 1
        assert batch.labels.keys() == other.labels.keys()
        for name, value in {**vars(batch), **batch.labels}.items():
            if name in ("seconds", "labels"):  # what its making took is no part of what a batch is
                continue
            other_value = other.labels[name] if name in batch.labels else getattr(other, name)
            if isinstance(value, torch.Tensor):
                assert value.dtype == other_value.dtype, name
                assert torch.equal(value, other_value), name
            else:
                assert value == other_value, name
        assert (batch.inputs_a is batch.inputs_b) == (other.inputs_a is other.inputs_b)
    assert num


@pytest.mark.parametrize("placement", ["host", "device"])
@pytest.mark.parametrize("kind", KINDS)
def test_resident_batches_equal_streamed_ones(datasets: dict[str, Path], kind: str, placement: str) -> None:
    streamed = list(stream(datasets[kind], placement="stream"))
    held = stream(datasets[kind], placement=placement)
    assert held.placement == placement
    assert {sample.index for sample in held.known_bad} == set(BAD)
    assert_same(streamed, held)
    assert_same(streamed[5:], stream(datasets[kind], placement=placement, start_step=5))
    assert {sample.index for batch in streamed for sample in batch.bad} <= set(BAD)


# Auto


def test_auto_keeps_what_fits(datasets: dict[str, Path]) -> None:
    held = stream(datasets["online"])
    assert held.placement == "host"
    assert held.placement_reason == "0.00013 GB in memory, within data.resident_gigabytes 4"
    num_bytes = resident_bytes(held.manifest)
    assert num_bytes == NUM_SAMPLES * (3 * 32 * 32 + 2 * 8)
    assert stream(datasets["online"], resident_gigabytes=num_bytes / 1e9).placement == "host"
    streamed = stream(datasets["online"], resident_gigabytes=(num_bytes - 1) / 1e9)
    assert streamed.placement == "stream"
    assert streamed.placement_reason.startswith("0.00013 GB in memory are more than the 0.0001")


def test_memory_that_is_not_free_is_not_taken(datasets: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    num_bytes = resident_bytes(SampleStore(datasets["baked"]).manifest)
    monkeypatch.setattr(placement, "free_host_bytes", lambda: 2 * num_bytes - 1)
    batches = stream(datasets["baked"])
    assert batches.placement == "stream"
    assert "GB are free in host memory, of which it may use half" in batches.placement_reason
    with pytest.raises(UserError, match=r"GB are free in host memory.*; set data.placement to stream, or free some"):
        stream(datasets["baked"], placement="host")
    monkeypatch.setattr(placement, "free_host_bytes", lambda: 2 * num_bytes)
    assert stream(datasets["baked"]).placement == "host"


def test_data_that_a_gpu_has_no_room_for_are_kept_on_the_host(
    datasets: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As beside another run on the same GPU."""
    store = SampleStore(datasets["baked"])
    num_bytes = resident_bytes(store.manifest)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2 * num_bytes - 1, 1 << 40))

    def placed(wanted: Literal["auto", "device"]) -> placement.DataPlacement:
        gpu = torch.device("cuda", 0)
        return placement.place_data(
            store, wanted=wanted, resident_gigabytes=4, device=gpu, share=None, show_progress=False
        )

    held = placed("auto")
    assert held.kind == "host"
    assert held.samples is not None
    assert held.samples.index_B.device == torch.device("cpu")
    assert "GB are free on cuda:0, of which it may use half" in held.reason
    with pytest.raises(UserError, match=r"free on cuda:0.*; set data.placement to host or stream, or free some memory"):
        placed("device")
    monkeypatch.setattr(placement, "free_host_bytes", lambda: 2 * num_bytes - 1)
    assert placed("auto").kind == "stream"


def test_free_memory_is_that_of_the_jobs_cgroups(tmp_path: Path) -> None:
    assert 0 < free_host_bytes() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 2000 kB\nMemAvailable:    1000 kB\n")
    (proc / "self/cgroup").write_text("0::/slurm/job\n")
    assert free_host_bytes(proc, cgroups) == 1_024_000
    job = cgroups / "slurm/job"
    job.mkdir(parents=True)
    for name, text in (("memory.max", "max\n"), ("memory.current", "100"), ("memory.stat", "anon 5\ninactive_file 40")):
        (job / name).write_text(text)
        (job.parent / name).write_text(text)
    assert free_host_bytes(proc, cgroups) == 1_024_000
    (job.parent / "memory.max").write_text("500\n")
    assert free_host_bytes(proc, cgroups) == 500 - 100 + 40
    (proc / "self/cgroup").write_text("5:cpu:/other\n4:memory:/job\n")
    (cgroups / "memory/job").mkdir(parents=True)
    for name, text in (
        ("memory.limit_in_bytes", "300"),
        ("memory.usage_in_bytes", "400"),
        ("memory.stat", "total_inactive_file 10"),
    ):
        (cgroups / "memory/job" / name).write_text(text)
    assert free_host_bytes(proc, cgroups) == 0


# Shared by the ranks of a machine


def shares(token: str) -> list[NodeShare]:
    barrier, of_first = Barrier(NUM_RANKS, timeout=20), [None]

    def from_first(is_first: bool, value: Any) -> Any:
        if is_first:
            of_first[0] = value
        barrier.wait()
        found = of_first[0]
        barrier.wait()
        return found

    return [NodeShare(rank == 0, partial(from_first, rank == 0), token) for rank in range(NUM_RANKS)]


def as_ranks(location: Path, token: str, **read: Any) -> list[Stream]:
    """The streams of all ranks of a machine, which are threads here."""
    with ThreadPoolExecutor(NUM_RANKS) as pool:
        return list(
            pool.map(
                lambda rank, share: stream(location, share=share, rank=rank, **read), range(NUM_RANKS), shares(token)
            )
        )


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_of_a_machine_share_one_copy(
    datasets: dict[str, Path], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    read_stored = SampleStore.read

    def counting(store: SampleStore, indices: NDArray[np.int64]) -> Any:
        read.extend(indices.tolist())
        return read_stored(store, indices)

    with monkeypatch.context() as context:
        context.setattr(SampleStore, "read", counting)
        streams = as_ranks(datasets[kind], token := f"test-{os.getpid()}-{kind}")
    assert sorted(read) == list(range(NUM_SAMPLES))  # by one rank
    assert not (SHARED / token).exists()
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if f"{token} (deleted)" in line]
    assert len(maps) == NUM_RANKS
    assert all(line.split()[1] == "rw-s" for line in maps)
    for rank, batches in enumerate(streams):
        assert batches.placement_reason.endswith("read once for all ranks of the machine")
        assert {sample.index: sample.shard for sample in batches.known_bad} == {
            5: "shard-00000.tar",
            17: "shard-00001.tar",
        }
        assert_same(stream(datasets[kind], rank=rank, placement="stream"), batches)
    del streams, batches
    assert token not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("problem", ["no room", "no directory", "no memory"])
def test_where_memory_cannot_be_shared_all_ranks_know_in_time(
    datasets: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, problem: str
) -> None:
    def no_room(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    match problem:
        case "no room":
            monkeypatch.setattr(os, "posix_fallocate", no_room)
        case "no directory":
            monkeypatch.setattr(shared_memory, "SHARED", tmp_path / "nowhere")
        case "no memory":
            monkeypatch.setattr(placement, "free_host_bytes", lambda: 1000)
    token = f"test-{os.getpid()}"
    for batches in as_ranks(datasets["online"], token):
        assert batches.placement == "stream"
        assert "GB in memory, and " in batches.placement_reason
    with pytest.raises(UserError, match=r"set data\.placement to stream, or free some memory"):
        as_ranks(datasets["online"], token, placement="host")
    if problem != "no memory":  # each has a copy of its own
        for batches in as_ranks(datasets["online"], token, placement="device"):
            assert batches.placement == "device"
    assert not (SHARED / token).exists()


def test_where_the_first_rank_fails_all_fail_alike(datasets: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise UserError("the server is gone")

    monkeypatch.setattr(SampleStore, "read", fail)
    token = f"test-{os.getpid()}"

    def error(rank: int, share: NodeShare) -> str:
        with pytest.raises(UserError) as caught:
            stream(datasets["online"], share=share, rank=rank)
        return str(caught.value)

    with ThreadPoolExecutor(NUM_RANKS) as pool:
        assert list(pool.map(error, range(NUM_RANKS), shares(token))) == ["the server is gone"] * NUM_RANKS
    assert not (SHARED / token).exists()


def test_a_killed_rank_leaves_nothing_behind(datasets: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed while it reads the shards into shared memory."""
    token = f"test-killed-{os.getpid()}"
    context = multiprocessing.get_context("fork")
    is_reading = context.Event()

    def read_for_ever(*_: object) -> None:
        is_reading.set()
        time.sleep(60)

    monkeypatch.setattr(SampleStore, "read", read_for_ever)
    share = NodeShare(True, lambda value: value, token)
    rank = context.Process(target=stream, args=(datasets["baked"],), kwargs={"share": share, "rank": 0})
    rank.start()
    try:
        assert is_reading.wait(20)
        assert f"{token} (deleted)" in Path(f"/proc/{rank.pid}/maps").read_text()
        assert not (SHARED / token).exists()
    finally:
        assert rank.pid is not None
        os.kill(rank.pid, signal.SIGKILL)
        rank.join(10)
    assert rank.exitcode == -signal.SIGKILL
