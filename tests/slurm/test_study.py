"""A study on a real Slurm of four nodes: one job array, its table, a failed run submitted again, and refusals."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import launch.slurm
import launch.status
from tests.commands import Call, Done
from tests.tiny_data import write_tiny_dataset
from trainer.run_dir import RunDir

ROOT = Path(__file__).parents[2]
NAMES = [f"debug-image-seed{seed}" for seed in (0, 1)]


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    data = tmp_path_factory.mktemp("data")
    train_dir = write_tiny_dataset(data / "train", num_samples=64)
    test_dir = write_tiny_dataset(data / "test", num_samples=32, seed=1, split="test")
    given = [f"data.train_dir={train_dir}", f"data.test_dir={test_dir}", "data.num_workers=0", "num_epochs=1"]
    return [word for setting in [*given, "tracking.wandb=disabled"] for word in ("--set", setting)]


Command = Callable[..., Done]


@pytest.fixture
def command(slurm: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, call: Call) -> Command:
    """Run a command of launch/ with its arguments, in this process, on the private Slurm."""
    monkeypatch.setenv("SLURM_CONF", slurm["SLURM_CONF"])
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    mains = {"slurm.py": launch.slurm.main, "status.py": launch.status.main}

    def run(name: str, *arguments: str | Path) -> Done:
        return call(mains[name], *arguments)

    return run


def wait_for(condition: Callable[[], bool], *, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.3)


def squeue(slurm: dict[str, str]) -> str:
    command = ["squeue", "--noheader", "--array", "--format", "%i %T %r"]
    return subprocess.run(command, env=slurm, capture_output=True, text=True, check=True, timeout=60).stdout


def states(command: Command, study: Path) -> dict[str, list[str]]:
    """Return the words of each run's line in the table."""
    done = command("status.py", study)
    assert done.status == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    return {words[0]: words[1:] for words in lines if words[0] in NAMES}


def test_a_study_runs_as_one_array_and_what_failed_alone_runs_again(
    command: Command, slurm: dict[str, str], settings: list[str], tmp_path: Path
) -> None:
    """At first the second run cannot write its metrics; its error ends the job, which does not start again."""
    study = tmp_path / "study"
    first, broken = (RunDir(study / name) for name in NAMES)
    words = ["--study", "studies:debug_seeds", "--only", "debug-image-*", *settings, "--study-dir", str(study)]
    words += ["--at-a-time", "1", "--sbatch", "export=NONE"]  # as some clusters ask for
    submitted = command("slurm.py", *words)
    assert submitted.status == 0, submitted.stderr
    jobs = re.findall(rf"^job (\d+)_(\d): {study}/(\S+)$", submitted.stdout, re.MULTILINE)
    array = jobs[0][0]
    assert jobs == [(array, str(member), name) for member, name in enumerate(NAMES)]
    broken.metrics.mkdir()

    queues = [squeue(slurm)]
    deadline = time.monotonic() + 120
    while f"{array}_" in queues[-1]:
        assert time.monotonic() < deadline
        time.sleep(0.3)
        queues.append(squeue(slurm))
    assert max(len(re.findall(rf"^{array}_\d RUNNING", queue, re.MULTILINE)) for queue in queues) == 1
    assert any("JobArrayTaskLimit" in queue for queue in queues)

    shown = states(command, study)
    assert shown[NAMES[0]][:2] == ["finished", "2/2"]
    assert shown[NAMES[1]][0] == "failed"
    assert "IsADirectoryError:" in shown[NAMES[1]]

    broken.metrics.rmdir()
    waited = command("slurm.py", *words, "--wait")
    assert waited.status == 0, waited.stderr
    assert f"{NAMES[0]} is finished already" in waited.stdout
    assert re.findall(r"^job (\d+): (\S+)$", waited.stdout, re.MULTILINE)[0][1] == str(broken.path)
    assert f"{NAMES[1]}: finished\n" in waited.stdout
    assert {words[0] for words in states(command, study).values()} == {"finished"}

    codes = {start["snapshot_sha256"][:16] for run in (first, broken) for start in run.read_provenance()["starts"]}
    assert codes == {path.name for path in (study / "code").iterdir()}, "the jobs ran the copies of the code"


def test_a_job_that_is_cancelled_while_it_waits(
    command: Command, slurm: dict[str, str], settings: list[str], tmp_path: Path
) -> None:
    done = command("slurm.py", "--config", "debug:image", *settings, "--run-dir", tmp_path / "run", "--sbatch", "hold")
    assert done.status == 0, done.stderr
    (job_id,) = re.findall(r"^job (\d+):", done.stdout, re.MULTILINE)
    subprocess.run(["scancel", job_id], env=slurm, check=True, timeout=60)
    wait_for(lambda: job_id not in squeue(slurm))
    shown = command("status.py", tmp_path / "run").stdout.splitlines()
    assert shown[1].split() == ["run", "stopped", "0/?", "cancelled"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--partition", "nope"], "Invalid partition name specified"),
        (["--cpus-per-task", "99"], "Requested node configuration is not available"),
        (["--run-dir", "/proc/version/run"], "Not a directory: '/proc/version/run'"),
    ],
)
def test_what_cannot_run_is_one_sentence_and_leaves_nothing(
    flags: list[str], message: str, command: Command, slurm: dict[str, str], settings: list[str], tmp_path: Path
) -> None:
    before = squeue(slurm)
    done = command("slurm.py", "--config", "debug:image", *settings, "--run-dir", tmp_path / "run", *flags)
    assert done.status == 2, done.stderr
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "run").exists()
    assert squeue(slurm) == before
