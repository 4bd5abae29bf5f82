"""Save checkpoints: the whole state of a run at a step.

    checkpoints/step_00000500/  encoder.safetensors    encoder_optimizer.safetensors
                                viewmaker.safetensors  viewmaker_optimizer.safetensors  (if the views are learned)
                                objective.safetensors  objective_optimizer.safetensors  (if it has state, if it learns)
                                checkpoint.json        (each file's size and SHA-256; the datasets and the counters)
    LATEST                      step_00000500

Training stops for a copy to host memory. A thread of the first rank writes the copy to a temporary directory, flushes
it to the disk and renames it. Then it flushes the metrics up to this step, replaces `LATEST`, and prunes older
checkpoints.

Guarantees: a kill or a power cut at any moment leaves the previous checkpoint or the new one, with the metrics up to
its step. State is whole and filed by name, so any number of ranks and any kind of engine can load it. A checkpoint
holds no code, and loading it runs none. The stream has no state, because its position is the step.
"""

from __future__ import annotations

import functools
import logging
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from data_pipeline.core.errors import UserError
from trainer import liveness
from trainer.checkpoint.files import (
    OBJECTIVE,
    DamagedError,
    check_sizes,
    flush,
    write_files,
)
from trainer.checkpoint.run_state import RunState
from trainer.distributed.collectives import any_rank, from_first_rank, on_every_rank, rank
from trainer.distributed.engines.engine import Engine
from trainer.distributed.replicas import first_difference
from trainer.run_dir import Hold, RunDir, steps_in, write_atomically

logger = logging.getLogger(__name__)


_ROUND_SECONDS = 1.0  # between two messages to the ranks that do not write, which are signs of life of all
_STOP_SECONDS = 60.0  # the limit of a wait from a request to stop on


class HostMemory:
    """The host memory of all copies. It is allocated once for each tensor, and pinned if that comes from a GPU."""

    def __init__(self) -> None:
        self._places: dict[tuple[str, str], Tensor] = {}
        self._is_copied: torch.cuda.Event | None = None

    def copy(self, states: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
        """Start a contiguous copy, which is complete after `wait`, and overwrites the previous one.

        Copies from a GPU are queued in its current stream, before all later kernels.
        """
        device: torch.device | None = None
        copies: dict[str, dict[str, Tensor]] = {name: {} for name in states}
        for name, state in states.items():
            for key, tensor in state.items():
                if (name, key) not in self._places:
                    place = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
                    self._places[name, key] = place
                copies[name][key] = self._places[name, key].copy_(tensor.detach(), non_blocking=True)
                device = tensor.device if tensor.is_cuda else device
        self._is_copied = torch.cuda.current_stream(device).record_event() if device is not None else None
        return copies

    def wait(self) -> None:
        """Wait until the newest copy is complete."""
        if self._is_copied is not None:
            self._is_copied.synchronize()


class CheckpointWriter:
    """A writer of a run's checkpoints in the background, one at a time, which keeps the newest `keep`.

    Every rank has one, and must call `save` and `wait` at the same steps. If the thread of the first rank fails, the
    next of these calls raises its error there, and ends the other ranks. As a context manager, it closes itself; after
    an exception in the loop, it still finishes the checkpoint that is being written.

    Args:
        limit_seconds: the limit on each wait for the disk.
        is_stopping: tells whether this rank was asked to stop. If that happens during a wait, a minute of it is left.
        held: the hold of the first rank on the run directory, which is checked before a checkpoint is written.
    """

    def __init__(
        self,
        run_dir: RunDir,
        *,
        keep: int,
        limit_seconds: float = 600.0,
        is_stopping: Callable[[], bool] = lambda: False,
        held: Hold | None = None,
    ) -> None:
        run_dir.path.mkdir(parents=True, exist_ok=True)
        self._run_dir = run_dir
        self._keep = keep
        self._limit_seconds, self._is_stopping, self._held = limit_seconds, is_stopping, held
        self._memory = HostMemory()
        self._in_flight: _Write | None = None
        self._run_id = run_dir.run_id()  # `write_provenance` has made it

    def save(
        self,
        step: int,
        *,
        engines: Mapping[str, Engine],
        objective_state: Mapping[str, Tensor],
        run: RunState | None = None,
    ) -> None:
        """Start to write the state after `step` steps; return after a copy to host memory.

        Waits for the previous save first. If that failed, older checkpoints do not change.

        Args:
            objective_state: the result of `Objective.saved_state`.
            run: the state of the loop.

        Raises:
            UserError: on the first rank, if the previous save failed because the disk had no room, refused it or did
                not answer in time, because the state was not finite, or because another process trains there now; or
                if the ranks hold different states now.
            SystemExit: with status 2, on the other ranks in these cases, so that only one rank reports.
        """
        began = time.perf_counter()
        self.wait()
        states = _states_of(engines, objective_state)
        on_every_rank(functools.partial(_check_replicas, self._run_dir, step, first_difference(states)))
        if rank() > 0:
            return
        copies = self._memory.copy(states)
        waited_seconds = time.perf_counter() - began

        def write() -> None:
            self._memory.wait()
            began = time.perf_counter()
            megabytes = self._write(step, copies, run) / 1e6
            logger.info(
                "checkpoint of step %d: %s MB, training waited %.2f s, written in %.2f s",
                step,
                f"{megabytes:,.3g}",
                waited_seconds,
                time.perf_counter() - began,
            )
            self._prune(newest=step)

        self._in_flight = _Write(step, write)
        self._in_flight.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.wait()
        elif self._in_flight is not None:
            # Runs no collectives, because the other ranks may be anywhere; keeps the original exception.
            self._in_flight.join(self._limit_seconds)
            if self._in_flight.error is not None:
                logger.warning("%s", self._in_flight.error)

    def wait(self) -> None:
        """Wait until everything is written. Raises like `save`. A second call does nothing."""
        deadline = time.monotonic() + self._limit_seconds
        was_stopping = self._is_stopping()
        while not from_first_rank(functools.partial(self._is_written, deadline), bool):
            liveness.sign()  # the wait has a limit of its own
            if any_rank(self._is_stopping() and not was_stopping):
                was_stopping, deadline = True, min(deadline, time.monotonic() + _STOP_SECONDS)

    def _is_written(self, deadline: float) -> bool:
        """Wait a moment for the checkpoint in flight, and raise its error; return False if it is not written yet."""
        write = self._in_flight
        if write is None:
            return True
        write.join(_ROUND_SECONDS)
        is_late = time.monotonic() > deadline
        if write.is_alive() and not is_late:
            return False
        self._in_flight = None
        if write.is_alive():
            raise UserError(
                f"the checkpoint of step {write.step} in {self._run_dir.checkpoints} was not written in time: the disk "
                "hangs or is too slow; repair that, or raise watchdog.startup_seconds, and start again"
            )
        if write.error is not None:
            raise write.error
        return True

    def _write(self, step: int, states: Mapping[str, Mapping[str, Tensor]], run: RunState | None) -> int:
        """Write a checkpoint, flush the metrics, and put its name into `LATEST`; return its number of bytes.

        Raises `UserError` if the state is not finite, if another process has taken the directory, or if the disk has no
        room or fails; then older checkpoints do not change.
        """
        run_dir, final = self._run_dir, self._run_dir.checkpoint(step)
        partial = _hidden(final)
        _check_finite(run_dir, step, states)
        try:
            self._check_held()
            final.parent.mkdir(exist_ok=True)  # if the run directory is gone, it was moved
            for left in final.parent.glob(".step_*"):  # by a kill
                _remove(left)
            partial.mkdir()
            num_bytes = write_files(partial, step=step, states=states, run=run, run_id=self._run_id)
            self._check_held()
            if final.is_dir():
                _remove(final)  # left by a kill between the rename and LATEST, or damaged
            partial.replace(final)
            flush(final.parent)
            if run_dir.metrics.is_file():
                flush(run_dir.metrics)
            write_atomically(run_dir.latest, final.name + "\n")
            flush(run_dir.path)
        except OSError as error:
            raise UserError(
                f"cannot write the checkpoint of step {step} in {run_dir.checkpoints} ({error}); repair that, or make "
                f"room on a full disk, and start again: the run goes on from {_describe_newest(run_dir)}"
            ) from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)  # it is there after a failure
        return num_bytes

    def _check_held(self) -> None:
        if self._held is not None:
            self._held.check()

    def _prune(self, *, newest: int) -> None:
        """Remove all but the `keep` newest checkpoints up to step `newest`, and damaged ones, which do not count."""
        whole = []
        for step in steps_in(self._run_dir.checkpoints):
            if step <= newest:
                try:
                    check_sizes(self._run_dir.checkpoint(step))
                    whole.append(step)
                except DamagedError:
                    _remove(self._run_dir.checkpoint(step))
        for step in whole[: -self._keep]:
            _remove(self._run_dir.checkpoint(step))


