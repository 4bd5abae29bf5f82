"""Turn --sweep and --sweep-file into the runs of a sweep: their settings, their names, and a RunConfig for each.

A sweep is a study that is made on a command line: a list of RunConfigs with one recipe. Each `--sweep a.b=1,2` is an
axis with its values, and a sweep file is a list of sets of settings. The runs are the product of all of them.

Invariants: a run has the config that `--set` would give it, but for its name and the record of the sweep in `tracking`.
The name of a run follows from the recipe and from its own values, and from no other run of the sweep.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from configs.resolve import resolve_recipe
from data_pipeline.core.errors import UserError
from data_pipeline.core.overrides import set_paths
from data_pipeline.core.plain_text import parse_yaml
from data_pipeline.core.schema import as_typed, value_at
from trainer.config import RunConfig, parse_file

MAX_RUNS: Final = 100  # without asking
_MAX_NAME: Final = 100  # characters, as `data_pipeline.core.schema.Name` allows
_MAX_VALUE: Final = 40  # characters of a value in a name
_HASH_DIGITS: Final = 6
_WITHOUT_PART: Final = {"seed", "name"}  # a directory is called NAME-seedSEED, which tells these apart

Values = Mapping[str, Any]  # the settings of one run that its sweep decides, by dotted name


@dataclass(frozen=True)
class SweepSpace:
    """The sets of settings whose product is the sweep: one list for each --sweep, and one for the file."""

    parts: tuple[tuple[Values, ...], ...]

    @property
    def num_runs(self) -> int:
        return math.prod(map(len, self.parts))

    @property
    def keys(self) -> tuple[str, ...]:
        """Return the names of all settings of the sweep, without repetition."""
        return tuple(dict.fromkeys(key for part in self.parts for values in part for key in values))

    def points(self) -> Iterator[Values]:
        """Yield the settings of each run. The last --sweep changes fastest."""
        for chosen in itertools.product(*self.parts):
            yield {key: value for values in chosen for key, value in values.items()}


@dataclass(frozen=True)
class Sweep:
    """The runs of a sweep. `points` has the resolved settings of each run, in the order of `runs`.

    name: the name of the directory of all runs, and of their group at W&B.
    axes: the names of the settings that the sweep decides.
    """

    name: str
    axes: tuple[str, ...]
    runs: tuple[RunConfig, ...]
    points: tuple[Values, ...]


def read_space(axes: Sequence[str], file: Path | None, *, overrides: Sequence[str]) -> SweepSpace:
    """Return the space of the --sweep texts `axes` and of the sweep file.

    Raises `UserError` if a text or the file cannot be read, if there are no values, or if a setting is given twice:
    by two --sweep, by the file and a --sweep, or also by --set (`overrides`).
    """
    parts = [_read_axis(text) for text in axes]
    if file is not None:
        parts.append(_read_sets(file))
    by_hand = {".".join(path) for path in set_paths(overrides)}
    seen: dict[str, str] = {}
    sources = [f"--sweep {text.partition('=')[0]}" for text in axes] + [f"--sweep-file {file}"]
    for part, source in zip(parts, sources, strict=False):
        for key in dict.fromkeys(key for values in part for key in values):
            if key in by_hand:
                raise UserError(f"{source} gives {key}, and so does --set; leave one of them out")
            if key in seen:
                raise UserError(f"{seen[key]} and {source} both give {key}; give all its values in one of them")
            seen[key] = source
    return SweepSpace(tuple(parts))


def _read_axis(text: str) -> tuple[Values, ...]:
    """Return the settings of "a.b=1,2,3", one for each value."""
    name, separator, values = text.partition("=")
    if not separator:
        raise UserError(f'--sweep {text} has no "="; write --sweep NAME=VALUE,VALUE')
    try:
        found = parse_yaml(f"[{values}]")
    except ValueError as error:
        raise UserError(
            f"--sweep {text}: the values are not YAML ({error}); write --sweep {name}=VALUE,VALUE"
        ) from None
    if not found:
        raise UserError(f"--sweep {text} has no values; write --sweep {name}=VALUE,VALUE")
    return tuple({_plain_key(name): value} for value in found)


def _read_sets(file: Path) -> tuple[Values, ...]:
    """Return the sets of settings of a sweep file: a YAML list of mappings from dotted names to values."""
    sets = parse_file(file, what="sweep file", is_yaml=True)
    example = 'such as "- {objective.temperature: 0.1, seed: 0}"'
    if not isinstance(sets, list) or not sets:
        raise UserError(f"{file} holds no list of runs; write one line for each, {example}")
    for number, values in enumerate(sets, 1):
        if not isinstance(values, dict) or not values:
            raise UserError(f"{file}: run {number} is not a mapping of settings; write it {example}")
    return tuple({_plain_key(key): value for key, value in values.items()} for values in sets)


def _plain_key(key: str) -> str:
    return ".".join(part.strip() for part in key.split("."))


def resolve_sweep(config: str, space: SweepSpace, *, overrides: Sequence[str] = (), group: str | None = None) -> Sweep:
    """Return the runs of a sweep of the recipe or file `config`, each with `overrides` applied.

    group: the name of the sweep (default: the name of the recipe and of the settings).

    Raises `UserError` for an unknown setting or a value that does not fit, which it names, and if two runs have the
    same name and seed.
    """
    keys = space.keys
    resolved = [resolve_recipe(config, [*overrides, *_as_overrides(values)]) for values in space.points()]
    points = [{key: value_at(run, key) for key in values} for run, values in zip(resolved, space.points(), strict=True)]
    name = _cut("-".join([resolved[0].name, "sweep", *sorted(keys)]))
    recorded = {"group": group or name, "axes": keys}
    runs = [
        run.model_copy(update={"name": run_name(run.name, point), "tracking": run.tracking.model_copy(update=recorded)})
        for run, point in zip(resolved, points, strict=True)
    ]
    _refuse_namesakes(runs, points)
    return Sweep(name, keys, tuple(runs), tuple(points))


def _as_overrides(values: Values) -> list[str]:
    """Return settings as --set takes them: a JSON value is also one of YAML."""
    return [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in values.items()]


def _refuse_namesakes(runs: Sequence[RunConfig], points: Sequence[Values]) -> None:
    counts = Counter((run.name, run.seed) for run in runs)
    (name, seed), count = counts.most_common(1)[0]
    if count > 1:
        first = next(point for run, point in zip(runs, points, strict=True) if (run.name, run.seed) == (name, seed))
        said = ", ".join(f"{key}={json.dumps(value)}" for key, value in first.items())
        raise UserError(
            f"the sweep has {count} runs called {name} with seed {seed} ({said}); leave the others out, or give each "
            "a name of its own in a --sweep-file"
        )


def run_name(recipe_name: str, point: Values) -> str:
    """Return the name of a run: that of its recipe, and NAME=VALUE for each setting of the sweep but seed and name.

    A name that would be too long ends in a hash of the whole.

    Examples:
        >>> run_name("simclr", {"seed": 2, "objective.temperature": 0.1})
        'simclr-objective.temperature=0.1'
    """
    parts = [f"{key}={_value_part(point[key])}" for key in sorted(point) if key not in _WITHOUT_PART]
    return _cut("-".join([recipe_name, *parts]))


def _value_part(value: Any) -> str:
    """Return a value in the characters of a name; a long one is cut, and ends in a hash of the whole."""
    text = as_typed(value)
    if isinstance(value, str | list | dict):
        text = re.sub(r"[^A-Za-z0-9._+=-]+", "-", text).strip("-") or "empty"
    return _cut(text, _MAX_VALUE)


def _cut(text: str, most: int = _MAX_NAME) -> str:
    if len(text) <= most:
        return text
    return f"{text[: most - _HASH_DIGITS - 1]}-{hashlib.sha256(text.encode()).hexdigest()[:_HASH_DIGITS]}"
