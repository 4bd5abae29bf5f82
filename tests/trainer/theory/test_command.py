from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from data_pipeline.core.errors import UserError
from tests.nursery import PythonProcess
from trainer.theory import __main__ as command
from trainer.theory.framework.claim import Claim, exact_interval, judge
from trainer.theory.framework.experiment import (
    Experiment,
    Outcome,
    Part,
    Tensors,
    TheoryResult,
    TheorySettings,
    code_sha256,
    default_out,
    run_experiment,
)
from trainer.theory.linear_contrastive.command import EXPERIMENT

CPU = torch.device("cpu")

# Many parts of milliseconds.
QUICK = [
    "num_seeds=2",
    "studies=[gradient, training, error]",
    "training.num_dominant=6",
    "training.fewer_dominant=[5, 4, 3, 2, 1]",
    "training.fewer_noised=[]",
    "training.num_steps=6",
    "training.noise_from_step=3",
    "training.num_pairs=8",
    "error.num_samples_a_seed=1000",
]


class SquaresSettings(TheorySettings):
    count: int = 3


CALLS: list[str] = []


def square_parts(settings: SquaresSettings) -> Mapping[str, Part]:
    def part(number: int) -> Part:
        def run(device: torch.device) -> Tensors:
            CALLS.append(f"{number}")
            return {"square": torch.tensor(float(number**2), device=device)}

        return run

    return {f"square_{number}": part(number) for number in range(settings.count)}


def sum_up(settings: SquaresSettings, found: Mapping[str, Tensors]) -> Outcome:
    total = sum(tensors["square"].item() for tensors in found.values())
    claim = Claim(name="sum", statement="The sum is at most 5.", source="arithmetic")
    result = judge(claim, exact_interval(total, kind="exact"), measured="sum", at_most=5)
    return Outcome([result], {"picture": b"not really a picture"}, {"total": total})


SQUARES = Experiment(defaults=SquaresSettings(), parts=square_parts, conclude=sum_up)


def run(out: Path, settings: SquaresSettings, experiment: Experiment[SquaresSettings] = SQUARES) -> str:
    result = run_experiment("squares", experiment, settings, out=out, device=CPU, show_progress=False)
    return result.claims[0].verdict


def invoke(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["trainer.theory", *arguments])
    command.main()


def test_a_result_is_written_and_read_again(tmp_path: Path) -> None:
    assert run(tmp_path, SquaresSettings()) == "holds"
    result = TheoryResult.model_validate_json((tmp_path / "result.json").read_text())
    assert result.tables == {"total": 5.0}
    assert result.settings == {"seed": 0, "num_seeds": 10, "count": 3}
    assert result.seeds == tuple(range(10))
    assert set(result.seconds) == {"square_0", "square_1", "square_2"}
    assert (tmp_path / "picture.png").read_bytes() == b"not really a picture"


def test_finished_parts_are_not_computed_again(tmp_path: Path) -> None:
    CALLS.clear()
    run(tmp_path, SquaresSettings())
    assert CALLS == ["0", "1", "2"]
    (lost,) = tmp_path.glob("parts/*/square_1.safetensors")
    lost.unlink()
    CALLS.clear()
    assert run(tmp_path, SquaresSettings()) == "holds"
    assert CALLS == ["1"]


def test_parts_of_other_code_are_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path, SquaresSettings())
    CALLS.clear()
    monkeypatch.setattr("trainer.theory.framework.experiment.code_sha256", lambda _: "other code")
    run(tmp_path, SquaresSettings())
    assert CALLS == ["0", "1", "2"]


@pytest.mark.parametrize("changed", ["command.py", "model.py", "counter_rng.py"])
def test_the_hash_of_the_code_covers_every_module_of_an_experiment(
    changed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = code_sha256(EXPERIMENT)
    read = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: b"changed" if path.name == changed else read(path))
    assert code_sha256(EXPERIMENT) != before


def test_a_directory_of_other_settings_is_refused(tmp_path: Path) -> None:
    run(tmp_path, SquaresSettings())
    before = (tmp_path / "result.json").read_bytes()
    with pytest.raises(UserError, match=r"holds the result of other settings \(count\); pass another --out"):
        run(tmp_path, SquaresSettings(count=4))
    assert (tmp_path / "result.json").read_bytes() == before


