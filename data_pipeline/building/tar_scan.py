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
from typing import Final

import numpy as np
from numpy.typing import NDArray

from data_pipeline.core.errors import UserError
from data_pipeline.core.label_words import as_word
from data_pipeline.core.randomness import generator
from data_pipeline.core.sample import BASE, NO_LABEL
from data_pipeline.core.schema import MAX_CHARACTERS
from data_pipeline.core.value_range import ValueRange
from data_pipeline.loading.picture_decode import decode_square
from data_pipeline.remote.fetch import RemoteConfig, RemoteFile, fetch
from data_pipeline.storage.index import MAX_MEMBER_BYTES, map_file, pack
from data_pipeline.storage.locations import is_remote
from data_pipeline.storage.manifest import Fields
from data_pipeline.storage.tar_headers import TarMember, read_contents, split_name

LABEL_FIELDS: Final = ("cls", "label", "label.txt", "class", "cls.txt")  # tried in this order if none is named
_MAX_LABEL_BYTES: Final = 1 << 20
_REMOTE: Final = RemoteConfig()
_MAX_FIELDS: Final = 50  # that are counted in a tar
_METADATA: Final = re.compile(r"__[^/]*__($|/)")  # names of members that WebDataset passes over
_FINE: Final = 1 << 20  # places of a draw in a piece of a tar


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
        num_left_out: samples that lack a member.
        num_links: links in the tar, which are not read.
        num_unread: bytes behind the end of the tar that are not used.
        problem: why they are not; a local tar may be cut short or damaged, and what is before is used.
        fields: how many samples have each extension.
        unread_labels: for each label by name, the files that cannot be read as one, and why.
        sums: of the measured pictures: their number, and for each channel the mean and the mean square.
        unreadable: a reason for each of the measured pictures that do not decode.
    """

    path: str
    num_bytes: int
    changed_ns: int
    sha256: str
    packed_NM: NDArray[np.int64]
    labels: Mapping[str, tuple[str, ...]]
    label_of: Mapping[str, NDArray[np.int32]]
    num_left_out: int
    num_links: int
    num_unread: int
    problem: str | None
    fields: Mapping[str, int]
    unread_labels: Mapping[str, Sequence[str]]
    sums: NDArray[np.float64]
    unreadable: Sequence[str]

    @property
    def num_samples(self) -> int:
        return len(self.packed_NM)


@dataclass(frozen=True)
class TarTask:
    """One tar to scan: its number and path."""

    number: int
    path: str


@dataclass(frozen=True)
class ScanInputs:
    """The settings with which a worker scans a tar. It decodes `num_measured` pictures of each, to `size`.

    Copies of remote tars lie in `directory` while they are scanned.
    """

    fields: Fields
    directory: Path
    size: int = 0
    num_measured: int = 0
    value_range: ValueRange | None = None

    @property
    def label_names(self) -> tuple[str, ...]:
        return (BASE,) if self.fields.labels is None else tuple(self.fields.labels)


def scan_tar(inputs: ScanInputs, task: TarTask, *, is_built: bool = False) -> ScannedTar:
    """Scan one tar. A worker process calls this.

    Raises `UserError` if the file is no tar, or if a remote one is cut short or holds no file.
    """
    with _local(inputs, task) as path:
        status, data = path.stat(), map_file(path)
        contents = read_contents(data)
        if is_remote(task.path) and not (contents.members and contents.is_whole):
            raise UserError(f"{task.path}: the answer of {len(data)} bytes is not a whole tar; check the location")
        if contents.end == 0 and any(data[:1]):
            raise UserError(f"{task.path} is not a plain tar; unpack it if it is compressed, or leave it out")
        labels = {name: _LabelReader(inputs.fields, name, is_built=is_built) for name in inputs.label_names}
        fields: Counter[str] = Counter()
        num_members = 1 if inputs.fields.mask is None else 2
        chosen: list[TarMember] = []  # of all samples end to end, because many small lists cost the garbage collector
        num_left_out = 0
        for of_sample in _samples(contents.members):
            fields.update(of_sample.keys())
            if (members := _members(inputs.fields, of_sample)) is None:
                num_left_out += 1
                continue
            chosen += members
            for label in labels.values():
                label.read(of_sample, data)
        rows = measured_rows(len(chosen) // num_members, num=inputs.num_measured, tar=task.number)
        sums, unreadable = _measure([chosen[num_members * row] for row in rows], data, inputs)
        offsets = np.array([member.offset for member in chosen], dtype=np.int64)
        sizes = np.array([member.size for member in chosen], dtype=np.int64)
        return ScannedTar(
            path=task.path,
            num_bytes=status.st_size,
            changed_ns=status.st_mtime_ns,
            sha256=hashlib.sha256(data).hexdigest() if is_built or is_remote(task.path) else "",
            packed_NM=pack(offsets, sizes).reshape(-1, num_members),
            labels={name: tuple(label.numbers) for name, label in labels.items()},
            label_of={name: np.array(label.found, dtype=np.int32) for name, label in labels.items()},
            num_left_out=num_left_out,
            num_links=contents.num_links,
            num_unread=contents.num_unread,
            problem=contents.problem,
            fields=dict(fields.most_common(_MAX_FIELDS)),
            unread_labels={name: label.unread for name, label in labels.items()},
            sums=sums,
            unreadable=unreadable,
        )


def _members(fields: Fields, of_sample: Mapping[str, TarMember]) -> list[TarMember] | None:
    """Return the members of a sample that a reader gets; None if it lacks one, or if one is too large for an index."""
    members = [of_sample[name] for name in fields.content if name in of_sample][:1]
    if fields.mask is not None and fields.mask in of_sample:
        members.append(of_sample[fields.mask])
    is_whole = len(members) == (1 if fields.mask is None else 2)
    return members if is_whole and all(member.size <= MAX_MEMBER_BYTES for member in members) else None


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
def _local(inputs: ScanInputs, task: TarTask) -> Iterator[Path]:
    """Yield the path of a tar on this machine while the block runs.

    Raises `UserError` if a remote tar cannot be fetched.
    """
    if not is_remote(task.path):
        yield Path(task.path)
        return
    with tempfile.TemporaryDirectory(dir=inputs.directory) as directory:
        path = Path(directory, "copy.tar")
        fetch(RemoteFile(task.path), path, config=_REMOTE)
        yield path


class _LabelReader:
    """Reads one label of the samples of a tar.

    Attributes:
        numbers: the different values, with their numbers in the order in which they were met.
        found: the number of the value of each sample; `NO_LABEL` if it has none.
        unread: the files that cannot be read as a label, and why.
    """

    def __init__(self, fields: Fields, name: str, *, is_built: bool) -> None:
        self._field = None if fields.labels is None else fields.labels[name]
        self._is_built = is_built
        self.numbers: dict[str, int] = {}
        self.found: list[int] = []
        self.unread: list[str] = []

    def read(self, of_sample: Mapping[str, TarMember], data: memoryview) -> None:
        try:
            word = _label(self._field, of_sample, data, is_built=self._is_built)
        except ValueError as error:
            word = ""
            self.unread.append(str(error))
        self.found.append(self.numbers.setdefault(word, len(self.numbers)) if word else NO_LABEL)


def _label(field: str | None, of_sample: Mapping[str, TarMember], data: memoryview, *, is_built: bool) -> str:
    """Return the label of a sample as text; "" if it has none. The text is exact in a tar of a build, which wrote it.

    Raises `ValueError` with the name of its file if that has a content that is no label.
    """
    if field is None:
        field = next((name for name in LABEL_FIELDS if name in of_sample), None)
        if field is None:
            return ""
    extension, _, entry = field.partition(":")
    member = of_sample.get(extension)
    if member is None:
        return ""
    if member.size > _MAX_LABEL_BYTES:
        raise ValueError(f"{member.name}, which has {member.size:,} bytes, more than {_MAX_LABEL_BYTES:,}")
    content = bytes(data[member.offset : member.offset + member.size])
    try:
        # Some programs write a byte-order mark before the text.
        value = _value_in_json(content, entry) if entry else content.decode("utf-8-sig")
        word = value if is_built and isinstance(value, str) else as_word(value)
    except UnicodeDecodeError:
        raise ValueError(f"{member.name}, which is not text in UTF-8") from None
    except ValueError as error:
        raise ValueError(f"{member.name}: {error}") from None
    if len(word) > MAX_CHARACTERS or not word.isprintable():
        raise ValueError(f"{member.name}, whose text of {len(word):,} characters is too long or cannot be printed")
    return word


def _value_in_json(content: bytes, entry: str) -> object:
    """Return the value at an entry of a JSON file; None if it is not there. Raises `ValueError` if it is not JSON."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        raise ValueError("it is not JSON") from None
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
    pictures: Sequence[TarMember], data: memoryview, inputs: ScanInputs
) -> tuple[NDArray[np.float64], list[str]]:
    """Return number, means and mean squares of some pictures of a tar, and why others do not decode."""
    sums = np.zeros(1)
    unreadable: list[str] = []
    for member in pictures:
        try:
            file = data[member.offset : member.offset + member.size]
            picture = decode_square(file, size=inputs.size, value_range=inputs.value_range)
            if sums[0] and len(sums) != 1 + 2 * len(picture):
                raise ValueError(f"it has {len(picture)} channels, but others have {len(sums) // 2}")
        except ValueError as error:
            unreadable.append(f"{member.name}: {error}")
            continue
        values = picture.numpy().reshape(len(picture), -1) / 255.0
        sums = sums + np.concatenate([[1.0], values.mean(axis=1), np.square(values).mean(axis=1)])
    return sums, unreadable


def mean_and_std(tars: Sequence[ScannedTar]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the mean and the deviation of each channel, of the measured pictures.

    The measured pictures of a tar stand for all its samples: a tar counts by its size. Tars of other channels than the
    first do not count.
    """
    measured = [tar for tar in tars if tar.sums[0]]
    measured = [tar for tar in measured if len(tar.sums) == len(measured[0].sums)]
    if not measured:
        reasons = [reason for tar in tars for reason in tar.unreadable][:1]
        raise UserError(f"none of the pictures decodes ({'; '.join(reasons)}); name another field with --image")
    sums = np.sum([tar.sums * (tar.num_samples / tar.sums[0]) for tar in measured], axis=0)
    mean, square = np.split(sums[1:] / sums[0], 2)
    return tuple(mean.tolist()), tuple(np.sqrt(np.maximum(square - mean**2, 0)).tolist())
