"""The requests and the refusals of launch/slurm.py on a machine without Slurm; tests/slurm has a real one."""

from __future__ import annotations

import os
import pickle
import re
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch

from configs import resolve_recipe
from data_pipeline.core.errors import UserError
from launch.here import gpus_here
from launch.job import TrainJob
from launch.planned_run import PlannedRun
from launch.resources import RequestedResources, Resources, resolve_request, resources_for
from launch.slurm import main
from launch.slurm_client import outside_any_job, states_of_jobs
from launch.submission import SubmissionPlan, sbatch_script
from launch.submitted import Submission, last_submission, record
from tests.commands import Call, Done
from tests.tiny_data import write_tiny_pair
from trainer.run_dir import RunDir, write_json

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "slurm_debug_image.sh"
WANTED = RequestedResources(
    gpus_per_node=8,
    time_minutes=60,
    mem_gb=200,
    partition="gpu",
    account="me",
    qos="high",
    constraint="h200",
    sbatch={"reservation": "night", "exclusive": True, "nice": 7, "contiguous": False},
    warning_seconds=30,
    setup=("module load cuda",),
    srun=("--mpi=none", "--container-image=a b"),
    python="apptainer exec a.sif /opt/python",
)
RESOURCES = Resources(WANTED, nodes=4, tasks_per_node=8, cpus_per_task=12, threads_per_task=10)

Command = Callable[..., Done]


@pytest.fixture
def slurm_py(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call) -> Command:
    """Run `python launch/slurm.py ARGUMENTS` in this process, with an empty PATH and no settings of a cluster."""
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.chdir(tmp_path)  # it has no slurm.yaml
    for name in [name for name in os.environ if name.startswith(("FEATURE_DROPOUT_", "SBATCH_"))]:
        monkeypatch.delenv(name)

    def command(*arguments: str | Path) -> Done:
        return call(main, *arguments)

    return command


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return settings of `debug:image` for data that exist."""
    data = write_tiny_pair(tmp_path_factory.mktemp("data"), num_train=64, num_test=20)
    given = [f"data.train_dir={data / 'train'}", f"data.test_dir={data / 'test'}"]
    return [word for setting in given for word in ("--set", setting)]


@pytest.fixture
def fake_slurm(slurm_py: Command, tmp_path: Path) -> Path:
    """Put programs with the names of Slurm's on the PATH: two nodes with eight GPUs, two without; no jobs."""
    programs = {
        "sinfo": "printf '%s\\n' 'n0 n0 cpu* idle (null)' 'n1 n1 cpu* idle (null)'"
        " 'g0 g0 gpu idle gpu:a100:8(S:0-1)' 'g1 g1 gpu idle gpu:a100:8(S:0-1),lustre:1'",
        "squeue": "printf '%s\\n' '7|RUNNING|None' '8|PENDING|Priority'",
        "srun": "exit 1",
        "sbatch": 'touch "$(dirname "$0")/asked"; grep -q partition=nope && '
        "{ echo 'allocation failure: Invalid partition name specified' >&2; exit 1; }; exit 0",
    }
    folder = tmp_path / "empty"  # the only one on the PATH
    folder.mkdir()
    for name, body in programs.items():
        (folder / name).write_text(f"#!/bin/bash\nPATH=/usr/bin:/bin\n{body}\n")
        (folder / name).chmod(0o755)
    return folder


@pytest.mark.process
def test_dry_run_prints_the_script_that_is_on_record(slurm_py: Command, settings: list[str], tmp_path: Path) -> None:
    """After an intended change run UPDATE_GOLDEN=1 pytest tests/launch/test_submission.py, and read the difference."""
    flags = ["--nodes", "4", "--config", "debug:image", *settings, "--dry-run"]
    done = slurm_py(*flags, "--run-dir", tmp_path / "run")
    assert done.status == 0, done.stderr
    script = done.stdout.replace(str(tmp_path / "run"), "RUN_DIR").replace(sys.executable, "PYTHON")
    script = re.sub(r"RUN_DIR/code/[0-9a-f]{16}", "RUN_DIR/code/HASH", script)
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.write_text(script)
    assert script == GOLDEN.read_text()
    assert not (tmp_path / "run").exists(), "a dry run writes nothing"


