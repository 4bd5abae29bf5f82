"""Scan somebody else's WebDataset tars: where their pictures lie, and what their labels are.

Each tar is scanned once, by its headers; only the labels and a few pictures, for the mean and the deviation, are read.
Worker processes scan tars side by side. The facts of a tar are kept in a part, a file of their own, when it is done, so
that a scan that was interrupted goes on from there.

Shapes: N samples of a tar.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
import tempfile
import time
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

from data_pipeline.building.datasets import PICTURE_FIELDS
from data_pipeline.building.workers import run_all
from data_pipeline.core.environment import with_home
from data_pipeline.core.errors import UserError
from data_pipeline.core.progress import Progress
from data_pipeline.core.randomness import generator
from data_pipeline.core.sample import BASE, NO_LABEL
from data_pipeline.core.schema import MAX_CHARACTERS, LabelName, Line, Schema
from data_pipeline.loading.picture_decode import decode_square
from data_pipeline.remote.cache import RemoteConfig, is_remote
from data_pipeline.remote.fetch import Expected, Limits, fetch
from data_pipeline.storage.files import map_regular, regular_size
from data_pipeline.storage.tar_headers import (
    HEAD_BYTES,
    TarEnd,
    TarMember,
    compression,
    read_contents,
    tar_end,
)
from data_pipeline.storage.tar_index import MAX_PICTURE_BYTES, pack, split_name
from data_pipeline.storage.tar_lists import compressed_tars_in, compression_error, listed_tars

logger = logging.getLogger(__name__)
LABEL_FIELDS: Final = ("cls", "label", "label.txt", "class", "cls.txt")  # tried in this order if none is named
PARTS: Final = ".parts"  # of an index that is being made: a file for each tar
_MAX_LABEL_BYTES: Final = 1 << 20
_REMOTE: Final = RemoteConfig()
_MAX_FIELDS: Final = 50  # that are counted in a tar
_METADATA: Final = re.compile(r"__[^/]*__($|/)")  # names of members that WebDataset passes over
_FINE: Final = 1 << 20  # places of a draw in a piece of a tar


class Fields(Schema):
    """Which members of a sample are its picture and its labels.

    Attributes:
        picture: extensions, of which the first that a sample has is its picture.
        labels: for each label by name, an extension, whose content is the label; or `EXTENSION:a.b`, the entry `b` of
            `a` in its JSON. None takes the first of `LABEL_FIELDS` that there is, as the label `base`.
    """

    picture: tuple[str, ...] = PICTURE_FIELDS
    labels: dict[LabelName, Line] | None = None

    @property
    def label_names(self) -> tuple[str, ...]:
        return (BASE,) if self.labels is None else tuple(self.labels)


class TarFacts(Schema):
    """The entries of an index for one tar, beside the places of its pictures.

    Attributes:
        num_bytes, changed_ns: size and time of change of the file when it was scanned; of a remote tar the size alone.
        sha256: of a remote tar; empty for a local one.
        num_samples: with a picture.
        num_without_picture: samples that are left out.
        num_apart, apart: how many of these have the key of a picture elsewhere in the tar, and the key of the first.
        num_links, links: links in the tar, which are not read, and the name of the first.
        end: where the tar ends. A local tar may be cut short or damaged; what is before is used.
        fields: how many samples have each extension.
        labels: for each label by name, the different values, in the order in which they are met.
        unread_labels: for each label by name, the number of its files that cannot be read as one.
        first_unread: for each label that has some, the first of these files, and why.
        sums: of the measured pictures: their number, and for each channel the mean and the mean square.
        unreadable: a reason for each of the measured pictures that do not decode.
    """

    num_bytes: NonNegativeInt
    changed_ns: int
    sha256: str
    num_samples: NonNegativeInt
    num_without_picture: NonNegativeInt
    num_apart: NonNegativeInt
    apart: tuple[str, ...]
    num_too_large: NonNegativeInt
    num_links: NonNegativeInt
    links: tuple[str, ...]
    end: TarEnd
    fields: dict[str, int]
    labels: dict[str, tuple[str, ...]]
    unread_labels: dict[str, NonNegativeInt]
    first_unread: dict[str, str]
    sums: tuple[float, ...]
    unreadable: tuple[str, ...]


@dataclass(frozen=True)
class TarTask:
    """One tar to scan: its number and path."""

    number: int
    path: str


@dataclass(frozen=True)
class ScanInputs:
    """The settings with which a worker scans a tar. It decodes `num_measured` pictures of each."""

    fields: Fields
    size: int
    num_measured: int
    directory: Path
    remote: RemoteConfig = _REMOTE


def expand(location: str) -> list[str]:
    """Return the paths of the tars that a location names, in the order in which they are read.

    `listed_tars` says what a location may be. A tar or a pattern may also be remote. Raises `UserError` if it names
    none, one twice, or one that does not exist.
    """
    if is_remote(location):
        return _expand_remote(location)
    paths = listed_tars(location)
    _warn_of_compressed(with_home(location))
    _refuse_repeated(location, paths, [str(Path(name).resolve()) for name in paths])
    for name in paths:
        if "\n" in name or not name.isprintable():
            raise UserError(f"the name {name!r} cannot stand in an index; rename the file")
    for name in paths:
        if regular_size(Path(name)) is None:
            raise UserError(f"{name}, which {location} names, does not exist or is no regular file; mend the location")
    return paths


def _warn_of_compressed(location: Path) -> None:
    """Warn if a location is a directory that also holds compressed tars, which are not read."""
    if location.is_dir() and (left_out := compressed_tars_in(location)):
        logger.warning(
            "%s also holds %d compressed tars, such as %s, which are left out; unpack them first to read them",
            location,
            len(left_out),
            left_out[0].name,
        )


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
    _refuse_repeated(location, urls, urls)
    return urls


def _refuse_repeated(location: str, names: Sequence[str], files: Sequence[str]) -> None:
    """Raise `UserError` if two of the names are of one of the files, which are given for each name."""
    first: dict[str, str] = {}
    for name, file in zip(names, files, strict=True):
        if file in first:
            also = "" if first[file] == name else f", also as {name}"
            raise UserError(f"{location} names {first[file]} twice{also}; name each tar once")
        first[file] = name


def scan_tar(inputs: ScanInputs, task: TarTask) -> TarFacts:
    """Scan one tar and write what is known of it. A worker process calls this.

    Raises `UserError` if the tar is compressed.
    """
    with _local(inputs, task) as (path, sha256), map_regular(path) as data:
        status = path.stat()
        contents = read_contents(data)
        if contents.end == 0 and (error := compression_error(task.path, bytes(data[:HEAD_BYTES]))) is not None:
            raise error
        fields: Counter[str] = Counter()
        chosen: list[TarMember] = []
        words: dict[str, list[str | None]] = {name: [] for name in inputs.fields.label_names}
        keys: list[int] = []
        without_picture: list[str] = []
        num_too_large = 0
        unread_labels: Counter[str] = Counter()
        first_unread: dict[str, str] = {}
        for key, of_sample in _samples(contents.members):
            fields.update(of_sample.keys())
            picture = next((of_sample[name] for name in inputs.fields.picture if name in of_sample), None)
            if picture is None:
                without_picture.append(key)
            elif picture.size > MAX_PICTURE_BYTES:
                num_too_large += 1
            else:
                chosen.append(picture)
                keys.append(_hashed(key))
                for name, found in words.items():
                    field = None if inputs.fields.labels is None else inputs.fields.labels[name]
                    try:
                        found.append(_label(field, of_sample, data))
                    except ValueError as error:
                        found.append(None)
                        unread_labels[name] += 1
                        first_unread.setdefault(name, str(error))
        labels = {
            name: tuple(dict.fromkeys(word for word in found if word is not None)) for name, found in words.items()
        }
        rows = measured_rows(len(chosen), num=inputs.num_measured, tar=task.number)
        sums, unreadable = _measure(chosen, data, size=inputs.size, rows=rows)
        found_end = tar_end(data, end=contents.end)
        with_picture = set(keys)
        apart = [key for key in without_picture if _hashed(key) in with_picture]
    facts = TarFacts(
        num_bytes=status.st_size,
        changed_ns=0 if sha256 else status.st_mtime_ns,
        sha256=sha256,
        num_samples=len(chosen),
        num_without_picture=len(without_picture),
        num_apart=len(apart),
        apart=tuple(apart[:1]),
        num_too_large=num_too_large,
        num_links=len(contents.links),
        links=tuple(contents.links[:1]),
        end=found_end,
        fields=dict(fields.most_common(_MAX_FIELDS)),
        labels=labels,
        unread_labels=dict(unread_labels),
        first_unread=first_unread,
        sums=tuple(sums),
        unreadable=tuple(unreadable),
    )
    packed = pack(
        np.array([member.offset for member in chosen], dtype=np.int64),
        np.array([member.size for member in chosen], dtype=np.int64),
    )
    columns = [packed, np.array(keys, dtype=np.int64)]
    for name, found in words.items():
        numbers = {word: number for number, word in enumerate(labels[name])}
        columns.append(np.array([NO_LABEL if word is None else numbers[word] for word in found], dtype=np.int64))
    part = np.concatenate(columns)
    _write_part(part_path(inputs.directory, task.path), facts, part)
    return facts


def _samples(members: Iterable[TarMember]) -> Iterator[tuple[str, dict[str, TarMember]]]:
    """Yield the key of each sample and its members by extension.

    Members that follow each other are a sample if they share a key. A second member of one extension begins another
    sample of that key, so that no picture gets the label of another one. Members of no sample may lie between.
    """
    key, of_sample = "", dict[str, TarMember]()
    for member in members:
        key_of_member, extension = split_name(member.name)
        if not extension or key_of_member[-1:] in ("", "/") or _METADATA.match(member.name):
            continue  # no extension, or hidden, such as the `._x.png` that a Mac packs before `x.png`
        if of_sample and (key_of_member != key or extension in of_sample):
            yield key, of_sample
            of_sample = {}
        key = key_of_member
        of_sample[extension] = member
    if of_sample:
        yield key, of_sample


@contextmanager
def _local(inputs: ScanInputs, task: TarTask) -> Iterator[tuple[Path, str]]:
    """Yield the path of a tar on this machine while the block runs, and the sha256 of a tar that was fetched for it.

    Raises `UserError` if a remote tar cannot be fetched, is cut short or holds no file.
    """
    if not is_remote(task.path):
        yield Path(task.path), ""
        return
    config = inputs.remote
    limits = Limits(
        stall_seconds=config.stall_seconds,
        num_attempts=config.num_attempts,
        deadline=time.monotonic() + config.file_seconds,
    )
    with tempfile.TemporaryDirectory(dir=inputs.directory / PARTS) as directory:
        path = Path(directory, "copy.tar")
        fetch(task.path, path, expected=Expected(), limits=limits)
        if (wrong := _tar_problem(path)) is not None:
            raise UserError(f"{task.path}: {wrong}; check the location and the server that holds it")
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        yield path, sha256


def _tar_problem(path: Path) -> str | None:
    """Return what is wrong with a file that must be a whole tar with at least one file; None if it is."""
    with map_regular(path) as data:
        contents = read_contents(data)
        if contents.members and tar_end(data, end=contents.end).is_whole:
            return None
        found = compression(bytes(data[:HEAD_BYTES]))
        how = "" if found is None else f", but compressed by {found[0]}"
        return f"the answer of {len(data)} bytes is not a whole tar{how}"


def _hashed(key: str) -> int:
    """Return 64 bits that differ for different keys, all but certainly."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little", signed=True)


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
    if len(word) > MAX_CHARACTERS:
        raise ValueError(f"{member.name}, which has {len(word):,} characters, more than {MAX_CHARACTERS:,}")
    if not word.isprintable():
        raise ValueError(f"{member.name}, which holds a character that cannot be printed")
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


