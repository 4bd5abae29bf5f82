"""Save checkpoints: the whole state of a run at a step.

    checkpoints/step_00000500/  encoder.safetensors    encoder_optimizer.safetensors
                                viewmaker.safetensors  viewmaker_optimizer.safetensors  (if the views are learned)
                                objective.safetensors  objective_optimizer.safetensors  (if it has state, if it learns)
                                run.safetensors        (if the loop has tensors: a loss scale)
                                checkpoint.json        (each file's size and SHA-256; the datasets and the counters)
    LATEST                      step_00000500

Training stops for a copy to host memory. A thread of the first rank writes the copy to a temporary directory, flushes
it to the disk and renames it. Then it replaces `LATEST`, and then it prunes older checkpoints.

Guarantees: a kill at any moment leaves the previous checkpoint or the new one. State is whole and filed by name, so any
number of ranks and any kind of engine can load it. A checkpoint holds no code, and loading it runs none. The stream has
no state, because its position is the step.
"""

from __future__ import annotations

import errno
import logging
import shutil
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from data_pipeline.core.errors import UserError
from trainer.checkpoint.files import (
    OBJECTIVE,
    RUN,
    DamagedError,
    all_steps,
    check_sizes,
    flush,
    latest_step,
    write_files,
)
from trainer.checkpoint.run_state import RunState
from trainer.distributed.collectives import broadcast_json, on_every_rank, on_first_rank, rank
from trainer.distributed.engines.engine import Engine
from trainer.distributed.replicas import first_difference
from trainer.run_dir import RunDir, write_atomically

logger = logging.getLogger(__name__)


_ALIGNMENT = 64  # bytes, of a tensor in the copy in host memory
# The ranks that do not write wait in a collective, a new one every minute, so that none times out if the disk is slow.
_WAIT_SECONDS = 60.0


@dataclass(frozen=True)
class HostCopy:
    """A copy of states in host memory, complete once `wait` has returned."""

    states: Mapping[str, Mapping[str, Tensor]]
    is_copied: torch.cuda.Event | None

    def wait(self) -> None:
        if self.is_copied is not None:
            self.is_copied.synchronize()


