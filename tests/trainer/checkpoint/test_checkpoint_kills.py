"""A kill or a power cut at any operation of a save leaves a checkpoint that loads, the old or the new one.

Processes to kill are forked from one that has imported everything and never started a thread, so a kill takes a few
milliseconds. Every number of a checkpoint is its step: a mixture of two would show.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from configs import resolve_recipe
from data_pipeline.core.errors import UserError
from tests.nursery import run_python
from tests.real_data import REPOSITORY
from tests.trainer.observability.tracked import open_tracker
from trainer.checkpoint.restore import restore
from trainer.checkpoint.save import CheckpointWriter
from trainer.distributed.engines.ddp_engine import DDPEngine
from trainer.objectives import PureObjective, nt_xent_loss
from trainer.optim.optimizers import AdamConfig
from trainer.run_dir import RunDir

KEEP = 2
NT_XENT = PureObjective(nt_xent_loss, temperature=0.5)


def build() -> dict[str, DDPEngine]:
    return {
        "encoder": DDPEngine(nn.Linear(64, 32), optimizer=AdamConfig()),
        "viewmaker": DDPEngine(nn.Linear(8, 8), optimizer=AdamConfig()),
    }


def fill(engines: dict[str, DDPEngine], step: int) -> None:
    for engine in engines.values():
        for tensor in [*engine.module_state().values(), *engine.optimizer_state().values()]:
            tensor.fill_(step)


def restored(run_dir: RunDir) -> int:
    """Load the checkpoint and return its step; every number in it must be that step."""
    engines, extra = build(), torch.zeros(())
    step = restore(run_dir, engines, NT_XENT, extra={"step": extra}).step
    for engine in engines.values():
        for tensor in [*engine.module_state().values(), *engine.optimizer_state().values(), extra]:
            if step:
                assert (tensor == step).all(), f"a mixture at step {step}"
    return step


def save_on(run_dir: RunDir, *, until: int) -> None:
    """Go on from the newest checkpoint as a training run does, saving after every step."""
    engines = build()
    step = restore(run_dir, engines, NT_XENT, extra={"step": torch.zeros(())}).step
    with CheckpointWriter(run_dir, keep=KEEP) as writer:
        while step < until:
            step += 1
            fill(engines, step)
            writer.save(step, engines=engines, objective_state={}, extra={"step": torch.tensor(float(step))})


def fork(action: Callable[[], Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        action()
        os._exit(0)
    finally:  # whatever happens, the child must not go on as its parent
        os._exit(1)


def kill_at_each_operation(path: Path) -> dict[str, int]:
    """From two checkpoints, kill at the first operation on the run's files, then at the second, until a save ends."""
    torch.set_num_threads(1)
    seen: Counter[str] = Counter()
    assert os.waitpid(fork(lambda: save_on(RunDir(path / "0"), until=KEEP)), 0)[1] == 0
    for operation in range(1, 1000):
        run_dir = RunDir(shutil.copytree(path / "0", path / str(operation)))

        def save_and_die(run_dir: RunDir = run_dir, last: int = operation) -> None:
            count = 0

            def count_down(event: str, arguments: tuple[Any, ...]) -> None:
                nonlocal count
                if event.split(".")[0] in {"open", "os", "shutil"} and str(run_dir.path) in str(arguments):
                    count += 1
                    if count == last:
                        os.kill(os.getpid(), signal.SIGKILL)

            sys.addaudithook(count_down)
            save_on(run_dir, until=KEEP + 1)

        _, status = os.waitpid(fork(save_and_die), 0)
        found = restored(run_dir)
        shutil.rmtree(run_dir.path)
        if not os.WIFSIGNALED(status):
            assert os.waitstatus_to_exitcode(status) == 0
            assert found == KEEP + 1
            return {"operations": operation - 1, **seen}
        assert found in {KEEP, KEEP + 1}, f"operation {operation}: step {found} loads"
        seen["before" if found == KEEP else "after"] += 1
    raise AssertionError("a save has no end")


@pytest.mark.process
def test_a_kill_at_each_operation_on_the_files(tmp_path: Path) -> None:
    code = (
        "import json, sys\n"
        "from pathlib import Path\n"
        f"from {__name__} import kill_at_each_operation\n"
        "print(json.dumps(kill_at_each_operation(Path(sys.argv[1]))))\n"
    )
    done = run_python([sys.executable, "-c", code, tmp_path], cwd=REPOSITORY)  # a process that never started a thread
    assert done.returncode == 0, done.stderr
    seen: dict[str, int] = json.loads(done.stdout)
    assert seen["operations"] > 20, seen
    assert seen["before"] > 5, seen
    assert seen["after"] > 5, seen


