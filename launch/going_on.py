"""Find the checkpoint from which a run would go on, without reading tensors, and say what is wrong with newer ones."""

from __future__ import annotations

from dataclasses import dataclass

from data_pipeline.core.errors import UserError
from trainer.checkpoint.restore import FoundCheckpoint, first_of_full_size
from trainer.run_dir import RunDir


@dataclass(frozen=True)
class GoingOn:
    """Where a run would go on.

    step: the step of the newest whole checkpoint; None if there is none.
    problem: one sentence if a newer checkpoint cannot be used, else "".
    has_directories: whether there are directories of checkpoints, and not only the name of one in `LATEST`.
    """

    step: int | None
    problem: str = ""
    has_directories: bool = True

    @property
    def has_begun(self) -> bool:
        """Tell whether a checkpoint was written, whole or not."""
        return self.step is not None or self.problem != ""

    @property
    def advice(self) -> str:
        """Return the end of a sentence on a run that has ended: what starts it again, and from where."""
        if self.step is None and self.problem:
            return "it cannot go on, because no checkpoint can be used"
        start = "the start" if self.step is None else f"step {self.step}"
        return f"start it again with the same command and it goes on from {start}"


def going_on(run_dir: RunDir) -> GoingOn:
    """Return where a run would go on, by the sizes of the files of its checkpoints. Raises nothing for damaged ones."""
    try:
        found = first_of_full_size(run_dir)
    except UserError as error:  # another version of this project wrote it
        return GoingOn(None, str(error))
    except OSError as error:
        return GoingOn(None, f"{run_dir.checkpoints} cannot be read ({error.strerror}), so no step is known")
    has_directories = found.step is not None or any(run_dir.checkpoint(step).is_dir() for step in found.skipped)
    return GoingOn(found.step, _problem(run_dir, found), has_directories=has_directories)


def _problem(run_dir: RunDir, found: FoundCheckpoint) -> str:
    """Return one sentence on the checkpoint that a restart would have taken if it were whole; "" if it is."""
    if not found.skipped:
        return ""
    step, reason = next(iter(found.skipped.items()))
    named = "LATEST names step" if step == run_dir.latest_step() else "the newest checkpoint is of step"
    start = (
        f"no checkpoint is whole, so a restart is refused until you copy a whole one to {run_dir.checkpoints}"
        if found.step is None
        else f"a restart goes on from step {found.step}"
    )
    return f"{named} {step}, whose checkpoint is not whole ({reason}); {start}"
