"""Encoders of others, and runs on other data: `python -m trainer.probe --encoder`, and `--train DIR --test DIR`."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from data_pipeline.core.errors import UserError
from tests.tiny_data import write_tiny_pair
from tests.trainer.probed_runs.test_probe_command import call, make_run
from tests.trainer.reports.made_runs import Page, report
from trainer.exports.encoder import save_encoder
from trainer.pretrained import load_modules
from trainer.probes import ProbeConfig, probe
from trainer.probes.result import ProbeResult, read_result
from trainer.run_dir import RunDir, write_json

QUICK = ["--set", "num_epochs=2"]
CONFIG = ProbeConfig(num_epochs=2, views="none")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with two datasets, a run on the first, and the encoder of the run in every form."""
    home = tmp_path_factory.mktemp("scoring")
    for name, num_test in (("data", 20), ("other", 24)):
        write_tiny_pair(home / name, num_train=32, num_test=num_test)
    run_dir = make_run(home / "run", home / "data", probe=CONFIG.model_dump())
    save_encoder(run_dir, home / "export.safetensors")
    (home / "someones.py").write_text(
        "import torch\n"
        "from trainer import load_encoder\n"
        "from tests.trainer.probed_runs.test_scoring import Mean\n"
        f"whole = load_encoder({str(home / 'run')!r})\n"
        "module = Mean()\n"
        "batch = {0: torch.export.Dim.DYNAMIC}\n"
        "program = torch.export.export(module, (torch.zeros(2, 3, 16, 16),), dynamic_shapes=(batch,)).module()\n"
        "def function(x):\n    return x.mean((2, 3)) * 10\n"
        "shape = (2, 3)\n"
        "Kind = Mean\n"
    )
    return home


class Mean(nn.Module):
    """The mean colour of a picture."""

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        return x_BCHW.mean((2, 3)) * 10


def scored_in(directory: Path) -> dict[str, ProbeResult]:
    return {path.stem: read_result(path) for path in directory.glob("*.json")}


@pytest.mark.parametrize(
    ("form", "same_as"),
    [
        ("{home}/export.safetensors", "run"),
        ("{home}/someones.py:whole", "run"),
        ("{home}/someones.py:module", "mean"),
        ("{home}/someones.py:function", "mean"),
        ("someones:module", "mean"),
        ("{home}/someones.py:program", "mean"),
    ],
)
def test_an_encoder_in_every_form_has_the_accuracies_of_its_module(
    form: str, same_as: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(home))
    data = ["--train", home / "data/train", "--test", home / "data/test"]
    call(monkeypatch, "--encoder", form.format(home=home), *data, *QUICK)
    [directory] = (tmp_path / "scored").iterdir()
    encoder = load_modules(RunDir(home / "run")).encoder if same_as == "run" else Mean()
    found, expected = scored_in(directory), probe(encoder, home / "data/train", home / "data/test", config=CONFIG)
    assert set(found) == set(expected) == {"base", "overlay"}
    for label, accuracy in expected.items():
        assert (found[label].linear.accuracy, found[label].knn.accuracy) == (accuracy.linear, accuracy.knn)
    assert all(one.scored is not None and one.scored.name == form.format(home=home) for one in found.values())


def test_a_scored_encoder_is_a_row_beside_runs(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run, out = Path("run"), Path("out")
    shutil.copytree(home / "run", run)
    data = ["--train", home / "data/train", "--test", home / "data/test"]
    call(monkeypatch, run)
    call(monkeypatch, "--encoder", f"{home}/someones.py:module", *data, *QUICK, "--out", out)
    html = report(monkeypatch, tmp_path / "page.html", run, out, "--csv", str(tmp_path / "table.csv"))
    page = Page(html)
    for name, directory in (("debug-image", run / "probes/step_00000010"), (f"{home}/someones.py:module", out)):
        accuracy = read_result(directory / "base.json").linear.accuracy
        assert page.row(name)[1].startswith(f"{100 * accuracy:.1f}")
    assert html.count('<table class="numbers">') == 1  # of accuracies, for both
    assert "someones.py:module" in (tmp_path / "table.csv").read_text()
    assert "someones.py:module" in report(monkeypatch, tmp_path / "alone.html", out)


def test_a_run_on_other_data_keeps_its_own_results_and_moved_data_are_its_own(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = RunDir(tmp_path / "run")
    shutil.copytree(home / "run", run_dir.path)
    call(monkeypatch, run_dir.path)
    own = read_result(run_dir.probes(10) / "base.json")
    write_json(run_dir.provenance, dict(zip(("train_manifest_sha256", "test_manifest_sha256"), own.data, strict=True)))
    before = {path: path.read_bytes() for path in run_dir.all_probes.rglob("*") if path.is_file()}
    call(monkeypatch, "--encoder", run_dir.path, "--train", home / "other/train", "--test", home / "other/test")
    assert all(path.read_bytes() == content for path, content in before.items())
    [place] = run_dir.all_probes.glob("data_*/step_00000010")
    other = read_result(place / "base.json")
    assert other.data != own.data
    assert other.scored is not None
    html = report(monkeypatch, tmp_path / "page.html", run_dir.path)
    assert str(place) in html
    assert html.count("Accuracies:") == 2

    shutil.copytree(home / "data", tmp_path / "moved")
    call(monkeypatch, run_dir.path, "--train", tmp_path / "moved/train", "--test", tmp_path / "moved/test")
    assert len(list(run_dir.all_probes.glob("data_*"))) == 1
    again = read_result(run_dir.probes(10) / "base.json")
    assert again.model_dump(exclude={"seconds"}) == own.model_dump(exclude={"seconds"})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--encoder {home}/someones.py:Kind {data}", "is a type; name a module, or a function"),
        ("--encoder {home}/someones.py:module {data} --set views=policy", "must have views=none"),
        ("--encoder {home}/someones.py:module {data} --step 3", None),
        ("{home}/run --out {home}/out", None),
    ],
)
def test_what_cannot_be_scored_is_said(
    arguments: str, message: str | None, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = f"--train {home}/data/train --test {home}/data/test"
    words = arguments.format(home=home, data=data).split()
    if message is None:
        with pytest.raises(SystemExit):
            call(monkeypatch, *words)
        assert "--encoder" in capsys.readouterr().err
    else:
        with pytest.raises(UserError, match=message):
            call(monkeypatch, *words)
