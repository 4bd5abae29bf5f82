"""Sweeps by launch/train.py in one process and by launch/slurm.py: what runs, what is left out, what is refused."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

import launch.slurm
import launch.slurm_command
import launch.status
import launch.train
from configs import resolve_recipe
from launch.planned_run import PlannedRun
from launch.slurm_command import plan_from, request_from
from launch.submission import SubmissionPlan
from tests.commands import Done, call
from tests.nursery import PythonProcess, run_python
from tests.slow_steps import SLOW_STEPS, pausing
from tests.tiny_data import write_tiny_dataset, write_tiny_pair
from trainer.checkpoint.files import write_files
from trainer.data import read_manifests
from trainer.observability.wandb_run import offline_steps
from trainer.run_dir import RunDir, write_json

ROOT = Path(__file__).parents[2]
SWEEP = ["--sweep", "objective.temperature=0.1,0.5", "--sweep", "seed=0,1"]
NAMES = [f"debug-image-temperature={temperature}-seed{seed}" for temperature in (0.1, 0.5) for seed in (0, 1)]

TWO_SWEEPS = """
import os, sys
from launch.train import main
words = sys.argv[1:]
for temperature in ("0.1", "0.5"):
    sys.argv[1:] = [*words, "--sweep", f"objective.temperature={temperature}"]
    main()
    assert "LOCAL_RANK" not in os.environ
"""

Command = Callable[..., Done]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_pair(tmp_path_factory.mktemp("data"), num_train=64, num_test=20)


def recipe(data: Path) -> list[str]:
    given = [f"data.train_dir={data / 'train'}", f"data.test_dir={data / 'test'}", "data.num_workers=0"]
    given += ["num_epochs=1", "tracking.wandb=disabled"]
    return ["--config", "debug:image", *(word for setting in given for word in ("--set", setting))]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    """Run launch/train.py or another command in this process, in an empty working directory."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)
    mains = {"train": launch.train.main, "slurm": launch.slurm.main, "status": launch.status.main}

    def run(name: str, *arguments: str | Path) -> Done:
        return call(mains[name], *arguments, monkeypatch=monkeypatch, capsys=capsys)

    return run


def last_step(run_dir: Path) -> int | None:
    return RunDir(run_dir).latest_step()


@pytest.mark.process
def test_a_sweep_trains_one_run_after_another_and_skips_what_is_finished(
    command: Command, data: Path, tmp_path: Path
) -> None:
    home = tmp_path / "runs" / "debug-image-sweep-temperature-seed"
    done = command("train", *recipe(data), *SWEEP)
    assert done.status == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("[")] == [
        f"[{number}/4] {name}" for number, name in enumerate(NAMES, 1)
    ]
    assert sorted(path.name for path in home.iterdir()) == NAMES
    assert [last_step(home / name) for name in NAMES] == [2] * 4
    assert f"compare them: python -m trainer.report {home}" in done.stdout

    more = command("train", *recipe(data), "--sweep", "objective.temperature=0.1,0.5,1", "--sweep", "seed=0,1")
    assert more.status == 0, more.stderr
    assert [f"{name} is finished already" in more.stdout for name in NAMES] == [True] * 4
    assert last_step(home / "debug-image-temperature=1-seed1") == 2
    shown = command("status", home)
    assert shown.stdout.count("finished") == 6


@pytest.mark.process
def test_a_run_that_fails_does_not_keep_the_others_from_training(command: Command, data: Path, tmp_path: Path) -> None:
    sweep = ["--sweep", "optimizer.learning_rate=1e30,0.01", "--set", "max_skipped_in_a_row=1", "--set", "num_epochs=2"]
    done = command("train", *recipe(data), *sweep, "--study-dir", tmp_path / "study")
    assert done.status == 1
    assert re.search(r"^debug-image-learning_rate=1e\+30-seed0: failed: .* in a row", done.stderr, re.MULTILINE)
    assert "error: 1 of 2 run(s) did not finish; repeat the command to go on with them" in done.stderr
    assert last_step(tmp_path / "study" / "debug-image-learning_rate=0.01-seed0") == 4
    assert "failed" in command("status", tmp_path / "study").stdout