def test_everything_asked_for_is_in_the_script(tmp_path: Path) -> None:
    runs = [PlannedRun(RunDir(tmp_path), resolve_recipe("debug:image"))]
    plan = SubmissionPlan(runs=runs, home=tmp_path, resources=RESOURCES, at_a_time=1, name="run a")
    script = sbatch_script(plan, code=tmp_path / "a b")
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
        "constraint=h200",
        "reservation=night",
        "exclusive",
        "nice=7",
        "requeue",
        "signal=USR2@30",
    }
    assert not [option for option in options if option.startswith(("contiguous", "array"))]
    assert f"export PYTHONPATH='{tmp_path}/a b'${{PYTHONPATH:+:$PYTHONPATH}}" in script
    (srun,) = re.findall(r"^ranks=.*", script, re.MULTILINE)
    assert "--cpus-per-task=12" in srun
    assert "--mpi=none '--container-image=a b' --kill-on-bad-exit=1" in srun
    assert script.index("\nmodule load cuda\n") < script.index("export")
    start = re.escape(f"apptainer exec a.sif /opt/python -I -S '{tmp_path}/a b/launch/block_signals.py' /opt/python")
    assert re.search(rf"^train {start} -u -m submitit", script, re.MULTILINE)
    assert f"run_dirs=({tmp_path})\n" in script
    assert "CUDA_VISIBLE_DEVICES" not in script, "Slurm decides which GPUs a task sees"


def test_a_flag_overrides_the_file(slurm_py: Command, settings: list[str], tmp_path: Path) -> None:
    tmp_path.joinpath("slurm.yaml").write_text("partition: a\nmem_gb: 4\nsbatch: {nice: 1, comment: a}\n")
    flags = ["--time-minutes", "60", "--partition", "b", "--sbatch", "nice=3", "--dry-run", *settings]
    done = slurm_py("--config", "debug:image", "--run-dir", tmp_path / "run", *flags)
    assert done.status == 0, done.stderr
    options = set(re.findall(r"^#SBATCH --(\S+)", done.stdout, re.MULTILINE))
    assert options >= {"partition=b", "time=60", "mem=4GB", "nice=3", "comment=a"}


def test_what_is_asked_for_fits_every_run_of_a_study() -> None:
    """There is a rank for each GPU, with a core for itself and for each data worker of the run with most workers."""
    few, many = (resolve_recipe("debug:image", [f"data.num_workers={number}"]) for number in (1, 3))
    wanted = resolve_request({"gpus_per_node": 4, "partition": "a"})
    resources = resources_for(wanted, [few, many], nodes=2)
    assert (resources.num_ranks, resources.cpus_per_task, resources.threads_per_task) == (8, 4, 1)
    assert resources.wanted == wanted
    wanted = resolve_request({"cpus_per_task": 12, "tasks_per_node": 2})
    assert resources_for(wanted, [few], nodes=1).threads_per_task == 11
    with pytest.raises(UserError, match="cannot be divided by 3 ranks"):
        resources_for(wanted.model_copy(update={"tasks_per_node": 1}), [few, many], nodes=3)
    with pytest.raises(UserError, match="cannot share"):
        resources_for(wanted.model_copy(update={"gpus_per_node": 1}), [few], nodes=1)


