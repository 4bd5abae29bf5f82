"""Do to real jobs of two nodes what can happen to them: which steps are repeated, and which jobs start again.

One job gets the warnings of Slurm and of users, one after another, and another one loses a node. Both end with the bits
of an undisturbed run, which two gloo ranks train without Slurm. A third run loses a rank, which its batch script starts
again, and then dies of faults without a warning, and is submitted again after each.
All of this goes on at the same time, each job in a thread. The jobs pause at each step, so that they do not end before
their faults, and leave the cores to ranks that start. The tests check what was recorded at each fault; `pytest -s`
prints a line of a table for each.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import safetensors.torch
import torch

from configs import resolve_recipe
from launch.states import RunStatus, status_of
from tests.gloo import run_ranks
from tests.nursery import run_python
from tests.slow_steps import SLOW_STEPS, pausing
from tests.slurm.cluster import NUM_NODES, Cluster
from tests.tiny_data import write_tiny_pair
from trainer.fault_tolerance.stalls import describe_stall
from trainer.observability.wandb_run import offline_steps
from trainer.run_dir import RunDir, is_held
from trainer.train import train

ROOT = Path(__file__).parents[2]
RECIPE = "debug:image"
NUM_RANKS = 2
NUM_STEPS = 60
STEPS_PER_EPOCH = 4
CHECKPOINT_EVERY = 5
STEPS_OF_A_SAVE = 2  # steps that may pass before a checkpoint is whole
A_FEW_STEPS = 6  # steps between a start and the next fault, so that there is a checkpoint among them
PAUSE_SECONDS = 0.15  # in each step
WATCHDOG_SECONDS = 6.0
PATIENCE_SECONDS = 300.0  # the longest wait, on a machine that is busy with other tests
POLL_SECONDS = 0.2
CHECKPOINT = ["checkpoint.json", "encoder.safetensors", "encoder_optimizer.safetensors"]
SECONDS_TO_REPORT_A_FREEZE = 60
# Python runs a file of this name (sitecustomize) first. In a task of srun, such as a rank, this one waits.
GATE = """
import os, time
while "SLURM_STEP_ID" in os.environ and not os.path.exists({gate!r}):
    time.sleep(0.05)
