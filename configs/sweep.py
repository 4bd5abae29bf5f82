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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from configs.resolve import resolve_recipe
from data_pipeline.core.errors import UserError
from data_pipeline.core.overrides import parse_setting, set_paths
from data_pipeline.core.schema import as_typed, flatten, value_at
from data_pipeline.core.sections import KIND
from trainer.config import RunConfig, parse_file

MAX_RUNS: Final = 100  # without asking
_MAX_NAME: Final = 100  # characters, as `data_pipeline.core.schema.Name` allows
_MAX_VALUE: Final = 40  # characters of a value in a name
_HASH_DIGITS: Final = 6
_WITHOUT_PART: Final = {"seed", "name"}  # a directory is called NAME-seedSEED, which tells these apart
_OPENING: Final = {"[": "]", "{": "}"}

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
    texts = split_values(values)
    if not values.strip() or not all(each.strip() for each in texts):
        what = "has no values" if not values.strip() else "has an empty value"
        raise UserError(f"--sweep {text} {what}; write --sweep {name}=VALUE,VALUE, with null for a value that is none")
    found = []
    for each in texts:
        setting = parse_setting(f"{name}={each}", flag="--sweep")
        found.append({".".join(setting.path): setting.value})
    return tuple(found)


def split_values(text: str) -> list[str]:
    """Split a text at its commas, except those in brackets, braces and quotes.

    Examples:
        >>> split_values("1, [2, 3],{a: 4, b: 5},'x,y'")
        ['1', ' [2, 3]', '{a: 4, b: 5}', "'x,y'"]
    """
    parts, closing, quote = [""], list[str](), ""
    for character in text:
        if character == "," and not closing and not quote:
            parts.append("")
            continue
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"" and (closing or not parts[-1].strip()):  # elsewhere it is an apostrophe
            quote = character
        elif character in _OPENING:
            closing.append(_OPENING[character])
        elif closing and character == closing[-1]:
            closing.pop()
        parts[-1] += character
    return parts


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


def resolve_sweep(
    config: str,
    space: SweepSpace,
    *,
    overrides: Sequence[str] = (),
    group: str | None = None,
) -> Sweep:
    """Return the runs of a sweep of the recipe or file `config`, each with `overrides` applied.

    group: the name of the sweep (default: the name of the recipe and of the settings).

    Raises `UserError` for an unknown setting or a value that does not fit, which it names, and if two runs have the
    same name and seed.
    """
    keys = space.keys
    resolved = [resolve_recipe(config, [*overrides, *_as_overrides(values)]) for values in space.points()]
    points = [{key: value_at(run, key) for key in values} for run, values in zip(resolved, space.points(), strict=True)]
    short = short_names(keys, _settings_of(config, overrides))
    name = _cut("-".join([resolved[0].name, "sweep", *(short[key] for key in sorted(keys))]))
    recorded = {"group": group or name, "axes": keys}
    runs = [
        run.model_copy(
            update={
                "name": run_name(run.name, point, short),
                "tracking": run.tracking.model_copy(update=recorded),
            }
        )
        for run, point in zip(resolved, points, strict=True)
    ]
    _refuse_namesakes(runs, points)
    return Sweep(name, keys, tuple(runs), tuple(points))


def _settings_of(config: str, overrides: Sequence[str]) -> list[str]:
    """Return the settings and sections of a recipe with `overrides`, in their order.

    They do not depend on the values of a sweep, so that more values rename no run. If `overrides` are valid only
    together with the sweep, these are the settings of the recipe alone.
    """
    try:
        resolved = resolve_recipe(config, overrides)
    except UserError:
        resolved = resolve_recipe(config)
    paths = [setting.split(".") for setting in flatten(resolved)]
    return list(dict.fromkeys(".".join(path[:end]) for path in paths for end in range(1, len(path) + 1)))


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


def run_name(recipe_name: str, point: Values, short: Mapping[str, str]) -> str:
    """Return the name of a run: that of its recipe, and NAME=VALUE for each setting of the sweep but seed and name.

    `short` has the short name of each setting. A name that would be too long ends in a hash of the whole.

    Examples:
        >>> run_name("simclr", {"seed": 2, "objective.temperature": 0.1}, {"objective.temperature": "temperature"})
        'simclr-temperature=0.1'
    """
    parts = [f"{short[key]}={_value_part(point[key])}" for key in sorted(point) if key not in _WITHOUT_PART]
    return _cut("-".join([recipe_name, *parts]))


def short_names(keys: Sequence[str], settings: Iterable[str] = ()) -> dict[str, str]:
    """Return for each setting of a sweep the shortest end of its dotted name that names it alone.

    settings: all settings of the config. Several may end alike: then the end names the one with the fewest words, and
        of those the first, while the others keep a section in front. Two settings of the sweep that end alike both do.

    The kind of a section is called as the section is.

    Examples:
        >>> list(short_names(["objective.temperature", "optimizer.kind", "probe.seed", "seed"]).values())
        ['temperature', 'optimizer', 'probe.seed', 'seed']
        >>> settings = ["optimizer.learning_rate", "probe.learning_rate"]
        >>> [short_names([key], settings)[key] for key in settings]
        ['learning_rate', 'probe.learning_rate']
    """
    words = {key: _words(key) for key in keys}
    named = _named_by_end([*map(_words, settings), *map(_words, sorted(keys))])
    num_with_end = Counter(end for name in set(words.values()) for end in _ends(name))

    def names_alone(end: tuple[str, ...], key: str) -> bool:
        return end == words[key] or (num_with_end[end] == 1 and named[end] == words[key])

    return {key: ".".join(next(end for end in _ends(words[key]) if names_alone(end, key))) for key in keys}


def _words(key: str) -> tuple[str, ...]:
    return tuple(key.removesuffix(f".{KIND}").split("."))


def _ends(words: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return the ends of a dotted name, the shortest first."""
    return [words[start:] for start in reversed(range(len(words)))]


def _named_by_end(names: Sequence[tuple[str, ...]]) -> dict[tuple[str, ...], tuple[str, ...]]:
    """Return for each end of a name the name that it stands for: the shortest, and of those the first."""
    named: dict[tuple[str, ...], tuple[str, ...]] = {}
    for words in sorted(dict.fromkeys(names), key=len):
        for end in _ends(words):
            named.setdefault(end, words)
    return named


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
