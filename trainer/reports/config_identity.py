"""Which settings decide what an encoder learns: runs that agree in all of them are repetitions of one configuration."""

from __future__ import annotations

import json

from data_pipeline.core.schema import flatten
from trainer.config import RunConfig

# Settings that do not change what an encoder learns, so that runs which differ in them alone are repetitions.
NOT_SCIENCE = (
    "name",
    "seed",
    "tracking",
    "checkpoint_every_steps",
    "keep_checkpoints",
    "log_every_steps",
    "data.train_dir",  # the manifests say what the data are
    "data.test_dir",
    "data.num_workers",
    "probe.seed",
    "probe.allow_shared",
)


def science_of(config: RunConfig) -> str:
    """The settings that decide what an encoder learns, in one string, which is equal for repetitions on one dataset."""
    science = {key: value for key, value in flatten(config).items() if not _is_not_science(key)}
    return json.dumps(science, sort_keys=True)


def _is_not_science(key: str) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in NOT_SCIENCE)