@pytest.mark.parametrize(
    ("flags", "text", "message"),
    [
        ({}, "partion: gpu", 'slurm.yaml: unknown key "partion"; did you mean "partition"'),
        ({}, "gpu", "does not hold settings"),
        ({"time_minutes": 2}, "", "raise --time-minutes, or lower warning_seconds"),
        ({}, "warning_seconds: 5", "slurm.yaml: warning_seconds is 5"),
    ],
)
def test_a_mistake_is_named_where_it_stands(flags: dict[str, object], text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "slurm.yaml").write_text(text)
    with pytest.raises(UserError) as raised:
        resolve_request(flags, file=tmp_path / "slurm.yaml")
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_slurm_and_its_accounting_are_asked_once_for_the_states_of_all_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert states_of_jobs(["7"]) is None, "there is no squeue"

    def answer(program: str, body: str) -> None:
        tmp_path.joinpath(program).write_text(f"#!/bin/bash\necho x >> {tmp_path}/{program}_asked\n{body}\n")
        tmp_path.joinpath(program).chmod(0o755)

    answer("squeue", "echo Invalid job id >&2; exit 1")
    assert states_of_jobs(["7"]) == {}, "it ended long ago"
    answer("squeue", "echo '7|PENDING|Priority'; echo '8_1|FAILED|NonZeroExitCode'")
    answer("sacct", "[[ ${!#} == 9,9_1 ]] && echo '9|CANCELLED by 0' && echo '9_1|OUT_OF_MEMORY'")
    assert states_of_jobs(["7", "8_1", "9", "9_1"]) == {
        "7": "PENDING (Priority)",
        "8_1": "FAILED (NonZeroExitCode)",
        "9": "CANCELLED",
        "9_1": "OUT_OF_MEMORY",
    }
    assert tmp_path.joinpath("sacct_asked").read_text() == "x\n"
    answer("squeue", "echo 'no answer' >&2; exit 1")
    with pytest.raises(UserError, match="no answer"):
        states_of_jobs(["7"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", "debug:imag"], 'error: unknown recipe "debug:imag"; did you mean "debug:image"?'),
        (["--config", "debug:image", "--nodes", "3"], "32 cannot be divided by 3 ranks"),
        (["--config", "debug:image", "--nodes", "2", "--executor", "local"], "use --tasks-per-node 2"),
        (["--config", "debug:image", "--nodes", "0"], "'0' is not a positive whole number"),
        (["--study", "studies:tabel1"], 'unknown study "studies:tabel1"; did you mean "studies:table1"?'),
        (["--study", "studies:table1"], "pass --study-dir in place of --run-dir"),
        (["--config", "debug:image", "--at-a-time", "2"], "--study-dir and --at-a-time belong to --study"),
        (["--config", "debug:image", "--study", "studies:table1"], "not allowed with argument --config"),
    ],
)
def test_bad_input(arguments: list[str], message: str, slurm_py: Command, tmp_path: Path) -> None:
    done = slurm_py(*arguments, "--run-dir", tmp_path / "run")
    assert done.status == 2
    assert message in done.stderr
    assert not (tmp_path / "run").exists()


def test_without_slurm_it_says_so_and_leaves_nothing_behind(
    slurm_py: Command, settings: list[str], tmp_path: Path
) -> None:
    done = slurm_py("--config", "debug:image", *settings, "--run-dir", tmp_path / "run")
    assert done.status == 2
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("error: there is no Slurm on this machine")
    assert not (tmp_path / "run").exists()
    dry = slurm_py("--config", "debug:image", *settings, "--run-dir", tmp_path / "run", "--dry-run")
    assert dry.status == 0
    assert "\n# not checked by Slurm: there is no sbatch on this machine\n" in dry.stdout


@pytest.mark.parametrize("dry_run", [[], ["--dry-run"]], ids=["submission", "dry_run"])
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--set", "global_batch_size=128"], "64 samples"),
        (["--run-dir", "OTHER"], "OTHER holds a run with another config (it differs in seed)"),
        (["--partition", "nope"], "Invalid partition name specified"),
        (["--partition", "a\nb"], '--partition: partition is "a\\nb"'),
    ],
)
@pytest.mark.usefixtures("fake_slurm")
def test_a_dry_run_refuses_what_a_submission_refuses_and_both_leave_nothing(
    flags: list[str],
    message: str,
    dry_run: list[str],
    slurm_py: Command,
    settings: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs = tmp_path / "runs"
    config = resolve_recipe("debug:image", settings[1::2])
    write_json(RunDir(runs / "OTHER").config, config.model_copy(update={"seed": 5}).model_dump(mode="json"))
    before = sorted(runs.rglob("*"))
    words = [str(runs / word) if word.isupper() else word for word in flags]
    monkeypatch.chdir(runs)
    done = slurm_py("--config", "debug:image", "--run-dir", "new/run", *settings, *words, *dry_run)
    assert done.status == 2
    assert re.sub(rf"{runs}/(?=[A-Z])", "", done.stderr).count(message) == 1, done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert "#SBATCH" not in done.stdout
    assert sorted(runs.rglob("*")) == before


@pytest.mark.parametrize("state", ["finished", "running", "waiting"])
@pytest.mark.usefixtures("fake_slurm")
def test_a_run_that_is_finished_or_has_a_job_is_not_submitted_again(
    state: str, slurm_py: Command, settings: list[str], tmp_path: Path
) -> None:
    run_dir = RunDir(tmp_path / "run")
    run_dir.path.mkdir()
    write_json(run_dir.config, resolve_recipe("debug:image", settings[1::2]).model_dump(mode="json"))
    flags = ["--config", "debug:image", *settings, "--run-dir", run_dir.path]
    if state == "finished":
        write_json(run_dir.provenance, {"finished_step": 4, "starts": []})
    else:
        job_id = "7" if state == "running" else "8"  # as the fake squeue says
        record(run_dir, Submission(job_id=job_id, submitted_at=datetime.now(UTC), log=tmp_path / "log"))
    done = slurm_py(*flags)
    assert done.status == 0, done.stderr
    assert done.stdout.startswith(f"run is {state} already")
    other = slurm_py(*flags, "--set", "seed=5")
    assert (other.status, "holds a run with another config" in other.stderr) == (2, True)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("echo Submitted batch job 7", None),
        ("echo 'error: Bad' >&2; exit 1", "sbatch refused the job (error: Bad)"),
        ("exit 1", "no reason"),
        ("echo 7", "find job debug-image with squeue"),
    ],
)
def test_a_submission_is_recorded_unless_it_is_refused(
    answer: str, said: str | None, slurm_py: Command, fake_slurm: Path, settings: list[str], tmp_path: Path
) -> None:
    (fake_slurm / "sbatch").write_text(f"#!/bin/bash\n[[ $1 == --test-only ]] && exit 0\n{answer}\n")
    run_dir = RunDir(tmp_path / "runs" / "a")
    done = slurm_py("--config", "debug:image", *settings, "--run-dir", run_dir.path)
    submission = last_submission(run_dir)
    if said is not None:
        assert (done.status, submission) == (2, None)
        assert said in done.stderr
        assert run_dir.config.is_file(), "a job may use the directory"
        return
    assert done.status == 0, done.stderr
    assert submission is not None
    assert (submission.job_id, submission.log) == ("7", run_dir.path / "logs" / "7_0_log.out")
    with (run_dir.path / "logs" / "7_submitted.pkl").open("rb") as file:
        job = pickle.load(file).function
    assert isinstance(job, TrainJob)
    assert job.run_dir == run_dir.path


