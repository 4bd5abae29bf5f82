"""The checks, the refusals and the log before step 0."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from configs import resolve_recipe
from data_pipeline.core.errors import UserError
from data_pipeline.core.schema import difference
from data_pipeline.storage.locations import MANIFEST_NAME
from tests.gloo import run_ranks
from tests.killed_runs import kill_after
from tests.small_encoder import CONVNET
from tests.tiny_data import write_tiny_dataset, write_tiny_pair
from trainer.claim import claim
from trainer.config import RunConfig, read_config
from trainer.config_changes import MAY_CHANGE
from trainer.data import read_manifests
from trainer.distributed.collectives import on_first_rank, rank
from trainer.modules import build_modules, memory_format
from trainer.preflight import check_data
from trainer.pretrained import load_encoder
from trainer.reports.config_identity import NOT_IDENTITY, config_identity
from trainer.run_dir import Hold, RunDir, hold, is_held, steps_in, write_json
from trainer.train import train

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("settings", "dtype", "device", "channels_last"),
    [
        ([], torch.float32, "cpu", False),
        ([], torch.float32, "meta", True),
        (["encoder.width=16"], torch.float32, "cpu", True),
        (["encoder.width=16"], torch.float64, "cpu", False),
        ([CONVNET], torch.float32, "cpu", True),
    ],
)
def test_maps_are_channels_last_unless_torch_would_crash(
    settings: list[str], dtype: torch.dtype, device: str, channels_last: bool
) -> None:
    modules = build_modules(resolve_recipe("debug:image", settings)).to(torch.device(device), dtype)
    form = torch.channels_last if channels_last else torch.contiguous_format
    assert memory_format(modules.encoder) is form
    assert all(each.is_contiguous(memory_format=form) for each in modules.encoder.parameters() if each.dim() == 4)


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    pair = write_tiny_pair(tmp_path / "data", num_train=64, num_test=16)
    return resolve_recipe("debug:image", [f"data.train_dir={pair / 'train'}", f"data.test_dir={pair / 'test'}"])


def take(run_dir: RunDir, config: RunConfig) -> Hold:
    return claim(run_dir, config, read_manifests(config.data))


def with_test_dir(config: RunConfig, test_dir: str, **probe: float) -> RunConfig:
    data = config.data.model_copy(update={"test_dir": test_dir})
    return config.model_copy(update={"data": data, "probe": config.probe.model_copy(update=probe)})


def test_training_with_the_train_set_as_test_set_is_refused_unless_it_is_allowed_by_name(
    tmp_path: Path, config: RunConfig, caplog: pytest.LogCaptureFixture
) -> None:
    same = with_test_dir(config, config.data.probed_dir)
    with pytest.raises(UserError, match=r"64 of the 64 test samples of .*data/train \(100 %\) have their picture"):
        take(RunDir(tmp_path / "run"), same)
    assert not (tmp_path / "run").exists()
    take(RunDir(tmp_path / "run"), with_test_dir(config, config.data.probed_dir, allow_shared=1.0)).close()
    assert "64 of the 64 test samples" in caplog.text


def test_training_on_pictures_that_the_test_set_holds_too_is_refused(tmp_path: Path, config: RunConfig) -> None:
    """The other dataset has its own manifest, and is made from the same pictures."""
    again = write_tiny_dataset(tmp_path / "again", num_samples=32, split="test")
    with pytest.raises(UserError, match=r"32 of the 32 test samples of .*again \(100 %\) have their picture"):
        take(RunDir(tmp_path / "run"), with_test_dir(config, str(again)))


def of_size(config: RunConfig, height: int, width: int) -> RunConfig:
    """Change the pictures' size in the manifests; before step 0 no other file of a dataset is read."""
    for directory in (config.data.probed_dir, config.data.test_dir):
        path = Path(directory, MANIFEST_NAME)
        manifest = json.loads(path.read_text()) | {"input_shape": [3, height, width]}
        path.write_text(json.dumps(manifest))
    return config


def refusal(config: RunConfig) -> str:
    with pytest.raises(UserError) as raised:
        check_data(config)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_a_train_set_that_was_built_as_the_test_split_is_warned_of_and_so_is_the_other_way_round(
    config: RunConfig, caplog: pytest.LogCaptureFixture
) -> None:
    check_data(config)
    assert "--split" not in caplog.text
    train_dir, test_dir = config.data.train_dir, config.data.test_dir
    data = config.data.model_copy(update={"train_dir": test_dir, "test_dir": train_dir})
    exchanged = config.model_copy(update={"data": data, "global_batch_size": 8})
    check_data(exchanged)
    assert f"{test_dir} was built with --split test" in caplog.text
    assert f"{train_dir} was built with --split train" in caplog.text


def test_train_and_test_sets_whose_overlays_have_other_layouts_are_refused(config: RunConfig) -> None:
    path = Path(config.data.test_dir, MANIFEST_NAME)
    manifest = json.loads(path.read_text())
    manifest["overlay"]["layout"] = "tiled"
    path.write_text(json.dumps(manifest))
    message = refusal(config)
    assert f"the overlay of {config.data.train_dir} is scaled, and that of {config.data.test_dir} tiled; " in message


@pytest.mark.parametrize(
    "overrides",
    [
        ["memory.micro_batches=32"],
        ["memory.micro_batches=32", "encoder.batch_norm=local"],
        ["encoder.batch_norm=split", "encoder.batch_norm_splits=32"],
    ],
)
def test_a_batch_norm_of_one_value_is_refused(overrides: list[str], config: RunConfig) -> None:
    single = config.override(overrides, where="x")
    check_data(single)  # the last map has four values a channel
    assert "batch norm needs at least two values of each channel" in refusal(of_size(single, 8, 8))