class _Write(threading.Thread):
    """A thread that writes the checkpoint of a step. The process can end although it hangs."""

    def __init__(self, step: int, write: Callable[[], None]) -> None:
        super().__init__(name="checkpoint", daemon=True)
        self.step, self._write_it = step, write
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self._write_it()
        except BaseException as error:
            self.error = error


def _states_of(engines: Mapping[str, Engine], objective_state: Mapping[str, Tensor]) -> dict[str, Mapping[str, Tensor]]:
    """Return all states by file name. Every rank must call this at the same time."""
    states: dict[str, Mapping[str, Tensor]] = {}
    for name, engine in engines.items():
        if name != OBJECTIVE:  # its whole state is added below
            states[name] = engine.module_state()
        states[f"{name}_optimizer"] = engine.optimizer_state()
    return states | ({OBJECTIVE: objective_state} if objective_state else {})


def _check_replicas(run_dir: RunDir, step: int, difference: str | None) -> None:
    """Raise `UserError` if `first_difference` has found one in the states after `step`."""
    if difference is not None:
        raise UserError(
            f"the state after step {step} is not saved, because the ranks have parted: {difference}. They were equal "
            f"at {_describe_newest(run_dir)}, from which the run goes on if you start it again. If it comes back, the "
            "memory or the GPU of that rank is broken; the log of the start names its machine"
        )


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
    step = run_dir.latest_step()
    return f"step {step}" if step else "the start"


def _remove(directory: Path) -> None:
    """Remove a checkpoint or a part of one; a kill meanwhile leaves it whole or removed. Logs why it cannot."""
    try:
        gone = directory if directory.name.startswith(".") else directory.replace(_hidden(directory))
        shutil.rmtree(gone)
    except OSError as error:
        logger.warning("cannot remove %s (%s); remove it by hand", directory, error)


def _hidden(directory: Path) -> Path:
    """Return a free path beside that of a checkpoint; the next save removes what is left there."""
    return directory.with_name(f".{directory.name}.{secrets.token_hex(4)}")