@pytest.mark.process
def test_after_a_run_that_failed_the_next_one_has_a_wandb_run_of_its_own(
    command: Command, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    sweep = ["--sweep", "optimizer.learning_rate=1e30,0.01", "--set", "max_skipped_in_a_row=2", "--set", "num_epochs=2"]
    sweep += ["--set", "tracking.wandb=auto", "--set", "tracking.pictures_every_steps=null"]
    assert command("train", *recipe(data), *sweep, "--study-dir", tmp_path / "study").status == 1
    steps = {
        path.name: [offline_steps(file) for file in path.glob("wandb/offline-run-*/*.wandb")]
        for path in sorted((tmp_path / "study").iterdir())
    }
    assert steps == {
        "debug-image-learning_rate=0.01-seed0": [[1, 2, 3, 4]],
        "debug-image-learning_rate=1e+30-seed0": [[1, 2]],
    }


@pytest.mark.process
def test_deepspeed_trains_each_run_of_each_sweep_of_a_process(data: Path, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    words = [*recipe(data), "--set", "engine.kind=deepspeed", "--sweep", "seed=0,1", "--study-dir"]
    done = run_python([sys.executable, "-c", TWO_SWEEPS, *words, str(tmp_path / "study")], cwd=ROOT, timeout=240)
    assert done.returncode == 0, done.stderr
    names = [f"debug-image-temperature={temperature}-seed{seed}" for temperature in (0.1, 0.5) for seed in (0, 1)]
    assert {path.name: last_step(path) for path in (tmp_path / "study").iterdir()} == dict.fromkeys(names, 2)


@pytest.mark.process
def test_the_first_ctrl_c_saves_and_stops_the_sweep_and_the_same_command_goes_on(data: Path, tmp_path: Path) -> None:
    words = [
        sys.executable,
        "launch/train.py",
        *recipe(data),
        "--sweep",
        "seed=0,1",
        "--study-dir",
        str(tmp_path / "study"),
    ]
    words += ["--set", "num_epochs=10", "--set", "checkpoint_every_steps=1000", "--set", "log_every_steps=1"]
    words += SLOW_STEPS
    environ = pausing(0.2, os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"})
    run_dirs = [tmp_path / "study" / f"debug-image-seed{seed}" for seed in (0, 1)]
    process = PythonProcess(words, cwd=ROOT, env=environ, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while len(RunDir(run_dirs[0]).read_metrics()) < 2:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 1, stderr
    assert "as Ctrl-C asked; start it again and it goes on from there" in stderr
    assert "0 of 2 runs are finished; the same command goes on with the others" in stderr
    stopped = last_step(run_dirs[0])
    assert stopped is not None
    assert 0 < stopped < 20
    assert last_step(run_dirs[1]) is None

    done = run_python(words, cwd=ROOT, env=pausing(0, environ))
    assert done.returncode == 0, done.stderr
    assert [last_step(run_dir) for run_dir in run_dirs] == [20, 20]
    starts = json.loads(RunDir(run_dirs[0]).provenance.read_text())["starts"]
    assert [start["start_step"] for start in starts] == [0, stopped]


@pytest.mark.process
def test_two_ranks_of_torchrun_train_a_sweep_together(data: Path, tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = [*torchrun, "launch/train.py", *recipe(data), "--sweep", "seed=0,1"]
    words += ["--study-dir", str(tmp_path / "study")]
    environ = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = run_python(words, cwd=ROOT, env=environ)
    assert done.returncode == 0, done.stderr
    for seed in (0, 1):
        provenance = json.loads(RunDir(tmp_path / "study" / f"debug-image-seed{seed}").provenance.read_text())
        assert (provenance["world_size"], provenance["finished_step"]) == (2, 2)


def test_a_sweep_is_one_array_and_its_dry_run_shows_the_runs(
    command: Command, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))  # no Slurm
    done = command("slurm", *recipe(data), *SWEEP, "--dry-run", "--at-a-time", "3")
    assert done.status == 0, done.stderr
    assert "#SBATCH --array=0-3%3\n" in done.stdout
    assert "#SBATCH --job-name=debug-image-sweep-temperature-seed\n" in done.stdout
    rows = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith(("# run ", "# debug-image-"))]
    assert rows == [
        ["run", "state", "objective.temperature", "seed"],
        *([name, "new", name.split("=")[1].split("-")[0], name[-1]] for name in NAMES),
    ]
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("program", ["train", "slurm"])
def test_a_dry_run_here_prints_the_runs_and_writes_nothing(
    program: str, command: Command, data: Path, tmp_path: Path
) -> None:
    words = ["--executor", "local"] if program == "slurm" else []
    done = command(program, *recipe(data), *SWEEP, *words, "--dry-run")
    assert done.status == 0, done.stderr
    head, *rows, last = done.stdout.splitlines()
    assert head.split() == ["run", "state", "objective.temperature", "seed"]
    assert [row.split()[0] for row in rows] == NAMES
    assert last == f"4 runs in {tmp_path / 'runs' / 'debug-image-sweep-temperature-seed'}"
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_of_a_study_here_says_which_runs_are_finished_begun_or_new(
    command: Command, data: Path, tmp_path: Path
) -> None:
    home = tmp_path / "study"
    words: list[str | Path] = ["--study", "studies:debug_seeds", *recipe(data)[2:], "--study-dir", home]
    words += ["--executor", "local", "--dry-run"]
    fresh = command("slurm", *words)
    assert fresh.status == 0, fresh.stderr
    head, *rows, last = fresh.stdout.splitlines()
    assert head.split() == ["run", "state"]
    assert {row.split()[1] for row in rows} == {"new"}
    assert last == f"{len(rows)} runs in {home}"
    assert list(tmp_path.iterdir()) == []

    names = [row.split()[0] for row in rows]
    configs = {run.run_dir.path.name: run.config for run in study_runs(words)}
    for name, is_finished in zip(names, (True, False), strict=False):
        run_dir = RunDir(home / name)
        run_dir.path.mkdir(parents=True)
        write_json(run_dir.config, configs[name].model_dump(mode="json"))
        run_dir.checkpoint(1).mkdir(parents=True)
        write_files(run_dir.checkpoint(1), step=1, states={"encoder": {"weight": torch.zeros(3)}})
        run_dir.latest.write_text("step_00000001\n")
        if is_finished:
            write_json(run_dir.provenance, {"finished_step": 1, "starts": []})
    before = sorted(tmp_path.rglob("*"))
    done = command("slurm", *words)
    assert done.status == 0, done.stderr
    _, *rows, last = done.stdout.splitlines()
    assert [row.split(maxsplit=1)[1] for row in rows[:3]] == ["finished", "at step 1", "new"]
    assert last == f"{len(rows)} runs in {home}: 1 finished, 1 begun, {len(rows) - 2} new"
    only = command("slurm", *words, "--only", names[1])
    assert only.stdout.splitlines()[1:] == [f"{names[1]}  at step 1", f"1 run in {home}: 1 begun"]
    assert sorted(tmp_path.rglob("*")) == before


def finished_study(words: Sequence[str | Path], *, only: int) -> list[str]:
    """Leave the first `only` runs of a study as `trainer.export --results` packs them; return the names of all runs."""
    runs = study_runs(words)
    for planned in runs[:only]:
        planned.run_dir.path.mkdir(parents=True)
        write_json(planned.run_dir.config, planned.config.model_dump(mode="json"))
        identity = read_manifests(planned.config.data).identity.model_dump()
        write_json(planned.run_dir.provenance, {**identity, "finished_step": 2, "starts": []})
    return [planned.name for planned in runs]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Start no run; return the names of those that a study on this machine would start."""
    names: list[str] = []

    def run_study_here(plan: SubmissionPlan, *, command: str) -> None:
        names.extend(planned.name for planned in plan.runs)

    monkeypatch.setattr(launch.slurm_command, "run_study_here", run_study_here)
    return names


def test_a_study_is_refused_with_other_settings_than_its_runs(
    command: Command, data: Path, tmp_path: Path, started: list[str]
) -> None:
    words: list[str | Path] = ["--study", "studies:debug_seeds", *recipe(data)[2:], "--executor", "local"]
    words += ["--study-dir", tmp_path / "study"]
    names = finished_study(words, only=2)
    refused = command("slurm", *words, "--set", "optimizer.learning_rate=0.5", "--set", "log_every_steps=3")
    assert refused.status == 2
    assert f"{names[0]} holds a run with another config (it differs in optimizer.learning_rate)" in refused.stderr
    assert refused.stderr.endswith("pass another --study-dir, or remove this one and 1 more like it\n")
    assert started == []
    done = command("slurm", *words, "--set", "log_every_steps=3")
    assert done.status == 0, done.stderr
    assert started == names[2:]


def test_a_study_is_refused_on_other_data_than_its_runs(command: Command, tmp_path: Path, started: list[str]) -> None:
    data = write_tiny_pair(tmp_path / "data", num_train=64, num_test=20)
    words: list[str | Path] = ["--study", "studies:debug_seeds", *recipe(data)[2:], "--executor", "local"]
    words += ["--study-dir", tmp_path / "study"]
    names = finished_study(words, only=1)
    shutil.rmtree(data / "train")
    write_tiny_dataset(data / "train", num_samples=64, seed=7)
    for only in ("*", names[1]):
        refused = command("slurm", *words, "--only", only)
        assert refused.status == 2
        assert f"{names[0]} was trained on other data than " in refused.stderr
        assert len(refused.stderr.splitlines()) == 1
    assert started == []
    (name,) = re.findall(r"--accept-data (\w+)$", refused.stderr.strip())
    accepted = command("slurm", *words, "--accept-data", name)
    assert accepted.status == 0, accepted.stderr
    assert started == names[1:]


def test_a_study_goes_on_from_finished_runs_whose_data_are_not_here(
    command: Command, tmp_path: Path, started: list[str]
) -> None:
    data = write_tiny_pair(tmp_path / "data", num_train=64, num_test=20)
    words: list[str | Path] = ["--study", "studies:debug_seeds", *recipe(data)[2:], "--executor", "local"]
    words += ["--study-dir", tmp_path / "study"]
    names = finished_study(words, only=4)
    shutil.rmtree(data)
    done = command("slurm", *words)
    assert done.status == 0, done.stderr
    assert done.stdout.splitlines()[:-1] == [f"{name} is finished already" for name in names]
    assert started == []


def study_runs(words: Sequence[str | Path]) -> Sequence[PlannedRun]:
    """Return the runs of a command line of launch/slurm.py."""
    arguments = launch.slurm._parser().parse_args(list(map(str, words)))
    return plan_from(arguments, request_from(arguments)).runs


def test_a_dry_run_of_one_run_here_writes_nothing(command: Command, data: Path, tmp_path: Path) -> None:
    done = command("slurm", *recipe(data), "--executor", "local", "--dry-run")
    assert done.status == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"1 run in {tmp_path / 'runs'}"
    assert list(tmp_path.iterdir()) == []


def test_explain_shows_the_sweep(command: Command, data: Path) -> None:
    done = command("train", *recipe(data), *SWEEP, "--explain")
    assert done.status == 0, done.stderr
    assert re.search(r"^objective\.temperature +0\.1, 0\.5 +--sweep$", done.stdout, re.MULTILINE)


@pytest.mark.parametrize("program", ["train", "slurm"])
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--sweep", "seed=0,1", "--run-dir", "x"], "a sweep has a directory for each run; pass --study-dir in place"),
        (["--sweep", "num_epoch=1"], 'did you mean "num_epochs"?'),
        (
            [f"--sweep={key}={','.join(map(str, range(1, 101)))}" for key in ("seed", "keep_checkpoints")],
            "the sweep has 10,000 runs, more than 100; give fewer values, or pass --max-runs 10000 if that is meant",
        ),
        (["--sweep", "seed=0,1,2", "--max-runs", "2"], "the sweep has 3 runs, more than 2; give fewer values"),
        (["--sweep", "data.train_dir=nowhere"], "--sweep data.train_dir gives data.train_dir, and so does --set"),
        (["--study-dir", "x"], "use --run-dir for one run"),
        (["--sweep", "global_batch_size=32,64,128"], "128"),
    ],
)
def test_a_mistake_is_one_sentence_and_leaves_nothing(
    program: str, words: list[str], said: str, command: Command, data: Path, tmp_path: Path
) -> None:
    local = ["--executor", "local"] if program == "slurm" else []
    done = command(program, *recipe(data), *local, *words)
    assert done.status == 2, done.stdout + done.stderr
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "runs").exists()


def test_a_sweep_belongs_to_a_recipe(command: Command) -> None:
    done = command("slurm", "--study", "studies:debug_seeds", "--sweep", "seed=0")
    assert done.status == 2
    assert "--sweep and --sweep-file belong to --config" in done.stderr
    done = command("train", "--config", "debug:image", "--sweep", "seed=0", "--plan")
    assert done.status == 2
    assert "--plan is for one run" in done.stderr


@pytest.mark.parametrize("dry_run", [[], ["--dry-run"]], ids=["run", "dry_run"])
@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("train", ["--config", "debug:image", "--sweep", "seed=0"]),
        ("slurm", ["--config", "debug:image", "--sweep", "seed=0", "--executor", "local"]),
        ("slurm", ["--study", "studies:debug_seeds", "--executor", "local"]),
    ],
    ids=["train_sweep", "slurm_sweep", "slurm_study"],
)
def test_a_directory_of_another_config_is_refused_with_the_option_that_names_another(
    program: str, words: list[str], dry_run: list[str], command: Command, data: Path, tmp_path: Path
) -> None:
    settings = recipe(data)[2:]
    other = resolve_recipe("debug:image", [*settings[1::2], "num_epochs=3"])
    write_json(tmp_path / "study" / "debug-image-seed0" / "config.json", other.model_dump(mode="json"))
    done = command(program, *words, *settings, "--study-dir", "study", *dry_run)
    assert done.status == 2
    assert "debug-image-seed0 holds a run with another config (it differs in " in done.stderr
    assert done.stderr.endswith("pass another --study-dir, or remove this one\n")


@pytest.mark.process
def test_a_sweep_is_refused_on_other_data_than_its_runs_and_with_other_settings(
    command: Command, tmp_path: Path
) -> None:
    data = write_tiny_pair(tmp_path / "data", num_train=64, num_test=20)
    study = ["--study-dir", tmp_path / "study"]
    assert command("train", *recipe(data), "--sweep", "seed=0", *study).status == 0
    other = command("train", *recipe(data), "--set", "num_epochs=2", "--sweep", "seed=0,1", *study)
    assert other.status == 2
    assert "holds a run with another config (it differs in num_epochs)" in other.stderr
    shutil.rmtree(data / "train")
    write_tiny_dataset(data / "train", num_samples=64, seed=7)
    for program, words in (("train", []), ("slurm", ["--executor", "local"])):
        refused = command(program, *recipe(data), "--sweep", "seed=0,1", *study, *words)
        assert refused.status == 2
        assert "debug-image-seed0 was trained on other data than " in refused.stderr
        assert len(refused.stderr.splitlines()) == 1
    (name,) = re.findall(r"--accept-data (\w+)$", refused.stderr.strip())
    accepted = command("train", *recipe(data), "--sweep", "seed=1", *study, "--accept-data", name)
    assert accepted.status == 0, accepted.stderr


def test_many_runs_are_asked_about_on_a_terminal(command: Command, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def answer(question: str) -> str:
        asked.append(question)
        return "n" if len(asked) == 1 else "y"

    monkeypatch.setattr("builtins.input", answer)
    monkeypatch.setattr("launch.sweeps._is_terminal", lambda: True)
    words = [*recipe(data), "--sweep", f"seed={','.join(map(str, range(101)))}", "--dry-run"]
    refused = command("train", *words)
    assert refused.status == 2
    assert "a sweep of 101 runs was not confirmed; nothing was started" in refused.stderr
    confirmed = command("train", *words)
    assert confirmed.status == 0, confirmed.stderr
    assert confirmed.stdout.splitlines()[-1].startswith("101 runs in ")
    assert asked == ["This sweep has 101 runs. Go on? [y/N] "] * 2
