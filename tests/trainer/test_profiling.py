"""The stages of a step add up to the whole, and a delay in any of them is named."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from configs import resolve_recipe
from data_pipeline.loading.collate import BatchMaker
from data_pipeline.storage.store import SampleStore
from tests.gloo import run_ranks
from tests.tiny_data import on_data, write_tiny_pair
from trainer.distributed.collectives import rank
from trainer.distributed.engines.ddp_engine import DDPEngine
from trainer.liveness import stage
from trainer.models.encoder import Encoder
from trainer.profiling import Clock, slowest
from trainer.run_dir import RunDir
from trainer.train import train
from trainer.views.expert_image import ExpertImage

STEPS, BATCH_SIZE = 6, 4
DELAYED: dict[str, tuple[Any, str, float]] = {  # a function of each stage, and the seconds by which a call is delayed
    "read": (SampleStore, "_tar", 0.02),
    "overlay": (BatchMaker, "apply_overlay", 0.05),
    "views": (ExpertImage, "forward", 0.08),
    "forward": (Encoder, "forward", 0.12),
    "backward": (DDPEngine, "backward", 0.2),
    "communication": (torch.distributed, "all_to_all_single", 0.02),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_pair(tmp_path_factory.mktemp("data"), num_train=STEPS * BATCH_SIZE, num_test=BATCH_SIZE)


def test_a_pause_belongs_to_no_step() -> None:
    clock = Clock()
    batches: Any = [type("Batch", (), {"seconds": {}})()]
    for _ in clock.timed(batches):
        with stage("forward"):
            time.sleep(0.1)
        began = time.perf_counter()
        with clock.paused(), stage("backward"):
            time.sleep(0.4)
        paused = time.perf_counter() - began
        metrics = clock.read(num_samples=8)
    assert metrics["perf/samples_per_second"] == pytest.approx(8 / (metrics["time_seconds"] - paused), rel=0.05)
    assert metrics["perf/backward_fraction"] == 0
    assert metrics["perf/forward_fraction"] > 0.8
    assert metrics["time_seconds"] >= 0.5


def test_an_inner_stage_is_not_counted_twice() -> None:
    clock = Clock()
    for _ in clock.timed([]):
        pass
    batches: Any = [type("Batch", (), {"seconds": {}})()]
    for _ in clock.timed(batches):
        moments = [time.perf_counter()]  # on a busy machine a sleep is longer than asked for
        with stage("forward"):
            time.sleep(0.1)
            moments.append(time.perf_counter())
            with stage("communication"):
                time.sleep(0.3)
                moments.append(time.perf_counter())
        metrics = clock.read(num_samples=1)
    whole = moments[2] - moments[0]
    assert metrics["perf/forward_fraction"] == pytest.approx((moments[1] - moments[0]) / whole, abs=0.1)
    assert metrics["perf/communication_fraction"] == pytest.approx((moments[2] - moments[1]) / whole, abs=0.1)
    assert sum(value for name, value in metrics.items() if name.endswith("_fraction")) == pytest.approx(
        1 + metrics["perf/data_wait_fraction"]
    )


class Event:
    """A stand-in for `torch.cuda.Event`, of a device that does everything at once."""

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.time = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: Event) -> float:
        return 1e3 * (later.time - self.time)


def test_on_a_gpu_each_step_that_is_read_is_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """This includes the first step after a restart, and a last step that is no multiple of anything."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    reads = {7, 10, 11}
    clock = Clock(device=torch.device("cuda"), start_step=6, is_read=lambda num_done: num_done in reads)
    batches: Any = [type("Batch", (), {"seconds": {}})() for _ in range(5)]
    shares = {}
    for num_done, _ in enumerate(clock.timed(batches), start=7):
        with stage("forward"):
            time.sleep(0.001)
        if num_done in reads:
            shares[num_done] = clock.read(num_samples=1)["perf/forward_fraction"]
    assert shares.keys() == reads
    assert all(share > 0.5 for share in shares.values()), shares


def delay(stage: str, on_rank: int | None) -> None:
    owner, name, seconds = DELAYED[stage]
    call = getattr(owner, name)

    def slow(*arguments: Any, **named: Any) -> Any:
        if on_rank in {None, rank()}:
            time.sleep(seconds)
        return call(*arguments, **named)

    setattr(owner, name, slow)


def train_with_delays(stages: list[str], data: Path, directory: Path, on_rank: int | None = None) -> None:
    """Delay a call in each of these stages, on all ranks or on one."""
    for slow in stages:
        delay(slow, on_rank)
    small = ["data.placement=stream", "encoder.width=1", "encoder.batch_norm=local", f"global_batch_size={BATCH_SIZE}"]
    small += ["num_epochs=1", f"log_every_steps={STEPS}", "checkpoint_every_steps=100"]
    config = resolve_recipe("debug:image", on_data(data, *small))
    train(config, RunDir(directory), device=torch.device("cpu"), command="test")


@pytest.mark.ranks
def test_delays_are_counted_where_they_are_and_no_rank_is_called_slow(data: Path, tmp_path: Path) -> None:
    """Both ranks wait for another time in each of six stages."""
    run_ranks(train_with_delays, 2, list(DELAYED), data, tmp_path)
    metrics = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    whole = STEPS * BATCH_SIZE / metrics["perf/samples_per_second"]
    for slow, (_, _, seconds) in DELAYED.items():
        assert metrics[f"perf/{slow}_fraction"] * whole > 0.95 * STEPS * seconds, slow
    fractions = [value for name, value in metrics.items() if name.endswith("_fraction")]
    assert sum(fractions) - metrics["perf/data_wait_fraction"] == pytest.approx(1, abs=0.05)
    assert slowest(metrics).startswith("backward")
    assert "takes" not in slowest(metrics)


@pytest.mark.ranks
def test_a_slow_rank_is_named(data: Path, tmp_path: Path) -> None:
    """Rank 1 waits in the forward pass of each step, and rank 0 for it in a message."""
    run_ranks(train_with_delays, 2, ["forward"], data, tmp_path, 1)
    metrics = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert metrics["perf/slowest_rank"] == 1
    assert metrics["perf/slowest_rank_ratio"] > 1.5
    assert "rank 1 takes" in slowest(metrics)