def fail_on_the_first() -> str:
    def fail() -> None:
        raise OSError("the disk is gone")

    try:
        on_first_rank(fail)
    except (OSError, SystemExit) as error:
        return f"rank {rank()}: {error!r}"
    return "went on"


@pytest.mark.ranks
def test_whatever_goes_wrong_on_the_first_rank_ends_all() -> None:
    assert run_ranks(fail_on_the_first, 2) == ["rank 0: OSError('the disk is gone')", "rank 1: SystemExit(2)"]


def test_of_two_starts_with_different_settings_only_one_gets_the_directory(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = RunDir(tmp_path / "run")

    def hold_after_another(held: RunDir) -> Hold:
        monkeypatch.setattr("trainer.claim.hold", hold)
        take(held, config.model_copy(update={"seed": 5})).close()
        return hold(held)

    monkeypatch.setattr("trainer.claim.hold", hold_after_another)
    with pytest.raises(UserError, match=r"differs in seed\)"):
        take(run_dir, config)
    assert read_config(run_dir.config).seed == 5
    assert not is_held(run_dir)


HARMLESS = [
    "data.num_workers=0",
    "data.placement=stream",
    "data.resident_gigabytes=1",
    "data.remote.cache_gigabytes=9",
    "data.remote.file_seconds=900",
    "checkpoint_every_steps=3",
    "keep_checkpoints=1",
    "log_every_steps=2",
    "engine.kind=fsdp",
    "alarms.after_steps=9",
    "watchdog.enabled=false",
    "tracking.wandb=offline",
    "tracking.pictures_every_steps=null",
    "compile=step",
]


def test_a_run_goes_on_with_other_settings_that_change_no_result(config: RunConfig, tmp_path: Path) -> None:
    """docs/troubleshooting.md asks for such changes. Reports still count the run as a repetition of the others."""
    run_dir = RunDir(tmp_path / "run")
    take(run_dir, config).close()
    changed = config.override(HARMLESS, where="x")
    assert {setting.partition("=")[0] for setting in HARMLESS} == set(difference(config, changed))
    take(run_dir, changed).close()
    assert read_config(run_dir.config) == changed
    assert config_identity(config) == config_identity(changed)


def test_the_settings_that_may_change_change_no_bit(config: RunConfig, tmp_path: Path) -> None:
    steady = ["global_batch_size=16", "checkpoint_every_steps=2", "keep_checkpoints=9", "log_every_steps=1"]
    steady += ["num_epochs=1", "watchdog.enabled=false", "tracking.wandb=disabled"]
    config = config.override(steady, where="x")
    whole, parts = RunDir(tmp_path / "whole"), RunDir(tmp_path / "parts")
    train(config, whole, device=CPU, command="train")
    shutil.copytree(whole.path, parts.path)
    kill_after(parts, 2)
    changed = ["data.num_workers=2", "data.placement=stream", "checkpoint_every_steps=3"]
    changed += ["engine.kind=fsdp"]  # which is DDP on a single rank
    train(config.override(changed, where="x"), parts, device=CPU, command="train")
    assert steps_in(parts.checkpoints)[:2] == [2, 3], "the run did not go on from its first checkpoint"
    first, second = ([line["train/loss"] for line in run_dir.read_metrics()] for run_dir in (whole, parts))
    assert first == second
    first_state, second_state = (load_encoder(run_dir.path).state_dict() for run_dir in (whole, parts))
    assert all(torch.equal(value, second_state[name]) for name, value in first_state.items())


@pytest.mark.parametrize(
    "setting",
    [
        "memory.micro_batches=2",
        "data.shuffle_shards=1",
        "compile=both",
    ],
)
def test_a_setting_that_changes_a_result_is_refused_beside_others(
    setting: str, config: RunConfig, tmp_path: Path
) -> None:
    run_dir = RunDir(tmp_path / "run")
    take(run_dir, config).close()
    with pytest.raises(UserError, match=rf"\(it differs in {setting.partition('=')[0]}\)"):
        take(run_dir, config.override([*(one for one in HARMLESS if "engine" not in one), setting], where="x"))
    assert read_config(run_dir.config) == config


def test_a_begun_run_whose_config_was_edited_by_hand_is_refused(config: RunConfig, tmp_path: Path) -> None:
    """A requeue by Slurm reads only this file."""
    run_dir = RunDir(tmp_path / "run")
    train(config.override(["num_epochs=1", "watchdog.enabled=false"], where="x"), run_dir, device=CPU, command="train")
    before, provenance = read_config(run_dir.config), run_dir.read_provenance()

    def edit(*settings: str) -> RunConfig:
        edited = before.override(settings, where="x")
        write_json(run_dir.config, edited.model_dump(mode="json"))
        return edited

    moved = shutil.copytree(Path(config.data.test_dir), tmp_path / "moved")
    take(run_dir, before.override([f"data.test_dir={moved}"], where="x")).close()
    take(run_dir, edit("log_every_steps=3", f"data.test_dir={moved}")).close()
    edited = edit("optimizer.learning_rate=0.5", "log_every_steps=3")
    with pytest.raises(
        UserError, match=r"edited .* \(it differs in optimizer\.learning_rate\); put .* back"
    ) as refused:
        take(run_dir, edited)
    assert "\n" not in str(refused.value)
    assert not is_held(run_dir)
    unreadable = {"config": provenance["config"] | {"of_another_version": 1}}
    for of_before in (provenance | unreadable, {name: provenance[name] for name in provenance if name != "config"}):
        write_json(run_dir.provenance, of_before)
        take(run_dir, edited).close()


@pytest.mark.parametrize("name", MAY_CHANGE)
def test_reports_ignore_every_setting_that_may_change(name: str) -> None:
    assert name.removesuffix(".") in NOT_IDENTITY
