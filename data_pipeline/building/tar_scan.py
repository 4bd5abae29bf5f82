"""Scan WebDataset tars: where the members of their samples lie, and what their labels are.

Each tar is scanned once, by its headers; only the labels and a few pictures, for the mean and the deviation, are read.
Worker processes scan tars side by side. The facts of a tar are kept in a part, a file of their own, when it is done, so
that a scan or a build that was interrupted goes on from there.

Shapes: N samples of a tar, M members of a sample.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from braceexpand import braceexpand
from numpy.typing import NDArray
from pydantic import NonNegativeInt

from data_pipeline.building.pool import run_all
from data_pipeline.core.errors import UserError
from data_pipeline.core.progress import Progress
from data_pipeline.core.randomness import generator
from data_pipeline.core.sample import BASE, NO_LABEL
from data_pipeline.core.schema import MAX_CHARACTERS, Schema
from data_pipeline.loading.picture_decode import decode_square
from data_pipeline.remote.cache import RemoteConfig, fetch_file, file_url, is_remote
from data_pipeline.remote.fetch import RemoteFile
from data_pipeline.storage.index import MAX_MEMBER_BYTES, map_file, pack
from data_pipeline.storage.locations import PARTS_NAME, listed_tars
from data_pipeline.storage.manifest import Fields
from data_pipeline.storage.tar_headers import (
    TarEnd,
    TarMember,
    read_contents,
    split_name,
    tar_end,
)
from data_pipeline.storage.totals import Sums

logger = logging.getLogger(__name__)
LABEL_FIELDS: Final = ("cls", "label", "label.txt", "class", "cls.txt")  # tried in this order if none is named
_MAX_LABEL_BYTES: Final = 1 << 20
_REMOTE: Final = RemoteConfig()
_MAX_FIELDS: Final = 50  # that are counted in a tar
_METADATA: Final = re.compile(r"__[^/]*__($|/)")  # names of members that WebDataset passes over
_FINE: Final = 1 << 20  # places of a draw in a piece of a tar


class Made(Schema):
    """What a build knows of the samples of a tar: their totals, and in hexadecimal the digests of new records."""

    sums: Sums
    digests: str


class TarFacts(Schema):
    """The entries of an index for one tar, beside the places of the members of its samples.

    Attributes:
        num_bytes, changed_ns: size and time of change of the file when it was scanned; of a remote tar the size alone.
        sha256: of a remote tar, or one of a build; empty for others.
        num_samples: with all members.
        num_left_out: samples that lack a member.
        num_links: links in the tar, which are not read.
        end: where the tar ends. A local tar may be cut short or damaged; what is before is used.
        fields: how many samples have each extension.
        labels: for each label by name, the different values, in the order in which they are met.
        unread_labels: for each label by name, the number of its files that cannot be read as one.
        first_unread: for each label that has some, the first of these files, and why.
        sums: of the measured pictures: their number, and for each channel the mean and the mean square.
        unreadable: a reason for each of the measured pictures that do not decode.
        made: of a tar that a build has written.
    """

    num_bytes: NonNegativeInt
    changed_ns: int
    sha256: str
    num_samples: NonNegativeInt
    num_left_out: NonNegativeInt
    num_links: NonNegativeInt
    end: TarEnd
    fields: dict[str, int]
    labels: dict[str, tuple[str, ...]]
    unread_labels: dict[str, NonNegativeInt]
    first_unread: dict[str, str]
    sums: tuple[float, ...]
    unreadable: tuple[str, ...]
    made: Made | None = None


@dataclass(frozen=True)
class TarTask:
    """One tar to scan: its number and path."""

    number: int
    path: str


@dataclass(frozen=True)
class ScanInputs:
    """The settings with which a worker scans a tar. It decodes `num_measured` pictures of each, to `size`."""

    fields: Fields
    directory: Path
    size: int = 0
    num_measured: int = 0

    @property
    def label_names(self) -> tuple[str, ...]:
        return (BASE,) if self.fields.labels is None else tuple(self.fields.labels)


def expand(location: str) -> list[str]:
    """Return the paths of the tars that a location names, in the order in which they are read.

    `listed_tars` says what a location may be. A tar or a pattern may also be remote. Raises `UserError` if it names
    none, one twice, or one that does not exist.
    """
    paths = _expand_remote(location) if is_remote(location) else listed_tars(location)
    files = paths if is_remote(location) else [str(Path(name).resolve()) for name in paths]
    for file, num in Counter(files).items():
        if num > 1:
            raise UserError(f"{location} names {file} {num} times; name each tar once")
    if is_remote(location):
        return paths
    for name in paths:
        if not name.isprintable():
            raise UserError(f"the name {name!r} cannot stand in an index; rename the file")
        if not Path(name).is_file():
            raise UserError(f"{name}, which {location} names, does not exist; mend the location")
    return paths


def _expand_remote(location: str) -> list[str]:
    try:
        urls = list(braceexpand(location))
    except ValueError as error:
        raise UserError(f"{location} is not a pattern ({error}); write braces as in train-{{0000..0099}}.tar") from None
    for url in urls:
        if url.endswith("/"):
            raise UserError(
                f"{url} is a directory, which is not listed if it is remote; name its tars, as in "
                f"{url}train-{{0000..0099}}.tar"
            )
        file_url(url.rpartition("/")[0], url.rpartition("/")[2])  # refuses what cannot be fetched
    return urls


def scan_tar(inputs: ScanInputs, task: TarTask, *, made: Made | None = None) -> TarFacts:
    """Scan one tar and write what is known of it. A worker process calls this.

    Raises `UserError` if the file is no tar.
    """
    with _local(inputs, task) as path:
        status, data = path.stat(), map_file(path)
        contents = read_contents(data)
        if contents.end == 0 and any(data[:1]):
            raise UserError(f"{task.path} is not a plain tar; unpack it if it is compressed, or leave it out")
        is_hashed = made is not None or is_remote(task.path)
        labels = {name: _LabelReader(inputs.fields, name) for name in inputs.label_names}
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
        num_samples = len(chosen) // num_members
        rows = measured_rows(num_samples, num=inputs.num_measured, tar=task.number)
        sums, unreadable = _measure([chosen[num_members * row] for row in rows], data, size=inputs.size)
        facts = TarFacts(
            num_bytes=status.st_size,
            changed_ns=status.st_mtime_ns,
            sha256=hashlib.sha256(data).hexdigest() if is_hashed else "",
            num_samples=num_samples,
            num_left_out=num_left_out,
            num_links=len(contents.links),
            end=tar_end(data, end=contents.end),
            fields=dict(fields.most_common(_MAX_FIELDS)),
            labels={name: tuple(label.numbers) for name, label in labels.items()},
            unread_labels={name: label.num_unread for name, label in labels.items()},
            first_unread={name: label.first_unread for name, label in labels.items() if label.num_unread},
            sums=tuple(sums),
            unreadable=tuple(unreadable),
            made=made,
        )
    offsets = np.array([member.offset for member in chosen], dtype=np.int64)
    sizes = np.array([member.size for member in chosen], dtype=np.int64)
    packed_NM = pack(offsets, sizes).reshape(num_samples, num_members)
    columns = [np.array(label.found, dtype=np.int64)[:, None] for label in labels.values()]
    _write_part(part_path(inputs.directory, task.path), facts, np.concatenate([packed_NM, *columns], axis=1))
    return facts


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

    Raises `UserError` if a remote tar cannot be fetched, is cut short or holds no file.
    """
    if not is_remote(task.path):
        yield Path(task.path)
        return
    with tempfile.TemporaryDirectory(dir=inputs.directory / PARTS_NAME) as directory:
        path = Path(directory, "copy.tar")
        fetch_file(RemoteFile(task.path), path, config=_REMOTE)
        data = map_file(path)
        contents = read_contents(data)
        if not (contents.members and tar_end(data, end=contents.end).is_whole):
            raise UserError(f"{task.path}: the answer of {len(data)} bytes is not a whole tar; check the location")
        yield path


