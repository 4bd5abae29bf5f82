"""kill -9 at a random step, start again: the same remaining batches and the same bits as an undisturbed run."""

from __future__ import annotations

import functools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
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


def command(data: Path, run_dir: Path, *, num_ranks: int, max_restarts: int = 0) -> list[str]:
    """Return the command of a run: of one process on one dataset, or of ranks under torchrun on a mixture."""
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
    launcher = [sys.executable]
    if num_ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
        launcher += ["--max-restarts", str(max_restarts)]
        settings["encoder"] = CONVNET.removeprefix("encoder=")
        settings |= {"data.train_dir": "null", "data.mixture": MIXTURE.format(data), "data.mixture_epoch": 83}
    sets = [argument for key, value in settings.items() for argument in ("--set", f"{key}={value}")]
    return [*launcher, "launch/train.py", "--config", "debug:viewmaker", "--run-dir", str(run_dir), *sets]


def start(words: list[str], *, is_new: bool = False) -> subprocess.Popen[str]:
    """Start a command; in a new interpreter, in which sets have another order, if `is_new`."""
    return (subprocess.Popen if is_new else PythonProcess)(
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


@pytest.fixture(scope="module")
def undisturbed(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Return the run of a number of ranks, which nothing disturbs."""

    @functools.cache
    def run(num_ranks: int) -> Path:
        run_dir = tmp_path_factory.mktemp("runs") / "whole"
        process = start(command(data, run_dir, num_ranks=num_ranks))
        _, said = process.communicate(timeout=240)
        assert (process.returncode, num_starts(run_dir)) == (0, 1), said
        return run_dir

    return run


def check_same_bits(whole: Path, killed: Path) -> None:
    for player in ("encoder", "viewmaker"):
        expected, found = (
            safetensors.torch.load_file(RunDir(path).checkpoint(NUM_STEPS) / f"{player}.safetensors")
            for path in (whole, killed)
        )
        assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert curve(whole) == curve(killed)
    assert [step for step, _, _ in curve(killed)] == list(range(1, NUM_STEPS + 1))


def test_a_killed_run_ends_in_the_same_bits(undisturbed: Callable[[int], Path], data: Path, tmp_path: Path) -> None:
    """It is killed twice, and started in a new interpreter in between."""
    whole, killed = undisturbed(1), tmp_path / "killed"
    words = command(data, killed, num_ranks=1)
    kill_at = random.Random(os.getpid()).sample(range(5, NUM_STEPS - 5), 2)
    for number, step in enumerate(sorted(kill_at), start=1):
        process = start(words, is_new=number > 1)
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
    process = start(words)
    _, said = process.communicate(timeout=240)
    assert process.returncode == 0, said
    assert "going on from step" in said, kill_at
    assert num_starts(killed) == 3
    check_same_bits(whole, killed)


def test_torchrun_restarts_a_run_of_which_a_rank_was_killed(
    undisturbed: Callable[[int], Path], data: Path, tmp_path: Path
) -> None:
    killed = tmp_path / "killed"
    process = start(command(data, killed, num_ranks=2, max_restarts=2))
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
    check_same_bits(undisturbed(2), killed)
