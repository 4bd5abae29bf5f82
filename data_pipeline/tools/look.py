"""Look at what lies in a place before anything is built: a census, every problem with its mend, and the commands.

The commands build what is there and train on it. They work if nothing has to be mended first.
"""

from __future__ import annotations

import argparse
import math
import re
import shlex
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from data_pipeline.core.errors import UserError, printable
from data_pipeline.core.label_words import normal
from data_pipeline.core.options import SOURCE_OPTION
from data_pipeline.core.sample import BASE, Medium
from data_pipeline.sources import LabelColumn
from data_pipeline.sources.files import Files, ending_of, medium_of
from data_pipeline.sources.layout import find_layout
from data_pipeline.sources.places import open_files
from data_pipeline.storage.locations import (
    MANIFEST_NAME,
    dataset_directory,
)
from data_pipeline.storage.manifest import LabelEntry, describe_manifest, load_manifest
from data_pipeline.tools.census import take_census
from data_pipeline.tools.findings import Place, Problem, add_equal_files, add_problems, add_split_folders
from data_pipeline.tools.next_commands import commands

_NUM_NAMED: Final = 3  # examples of a problem
_NUM_CLASSES: Final = 8  # that are named
_TABLES: Final = frozenset({".csv", ".tsv", ".jsonl", ".txt"})


def look_at(path: str, *, num_workers: int) -> Place:
    """Return what was found at a path. Raises `UserError` if there is nothing."""
    place, local = Place(path), Path(path).expanduser()
    if (dataset_directory(local) / MANIFEST_NAME).is_file():
        place.manifest = load_manifest(local)
        return place
    if local.is_file() and local.suffix.lower() in _TABLES:
        place.labels = local
    files = place.files = open_files(local if place.labels is None else local.parent)
    place.census = take_census(files, num_workers=num_workers, title=f"look at {path}")
    nums = Counter(kind.medium for kind in place.census.kinds.elements())
    if not nums["picture"] + nums["sound"]:
        mend = "name the folder, the zip, the tars or the table that has them"
        place.problems.append(Problem("there are no pictures or sounds", mend, stops=True))
        return place
    try:
        medium: Medium = "picture" if nums["picture"] >= nums["sound"] else "sound"
        place.layout = find_layout(files, medium, labels=place.labels)
    except UserError as error:
        place.problems.append(Problem(str(error), "", stops=True))
    else:
        add_problems(place, place.layout)
    return place


def describe(place: Place) -> Iterator[str]:
    """Yield the lines of the page about one path."""
    if place.manifest is not None:
        yield f"{place.path}: a dataset that is ready, {place.manifest.num_samples:,} samples"
        yield from (f"  {line}" for line in describe_manifest(place.manifest))
        return
    assert place.files is not None
    kind = "files" if place.layout is None else place.layout.kind
    yield f"{place.path}: {kind}"
    yield ""
    rows = list(_rows(place, place.files))
    width = max(len(title) for title, _ in rows)
    for title, what in rows:
        yield f"  {title:<{width}}  {what}"
    for problem in place.problems:
        yield ""
        yield from _problem_lines(problem)