class _LabelReader:
    """Reads one label of the samples of a tar.

    Attributes:
        numbers: the different values, with their numbers in the order in which they were met.
        found: the number of the value of each sample; `NO_LABEL` if it has none.
    """

    def __init__(self, fields: Fields, name: str) -> None:
        self._field = None if fields.labels is None else fields.labels[name]
        self.numbers: dict[str, int] = {}
        self.found: list[int] = []
        self.num_unread, self.first_unread = 0, ""

    def read(self, of_sample: Mapping[str, TarMember], data: memoryview) -> None:
        try:
            word = _label(self._field, of_sample, data)
        except ValueError as error:
            word = None
            self.num_unread += 1
            self.first_unread = self.first_unread or str(error)
        self.found.append(NO_LABEL if word is None else self.numbers.setdefault(word, len(self.numbers)))


def _label(field: str | None, of_sample: Mapping[str, TarMember], data: memoryview) -> str | None:
    """Return the label of a sample as text; None if it has none.

    Raises `ValueError` with the name of its file if that has a content that is no label.
    """
    if field is None:
        field = next((name for name in LABEL_FIELDS if name in of_sample), None)
        if field is None:
            return None
    extension, _, entry = field.partition(":")
    member = of_sample.get(extension)
    if member is None:
        return None
    if member.size > _MAX_LABEL_BYTES:
        raise ValueError(f"{member.name}, which has {member.size:,} bytes, more than {_MAX_LABEL_BYTES:,}")
    content = bytes(data[member.offset : member.offset + member.size])
    if entry:
        word = _word_in_json(content, entry, member.name)
    else:
        try:
            word = content.decode("utf-8-sig").strip()  # some programs write a byte-order mark before the text
        except UnicodeDecodeError:
            raise ValueError(f"{member.name}, which is not text in UTF-8") from None
    if len(word) > MAX_CHARACTERS or not word.isprintable():
        raise ValueError(f"{member.name}, whose text of {len(word):,} characters is too long or cannot be printed")
    return word or None


