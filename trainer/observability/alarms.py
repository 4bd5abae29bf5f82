"""Raise alarms: a sentence in the log if the metrics show that training goes on but no longer learns.

Reads the metrics of views (`trainer.views.health`, under "views/") and of embeddings (`trainer.objectives.health`,
under "embeddings/"). Guarantees: an alarm never changes the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

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


@dataclass
class _Watch:
    """A limit of a metric, with a sentence that explains a metric on its wrong side.

    `since` is the step since which it is there (None if it is not), and `reported` whether that was reported.
    """

    metric: str
    wrong_side: Literal["below", "above"]
    limit: float
    meaning: str
    since: int | None = None
    reported: bool = False

    def is_beyond(self, value: float) -> bool:
        return value < self.limit if self.wrong_side == "below" else value > self.limit


def _watches(config: AlarmConfig) -> tuple[_Watch, ...]:
    return (
        _Watch(
            "embeddings/uniformity",
            "above",
            config.max_uniformity,
            "the encoder has collapsed to a point: all pictures have nearly the same embedding",
        ),
        _Watch(
            "embeddings/effective_rank",
            "below",
            config.min_effective_rank,
            "the encoder has collapsed to few directions, along which all embeddings lie",
        ),
        _Watch(
            "views/budget_spent",
            "below",
            config.min_view_change,
            "the views have become the identity: they equal their pictures",
        ),
        _Watch(
            "views/diversity",
            "below",
            config.min_view_change,
            "the views have lost their randomness: both views of a picture are the same",
        ),
        _Watch(
            "views/evenness",
            "above",
            config.max_evenness,
            "the viewmaker is saturated: it changes every entry of a picture equally, and has almost no gradient",
        ),
        _Watch(
            "views/clamped_share",
            "above",
            config.max_clamped_share,
            "the views are saturated: the clamp cuts the change of most entries; lower views.budget",
        ),
    )


def _per_changed_view(metric: str, metrics: Mapping[str, float]) -> float:
    """Return a metric; for a metric of views, the mean over the views that differ from their picture."""
    changed_share = metrics.get("views/changed_share", 1.0) if metric.startswith("views/") else 1.0
    return metrics[metric] / changed_share if changed_share > 0 else metrics[metric]


class Alarms:
    """The alarms of a run. They check the metrics of every logged step, in order."""

    def __init__(self, config: AlarmConfig) -> None:
        self._after_steps, self._watches = config.after_steps, _watches(config)

    def check(self, metrics: Mapping[str, float], step: int) -> list[str]:
        """Return the alarms at `step`, one sentence each.

        An alarm goes off when its metric was beyond the limit at every check for `after_steps` steps. It can go off
        again only after the metric was back inside the limit. A missing metric changes nothing; NaN counts as inside.
        """
        alarms = []
        for watch in self._watches:
            if watch.metric not in metrics:
                continue
            value = _per_changed_view(watch.metric, metrics)
            if not watch.is_beyond(value):
                watch.since, watch.reported = None, False
                continue
            if watch.since is None:
                watch.since = step
            if step - watch.since >= self._after_steps and not watch.reported:
                watch.reported = True
                alarms.append(
                    f"{watch.meaning} ({watch.metric} is {value:.3g} at step {step}, {watch.wrong_side} "
                    f"{watch.limit:.3g} since step {watch.since})"
                )
        return alarms
