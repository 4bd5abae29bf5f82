"""kill -9 at a random step, start again: the same remaining batches and the same bits as an undisturbed run."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import safetensors.torch
import torch

from configs import resolve_recipe
from launch.states import status_of
from tests.gloo import run_ranks
from tests.nursery import PythonProcess
from tests.processes import kill_tree, ranks_of
from tests.real_data import REPOSITORY
from tests.small_encoder import CONVNET
from tests.tiny_data import write_tiny_dataset, write_tiny_pair
from trainer.distributed.collectives import world_size
from trainer.run_dir import RunDir
from trainer.train import train

NUM_STEPS = 15
MIXTURE = "{{few: {{train_dir: {0}/few, weight: 1}}, train: {{train_dir: {0}/train, weight: 2}}}}"


def settings_of(data: Path, *, num_ranks: int) -> list[str]:
    """Return the settings of a run: of one process on one dataset, or of ranks on a mixture."""
    settings = {
        "data.train_dir": data / "train",
        "data.test_dir": data / "test",
        "data.num_workers": 1,
        "global_batch_size": 16,
        "num_epochs": NUM_STEPS // 5,
        "checkpoint_every_steps": 2,
        "watchdog.enabled": "false",  # it would report the killed ranks, if it came to look before it is gone itself
        "tracking.wandb": "disabled",
        "encoder": CONVNET.removeprefix("encoder="),
    }
    if num_ranks > 1:
        settings |= {"data.train_dir": "null", "data.mixture": MIXTURE.format(data), "data.mixture_epoch": 83}
    return [f"{key}={value}" for key, value in settings.items()]


def command(data: Path, run_dir: Path, *, num_ranks: int) -> list[str]:
    """Return the command of a run of one process, or of ranks under a torchrun that restarts them once."""
    launcher = [sys.executable]
    if num_ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
        launcher += ["--max-restarts", "1"]
    sets = [word for setting in settings_of(data, num_ranks=num_ranks) for word in ("--set", setting)]
    return [*launcher, "launch/train.py", "--config", "debug:viewmaker", "--run-dir", str(run_dir), *sets]


def train_undisturbed(data: Path, run_dir: Path) -> None:
    config = resolve_recipe("debug:viewmaker", settings_of(data, num_ranks=world_size()))
    train(config, RunDir(run_dir), device=torch.device("cpu"), command="train")


def start(popen: type[subprocess.Popen[str]], words: list[str]) -> subprocess.Popen[str]:
    return popen(
        words,
        cwd=REPOSITORY,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def num_logged(run_dir: Path) -> int:
    path = RunDir(run_dir).metrics
    return len(path.read_text().splitlines()) if path.is_file() else 0


def num_starts(run_dir: Path) -> int:
    path = RunDir(run_dir).provenance
    return len(json.loads(path.read_text())["starts"]) if path.is_file() else 0


def wait_for_step(process: subprocess.Popen[str], run_dir: Path, step: int) -> None:
    deadline = time.monotonic() + 240
    while num_logged(run_dir) < step:
        assert process.poll() is None, f"it ended by itself before step {step} was seen"
        assert time.monotonic() < deadline, f"step {step} was not reached"
        time.sleep(0.02)


def check_it_is_called_killed(run_dir: RunDir) -> None:
    """Wait until the lock of the killed ranks is free, and check what the status says then."""
    deadline = time.monotonic() + 60
    while (status := status_of(run_dir, {})).state == "running":
        assert time.monotonic() < deadline, "the lock is still held"
        time.sleep(0.05)
    assert (status.state, status.step) == ("killed", len(run_dir.read_metrics()))
    step = run_dir.latest_step()
    going_on = "the start" if step is None else f"step {step}"
    assert status.reason.endswith(f"goes on from {going_on}")


def curve(run_dir: Path) -> list[tuple[int, int, float]]:
    return [(entry["step"], entry["epoch"], entry["train/loss"]) for entry in RunDir(run_dir).read_metrics()]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = write_tiny_pair(tmp_path_factory.mktemp("data"), num_train=83, num_test=20)
    write_tiny_dataset(root / "few", num_samples=45, seed=4)
    return root


def check_same_bits(whole: Path, killed: Path) -> None:
    for player in ("encoder", "viewmaker"):
        expected, found = (
            safetensors.torch.load_file(RunDir(path).checkpoint(NUM_STEPS) / f"{player}.safetensors")
            for path in (whole, killed)
        )
        assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert curve(whole) == curve(killed)
    assert [step for step, _, _ in curve(killed)] == list(range(1, NUM_STEPS + 1))


@pytest.mark.ranks
def test_a_killed_run_ends_in_the_same_bits(data: Path, tmp_path: Path) -> None:
    """It goes on in a new interpreter, in which sets have another order."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run_ranks(train_undisturbed, 1, data, whole)
    words = command(data, killed, num_ranks=1)
    step = random.Random(os.getpid()).randrange(3, NUM_STEPS - 3)
    process = start(PythonProcess, words)
    try:
        wait_for_step(process, killed, step)
    finally:
        kill_tree(process)
        process.communicate()
    check_it_is_called_killed(RunDir(killed))
    process = start(subprocess.Popen, words)
    _, said = process.communicate(timeout=240)
    assert process.returncode == 0, said
    assert "going on from step" in said, step
    assert num_starts(killed) == 2
    check_same_bits(whole, killed)


@pytest.mark.ranks
def test_torchrun_restarts_a_run_of_which_a_rank_was_killed(data: Path, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run_ranks(train_undisturbed, 2, data, whole)
    draw = random.Random(os.getpid())
    rank, step = draw.randrange(2), draw.randrange(3, NUM_STEPS - 3)
    process = start(PythonProcess, command(data, killed, num_ranks=2))
    try:
        wait_for_step(process, killed, step)
        os.kill(ranks_of(process.pid)[rank], signal.SIGKILL)
        _, said = process.communicate(timeout=240)
    finally:
        kill_tree(process)
    assert process.returncode == 0, said
    assert num_starts(killed) == 2, f"rank {rank} was killed after step {step}"
    check_same_bits(whole, killed)
