"""Compare the config of a run with that of its earlier starts.

Guarantees: a run has one config, except for settings that change no result.
"""

from __future__ import annotations

from data_pipeline.core.errors import UserError
from data_pipeline.core.schema import difference
from trainer.config import RunConfig, read_run_config
from trainer.provenance import RECORDED_CONFIG
from trainer.run_dir import RunDir

# Settings and sections that change neither a batch nor, except by rounding, a step. A run that has begun may go on with
# others: messages and docs/troubleshooting.md ask for that. `NOT_IDENTITY` of reports has all of them.
MAY_CHANGE = (
    "data.num_workers",
    "data.placement",
    "data.resident_gigabytes",
    "data.remote.",
    "checkpoint_every_steps",  # a stop saves a checkpoint at any step, too
    "keep_checkpoints",
    "log_every_steps",
    "engine.",  # all engines save the same state, and train equally up to rounding, as other numbers of ranks do
    "alarms.",
    "watchdog.",
    "tracking.",
)


def refuse_other_config(run_dir: RunDir, config: RunConfig) -> None:
    """Raise `UserError` if the run in `run_dir` has another config, in a setting that is not one of `MAY_CHANGE`."""
    if keys := _fixed_settings_that_differ(read_run_config(run_dir), config):
        raise UserError(
            f"{run_dir.path} holds a run with another config (it differs in {', '.join(keys)}); pass another "
            "--run-dir, or remove this one"
        )


def edited_config(run_dir: RunDir, config: RunConfig) -> str | None:
    """Return a clause that names the settings of config.json with which the newest start did not train; None if none.

    `config` is that of config.json.
    """
    recorded = run_dir.read_provenance().get(RECORDED_CONFIG, {})
    try:
        before = RunConfig.parse(recorded, where=str(run_dir.provenance))
    except UserError:  # none is recorded, or this version cannot read it
        return None
    keys = _fixed_settings_that_differ(before, config)
    return f"{run_dir.config} was edited after the run began (it differs in {', '.join(keys)})" if keys else None


def _fixed_settings_that_differ(before: RunConfig, now: RunConfig) -> list[str]:
    """Return the settings in which two configs differ, without those of `MAY_CHANGE`.

    Locations of data and of weights may differ, because the data and the weights themselves are compared. Whether steps
    are recorded may change, but not whether the networks are compiled.
    """
    keys = [key for key in difference(before, now) if not key.startswith(MAY_CHANGE)]
    keys = [key for key in keys if not (key.startswith("data.") and key.endswith("_dir"))]
    keys = [key for key in keys if key != "encoder.weights"]
    if before.compiles_networks == now.compiles_networks:
        keys = [key for key in keys if key != "compile"]
    return keys
