"""Scan WebDataset tars: where the members of their samples lie, and what their labels are.

Each tar is scanned once, by its headers; only the labels and a few pictures, for the mean and the deviation, are read.
Worker processes scan tars side by side.

Shapes: N samples of a tar, M members of a sample.
"""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from data_pipeline.core.errors import UserError, printable
from data_pipeline.core.label_words import as_word, normal
from data_pipeline.core.randomness import generator
from data_pipeline.core.sample import BASE, NO_LABEL
from data_pipeline.core.schema import MAX_CHARACTERS
from data_pipeline.remote.fetch import RemoteConfig, RemoteFile, fetch
from data_pipeline.storage.index import MAX_MEMBER_BYTES, map_file, pack
from data_pipeline.storage.locations import is_remote
from data_pipeline.storage.manifest import Fields
from data_pipeline.storage.tar_headers import (
    LINKS,
    TarMember,
    name_of_tar,
    plain_contents,
    read_contents,
    split_name,
    tars_in,
)

LABEL_FIELDS: Final = ("cls", "label", "label.txt", "class", "cls.txt")  # tried in this order if none is named
_REMOTE: Final = RemoteConfig()
_MAX_FIELDS: Final = 50  # that are counted in a tar
_METADATA: Final = re.compile(r"__[^/]*__($|/)")  # names of members that WebDataset passes over
_FINE: Final = 1 << 20  # places of a draw in a piece of a tar
PATH_FIELD, TAR_FIELD = "path", "tar"  # labels that are no file: see `Fields.labels`

# Why samples or files of a tar are left out, as `LeftOut` counts them.
_INCOMPLETE: Final = "samples without a picture, or with one of more than 268 MB, are left out"
_DOTTED: Final = "files are left out, because their names have several dots; `build folder --keep` packs them anew"
UNREAD_LABELS: Final = "labels cannot be read"
_UNDECODED: Final = "of the pictures that were tried do not decode"


