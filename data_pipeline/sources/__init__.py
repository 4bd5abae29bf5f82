"""Sources of clean pictures and sounds with their labels.

A source reads a folder that the user names, or generates its records. All its records are pictures of one size or
sounds of one sample rate, each with a label. A source knows all its labels at once, so that a build can choose and
order records before it decodes any.

Guarantees: a record that does not decode raises an error and is never skipped. The order depends on the content alone,
not on the file system.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from data_pipeline.core.errors import UserError
from data_pipeline.core.options import SOURCE_OPTION, Options
from data_pipeline.core.sample import Record
from data_pipeline.core.schema import Schema

__all__ = ["SoundSource", "Source"]

T = TypeVar("T", bound=Schema)


class Source(Protocol):
    """Records and their labels. It must be picklable, because worker processes of a build read it."""

    @property
    def description(self) -> str:
        """Return the kind of source for the manifest. It holds no path, because paths differ between machines."""

    @property
    def num_records(self) -> int: ...

    @property
    def labels(self) -> Mapping[str, LabelColumn]:
        """Return every label by name; a build balances the classes of the first, which is `base` if there is one."""

    def __getitem__(self, number: int) -> Record:
        """Return one record, the same at each call. Raises `UserError` with the file's name if it does not decode."""


@dataclass(frozen=True)
class LabelColumn:
    """One label of all records of a source.

    Attributes:
        title: what the label is about, such as "picture" or "diagnosis".
        classes: the class names, in the order of their numbers.
        label_N: (num_records,) int64; `NO_LABEL` for a record without this label.
    """

    title: str
    classes: tuple[str, ...]
    label_N: NDArray[np.int64]


def first_record(source: Source, numbers: Iterable[int]) -> Record:
    """Return the first of some records that can be read. Raises `UserError` if none can."""
    reason = ""
    for number in numbers:
        try:
            return source[number]
        except UserError as error:
            reason = reason or f": {error}"
    raise UserError(f"no record can be used{reason or '; give a source that has some'}")


@dataclass(frozen=True)
class SourceInputs:
    """The choices of a build from which a source is opened. Most sources read only some of them.

    Attributes:
        base: the pictures of the dataset, such as "cifar10", "folder" or "procedural".
        root: the folder of the source's files; None if the source has no files.
        split: "train" or "test".
        seed: the seed of the build.
        limit: the most records that the build takes; None for all. A source that generates records makes so many.
        options: by name, as the user gave them. `read` checks them.
        shared: what a source keeps for the build of another split; empty at first.
    """

    base: str
    root: Path | None
    split: str
    seed: int
    limit: int | None
    options: Options = field(default_factory=dict)
    shared: dict[str, Any] = field(default_factory=dict)

    def read(self, schema: type[T]) -> T:
        """Return the options of the user. Raises `UserError` if one is unknown or wrong."""
        return schema.parse(dict(self.options), where=f"{SOURCE_OPTION} of the source of {self.base}")

    def required_root(self) -> Path:
        """Return `root`. Raises `UserError` if the user named none."""
        if self.root is None:
            raise UserError(f"the source of {self.base} reads the files of a folder; name it with --root")
        return self.root


class SourceKind(Protocol):
    """A class that opens the sources of one name.

    A class with options of its own has an attribute `options_schema`, a `Schema` with a field for each, and reads them
    by `given.read(options_schema)`. A class that reads files takes their folder from `given.required_root()`.
    """

    @classmethod
    def open(cls, given: SourceInputs) -> Source:
        """Return the source of one split. Raises `UserError` if its files are missing or do not fit the choices."""


class SoundSource(Source, Protocol):
    """A source of sounds of `sample_rate` points a second, each of any length; `num_points` is that in a batch."""

    @property
    def sample_rate(self) -> int: ...

    @property
    def num_points(self) -> int: ...
