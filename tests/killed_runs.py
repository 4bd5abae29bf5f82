"""Leave a run as a kill would."""

from __future__ import annotations

import shutil

from trainer.run_dir import RunDir, step_name, steps_in, write_json


def kill_after(run_dir: RunDir, step: int) -> None:
    """Take back what a finished run has saved after `step`, one of its checkpoints."""
    for later in steps_in(run_dir.checkpoints):
        if later > step:
            shutil.rmtree(run_dir.checkpoint(later))
    run_dir.latest.write_text(f"{step_name(step)}\n")
    facts = run_dir.read_provenance()
    write_json(run_dir.provenance, {name: fact for name, fact in facts.items() if name != "finished_step"})
