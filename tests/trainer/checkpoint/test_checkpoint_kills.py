"""A process that is killed while it saves, at any operation, leaves a checkpoint that loads, the old or the new one.

Processes are forked from one that has imported everything and never started a thread, so a kill takes a few
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

from tests.nursery import run_python
from tests.real_data import REPOSITORY
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