def _rows(place: Place, files: Files) -> Iterator[tuple[str, str]]:
    """Yield the rows of the table: what is counted, and the counts."""
    census, layout = place.census, place.layout
    yield "files", f"{len(files.names):,}, of {census.num_bytes:,} bytes"
    mediums: tuple[Medium, Medium] = "picture", "sound"
    for medium in mediums:
        if kinds := census.count(medium, "format", "mode").most_common():
            words = ", ".join(f"{num:,} {form} {mode}" for (form, mode), num in kinds)
            yield f"{medium}s", re.sub(r"PCM_[SU]?(\d+)", r"\1 bits", words)
    if sizes := census.count("picture", "size"):
        limits = (pick(sizes, key=lambda size: math.prod(size[0]))[0] for pick in (min, max))
        yield "size", _from_to(f"{width:,} x {height:,}" for width, height in limits) + " pixels"
    if rates := census.count("sound", "rate"):
        yield "rate", _counted(rates, "{0[0]:,} points a second")
        yield "length", _from_to(f"{pick(census.count('sound', 'seconds'))[0]:g}" for pick in (min, max)) + " s"
    if channels := census.count("sound", "channels"):
        yield "channels", _counted(channels, "{0[0]}")
    if others := Counter(ending_of(name) or name for name in files.names if not medium_of(name)):
        yield "others", ", ".join(f"{num:,} {word}" for word, num in others.most_common(_NUM_CLASSES))
    if layout is not None:
        splits = Counter() if layout.split_N is None else Counter(layout.split_N.tolist())
        yield "splits", _counted(splits, "{}") or "none; test_share draws a test split"
        for name, label in layout.labels.items():
            yield f"label {name}", _label(_counts(label, place.is_good))
        parents = {normal(name.split("/")[-2]) for name in layout.names} if layout.has_class_folders else set[str]()
        if parents - set(layout.labels[BASE].classes if parents else ()):
            yield "or label", f"{SOURCE_OPTION} class_from=path:-1: {len(parents):,} folders that hold the files"
        if not layout.labels:
            yield "labels", "no labels: training needs none, probes need one"
    if decoded := census.count("picture", "is_decoded") + census.count("sound", "is_decoded"):
        yield "decoded", f"{decoded[True,]:,} of {decoded.total():,}, spread evenly"


def _from_to(words: Iterable[str]) -> str:
    """Return "least to most", or one word if both are the same."""
    return " to ".join(dict.fromkeys(words))


def _counted(counts: Counter[Any], form: str) -> str:
    """Return words for the most frequent values, with their numbers if there are several."""
    most = counts.most_common(_NUM_CLASSES)
    return ", ".join(form.format(value) + ("" if len(most) == 1 else f" ({num:,})") for value, num in most)


def _counts(label: LabelColumn, is_good: NDArray[np.bool_]) -> Counter[str]:
    """Return how many records that can be used each class has; "" stands for no class."""
    nums = np.bincount(label.label_N[is_good] + 1, minlength=len(label.classes) + 1)  # NO_LABEL is -1
    return Counter(dict(zip(("", *label.classes), nums.tolist(), strict=True)))


def _label(counts: Counter[str]) -> str:
    num_without = counts.pop("")
    words, nums = tuple(counts), tuple(counts.values())
    without = f"; {num_without:,} have none" if num_without else ""
    if LabelEntry.model_construct(title="", classes=words, counts=nums).is_number:
        return f"a number, {words[0]} to {words[-1]}{without}"
    each = _from_to(f"{pick(nums):,}" for pick in (min, max))
    more = ", ..." if len(words) > _NUM_CLASSES else ""
    return f"{len(words):,} classes of {each}: {', '.join(words[:_NUM_CLASSES])}{more}{without}"


def _problem_lines(problem: Problem) -> Iterator[str]:
    """Yield what is wrong, with examples, and the mend."""
    num = f" ({len(problem.names):,})" if problem.names else ""
    yield f"  {'!' if problem.stops else '-'} {printable(problem.what)}{num}"
    for name in problem.names[:_NUM_NAMED]:
        yield f"      {printable(name)}"
    if len(problem.names) > _NUM_NAMED:
        yield "      ..."
    if problem.mend:
        yield f"    mend: {problem.mend}"


def run(args: argparse.Namespace) -> None:
    """Do what `python -m data_pipeline look` asks for. Exits with status 1 if something must be mended first."""
    places = [look_at(path, num_workers=args.workers) for path in args.paths]
    add_equal_files(places)
    add_split_folders(places)
    print("\n\n".join("\n".join(describe(place)) for place in places))
    if found := commands(places):
        print("\nThese commands work now, on a CPU (docs/own-pictures.md has those for a GPU):\n")
        print("".join(f"  {shlex.join(words)}\n".replace(" --", " \\\n      --") for words in found))
    if any(problem.stops for place in places for problem in place.problems):
        print("mend what is marked with ! first", file=sys.stderr)
        sys.exit(1)
