"""The stages of a step add up to the whole, and a delay in any of them is named."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from configs import resolve_recipe
from data_pipeline.loading.collate import BatchMaker
from data_pipeline.storage.store import SampleStore
from tests.gloo import run_ranks
from tests.tiny_data import write_tiny_pair
from trainer.distributed.collectives import rank
from trainer.distributed.engines.ddp_engine import DDPEngine
from trainer.liveness import stage
from trainer.models.encoder import Encoder
from trainer.profiling import Clock, slowest
from trainer.run_dir import RunDir
from trainer.train import train
from trainer.views.expert_image import ExpertImage

DELAY_SECONDS = 0.05
DELAYED: dict[str, tuple[Any, str]] = {
    "read": (SampleStore, "_tar"),
    "overlay": (BatchMaker, "apply_overlay"),
    "views": (ExpertImage, "forward"),
    "forward": (Encoder, "forward"),
    "backward": (DDPEngine, "backward"),
    "communication": (torch.distributed, "all_to_all_single"),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_pair(tmp_path_factory.mktemp("data"), num_train=83, num_test=20)


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


def delayed(call: Callable[..., Any], *, on_rank: int | None) -> Callable[..., Any]:
    def slow(*arguments: Any, **named: Any) -> Any:
        if on_rank in {None, rank()}:
            time.sleep(DELAY_SECONDS)
        return call(*arguments, **named)

    return slow


def train_with_a_delay(slow: str, data: Path, directory: Path, on_rank: int | None = None) -> None:
    owner, name = DELAYED[slow]
    is_class_method = isinstance(owner, type) and isinstance(owner.__dict__.get(name), classmethod)
    call = delayed(getattr(owner, name), on_rank=on_rank)
    setattr(owner, name, staticmethod(call) if is_class_method else call)
    config = resolve_recipe(
        "debug:image",
        [
            f"data.train_dir={data / 'train'}",
            f"data.test_dir={data / 'test'}",
            "data.num_workers=0",
            "data.placement=stream",
            "encoder.width=1",
            "encoder.batch_norm=local",
            "global_batch_size=4",
            "num_epochs=1",
            "log_every_steps=20",
            "checkpoint_every_steps=100",
            "tracking.wandb=disabled",
        ],
    )
    train(config, RunDir(directory), device=torch.device("cpu"), command="test")


@pytest.mark.ranks
@pytest.mark.parametrize("slow", DELAYED)
def test_a_delay_is_named(slow: str, data: Path, tmp_path: Path) -> None:
    """Each step waits 50 ms in one stage; for communication there are two ranks."""
    run_ranks(train_with_a_delay, 2 if slow == "communication" else 1, slow, data, tmp_path / "run")
    metrics = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert slowest(metrics).startswith(slow), metrics
    fractions = [value for name, value in metrics.items() if name.endswith("_fraction")]
    assert sum(fractions) - metrics["perf/data_wait_fraction"] == pytest.approx(1, abs=0.05)


@pytest.mark.ranks
def test_a_slow_rank_is_named_and_one_of_equal_ranks_is_not(data: Path, tmp_path: Path) -> None:
    """Rank 1 waits 50 ms in the forward pass of each step, and rank 0 for it in a message."""
    for on_rank in (1, None):
        run_ranks(train_with_a_delay, 2, "forward", data, tmp_path / str(on_rank), on_rank)
    metrics = json.loads((tmp_path / "1" / "metrics.jsonl").read_text().splitlines()[-1])
    assert metrics["perf/slowest_rank"] == 1
    assert metrics["perf/slowest_rank_ratio"] > 1.5
    assert "rank 1 takes" in slowest(metrics)
    metrics = json.loads((tmp_path / "None" / "metrics.jsonl").read_text().splitlines()[-1])
    assert "takes" not in slowest(metrics)
