"""Ranks that exchange their messages by NCCL, on one GPU: what gloo shows on CPUs holds there too.

Each test needs a GPU and no more than one (`tests.nccl`). Two ranks, each with its own part of the batch, are compared
with one process on the same GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.killed_runs import kill_after
from tests.nccl import machine_of, run_nccl_ranks
from tests.small_encoder import CONVNET
from tests.tiny_data import write_tiny_pair, write_tiny_sound_pair
from tests.trainer import test_exactness as exactness
from tests.trainer import test_trajectory as trajectory
from tests.trainer.distributed import test_engines as engines
from trainer.config import RunConfig
from trainer.run_dir import RunDir

ROOT = Path(__file__).parents[3]
CUDA = torch.device("cuda", 0)
WORLD_SIZE = 2
pytestmark = [
    pytest.mark.ranks,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

IN_PARTS = ["memory.micro_batches=2", "memory.encoder_checkpointing=1"]
# The objectives and the other steps of test_exactness.py, and what only a GPU does in another way.
STEPS: dict[str, RunConfig] = {
    **{objective: exactness.configure(objective, [CONVNET]) for objective in exactness.OBJECTIVES},
    **{name: build(objective, overrides) for name, (build, objective, overrides) in exactness.OTHERS.items()},
    "micro_batches": exactness.configure("nt_xent", ["objective.chunk_size=3", *IN_PARTS]),
}


def in_pieces(name: str) -> RunConfig:
    build, objective, overrides = exactness.OTHERS[name]
    return build(objective, [*overrides, "engine.kind=fsdp"])


def plain(config: RunConfig) -> RunConfig:
    """Return the config without recording, which reads its learning rates in float32."""
    return config.model_copy(update={"compile": False})


@pytest.fixture(scope="module")
def steps() -> dict[str, list[dict[str, torch.Tensor]]]:
    configs = STEPS | {f"fsdp {name}": in_pieces(name) for name in exactness.CUT}
    by_rank = run_nccl_ranks(exactness.steps, WORLD_SIZE, list(map(plain, configs.values())), CUDA)
    return dict(zip(configs, map(list, zip(*by_rank, strict=True)), strict=True))


@pytest.mark.parametrize("name", STEPS)
def test_a_step_of_ranks_on_a_gpu_is_that_of_one_process(
    name: str, steps: dict[str, list[dict[str, torch.Tensor]]]
) -> None:
    """The loss, every gradient and every buffer, in float64."""
    expected = exactness.one_step(plain(STEPS[name]), CUDA)
    for found in steps[name]:
        exactness.assert_equal(found, expected, name)


@pytest.mark.parametrize("name", exactness.CUT)
def test_a_step_in_pieces_on_a_gpu_is_that_of_one_process(
    name: str, steps: dict[str, list[dict[str, torch.Tensor]]]
) -> None:
    expected = exactness.one_step(plain(STEPS[name]), CUDA)
    for found in steps[f"fsdp {name}"]:
        exactness.assert_equal(found, expected, name)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    pictures, online, sounds = (tmp_path_factory.mktemp(name) for name in ("pictures", "online", "sounds"))
    return {
        "pictures": write_tiny_pair(pictures, num_train=trajectory.NUM_TRAIN, num_test=20),
        "online": write_tiny_pair(online, num_train=trajectory.NUM_TRAIN, num_test=20, overlay="online"),
        "sounds": write_tiny_sound_pair(sounds, num_train=trajectory.NUM_SOUNDS, num_test=20),
    }


RUNS = ("simultaneous", "moco", "byol", "composed", "online_per_view", "sounds_viewmaker")


def config_of(kind: str, data: dict[str, Path]) -> RunConfig:
    recipe, overrides = trajectory.STEPS[kind]
    where = data.get(kind.partition("_")[0], data["pictures"])
    return trajectory.configure(where, recipe, [*trajectory.IN_FLOAT64, *overrides, "compile=false"])


def train_all(configs: list[RunConfig], run_dirs: list[Path]) -> None:
    for config, run_dir in zip(configs, run_dirs, strict=True):
        trajectory.train_on_rank(config, run_dir, CUDA)


@pytest.fixture(scope="module")
def runs(data: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    run_dirs = {kind: tmp_path_factory.mktemp("runs") / kind for kind in RUNS}
    run_nccl_ranks(train_all, WORLD_SIZE, [config_of(kind, data) for kind in RUNS], list(run_dirs.values()))
    return run_dirs


@pytest.mark.parametrize("kind", RUNS)
def test_a_run_of_ranks_on_a_gpu_is_that_of_one_process(
    kind: str, data: dict[str, Path], runs: dict[str, Path], tmp_path: Path
) -> None:
    """Two epochs from the shards, with the checkpoints that a run writes."""
    config = config_of(kind, data)
    trajectory.train_on_rank(config, tmp_path / "alone", CUDA)
    trajectory.assert_same_runs(runs[kind], tmp_path / "alone", config)


CASES = {name: case for name, case in engines.CASES.items() if case.engine.kind == "deepspeed"}
REAL_RUNS = [name for name, (_, _, engine) in engines.REAL_RUNS.items() if engine.kind == "deepspeed"]


def deepspeed_on_rank(real_runs: dict[str, engines.RealRun]) -> dict[str, Any]:
    return {
        "trained": {name: engines.train_on_rank(case, CUDA) for name, case in CASES.items()},
        "real": {name: engines.real_steps(real_runs[name], is_ddp=False, device=CUDA) for name in REAL_RUNS},
        "real_ddp": {name: engines.real_steps(real_runs[name], is_ddp=True, device=CUDA) for name in REAL_RUNS},
    }


@pytest.fixture(scope="module")
def of_deepspeed(data: dict[str, Path]) -> list[dict[str, Any]]:
    pytest.importorskip("deepspeed")
    return run_nccl_ranks(deepspeed_on_rank, WORLD_SIZE, engines.configure_real_runs(data["pictures"], "compile=false"))


@pytest.mark.parametrize("name", CASES)
def test_deepspeed_on_a_gpu_follows_one_plain_process(name: str, of_deepspeed: list[dict[str, Any]]) -> None:
    engines.assert_follow_one_process([result["trained"][name] for result in of_deepspeed], CASES[name])


@pytest.mark.parametrize("name", REAL_RUNS)
def test_a_real_run_of_deepspeed_on_a_gpu_follows_ddp(name: str, of_deepspeed: list[dict[str, Any]]) -> None:
    """Kernels may sum in another order each time, so the last digits of float32 may differ."""
    for result in of_deepspeed:
        found, expected = result["real"][name], result["real_ddp"][name]
        torch.testing.assert_close(found["losses"], expected["losses"], rtol=1e-4, atol=1e-5)
        start = expected["start"]["encoder"]
        for key, tensor in expected["states"]["encoder"][0].items():
            moved = (tensor - start[key]).double().norm()
            assert (found["states"]["encoder"][0][key] - tensor).double().norm() <= 1e-2 * moved, key


def test_started_as_by_slurm_ranks_on_a_gpu_train_and_go_on(data: dict[str, Path], tmp_path: Path) -> None:
    """`launch/train.py` as two tasks, each of which sees one GPU; and once more, from the first checkpoint on."""
    config = config_of("simultaneous", data)
    run_dir, config_file = RunDir(tmp_path / "run"), tmp_path / "config.json"
    config_file.write_text(config.model_dump_json())
    command = [sys.executable, "launch/train.py", "--config", str(config_file), "--run-dir", str(run_dir.path)]
    start_as_by_slurm(command, port=29_417)
    trajectory.train_on_rank(config, tmp_path / "alone", CUDA)
    trajectory.assert_same_runs(run_dir.path, tmp_path / "alone", config)
    kill_after(run_dir, trajectory.HALF)
    start_as_by_slurm(command, port=29_418)
    trajectory.assert_same_runs(run_dir.path, tmp_path / "alone", config)


def start_as_by_slurm(command: list[str], *, port: int) -> None:
    """Start two tasks of a step of Slurm, and wait for their end."""
    step = {
        "SLURM_JOB_ID": "1",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_NODEID": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    tasks = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | step | machine_of(rank) | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    said = [task.communicate(timeout=200)[0] for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], said
