"""Raise alarms: a sentence in the log if the metrics show that training goes on but no longer learns.

Reads the metrics of views (`trainer.views.health`, under "views/") and of embeddings (`trainer.objectives.health`,
under "embeddings/"). Guarantees: an alarm never changes the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final

from pydantic import Field

from data_pipeline.core.schema import Count, Schema, Share


class AlarmConfig(Schema):
    """The limits of the metrics, and the number of steps that a metric must be beyond its limit.

    after_steps: the number of steps beyond a limit that sets off an alarm.
    min_view_change: the limit of "budget_spent" and "diversity", for pictures in [0, 1]; half a grey level of 255.

    The other limits belong to the metric of the same name. Healthy runs stay far from the limits: SimCLR on small
    pictures had a uniformity of at most -0.4 from the first step on, an effective rank of at least 18, and an evenness
    of at most 0.33. A random encoder may start beyond them.

    Metrics of views are means over all views. They are divided by "changed_share", so that only views which differ from
    their picture count. With a `dropout_rate` below 1, two views of a picture differ even if the viewmaker has lost its
    randomness.
    """

    after_steps: Count = 50
    max_uniformity: Annotated[float, Field(ge=-8, le=0)] = -0.1
    min_effective_rank: Annotated[float, Field(ge=0, le=2**15)] = 3.0
    min_view_change: Annotated[float, Field(ge=0, le=1e3)] = 0.5 / 255
    max_evenness: Share = 0.8
    max_clamped_share: Share = 0.5


# Of each metric: the setting that limits it, and what it means to be above a max_... or below a min_...
_WATCHED: Final = {
    "embeddings/uniformity": (
        "max_uniformity",
        "the encoder has collapsed to a point: all pictures have nearly the same embedding",
    ),
    "embeddings/effective_rank": (
        "min_effective_rank",
        "the encoder has collapsed to few directions, along which all embeddings lie",
    ),
    "views/budget_spent": (
        "min_view_change",
        "the views have become the identity: they equal their pictures",
    ),
    "views/diversity": (
        "min_view_change",
        "the views have lost their randomness: both views of a picture are the same",
    ),
    "views/evenness": (
        "max_evenness",
        "the viewmaker is saturated: it changes every entry of a picture equally, and has almost no gradient",
    ),
    "views/clamped_share": (
        "max_clamped_share",
        "the views are saturated: the clamp cuts the change of most entries; lower views.budget",
    ),
}


def _per_changed_view(metric: str, metrics: Mapping[str, float]) -> float:
    """Return a metric; for a metric of views, the mean over the views that differ from their picture."""
    changed_share = metrics.get("views/changed_share", 1.0) if metric.startswith("views/") else 1.0
    return metrics[metric] / changed_share if changed_share > 0 else metrics[metric]


class Alarms:
    """The alarms of a run. They check the metrics of every logged step, in order."""

    def __init__(self, config: AlarmConfig) -> None:
        self._config = config
        self._since: dict[str, int] = {}  # the step since which a metric is beyond its limit
        self._reported: set[str] = set()

    def check(self, metrics: Mapping[str, float], step: int) -> list[str]:
        """Return the alarms at `step`, one sentence each.

        An alarm goes off when its metric was beyond the limit at every check for `after_steps` steps. It can go off
        again only after the metric was back inside the limit. A missing metric changes nothing; NaN counts as inside.
        """
        alarms = []
        for metric, (setting, meaning) in _WATCHED.items():
            if metric not in metrics:
                continue
            value, limit = _per_changed_view(metric, metrics), float(getattr(self._config, setting))
            is_beyond, side = (value > limit, "above") if setting.startswith("max") else (value < limit, "below")
            if not is_beyond:
                self._since.pop(metric, None)
                self._reported.discard(metric)
                continue
            since = self._since.setdefault(metric, step)
            if step - since >= self._config.after_steps and metric not in self._reported:
                self._reported.add(metric)
                alarms.append(
                    f"{meaning} ({metric} is {value:.3g} at step {step}, {side} {limit:.3g} since step {since})"
                )
        return alarms
