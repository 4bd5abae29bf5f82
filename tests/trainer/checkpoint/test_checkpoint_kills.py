"""A kill or a power cut at any operation of a save leaves a checkpoint that loads, the old or the new one.

Every number of a checkpoint is its step: a mixture of two would show.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from configs import resolve_recipe
from data_pipeline.core.errors import UserError
from trainer.checkpoint.restore import restore
from trainer.checkpoint.save import CheckpointWriter
from trainer.distributed.engines.ddp_engine import DDPEngine
from trainer.objectives import PureObjective, nt_xent_loss
from trainer.optim.optimizers import AdamConfig
from trainer.run_dir import RunDir
from trainer.training_log import open_tracker

KEEP = 2
NT_XENT = PureObjective(nt_xent_loss, temperature=0.5)


class Disk:
    """A disk with a run directory, which knows what of it was flushed. It loses the flush of number `lost`, from 0."""

    def __init__(self, directory: Path, *, lost: int | None = None) -> None:
        self.run_dir, self._lost = RunDir(directory / "run"), lost
        self.num_flushed, self.images = 0, 0
        self.takes_images = False
        self._contents: dict[int, bytes] = {}  # of files, by inode
        self._names: dict[int, list[os.DirEntry[str]]] = {}  # in directories, by inode
        self._opened: list[int] = []  # so that no other file gets an inode of these
        self.run_dir.path.mkdir(parents=True)

    def __del__(self) -> None:
        for descriptor in self._opened:
            os.close(descriptor)

    def flush(self, descriptor: int) -> None:
        self._opened.append(os.dup(descriptor))
        if self.num_flushed != self._lost:
            inode, opened = os.fstat(descriptor).st_ino, Path(f"/proc/self/fd/{descriptor}").resolve()
            if opened.is_dir():
                self._names[inode] = list(os.scandir(opened))
            else:
                self._contents[inode] = opened.read_bytes()
        self.num_flushed += 1

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Take an image of what a kill, and one of what a power cut would leave before an operation on the files."""
        is_operation = event.split(".")[0] in {"open", "os", "shutil"}
        if self.takes_images and is_operation and f"{self.run_dir.path}" in f"{arguments}":
            self.takes_images = False  # for the operations of this
            shutil.copytree(self.run_dir.path, self.image("killed", self.images))
            self.cut_power(self.image("cut", self.images))
            self.images += 1
            self.takes_images = True

    def image(self, name: str, number: int) -> Path:
        return self.run_dir.path.with_name(f"{name}_{number}")

    def cut_power(self, image: Path) -> None:
        """Write what a power cut would leave into a new directory."""
        self._rebuild(self.run_dir.path.stat().st_ino, image)

    def _rebuild(self, inode: int, copy: Path) -> None:
        copy.mkdir()
        for entry in self._names.get(inode, []):
            if entry.is_dir(follow_symlinks=False):
                self._rebuild(entry.inode(), copy / entry.name)
            else:
                (copy / entry.name).write_bytes(self._contents.get(entry.inode(), b""))


_disks: list[Disk] = []
sys.addaudithook(lambda event, arguments: _disks[-1].audit(event, arguments) if _disks else None)


@pytest.fixture
def watched() -> Iterator[list[Disk]]:
    """A list, of whose last disk images are taken."""
    yield _disks
    _disks.clear()


def build() -> dict[str, DDPEngine]:
    return {
        "encoder": DDPEngine(nn.Linear(64, 32), optimizer=AdamConfig()),
        "viewmaker": DDPEngine(nn.Linear(8, 8), optimizer=AdamConfig()),
    }


def save(disk: Disk, *steps: int) -> None:
    """Go on with these steps: log and save each, with a state in which all numbers are the step."""
    config = resolve_recipe("debug:image", ["tracking.wandb=disabled"])
    with pytest.MonkeyPatch.context() as patch, CheckpointWriter(disk.run_dir, keep=KEEP) as writer:
        patch.setattr(os, "fsync", disk.flush)
        tracker = open_tracker(disk.run_dir, config, start_step=steps[0] - 1)
        for step in steps:
            engines = build()
            for engine in engines.values():
                for tensor in [*engine.module_state().values(), *engine.optimizer_state().values()]:
                    tensor.fill_(step)
            tracker.log(step, {"epoch": 0})
            writer.save(step, engines=engines, objective_state={})
        writer.wait()
        tracker.close()


def left_in(path: Path) -> tuple[int, int | None, list[int]]:
    """Return the step of the checkpoint that loads, the step in LATEST, and the steps in the metrics.

    Every number in the state of a checkpoint must be its step.
    """
    run_dir, engines = RunDir(path), build()
    try:
        step = restore(run_dir, engines, NT_XENT).step
    except UserError:  # none is whole
        step = 0
    for engine in engines.values() if step else ():
        for tensor in [*engine.module_state().values(), *engine.optimizer_state().values()]:
            assert (tensor == step).all(), f"a mixture at step {step}"
    return step, run_dir.latest_step(), [entry["step"] for entry in run_dir.read_metrics()]


def test_a_kill_or_a_power_cut_at_any_operation_leaves_the_old_or_the_new_checkpoint(
    tmp_path: Path, watched: list[Disk]
) -> None:
    disk = Disk(tmp_path)
    save(disk, 1, 2)
    watched.append(disk)
    disk.takes_images = True
    save(disk, 3)
    disk.takes_images = False
    assert disk.images > 20
    for name in ("killed", "cut"):
        found = [left_in(disk.image(name, number)) for number in range(disk.images)]
        steps = [step for step, _, _ in found]
        assert steps == sorted(steps)
        assert set(steps) == {2, 3}
        for step, latest, logged in found:
            assert latest in {2, step}
            assert logged[:latest] == list(range(1, latest + 1))


def test_no_flush_of_a_checkpoint_can_be_left_out(tmp_path: Path) -> None:
    whole = Disk(tmp_path / "whole")
    save(whole, 1)
    whole.cut_power(tmp_path / "image")
    assert left_in(tmp_path / "image") == (1, 1, [1])
    assert whole.num_flushed == 10, "four states, their index, three directories, the metrics, and LATEST"
    for lost in range(whole.num_flushed):
        disk = Disk(tmp_path / f"{lost}", lost=lost)
        save(disk, 1)
        disk.cut_power(tmp_path / f"image_{lost}")
        assert left_in(tmp_path / f"image_{lost}") != (1, 1, [1]), f"the flush of number {lost} is not needed"
