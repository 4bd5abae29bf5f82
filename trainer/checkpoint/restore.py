"""Load checkpoints: the whole state of a run to continue training, or only modules for probes and analyses."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from data_pipeline.core.errors import UserError
from trainer.checkpoint.files import (
    OBJECTIVE,
    RUN,
    SUFFIX,
    DamagedError,
    all_steps,
    check_whole,
    latest_step,
    read_index,
    read_tensors,
)
from trainer.checkpoint.run_state import DataIdentity, RunState
from trainer.distributed.collectives import from_first_rank, on_every_rank, rank
from trainer.distributed.engines.engine import Engine
from trainer.objectives import Objective
from trainer.run_dir import RunDir

logger = logging.getLogger(__name__)


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

    @property
    def wall_seconds(self) -> float:
        """Return the seconds of training up to the checkpoint, as in `RunState`."""
        return 0.0 if self.run is None else self.run.wall_seconds

    def has_other_train_set(self, now: DataIdentity) -> bool:
        """Return whether the checkpoint was trained on another train set than the present one."""
        return self.run is not None and self.run.data.train_manifest_sha256 != now.train_manifest_sha256


def newest_state(run_dir: RunDir) -> Restored:
    """Return the step and state of the newest checkpoint with a readable index; does not check its tensors."""
    for step in _steps_by_preference(run_dir):
        with contextlib.suppress(DamagedError):
            return _restored(run_dir, step)
    return Restored(0, None)


def _restored(run_dir: RunDir, step: int) -> Restored:
    """Return the state in a checkpoint. Raises `UserError` if another run wrote it, and like `read_index`."""
    index, own = read_index(run_dir.checkpoint(step)), run_dir.run_id()
    if None not in {index.run_id, own} and index.run_id != own:
        raise UserError(
            f"{run_dir.checkpoint(step)} is a checkpoint of another run (its run_id is {index.run_id}, but "
            f"{run_dir.provenance} has {own}); put the run's own checkpoints back, or remove this one"
        )
    return Restored(step, index.run)


def restore(
    run_dir: RunDir,
    engines: Mapping[str, Engine],
    objective: Objective,
    *,
    extra: Mapping[str, Tensor] | None = None,
    remembers: DataIdentity | None = None,
) -> Restored:
    """Load the newest whole checkpoint into `engines`, `objective` and the tensors of `extra`, on every rank.

    Returns its step and state; the step is 0 if there is no checkpoint yet. Skips a damaged checkpoint with a warning.

    Args:
        remembers: the present datasets, if the objective has state for every sample of the train set. If the checkpoint
            was trained on another train set, that state belongs to other samples; then the objective starts anew.

    Raises:
        UserError: on one rank, if no checkpoint is whole, or if the newest one is from another version of this project
            or has another architecture.
        SystemExit: with status 2, on the other ranks in these cases, so that only one rank reports.
    """

    def find() -> Restored | None:
        step = _newest_whole(run_dir)
        return None if step is None else _restored(run_dir, step)

    found = from_first_rank(find, Restored | None)
    if found is None:
        return Restored(0, None)
    step = found.step
    directory = run_dir.checkpoint(step)
    wanted = {name: engine.module_state() for name, engine in engines.items() if name != OBJECTIVE}
    starts_anew = remembers is not None and found.has_other_train_set(remembers)
    others = {OBJECTIVE: {} if starts_anew else objective.saved_state(), RUN: dict(extra or {})}
    wanted |= {name: state for name, state in others.items() if state}
    files = [*wanted, *(f"{name}_optimizer" for name in engines)]
    states = on_every_rank(lambda: {name: _read_explained(directory, name) for name in files})

    def load() -> None:
        for name, state in wanted.items():
            _check_fits(directory / f"{name}{SUFFIX}", states[name], state)
        if OBJECTIVE in wanted:
            objective.load_state_dict(states[OBJECTIVE])
        for name, engine in engines.items():
            module_state = engine.module_state() if name == OBJECTIVE else states[name]
            try:
                engine.load(module_state, states[f"{name}_optimizer"])
            except RuntimeError as error:
                path = directory / f"{name}_optimizer{SUFFIX}"
                raise UserError(_cannot_load(path, str(error).splitlines()[0])) from None
        for name, tensor in wanted.get(RUN, {}).items():
            tensor.copy_(states[RUN][name])

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
    if step is None:
        step = _load_newest(run_dir, modules)
    elif step != 0:
        if step < 0 or not run_dir.checkpoint(step).is_dir():
            steps = ", ".join(map(str, [0, *all_steps(run_dir)]))
            raise UserError(f"{run_dir.path} has no checkpoint of step {step}; it has checkpoints of steps {steps}")
        try:
            check_whole(run_dir.checkpoint(step), only=[f"{name}{SUFFIX}" for name in modules])
            _load_modules(run_dir.checkpoint(step), modules)
        except DamagedError as error:
            raise UserError(_cannot_load(run_dir.checkpoint(step), str(error))) from None
    return step, _trained_on(run_dir, step)


def _trained_on(run_dir: RunDir, step: int) -> DataIdentity | None:
    """Return the datasets that a checkpoint was trained on; None at step 0, or if training has pruned it."""
    if step == 0:
        return None
    try:
        return _restored(run_dir, step).trained_on
    except DamagedError:
        return None


def _load_newest(run_dir: RunDir, modules: Mapping[str, nn.Module]) -> int:
    """Load the newest whole checkpoint, and return its step. If training prunes it meanwhile, load the next one."""
    latest = latest_step(run_dir)
    step = _newest_whole(run_dir, only=modules)
    if step is None:
        raise UserError(f"{run_dir.path} has no checkpoint yet; train it, or use step 0, the untrained encoder")
    try:
        _load_modules(run_dir.checkpoint(step), modules)
    except DamagedError as error:
        if latest_step(run_dir) == latest:
            raise UserError(_cannot_load(run_dir.checkpoint(step), str(error))) from None
        return _load_newest(run_dir, modules)
    return step


def _load_modules(directory: Path, modules: Mapping[str, nn.Module]) -> None:
    """Load modules. Raises `DamagedError`, or `UserError` if the checkpoint has other modules."""
    for name, module in modules.items():
        state = read_tensors(directory / f"{name}{SUFFIX}")
        _check_fits(directory / f"{name}{SUFFIX}", state, module.state_dict())
        module.load_state_dict(state)


def _steps_by_preference(run_dir: RunDir) -> list[int]:
    """Return the steps of all checkpoints: the step in `LATEST` first, then the others from the newest on."""
    latest = latest_step(run_dir)
    others = [step for step in reversed(all_steps(run_dir)) if step != latest]
    return others if latest is None else [latest, *others]


def _newest_whole(run_dir: RunDir, *, only: Collection[str] | None = None) -> int | None:
    """Return the step of the first whole checkpoint by preference; None if there are no checkpoints.

    `only` limits the check to these modules. Logs the skipped checkpoints with the reasons. If training saves a
    checkpoint meanwhile, which may remove others, this looks again. Raises `UserError` if no checkpoint is whole, or if
    another version of this project wrote the first one.
    """
    latest = latest_step(run_dir)
    files = None if only is None else [f"{name}{SUFFIX}" for name in only]
    found: int | None = None
    skipped = []
    for step in _steps_by_preference(run_dir):
        try:
            check_whole(run_dir.checkpoint(step), only=files)
        except DamagedError as error:
            skipped.append(f"step {step} is damaged: {error}")
            continue
        found = step
        break
    if skipped and latest_step(run_dir) != latest:
        return _newest_whole(run_dir, only=only)
    if skipped and found is None:
        raise UserError(
            f"no checkpoint in {run_dir.checkpoints} is whole ({'; '.join(skipped)}); copy a whole one there, or pass "
            "another --run-dir to start again"
        )
    if skipped:
        logger.warning("taking the checkpoint of step %d, because %s", found, "; ".join(skipped))
    return found


def _read_explained(directory: Path, name: str) -> dict[str, Tensor]:
    try:
        return read_tensors(directory / f"{name}{SUFFIX}")
    except DamagedError as error:
        raise UserError(_cannot_load(directory, str(error))) from None


def _check_fits(path: Path, found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """Raise `UserError` with the name of the first tensor that differs in shape, or is in only one of the two."""

    def shape(state: Mapping[str, Tensor], name: str) -> str:
        return f"of shape {tuple(state[name].shape)}" if name in state else "absent"

    for name in [*wanted, *(name for name in found if name not in wanted)]:
        in_file, in_config = shape(found, name), shape(wanted, name)
        if in_file != in_config:
            raise UserError(
                f"{path} has another architecture ({name} is {in_file} there and {in_config} by this config); go on "
                "with the config that it was trained with, or pass another --run-dir"
            )


def _cannot_load(path: Path, reason: str) -> str:
    return f"cannot load {path} ({reason}); remove that checkpoint or pass another --run-dir"