class HostMemory:
    """A block of host memory for all copies. It is allocated once, and pinned if tensors come from a GPU."""

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8)

    def copy(self, states: Mapping[str, Mapping[str, Tensor]]) -> HostCopy:
        """Start a contiguous copy, which overwrites the previous one.

        Copies from a GPU are queued in its current stream, before all later kernels.
        """
        tensors = [tensor for state in states.values() for tensor in state.values()]
        device = next((tensor.device for tensor in tensors if tensor.device.type == "cuda"), None)
        num_bytes = sum(_aligned(tensor.nbytes) for tensor in tensors)
        if self._block.numel() < num_bytes or (device is not None and not self._block.is_pinned()):
            self._block = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device is not None)
        copies: dict[str, dict[str, Tensor]] = {}
        end = 0
        for name, state in states.items():
            copies[name] = {}
            for key, tensor in state.items():
                place = self._block[end : end + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                copies[name][key] = place.copy_(tensor.detach(), non_blocking=True)
                end += _aligned(tensor.nbytes)
        return HostCopy(copies, torch.cuda.current_stream(device).record_event() if device is not None else None)


class CheckpointWriter:
    """A writer of a run's checkpoints in the background, one at a time, which keeps the newest `keep`.

    Every rank has one, and must call `save` and `close` at the same steps. If the thread of the first rank fails, the
    next of these calls raises its error there, and ends the other ranks. As a context manager, it closes itself; after
    an exception in the loop, it still finishes the checkpoint that is being written.
    """

    def __init__(self, run_dir: RunDir, *, keep: int) -> None:
        run_dir.path.mkdir(parents=True, exist_ok=True)
        self._run_dir = run_dir
        self._keep = keep
        self._memory = HostMemory()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._in_flight: Future[None] | None = None
        self._run_id = run_dir.run_id()  # `write_provenance` has made it
        self._step = 0  # of the checkpoint in flight

    def save(
        self,
        step: int,
        *,
        engines: Mapping[str, Engine],
        objective_state: Mapping[str, Tensor],
        extra: Mapping[str, Tensor] | None = None,
        run: RunState | None = None,
    ) -> None:
        """Start to write the state after `step` steps; return after a copy to host memory.

        Waits for the previous save first. If that failed, older checkpoints do not change.

        Args:
            objective_state: the result of `Objective.saved_state`.
            extra: the tensors of the loop, equal on all ranks, with fixed shapes.
            run: the other state of the loop.

        Raises:
            UserError: on the first rank, if the previous save failed because the disk had no room or refused it, or
                because the state was not finite; or if the ranks hold different states now.
            SystemExit: with status 2, on the other ranks in these cases, so that only one rank reports.
        """
        began = time.perf_counter()
        self._flush()
        states = _states_of(engines, objective_state, extra or {})
        on_every_rank(partial(_check_replicas, self._run_dir, step, first_difference(states)))
        if rank() > 0:
            return
        self._step = step
        copy = self._memory.copy(states)
        waited_seconds = time.perf_counter() - began
        self._in_flight = self._thread.submit(self._write, step, copy, run, waited_seconds)

    def close(self) -> None:
        """Wait until everything is written. Raises like `save`. A second call does nothing."""
        try:
            self._flush()
        finally:
            self._thread.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        # Runs no collectives, because the other ranks may be anywhere; keeps the original exception.
        self._thread.shutdown()
        failure = self._in_flight.exception() if self._in_flight is not None else None
        if failure is not None:
            logger.warning("%s", failure)

    def _flush(self) -> None:
        """Wait until the checkpoint in flight is written. If that failed, all ranks end as in `on_first_rank`."""
        while not broadcast_json(self._is_written(), bool):
            pass
        in_flight, self._in_flight = self._in_flight, None
        on_first_rank(lambda: None if in_flight is None else in_flight.result())

    def _is_written(self) -> bool:
        """Wait for the checkpoint in flight; return False if it is not written after a minute."""
        if self._in_flight is None:
            return True
        try:
            self._in_flight.exception(timeout=_WAIT_SECONDS)
        except TimeoutError:
            logger.info("waiting for the checkpoint of step %d to be written", self._step)
            return False
        return True

    def _write(self, step: int, copy: HostCopy, run: RunState | None, waited_seconds: float) -> None:
        copy.wait()
        began = time.perf_counter()
        num_bytes = _write(self._run_dir, step=step, states=copy.states, run=run, keep=self._keep, run_id=self._run_id)
        logger.info(
            "checkpoint of step %d: %s MB, training waited %.2f s, written in %.2f s",
            step,
            f"{num_bytes / 1e6:,.3g}",
            waited_seconds,
            time.perf_counter() - began,
        )


def _states_of(
    engines: Mapping[str, Engine], objective_state: Mapping[str, Tensor], extra: Mapping[str, Tensor]
) -> dict[str, Mapping[str, Tensor]]:
    """Return all states by file name. Every rank must call this at the same time."""
    states: dict[str, Mapping[str, Tensor]] = {}
    for name, engine in engines.items():
        if name != OBJECTIVE:  # its whole state is added below
            states[name] = engine.module_state()
        states[f"{name}_optimizer"] = engine.optimizer_state()
    rest = {OBJECTIVE: objective_state, RUN: extra}
    return states | {name: state for name, state in rest.items() if state}


def _check_replicas(run_dir: RunDir, step: int, difference: str | None) -> None:
    """Raise `UserError` if `first_difference` has found one in the states after `step`."""
    if difference is not None:
        raise UserError(
            f"the state after step {step} is not saved, because the ranks have parted: {difference}. They were equal "
            f"at {_describe_newest(run_dir)}, from which the run goes on if you start it again. If it comes back, the "
            "memory or the GPU of that rank is broken; the log of the start names its machine"
        )


def _write(
    run_dir: RunDir,
    *,
    step: int,
    states: Mapping[str, Mapping[str, Tensor]],
    run: RunState | None,
    keep: int,
    run_id: str | None,
) -> int:
    """Write a checkpoint, put its name into `LATEST`, and prune; return its number of bytes.

    Raises `UserError` if the state is not finite, or if the disk has no room or fails; then older checkpoints do not
    change.
    """
    final = run_dir.checkpoint(step)
    partial = final.with_name(f".{final.name}.partial")
    _check_finite(run_dir, step, states)
    try:
        partial.parent.mkdir(exist_ok=True)  # if the run directory is gone, it was moved
        for left in partial.parent.glob(".step_*"):  # left by a kill
            shutil.rmtree(left)
        partial.mkdir()
        num_bytes = write_files(partial, step=step, states=states, run=run, run_id=run_id)
        _remove(final)  # left by a kill between the rename and LATEST, or damaged
        partial.replace(final)
        flush(final.parent)
        write_atomically(run_dir.latest, final.name + "\n")
        flush(run_dir.path)
        _prune(run_dir, newest=step, keep=keep)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        where = f"the checkpoint of step {step} in {run_dir.checkpoints}"
        going_on = f"start again: the run goes on from {_describe_newest(run_dir)}"
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise UserError(f"no room on the disk for {where}; free some and {going_on}") from error
        raise UserError(f"cannot write {where} ({error}); repair that and {going_on}") from error
    return num_bytes


def _check_finite(run_dir: RunDir, step: int, states: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Raise `UserError` with the name of the first tensor that has an inf or a nan.

    Gradients are checked in every step, but a step can still overflow: a parameter because of the learning rate, or the
    moments of Adam because of their squares. Then a parameter would never change again, and nothing else would show it.
    """
    for file, state in states.items():
        for name, tensor in state.items():
            if tensor.is_floating_point() and not tensor.isfinite().all():
                num_bad = int((~tensor.isfinite()).sum())
                raise UserError(
                    f"the state after step {step} is not saved, because it is not finite: {num_bad} of "
                    f"{tensor.numel()} values of {name} ({file}) are inf or nan; lower the learning rate with another "
                    f"--run-dir, or start again from {_describe_newest(run_dir)}"
                )


def _describe_newest(run_dir: RunDir) -> str:
    step = latest_step(run_dir)
    return f"step {step}" if step else "the start"


def _prune(run_dir: RunDir, *, newest: int, keep: int) -> None:
    """Remove all but `keep` checkpoints up to step `newest`. Damaged checkpoints are removed and do not count."""
    whole = []
    for step in all_steps(run_dir):
        if step <= newest:
            try:
                check_sizes(run_dir.checkpoint(step))
                whole.append(step)
            except DamagedError:
                _remove(run_dir.checkpoint(step))
    for step in whole[:-keep]:
        _remove(run_dir.checkpoint(step))


def _remove(directory: Path) -> None:
    """Remove a checkpoint; a kill meanwhile leaves it whole or removed."""
    if directory.is_dir():
        gone = directory.with_name(f".{directory.name}.gone")
        directory.replace(gone)
        shutil.rmtree(gone)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
