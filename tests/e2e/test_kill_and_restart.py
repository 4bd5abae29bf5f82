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

from launch.states import run_status
from tests.nursery import PythonProcess
from tests.processes import kill_tree, ranks_of
from tests.real_data import REPOSITORY
from tests.small_encoder import CONVNET
from tests.tiny_data import write_tiny_dataset, write_tiny_pair
from trainer.run_dir import RunDir

NUM_STEPS = 25


MIXTURE = "{{few: {{train_dir: {0}/few, weight: 1}}, train: {{train_dir: {0}/train, weight: 2}}}}"


def command(data: Path, run_dir: Path, *, num_ranks: int, is_mixture: bool = False, max_restarts: int = 0) -> list[str]:
    launcher = (
        [sys.executable]
        if num_ranks == 1
        else [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(num_ranks),
            "--max-restarts",
            str(max_restarts),
        ]
    )
    settings = {
        "data.train_dir": data / "train",
        "data.test_dir": data / "test",
        "data.num_workers": 1,
        "global_batch_size": 16,
        "num_epochs": NUM_STEPS // 5,
        "checkpoint_every_steps": 3,
        "watchdog.enabled": "false",  # it would report the killed ranks, if it came to look before it is gone itself
        "tracking.wandb": "disabled",
    }
    if num_ranks > 1:
        settings["encoder"] = CONVNET.removeprefix("encoder=")
    if is_mixture:
        settings |= {"data.train_dir": "null", "data.mixture": MIXTURE.format(data)}
        settings["data.mixture_epoch"] = 83
    sets = [argument for key, value in settings.items() for argument in ("--set", f"{key}={value}")]
    return [*launcher, "launch/train.py", "--config", "debug:viewmaker", "--run-dir", str(run_dir), *sets]


def num_logged(run_dir: Path) -> int:
    path = RunDir(run_dir).metrics
    return len(path.read_text().splitlines()) if path.is_file() else 0


def num_starts(run_dir: Path) -> int:
    path = RunDir(run_dir).provenance
    return len(json.loads(path.read_text())["starts"]) if path.is_file() else 0


def check_it_is_called_killed(run_dir: RunDir) -> None:
    """Wait until the lock of the killed ranks is free, and check what the status says then."""
    deadline = time.monotonic() + 60
    while (status := run_status(run_dir, {})).state == "running":
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


@pytest.mark.parametrize(("num_ranks", "num_kills", "is_mixture"), [(1, 2, False), (2, 2, True), (4, 1, False)])
def test_a_killed_run_ends_in_the_same_bits(
    num_ranks: int, num_kills: int, is_mixture: bool, data: Path, tmp_path: Path
) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    whole, killed = tmp_path / "whole", tmp_path / "killed"

    def start(run_dir: Path) -> subprocess.Popen[str]:
        # One of the cases goes on in new interpreters, in each of which sets have another order.
        is_new = num_ranks == 1 and num_starts(run_dir) > 0
        return (subprocess.Popen if is_new else PythonProcess)(
            command(data, run_dir, num_ranks=num_ranks, is_mixture=is_mixture),
            cwd=REPOSITORY,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(run_dir: Path) -> str:
        process = start(run_dir)
        _, said = process.communicate()
        assert process.returncode == 0, said
        return said

    run(whole)
    kill_at = random.Random(os.getpid()).sample(range(5, NUM_STEPS - 5), num_kills)
    for number, step in enumerate(sorted(kill_at), start=1):
        process = start(killed)
        deadline = time.monotonic() + 120
        try:
            # The lines of the start before are there until this one has noted itself, and then cuts them off.
            while num_starts(killed) < number or num_logged(killed) < step:
                assert process.poll() is None, f"it ended by itself before step {step} was seen"
                assert time.monotonic() < deadline, f"step {step} was not reached"
                time.sleep(0.005)
        finally:
            kill_tree(process)
            process.communicate()
        check_it_is_called_killed(RunDir(killed))
    assert "going on from step" in run(killed), kill_at

    for player in ("encoder", "viewmaker"):
        expected, found = (
            safetensors.torch.load_file(RunDir(path).checkpoint(NUM_STEPS) / f"{player}.safetensors")
            for path in (whole, killed)
        )
        assert all(torch.equal(expected[name], found[name]) for name in expected), kill_at
    assert curve(whole) == curve(killed)
    lines = [json.loads(line)["step"] for line in RunDir(killed).metrics.read_text().splitlines()]
    assert lines == list(range(1, NUM_STEPS + 1))
    assert len(json.loads(RunDir(killed).provenance.read_text())["starts"]) == num_kills + 1


def test_torchrun_restarts_a_run_of_which_a_rank_was_killed(data: Path, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"

    def start(run_dir: Path) -> subprocess.Popen[str]:
        return PythonProcess(
            command(data, run_dir, num_ranks=2, max_restarts=2),
            cwd=REPOSITORY,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    _, said = start(whole).communicate(timeout=240)
    assert num_starts(whole) == 1, said
    process = start(killed)
    try:
        for rank, step in ((1, 8), (0, 16)):
            deadline = time.monotonic() + 240
            while num_starts(killed) < 2 - rank or num_logged(killed) < step:
                assert process.poll() is None
                assert time.monotonic() < deadline, f"step {step} was not reached"
                time.sleep(0.02)
            os.kill(ranks_of(process.pid)[rank], signal.SIGKILL)
        _, said = process.communicate(timeout=240)
    finally:
        kill_tree(process)
    assert process.returncode == 0, said
    assert num_starts(killed) == 3
    assert curve(killed) == curve(whole)
