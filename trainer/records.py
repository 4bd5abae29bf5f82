"""Read the records of a run, metrics.jsonl and provenance.json, for restart, report and status.

Guarantees: no content of these files raises an error. Damaged parts are left out, and reported by file and line.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

MOST = 2**53  # for a step and other counts: above it, a float does not hold every whole number
_LARGEST = 1e100  # for a metric: larger numbers cannot be drawn, and count as not finite
_NUM_NAMED = 5  # damaged lines in a message
_END_BYTES = 2**16  # of a metrics.jsonl, read at first by `read_last_metrics`


@dataclass(frozen=True)
class Metrics:
    """The entries of metrics.jsonl by ascending step, {"step": int, "epoch": int, "train/loss": float, ...}.

    All numbers are finite. `problems` holds sentences that say what was left out, and where.
    """

    entries: list[dict[str, Any]]
    problems: tuple[str, ...]


@dataclass(frozen=True)
class Provenance:
    """The facts of provenance.json. Known facts have the right type. `problems` says what was left out, and where."""

    facts: dict[str, Any]
    problems: tuple[str, ...]


class _DamagedError(Exception):
    """A part of a file is damaged; the message is the end of a sentence."""


def read_metrics(path: Path) -> Metrics:
    """Read a metrics.jsonl; a missing file gives no entries.

    A last line that a kill cut short is not damage. If a restart repeated a step, its last line counts.
    """
    return _metrics_in(path.read_bytes(), path) if path.is_file() else Metrics([], ())


def read_last_metrics(path: Path, name: str) -> Metrics:
    """Read the end of a metrics.jsonl, from its last entry with the metric `name` on or from an earlier one.

    The steps of the file ascend, as the tracker writes them, so its last step and the last value of `name` are those of
    `read_metrics`. Reads more if it does not find an entry with `name`. Reads the whole file if there is none, or if a
    line at the end is damaged: the message says the number of the line.
    """
    if not path.is_file():
        return Metrics([], ())
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)  # a training may write more meanwhile
        num_bytes = _END_BYTES
        while num_bytes < size:
            file.seek(size - num_bytes)
            _, _, lines = file.read(num_bytes).partition(b"\n")
            found = _metrics_in(lines, path)
            if found.problems:
                break
            if any(name in entry for entry in found.entries):
                return found
            num_bytes *= 8  # so that the bytes of all attempts are few more than those of the last one
    return read_metrics(path)


def _metrics_in(data: bytes, path: Path) -> Metrics:
    """Return the entries in lines of a metrics.jsonl, of which the last one may be cut short."""
    by_step: dict[int, dict[str, Any]] = {}
    damaged: list[str] = []
    *lines, rest = data.split(b"\n")
    for number, line in enumerate([*lines, rest], 1):
        if not line.strip():
            continue
        try:
            entry, wrong = _entry(_parse(line))
        except _DamagedError as error:
            if number <= len(lines):
                damaged.append(f"line {number} {error}")
            continue
        damaged += [f"line {number} {text}" for text in wrong]
        by_step[entry["step"]] = by_step.get(entry["step"], {}) | entry
    return Metrics([by_step[step] for step in sorted(by_step)], _in_one_sentence(path, damaged))


def read_provenance(path: Path) -> Provenance:
    """Read a provenance.json; a missing file gives no facts."""
    if not path.is_file():
        return Provenance({}, ())
    try:
        value = _parse(path.read_bytes())
        if not isinstance(value, dict):
            raise _DamagedError("holds no object of facts")
    except _DamagedError as error:
        return Provenance({}, (f"{path} {error}; going on without it",))
    facts, wrong = _checked(value, _FACTS)
    if "starts" in facts:
        starts = []
        for number, start in enumerate(facts["starts"] or [], 1):
            if isinstance(start, dict):
                found, wrong_there = _checked(start, _START_FACTS)
                starts.append(found)
                wrong += [f"{text} in start {number}" for text in wrong_there]
            else:
                wrong.append(f"has no facts in start {number}")
        facts["starts"] = starts
    return Provenance(facts, _in_one_sentence(path, wrong))


def _parse(data: bytes) -> Any:
    try:
        return json.loads(data.decode())
    except UnicodeDecodeError:
        raise _DamagedError("is not UTF-8") from None
    except ValueError:  # also a number with more digits than Python reads
        raise _DamagedError("is not JSON") from None
    except RecursionError:
        raise _DamagedError("is nested too deeply") from None


def _entry(value: Any) -> tuple[dict[str, Any], list[str]]:
    """Return the numbers of one line, and the problems of the numbers that are left out."""
    if not isinstance(value, dict):
        raise _DamagedError("holds no object of metrics")
    if "step" not in value:
        raise _DamagedError("has no step")
    if not _is_count(value["step"]):
        raise _DamagedError(f"has the step {_shown(value['step'])}, which is not a whole number from 0 to 2^53")
    if _has_only_numbers(value):
        return value, []
    wrong = [
        f"has {_shown(name)}: {_shown(number)}, which is not a number"
        for name, number in value.items()
        if number is not None and not _is_number(number)
    ]
    return {name: number for name, number in value.items() if _is_number(number) and abs(number) <= _LARGEST}, wrong


def _has_only_numbers(value: Mapping[str, Any]) -> bool:
    """Tell at once whether all values of a line are finite numbers that can be drawn, as they nearly always are."""
    numbers = value.values()
    return (
        set(map(type, numbers)) <= {int, float}
        and max(numbers) <= _LARGEST
        and min(numbers) >= -_LARGEST
        and math.isfinite(sum(numbers))  # a nan passes the comparisons, but not the sum
    )


def _checked(value: Mapping[str, Any], known: Mapping[str, Callable[[Any], bool]]) -> tuple[dict[str, Any], list[str]]:
    """Return the facts that are unknown or have the right type, and the problems of the others."""
    bad = {name for name, fact in value.items() if fact is not None and name in known and not known[name](fact)}
    wrong = [f"has {name}: {_shown(value[name])}, which is not valid" for name in value if name in bad]
    return {name: fact for name, fact in value.items() if name not in bad}, wrong


def _in_one_sentence(path: Path, wrong: list[str]) -> tuple[str, ...]:
    """Return one sentence about all problems, or an empty tuple."""
    if not wrong:
        return ()
    more = f", and {len(wrong) - _NUM_NAMED} more" if len(wrong) > _NUM_NAMED else ""
    return (f"{path}: {', '.join(wrong[:_NUM_NAMED])}{more}; going on without it",)


def _shown(value: Any) -> str:
    """Return a value, which may be hostile, as short printable ASCII."""
    try:
        text = ascii(value)
    except (RecursionError, ValueError):  # a whole number with more digits than Python writes
        text = f"a {type(value).__name__}"
    return text if len(text) <= 40 else f"{text[:37]}..."


def _is(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kind)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST


def _is_seconds(value: Any) -> bool:
    return _is_number(value) and 0 <= value <= MOST and math.isfinite(value)


def _is_texts_by_name(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())


def _is_instant(value: Any) -> bool:
    """Return whether a value is a time with a time zone, in ISO format."""
    try:
        return isinstance(value, str) and datetime.fromisoformat(value).tzinfo is not None
    except ValueError:
        return False


_START_FACTS: Mapping[str, Callable[[Any], bool]] = {
    "started_at": _is_instant,
    "start_step": _is_count,
    "command": _is(str),
    "world_size": _is_count,
    "host": _is(str),
    "git_commit": _is(str),
    "snapshot_sha256": _is(str),
    "git_diff_sha256": _is(str),
    "train_manifest_sha256": _is(str),
    "own_code": _is(dict),
}
_FACTS: Mapping[str, Callable[[Any], bool]] = {
    **_START_FACTS,
    "run_id": _is(str),
    "git_dirty": _is(bool),
    "seed": _is_count,
    "cpu": _is(str),
    "num_cpus": _is_count,
    "gpu": _is(str),
    "versions": _is_texts_by_name,
    "test_manifest_sha256": _is(str),
    "total_wall_seconds": _is_seconds,
    "wall_seconds": _is_seconds,
    "finished_step": _is_count,
    "num_train_samples": _is_count,
    "num_test_samples": _is_count,
    "starts": _is(list),
    "config": _is(dict),
}
