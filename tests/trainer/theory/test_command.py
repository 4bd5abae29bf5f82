from __future__ import annotations

from pathlib import Path

import pytest
import torch

from data_pipeline.core.errors import UserError
from tests.commands import Call
from trainer.theory import __main__ as command
from trainer.theory.framework.experiment import TheoryResult, default_out, judge, run_experiment
from trainer.theory.linear_contrastive.experiment import EXPERIMENT

CPU = torch.device("cpu")
QUICK = [
    "num_seeds=2",
    "studies=[theorem, training, error]",
    "theorem.num_batches_a_seed=4",
    "training.num_dominant=6",
    "training.fewer_dominant=[5, 1]",
    "training.num_steps=6",
    "training.noise_from_step=3",
    "training.num_pairs=8",
    "error.num_samples_a_seed=1000",
]


def test_a_result_is_written_and_depends_on_its_settings_alone(tmp_path: Path) -> None:
    settings = EXPERIMENT.defaults.override(QUICK, where="test")
    torch.manual_seed(0)
    result = run_experiment("linear_contrastive", EXPERIMENT, settings, out=tmp_path, device=CPU)
    torch.manual_seed(7)  # results must not depend on the state of torch's generator
    again = EXPERIMENT.run(settings, CPU)
    assert (list(result.claims), result.tables) == (judge("linear_contrastive", again), again.tables)
    assert TheoryResult.model_validate_json((tmp_path / "result.json").read_text()) == result
    assert (result.seeds, result.settings["training"]["num_steps"]) == ((0, 1), 6)
    assert len(result.figures) == 2
    for figure in result.figures:
        assert (tmp_path / figure).read_bytes()[:4] == b"\x89PNG"


def test_other_settings_get_a_directory_of_their_own() -> None:
    defaults = EXPERIMENT.defaults
    assert default_out("name", defaults, defaults) == Path("runs/theory/name")
    others = {default_out("name", defaults.model_copy(update={"seed": seed}), defaults) for seed in (4, 5)}
    assert len(others) == 2
    assert all(path.name.startswith("name-") for path in others)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("training.noise_from_step=150", "noise_from_step"),
        ("theorem.other_correlations=[0.9, 0.1]", "other_correlations must rise"),
        ("training.dominant_correlation=0.1", "no feature is weak"),
    ],
)
def test_wrong_settings_are_named_in_one_sentence(text: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        EXPERIMENT.defaults.override([text], where="linear_contrastive")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("device", ["tpu", "cuda:99"])
def test_a_missing_device_is_named(device: str, tmp_path: Path, call: Call) -> None:
    done = call(command.main, "linear_contrastive", "--device", device, "--out", tmp_path / "out")
    assert f"error: --device {device}" in done.stderr
    assert not (tmp_path / "out").exists()


def test_the_command_prints_the_claims_and_its_files(tmp_path: Path, call: Call) -> None:
    out = tmp_path / "out"
    printed = call(
        command.main, "linear_contrastive", "--set", "studies=[error]", "--device", "cpu", "--out", out
    ).stdout
    assert printed.startswith("HOLDS               error is the angle")
    assert printed.strip().endswith(str(out / "result.json"))