def test_variables_of_sbatch_count_less_than_the_script(
    slurm_py: Command, fake_slurm: Path, settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sbatch lets its command line count most, then its variables, then the script (`tests/slurm` asks a real one)."""
    for name in ("PARTITION", "RESERVATION"):
        monkeypatch.setenv(f"SBATCH_{name}", "site")
    (fake_slurm / "sbatch").write_text(
        f'#!/bin/bash\necho "$@" >> {tmp_path}/options\n/usr/bin/env > {tmp_path}/env\necho Submitted batch job 7\n'
    )
    words = ["--config", "debug:image", *settings, "--partition", "mine", "--sbatch", "comment=two words"]
    done = slurm_py(*words, "--run-dir", tmp_path / "run")
    assert done.status == 0, done.stderr
    tested, submitted = (tmp_path / "options").read_text().splitlines()
    for options in (tested, submitted):
        assert "--partition=mine" in options
        assert "--comment=two words" in options
    assert tested.startswith("--test-only ")
    assert {"SBATCH_PARTITION=site", "SBATCH_RESERVATION=site"} <= {*(tmp_path / "env").read_text().splitlines()}


def test_a_job_inherits_no_job_but_what_a_site_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {"SLURM_CONF": "/etc/slurm.conf", "SBATCH_PARTITION": "gpu"}
    hidden = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "3", "RANK": "3", "TORCHELASTIC_RUN_ID": "a"}
    for name, value in (kept | hidden).items():
        monkeypatch.setenv(name, value)
    with outside_any_job():
        assert {name: os.environ.get(name) for name in kept} == kept
        assert not hidden.keys() & os.environ.keys()
    assert {name: os.environ.get(name) for name in kept | hidden} == kept | hidden


@pytest.mark.parametrize(
    ("visible", "at_a_time", "expected"),
    [
        ("4,GPU-1a,7,-1", 1, [["4", "GPU-1a"]]),
        ("MIG-1a,MIG-1b,0,0", 2, [["MIG-1a", "MIG-1b"], ["0", "0"]]),
        (None, 1, [["0", "1"]]),
        ("3", 1, None),
        (None, 2, None),
    ],
)
def test_each_run_on_this_machine_has_its_own_gpus(
    visible: str | None, at_a_time: int, expected: list[list[str]] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    if expected is None:
        with pytest.raises(UserError, match="ask for fewer"):
            gpus_here(2, at_a_time=at_a_time)
    else:
        assert gpus_here(2, at_a_time=at_a_time) == expected
    assert gpus_here(0, at_a_time=2) == [[], []]