class LeftOut:
    """For each reason, how many samples or files are not used, or are odd, and the first of them.

    A reason is a sentence that goes on after a number, such as "links are not read".
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.first: dict[str, str] = {}

    def add(self, reason: str, what: str = "", *, num: int = 1) -> None:
        """Count something that is left out for a reason; `what` names it."""
        if num:
            self.counts[reason] += num
            self.first.setdefault(reason, what)

    def __iadd__(self, other: LeftOut) -> Self:
        for reason, num in other.counts.items():
            self.add(reason, other.first[reason], num=num)
        return self

    def lines(self) -> Iterator[str]:
        """Yield a line for each reason."""
        for reason, num in self.counts.items():
            such_as = self.first[reason] and f", such as {printable(self.first[reason])}"
            yield f"{num:,} {reason}{such_as}"


@dataclass(frozen=True)
class ScannedTar:
    """The entries of an index for one tar.

    Attributes:
        path: the path or URL.
        num_bytes, changed_ns: size and time of change of the file when it was scanned; of a remote tar the size alone.
        sha256: of a remote tar, or one of a build; empty for others.
        packed_NM: (N, M) int64, where the members of each sample lie (`data_pipeline.storage.index.pack`).
        labels: for each label by name, the different values, in the order in which they are met.
        label_of: for each label by name, (N,) int32, the number of the value of each sample; `NO_LABEL` if it has none.
        left_out: what of the tar is not used.
        problems: what is wrong with the ends of a local tar and the tars in it, which may be cut short or damaged.
        fields: how many samples have each extension.
        sums: of the measured pictures: their number, and for each channel the mean and the mean square.
    """

    path: str
    num_bytes: int
    changed_ns: int
    sha256: str
    packed_NM: NDArray[np.int64]
    labels: Mapping[str, tuple[str, ...]]
    label_of: Mapping[str, NDArray[np.int32]]
    left_out: LeftOut
    problems: Sequence[str]
    fields: Mapping[str, int]
    sums: NDArray[np.float64]

    @property
    def num_samples(self) -> int:
        return len(self.packed_NM)


@dataclass(frozen=True)
class ScanInputs:
    """The settings with which a worker scans a tar. It decodes `num_measured` pictures of each, to `size`.

    Copies of remote tars lie in `directory` while they are scanned.
    """

    fields: Fields
    directory: Path
    size: int = 0
    num_measured: int = 0


def scan_tar(inputs: ScanInputs, task: tuple[int, str], *, is_built: bool = False) -> ScannedTar:
    """Scan one tar, of this number and path. A worker process calls this.

    Raises `UserError` if the file is no tar, or if a remote one is cut short or holds no file.
    """
    number, location = task
    with _local(inputs, location) as path:
        status, data = path.stat(), map_file(path)
        outer = read_contents(data) if is_remote(location) else plain_contents(data, location)
        if is_remote(location) and not (outer.members and outer.is_whole):
            raise UserError(f"{location}: the answer of {len(data)} bytes is not a whole tar; check the location")
        left_out = LeftOut()
        problems: list[str] = []
        named: Mapping[str, str | None] = {BASE: None} if inputs.fields.labels is None else inputs.fields.labels
        labels = {name: _LabelReader(field, left_out, is_built=is_built) for name, field in named.items()}
        fields: Counter[str] = Counter()
        num_members = 1 if inputs.fields.mask is None else 2
        chosen: list[TarMember] = []  # of all samples end to end, because many small lists cost the garbage collector
        for inner, contents in tars_in(data, outer):
            tar = name_of_tar(inner or location)
            for name in contents.links:
                left_out.add(LINKS, name)
            if contents.problem is not None:
                problems.append(f"holds {inner}, which {contents.problem}" if inner else contents.problem)
            for of_sample in _samples(contents.members):
                fields.update(of_sample.keys())
                if (found := _members(inputs.fields, of_sample, left_out)) is None:
                    continue
                chosen += found
                for label in labels.values():
                    label.read(of_sample, data, tar)
        rows = measured_rows(len(chosen) // num_members, num=inputs.num_measured, tar=number)
        sums = _measure([chosen[num_members * row] for row in rows], data, inputs, left_out)
        offsets = np.array([member.offset for member in chosen], dtype=np.int64)
        sizes = np.array([member.size for member in chosen], dtype=np.int64)
        return ScannedTar(
            path=location,
            num_bytes=status.st_size,
            changed_ns=status.st_mtime_ns,
            sha256=hashlib.sha256(data).hexdigest() if is_built or is_remote(location) else "",
            packed_NM=pack(offsets, sizes).reshape(-1, num_members),
            labels={name: tuple(label.numbers) for name, label in labels.items()},
            label_of={name: np.array(label.found, dtype=np.int32) for name, label in labels.items()},
            left_out=left_out,
            problems=problems,
            fields=dict(fields.most_common(_MAX_FIELDS)),
            sums=sums,
        )


def _members(fields: Fields, of_sample: Mapping[str, TarMember], left_out: LeftOut) -> list[TarMember] | None:
    """Return the members of a sample that a reader gets; None if it lacks one, or if one is too large for an index."""
    members = [of_sample[name] for name in fields.content if name in of_sample][:1]
    if fields.mask is not None and fields.mask in of_sample:
        members.append(of_sample[fields.mask])
    is_whole = len(members) == (1 if fields.mask is None else 2)
    if is_whole and all(member.size <= MAX_MEMBER_BYTES for member in members):
        return members
    dotted = [each for name, each in of_sample.items() if "." in name and name.rpartition(".")[2] in fields.content]
    for member in dotted:
        left_out.add(_DOTTED, member.name)
    if not dotted:
        left_out.add(_INCOMPLETE, next(iter(of_sample.values())).name)
    return None


def _samples(members: Iterable[TarMember]) -> Iterator[dict[str, TarMember]]:
    """Yield the members of each sample by extension.

    Members that follow each other are a sample if they share a key. A second member of one extension begins another
    sample of that key, so that no picture gets the label of another one. Members of no sample may lie between.
    """
    key, of_sample = "", dict[str, TarMember]()
    for member in members:
        key_of_member, extension = split_name(member.name)
        if not extension or key_of_member[-1:] in ("", "/") or _METADATA.match(member.name):
            continue  # no extension, or hidden, such as the `._x.png` that a Mac packs before `x.png`
        if of_sample and (key_of_member != key or extension in of_sample):
            yield of_sample
            of_sample = {}
        key = key_of_member
        of_sample[extension] = member
    if of_sample:
        yield of_sample


@contextmanager
def _local(inputs: ScanInputs, location: str) -> Iterator[Path]:
    """Yield the path of a tar on this machine while the block runs.

    Raises `UserError` if a remote tar cannot be fetched.
    """
    if not is_remote(location):
        yield Path(location)
        return
    with tempfile.TemporaryDirectory(dir=inputs.directory) as directory:
        path = Path(directory, "copy.tar")
        fetch(RemoteFile(location), path, config=_REMOTE)
        yield path


class _LabelReader:
    """Reads one label of the samples of a tar from a field; None is the first of `LABEL_FIELDS` that a sample has.

    Attributes:
        numbers: the different values, with their numbers in the order in which they were met.
        found: the number of the value of each sample; `NO_LABEL` if it has none.
    """

    def __init__(self, field: str | None, left_out: LeftOut, *, is_built: bool) -> None:
        self._field, self._left_out, self._is_built = field, left_out, is_built
        self.numbers: dict[str, int] = {}
        self.found: list[int] = []

    def read(self, of_sample: Mapping[str, TarMember], data: memoryview, tar: str) -> None:
        try:
            word = self._word(of_sample, data, tar)
            if len(word) > MAX_CHARACTERS or not word.isprintable():
                raise ValueError(f"its text of {len(word):,} characters is too long or cannot be printed")
        except ValueError as error:
            word = ""
            self._left_out.add(UNREAD_LABELS, f"that of {next(iter(of_sample.values())).name}: {error}")
        self.found.append(self.numbers.setdefault(word, len(self.numbers)) if word else NO_LABEL)

    def _word(self, of_sample: Mapping[str, TarMember], data: memoryview, tar: str) -> str:
        """Return the label of a sample; "" if it has none. It is exact in a tar of a build, which wrote it."""
        field = self._field or next((name for name in LABEL_FIELDS if name in of_sample), "")
        extension, _, entry = field.partition(":")
        if field == TAR_FIELD:
            return tar
        if extension == PATH_FIELD:
            folders = _folders(of_sample)
            return folders[level] if -len(folders) <= (level := int(entry)) < len(folders) else ""
        member = of_sample.get(extension)
        if member is None:
            return ""
        content = bytes(data[member.offset : member.offset + member.size])
        # Some programs write a byte-order mark before the text.
        value = _value_in_json(content, entry) if entry else content.decode("utf-8-sig")
        return value if self._is_built and isinstance(value, str) else as_word(value)


def _folders(of_sample: Mapping[str, TarMember]) -> list[str]:
    """Return the folders in which a sample lies, from the outermost."""
    folders = next(iter(of_sample.values())).name.split("/")[:-1]
    return [normal(folder) for folder in folders if folder not in ("", ".")]


def _value_in_json(content: bytes, entry: str) -> object:
    """Return the value at an entry of a JSON file; None if it is not there. Raises `ValueError` if it is not JSON."""
    value = json.loads(content)
    try:
        for key in entry.split("."):
            value = value[int(key)] if isinstance(value, list) else value[key]
    except (ValueError, KeyError, IndexError, TypeError):
        return None
    return value


def measured_rows(num_samples: int, *, num: int, tar: int) -> list[int]:
    """Return which samples of a tar, by its number, are measured: `num` of them at equal distances, or all.

    The first of them is drawn. Else many tars that are sorted inside would each give the same kind of picture.

    Examples:
        >>> measured_rows(12, num=3, tar=0), measured_rows(2, num=3, tar=0)
        ([1, 5, 9], [0, 1])
    """
    num = min(num, num_samples)
    shift = int(generator(0, "measured pictures", tar).integers(_FINE))
    return [(piece * _FINE + shift) * num_samples // (num * _FINE) for piece in range(num)]


def _measure(
    pictures: Sequence[TarMember], data: memoryview, inputs: ScanInputs, left_out: LeftOut
) -> NDArray[np.float64]:
    """Return number, means and mean squares of some pictures of a tar."""
    if pictures:  # because a build, which measures none here, and `look` need no torch for the rest
        from data_pipeline.loading.picture_decode import decode_square

    sums = np.zeros(1)
    for member in pictures:
        try:
            file = data[member.offset : member.offset + member.size]
            picture = decode_square(file, size=inputs.size).numpy()
        except ValueError as error:
            left_out.add(_UNDECODED, f"{member.name}: {error}")
            continue
        values = picture.reshape(len(picture), -1) / 255.0
        sums = sums + np.concatenate([[1.0], values.mean(axis=1), np.square(values).mean(axis=1)])
    return sums


def mean_and_std(tars: Sequence[ScannedTar]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the mean and the deviation of each channel, of the measured pictures.

    The measured pictures of a tar stand for all its samples: a tar counts by its size.
    """
    measured = [tar for tar in tars if tar.sums[0]]
    if not measured:
        reasons = [tar.left_out.first[_UNDECODED] for tar in tars if _UNDECODED in tar.left_out.first][:1]
        raise UserError(f"none of the pictures decodes ({'; '.join(reasons)}); name another field with --image")
    sums = np.sum([tar.sums * (tar.num_samples / tar.sums[0]) for tar in measured], axis=0)
    mean, square = np.split(sums[1:] / sums[0], 2)
    return tuple(mean.tolist()), tuple(np.sqrt(np.maximum(square - mean**2, 0)).tolist())
