"""Turn the --sweep of a command line into the runs of a sweep: a RunConfig for each, with a name of its own.

A sweep is a study that is made on a command line: a list of RunConfigs with one recipe. Each `--sweep a.b=1,2` is an
axis with its values, and the runs are the product of all axes.

Invariants: a run has the config that `--set` would give it, but for its name and the record of the sweep in `tracking`.
The name of a run follows from the recipe and from its own values, and from no other run of the sweep.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from configs.resolve import refuse_namesakes, resolve_recipe
from data_pipeline.core.errors import UserError
from data_pipeline.core.overrides import set_paths
from data_pipeline.core.plain_text import parse_yaml
from data_pipeline.core.schema import as_typed
from trainer.config import RunConfig

_MAX_NAME: Final = 100  # characters, as `data_pipeline.core.schema.Name` allows
_HASH_DIGITS: Final = 6
_WITHOUT_PART: Final = {"seed", "name"}  # a directory is called NAME-seedSEED, which tells these apart


def resolve_sweep(config: str, axes: Sequence[str], *, overrides: Sequence[str] = ()) -> tuple[str, list[RunConfig]]:
    """Return the name of a sweep of the recipe or file `config`, and its runs, each with `overrides` applied.

    axes: the texts of --sweep, such as "seed=0,1". The last one changes fastest.

    The name is the group of the runs in W&B, unless they have one. `tracking.axes` names the settings.

    Raises `UserError` for an unknown setting or a value that does not fit, which it names, if a setting is given twice,
    and if two runs have the same name and seed.
    """
    values = _values_of(axes, overrides)
    points = [dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values())]
    runs = [
        resolve_recipe(config, [*overrides, *(f"{key}={json.dumps(value)}" for key, value in point.items())])
        for point in points  # JSON is YAML, too
    ]
    name = _cut("-".join([runs[0].name, "sweep", *sorted(values)]))
    named = []
    for run, point in zip(runs, points, strict=True):
        tracking = run.tracking.model_copy(update={"group": run.tracking.group or name, "axes": tuple(values)})
        named.append(run.model_copy(update={"name": run_name(run.name, point), "tracking": tracking}))
    refuse_namesakes(named, where="the sweep")
    return name, named


def _values_of(axes: Sequence[str], overrides: Sequence[str]) -> dict[str, list[Any]]:
    """Return the values of each setting of a sweep. Raises `UserError` if it has none, or is also given elsewhere."""
    by_hand = {".".join(path) for path in set_paths(overrides)}
    found: dict[str, list[Any]] = {}
    for text in axes:
        name, _, values = text.partition("=")
        key = ".".join(part.strip() for part in name.split("."))
        if key in found or key in by_hand:
            raise UserError(
                f"--sweep {key}: another --sweep or --set gives {key}, too; give all its values in one of them"
            )
        try:
            found[key] = parse_yaml(f"[{values}]")
        except ValueError as error:
            raise UserError(f"--sweep {text}: the values are not YAML ({error}); write {key}=VALUE,VALUE") from None
        if not found[key]:
            raise UserError(f"--sweep {text} has no values; write --sweep {key}=VALUE,VALUE")
    return found


def run_name(recipe_name: str, point: Mapping[str, Any]) -> str:
    """Return the name of a run: that of its recipe, and NAME=VALUE for each setting of the sweep but seed and name.

    A name that would be too long ends in a hash of the whole.

    Examples:
        >>> run_name("simclr", {"seed": 2, "objective.temperature": 0.1})
        'simclr-objective.temperature=0.1'
    """
    parts = [f"{key}={_value_part(point[key])}" for key in sorted(point) if key not in _WITHOUT_PART]
    return _cut("-".join([recipe_name, *parts]))


def _value_part(value: Any) -> str:
    """Return a value in the characters of a name."""
    text = as_typed(value)
    if isinstance(value, str | list | dict):
        text = re.sub(r"[^A-Za-z0-9._+=-]+", "-", text).strip("-") or "empty"
    return text


def _cut(text: str) -> str:
    if len(text) <= _MAX_NAME:
        return text
    return f"{text[: _MAX_NAME - _HASH_DIGITS - 1]}-{hashlib.sha256(text.encode()).hexdigest()[:_HASH_DIGITS]}"