"""


@dataclass(frozen=True)
class Moment:
    """The record of a job after a fault, when it has gone on or has ended.

    `last_step` is the last step logged before. `seconds` is the time until the next new step; None if none came.
    """

    fault: str
    run_dir: RunDir
    last_step: int
    seconds: float | None
    ended_after: float | None
    job: dict[str, str]
    starts: list[dict[str, Any]]
    steps: list[int]
    saved_step: int
    saved: list[str]
    log: str
    stalled: str | None
    stacks: list[str]
    status: RunStatus

    @property
    def steps_lost(self) -> int:
        """The steps that were repeated, or must be."""
        return self.last_step - (self.saved_step if self.seconds is None else int(self.starts[-1]["start_step"]))

    def row(self) -> str:
        if self.seconds is not None:
            by = "in its job" if self.starts[-1]["slurm_restart_count"] == 0 else "by Slurm"
            happened = f"{'saved, ' if self.steps_lost == 0 else ''}started again {by}"
            return f"| {self.fault} | {happened} | {self.steps_lost} | {self.seconds:.0f} |"
        saved = "saved, " if self.job["JobState"] == "CANCELLED" else ""
        happened = f"{saved}{self.job['JobState']} after {self.ended_after:.0f} s, not started again"
        return f"| {self.fault} | {happened} | {self.steps_lost} | |"


class Training:
    """A run that `launch/slurm.py` has submitted to two nodes."""

    def __init__(self, cluster: Cluster, path: Path, settings: Sequence[str], *, flags: Sequence[str]) -> None:
        self.cluster = cluster
        self.run_dir = RunDir(path)
        self.gate = path.with_name(f"{path.name}_gate") / "open"
        self._environ = pausing(PAUSE_SECONDS, cluster.environ)
        self._settings, self._flags = settings, flags
        self.job_id = ""
        self.is_given_up = threading.Event()
        self._num_starts = 0
        self._last_step = 0

    def close_gate(self) -> None:
        """Make ranks that start from now on wait, before they import anything, until the file `gate` is there."""
        self.gate.parent.mkdir()
        (self.gate.parent / "sitecustomize.py").write_text(GATE.format(gate=str(self.gate)))
        self._environ["PYTHONPATH"] += f"{os.pathsep}{self.gate.parent}"

    def submit(self) -> None:
        self._num_starts += 1
        self._last_step = self.step()
        command = [sys.executable, "launch/slurm.py", "--nodes", str(NUM_RANKS), "--config", RECIPE, *self._flags]
        command += ["--run-dir", str(self.run_dir.path)]
        command += [*SLOW_STEPS, *(word for setting in self._settings for word in ("--set", setting))]
        done = run_python(command, cwd=ROOT, env=self._environ)
        assert done.returncode == 0, done.stderr
        (self.job_id,) = re.findall(r"^job (\d+): ", done.stdout, re.MULTILINE)

    def step(self) -> int:
        """Return the last logged step."""
        metrics = self.run_dir.read_metrics()
        return metrics[-1]["step"] if metrics else 0

    def starts(self) -> list[dict[str, Any]]:
        path = self.run_dir.provenance
        starts: list[dict[str, Any]] = json.loads(path.read_text())["starts"] if path.is_file() else []
        return starts

    def job(self) -> dict[str, str]:
        return self.cluster.job(self.job_id)

    def log(self, rank: int = 0) -> str:
        path = self.run_dir.path / "logs" / f"{self.job_id}_{rank}_log.out"
        return path.read_text(errors="replace") if path.is_file() else ""

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            assert time.monotonic() < deadline, f"no {what}: {self.job()}\n{self.log()[-6000:]}"
            assert not self.is_given_up.wait(POLL_SECONDS), f"given up while it waited for the {what}"

    def wait_for_a_few_steps(self) -> None:
        """Wait until this start has done some steps after a checkpoint. Steps of earlier starts do not count."""

        def has_trained() -> bool:
            step = self.step()
            return step >= self._last_step + A_FEW_STEPS and step % CHECKPOINT_EVERY > 2

        self.wait_for(has_trained, "steps")

    def wait_for_the_end(self) -> None:
        """Wait until the job has ended and will not start again."""
        self.wait_for(lambda: self.job().get("JobState") in {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"}, "end")

    def started_again(self, fault: str, do: Callable[[], object]) -> Moment:
        """Do something to the job, and wait until Slurm has started it again, once, and it has gone on."""
        moment, last = time.monotonic(), self.step()
        do()
        self._num_starts += 1

        def has_started() -> bool:
            nonlocal last
            if len(self.starts()) == self._num_starts:
                return True
            last = max(last, self.step())
            return False

        self.wait_for(has_started, f"start after {fault}")
        self.wait_for(lambda: self.step() > last, "new step")
        assert len(self.starts()) == self._num_starts, f"{fault}: it was started more than once"
        self._last_step = last
        return self._look(fault, seconds=time.monotonic() - moment)

    def ended(self, fault: str, do: Callable[[], object]) -> Moment:
        """Do something to the job, and wait until it has ended."""
        moment = time.monotonic()
        do()
        self.wait_for_the_end()
        ended_after = time.monotonic() - moment
        # This machine cannot know that a process of another one is dead before its heartbeat is old.
        self.wait_for(lambda: not is_held(self.run_dir), "lock without a heartbeat")
        self._last_step = self.step()
        return self._look(fault, ended_after=ended_after)

    def _look(self, fault: str, *, seconds: float | None = None, ended_after: float | None = None) -> Moment:
        lines = self.run_dir.metrics.read_text().splitlines(keepends=True)
        starts = self.starts()
        saved_step = int(starts[-1]["start_step"]) if ended_after is None else self.run_dir.latest_step() or 0
        checkpoint = self.run_dir.checkpoint(saved_step)
        moment = Moment(
            fault=fault,
            run_dir=self.run_dir,
            last_step=self._last_step,
            seconds=seconds,
            ended_after=ended_after,
            job=self.job(),
            starts=starts,
            steps=[json.loads(line)["step"] for line in lines if line.endswith("\n")],
            saved_step=saved_step,
            saved=sorted(path.name for path in checkpoint.iterdir()) if checkpoint.is_dir() else [],
            log=self.log(),
            stalled=describe_stall(self.run_dir),
            stacks=[path.read_text() for path in sorted(self.run_dir.stalled.glob("rank_*.txt"))],
            status=status_of(self.run_dir, {}),
        )
        print(moment.row(), flush=True)
        return moment

    def signal_rank(self, rank: int, number: signal.Signals) -> None:
        os.kill(self.cluster.ranks(self.job_id)[rank], number)

    def run_slurm(self, *command: str) -> None:
        assert self.cluster.output(*command) is not None, f"{' '.join(command)} failed"


Stories: TypeAlias = dict[str, Future[list[Moment]]]


def warn_all_that_start(training: Training) -> None:
    """Send all ranks, while they start, the signal by which Slurm warns of a time limit.

    The ranks wait at the gate until then, so that no step depends on the time of the warning.
    """

    def all_have(name: str) -> bool:
        ranks = training.cluster.ranks(training.job_id)
        return len(ranks) == NUM_RANKS and all(signal.SIGUSR2 in signals(rank, name) for rank in ranks)

    training.wait_for(lambda: all_have("SigBlk"), "rank that blocks signals")
    training.run_slurm("scancel", "--signal=USR2", "--full", training.job_id)
    training.wait_for(lambda: all_have("ShdPnd"), "warning by Slurm")
    training.gate.touch()


def signals(pid: int, name: str) -> set[int]:
    """Return a set of signals from /proc/PID/status, such as the blocked (SigBlk) or pending (ShdPnd) ones.

    It is empty if the process has ended.
    """
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        found = re.search(rf"^{name}:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
        assert found is not None
        return {number + 1 for number in range(64) if int(found[1], 16) >> number & 1}
    return set()


def warnings(training: Training) -> Iterator[Moment]:
    """Warn a job in every way in which Slurm and users do; it goes on by itself each time."""
    training.close_gate()
    training.submit()
    warned = "`scancel --signal=USR2 --full` while the ranks start"
    yield training.started_again(warned, lambda: warn_all_that_start(training))
    training.wait_for_a_few_steps()
    urgent = ["sbatch", "--partition=urgent", f"--nodes={NUM_NODES}", "--exclusive", "--output=/dev/null"]
    urgent += ["--wrap=sleep 1"]
    yield training.started_again("preempted, with notice of 30 s (SIGTERM)", lambda: training.run_slurm(*urgent))
    yield training.ended("nothing more", lambda: None)


def lost_node(training: Training) -> Iterator[Moment]:
    """Take a node away from a job, which goes on by itself on others."""
    cluster = training.cluster
    training.submit()
    training.wait_for_a_few_steps()
    lost = cluster.nodes(training.job_id)[1]
    yield training.started_again("a node's slurmd and all its processes die", lambda: cluster.kill_node(lost))
    yield training.ended("nothing more", lambda: None)


def deaths(training: Training) -> Iterator[Moment]:
    """End a job in several ways, and submit it again after each except the last."""
    training.submit()
    training.wait_for_a_few_steps()
    yield training.started_again("a rank is killed (`kill -9`)", lambda: training.signal_rank(1, signal.SIGKILL))
    training.wait_for_a_few_steps()
    yield training.ended("a rank freezes (`kill -STOP`)", lambda: training.signal_rank(1, signal.SIGSTOP))
    training.submit()
    training.wait_for_a_few_steps()
    yield training.ended("`scancel`", lambda: training.run_slurm("scancel", training.job_id))


def train_undisturbed(settings: Sequence[str], path: Path) -> None:
    """Train as one of the gloo ranks that are there already."""
    train(resolve_recipe(RECIPE, settings), RunDir(path), device=torch.device("cpu"), command="")


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    data = write_tiny_pair(tmp_path_factory.mktemp("data"), num_train=16 * STEPS_PER_EPOCH, num_test=20)
    return [
        f"data.train_dir={data / 'train'}",
        f"data.test_dir={data / 'test'}",
        "global_batch_size=16",
        "encoder.kind=convnet",
        "encoder.batch_norm=local",
        f"num_epochs={NUM_STEPS // STEPS_PER_EPOCH}",
        f"checkpoint_every_steps={CHECKPOINT_EVERY}",
        f"watchdog.startup_seconds={PATIENCE_SECONDS}",
    ]


@pytest.fixture(scope="module")
def stories(cluster: Cluster, settings: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stories]:
    """Start the stories. At the end the cluster is left as it was found, even if a story has failed."""
    runs = tmp_path_factory.mktemp("runs")
    whole = [*settings, "data.num_workers=0", "tracking.wandb=offline"]
    streamed = [*settings, "data.num_workers=1", "data.placement=stream", f"watchdog.limit_seconds={WATCHDOG_SECONDS}"]
    hour = ["--time-minutes", "60"]
    warned = Training(cluster, runs / "warned", whole, flags=hour)
    others = ["--partition", "other", *hour]
    bereft = Training(cluster, runs / "bereft", whole, flags=others)
    killed = Training(cluster, runs / "killed", [*streamed, "tracking.wandb=disabled"], flags=others)
    with ThreadPoolExecutor() as pool:
        yield {
            "warnings": pool.submit(lambda: list(warnings(warned))),
            "lost_node": pool.submit(lambda: list(lost_node(bereft))),
            "deaths": pool.submit(lambda: list(deaths(killed))),
        }
        for training in (warned, bereft, killed):
            training.is_given_up.set()
    cluster.cancel_all()
    cluster.repair_nodes()


@pytest.fixture(scope="module")
def undisturbed(stories: Stories, settings: list[str], tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """Return the run of two gloo ranks, while the stories go on."""
    path = tmp_path_factory.mktemp("undisturbed") / "run"
    whole = [*settings, "data.num_workers=0", "tracking.wandb=disabled"]
    run_ranks(train_undisturbed, NUM_RANKS, whole, path, timeout_s=PATIENCE_SECONDS)
    return RunDir(path)


@pytest.mark.parametrize(("story", "restarts"), [("warnings", 2), ("lost_node", 1)])
def test_after_all_that_it_is_the_run_that_nothing_disturbed(
    story: str, restarts: int, undisturbed: RunDir, stories: Stories
) -> None:
    """On a CPU the parameters and the losses are equal bit for bit, and W&B has one run with every step once."""
    last = stories[story].result()[-1]
    assert (last.job["JobState"], last.job["ExitCode"], last.job["Restarts"]) == ("COMPLETED", "0:0", str(restarts))
    run_dir = last.run_dir
    assert run_dir.latest_step() == NUM_STEPS
    names = sorted(path.name for path in undisturbed.checkpoint(NUM_STEPS).glob("*.safetensors"))
    assert names
    for name in names:
        expected, found = (
            safetensors.torch.load_file(directory.checkpoint(NUM_STEPS) / name) for directory in (undisturbed, run_dir)
        )
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())
    assert losses(run_dir) == losses(undisturbed)
    assert list(losses(run_dir)) == list(range(1, NUM_STEPS + 1))
    assert wandb_steps(run_dir, num_starts=restarts + 1) == list(range(1, NUM_STEPS + 1))


@pytest.mark.parametrize(
    ("number", "why"),
    [(0, "as SIGUSR2 asked"), (1, "as SIGTERM asked")],
    ids=["while_it_starts", "preempted"],
)
def test_who_is_warned_saves_and_is_started_again(number: int, why: str, stories: Stories) -> None:
    """One requeue of the same job, one whole checkpoint of the step after which all stopped, and no lost step."""
    moment = stories["warnings"].result()[number]
    check_requeued(moment, restarts=number + 1)
    assert moment.steps_lost == 0
    step = moment.starts[-1]["start_step"]
    assert moment.log.count(f"stopped after step {step}, {why};") == 1
    assert moment.log.count("asking Slurm to start this job again") == number + 1


def test_a_node_that_dies_costs_the_steps_since_the_last_checkpoint(stories: Stories) -> None:
    moment = stories["lost_node"].result()[0]
    check_requeued(moment, restarts=1)
    newest = moment.last_step // CHECKPOINT_EVERY * CHECKPOINT_EVERY
    # A thread writes checkpoints during training, so the newest may not have been whole.
    possible = [newest - CHECKPOINT_EVERY, newest] if moment.last_step <= newest + STEPS_OF_A_SAVE else [newest]
    assert moment.starts[-1]["start_step"] in [max(moment.starts[-2]["start_step"], step) for step in possible]
    assert 0 <= moment.steps_lost <= CHECKPOINT_EVERY + STEPS_OF_A_SAVE


def check_requeued(moment: Moment, *, restarts: int) -> None:
    assert moment.job["Restarts"] == str(restarts)
    starts = moment.starts
    assert [start["slurm_job_id"] for start in starts] == [moment.job["JobId"]] * (restarts + 1)
    assert [start["slurm_restart_count"] for start in starts] == list(range(restarts + 1))
    assert [start["start_step"] for start in starts] == sorted(start["start_step"] for start in starts)
    assert moment.steps == list(range(1, len(moment.steps) + 1))
    assert moment.saved == CHECKPOINT


def test_a_rank_that_is_killed_is_started_again_in_the_same_job(stories: Stories) -> None:
    moment = stories["deaths"].result()[0]
    assert moment.job["Restarts"] == "0"
    assert [start["slurm_job_id"] for start in moment.starts] == [moment.job["JobId"]] * 2
    assert 0 <= moment.steps_lost <= CHECKPOINT_EVERY + STEPS_OF_A_SAVE
    assert moment.starts[-1]["start_step"] % CHECKPOINT_EVERY == 0
    assert moment.steps == list(range(1, len(moment.steps) + 1))
    assert moment.log.count("a rank died without a message") == 1


def test_a_rank_that_freezes_ends_the_job(stories: Stories) -> None:
    """The job ends with an error and is not started again. Only steps since the last checkpoint are lost."""
    moment = stories["deaths"].result()[1]
    check_over(moment, starts=1)
    assert moment.job["JobState"] == "FAILED"
    assert moment.job["ExitCode"] != "0:0"
    assert moment.ended_after is not None
    assert moment.ended_after < SECONDS_TO_REPORT_A_FREEZE
    assert 0 <= moment.steps_lost <= CHECKPOINT_EVERY + STEPS_OF_A_SAVE
    assert moment.saved_step % CHECKPOINT_EVERY == 0
    assert moment.stalled is not None
    assert "rank 1 on " in moment.stalled
    assert moment.stalled in moment.status.reason
    for own in moment.stacks:
        assert re.match(r"rank \d on .*, in step \d+ \(\w+\), reading shard-\d+\.tar", own)
        assert 'File "' in own or own.startswith("rank 1 on ")
    again = stories["deaths"].result()[2]
    assert again.starts[-1]["start_step"] == moment.saved_step, "submitted again, it goes on from there"


def test_what_is_cancelled_is_saved_and_stays_cancelled(
    stories: Stories, undisturbed: RunDir, cluster: Cluster
) -> None:
    moment = stories["deaths"].result()[2]
    check_over(moment, starts=2)
    assert moment.job["JobState"] == "CANCELLED"
    assert moment.steps_lost == 0
    assert moment.status.state == "stopped"
    run_dir = moment.run_dir
    expected = losses(undisturbed)
    assert losses(run_dir) == {step: expected[step] for step in moment.steps}, "submitted again, it is the same run"
    assert not cluster.output("squeue", "--noheader", "--jobs", moment.job["JobId"])


def check_over(moment: Moment, *, starts: int) -> None:
    assert moment.job["Restarts"] == "0"
    assert len(moment.starts) == starts + 1 == len({start["slurm_job_id"] for start in moment.starts}) + 1
    assert moment.steps == list(range(1, moment.last_step + 1))
    assert moment.saved == (CHECKPOINT if moment.saved_step else [])


def wandb_steps(run_dir: RunDir, *, num_starts: int) -> list[int]:
    """Return the steps in the files of all starts, which are one run, read by W&B's own reader."""
    files = sorted(run_dir.path.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.parent.name)
    assert len(files) == num_starts
    assert {path.stem for path in files} == {f"run-{run_dir.wandb_run_id.read_text().strip()}"}
    return [step for path in files for step in offline_steps(path)]


def losses(run_dir: RunDir) -> dict[int, float]:
    return {entry["step"]: entry["train/loss"] for entry in run_dir.read_metrics()}