def _measure(
    chosen: Sequence[TarMember], data: memoryview, *, size: int, rows: Sequence[int]
) -> tuple[list[float], list[str]]:
    """Return number, means and mean squares of the pictures `rows` of a tar, and why others do not decode."""
    sums = np.zeros(7)
    unreadable: list[str] = []
    for member in (chosen[row] for row in rows):
        try:
            picture = decode_square(data[member.offset : member.offset + member.size], size=size)
        except ValueError as error:
            unreadable.append(f"{member.name}: {error}")
            continue
        values = picture.numpy().reshape(3, -1) / 255.0
        sums += np.concatenate([[1.0], values.mean(axis=1), np.square(values).mean(axis=1)])
    return sums.tolist(), unreadable


def part_path(directory: Path, path: str) -> Path:
    return directory / PARTS / f"{hashlib.sha256(path.encode()).hexdigest()[:24]}.part"


def _write_part(path: Path, facts: TarFacts, numbers: NDArray[np.int64]) -> None:
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        file.write(facts.model_dump_json().encode() + b"\n")
        file.write(numbers.astype("<i8").tobytes())
    partial.replace(path)


def read_part(path: Path) -> tuple[TarFacts, NDArray[np.int64]] | None:
    """Return the facts of a tar, and places, hashed keys and each label of its samples, end to end; None if not whole.

    The numbers are ((2 + num_labels) * N,) int64.
    """
    try:
        head, _, tail = path.read_bytes().partition(b"\n")
        facts = TarFacts.model_validate_json(head)
    except (OSError, ValueError):
        return None
    if len(tail) != 8 * (2 + len(facts.labels)) * facts.num_samples:
        return None
    return facts, np.frombuffer(tail, dtype="<i8").astype(np.int64)


