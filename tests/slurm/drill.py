"""Everything that can happen to a job of four nodes, done to real ones: what is lost, what starts again, what does not.

One job suffers, one after another, what Slurm and users do to jobs, and ends in the bits of an undisturbed run; another
dies of what is nobody's warning, and is submitted again each time. Each test is one of these moments; they build on
those before them. DRILL_TABLE=FILE writes the table that the last test prints.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from tests.slurm.cluster import NODE_NAMES, Cluster
from tests.tiny_data import write_tiny_pair
from trainer.rundir import RunDir

wandb_internal_pb2: Any = importlib.import_module("wandb.proto.wandb_internal_pb2")  # made at import, without types

ROOT = Path(__file__).parents[2]
NUM_STEPS = 320
STEPS_PER_EPOCH = 4
CHECKPOINT_EVERY = 40
A_FEW_STEPS = 12  # that are done after a start before the next blow
WATCHDOG_SECONDS = 4.0
NUM_FAULTS = 9
BLOCK_BYTES = 32768  # of W&B's files


@dataclass(frozen=True)
class Row:
    """One line of the table; `lost` counts the steps that were done twice, `seconds` is until the next new step."""

    fault: str
    outcome: str
    lost: int
    seconds: float | None


@dataclass
class Training:
    """A run, by way of `launch/slurm.py` on four nodes."""

    cluster: Cluster
    run_dir: RunDir
    settings: Sequence[str]
    job_id: str = ""
    num_starts: int = 0
    table: list[Row] = field(default_factory=list)

    def submit(self, *more: str) -> None:
        self.num_starts += 1
        command = [sys.executable, "launch/slurm.py", "--nodes", "4", "--config", "debug:image"]
        command += ["--run-dir", str(self.run_dir.path), "--time-minutes", "60", *more]
        command += [word for setting in self.settings for word in ("--set", setting)]
        done = subprocess.run(command, cwd=ROOT, env=self.cluster.environ, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        (self.job_id,) = re.findall(r"^job (\d+): 4 rank\(s\) on 4 node\(s\)$", done.stdout, re.MULTILINE)

    def step(self) -> int:
        """The last one that was logged."""
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

    def wait_for(self, condition: Callable[[], bool], what: str, *, seconds: float = 120) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"no {what}: {self.job()}\n{self.log()[-6000:]}"
            time.sleep(0.1)

    def wait_for_a_few_steps(self) -> None:
        def has_trained() -> bool:
            starts = self.starts()
            return len(starts) == self.num_starts and self.step() >= starts[-1]["start_step"] + A_FEW_STEPS

        self.wait_for(has_trained, "steps")

    def wait_for_the_end(self) -> dict[str, str]:
        """What scontrol says of the job when it is over: not in the queue, and so not to be started again."""
        self.wait_for(lambda: self.job().get("JobState") in {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"}, "end")
        return self.job()

    def started_again(self, fault: str, do: Callable[[], object]) -> Row:
        """Do something to the job, and wait until Slurm has started it again and it has gone on."""
        before, moment = self.starts(), time.monotonic()
        do()
        last = 0

        def has_started() -> bool:
            nonlocal last
            if len(self.starts()) > len(before):
                return True
            last = max(last, self.step())
            return False

        self.wait_for(has_started, f"start after {fault}", seconds=180)
        self.num_starts += 1
        start_step = self.starts()[-1]["start_step"]
        self.wait_for(lambda: self.step() > start_step, "step")
        return self._add(fault, "started again by Slurm", last - start_step, time.monotonic() - moment)

    def failed(self, fault: str, do: Callable[[], object]) -> Row:
        """Do something to the job, and wait until it has ended and is not to be started again."""
        moment = time.monotonic()
        do()
        job = self.wait_for_the_end()
        seconds = time.monotonic() - moment
        step, latest = self.step(), self.run_dir.latest_step() or 0
        outcome = f"{job['JobState']} after {seconds:.0f} s; submitted again"
        if job["JobState"] == "CANCELLED":
            outcome = f"{job['JobState']}, saved"
        return self._add(fault, outcome, step - latest, None)

    def _add(self, fault: str, outcome: str, lost: int, seconds: float | None) -> Row:
        row = Row(fault, outcome, lost, seconds)
        self.table.append(row)
        print(row, flush=True)
        return row

    def scancel(self, *arguments: str) -> None:
        assert self.cluster.output("scancel", *arguments, self.job_id) is not None

    def signal_rank(self, rank: int, number: signal.Signals) -> None:
        os.kill(self.cluster.ranks(self.job_id)[rank], number)


def set_time_limit(training: Training, minutes: int) -> None:
    assert training.cluster.output("scontrol", "update", f"JobId={training.job_id}", f"TimeLimit={minutes}") is not None


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    data = write_tiny_pair(tmp_path_factory.mktemp("data"), num_train=16 * STEPS_PER_EPOCH, num_test=20)
    return [
        f"data.train_dir={data / 'train'}",
        f"data.test_dir={data / 'test'}",
        "data.num_workers=0",
        "global_batch_size=16",
        f"num_epochs={NUM_STEPS // STEPS_PER_EPOCH}",
        f"checkpoint_every_steps={CHECKPOINT_EVERY}",
        "tracking.wandb=offline",
    ]


@pytest.fixture(scope="module")
def reference(cluster: Cluster, settings: list[str], tmp_path_factory: pytest.TempPathFactory) -> Training:
    """A job beside the disturbed one, to which nothing happens; it runs while that one waits to be started again."""
    training = Training(cluster, RunDir(tmp_path_factory.mktemp("undisturbed") / "run"), settings)
    training.submit("--partition", "urgent")
    return training


@pytest.fixture(scope="module")
def undisturbed(reference: Training) -> RunDir:
    job = reference.wait_for_the_end()
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "0"), reference.log()
    return reference.run_dir


@pytest.fixture(scope="module")
def table() -> Iterator[list[Row]]:
    rows: list[Row] = []
    yield rows
    header = "| fault | what happened | steps lost | seconds to the next new step |\n|---|---|---|---|\n"
    lines = [
        f"| {row.fault} | {row.outcome} | {row.lost} | {'' if row.seconds is None else f'{row.seconds:.0f}'} |\n"
        for row in rows
    ]
    text = header + "".join(lines)
    print("\n" + text)
    if path := os.environ.get("DRILL_TABLE"):
        Path(path).write_text(text)


@pytest.fixture(scope="module")
def warned(
    cluster: Cluster,
    settings: list[str],
    reference: Training,
    table: list[Row],
    tmp_path_factory: pytest.TempPathFactory,
) -> Training:
    """The job that Slurm and its users disturb."""
    training = Training(cluster, RunDir(tmp_path_factory.mktemp("warned") / "run"), settings, table=table)
    training.submit()
    return training


@pytest.fixture(scope="module")
def killed(
    cluster: Cluster, settings: list[str], table: list[Row], tmp_path_factory: pytest.TempPathFactory
) -> Training:
    """The run whose jobs die."""
    streams = ["data.placement=stream", "data.num_workers=1", f"watchdog.limit_seconds={WATCHDOG_SECONDS}"]
    settings = [setting for setting in settings if not setting.startswith("data.num_workers")] + streams
    return Training(cluster, RunDir(tmp_path_factory.mktemp("killed") / "run"), settings, table=table)


def check_requeued(training: Training, row: Row, *, restarts: int, lost: range = range(1)) -> None:
    """One requeue, in the same job; a checkpoint of the step after which all stopped, and none of it done twice."""
    assert training.job()["Restarts"] == str(restarts)
    starts = training.starts()
    assert [start["slurm_job_id"] for start in starts] == [training.job_id] * (restarts + 1)
    assert row.lost in lost
    assert starts[-1]["start_step"] >= starts[-2]["start_step"]
    assert starts[-1]["start_step"] + row.lost > starts[-2]["start_step"]
    steps = [entry["step"] for entry in map(json.loads, training.run_dir.metrics.read_text().splitlines())]
    assert steps == list(range(1, len(steps) + 1))


def test_a_signal_to_one_rank(warned: Training) -> None:
    warned.wait_for_a_few_steps()
    row = warned.started_again("SIGUSR2 to rank 2 alone", lambda: warned.signal_rank(2, signal.SIGUSR2))
    check_requeued(warned, row, restarts=1)
    step = warned.starts()[-1]["start_step"]
    assert (
        f"stopped after step {step}, as a signal to another rank asked; it goes on from there when the job starts again"
        in warned.log()
    )


def test_a_signal_to_the_job(warned: Training) -> None:
    """With --full the shell of the batch script and srun get it too, and must not die of it."""
    warned.wait_for_a_few_steps()
    row = warned.started_again("scancel --signal=USR2 --full", lambda: warned.scancel("--signal=USR2", "--full"))
    check_requeued(warned, row, restarts=2)


def test_a_time_limit(warned: Training) -> None:
    """Two minutes are left, and so Slurm warns when it next looks at the limits, which it does every 30 seconds."""
    pickled = warned.run_dir.path / "logs" / f"{warned.job_id}_submitted.pkl"
    before = pickled.read_bytes()

    def limit() -> None:
        set_time_limit(warned, 2)
        warned.wait_for(lambda: warned.job()["Restarts"] == "3", "requeue")
        set_time_limit(warned, 60)

    row = warned.started_again("time limit", limit)
    check_requeued(warned, row, restarts=3)
    assert pickled.read_bytes() != before, "time limits are counted"


@pytest.mark.usefixtures("undisturbed")  # which has ended, and left its share of the nodes
def test_preemption(warned: Training) -> None:
    """Another job takes a node away; Slurm gives notice of it by SIGTERM, and would itself requeue after 30 seconds."""
    warned.wait_for_a_few_steps()

    def preempt() -> None:
        urgent = ["sbatch", "--partition=urgent", "--nodes=1", "--exclusive", "--output=/dev/null", "--wrap=sleep 1"]
        assert warned.cluster.output(*urgent) is not None

    row = warned.started_again("preempted with notice of 30 s", preempt)
    check_requeued(warned, row, restarts=4)
    assert "as SIGTERM asked; it goes on from there when the job starts again" in warned.log()


def test_a_node_that_dies(warned: Training) -> None:
    """Its slurmd and all its processes are gone from one moment to the next; another one stands in for it."""
    warned.wait_for_a_few_steps()

    def die() -> None:
        warned.cluster.kill_node(NODE_NAMES[3])
        warned.cluster.replace_node(NODE_NAMES[3])

    row = warned.started_again("a node dies", die)
    check_requeued(warned, row, restarts=5, lost=range(CHECKPOINT_EVERY + 1))


def test_after_all_that_it_is_the_run_that_nothing_disturbed(warned: Training, undisturbed: RunDir) -> None:
    job = warned.wait_for_the_end()
    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("COMPLETED", "0:0", "5")
    check_whole(warned.run_dir, undisturbed)
    (run_id,) = {path.stem for path in warned.run_dir.path.glob("wandb/offline-run-*/*.wandb")}
    assert run_id == f"run-{warned.run_dir.wandb_run_id.read_text().strip()}"
    files = sorted(warned.run_dir.path.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime)
    assert len(files) == 6
    by_start = [wandb_steps(path) for path in files]
    for number, (steps, start) in enumerate(zip(by_start, warned.starts(), strict=True)):
        assert steps[0] == start["start_step"] + 1
        assert steps == list(range(steps[0], steps[-1] + 1))
        if number in {1, 2, 3}:
            assert steps[0] == by_start[number - 1][-1] + 1
        if number == 4:  # SIGTERM has reached W&B's own process too, and its last steps are in metrics.jsonl alone
            assert 0 < steps[0] - by_start[number - 1][-1] <= 1 + A_FEW_STEPS
    assert by_start[-1][-1] == NUM_STEPS


def check_whole(run_dir: RunDir, undisturbed: RunDir) -> None:
    """All steps, each once, and the bits of the run that nothing disturbed."""
    assert run_dir.latest_step() == NUM_STEPS
    expected, found = (
        safetensors.torch.load_file(directory.checkpoint(NUM_STEPS) / "encoder.safetensors")
        for directory in (undisturbed, run_dir)
    )
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    curves = [
        [(entry["step"], entry["train/loss"]) for entry in map(json.loads, directory.metrics.read_text().splitlines())]
        for directory in (undisturbed, run_dir)
    ]
    assert curves[0] == curves[1]
    assert [step for step, _ in curves[1]] == list(range(1, NUM_STEPS + 1))


def wandb_steps(path: Path) -> list[int]:
    """The steps in a file that W&B's client has left: a log in the format of LevelDB, of its own records."""
    content, position, steps, record = path.read_bytes(), 7, [], b""  # behind the file's own header
    while position + 7 <= len(content):
        if (room := BLOCK_BYTES - position % BLOCK_BYTES) < 7:
            position += room  # a header is never cut in two
            continue
        _, size, kind = struct.unpack_from("<IHB", content, position)
        record += content[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in {1, 4}:  # a whole record, or the last part of one
            message = wandb_internal_pb2.Record.FromString(record)
            if message.HasField("history"):
                steps.append(int(message.history.step.num))
            record = b""
    return steps


def test_a_rank_that_is_killed(killed: Training) -> None:
    killed.submit()
    killed.wait_for_a_few_steps()
    row = killed.failed("a rank is killed (kill -9)", lambda: killed.signal_rank(2, signal.SIGKILL))
    check_failed(killed, row)
    assert (killed.run_dir.path / "stalled.txt").read_text().startswith("rank 2 ")


def test_a_rank_that_freezes(killed: Training) -> None:
    killed.submit()
    killed.wait_for_a_few_steps()
    moment = time.monotonic()
    row = killed.failed("a rank freezes (kill -STOP)", lambda: killed.signal_rank(1, signal.SIGSTOP))
    assert time.monotonic() - moment < 60
    check_failed(killed, row)
    report = (killed.run_dir.path / "stalled.txt").read_text()
    assert report.startswith("rank 1 ")
    assert "stopped by a signal" in report


def test_an_exception_in_one_rank(killed: Training) -> None:
    """The death of a process that decodes for a rank is an exception there, and a lost connection to the others."""
    killed.submit()
    killed.wait_for_a_few_steps()

    def end_the_reader() -> None:
        for reader in killed.cluster.children(killed.cluster.ranks(killed.job_id)[3]):
            os.kill(reader, signal.SIGKILL)

    row = killed.failed("a Python exception in rank 3", end_the_reader)
    check_failed(killed, row)
    assert re.search(r"RuntimeError: DataLoader worker .* is killed", killed.log(3))


def check_failed(training: Training, row: Row) -> None:
    """Not in the queue any more, with an error, and never started again."""
    job = training.job()
    assert job["JobState"] == "FAILED"
    assert job["ExitCode"] != "0:0"
    assert job["Restarts"] == "0"
    assert training.cluster.output("squeue", "--noheader") == ""
    assert 0 <= row.lost <= CHECKPOINT_EVERY


def test_what_is_cancelled_is_saved_and_stays_cancelled(killed: Training) -> None:
    killed.submit()
    killed.wait_for_a_few_steps()
    row = killed.failed("scancel", killed.scancel)
    job = killed.job()
    assert (job["JobState"], job["Restarts"]) == ("CANCELLED", "0")
    assert row.lost == 0
    assert "is not asked for anything" in killed.log()


def test_what_was_submitted_again_goes_on_to_the_same_end(
    killed: Training, undisturbed: RunDir, table: list[Row]
) -> None:
    killed.submit()
    assert killed.wait_for_the_end()["JobState"] == "COMPLETED"
    job_ids = [start["slurm_job_id"] for start in killed.starts()]
    assert len(set(job_ids)) == len(job_ids) == killed.num_starts
    check_whole(killed.run_dir, undisturbed)
    assert len(table) == NUM_FAULTS
