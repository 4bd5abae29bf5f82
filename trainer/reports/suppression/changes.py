"""Say which settings each cure changes, from the configs of its runs, so that the page cannot claim other ones."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from data_pipeline.core.schema import as_typed, given_settings
from data_pipeline.core.sections import KIND
from trainer.config import RunConfig
from trainer.reports.config_identity import identity_settings
from trainer.reports.suppression.measured import Setting

_MAX_CHARACTERS: Final = 60  # of a value
_Point = tuple[str, str]  # a setting and a difficulty


@dataclass(frozen=True)
class Changes:
    """The settings in which a cure differs from the plainest cure.

    everywhere: NAME=VALUE of those that are the same at every point that has both cures.
    elsewhere: the names of the others.
    """

    everywhere: tuple[str, ...]
    elsewhere: tuple[str, ...]


def changes_of_cures(settings: Sequence[Setting]) -> tuple[str, dict[str, Changes]] | None:
    """Return the plainest cure, and what each other cure changes; None for fewer than two measured cures.

    The plainest cure has the fewest differences from all others together. It is compared at each setting and difficulty
    that has both. Leaves out cures that share none with it.
    """
    points: dict[_Point, dict[str, RunConfig]] = {}
    for setting in settings:
        for (difficulty, cure), runs in setting.cells.items():
            if cure in setting.cures and runs:
                points.setdefault((setting.name, difficulty), {})[cure] = next(iter(runs.values())).config
    cures = list(dict.fromkeys(cure for of_point in points.values() for cure in of_point))
    if len(cures) < 2:
        return None
    flat = {point: {cure: identity_settings(one) for cure, one in found.items()} for point, found in points.items()}
    plainest = max(cures, key=lambda cure: _likeness(flat, cure))
    found: dict[str, Changes] = {}
    for cure in cures:
        both = [of_point for of_point in points.values() if cure in of_point and plainest in of_point]
        if cure == plainest or not both:
            continue
        changed = [changed_settings(of_point[plainest], of_point[cure]) for of_point in both]
        names = dict.fromkeys(name for one in changed for name in one)
        same = [name for name in names if all(one.get(name, names) == changed[0].get(name) for one in changed)]
        found[cure] = Changes(
            tuple(f"{name}={_short(changed[0][name])}" for name in same),
            tuple(name for name in names if name not in same),
        )
    return plainest, found


def _likeness(flat: Mapping[_Point, Mapping[str, Mapping[str, Any]]], cure: str) -> tuple[float, int]:
    """Return minus the mean number of settings in which another cure differs from it, and at how many points it is."""
    num_different = [
        sum(one.get(key) != of_point[cure].get(key) for key in {**one, **of_point[cure]})
        for of_point in flat.values()
        if cure in of_point
        for other, one in of_point.items()
        if other != cure
    ]
    mean = statistics.fmean(num_different) if num_different else math.inf
    return -mean, sum(cure in of_point for of_point in flat.values())


def changed_settings(plain: RunConfig, config: RunConfig) -> dict[str, Any]:
    """Return the settings of `config` that differ from those of `plain`, by name.

    Of settings that `plain` does not have, those with the default of their kind are left out.
    """
    before, after, given = identity_settings(plain), identity_settings(config), given_settings(config)
    changed: dict[str, Any] = {}
    for key, value in after.items():
        if key in before:
            is_changed = before[key] != value
        elif value is None:
            # A section that only `plain` has, or a setting that only `config` has and whose default is a value.
            is_changed = key in given or any(_is_in(each, key) for each in before)
        else:
            is_changed = any(_is_in(key, each) for each in given)
        if is_changed:
            changed[key] = value
    for section in before.keys() - after.keys():  # one that only `config` has, with the default of each of its settings
        inside = [key for key in after if _is_in(key, section)]
        if inside and not changed.keys() & set(inside):
            changed[section] = {}
    return changed


def _is_in(key: str, section: str) -> bool:
    return f"{key}.".startswith(f"{section}.")


def _short(value: Any) -> str:
    if isinstance(value, list) and value and all(isinstance(each, dict) and KIND in each for each in value):
        value = [each[KIND] for each in value]
    text = as_typed(value)
    return text if len(text) <= _MAX_CHARACTERS else f"{text[: _MAX_CHARACTERS - 1]}…"
