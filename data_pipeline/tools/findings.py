"""Find what is wrong with the files of a place, and how to mend it.

Shapes: N records.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from data_pipeline.audio.sound_file import LEAST_SECONDS
from data_pipeline.core.sample import NO_LABEL
from data_pipeline.sources.files import Files, medium_of
from data_pipeline.sources.known_layouts import TEST, TRAIN
from data_pipeline.sources.layout import Layout, split_of
from data_pipeline.storage.manifest import Manifest
from data_pipeline.storage.tar_headers import name_of_tar
from data_pipeline.tools.census import BAD, Census, equal_files

# For bad files and for each finding: the sentence that says it, and how to mend it.
_OF_FILES: Final = {
    BAD: (
        "damaged, cut short, not read, or not what their names say",
        "copy, download or save them again; the commands leave them out",
    ),
    "archive": ("an archive, so its files are not read", "unpack it beside the others, or look at it alone"),
    "no ending": ("without the ending of a picture or a sound, so not read", "rename them"),
    "constant": ("of one colour alone", "remove them if they are placeholders"),
    "silent": ("silent", "remove them if their recording failed"),
    "short": (f"shorter than {LEAST_SECONDS} s", "remove them if their recording failed"),
}


@dataclass(frozen=True)
class Problem:
    """What is odd or wrong, the names of all files or classes that it is about, and how to mend it.

    `stops` says that no command works before it is mended.
    """

    what: str
    mend: str
    names: Sequence[str] = ()
    stops: bool = False


@dataclass
class Place:
    """What was found at one path.

    Attributes:
        path: as the user named it.
        files: what lies there; None if it is a dataset already.
        census: of all files.
        layout: what the files mean; None if that cannot be told, and `problems` says why.
        labels: the table of labels that `path` is; None if it is something else.
        manifest: of a dataset that is built or indexed already.
        problems: what is odd or wrong.
    """

    path: str
    files: Files | None = None
    census: Census = field(default_factory=Census)
    layout: Layout | None = None
    labels: Path | None = None
    manifest: Manifest | None = None
    problems: list[Problem] = field(default_factory=list)

    @cached_property
    def is_good(self) -> NDArray[np.bool_]:
        """Return whether each record can be used."""
        names = () if self.layout is None else self.layout.names
        bad = self.census.bad
        return np.array([name not in bad for name in names], dtype=bool)

    @property
    def num_least(self) -> int:
        """Return how many files that can be used the smallest class folder has; without such, one less than all."""
        if self.layout is None or not self.layout.has_class_folders:
            return int(np.count_nonzero(self.is_good)) - 1
        (label,) = self.layout.labels.values()
        return int(np.bincount(label.label_N[self.is_good], minlength=len(label.classes)).min())


def add_problems(place: Place, layout: Layout) -> None:
    """Add what is wrong with files, classes and splits."""
    census, problems = place.census, place.problems
    for remark, reasons in census.remarks.items():
        what, mend = _OF_FILES[remark]
        problems.append(Problem(what, mend, [f"{name}: {why}" if why else name for name, why in reasons.items()]))
    for sentence, about in layout.notes.items():
        known = [name for name in about if medium_of(name) is not None]
        if known or not sentence.startswith("ignored"):  # other files are counted elsewhere
            problems.append(Problem(sentence, "", about))
    is_good = place.is_good
    if not is_good.any():
        problems.append(Problem(f"no {layout.medium} can be used", "see above", stops=True))
    if layout.split_N is not None and len(splits := set(layout.split_N.tolist())) == 1:
        mend = "name that folder itself, or one that holds both"
        problems.append(Problem(f"there is a {splits.pop()} split alone", mend, stops=True))
    if layout.split_N is None and place.num_least < 2:
        what = f"too few {layout.medium}s, of all or of a class, to draw a test split"
        problems.append(Problem(what, "add some, or make folders train and test", stops=True))
    for name, label in layout.labels.items():
        if layout.split_N is None:
            continue
        train, test = ({*label.label_N[is_good & (layout.split_N == s)].tolist()} - {NO_LABEL} for s in (TRAIN, TEST))
        if train and test and (lone := [label.classes[number] for number in sorted(train ^ test)]):
            problems.append(Problem(f"classes of {name} in one split alone", "add some to the other split", lone))


def add_split_folders(found: Sequence[Place]) -> None:
    """Add that folders or tars of pictures or sounds are the splits of one dataset, if they are named one by one."""
    folders = [Path(place.path).absolute() for place in found if place.files is not None]
    are_splits = all(split_of(name_of_tar(folder.name)) for folder in folders)
    if len(folders) > 1 == len({folder.parent for folder in folders}) and are_splits:
        mend = f"look at {folders[0].parent}, which holds them all"
        for place in found:
            place.problems.append(Problem("one split of a dataset", mend, stops=True))


def add_equal_files(found: Sequence[Place]) -> None:
    """Add the files that are equal in train and test, in two classes, or at two paths, and copies."""
    places = [(place, place.files, _split_and_classes(place)) for place in found if place.files is not None]
    problems: dict[tuple[int, str, str], list[str]] = {}
    for group in equal_files([place.census for place, _, _ in places]):
        named = [(number, places[number][1].names[name]) for number, name in group]
        means = [(number, *places[number][2][name]) for number, name in named if name in places[number][2]]
        if len(means) < 2:
            continue
        paths, splits, classes = ({mean[part] for mean in means} for part in range(3))
        if len(paths) > 1:
            case = "equal to files of another path", "remove them from one, if one is for training and one for tests"
        elif len(splits) > 1:
            case = "equal in train and test", "remove them from train, else probes look too good"
        elif len(classes) > 1:
            case = "equal, but of two classes", "keep them in one"
        else:
            case = "copies of others", "nothing, if that is meant"
        pair = [name if len(paths) == 1 else f"{places[number][0].path}/{name}" for number, name in named[:2]]
        problems.setdefault((means[-1][0], *case), []).append(" = ".join(pair))
    for (number, what, mend), pairs in problems.items():
        places[number][0].problems.append(Problem(what, mend, pairs))


def _split_and_classes(place: Place) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the split of each record that can be used, "" if there is none, and its number in each label, by name."""
    layout = place.layout
    if layout is None:
        return {}
    splits = [""] * len(layout.names) if layout.split_N is None else layout.split_N.tolist()
    numbers = [label.label_N.tolist() for label in layout.labels.values()]
    rows = zip(layout.names, place.is_good, splits, *numbers, strict=True)
    return {name: (split, tuple(classes)) for name, is_good, split, *classes in rows if is_good}
