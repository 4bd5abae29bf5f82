"""Probes of several runs side by side, against probes of each and against features that are joined by hand."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import trainer.probe
from data_pipeline.core.errors import UserError
from data_pipeline.storage.manifest import load_manifest
from tests.commands import Done, call
from tests.tiny_data import write_tiny_dataset, write_tiny_pair
from tests.trainer.probed_runs.test_probe_command import make_run
from trainer.pretrained import load_encoder
from trainer.probed_runs.side_by_side import TOGETHER, SideBySide, probe_side_by_side
from trainer.probes.any_encoder import probe
from trainer.probes.linear import ProbeConfig
from trainer.run_dir import RunDir, write_json

CPU = torch.device("cpu")
PROBE = {"num_epochs": 3, "views": "none"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_pair(tmp_path_factory.mktemp("data"), num_train=103, num_test=41)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, data: Path) -> list[RunDir]:
    home = tmp_path_factory.mktemp("runs")
    return [make_run(home / f"run{seed}", data, name=f"run{seed}", seed=seed, probe=PROBE) for seed in (0, 1)]


def command(*words: str | Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Done:
    return call(trainer.probe.main, *words, "--side-by-side", monkeypatch=monkeypatch, capsys=capsys)


def test_both_probes_read_the_features_of_all_runs(data: Path, runs: list[RunDir]) -> None:
    found = probe_side_by_side(runs, device=CPU)
    encoders = [load_encoder(run.path) for run in runs]
    config = ProbeConfig.model_validate(PROBE)

    def joined(pictures: Tensor) -> Tensor:
        return torch.cat([encoder.features(pictures).flatten(1) for encoder in encoders], dim=1)

    def pooled(pictures: Tensor) -> Tensor:
        return torch.cat([nn.functional.normalize(encoder.pooled(pictures)) for encoder in encoders], dim=1)

    with torch.no_grad():
        linear = probe(joined, str(data / "train"), str(data / "test"), config=config)
        knn = probe(pooled, str(data / "train"), str(data / "test"), config=config)
    assert list(found[TOGETHER]) == list(linear)
    for label, together in found[TOGETHER].items():
        assert (together.linear, together.knn) == (linear[label].linear, knn[label].knn)
    for run, encoder in zip(runs, encoders, strict=True):
        assert found[str(run.path)] == probe(encoder, str(data / "train"), str(data / "test"), config=config)


def test_the_features_of_a_copy_add_no_neighbour(runs: list[RunDir]) -> None:
    encoder = load_encoder(runs[0].path)
    pictures = torch.rand(6, 3, 32, 32)
    with torch.no_grad():
        one, two = (SideBySide([encoder] * number).pooled(pictures) for number in (1, 2))
    torch.testing.assert_close(two @ two.T / 2, one @ one.T)


def test_the_command_prints_each_run_and_all_together(
    runs: list[RunDir], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done = command(*(run.path for run in runs), "--label", "overlay", monkeypatch=monkeypatch, capsys=capsys)
    assert (done.status, done.stderr) == (0, "")
    found = probe_side_by_side(runs, labels=["overlay"], device=CPU)
    lines = done.stdout.splitlines()
    assert lines[:2] == [f"run {number}: {run.path}" for number, run in enumerate(runs, 1)]
    assert lines[2].split() == ["linear", "probe,", "%", "run", "1", "run", "2", "side", "by", "side", "chance"]
    accuracies = [found[name]["overlay"].linear for name in (*(str(run.path) for run in runs), TOGETHER)]
    chance = found[TOGETHER]["overlay"].chance
    assert lines[3].split() == ["label_overlay", *(f"{100 * value:.1f}" for value in (*accuracies, chance))]
    assert not any(run.all_probes.exists() for run in runs)


def test_data_that_are_fetched_give_the_accuracies_of_the_files(
    tmp_path: Path, data: Path, runs: list[RunDir], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    copies = []
    for run in runs:
        copies.append(RunDir(tmp_path / run.path.name))
        shutil.copytree(run.path, copies[-1].path)
        config = json.loads(run.config.read_text())
        for name in ("train", "test"):
            config["data"][f"{name}_dir"] = f"file://{data / name}"
        config["data"]["remote"]["cache_dir"] = str(tmp_path / "cache")
        write_json(copies[-1].config, config)
    done = command(*(copy.path for copy in copies), monkeypatch=monkeypatch, capsys=capsys)
    plain = command(*(run.path for run in runs), monkeypatch=monkeypatch, capsys=capsys)
    assert (done.status, done.stdout.splitlines()[2:]) == (0, plain.stdout.splitlines()[2:])


def test_a_run_that_was_trained_on_other_data_is_named(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = [make_run(tmp_path / f"run{seed}", data, name=f"run{seed}", seed=seed, probe=PROBE) for seed in (0, 1)]
    hashes = {f"{name}_manifest_sha256": load_manifest(data / name).sha256 for name in ("train", "test")}
    for run, provenance in zip(made, (hashes, hashes | {"train_manifest_sha256": "0" * 64}), strict=True):
        write_json(run.provenance, provenance)
    done = command(*(run.path for run in made), monkeypatch=monkeypatch, capsys=capsys)
    assert done.status == 0
    (warning,) = (line for line in done.stderr.splitlines() if line.startswith("warning: "))
    assert str(data / "train") in warning
    assert "0" * 12 in warning


def test_a_test_set_that_shares_samples_with_the_train_set_is_refused(tmp_path: Path) -> None:
    train = write_tiny_dataset(tmp_path / "data" / "train", num_samples=40)
    (tmp_path / "data" / "test").symlink_to(train)
    both = [make_run(tmp_path / name, tmp_path / "data") for name in ("a", "b")]
    with pytest.raises(UserError, match="of the test samples"):
        probe_side_by_side(both, device=CPU)
    probe_side_by_side(both, num_epochs=1, allow_shared=1.0, device=CPU)


def test_what_cannot_be_joined_is_one_sentence(
    tmp_path: Path, runs: list[RunDir], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = make_run(tmp_path / "other", write_tiny_pair(tmp_path / "data", num_train=40, num_test=20))
    with pytest.raises(UserError, match="do not have the same train and test sets"):
        probe_side_by_side([runs[0], other], device=CPU)
    (tmp_path / "link").symlink_to(runs[0].path)
    for twice in (RunDir(tmp_path / "link"), runs[0]):
        with pytest.raises(UserError, match=r"is the same run as .*run0; name each run once"):
            probe_side_by_side([*runs, twice], device=CPU)
    with pytest.raises(UserError, match="two runs or more, and 1 is given"):
        probe_side_by_side(runs[:1], device=CPU)
    for words in (
        ("--step", "0"),
        ("--missing",),
        ("--overlay-draws", "2"),
        ("--reads", "embedding"),
        ("--scratch", "x"),
    ):
        done = command(*(run.path for run in runs), *words, monkeypatch=monkeypatch, capsys=capsys)
        assert done.status == 2
        assert f"--side-by-side cannot be used with {words[0]};" in done.stderr
