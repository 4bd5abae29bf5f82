"""Sweeps and studies by launch/slurm.py: what would run, what is left out, what is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest

import launch.slurm
import launch.slurm_command
import launch.status
import launch.train
from launch.planned_run import PlannedRun
from launch.slurm_command import plan_from
from launch.submission import SubmissionPlan
from tests.commands import Call, Done
from tests.tiny_data import on_data, write_tiny_pair
from trainer.run_dir import write_json

ROOT = Path(__file__).parents[2]
SWEEP = ["--sweep", "objective.temperature=0.1,0.5", "--sweep", "seed=0,1"]
NAMES = [f"debug-image-objective.temperature={temperature}-seed{seed}" for temperature in (0.1, 0.5) for seed in (0, 1)]

Command = Callable[..., Done]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_pair(tmp_path_factory.mktemp("data"), num_train=64, num_test=20)


def recipe(data: Path) -> list[str]:
    given = on_data(data, "num_epochs=1")
    return ["--config", "debug:image", *(word for setting in given for word in ("--set", setting))]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, call: Call) -> Command:
    """Run launch/slurm.py in this process, in an empty working directory."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)
    return partial(call, launch.slurm.main)


def test_a_sweep_is_one_array_and_its_dry_run_shows_the_runs(
    command: Command, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))  # no Slurm
    done = command(*recipe(data), *SWEEP, "--dry-run", "--at-a-time", "3")
    assert done.status == 0, done.stderr
    assert "#SBATCH --array=0-3%3\n" in done.stdout
    assert "#SBATCH --job-name=debug-image-sweep-objective.temperature-seed\n" in done.stdout
    here = command(*recipe(data), *SWEEP, "--dry-run", "--executor", "local").stdout
    assert "\nasks for 4 runs of 1 node x 1 rank" in here
    rows = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith(("# run ", "# debug-image-"))]
    assert [line.split() for line in here.splitlines()[:-1]] == rows
    assert rows == [
        ["run", "state", "objective.temperature", "seed"],
        *([name, "pending", name.split("=")[1].split("-")[0], name[-1]] for name in NAMES),
    ]
    assert not (tmp_path / "runs").exists()


def finished_study(words: Sequence[str | Path], *, only: int) -> list[str]:
    """Leave the first `only` runs of a study as finished; return the names of all runs."""
    runs = study_runs(words)
    for planned in runs[:only]:
        planned.run_dir.path.mkdir(parents=True)
        write_json(planned.run_dir.config, planned.config.model_dump(mode="json"))
        write_json(planned.run_dir.provenance, {"finished_step": 2, "starts": []})
    return [planned.name for planned in runs]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Start no run; return the names of those that a study on this machine would start."""
    names: list[str] = []

    def run_here(plan: SubmissionPlan, *, command: str) -> None:
        names.extend(planned.name for planned in plan.runs)

    monkeypatch.setattr(launch.slurm_command, "run_here", run_here)
    return names


def test_a_study_is_refused_with_other_settings_than_its_runs(
    command: Command, data: Path, tmp_path: Path, started: list[str]
) -> None:
    words: list[str | Path] = ["--study", "studies:debug_seeds", *recipe(data)[2:], "--executor", "local"]
    words += ["--study-dir", tmp_path / "study"]
    names = finished_study(words, only=2)
    refused = command(*words, "--set", "optimizer.learning_rate=0.5", "--set", "log_every_steps=3")
    assert refused.status == 2
    assert f"{names[0]} holds a run with another config (it differs in optimizer.learning_rate)" in refused.stderr
    assert started == []
    done = command(*words, "--set", "log_every_steps=3")
    assert done.status == 0, done.stderr
    assert started == names[2:]


def study_runs(words: Sequence[str | Path]) -> Sequence[PlannedRun]:
    """Return the runs of a command line of launch/slurm.py."""
    arguments = launch.slurm._parser().parse_args(list(map(str, words)))
    return plan_from(arguments).runs


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--sweep", "seed=0,1", "--run-dir", "x"], "pass --study-dir in place"),
        (["--sweep", "num_epoch=1"], 'did you mean "num_epochs"?'),
        (["--sweep", "data.train_dir=nowhere"], "another --sweep or --set gives data.train_dir"),
        (["--study-dir", "x"], "use --run-dir for one run"),
        (["--sweep", "global_batch_size=32,64,128"], "128"),
        (["--only", "a*"], "--only chooses runs of a study"),
    ],
)
def test_a_mistake_is_one_sentence_and_leaves_nothing(
    words: list[str], said: str, command: Command, data: Path, tmp_path: Path
) -> None:
    done = command(*recipe(data), "--executor", "local", *words)
    assert done.status == 2, done.stdout + done.stderr
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "runs").exists()


def test_a_sweep_belongs_to_a_recipe(command: Command) -> None:
    done = command("--study", "studies:debug_seeds", "--sweep", "seed=0")
    assert (done.status, "belongs to --config" in done.stderr) == (2, True)


def test_only_the_runs_of_a_study_that_fit_a_pattern_are_chosen(command: Command, data: Path) -> None:
    words = ["--study", "studies:debug_seeds", *recipe(data)[2:], "--executor", "local", "--dry-run"]
    assert len(study_runs([*words, "--only", "*-seed1"])) == 2
    done = command(*words, "--only", "c-*")
    assert (done.status, "no run of the study fits" in done.stderr) == (2, True)