def test_a_directory_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("the only copy")
    with pytest.raises(UserError, match="is not empty"):
        run(tmp_path, SquaresSettings())
    with pytest.raises(UserError, match="is a file"):
        run(tmp_path / "thesis.tex", SquaresSettings())
    run(tmp_path / "new", SquaresSettings())
    with pytest.raises(UserError, match="holds another experiment than cubes"):
        run_experiment("cubes", SQUARES, SquaresSettings(), out=tmp_path / "new", device=CPU, show_progress=False)


def test_other_settings_get_a_directory_of_their_own() -> None:
    defaults = SquaresSettings()
    assert default_out("squares", defaults, defaults) == Path("runs/theory/squares")
    others = {default_out("squares", SquaresSettings(count=count), defaults) for count in (4, 5)}
    assert len(others) == 2
    assert all(path.name.startswith("squares-") for path in others)


def test_overrides_reach_nested_settings() -> None:
    settings = EXPERIMENT.defaults.override(
        ["training.weak_correlations=[0.2, 0.4]", "num_seeds=3"], where="linear_contrastive"
    )
    assert settings.training.weak_correlations == (0.2, 0.4)
    assert settings.seeds == (0, 1, 2)
    assert settings.training.num_pairs == EXPERIMENT.defaults.training.num_pairs


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("num_seeds", 'has no "="'),
        ("num_seed=3", 'unknown key "num_seed"; did you mean "num_seeds"'),
        ("training.num_step=3", 'unknown key "training.num_step"; did you mean "num_steps"'),
        ("trainin.num_steps=3", '"trainin" has no settings of its own; did you mean "training"'),
        ("num_seeds=1", "num_seeds is 1; it must be"),
        ("num_seeds=[1", "the value is not YAML"),
        ("training.noise_from_step=150", "must lie between 1 and num_steps 150"),
        ("theorem.other_correlations=[0.9, 0.1]", "must rise from its least to its greatest value"),
        ("theorem.point_weak_angle_degrees=0", "theorem.point_weak_angle_degrees is 0; it must be"),
        ("theorem.weak_angles_degrees=[0, 30]", "theorem.weak_angles_degrees"),
        ("theorem.weak_correlations=[0, 0.5]", "theorem.weak_correlations"),
        ("theorem.point_weak_correlation=0", "theorem.point_weak_correlation is 0"),
        ("training.fewer_dominant=[60]", "must lie below num_dominant, 50"),
        ("training.dominant_correlation=0.1", "or no feature is weak"),
        ("studies=[theorems]", "'theorem'"),
    ],
)
def test_wrong_settings_are_named_in_one_sentence(text: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        EXPERIMENT.defaults.override([text], where="linear_contrastive")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unknown_experiment_names_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match='no experiment "linear_contrastiv"; did you mean "linear_contrastive"'):
        invoke(monkeypatch, "linear_contrastiv")


@pytest.mark.parametrize("device", ["tpu", "meta", "cuda:99"])
def test_a_missing_device_is_named(device: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"--device {device}"):
        invoke(monkeypatch, "linear_contrastive", "--device", device, "--out", str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_names_of_experiments_and_parts_can_be_file_names() -> None:
    for name in command.EXPERIMENTS:
        experiment = command.load_experiment(name)
        assert name.isidentifier()
        assert all(part.isprintable() and "/" not in part for part in experiment.parts(experiment.defaults))


def test_the_command_prints_the_claims_and_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    invoke(monkeypatch, "linear_contrastive", "--set", "studies=[gradient]", "--device", "cpu", "--out", str(out))
    printed = capsys.readouterr().out
    assert printed.startswith("HOLDS               gradient")
    assert printed.strip().endswith(str(out / "result.json"))


@pytest.mark.process
def test_killed_and_started_again_it_gives_the_same_result(tmp_path: Path) -> None:
    """kill -9 after two parts are saved: they stay as they are, and the results equal a whole run."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    arguments = [sys.executable, "-m", "trainer.theory", "linear_contrastive", "--device", "cpu"]
    arguments += [word for text in QUICK for word in ("--set", text)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = PythonProcess([*arguments, "--out", str(killed)], env=environment, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while len(saved := list(killed.glob("parts/*/*.safetensors"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (killed / "result.json").is_file(), "it ended before it was killed"
    before = {path: path.stat().st_mtime_ns for path in saved}
    settings = EXPERIMENT.defaults.override(QUICK, where="test")
    torch.manual_seed(7)  # results must not depend on the state of torch's generator
    results = [
        run_experiment("linear_contrastive", EXPERIMENT, settings, out=out, device=CPU, show_progress=False)
        for out in (killed, whole)
    ]
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert results[0].claims == results[1].claims
    assert json.dumps(results[0].tables) == json.dumps(results[1].tables)