def begin_scan(out: Path, settings: ScanInputs) -> None:
    """Make the directory of an index, and remove the parts of one with other settings."""
    try:
        (out / PARTS).mkdir(parents=True, exist_ok=True)
        note, wanted = out / PARTS / "settings", repr((settings.fields, settings.size, settings.num_measured))
        if not note.is_file() or note.read_text(encoding="utf-8") != wanted:
            for old in (out / PARTS).glob("*.part"):
                old.unlink()
            note.write_text(wanted, encoding="utf-8")
    except OSError as error:
        raise unwritable(out, error) from None


def unwritable(out: Path, error: OSError) -> UserError:
    return UserError(f"the index cannot be written to {out} ({error.strerror}); name another place by --out")


def scan_all(paths: Sequence[str], settings: ScanInputs, *, num_workers: int, show_progress: bool) -> list[TarFacts]:
    """Return the facts of all tars. A tar with a part is not scanned again, unless it has changed or gave no sample."""
    facts: dict[int, TarFacts] = {}
    tasks: list[TarTask] = []
    for number, name in enumerate(paths):
        part = read_part(part_path(settings.directory, name))
        if part is not None and _is_as_scanned(name, part[0]):
            facts[number] = part[0]
        else:
            tasks.append(TarTask(number, name))
    with Progress("index", total=len(paths), start=len(facts), enabled=show_progress) as progress:
        num_samples = 0
        for task, found in zip(tasks, run_all(scan_tar, settings, tasks, num_workers=num_workers), strict=True):
            facts[task.number] = found
            num_samples += found.num_samples
            progress.advance(note=f"{num_samples} samples")
    for number, name in enumerate(paths):
        if (problem := facts[number].end.problem) is not None:
            logger.warning("%s %s", name, problem)
    return [facts[number] for number in range(len(paths))]


def _is_as_scanned(name: str, facts: TarFacts) -> bool:
    """Return whether the facts of a tar hold still. Does not ask for a remote tar; false if it gave no sample."""
    if is_remote(name):
        return facts.end.is_whole and facts.num_samples > 0
    status = Path(name).stat()
    return (facts.num_bytes, facts.changed_ns) == (status.st_size, status.st_mtime_ns)


@contextmanager
def forgotten_if_refused(out: Path, paths: Sequence[str]) -> Iterator[None]:
    """Remove the parts of remote tars if the block raises `UserError`: the tars may be mended on their server."""
    try:
        yield
    except UserError:
        for name in filter(is_remote, paths):
            part_path(out, name).unlink(missing_ok=True)
        raise
