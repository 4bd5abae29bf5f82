"""The requests and the refusals of launch/slurm.py on a machine without Slurm; tests/slurm has a real one."""

from __future__ import annotations

import os
import pickle
import re
import shutil
import signal
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import submitit
import torch

from configs import resolve_recipe
from data_pipeline.core.errors import UserError
from launch.job import TrainJob
from launch.outcome import outcomes_of_job
from launch.planned_run import PlannedRun
from launch.resources import Resources, describe_origins, describe_request, resolve_request, resources_for
from launch.slurm import main
from launch.slurm_checks import check_gpus, check_shared, check_time_limit, refusal
from launch.slurm_client import outside_any_job, refusal_reason, refused
from launch.slurm_command import chosen_runs
from launch.submission import SubmissionPlan, _submit_here, all_gpus_of, sbatch_script
from launch.submitted import Submission, last_submission, record
from tests.commands import Done, call
from tests.tiny_data import write_tiny_pair
from trainer.run_dir import RunDir, hold, write_json

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
    constraint="h200",
    sbatch={"reservation": "night", "exclusive": True, "nice": 7, "contiguous": False},
)


Command = Callable[..., Done]


@pytest.fixture
def slurm_py(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run `python launch/slurm.py ARGUMENTS` in this process, with an empty PATH and no settings of the user."""
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in [name for name in os.environ if name.startswith(("FEATURE_DROPOUT_", "SBATCH_"))]:
        monkeypatch.delenv(name)

    def command(*arguments: str | Path) -> Done:
        return call(main, *arguments, monkeypatch=monkeypatch, capsys=capsys)

    return command


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return settings of `debug:image` for data that exist."""
    data = write_tiny_pair(tmp_path_factory.mktemp("data"), num_train=64, num_test=20)
    given = [f"data.train_dir={data / 'train'}", f"data.test_dir={data / 'test'}"]
    return [word for setting in given for word in ("--set", setting)]


@pytest.fixture
def tmp_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let /tmp count as shared. It is, for all nodes of this cluster."""
    monkeypatch.setattr("launch.slurm_checks.check_shared", lambda *_: None)


@pytest.fixture
def fake_slurm(slurm_py: Command, tmp_path: Path) -> Path:
    """Put programs with the names of Slurm's on the PATH: two nodes with eight GPUs, two without; no jobs."""
    programs = {
        "sinfo": "printf '%s\\n' 'n0 n0 cpu* idle (null)' 'n1 n1 cpu* idle (null)'"
        " 'g0 g0 gpu idle gpu:a100:8(S:0-1)' 'g1 g1 gpu idle gpu:a100:8(S:0-1),lustre:1'",
        "scontrol": "echo PartitionName=cpu Default=YES MaxTime=UNLIMITED",
        "squeue": "echo '7|RUNNING|None'",
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


def submission_of_job(job_id: str) -> Submission:
    return Submission(
        job_id=job_id,
        executor="slurm",
        home=".",
        submitted_at=datetime.now(UTC),
        at_a_time=1,
        resources=RESOURCES,
        host="login",
    )


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
    }
    assert not [option for option in options if option.startswith(("contiguous", "array"))]
    assert f"export PYTHONPATH='{tmp_path}/a b'${{PYTHONPATH:+:$PYTHONPATH}}" in script
    (srun,) = re.findall(r"^srun .*", script, re.MULTILINE)
    assert "--cpus-per-task=12" in srun
    assert "--kill-on-bad-exit=1" in srun
    assert "CUDA_VISIBLE_DEVICES" not in script, "Slurm decides which GPUs a task sees"


def test_a_study_is_one_array_with_a_limit(slurm_py: Command, settings: list[str], tmp_path: Path) -> None:
    flags = ["--study-dir", tmp_path / "study", "--at-a-time", "2", "--dry-run", *settings]
    done = slurm_py("--study", "studies:debug_seeds", *flags)
    assert done.status == 0, done.stderr
    assert "#SBATCH --array=0-3%2\n" in done.stdout
    assert f"#SBATCH --output={tmp_path}/study/logs/%A_%a_0_log.out" in done.stdout
    assert "\n# asks for 4 runs of 1 node x 1 rank, no GPU: it trains on the CPU" in done.stdout
    assert not (tmp_path / "study").exists()


def test_flag_before_environment_before_file(
    slurm_py: Command, settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script also has the origin of each value."""
    user_file = tmp_path / "config" / "feature-dropout" / "slurm.yaml"
    user_file.parent.mkdir(parents=True)
    user_file.write_text("partition: a\naccount: a\nqos: a\nconstraint: a\nmem_gb: 4\nsbatch: {nice: 1, comment: a}\n")
    here = tmp_path / "here"
    here.mkdir()
    here.joinpath("slurm.yaml").write_text("account: b\n")
    monkeypatch.chdir(here)
    monkeypatch.setenv("SBATCH_QOS", "c")
    monkeypatch.setenv("SBATCH_CONSTRAINT", "c")
    monkeypatch.setenv("FEATURE_DROPOUT_SLURM_CONSTRAINT", "d")
    monkeypatch.setenv("FEATURE_DROPOUT_SLURM_TIME_MINUTES", "30")
    monkeypatch.setenv("FEATURE_DROPOUT_SLURM_SBATCH", "nice=2 exclusive")
    flags = ["--time-minutes", "60", "--sbatch", "nice=3", "--dry-run", *settings]
    done = slurm_py("--config", "debug:image", "--run-dir", tmp_path / "run", *flags)
    assert done.status == 0, done.stderr
    options = set(re.findall(r"^#SBATCH --(\S+)", done.stdout, re.MULTILINE))
    assert options >= {"partition=a", "account=b", "qos=c", "constraint=d", "time=60", "mem=4GB"}
    assert options >= {"nice=3", "comment=a", "exclusive"}
    assert [line for line in done.stdout.splitlines() if line.startswith("# ") and " from " in line] == [
        f"# partition: a from {user_file}",
        "# account: b from slurm.yaml",
        "# qos: c from SBATCH_QOS",
        "# constraint: d from FEATURE_DROPOUT_SLURM_CONSTRAINT",
        "# time_minutes: 60 from --time-minutes",
        f"# mem_gb: 4 from {user_file}",
        "# nice: 3 from --sbatch",
        f"# comment: a from {user_file}",
        "# exclusive: True from FEATURE_DROPOUT_SLURM_SBATCH",
    ]


def test_what_is_asked_for_fits_every_run_of_a_study() -> None:
    """There is a rank for each GPU, with a core for itself and for each data worker of the run with most workers."""
    few, many = (resolve_recipe("debug:image", [f"data.num_workers={number}"]) for number in (1, 3))
    wanted = resolve_request({"gpus_per_node": 4, "partition": "a"}, environ={}, files=[]).wanted
    resources = resources_for(wanted, [few, many], nodes=2)
    assert (resources.num_ranks, resources.cpus_per_task, resources.threads_per_task) == (8, 4, 1)
    assert (resources.gpus_per_node, resources.partition) == (4, "a")
    wanted = resolve_request({"cpus_per_task": 12, "tasks_per_node": 2}, environ={}, files=[]).wanted
    assert resources_for(wanted, [few], nodes=1).threads_per_task == 11
    with pytest.raises(UserError, match="3 ranks do not divide the global batch of 32 of debug-image"):
        resources_for(wanted.model_copy(update={"tasks_per_node": 1}), [few, many], nodes=3)
    with pytest.raises(UserError, match=r"2 ranks a node cannot share 1 GPU\(s\).* ask for --gpus-per-node 2"):
        resources_for(wanted.model_copy(update={"gpus_per_node": 1}), [few], nodes=1)


def test_without_any_wish_the_cluster_decides() -> None:
    request = resolve_request({"partition": None}, environ={}, files=[])
    assert describe_origins(request) == ["time_minutes: 240 from default"]


@pytest.mark.parametrize(
    ("flags", "environ", "text", "message"),
    [
        ({}, {"FEATURE_DROPOUT_SLURM_PARTITON": "a"}, "", 'PARTITON: unknown key "partiton"; did you mean "partition"'),
        ({}, {"FEATURE_DROPOUT_SLURM_MEM_GB": "a lot"}, "", "FEATURE_DROPOUT_SLURM_MEM_GB: mem_gb is "),
        (
            {},
            {"FEATURE_DROPOUT_SLURM_SBATCH": "comment='a"},
            "",
            "FEATURE_DROPOUT_SLURM_SBATCH: No closing quotation in comment='a; write it as for a shell",
        ),
        ({}, {}, "partion: gpu", 'slurm.yaml: unknown key "partion"; did you mean "partition"'),
        ({}, {}, "gpu", "does not hold settings such as `partition: gpu`"),
        ({}, {}, "a: [", "cannot read "),
        (
            {"sbatch": {"partition": "a"}},
            {},
            "",
            "--sbatch: sbatch: partition has a setting of its own; use --partition",
        ),
        ({"sbatch": {"open_mode": "a"}}, {}, "", "open-mode is decided by launch/slurm.py itself; leave it out"),
    ],
)
def test_a_mistake_is_named_where_it_stands(
    flags: dict[str, object], environ: dict[str, str], text: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "slurm.yaml").write_text(text)
    with pytest.raises(UserError) as raised:
        resolve_request(flags, environ=environ, files=[tmp_path / "slurm.yaml"])
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_directory_that_only_this_machine_has_is_refused() -> None:
    check_shared(Path("/tmp/run"), ["me", "me.cluster"], this_host="me")
    check_shared(Path("/scratch/run"), ["n0", "n1"], this_host="me")
    check_shared(Path("/tmpfs/run"), ["n0"], this_host="me")
    for private in ("/tmp/run", "/dev/shm/a/b"):
        with pytest.raises(UserError, match="so n0 could not write there"):
            check_shared(Path(private), ["n1", "n0", "me"], this_host="me.cluster")


def test_nodes_that_are_down_for_the_moment_are_no_reason_to_refuse() -> None:
    """Slurm 22.05 says the same sentence for a drained node and for one node too many."""
    impossible = "allocation failure: Requested node configuration is not available\n"
    up = "n0 h0 debug* idle\nn1 h1 debug* mixed~\nn1 h1 big allocated\nn2 h2 big idle\nn3 h3 big idle\n"
    drained = up.replace("n1 h1 debug* mixed~", "n1 h1 debug* drained")
    silent = up.replace("n1 h1 debug* mixed~", "n1 h1 debug* idle*")

    def refused(said: str, listed: str, *, nodes: int = 2, partition: str | None = None) -> str | None:
        resources = RESOURCES.model_copy(update={"nodes": nodes, "partition": partition})
        return refusal(said, nodes=listed, resources=resources)

    assert refused(impossible, up) == "Requested node configuration is not available"
    assert refused(impossible, drained) is None
    assert refused(impossible, silent) is None
    assert refused(impossible, drained, partition="big") == "Requested node configuration is not available"
    assert refused(impossible, drained, partition="big,debug", nodes=4) is None
    too_many = "Requested node configuration is not available: --nodes 3, but the partition debug has 2"
    assert refused(impossible, drained, nodes=3) == too_many
    assert refused("allocation failure: Invalid partition name specified\n", drained, partition="x") == (
        "Invalid partition name specified"
    )
    assert refused("allocation failure: Required node not available (down, drained or reserved)\n", up) is None


def test_more_time_than_a_partition_allows_is_refused() -> None:
    """Such a job would wait for ever, with PENDING (PartitionTimeLimit)."""
    shown = (
        "PartitionName=short AllowGroups=ALL Default=YES MaxTime=00:59:00 State=UP\n"
        "PartitionName=long AllowGroups=ALL Default=NO MaxTime=1-00:00:00 State=UP\n"
        "PartitionName=endless AllowGroups=ALL Default=NO MaxTime=UNLIMITED State=UP\n"
    )

    def check(**wanted: str | int | None) -> None:
        check_time_limit(RESOURCES.model_copy(update={"partition": None, "qos": None} | wanted), shown)

    check(time_minutes=59)
    check(partition="long", time_minutes=24 * 60)
    check(partition="endless", time_minutes=1_000_000)
    check(partition="short,long", time_minutes=60)
    check(partition="unknown", time_minutes=60)
    check(qos="high", time_minutes=60)
    with pytest.raises(UserError, match="--time-minutes 60, but the partition short allows 59;"):
        check(time_minutes=60)
    with pytest.raises(UserError, match="--time-minutes 1441, but the partition long allows 1440;"):
        check(partition="short,long", time_minutes=1441)


def test_sbatchs_reason_is_found_in_what_it_says() -> None:
    said = "sbatch: error: invalid partition specified: x\nallocation failure: Invalid partition name specified\n"
    assert refusal_reason(said) == "Invalid partition name specified"
    assert (
        refusal_reason("sbatch: error: Batch job submission failed: No room\n")
        == "Batch job submission failed: No room"
    )
    assert refusal_reason("") == "it gave no reason"


@pytest.mark.parametrize(
    "reason",
    [
        "Batch job submission failed: Socket timed out on send/recv operation",
        "Batch job submission failed: Unable to contact slurm controller (connect failure)",
    ],
)
def test_a_controller_that_does_not_answer_has_refused_nothing(reason: str) -> None:
    """It may have taken the job. To change the request would not help."""
    said = str(refused(refusal_reason(f"sbatch: error: {reason}\n")))
    assert said == (
        f"Slurm gave no answer ({reason}); when it does, end a job that squeue shows for this run, and submit again"
    )


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
        (
            ["--config", "debug:image", "--executor", "local", "--time-minutes", "2"],
            "error: --time-minutes 2 leaves no time to train, because a run is warned 120 seconds before its limit;",
        ),
        (["--config", "debug:image", "--time-minutes", "2"], "allow 3 minutes or more"),
        (["--config", "debug:image", "--nodes", "0"], "'0' is not a positive whole number"),
        (["--study", "studies:tabel1"], 'unknown study "studies:tabel1"; did you mean "studies:table1"?'),
        (["--study", "studies:table1"], "a study has a directory for each run; pass --study-dir"),
        (["--config", "debug:image", "--at-a-time", "2"], "--study-dir and --at-a-time belong to --study"),
        (["--config", "debug:image", "--sbatch", "mem=4G", "--dry-run"], "mem has a setting of its own; use --mem-gb"),
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
    assert "--executor local" in done.stderr
    assert not (tmp_path / "run").exists()
    dry = slurm_py("--config", "debug:image", *settings, "--run-dir", tmp_path / "run", "--dry-run")
    assert dry.status == 0
    assert "\n# not checked by Slurm: there is no sbatch on this machine\n" in dry.stdout


@pytest.mark.slow
@pytest.mark.parametrize("dry_run", [[], ["--dry-run"]], ids=["submission", "dry_run"])
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--set", "data.train_dir=nowhere"], "nowhere does not exist; build it"),
        (["--set", "global_batch_size=128"], "64 samples"),
        (["--run-dir", "OTHER"], "OTHER holds a run with another config (it differs in seed)"),
        (["--run-dir", "FULL"], "FULL is not empty and is not a run directory"),
        (["--run-dir", "HELD"], "another process is training in HELD"),
        (["--run-dir", "QUEUED"], "job 7 is RUNNING for QUEUED already"),
        (["--run-dir", "/proc/none/run"], "/proc/none cannot be written"),
        (["--run-dir", "a\nb"], "cannot stand in a batch script"),
        (["--run-dir", "10%train"], "10%train has a % or a backslash in its name"),
        (["--partition", "nope"], "sbatch refused the job (Invalid partition name specified)"),
        (["--partition", "a\nb"], '--partition: partition: "a\\nb" holds the character'),
        (["--partition", "gpu", "--nodes", "2"], "so 2 ranks would train on the CPU; add --gpus-per-node 8"),
        (["--mem-gb", "9999999"], "--mem-gb: mem_gb is 9999999; it must be at most 1,000,000"),
    ],
)
@pytest.mark.usefixtures("tmp_is_shared")
def test_a_dry_run_refuses_what_a_submission_refuses_and_both_leave_nothing(
    flags: list[str],
    message: str,
    dry_run: list[str],
    slurm_py: Command,
    fake_slurm: Path,
    settings: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs = tmp_path / "runs"
    config = resolve_recipe("debug:image", settings[1::2])
    for name in ("OTHER", "FULL", "HELD", "QUEUED"):
        (runs / name).mkdir(parents=True)
        if name != "FULL":
            other = config.model_copy(update={"seed": 5}) if name == "OTHER" else config
            write_json(RunDir(runs / name).config, other.model_dump(mode="json"))
    (runs / "FULL" / "thesis.tex").touch()
    record(RunDir(runs / "QUEUED"), submission_of_job("7"))
    with hold(RunDir(runs / "HELD")):
        before = sorted(runs.rglob("*"))
        words = [str(runs / word) if word.isupper() else word for word in flags]
        monkeypatch.chdir(runs)
        done = slurm_py("--config", "debug:image", "--run-dir", "new/run", *settings, *words, *dry_run)
    assert done.status == 2
    assert re.sub(rf"{runs}/(?=[A-Z])", "", done.stderr).count(message) == 1, done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert "#SBATCH" not in done.stdout
    assert sorted(runs.rglob("*")) == before


@pytest.mark.parametrize("dry_run", [[], ["--dry-run"]])
@pytest.mark.usefixtures("fake_slurm", "tmp_is_shared")
def test_a_finished_run_is_not_submitted_again(
    dry_run: list[str], slurm_py: Command, settings: list[str], tmp_path: Path
) -> None:
    run_dir = RunDir(tmp_path / "run")
    run_dir.path.mkdir()
    write_json(run_dir.config, resolve_recipe("debug:image", settings[1::2]).model_dump(mode="json"))
    write_json(run_dir.provenance, {"finished_step": 4, "starts": []})
    flags = ["--config", "debug:image", *settings, "--run-dir", run_dir.path, *dry_run]
    done = slurm_py(*flags)
    assert done.status == 0, done.stderr
    assert done.stdout == f"{run_dir.path} is finished already; nothing was submitted\n"
    other = slurm_py(*flags, "--set", "seed=5")
    assert other.status == 2
    assert "holds a run with another config (it differs in seed)" in other.stderr


@pytest.mark.parametrize("accepts", [True, False])
@pytest.mark.usefixtures("tmp_is_shared")
def test_ctrl_c_while_sbatch_asks_loses_no_job(
    accepts: bool,
    slurm_py: Command,
    fake_slurm: Path,
    settings: list[str],
    tmp_path: Path,
) -> None:
    """Slurm may have accepted the job, which then needs its directory. Ctrl-C does not reach this sbatch either."""
    end = "echo Submitted batch job 12" if accepts else "echo 'sbatch: error: no' >&2; exit 1"
    interrupted = f"[[ $* == *--test-only* ]] && exit 0; kill -INT $PPID $$; {end}"
    (fake_slurm / "sbatch").write_text(f"#!/bin/bash\n{interrupted}\n")
    run_dir = RunDir(tmp_path / "run")
    done = slurm_py("--config", "debug:image", *settings, "--run-dir", run_dir.path)
    assert done.status == 130
    submission = last_submission(run_dir)
    assert (submission is not None and submission.job_id == "12") == accepts
    assert run_dir.path.exists() == accepts
    assert ("job 12 was submitted before this; end it: scancel 12\n" in done.stderr) == accepts


@pytest.mark.process
@pytest.mark.usefixtures("tmp_is_shared")
def test_a_command_that_was_killed_before_it_recorded_its_job_is_not_repeated_unseen(
    slurm_py: Command, fake_slurm: Path, settings: list[str], tmp_path: Path
) -> None:
    sbatch, run_dir = fake_slurm / "sbatch", RunDir(tmp_path / "run")
    sbatch.write_text("#!/bin/bash\n[[ $* == *--test-only* ]] || kill -KILL $PPID\n")
    flags = ["--config", "debug:image", *settings, "--run-dir", run_dir.path]
    child = os.fork()
    if child == 0:
        try:
            slurm_py(*flags)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    sbatch.write_text("#!/bin/bash\n[[ $* == *--test-only* ]] || echo Submitted batch job 12\n")
    done = slurm_py(*flags)
    marker = run_dir.path / "logs" / "submitting"
    assert done.status == 2
    assert (
        f"look for the job with squeue --me --name debug-image, end it with scancel if it is there, and remove {marker}"
        in done.stderr
    )
    marker.unlink()
    assert slurm_py(*flags).status == 0
    submission = last_submission(run_dir)
    assert submission is not None
    assert submission.job_id == "12"
    assert not marker.exists()


@pytest.mark.usefixtures("tmp_is_shared")
def test_two_commands_at_once_submit_a_run_once(
    slurm_py: Command, fake_slurm: Path, settings: list[str], tmp_path: Path
) -> None:
    """The second finds no job at first, and must not remove what the first has made meanwhile."""
    run_dir, other = RunDir(tmp_path / "run"), RunDir(tmp_path / "other")
    arguments = ["--config", "debug:image", *settings, "--run-dir", run_dir.path]
    with hold(RunDir(run_dir.path / "logs")):
        write_json(run_dir.config, resolve_recipe("debug:image", settings[1::2]).model_dump(mode="json"))
        done = slurm_py(*arguments)
    assert done.status == 2
    assert done.stderr.startswith(f"error: another command submits {run_dir.path} at the moment; ")
    shutil.rmtree(run_dir.path)
    record(other, submission_of_job("7"))
    has_submitted = f"[[ $* != *--test-only* ]] || cp -r {other.path} {run_dir.path}"
    (fake_slurm / "sbatch").write_text(f"#!/bin/bash\nPATH=/usr/bin:/bin\n{has_submitted}\n")
    write_json(RunDir(other.path).config, resolve_recipe("debug:image", settings[1::2]).model_dump(mode="json"))
    done = slurm_py(*arguments)
    assert done.status == 2
    assert done.stderr.startswith(f"error: job 7 is RUNNING for {run_dir.path} already; ")
    assert last_submission(run_dir) is not None


@pytest.mark.usefixtures("tmp_is_shared")
def test_a_dry_run_on_a_cluster_checks_and_leaves_all_as_it_was(
    slurm_py: Command, fake_slurm: Path, settings: list[str], tmp_path: Path
) -> None:
    (tmp_path / "empty_run").mkdir()
    before = sorted(tmp_path.rglob("*"))
    flags = ["--partition", "gpu", "--nodes", "2", "--gpus-per-node", "8", "--dry-run"]
    for run_dir in (tmp_path / "empty_run", tmp_path / "a" / "b" / "run"):
        done = slurm_py("--config", "debug:image", *settings, *flags, "--run-dir", run_dir)
        assert done.status == 0, done.stderr
        assert "#SBATCH --gpus-per-node=8\n" in done.stdout
        assert "\n# asks for 2 nodes x 8 ranks, 8 GPUs a node, 2 cores a rank, 240 minutes\n" in done.stdout
    assert sorted({*tmp_path.rglob("*")} - {fake_slurm / "asked"}) == before
    assert (fake_slurm / "asked").exists(), "sbatch was not asked"
    meant = slurm_py("--config", "debug:image", *settings, *flags, "--gpus-per-node", "0", "--run-dir", "run")
    assert meant.status == 0, meant.stderr
    assert "gpus-per-node=" not in meant.stdout
    assert "2 nodes x 1 rank, no GPU: it trains on the CPU, 2 cores" in meant.stdout, "said, and no advice"


def test_gpus_may_be_asked_for_by_other_fields_of_sbatch() -> None:
    nodes = "g0 g0 gpu* idle gpu:8\ng1 g1 gpu* mixed gpu:a100:4,gpu:h100:2\nn0 n0 cpu idle (null)\n"
    bare = RESOURCES.model_copy(update={"gpus_per_node": None, "partition": None})
    with pytest.raises(UserError, match=r"has GPUs \(gpu:a100:4\), .* add --gpus-per-node 4, or"):
        check_gpus(bare.model_copy(update={"sbatch": {}}), nodes)
    with pytest.raises(UserError, match="--gpus-per-node 0 if the CPU is meant"):
        check_gpus(bare.model_copy(update={"sbatch": {"gres": "lustre:1"}}), nodes)
    for field, value in {"gres": "gpu:2", "gpus": "8", "gpus-per-task": 1}.items():
        asked = bare.model_copy(update={"sbatch": {field: value}})
        check_gpus(asked, nodes)
        assert f"GPUs by {field}={value}" in describe_request(asked)
    check_gpus(bare.model_copy(update={"sbatch": {}, "partition": "gpu,cpu"}), nodes)  # Slurm may choose the cpu


def test_a_requeued_job_is_the_same_job(tmp_path: Path) -> None:
    job = TrainJob(run_dir=tmp_path, command="python launch/slurm.py", local_port=1)
    assert pickle.loads(pickle.dumps(job)) == job
    again = job.checkpoint()
    assert (again.function, again.args, again.kwargs) == (job, (), {})


def test_a_job_without_its_run_directory_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"EXECUTOR": "slurm", "FOLDER": str(tmp_path / "logs")}.items():
        monkeypatch.setenv(f"SUBMITIT_{name}", value)
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("SLURM_PROCID", "1")
    (tmp_path / "logs").mkdir()  # of the submission
    with pytest.raises(UserError, match="is not a run directory"):
        TrainJob(run_dir=tmp_path, command="", local_port=1)()
    (outcome,) = outcomes_of_job(tmp_path / "logs", job_id="12", inside=tmp_path).items()
    assert (outcome[0], outcome[1].ended) == (1, "failed")
    assert "UserError: " in outcome[1].reason
    assert "is not a run directory" in outcome[1].reason


def test_a_job_inherits_nothing_of_the_job_that_submits_it(monkeypatch: pytest.MonkeyPatch) -> None:
    inherited = {"RANK": "0", "WORLD_SIZE": "2", "SLURM_PROCID": "0", "TORCHELASTIC_RUN_ID": "none"}
    for name, value in {**inherited, "SLURM_CONF": "cluster.conf"}.items():
        monkeypatch.setenv(name, value)
    with outside_any_job():
        assert not inherited.keys() & os.environ.keys()
        assert os.environ["SLURM_CONF"] == "cluster.conf", "which cluster, not which job"
    assert {name: os.environ[name] for name in inherited} == inherited


@pytest.mark.parametrize(
    ("visible", "slot", "expected"),
    [
        (None, 0, "0,1"),
        (None, 1, "2,3"),
        ("4,6, 7,1", 1, "7,1"),
        ("4,6,-1,1", 0, "4,6"),
        ("4,6,7", 1, "CUDA_VISIBLE_DEVICES=4,6,7 names 3 GPU(s), but 4 are needed here"),
        ("", 0, "CUDA_VISIBLE_DEVICES= names 0 GPU(s), but 2 are needed here"),
        ("GPU-1-1a,GPU-1-1b,GPU-1-1c,GPU-1-1d", 1, "GPU-1-1c,GPU-1-1d"),
        ("GPU-1a2b,gpu1", 0, "CUDA_VISIBLE_DEVICES=GPU-1a2b,gpu1 holds gpu1, which is no GPU"),
        (
            "MIG-1a,MIG-1b",
            0,
            "names parts of a GPU (MIG), and a run can use only one of them, but --gpus-per-node is 2",
        ),
        ("3,5,3,5", 1, "3,5"),
        (None, 2, "torch sees 4 GPU(s) on "),
        ("0,1,2,3,4,5", 2, "torch sees 4 GPU(s) of CUDA_VISIBLE_DEVICES=0,1,2,3,4,5 on "),
    ],
)
@mock.patch.dict(os.environ)  # puts back what the submission changes
def test_runs_on_this_machine_share_the_gpus_that_their_user_may_use(
    visible: str | None, slot: int, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0 if visible == "3,5,3,5" else 4)
    given = record_gpus(monkeypatch)
    resources = RESOURCES.model_copy(update={"nodes": 1, "gpus_per_node": 2})
    plan = SubmissionPlan([], tmp_path, resources, at_a_time=2, name="study", executor="local", slot=slot)
    if " " in expected:
        with pytest.raises(UserError, match=re.escape(expected)):
            _submit_here([], plan, code=tmp_path)
    else:
        _submit_here([], plan, code=tmp_path)
        assert given == [expected]


def record_gpus(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Start no process for a job. Return the list that gets the CUDA_VISIBLE_DEVICES of each one."""
    given: list[str] = []

    def submit_array(self: submitit.LocalExecutor, _: object) -> list[object]:
        self._submit_command("true")
        return []

    def start_controller(*_: object, cuda_devices: str, **__: object) -> SimpleNamespace:
        given.append(cuda_devices)
        return SimpleNamespace(pid=1)

    monkeypatch.setattr(submitit.LocalExecutor, "submit_array", submit_array)
    monkeypatch.setattr("submitit.local.local.start_controller", start_controller)
    return given


@pytest.mark.parametrize(("slot", "expected"), [(0, "MIG-1a"), (1, "MIG-1b")])
@mock.patch.dict(os.environ)
def test_each_run_on_this_machine_may_have_a_part_of_a_gpu(
    slot: int, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1a,MIG-1b")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    given = record_gpus(monkeypatch)
    resources = RESOURCES.model_copy(update={"nodes": 1, "gpus_per_node": 1})
    plan = SubmissionPlan([], tmp_path, resources, at_a_time=2, name="study", executor="local", slot=slot)
    _submit_here([], plan, code=tmp_path)
    assert given == [expected]
    assert all_gpus_of(plan) == ["MIG-1a", "MIG-1b"]


def test_only_the_runs_of_a_study_that_fit_a_pattern_are_chosen(tmp_path: Path) -> None:
    config = resolve_recipe("debug:image")
    runs = [PlannedRun.at(tmp_path / f"{name}-seed{seed}", config) for name in ("a-b", "b-a") for seed in (0, 1)]
    assert [run.run_dir.path.name for run in chosen_runs(runs, "a-*")] == ["a-b-seed0", "a-b-seed1"]
    assert [run.run_dir.path.name for run in chosen_runs(runs, "*-seed1")] == ["a-b-seed1", "b-a-seed1"]
    assert chosen_runs(runs, None) == runs
    with pytest.raises(
        UserError, match='no run of the study fits --only "c-\\*"; its runs have names such as a-b-seed0'
    ):
        chosen_runs(runs, "c-*")