@pytest.mark.parametrize("leftover", ["step_00000001", ".step_00000001.partial", ".step_00000001.gone"])
def test_what_a_kill_leaves_is_cleared_by_the_next_save(leftover: str, tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    (run_dir.checkpoints / leftover).mkdir(parents=True)
    (run_dir.checkpoints / leftover / "encoder.safetensors").write_bytes(b"half")
    with suppress(ValueError):  # where nothing whole is there yet, the user is asked
        restored(run_dir)
    with CheckpointWriter(run_dir, keep=KEEP) as writer:
        for step in (1, 2):
            engines = build()
            fill(engines, step)
            writer.save(step, engines=engines, objective_state={}, extra={"step": torch.tensor(float(step))})
    assert sorted(path.name for path in run_dir.checkpoints.iterdir()) == ["step_00000001", "step_00000002"]
    assert restored(run_dir) == 2


class Disk:
    """A disk that keeps, of a directory, what was flushed. It loses the flush of number `lost`, from 0."""

    def __init__(self, directory: Path, *, lost: int | None = None) -> None:
        self._directory, self._lost = directory, lost
        self._contents: dict[int, bytes] = {}  # of files, by inode
        self._names: dict[int, list[os.DirEntry[str]]] = {}  # in directories, by inode
        self.images: list[Path] = []  # what a power cut after each flush would leave

    def fsync(self, descriptor: int) -> None:
        if len(self.images) != self._lost:
            inode, opened = os.fstat(descriptor).st_ino, Path(f"/proc/self/fd/{descriptor}").resolve()
            if opened.is_dir():
                self._names[inode] = list(os.scandir(opened))
            else:
                self._contents[inode] = opened.read_bytes()
        self.images.append(self._directory.with_name(f"{self._directory.name}_{len(self.images)}"))
        self._rebuild(self._directory.stat().st_ino, self.images[-1])

    def _rebuild(self, inode: int, copy: Path) -> None:
        copy.mkdir()
        for entry in self._names.get(inode, []):
            if entry.is_dir(follow_symlinks=False):
                self._rebuild(entry.inode(), copy / entry.name)
            else:
                (copy / entry.name).write_bytes(self._contents.get(entry.inode(), b""))


def save_with_metrics(run_dir: RunDir, disk: Disk, monkeypatch: pytest.MonkeyPatch, *, num_steps: int) -> None:
    config = resolve_recipe("debug:image", ["tracking.wandb=disabled"])
    monkeypatch.setattr(os, "fsync", disk.fsync)
    engines = build()
    run_dir.path.mkdir()
    tracker = open_tracker(run_dir, config)
    with CheckpointWriter(run_dir, keep=9) as writer:
        for step in range(1, num_steps + 1):
            fill(engines, step)
            tracker.log(step, {"epoch": 0})
            writer.save(step, engines=engines, objective_state={}, extra={"step": torch.tensor(float(step))})
    tracker.close()
    monkeypatch.undo()


def left_by(image: Path) -> tuple[int, int | None, list[int]]:
    """Return the step that loads, the step in LATEST, and the steps in metrics.jsonl."""
    run_dir = RunDir(image)
    try:
        step = restored(run_dir)
    except UserError:  # none is whole
        step = 0
    return step, run_dir.latest_step(), [entry["step"] for entry in run_dir.read_metrics()]


def test_a_power_cut_after_any_flush_leaves_a_checkpoint_with_its_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(tmp_path / "run")
    save_with_metrics(RunDir(tmp_path / "run"), disk, monkeypatch, num_steps=3)
    per_save = len(disk.images) // 3
    for number, image in enumerate(disk.images):
        whole = (number + 1) // per_save  # checkpoints that were written before the cut
        step, latest, logged = left_by(image)
        assert step in {whole, whole + 1}, image
        assert latest in {whole or None, step}, image
        assert logged[:whole] == list(range(1, whole + 1)), image


def test_no_flush_of_a_checkpoint_can_be_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(tmp_path / "run")
    save_with_metrics(RunDir(tmp_path / "run"), disk, monkeypatch, num_steps=1)
    assert left_by(disk.images[-1]) == (1, 1, [1])
    assert len(disk.images) == 11, "five states, their index, three directories, the metrics, and LATEST"
    for lost in range(len(disk.images)):
        without = Disk(tmp_path / f"without_{lost}", lost=lost)
        save_with_metrics(RunDir(tmp_path / f"without_{lost}"), without, monkeypatch, num_steps=1)
        assert left_by(without.images[-1]) != (1, 1, [1]), f"the flush of number {lost} is not needed"