def _word_in_json(content: bytes, entry: str, name: str) -> str:
    """Return the text or the whole number at an entry of the JSON file `name`; "" if it is null or is not there.

    Raises `ValueError` with the name if the file is not JSON, or if the entry has another value.
    """
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        raise ValueError(f"{name}, which is not JSON") from None
    try:
        for key in entry.split("."):
            value = value[int(key)] if isinstance(value, list) else value[key]
    except (ValueError, KeyError, IndexError, TypeError):
        return ""
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # pandas writes 2.0 for the 2 of a column with gaps
    if isinstance(value, float) and math.isnan(value):
        return ""  # as pandas writes a gap
    if value is not None and not isinstance(value, (str, int)):
        raise ValueError(f"{name}, whose entry {entry} is neither text nor a whole number")
    return "" if value is None else str(value)


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


def _measure(pictures: Sequence[TarMember], data: memoryview, *, size: int) -> tuple[list[float], list[str]]:
    """Return number, means and mean squares of some pictures of a tar, and why others do not decode."""
    sums = np.zeros(7)
    unreadable: list[str] = []
    for member in pictures:
        try:
            picture = decode_square(data[member.offset : member.offset + member.size], size=size)
        except ValueError as error:
            unreadable.append(f"{member.name}: {error}")
            continue
        values = picture.numpy().reshape(3, -1) / 255.0
        sums += np.concatenate([[1.0], values.mean(axis=1), np.square(values).mean(axis=1)])
    return sums.tolist(), unreadable


def mean_and_std(facts: Sequence[TarFacts]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the mean and the deviation of each channel, of the measured pictures.

    The measured pictures of a tar stand for all its samples: a tar counts by its size.
    """
    measured = [each for each in facts if each.sums[0]]
    if not measured:
        reasons = [reason for each in facts for reason in each.unreadable][:1]
        raise UserError(f"none of the pictures decodes ({'; '.join(reasons)}); name another field with --image")
    sums = np.sum([np.array(each.sums) * (each.num_samples / each.sums[0]) for each in measured], axis=0)
    mean, square = sums[1:4] / sums[0], sums[4:7] / sums[0]
    return tuple(mean.tolist()), tuple(np.sqrt(np.maximum(square - mean**2, 0)).tolist())


def part_path(directory: Path, path: str) -> Path:
    return directory / PARTS_NAME / f"{hashlib.sha256(path.encode()).hexdigest()[:24]}.part"


def _write_part(path: Path, facts: TarFacts, numbers: NDArray[np.int64]) -> None:
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        file.write(facts.model_dump_json().encode() + b"\n")
        file.write(numbers.astype("<i8").tobytes())
    partial.replace(path)


def read_part(directory: Path, name: str) -> tuple[TarFacts, NDArray[np.int64]] | None:
    """Return the facts of a tar; and of its samples the places of the members, and each label. None if not whole.

    The numbers are (N, M + num_labels) int64.
    """
    try:
        head, _, tail = part_path(directory, name).read_bytes().partition(b"\n")
        facts = TarFacts.model_validate_json(head)
    except (OSError, ValueError):
        return None
    numbers = np.frombuffer(tail, dtype="<i8").astype(np.int64)
    return facts, numbers.reshape(facts.num_samples, -1 if facts.num_samples else 1)


def begin_parts(out: Path, settings: str) -> bool:
    """Make the directory of the parts. Return whether it holds parts that were made with the same settings.

    Removes the parts of other settings.
    """
    directory, note = out / PARTS_NAME, out / PARTS_NAME / "settings"
    if note.is_file() and note.read_text(encoding="utf-8") == settings:
        return True
    directory.mkdir(parents=True, exist_ok=True)
    for old in directory.glob("*.part"):
        old.unlink()
    note.write_text(settings, encoding="utf-8")
    return False


def finished(directory: Path, name: str) -> TarFacts | None:
    """Return the facts of a tar that has a part; None if it has none, or has changed since.

    Does not ask for a remote tar; None if it gave no sample.
    """
    part = read_part(directory, name)
    if part is None or is_remote(name):
        return None if part is None or not part[0].num_samples else part[0]
    facts, path = part[0], Path(name)
    status = path.stat() if path.is_file() else None
    is_same = status is not None and (status.st_size, status.st_mtime_ns) == (facts.num_bytes, facts.changed_ns)
    return facts if is_same else None


def scan_all(paths: Sequence[str], settings: ScanInputs, *, num_workers: int, show_progress: bool) -> list[TarFacts]:
    """Return the facts of all tars. A tar that is finished is not scanned again."""
    facts = {number: finished(settings.directory, name) for number, name in enumerate(paths)}
    tasks = [TarTask(number, paths[number]) for number, known in facts.items() if known is None]
    num_samples = 0
    with Progress("index", total=len(paths), start=len(paths) - len(tasks), enabled=show_progress) as progress:
        for task, found in zip(tasks, run_all(scan_tar, settings, tasks, num_workers=num_workers), strict=True):
            facts[task.number] = found
            num_samples += found.num_samples
            progress.advance(note=f"{num_samples} samples")
    whole = [each for each in facts.values() if each is not None]
    for name, each in zip(paths, whole, strict=True):
        if (problem := each.end.problem) is not None:
            logger.warning("%s %s", name, problem)
    return whole
