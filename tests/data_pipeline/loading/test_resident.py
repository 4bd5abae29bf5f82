from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from data_pipeline.core.errors import UserError
from data_pipeline.core.system import free_host_bytes
from data_pipeline.loading import placement
from data_pipeline.loading.placement import resident_bytes
from data_pipeline.loading.stream import ReadConfig, Stream
from data_pipeline.overlays.noise import Noise
from data_pipeline.storage.manifest import load_manifest
from data_pipeline.storage.store import SampleStore
from tests.data_pipeline.loading.batches import assert_same, noise
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


def stream(location: Path, *, start_step: int = 0, ranks_on_node: int = 1, **read: Any) -> Stream:
    """Steps of more than an epoch."""
    return Stream(
        location,
        read=ReadConfig(**{"num_workers": 0, "max_bad_share": 0.1, **read}),
        global_batch_size=4 * NUM_RANKS,
        seed=3,
        rank=1,
        world_size=NUM_RANKS,
        start_step=start_step,
        end_step=8,
        overlay_draw="per_view" if location.name in ("online", "noise") else "per_item",
        ranks_on_node=ranks_on_node,
    )


@pytest.mark.parametrize(("kind", "placement"), [*((kind, "host") for kind in KINDS), ("online", "device")])
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
    num_bytes = resident_bytes(load_manifest(datasets["online"]))
    assert num_bytes == NUM_SAMPLES * (3 * 32 * 32 + 3 * 8)  # pixels, index and two labels
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
    beside = stream(datasets["baked"], ranks_on_node=2)
    assert beside.placement == "stream"
    assert "of which the copies of 2 ranks may use half" in beside.placement_reason


def test_data_that_a_gpu_has_no_room_for_are_kept_on_the_host(
    datasets: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As beside another run on the same GPU."""
    store = SampleStore(datasets["baked"])
    num_bytes = resident_bytes(store.manifest)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2 * num_bytes - 1, 1 << 40))

    def placed(wanted: Literal["auto", "device"]) -> placement.DataPlacement:
        gpu = torch.device("cuda", 0)
        return placement.place_data(store, wanted=wanted, resident_gigabytes=4, device=gpu, show_progress=False)

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
