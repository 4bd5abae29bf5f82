"""What launch/slurm.py asks for, and what it refuses, where there is no Slurm at all; tests/slurm has a real one."""

from __future__ import annotations

import os
import pickle
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from data_pipeline.errors import UserError, run_command
from launch.job import TrainJob
from launch.slurm import Resources, _outside_any_job, main, sbatch_script, slurm_parameters
from tests.tiny_data import write_tiny_dataset

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "slurm_debug_image.sh"
RESOURCES = Resources(
    nodes=4,
    tasks_per_node=8,
    cpus_per_task=12,
    threads_per_task=10,
    gpus_per_node=8,
    time_minutes=60,
    mem_gb=200,
    partition="gpu",
    account="me",
    qos="high",
)


@dataclass(frozen=True)
class Done:
    status: int
    stdout: str
    stderr: str


Command = Callable[..., Done]


@pytest.fixture
def slurm_py(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """`python launch/slurm.py ARGUMENTS`, in this process, with nothing on the PATH."""
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))

    def command(*arguments: str | Path) -> Done:
        monkeypatch.setattr(sys, "argv", ["launch/slurm.py", *map(str, arguments)])
        status = 0
        try:
            run_command(main)
        except SystemExit as end:
            status = int(end.code or 0)
        return Done(status, *capsys.readouterr())

    return command


def test_dry_run_prints_the_script_that_is_on_record(slurm_py: Command, tmp_path: Path) -> None:
    """After a change that is meant: UPDATE_GOLDEN=1 pytest tests/launch/test_submission.py, and read the difference."""
    done = slurm_py("--nodes", "4", "--config", "debug:image", "--run-dir", tmp_path / "run", "--dry-run")
    assert done.status == 0, done.stderr
    script = done.stdout.replace(str(tmp_path / "run"), "RUN_DIR").replace(sys.executable, "PYTHON")
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.write_text(script)
    assert script == GOLDEN.read_text()
    assert not (tmp_path / "run").exists(), "a dry run writes nothing"


def test_everything_asked_for_is_in_the_script(tmp_path: Path) -> None:
    script = sbatch_script(tmp_path, slurm_parameters(RESOURCES, job_name="run a"))
    options = set(re.findall(r"^#SBATCH --(\S+)", script, re.MULTILINE))
    assert options >= {
        "nodes=4",
        "ntasks-per-node=8",
        "cpus-per-task=12",
        "gpus-per-node=8",
        "time=60",
        "mem=200GB",
        "partition=gpu",
        "account=me",
        "qos=high",
        "requeue",
    }
    (srun,) = re.findall(r"^srun .*", script, re.MULTILINE)
    assert "--cpus-per-task=12" in srun
    assert "--kill-on-bad-exit=1" in srun
    assert "CUDA_VISIBLE_DEVICES" not in script, "Slurm decides which GPUs a task sees"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", "debug:imag"], 'error: unknown recipe "debug:imag"; did you mean "debug:image"?'),
        (
            ["--config", "debug:image", "--nodes", "3"],
            "error: 3 nodes x 1 tasks = 3 ranks do not divide the global batch",
        ),
        (["--config", "debug:image", "--set", "data.train_dir=nowhere"], "error: nowhere does not exist; build it"),
        (["--config", "debug:image", "--nodes", "2", "--executor", "local"], "use --tasks-per-node 2"),
        (["--config", "debug:image", "--executor", "local", "--dry-run"], "--executor local writes no batch script"),
        (["--config", "debug:image", "--nodes", "0"], "'0' is not a positive whole number"),
    ],
)
def test_bad_input(arguments: list[str], message: str, slurm_py: Command, tmp_path: Path) -> None:
    done = slurm_py(*arguments, "--run-dir", tmp_path / "run")
    assert done.status == 2
    assert message in done.stderr
    assert not (tmp_path / "run").exists()


def test_without_slurm_it_says_so_and_leaves_nothing_behind(slurm_py: Command, tmp_path: Path) -> None:
    train_dir = write_tiny_dataset(tmp_path / "train", num_samples=64)
    settings = ["--set", f"data.train_dir={train_dir}", "--set", f"data.test_dir={train_dir}"]
    done = slurm_py("--config", "debug:image", *settings, "--run-dir", tmp_path / "run")
    assert done.status == 2
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("error: there is no Slurm on this machine")
    assert "--executor local" in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_requeued_job_is_the_same_job(tmp_path: Path) -> None:
    job = TrainJob(run_dir=tmp_path, command="python launch/slurm.py", local_port=1)
    assert pickle.loads(pickle.dumps(job)) == job
    again = job.checkpoint()
    assert (again.function, again.args, again.kwargs) == (job, (), {})


def test_a_job_without_its_run_directory_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
    with pytest.raises(UserError, match="is not a run directory"):
        TrainJob(run_dir=tmp_path, command="", local_port=1)()


def test_a_job_inherits_nothing_of_the_job_that_submits_it(monkeypatch: pytest.MonkeyPatch) -> None:
    inherited = {"RANK": "0", "WORLD_SIZE": "2", "SLURM_PROCID": "0", "TORCHELASTIC_RUN_ID": "none"}
    for name, value in {**inherited, "SLURM_CONF": "cluster.conf"}.items():
        monkeypatch.setenv(name, value)
    with _outside_any_job():
        assert not inherited.keys() & os.environ.keys()
        assert os.environ["SLURM_CONF"] == "cluster.conf", "which cluster, not which job"
    assert {name: os.environ[name] for name in inherited} == inherited
