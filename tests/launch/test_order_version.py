"""A run goes on with the order of samples with which it began, whatever the order of new runs is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from configs import resolve_recipe
from launch import slurm
from launch import train as train_command
from launch.slurm_command import plan_from, request_from
from tests.commands import call
from tests.tiny_data import write_tiny_pair
from trainer.config import RunConfig, keep_order_version, read_run_config
from trainer.run_dir import RunDir
from trainer.train import train


def overrides(data: Path) -> list[str]:
    where = [f"data.train_dir={data / 'train'}", f"data.test_dir={data / 'test'}", "data.num_workers=0"]
    small = ["global_batch_size=16", "num_epochs=2", "checkpoint_every_steps=2", "log_every_steps=1"]
    quiet = ["tracking.wandb=disabled", "watchdog.enabled=false", "precision=float64"]
    return [*where, *small, *quiet]


def configure(data: Path, *settings: str) -> RunConfig:
    return resolve_recipe("debug:image", [*overrides(data), *settings])


def as_before_there_were_versions(run_dir: RunDir) -> None:
    settings = json.loads(run_dir.config.read_text())
    del settings["data"]["order_version"]
    run_dir.config.write_text(json.dumps(settings))


def losses(run_dir: RunDir) -> list[float]:
    return [line["train/loss"] for line in run_dir.read_metrics() if "train/loss" in line]


@pytest.mark.slow
def test_a_run_from_before_there_were_versions_goes_on_with_the_first(tmp_path: Path) -> None:
    data = write_tiny_pair(tmp_path / "data", num_train=48, num_test=16)
    cpu = torch.device("cpu")
    whole = RunDir(tmp_path / "whole")
    train(configure(data, "data.order_version=1"), whole, device=cpu, command="train")
    new = RunDir(tmp_path / "new")
    train(configure(data), new, device=cpu, command="train")
    assert losses(new) != losses(whole)
    resumed = RunDir(shutil.copytree(whole.path, tmp_path / "resumed"))
    as_before_there_were_versions(resumed)
    shutil.rmtree(resumed.checkpoint(6))
    resumed.latest.unlink()
    config = keep_order_version(configure(data), resumed)
    assert config.data.order_version == 1
    train(config, resumed, device=cpu, command="train")
    assert losses(resumed) == pytest.approx(losses(whole), rel=1e-12)
    assert read_run_config(resumed).data.order_version == 1


def test_a_new_run_begins_with_the_newest_version(tmp_path: Path) -> None:
    config = resolve_recipe("debug:image")
    assert config.data.order_version == 2
    assert keep_order_version(config, RunDir(tmp_path)) == config


def test_a_run_is_read_with_the_version_that_it_names(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    for version in (1, 2):
        named = resolve_recipe("debug:image", [f"data.order_version={version}"])
        run_dir.config.write_text(named.model_dump_json())
        assert read_run_config(run_dir) == named
    as_before_there_were_versions(run_dir)
    assert read_run_config(run_dir).data.order_version == 1


@pytest.mark.slow
def test_the_commands_that_train_take_up_a_run_with_its_own_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_tiny_pair(tmp_path / "data", num_train=48, num_test=16)
    run_dir = RunDir(tmp_path / "run")
    train(configure(data, "data.order_version=1"), run_dir, device=torch.device("cpu"), command="train")
    shutil.rmtree(run_dir.checkpoint(6))
    run_dir.latest.unlink()
    as_before_there_were_versions(run_dir)
    arguments = ["--config", "debug:image", *(word for each in overrides(data) for word in ("--set", each))]
    parsed = slurm._parser().parse_args([*arguments, "--run-dir", str(run_dir.path), "--executor", "local"])
    (planned,) = plan_from(parsed, request_from(parsed)).runs
    assert planned.config.data.order_version == 1
    again = call(train_command.main, *arguments, "--run-dir", run_dir.path, monkeypatch=monkeypatch, capsys=capsys)
    assert again.status == 0, again.stderr
