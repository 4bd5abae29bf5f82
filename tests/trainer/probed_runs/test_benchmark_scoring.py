"""Encoders of others on every setting of the suppression benchmark: `python -m trainer.probe --encoder --data`."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from configs.suppression import benchmark
from data_pipeline.building.suppression_settings import SETTINGS
from data_pipeline.core.errors import UserError
from tests.tiny_data import write_tiny_dataset
from tests.trainer.probed_runs.test_probe_command import call
from tests.trainer.reports.made_runs import report
from trainer.probes import probe
from trainer.probes.benchmark import benchmark_probe
from trainer.probes.result import read_result

QUICK = ["--set", "num_epochs=2"]
PLACES = {"digits": "all", "colours": "0.75", "randbit": "5"}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with three settings of the benchmark, of which RandBit has one channel, and encoders."""
    home = tmp_path_factory.mktemp("benchmark")
    for name, difficulty in PLACES.items():
        num_channels = 1 if name == "randbit" else 3
        directory, seed = home / "data" / name / difficulty, 2 * list(PLACES).index(name)
        write = partial(write_tiny_dataset, num_channels=num_channels)
        write(directory / "train", num_samples=32, seed=seed)
        write(directory / "test", num_samples=20, seed=seed + 1, split="test")
    (home / "my.py").write_text(
        "from pathlib import Path\n"
        "import torch\n"
        "def mean(x):\n    return x.mean((2, 3)) * float(Path('scale.txt').read_text())\n"
        "def colours(x):\n    return x.mean((2, 3)) @ torch.ones(3, 4)\n"
        "def maps(x):\n    return x\n"
    )
    return home


def mean(x_BCHW: torch.Tensor) -> torch.Tensor:
    return x_BCHW.mean((2, 3)) * 10


def results_in(directory: Path) -> dict[str, float]:
    paths = sorted(directory.glob("*/[!h]*.json"))
    return {f"{path.parent.name}/{path.stem}": read_result(path).linear.accuracy for path in paths}


def test_each_setting_has_the_accuracies_of_the_module_and_a_row_in_the_page(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("scale.txt").write_text("10")
    call(monkeypatch, "--encoder", f"{home}/my.py:mean", "--data", home / "data", *QUICK)
    expected = {}
    for name, difficulty in PLACES.items():
        config = benchmark_probe(SETTINGS[name], "small").override(["num_epochs=2"], where="the probe")
        place = home / "data" / name / difficulty
        for label, found in probe(mean, place / "train", place / "test", config=config).items():
            expected[f"{name}-{difficulty}/{label}"] = found.linear
    assert results_in(Path("scored/my.py-mean")) == expected
    page = report(monkeypatch, tmp_path / "page.md", "--study", "suppression_small", "scored/my.py-mean")
    for title, label in (("RandBit: picture", "randbit-5/base"), ("C+Digits: object", "digits-all/overlay")):
        assert f"| {title} | my.py:mean | {100 * expected[label]:.1f} ± " in page


def test_the_place_and_the_probe_are_those_of_the_runs_of_the_benchmark(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("scale.txt").write_text("1")
    call(monkeypatch, "--encoder", f"{home}/my.py:mean", "--data", home / "data")
    runs = {(*run.data.test_dir.split("/")[-3:-1],): run for run in benchmark(scale="small", seeds=(0,))}
    for name, difficulty in PLACES.items():
        run = runs[name, difficulty]
        result = read_result(Path("scored/my.py-mean", f"{name}-{difficulty}", f"{SETTINGS[name].hard[0]}.json"))
        assert result.scored is not None
        assert result.scored.factors == {**run.tracking.factors, "cure": "encoder: my.py:mean"}
        assert result.probe_config == run.probe.protocol
        assert {one.labels for one in result.groups} <= {*(run.probe.groups or ())}


def test_what_an_encoder_cannot_encode_is_named_and_left_out(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    call(monkeypatch, "--encoder", f"{home}/my.py:colours", "--data", home / "data", *QUICK, "--out", "out")
    assert sorted(path.name for path in Path("out").iterdir()) == ["colours-0.75", "digits-all"]
    [said] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("left out")]
    assert f"cannot encode the samples of {home}/data/randbit/5/test: RuntimeError for an input of shape (16, 1" in said
    with pytest.raises(UserError, match="can encode none of the 3 datasets"):
        call(monkeypatch, "--encoder", f"{home}/my.py:maps", "--data", home / "data", *QUICK)
    with pytest.raises(UserError, match="can encode none of the 0 datasets of the suppression benchmark"):
        call(monkeypatch, "--encoder", f"{home}/my.py:maps", "--data", tmp_path)


def test_what_is_scored_is_scored_again_only_for_another_encoder_or_probe(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("scale.txt").write_text("10")
    command = ["--encoder", f"{home}/my.py:mean", "--data", home / "data"]

    def num_scored(*more: str) -> int:
        capsys.readouterr()
        call(monkeypatch, *command, *(more or QUICK))
        printed = capsys.readouterr().out
        assert printed.count("test accuracy") + printed.count("scored already") == len(PLACES)
        return printed.count("test accuracy")

    assert [num_scored(), num_scored()] == [3, 0]
    Path("scale.txt").write_text("20")  # the file of the encoder is the same, its features are not
    assert [num_scored(), num_scored()] == [3, 0]
    Path("scored/my.py-mean/randbit-5/base.json").unlink()
    assert num_scored() == 1
    assert num_scored("--set", "num_epochs=3") == 3
