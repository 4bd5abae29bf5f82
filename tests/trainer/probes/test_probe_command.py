from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from configs import debug
from data_pipeline.errors import UserError
from tests.tiny_data import write_tiny_pair
from tests.trainer.probes.toy import toy_pictures
from trainer.config import RunConfig
from trainer.players import build_players
from trainer.probe import main, majority_share, probe
from trainer.probes.features import Pictures, read_pictures
from trainer.probes.linear import Target
from trainer.probes.result import read_result
from trainer.probes.targets import label_targets
from trainer.rundir import RunDir


def make_run(directory: Path, data: Path, **settings: Any) -> RunDir:
    """A run directory with a config and one checkpoint, at step 10: the untrained encoder with all weights doubled."""
    config = debug.image().model_dump() | settings
    config["data"] |= {"train_dir": str(data / "train"), "test_dir": str(data / "test")}
    run_dir = RunDir(directory)
    run_dir.checkpoint(10).mkdir(parents=True)
    run_dir.config.write_text(json.dumps(config))
    state = build_players(RunConfig.model_validate(config)).encoder.state_dict()
    doubled = {name: 2 * tensor for name, tensor in state.items()}
    safetensors.torch.save_file(doubled, run_dir.checkpoint(10) / "encoder.safetensors")
    run_dir.latest.write_text("step_00000010\n")
    return run_dir


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_pair(tmp_path_factory.mktemp("data"), num_train=103, num_test=41)


def call(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["probe", *map(str, arguments)])
    main()


def test_every_sample_is_read_once(data: Path) -> None:
    pictures = read_pictures(data / "train")
    assert pictures.index_N.tolist() == list(range(103))
    assert pictures.images_NCHW.shape == (103, 3, 16, 16)
    assert pictures.masks_NHW is not None
    assert pictures.masks_NHW.shape == (103, 16, 16)
    assert torch.bincount(pictures.labels("overlay")).tolist() == list(pictures.manifest.counts_overlay)


def test_writes_both_labels_of_the_newest_checkpoint_and_of_the_untrained_encoder(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = make_run(tmp_path / "run", data)
    checkpoint = (run_dir.checkpoint(10) / "encoder.safetensors").read_bytes()
    call(monkeypatch, run_dir.path)
    call(monkeypatch, run_dir.path, "--step", 0)
    assert run_dir.probe_steps() == [0, 10]
    for step in (0, 10):
        base, overlay = (read_result(run_dir.probes(step) / f"{name}.json") for name in ("base", "overlay"))
        assert (base.label, overlay.label) == ("base", "overlay")
        assert (base.class_names, overlay.class_names) == (("dark", "bright"), ("low", "middle", "high"))
        assert (base.chance, overlay.chance) == (1 / 2, 1 / 3)
        for result in (base, overlay):
            assert (result.num_train, result.num_test, result.checkpoint_step) == (103, 41, step)
            assert result.probe_config == debug.image().probe
            assert result.test_manifest_sha256 == read_pictures(data / "test").manifest.sha256
            assert (result.linear.accuracy * 41) == pytest.approx(round(result.linear.accuracy * 41))
    assert (run_dir.checkpoint(10) / "encoder.safetensors").read_bytes() == checkpoint
    last = capsys.readouterr().out.strip().splitlines()
    assert last[-1] == str(run_dir.probes(0))
    shown = read_result(run_dir.probes(0) / "overlay.json")
    assert f"{100 * shown.linear.accuracy:.1f}" in last[-2]
    assert f"{100 * shown.knn.accuracy:.1f}" in last[-2]


def test_doing_it_again_changes_nothing_but_the_seconds(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = make_run(tmp_path / "run", data)
    results = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        call(monkeypatch, run_dir.path)
        results.append(read_result(run_dir.probes(10) / "base.json").model_dump(exclude={"seconds"}))
    assert results[0] == results[1]


@pytest.mark.parametrize("recipe", [debug.image, debug.viewmaker])
def test_real_players_come_out_as_they_went_in(recipe: Any, data: Path) -> None:
    players = build_players(recipe())
    for module in players.trained_modules.values():
        module.train()
    before = {name: copy.deepcopy(module.state_dict()) for name, module in players.trained_modules.items()}
    train, test = read_pictures(data / "train"), read_pictures(data / "test")
    probe(players, train=train, test=test, device=torch.device("cpu"))
    for name, module in players.trained_modules.items():
        assert all(part.training for part in module.modules())
        assert all(parameter.requires_grad and parameter.grad is None for parameter in module.parameters())
        for key, tensor in module.state_dict().items():
            assert torch.equal(tensor, before[name][key]), f"{name}.{key}"


def test_no_overlay_no_overlay_probe() -> None:
    def plain(seed: int) -> Pictures:
        pictures = toy_pictures(20, seed=seed)
        names = pictures.manifest.label_names.model_copy(update={"overlay": ()})
        return Pictures(
            manifest=pictures.manifest.model_copy(update={"label_names": names}),
            images_NCHW=pictures.images_NCHW,
            masks_NHW=pictures.masks_NHW,
            index_N=pictures.index_N,
            label_base_N=pictures.label_base_N,
            label_overlay_N=torch.full_like(pictures.label_overlay_N, -1),
        )

    assert list(label_targets(plain(0), plain(1))) == ["base"]
    with pytest.raises(UserError, match="label_overlay has classes none in the train set but low, middle, high"):
        label_targets(plain(0), toy_pictures(20, seed=1))


def test_majority_share_is_that_of_the_train_sets_commonest_class() -> None:
    target = Target(torch.tensor([0, 1, 1]), torch.tensor([0, 0, 0, 1, 2]), num_classes=3)
    assert majority_share(target) == pytest.approx(1 / 5)


def test_wrong_input_is_said_in_one_sentence(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="is not a run directory"):
        call(monkeypatch, tmp_path / "nothing")
    run_dir = make_run(tmp_path / "run", data)
    with pytest.raises(UserError, match=r"no checkpoint of step 99; it has those of steps 0, 10"):
        call(monkeypatch, run_dir.path, "--step", 99)
    gone = make_run(tmp_path / "gone", tmp_path / "no_data")
    with pytest.raises(UserError, match=r"no_data/train does not exist; build it with"):
        call(monkeypatch, gone.path)
    assert not (gone.path / "probes").exists()
    damaged = run_dir.probes(10) / "base.json"
    damaged.parent.mkdir(parents=True)
    damaged.write_text('{"label": "base"')
    with pytest.raises(
        UserError, match=r"base\.json is not a probe result; run `python -m trainer\.probe .*run` again"
    ):
        read_result(damaged)
