"""Load checkpoints: the whole state of a run to continue training, or only modules for probes and analyses."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from data_pipeline.core.errors import UserError
from trainer.checkpoint.files import (
    OBJECTIVE,
    CheckpointIndex,
    DamagedError,
    check_sizes,
    read_states,
)
from trainer.checkpoint.run_state import DataIdentity, RunState
from trainer.distributed.collectives import broadcast_json, on_every_rank, on_first_rank, rank
from trainer.distributed.engines.engine import Engine
from trainer.objectives import Objective
from trainer.run_dir import RunDir, steps_in

logger = logging.getLogger(__name__)


_States = dict[str, dict[str, Tensor]]  # the state of each file, by the file's name without its suffix
_Whole = tuple[CheckpointIndex, _States]


@dataclass(frozen=True)
class Restored:
    """The checkpoint from which a run goes on: its step, and the state of the run besides tensors.

    At the start of a run, the step is 0, and there is no state.
    """

    step: int
    run: RunState | None

    @property
    def trained_on(self) -> DataIdentity | None:
        """Return the datasets that the checkpoint was trained on; None if there is no checkpoint."""
        return None if self.run is None else self.run.data

    def has_other_train_set(self, now: DataIdentity) -> bool:
        """Return whether the checkpoint was trained on another train set than the present one."""
        return self.run is not None and self.run.data.train_manifest_sha256 != now.train_manifest_sha256


def newest_state(run_dir: RunDir) -> Restored:
    """Return the step and state of the newest checkpoint with a readable index; does not check its tensors."""
    for step in _steps_by_preference(run_dir):
        with contextlib.suppress(DamagedError):
            return Restored(step, _own_index(run_dir, step).run)
    return Restored(0, None)


def _own_index(run_dir: RunDir, step: int) -> CheckpointIndex:
    """Return the index of a checkpoint. Raises `UserError` if another run wrote it, and like `check_sizes`."""
    index, own = check_sizes(run_dir.checkpoint(step)), run_dir.run_id()
    if None not in {index.run_id, own} and index.run_id != own:
        raise UserError(
            f"{run_dir.checkpoint(step)} is a checkpoint of another run (its run_id is {index.run_id}, but "
            f"{run_dir.provenance} has {own}); put the run's own checkpoints back, or remove this one"
        )
    return index


def restore(
    run_dir: RunDir,
    engines: Mapping[str, Engine],
    objective: Objective,
    *,
    remembers: DataIdentity | None = None,
) -> Restored:
    """Load the newest whole checkpoint into `engines` and `objective`, on every rank.

    Returns its step and state; the step is 0 if there is no checkpoint yet. Skips a damaged checkpoint with a warning.
    Guarantees: every rank has loaded the bytes that were saved.

    Args:
        remembers: the present datasets, if the objective has state for every sample of the train set. If the checkpoint
            was trained on another train set, that state belongs to other samples; then the objective starts anew.

    Raises:
        UserError: on one rank, if no checkpoint is whole, if the newest one is from another version of this project or
            has another architecture, or if this rank reads other bytes than the first one.
        SystemExit: with status 2, on the other ranks in these cases, so that only one rank reports.
    """
    read_first = on_first_rank(lambda: _read_newest_whole(run_dir))
    index = broadcast_json(None if read_first is None else read_first[0], CheckpointIndex | None)
    if index is None:
        return Restored(0, None)
    found, directory = Restored(index.step, index.run), run_dir.checkpoint(index.step)
    _, states = on_every_rank(lambda: read_first or (index, _read_the_same(directory, index)))
    starts_anew = remembers is not None and found.has_other_train_set(remembers)
    loads_objective = bool(objective.saved_state()) and not starts_anew

    def load() -> None:
        with _fitting(directory):
            if loads_objective:
                objective.load_state_dict(states[OBJECTIVE])
            for name, engine in engines.items():
                module_state = engine.module_state() if name == OBJECTIVE else states[name]
                engine.load(module_state, states[f"{name}_optimizer"])

    on_every_rank(load)
    if starts_anew and rank() == 0:
        logger.warning("the objective has state for every sample of the train set, which starts anew with the new data")
    return found


def load_weights(
    run_dir: RunDir, modules: Mapping[str, nn.Module], *, step: int | None = None
) -> tuple[int, DataIdentity | None]:
    """Load the weights of modules at `step` (None: the newest whole checkpoint); step 0 does not change them.

    Returns the step, and the datasets that it was trained on (None at step 0). Training may go on at the same time.
    Raises `UserError` if there is no such step, or if it cannot be loaded.
    """
    if step == 0:
        return 0, None
    whole = _read_newest_whole(run_dir, only=modules) if step is None else _read_step(run_dir, step, only=modules)
    if whole is None:
        raise UserError(f"{run_dir.path} has no checkpoint yet; train it, or use step 0, the untrained encoder")
    index, states = whole
    with _fitting(run_dir.checkpoint(index.step)):
        for name, module in modules.items():
            module.load_state_dict(states[name])
    return index.step, Restored(index.step, index.run).trained_on


def _steps_by_preference(run_dir: RunDir) -> list[int]:
    """Return the steps of all checkpoints: the step in `LATEST` first, then the others from the newest on."""
    latest = run_dir.latest_step()
    others = [step for step in reversed(steps_in(run_dir.checkpoints)) if step != latest]
    return others if latest is None else [latest, *others]


def _read_newest_whole(run_dir: RunDir, *, only: Collection[str] | None = None) -> _Whole | None:
    """Return the first whole checkpoint by preference; None if there are no checkpoints.

    `only` limits it to these modules. Logs the skipped checkpoints with the reasons. If training saves a checkpoint
    meanwhile, which may remove others, this looks again. Raises `UserError` if no checkpoint is whole, or if another
    version of this project, or another run, wrote the first one.
    """
    latest = run_dir.latest_step()
    found: _Whole | None = None
    skipped = []
    for step in _steps_by_preference(run_dir):
        try:
            found = _read(run_dir, step, only=only)
            break
        except DamagedError as error:
            skipped.append(f"step {step} is damaged: {error}")
    if skipped and run_dir.latest_step() != latest:
        return _read_newest_whole(run_dir, only=only)
    if skipped and found is None:
        raise UserError(
            f"no checkpoint in {run_dir.checkpoints} is whole ({'; '.join(skipped)}); copy a whole one there, or pass "
            "another --run-dir to start again"
        )
    if skipped and found is not None:
        logger.warning("taking the checkpoint of step %d, because %s", found[0].step, "; ".join(skipped))
    return found


def _read_step(run_dir: RunDir, step: int, *, only: Collection[str]) -> _Whole:
    """Return these modules of a checkpoint. Raises `UserError` if it is not there, or damaged."""
    directory = run_dir.checkpoint(step)
    if step < 0 or not directory.is_dir():
        steps = ", ".join(map(str, [0, *steps_in(run_dir.checkpoints)]))
        raise UserError(f"{run_dir.path} has no checkpoint of step {step}; it has checkpoints of steps {steps}")
    try:
        return _read(run_dir, step, only=only)
    except DamagedError as error:
        raise UserError(
            f"cannot load {directory} ({error}); remove that checkpoint or pass another --run-dir"
        ) from None


def _read(run_dir: RunDir, step: int, *, only: Collection[str] | None) -> _Whole:
    """Return the index and the states of a checkpoint. Raises `DamagedError`, or `UserError` as `_own_index` does."""
    index, directory = _own_index(run_dir, step), run_dir.checkpoint(step)
    return index, read_states(directory, index, only=only)


def _read_the_same(directory: Path, index: CheckpointIndex) -> _States:
    """Return the states that the first rank has read. Raises `UserError` if this rank reads other bytes."""
    try:
        return read_states(directory, index)
    except DamagedError as error:
        raise UserError(
            f"rank {rank()} on {socket.gethostname()} does not read {directory} as rank 0 does: {error}; start again "
            "without this machine, or check its memory and its mount of the disk"
        ) from None


@contextlib.contextmanager
def _fitting(directory: Path) -> Iterator[None]:
    """Raise `UserError` if the states of a checkpoint do not fit, with the words of torch on the first difference."""
    try:
        yield
    except (RuntimeError, KeyError) as error:
        words = " ".join(str(error).splitlines()[:2]).split()
        reason = f"{error} is missing" if isinstance(error, KeyError) else " ".join(words)
        raise UserError(
            f"{directory} has another architecture or optimizer than this config ({reason}); go on with the config "
            "that it was trained with, or pass another --run-dir"
        ) from None
