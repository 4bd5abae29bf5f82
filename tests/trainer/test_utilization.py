"""The share of a device's rate that a training reaches, and how much faster it would be without waiting for data."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from configs import resolve_recipe
from tests.small_encoder import CONVNET
from tests.tiny_data import on_data, write_tiny_pair
from trainer.build import build_training
from trainer.config import RunConfig
from trainer.data import open_stream
from trainer.run_dir import RunDir
from trainer.train import train
from trainer.utilization import Utilization, headspace, matrix_rate, measure_utilization

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_pair(tmp_path_factory.mktemp("data"), num_train=32, num_test=16)


def configure(data: Path, recipe: str, *overrides: str) -> RunConfig:
    return resolve_recipe(recipe, on_data(data, "global_batch_size=8", "num_epochs=1", *overrides))


def test_every_line_of_a_log_has_the_share_of_a_stated_rate(data: Path, tmp_path: Path) -> None:
    run_dir, stated = RunDir(tmp_path / "run"), Utilization(flops_per_sample=3e6, flops_per_second=2e9)
    train(configure(data, "debug:image", CONVNET), run_dir, device=CPU, command="test", utilization=stated)
    entries = run_dir.read_metrics()
    assert len(entries) == 4
    for entry in entries:
        assert entry["perf/mfu"] == pytest.approx(entry["perf/samples_per_second"] * 3e6 / 2e9)
        assert entry["perf/headspace"] == pytest.approx(1 / (1 - entry["perf/data_wait_fraction"]))


def test_a_run_that_waits_for_half_of_its_time_would_be_twice_as_fast() -> None:
    assert [headspace(share) for share in (0.0, 0.5, 0.75, 1.0)] == pytest.approx([1, 2, 4, 1000])


@pytest.mark.parametrize("overrides", [[], ["memory.micro_batches=2"], ["memory.encoder_checkpointing=whole"]])
def test_the_arithmetic_of_a_step_is_that_of_a_real_one(data: Path, overrides: list[str]) -> None:
    config = configure(data, "debug:viewmaker", *overrides)
    measured = measure_utilization(config, CPU, num_ranks=3)
    assert measured is not None
    training = build_training(config, num_samples=32, device=CPU)
    batch = next(iter(open_stream(config.data, global_batch_size=8, seed=0, end_step=4, device=CPU)))
    with FlopCounterMode(display=False) as counter:
        training.step(batch, learning_rates=training.learning_rates(0, num_steps=4))
    assert measured.flops_per_sample == pytest.approx(counter.get_total_flops() / 8, rel=0.01)
    assert measured.flops_per_second > 0


def test_a_step_that_cannot_be_counted_costs_nothing_but_the_share(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = configure(tmp_path / "nowhere", "debug:image")
    with caplog.at_level(logging.INFO):
        assert measure_utilization(config, CPU, num_ranks=1) is None
    assert "perf/mfu is not logged: " in caplog.text


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float64"])
def test_a_rate_is_that_of_the_precision(precision: str) -> None:
    assert 1e6 < matrix_rate(CPU, precision, size=64) < 1e13
