"""`cudnn_benchmark`: what a run sets and records; on a GPU, recorded steps and restarts that choose kernels anew."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.killed_runs import kill_after
from tests.nccl import run_nccl_ranks
from tests.tiny_data import write_tiny_pair
from tests.trainer.test_trajectory import NUM_TRAIN, configure, train_on_rank
from trainer.run_dir import RunDir, steps_in

GPU = torch.device("cuda", 0)
# A replay reads its learning rate in float32, which holds this one.
IN_FLOAT64 = ["precision=float64", "optimizer.learning_rate=0.03125"]
KEPT = ["num_epochs=8", "checkpoint_every_steps=5", "keep_checkpoints=9", "log_every_steps=1"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_pair(tmp_path_factory.mktemp("data"), num_train=NUM_TRAIN, num_test=20)


@pytest.mark.slow
@pytest.mark.parametrize("chosen", [False, True])
def test_a_run_sets_what_its_config_says_and_records_it(
    chosen: bool, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", not chosen)
    overrides = [f"cudnn_benchmark={chosen}"] if chosen else []
    train_on_rank(configure(data, "debug:image", ["num_epochs=1", *overrides]), tmp_path / "run")
    assert torch.backends.cudnn.benchmark is chosen
    assert RunDir(tmp_path / "run").read_provenance()["config"]["cudnn_benchmark"] is chosen


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_recorded_steps_and_restarts_are_the_plain_whole_run_up_to_rounding(data: Path, tmp_path: Path) -> None:
    """Each start is a process of its own, in which cuDNN chooses anew. All in float64, over 16 steps."""
    curves = {}
    for compiled in ("false", "step"):
        config = configure(data, "debug:image", [*IN_FLOAT64, *KEPT, "cudnn_benchmark=true", f"compile={compiled}"])
        whole = RunDir(tmp_path / compiled)
        run_nccl_ranks(train_on_rank, 1, config, whole.path, GPU)
        killed = RunDir(shutil.copytree(whole.path, tmp_path / f"{compiled}-killed"))
        kill_after(killed, steps_in(killed.checkpoints)[0])
        run_nccl_ranks(train_on_rank, 1, config, killed.path, GPU)
        for run_dir in (whole, killed):
            entries = [entry for entry in run_dir.read_metrics() if "train/loss" in entry]
            assert (entries[-1].get("perf/replay_fraction", 0) > 0) == (compiled == "step")
            curves[run_dir.path.name] = np.array([entry["train/loss"] for entry in entries])
    expected = curves["false"]
    assert np.ptp(expected) > 0.1  # the run moved
    for name, curve in curves.items():
        np.testing.assert_allclose(curve, expected, rtol=1e-9, err_msg=name)
