"""Checkpoints: the whole state of a run at a step, complete or not there at all.

    checkpoints/step_00000500/  encoder.safetensors    encoder_optimizer.safetensors
                                viewmaker.safetensors  viewmaker_optimizer.safetensors  (where the views are learned)
                                objective.safetensors  objective_optimizer.safetensors  (where it has state, learns)
    LATEST                      step_00000500

A checkpoint is written beside its place, flushed to the disk and moved there by one rename; `LATEST` is replaced after
that, and only then are older ones pruned. So a kill at any moment leaves the previous checkpoint or the new one. The
stream needs no state of its own: its position is the step. Nothing in a checkpoint is code, and loading one runs none.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import safetensors.torch
import torch
from torch import nn

from data_pipeline.errors import UserError
from trainer.config import read_config
from trainer.distributed.engine import Engine
from trainer.objectives import Objective
from trainer.players import Players, build_players
from trainer.rundir import RunDir, write_atomically

_OBJECTIVE = "objective"
MIN_FREE_BYTES = 1 << 20  # a write that failed with less than this left failed for want of room


def save_checkpoint(
    run_dir: RunDir, *, step: int, engines: Mapping[str, Engine], objective_state: Mapping[str, torch.Tensor], keep: int
) -> None:
    """Write the state after `step` steps and prune all but the newest `keep` checkpoints. Call it on one rank only.

    Raises `UserError` where the disk has no room; the checkpoints before stay as they are.
    """
    final = run_dir.checkpoint(step)
    partial = final.with_name(f".{final.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        for name, engine in engines.items():
            if name != _OBJECTIVE:  # whose state is filed as a whole, below
                safetensors.torch.save_file(_contiguous(engine.module_state()), partial / f"{name}.safetensors")
            safetensors.torch.save_file(
                _contiguous(engine.optimizer_state()), partial / f"{name}_optimizer.safetensors"
            )
        if objective_state:
            safetensors.torch.save_file(_contiguous(objective_state), partial / f"{_OBJECTIVE}.safetensors")
        for path in [*partial.iterdir(), partial]:
            _flush(path)
    except BaseException as error:
        free_bytes = shutil.disk_usage(partial).free
        shutil.rmtree(partial, ignore_errors=True)
        # The writers report a full disk each in their own words, and not always as an OSError.
        if isinstance(error, Exception) and free_bytes < MIN_FREE_BYTES:
            before = run_dir.latest_step()
            raise UserError(
                f"no room on the disk for the checkpoint of step {step} in {run_dir.checkpoints}; free some and start "
                f"again: the run goes on from {f'step {before}' if before else 'the start'}"
            ) from error
        raise
    shutil.rmtree(final, ignore_errors=True)  # left by a kill between the rename and LATEST
    partial.replace(final)
    _flush(final.parent)
    write_atomically(run_dir.latest, final.name + "\n")
    for old in sorted(run_dir.checkpoints.glob("step_*"))[:-keep]:
        shutil.rmtree(old)


def restore(run_dir: RunDir, engines: Mapping[str, Engine], objective: Objective) -> int:
    """Load the newest checkpoint into `engines` and `objective`; returns its step, 0 where there is none yet."""
    step = run_dir.latest_step()
    if step is None:
        return 0
    path = run_dir.checkpoint(step) / f"{_OBJECTIVE}.safetensors"
    if path.is_file():
        with _explained(path):
            objective.load_saved(safetensors.torch.load_file(path))
    for name, engine in engines.items():
        path = run_dir.checkpoint(step) / f"{name}.safetensors"
        optimizer_path = run_dir.checkpoint(step) / f"{name}_optimizer.safetensors"
        with _explained(path):
            module_state = engine.module_state() if name == _OBJECTIVE else safetensors.torch.load_file(path)
            engine.load(module_state, safetensors.torch.load_file(optimizer_path))
    return step


def load_players(run_dir: RunDir, *, step: int | None = None) -> Players:
    """The players of a run in eval mode on the CPU, at `step` or the newest checkpoint.

    Step 0 is the untrained players, rebuilt from the config and its seed. Raises `UserError` if there is no such step.
    """
    players = build_players(read_config(run_dir.config))
    step = run_dir.latest_step() if step is None else step
    if step is None:
        raise UserError(f"{run_dir.path} has no checkpoint yet; train it, or ask for step 0, the untrained encoder")
    if step > 0:
        if not run_dir.checkpoint(step).is_dir():
            steps = [
                "0",
                *sorted(path.name.removeprefix("step_").lstrip("0") for path in run_dir.checkpoints.glob("step_*")),
            ]
            raise UserError(
                f"{run_dir.path} has no checkpoint of step {step}; it has those of steps {', '.join(steps)}"
            )
        for name, module in players.trained_modules.items():
            _load_module(run_dir, step, name, module)
    for module in players.trained_modules.values():
        module.eval()
    return Players(config=players.config, step=step, encoder=players.encoder, view_policy=players.view_policy)


def _contiguous(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A state as contiguous CPU tensors: the file format knows no channels_last."""
    return {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}


def _load_module(run_dir: RunDir, step: int, name: str, module: nn.Module) -> None:
    path = run_dir.checkpoint(step) / f"{name}.safetensors"
    with _explained(path):
        module.load_state_dict(safetensors.torch.load_file(path))


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Say in one sentence that the file at `path` cannot be loaded."""
    try:
        yield
    except (OSError, RuntimeError, safetensors.SafetensorError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"cannot load {path} ({reason}); remove that checkpoint or pass another --run-dir") from None


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
