"""Say which runs repeat one configuration, and which run is which.

Repetitions agree in every setting that changes how the encoder is trained.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from data_pipeline.core.schema import flatten
from trainer.config import RunConfig

# Settings that do not change the encoder, besides the seed. Runs that differ only in them are repetitions.
NOT_IDENTITY = (
    "name",
    "seed",
    "tracking",
    "alarms",
    "watchdog",
    "checkpoint_every_steps",
    "keep_checkpoints",
    "log_every_steps",
    "engine",
    "data.train_dir",  # the data are identified by their manifests
    "data.test_dir",
    "encoder.weights",  # identified by encoder.weights_sha256
    "data.num_workers",
    "data.placement",
    "data.resident_gigabytes",
    "data.remote",
    "probe.seed",
    "probe.allow_shared",
    "probe.labels",
    "probe.groups",
    "probe.online_every_steps",
    "probe.online_num_train",
    "probe.online_num_test",
)
_SECTIONS_OUTSIDE_IDENTITY = tuple(f"{name}." for name in NOT_IDENTITY)


def config_identity(config: RunConfig) -> str:
    """Return the settings that decide the result of a training, as one string that is equal for repetitions."""
    return json.dumps(identity_settings(config), sort_keys=True)


def identity_settings(config: RunConfig) -> dict[str, Any]:
    """Return the settings that decide the result of a training, by their dotted names.

    Of `compile`, keeps only whether the networks are compiled: a recorded step trains as a plain one does.
    """
    settings = {key: value for key, value in flatten(config).items() if not _is_ignored(key)}
    return settings | {"compile": config.compiles_networks}


def run_identity(config: RunConfig, provenance: Mapping[str, Any]) -> str | None:
    """Return a phrase that no other run has: name, seed, and the first start. None if no start is recorded.

    It stays the same if the run is moved, goes on, or is read by a later version with more settings.
    """
    started_at, host = provenance.get("started_at"), provenance.get("host")
    if started_at is None:
        return None
    return f"{config.name}, seed {config.seed}, started at {started_at} on {host}"


def _is_ignored(key: str) -> bool:
    if key.startswith("data.mixture.") and key.endswith(".train_dir"):  # as data.train_dir
        return True
    return key in NOT_IDENTITY or key.startswith(_SECTIONS_OUTSIDE_IDENTITY)
