"""The probe of the suppression benchmark, equal for the runs of its cures and for encoders of others."""

from __future__ import annotations

import itertools

from data_pipeline.building.suppression_settings import Scale, Setting
from trainer.probes.linear import ProbeConfig


def benchmark_probe(setting: Setting, scale: Scale) -> ProbeConfig:
    """Return the probe of a setting, for its hard and easy labels, on samples without views."""
    correlated = itertools.product(setting.hard, setting.easy) if setting.unit == "correlation" else ()
    return ProbeConfig(
        num_epochs=20 if scale == "small" else 100,
        views="none",
        labels=(*setting.hard, *setting.easy),
        groups=tuple(correlated),  # the labels of which the worst group counts
    )
