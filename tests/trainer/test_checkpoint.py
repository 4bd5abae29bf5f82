"""Checkpoints: complete or absent, whole state, pruned, and kind when something is wrong."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from configs import resolve_recipe
from data_pipeline.errors import UserError
from trainer.checkpoint import load_players, restore, save_checkpoint
from trainer.config import RunConfig
from trainer.distributed.ddp_engine import DDPEngine
from trainer.models import load_encoder
from trainer.objectives import NTXent, NTXentConfig
from trainer.players import build_players
from trainer.rundir import RunDir, write_json


@pytest.fixture
def config() -> RunConfig:
    return resolve_recipe("debug:viewmaker")


def start(run_dir: RunDir, config: RunConfig) -> dict[str, DDPEngine]:
    if not run_dir.config.is_file():
        write_json(run_dir.config, config.model_dump(mode="json"))
    return {
        name: DDPEngine(module, optimizer=config.player_optimizers[name])
        for name, module in build_players(config).trained_modules.items()
    }


def fake_step(engines: dict[str, DDPEngine], seed: int) -> None:
    """A step with random gradients, so that weights and optimizer state both move."""
    draw = torch.Generator().manual_seed(seed)
    for engine in engines.values():
        for parameter in engine.module.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=draw)
        engine.step(learning_rate=0.01)


def weights(engines: dict[str, DDPEngine]) -> list[torch.Tensor]:
    return [tensor.clone() for engine in engines.values() for tensor in engine.module.state_dict().values()]


def test_a_restored_run_goes_on_bit_for_bit(config: RunConfig, tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    engines = start(run_dir, config)
    fake_step(engines, 0)
    save_checkpoint(run_dir, step=1, engines=engines, objective_state={}, keep=2)
    again = start(run_dir, config)
    assert restore(run_dir, again, NTXent(NTXentConfig())) == 1
    for each in (engines, again):
        fake_step(each, 1)  # momentum and Adam's moments matter here
    assert all(map(torch.equal, weights(engines), weights(again)))


def test_only_the_newest_are_kept_and_latest_names_the_last(config: RunConfig, tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    engines = start(run_dir, config)
    for step in (5, 10, 15):
        save_checkpoint(run_dir, step=step, engines=engines, objective_state={}, keep=2)
    assert sorted(path.name for path in run_dir.checkpoints.iterdir()) == ["step_00000010", "step_00000015"]
    assert run_dir.latest_step() == 15


def test_a_kill_between_rename_and_latest_leaves_the_earlier_one_valid(config: RunConfig, tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    engines = start(run_dir, config)
    save_checkpoint(run_dir, step=5, engines=engines, objective_state={}, keep=2)
    run_dir.checkpoint(10).mkdir()  # what such a kill leaves, and worse: empty
    (run_dir.checkpoints / ".step_00000015.partial").mkdir()
    assert restore(run_dir, start(run_dir, config), NTXent(NTXentConfig())) == 5
    save_checkpoint(run_dir, step=10, engines=engines, objective_state={}, keep=2)
    assert restore(run_dir, start(run_dir, config), NTXent(NTXentConfig())) == 10


def test_step_0_is_the_untrained_encoder_whatever_the_ambient_random_state(config: RunConfig, tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    start(run_dir, config)
    states = []
    for ambient in (1, 2):
        torch.manual_seed(ambient)
        states.append(load_players(run_dir, step=0).encoder.state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_load_encoder_gives_the_trained_encoder_in_eval_mode(config: RunConfig, tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    engines = start(run_dir, config)
    fake_step(engines, 0)
    save_checkpoint(run_dir, step=1, engines=engines, objective_state={}, keep=1)
    encoder = load_encoder(run_dir.path)
    assert not encoder.training
    pictures = torch.rand(2, 3, 32, 32)
    engines["encoder"].module.eval()
    torch.testing.assert_close(encoder(pictures), engines["encoder"].module(pictures), rtol=0, atol=0)


@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_damaged_checkpoint_is_named(damage: str, config: RunConfig, tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    save_checkpoint(run_dir, step=1, engines=start(run_dir, config), objective_state={}, keep=1)
    path = run_dir.checkpoint(1) / "encoder.safetensors"
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-100])
    else:
        path.unlink()
    with pytest.raises(UserError, match=r"encoder\.safetensors"):
        load_players(run_dir)


def test_a_step_that_is_not_there_names_those_that_are(config: RunConfig, tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    save_checkpoint(run_dir, step=7, engines=start(run_dir, config), objective_state={}, keep=1)
    with pytest.raises(UserError, match="steps 0, 7"):
        load_players(run_dir, step=3)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    mount = tmp_path / "small"
    mount.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(mount)], capture_output=True)
    if done.returncode:
        pytest.skip("needs the right to mount a small tmpfs, to have a disk without room")
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


def test_a_full_disk_is_one_sentence_and_leaves_nothing_half_written(config: RunConfig, small_disk: Path) -> None:
    run_dir = RunDir(small_disk / "run")
    engines = start(run_dir, config)
    (small_disk / "ballast").write_bytes(b"0" * 150_000)
    with pytest.raises(UserError, match="no room on the disk for the checkpoint of step 4"):
        save_checkpoint(run_dir, step=4, engines=engines, objective_state={}, keep=2)
    assert list(run_dir.checkpoints.iterdir()) == []
    assert run_dir.latest_step() is None
