"""Index somebody else's WebDataset tars, so that they can be trained from as they are.

The tars are scanned as `data_pipeline.building.tar_scan` says, and the facts of all tars are joined into one index.

An index may name an overlay that is drawn on the pictures each time they are read. Its file lies beside the index.

See `data_pipeline.storage.tar_index` for the files. Samples without a picture are left out and counted.

Shapes: N samples of a tar, S tars.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import shlex
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal, Required, TypedDict, Unpack

import numpy as np
from numpy.typing import NDArray

from data_pipeline.building.catalogue import labels_of_overlay, needs_digits, open_picture_overlay
from data_pipeline.building.datasets import TAR_PICTURE_SIZE, check_at_least
from data_pipeline.building.locks import take_lock
from data_pipeline.building.tar_scan import (
    LABEL_FIELDS,
    PARTS,
    Fields,
    ScanInputs,
    TarFacts,
    begin_scan,
    expand,
    forgotten_if_refused,
    part_path,
    read_part,
    scan_all,
    unwritable,
)
from data_pipeline.core.environment import with_home
from data_pipeline.core.errors import UserError, printable
from data_pipeline.core.options import OVERLAY_OPTION, parse_words
from data_pipeline.core.sample import BASE, NO_LABEL, OVERLAY
from data_pipeline.core.schema import check_label_name
from data_pipeline.overlays import PixelOverlay
from data_pipeline.overlays.registry import kind_of, save_overlay
from data_pipeline.remote.cache import is_remote
from data_pipeline.sources import class_names_of
from data_pipeline.storage.manifest import (
    MANIFEST_NAME,
    MAX_CLASSES,
    MAX_MANIFEST_BYTES,
    OVERLAY_NAME,
    TARS_FORMAT_VERSION,
    HowMade,
    LabelEntry,
    Manifest,
    OverlayEntry,
    TarSet,
    index_directory,
    label_fields,
    load_manifest,
    names_tars,
)
from data_pipeline.storage.tar_index import (
    MAX_PICTURE_BYTES,
    SAMPLES_NAME,
    TAR_HASHES_NAME,
    TAR_NUMBERS_NAME,
    labels_name,
    tars_sha256,
)
from data_pipeline.storage.tar_lists import TARS_NAME, list_difference

logger = logging.getLogger(__name__)
_LOCK_NAME: Final = ".lock"  # in the directory of an index
_NUM_MEASURED: Final = 2_000  # pictures from which the mean and the deviation are computed
_UNLABELLED: Final = "-1"  # in many datasets, the label of a sample without a class
_MOST_TARS_UNASKED: Final = 1_000  # that are indexed when training begins
_MAX_COMPARED: Final = 50_000_000  # samples whose keys are compared, which takes 16 bytes of memory each


@dataclass(frozen=True)
class DrawnOverlay:
    """An overlay to draw when pictures are read, as `open_picture_overlay` returns it, and the split of its digits."""

    overlay: PixelOverlay
    split: Literal["train", "test"]


class IndexSettings(TypedDict, total=False):
    """The settings of an index.

    Attributes:
        size: width and height in pixels to which pictures are brought when they are read.
        classes_of: an index whose class numbers are used; for a test set, the index of its train set.
        classes: the names of the classes in their order, of the labels for which they are known.
        titles: what a label is about, for reports, of the labels for which it is not their name.
        overlay: what is drawn on the pictures when they are read; its size is `size`.
    """

    fields: Required[Fields]
    size: int
    classes_of: Path | None
    classes: Mapping[str, tuple[str, ...]]
    titles: Mapping[str, str]
    overlay: DrawnOverlay | None
    num_workers: int
    show_progress: bool


def make_index(location: str, out: Path, **settings: Unpack[IndexSettings]) -> tuple[Manifest, list[TarFacts]]:
    """Index the tars of a location into the directory `out`. Return its manifest, and the facts of each tar.

    Waits while another process makes an index there. Raises `UserError` if the location names no tars, no sample has a
    picture, a named label is in no sample, or a value of a label is none of `classes_of` or `classes`.
    """
    check_at_least(("--size", settings.get("size"), 1), ("--workers", settings.get("num_workers"), 1))
    paths = expand(location)
    with _locked(out):
        return write_index(location, paths, out, **settings)


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Make the directory of an index, and keep it locked against other writers while the block runs."""

    def say() -> None:
        logger.warning("another process is making the index in %s; waiting for it", out)

    path = out / _LOCK_NAME
    try:
        out.mkdir(parents=True, exist_ok=True)
        try:
            # Open for writing, because a lock on NFS needs that.
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except PermissionError:
            if not path.is_file():
                raise
            descriptor = os.open(path, os.O_RDONLY)  # the file of another user
    except OSError as error:
        raise unwritable(out, error) from None
    try:
        take_lock(descriptor, when_held=say)
        yield
    finally:
        os.close(descriptor)


def write_index(
    location: str,
    paths: Sequence[str],
    out: Path,
    *,
    fields: Fields,
    size: int = TAR_PICTURE_SIZE,
    classes_of: Path | None = None,
    classes: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
    titles: Mapping[str, str] = MappingProxyType({}),
    overlay: DrawnOverlay | None = None,
    num_workers: int = 1,
    show_progress: bool = False,
) -> tuple[Manifest, list[TarFacts]]:
    """Index the tars `paths` as `make_index` does, into a directory that the caller keeps locked."""
    parts = out / PARTS
    settings = ScanInputs(fields=fields, size=size, num_measured=-(-_NUM_MEASURED // len(paths)), directory=out)
    begin_scan(out, settings)
    facts = scan_all(paths, settings, num_workers=num_workers, show_progress=show_progress)
    num_samples = sum(each.num_samples for each in facts)
    seen = _count_fields(facts)
    with forgotten_if_refused(out, paths):
        if num_samples == 0:
            raise UserError(
                f"no sample of {location} has a picture under one of {', '.join(fields.picture)}; its fields are "
                f"{_named(seen)}, so name yours with --image"
            )
        names = {
            name: _class_names(
                facts,
                name,
                None if fields.labels is None else fields.labels[name],
                seen,
                location,
                known=classes.get(name),
                classes_of=classes_of,
            )
            for name in fields.label_names
        }
        mean, std = _mean_and_std(facts)
    names = {name: found for name, found in names.items() if found}
    of_overlay = {} if overlay is None else labels_of_overlay(overlay.overlay)
    if both := sorted(names.keys() & of_overlay.keys()):
        raise UserError(f"--label and the overlay both give the label {both[0]}; give yours another name")
    counts, numbers_S3 = _write_samples(paths, facts, names, out)
    labels = {
        name: LabelEntry(title=titles.get(name, name), classes=found, counts=counts[name])
        for name, found in names.items()
    }
    title_base = titles.get(BASE, BASE)
    stored = [_stored(path, out) for path in paths]
    _partial(out, TARS_NAME).write_text("".join(f"{name}\n" for name in stored), encoding="utf-8")
    _partial(out, TAR_NUMBERS_NAME).write_bytes(numbers_S3.astype("<i8").tobytes())
    hashes = "".join(each.sha256 for each in facts)
    _partial(out, TAR_HASHES_NAME).write_bytes(bytes.fromhex(hashes))
    sha256 = tars_sha256(stored, numbers_S3, hashes=bytes.fromhex(hashes))
    entry = _save_overlay(overlay, out)
    manifest = Manifest(
        num_samples=num_samples,
        medium="picture",
        input_shape=(3, size, size),
        sample_rate=None,
        **label_fields({**labels, **of_overlay}, format_version=TARS_FORMAT_VERSION, title_base=title_base),
        mean=mean,
        std=std,
        overlay=entry,
        how_made=HowMade(
            dataset="tars" if entry is None else f"tars_{entry.kind}",
            source=location if overlay is None else f"{location}{overlay.overlay.made_from}",
            split="train" if overlay is None else overlay.split,
            seed=0,
            repeats=1,
            limit=None,
            source_sha256=sha256,
        ),
        shards=(),
        tars=TarSet(
            location=location,
            picture_fields=fields.picture,
            label_field=_described(fields.labels),
            num_tars=len(paths),
            num_bytes=sum(each.num_bytes for each in facts),
            sha256=sha256,
        ),
    )
    content = manifest.model_dump_json(indent=1).encode()
    if len(content) > MAX_MANIFEST_BYTES:
        raise UserError(
            f"the names of the classes of {location} are too long: its manifest would have {len(content):,} bytes, "
            f"more than {MAX_MANIFEST_BYTES:,}; give them shorter names, or name another --label"
        )
    _partial(out, MANIFEST_NAME).write_bytes(content)
    written = [SAMPLES_NAME, *map(labels_name, names), TARS_NAME, TAR_NUMBERS_NAME, TAR_HASHES_NAME]
    _publish(out, written if entry is None else [*written, OVERLAY_NAME])
    shutil.rmtree(parts)
    return manifest, facts


def _publish(out: Path, written: Sequence[str]) -> None:
    """Give the files `written` and the manifest their names, and remove what an older index had beside them.

    The old manifest goes first and the new one comes last, so no process reads an index that is half replaced.
    """
    (out / MANIFEST_NAME).unlink(missing_ok=True)
    for old in (out / OVERLAY_NAME, *out.glob(labels_name("*"))):
        if old.name not in written:
            old.unlink(missing_ok=True)
    for name in (*written, MANIFEST_NAME):
        _partial(out, name).replace(out / name)


def _described(labels: Mapping[str, str] | None) -> str | None:
    """Return the fields of the labels in the form of `TarSet.label_field`."""
    if labels is None or set(labels) == {BASE}:
        return None if labels is None else labels[BASE]
    return ",".join(f"{name}={field}" for name, field in labels.items()) or None


def _save_overlay(overlay: DrawnOverlay | None, out: Path) -> OverlayEntry | None:
    """Write the partial file of an overlay, and return its entry."""
    if overlay is None:
        return None
    drawn = overlay.overlay
    sha256 = save_overlay(drawn, _partial(out, OVERLAY_NAME))
    return OverlayEntry(
        kind=kind_of(drawn), drawn="online", sha256=sha256, layout=drawn.layout, options=dict(drawn.chosen)
    )


def _stored(path: str, out: Path) -> str:
    """Return a path as the index names it: relative to the index if it lies there, so that both can be moved."""
    inside = out.absolute()
    return str(Path(path).relative_to(inside)) if not is_remote(path) and Path(path).is_relative_to(inside) else path


def _count_fields(facts: Sequence[TarFacts]) -> Counter[str]:
    """Return how many samples of all tars have each extension."""
    seen: Counter[str] = Counter()
    for each in facts:
        seen.update(each.fields)
    return seen


def _class_names(
    facts: Sequence[TarFacts],
    label: str,
    field: str | None,
    seen: Mapping[str, int],
    location: str,
    *,
    known: tuple[str, ...] | None,
    classes_of: Path | None,
) -> tuple[str, ...]:
    """Return the names of the classes of one label, whose field is `field`; none if no sample has it.

    `-1` is no class if all others are whole numbers, because these are the numbers of classes.
    """
    words = {word for each in facts for word in each.labels[label]}
    if not words and known is None:
        if field is not None:
            unread = _unread(facts, label)
            why = "".join(f" ({said})" for said in (unread, _apart(facts)) if said)
            mend = "" if classes_of is not None else ", or leave it out"
            raise UserError(
                f"no sample of {location} has a label under {field}{why}; its fields are {_named(seen)}, so name "
                f"yours with --label{mend}"
            )
        return ()
    if known is None and classes_of is not None:
        of_train = load_manifest(classes_of).labels.get(label)
        if of_train is None:
            return ()
        known = of_train.classes
    others = words.union(known or ()) - {_UNLABELLED}
    if _UNLABELLED not in (known or ()) and all(word.isascii() and word.isdigit() for word in others):
        words.discard(_UNLABELLED)
    if known is not None:
        if unknown := sorted(words - set(known))[:3]:
            raise UserError(
                f"{location} has labels that {classes_of or f'the list of classes of {label}'} lacks, such as "
                f"{', '.join(unknown)}; index both with the same --label, or, if they are, leave samples of other "
                "classes out"
            )
        return known
    if len(words) > MAX_CLASSES:
        raise UserError(
            f"{location} has {len(words)} different labels, more than {MAX_CLASSES}; name another --label than {label}"
        )
    return class_names_of(words) if words else ()


def _unread(facts: Sequence[TarFacts], label: str) -> str:
    """Return how many files of a label cannot be read, with the first and the reason; "" if all can be read."""
    num = sum(each.unread_labels.get(label, 0) for each in facts)
    first = next((each.first_unread[label] for each in facts if label in each.first_unread), "")
    return f"{num} labels{_in_brackets(label)} cannot be read, such as {printable(first)}" if num else ""


def _apart(facts: Sequence[TarFacts]) -> str:
    """Return how many samples without a picture share its name with one elsewhere, and what to do; "" if none does."""
    num = sum(each.num_apart for each in facts)
    first = next((key for each in facts for key in each.apart), "")
    return (
        f"the files of a sample must follow each other in a tar, but {num} samples without a picture have the name of "
        f"a picture elsewhere in their tar, such as {printable(first)}; pack the tar again with `tar --sort=name`"
        if num
        else ""
    )


def _in_brackets(label: str) -> str:
    return "" if label == BASE else f" ({label})"


def _named(seen: Mapping[str, int]) -> str:
    return ", ".join(sorted(seen, key=lambda name: -seen[name])[:10]) or "none"


def _write_samples(
    paths: Sequence[str], facts: Sequence[TarFacts], names: Mapping[str, Sequence[str]], out: Path
) -> tuple[dict[str, tuple[int, ...]], NDArray[np.int64]]:
    """Write the places and the labels of all samples into partial files, of the labels with the classes `names`.

    Returns for each label the number of samples of each class, and the numbers of the tars.
    """
    numbers = {name: {word: number for number, word in enumerate(words)} for name, words in names.items()}
    counts = {name: np.zeros(len(words), dtype=np.int64) for name, words in names.items()}
    rows: list[tuple[int, int, int]] = []
    end = 0
    all_keys: list[NDArray[np.int64]] = []
    with ExitStack() as files:
        samples = files.enter_context(_partial(out, SAMPLES_NAME).open("wb"))
        labels = {name: files.enter_context(_partial(out, labels_name(name)).open("wb")) for name in names}
        for name, each in zip(paths, facts, strict=True):
            part = read_part(part_path(out, name))
            if part is None:
                raise UserError(f"{out / PARTS} was changed while the index was made; index again")
            packed, keys, *local = np.split(part[1], 2 + len(each.labels))
            if end + each.num_samples <= _MAX_COMPARED:
                all_keys.append(keys)
            samples.write(packed.astype("<i8").tobytes())
            for (name, words), local_N in zip(each.labels.items(), local, strict=True):
                if name not in names:
                    continue
                # The last entry is for samples without a label.
                of_class = np.array([*(numbers[name].get(word, NO_LABEL) for word in words), NO_LABEL], dtype=np.int64)
                label_N = of_class[local_N]
                labels[name].write(label_N.astype("<i4").tobytes())
                counts[name] += np.bincount(label_N[label_N >= 0], minlength=len(names[name]))
            end += each.num_samples
            rows.append((end, each.num_bytes, each.changed_ns))
    _warn_of_equal_keys(all_keys, paths)
    return {name: tuple(of_label.tolist()) for name, of_label in counts.items()}, np.array(
        rows, dtype=np.int64
    ).reshape(-1, 3)


def _partial(out: Path, name: str) -> Path:
    """Return the path of a file until `_publish` names it. A run may have the older file mapped into memory."""
    return out / f".{name}.partial"


def _warn_of_equal_keys(keys_of_tars: Sequence[NDArray[np.int64]], paths: Sequence[str]) -> None:
    """Warn if samples have the same key: they are read as different samples, but somebody may have copied a tar."""
    keys_N = np.concatenate(keys_of_tars) if keys_of_tars else np.empty(0, dtype=np.int64)
    order = np.argsort(keys_N, kind="stable")
    (again,) = np.nonzero(keys_N[order[1:]] == keys_N[order[:-1]])
    if not len(again):
        return
    ends = np.cumsum([len(keys) for keys in keys_of_tars])
    both = np.searchsorted(ends, order[again[0] : again[0] + 2], side="right").tolist()
    names = " and in ".join(dict.fromkeys(paths[number] for number in both))
    logger.warning("%d samples have the key of an earlier one, such as one in %s", len(again), names)


def _mean_and_std(facts: Sequence[TarFacts]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the mean and the deviation of each channel, of the measured pictures.

    The measured pictures of a tar stand for all its samples: a tar counts by its size.
    """
    measured = [each for each in facts if each.sums[0]]
    sums = np.sum([np.array(each.sums) * (each.num_samples / each.sums[0]) for each in measured], axis=0)
    if not measured:
        reasons = [reason for each in facts for reason in each.unreadable][:1]
        raise UserError(f"none of the pictures decodes ({'; '.join(reasons)}); name another field with --image")
    mean, square = sums[1:4] / sums[0], sums[4:7] / sums[0]
    return tuple(mean.tolist()), tuple(np.sqrt(np.maximum(square - mean**2, 0)).tolist())


def ensure_index(location: str, *, classes_of: str | None = None, show_progress: bool = False) -> None:
    """Index the tars of a location if it names tars and has no index yet. Does nothing for any other location.

    An index that is there is checked by `check_index`. If another process makes it now, this one waits.

    `classes_of` is the location of a train set, whose classes, fields and picture size a test set takes.

    Raises `UserError` as `make_index` and `check_index` do, and if there are so many tars that the user should index
    them first.
    """
    if is_remote(location) or not names_tars(location):
        return
    out = index_directory(location)
    if (out / MANIFEST_NAME).is_file():
        check_index(location, classes_of=classes_of)
        return
    paths = expand(location)
    if len(paths) > _MOST_TARS_UNASKED:
        raise UserError(
            f"{location} names {len(paths)} tars without an index; run `python -m data_pipeline index {location}` "
            "once, before training"
        )
    named = None if classes_of is None or is_remote(classes_of) else Path(classes_of)
    train = None if named is None else load_manifest(named)
    if train is not None and (entry := train.overlay) is not None:
        raise UserError(
            f"{location} has no index, and {classes_of} has the overlay {entry.kind}; run `python -m data_pipeline "
            f"index {location} --overlay {entry.kind} --split test --classes-of {classes_of}`, with the "
            "--overlay-layout and --digits of the train set"
        )
    fields, size = index_options(train)
    with _locked(out):
        if (out / MANIFEST_NAME).is_file():  # which another process has made meanwhile
            return
        logger.info("indexing the tars of %s into %s, once", location, out)
        manifest, facts = write_index(
            location, paths, out, fields=fields, size=size, classes_of=named, show_progress=show_progress
        )
    for line in describe_index(manifest, facts):
        logger.info("%s", line)


def check_index(location: str, *, classes_of: str | None = None) -> None:
    """Raise `UserError`, with the command that indexes again, if the index of a location is of other tars.

    Tars that are new in a directory are a warning only, so that a run goes on while they are written. `classes_of` is
    as in `ensure_index`.
    """
    index = index_directory(location)
    if (difference := list_difference(index, location)) is None:
        return
    manifest = load_manifest(index)
    fields, size = index_options(manifest)
    words = [location, "--image", ";".join(fields.picture), "--size", str(size)]
    for name, field in (fields.labels or {}).items():
        words += ["--label", f"{name}={field}"]
    words += [] if classes_of is None else ["--classes-of", classes_of]
    options = ""
    if (entry := manifest.overlay) is not None:
        words += ["--overlay", entry.kind, "--overlay-layout", entry.layout, "--split", manifest.how_made.split]
        options = ", with the --overlay-option and --digits of before"
    again = f"run `python -m data_pipeline index {shlex.join(words)}`{options}"
    if difference.has_only_new and with_home(location).is_dir():
        logger.warning("%s; those of the index are read. To read all, %s", difference.words, again)
        return
    raise UserError(
        f"{difference.words}; {again} to index again, or name {index} in place of {location} to keep the tars of the "
        "index"
    )


def index_options(manifest: Manifest | None) -> tuple[Fields, int]:
    """Return the fields and the picture size of an index of tars; the defaults if `manifest` is not of one."""
    if manifest is None or manifest.tars is None:
        return Fields(), TAR_PICTURE_SIZE
    labels = manifest.tars.label_field
    fields = Fields(
        picture=manifest.tars.picture_fields, labels=None if labels is None else parse_labels(labels.split(","))
    )
    return fields, manifest.input_shape[1]


def describe_index(manifest: Manifest, facts: Sequence[TarFacts]) -> Iterator[str]:
    """Yield lines that say what was found, and then a line for each kind of thing that was left out."""
    assert manifest.tars is not None
    found = [
        f"{sum(label.counts)} labels of {len(label.classes)} classes{_in_brackets(name)}"
        for name, label in manifest.stored_labels.items()
    ]
    labels = ", ".join(found) or "no labels"
    yield (
        f"{manifest.num_samples} samples in {manifest.tars.num_tars} tars, {manifest.tars.num_bytes:,} bytes, {labels}"
    )
    yield f"fields: {', '.join(f'{name} {count}' for name, count in _count_fields(facts).most_common(10))}"
    yield f"pictures are brought to {manifest.input_shape[1]} x {manifest.input_shape[2]} pixels when they are read"
    for name, label in manifest.labels.items():
        if 0 < (num_labelled := sum(label.counts)) < manifest.num_samples:
            which = "" if name == BASE else f" ({name})"
            yield f"{manifest.num_samples - num_labelled} samples have no label{which}"
        if without := [words for words, count in zip(label.classes, label.counts, strict=False) if not count]:
            which = "" if name == BASE else f" of {name}"
            yield f"{len(without)} of the {len(label.classes)} classes{which} have no sample, such as {without[0]}"
    for name in facts[0].labels:
        if unread := _unread(facts, name):
            yield unread
        classes = manifest.labels[name].classes if name in manifest.labels else ()
        if _UNLABELLED not in classes and any(_UNLABELLED in each.labels[name] for each in facts):
            yield f"{_UNLABELLED} among whole numbers is no label{_in_brackets(name)}"
    if manifest.tars.label_field is None:
        seen = _count_fields(facts)
        if len(several := [name for name in LABEL_FIELDS if name in seen]) > 1:
            yield (
                f"the label of a sample is the first of its fields {', '.join(several)}; if they do not say the same, "
                "name one with --label"
            )
    if manifest.overlay is not None:
        drawn = [
            f"{len(label.classes)} classes ({name})"
            for name, label in manifest.labels.items()
            if label.given_by == "overlay"
        ]
        yield (
            f"overlay: {manifest.overlay.kind}, {manifest.overlay.layout}, drawn anew at each reading, with labels of "
            f"{', '.join(drawn)}"
        )
    if left_out := sum(each.num_without_picture for each in facts):
        yield f"{left_out} samples have no picture and are left out"
    if apart := _apart(facts):
        yield apart
    if too_large := sum(each.num_too_large for each in facts):
        yield f"{too_large} pictures of more than {MAX_PICTURE_BYTES} bytes are left out"
    if links := [name for each in facts for name in each.links]:
        yield (
            f"{sum(each.num_links for each in facts)} links are not read, such as {printable(links[0])}; store files "
            "in their place, with `tar --dereference --hard-dereference`"
        )
    if cut := [each.end for each in facts if not each.end.is_whole]:
        lost = sum(end.num_unread for end in cut)
        yield f"{len(cut)} tars are cut short or damaged; {lost:,} bytes behind the cuts are not used"
    if continued := [each.end for each in facts if each.end.is_whole and each.end.num_unread]:
        lost = sum(end.num_unread for end in continued)
        yield f"{len(continued)} tars go on behind their end marks; {lost:,} bytes there are not used"
    if unreadable := [reason for each in facts for reason in each.unreadable]:
        yield f"{len(unreadable)} of the pictures that were tried do not decode, such as {unreadable[0]}"


def parse_labels(words: Sequence[str]) -> dict[str, str] | None:
    """Return the field of each label from words such as `colour=json:attr.colour`; a word without a name is `base`.

    An extension may have capitals and a dot before it, as in the name of a file.

    Raises `UserError` if a label is named twice, or its name is not a plain word.

    Examples:
        >>> parse_labels(["cls", "colour=json:attr.colour"]), parse_labels([])
        ({'base': 'cls', 'colour': 'json:attr.colour'}, None)
    """
    labels: dict[str, str] = {}
    for word in words:
        name, equals, field = word.partition("=")
        name, field = (name, field) if equals and ":" not in name else (BASE, word)
        extension, colon, entry = field.lstrip(".").partition(":")
        field = f"{extension.lower()}{colon}{entry}"
        try:
            check_label_name(name)
        except ValueError as error:
            raise UserError(f"--label {word}: {error}") from None
        if name == OVERLAY:
            raise UserError(f"--label {word} names {OVERLAY}, the label of what a build draws; give it another name")
        if not field or "," in field:
            raise UserError(
                f"--label {word} names no field, or one with a comma; write it as {name}=cls or "
                f"{name}=json:path.to.label"
            )
        if name in labels:
            raise UserError(f"--label names {name} twice ({labels[name]} and {field}); give each label once")
        labels[name] = field
    return labels or None


def overlay_to_draw(
    kind: str | None, args: argparse.Namespace, *, size: int, digits_root: Path | None = None
) -> DrawnOverlay | None:
    """Open the overlay that a command line asks for; None if `kind` is None.

    `digits_root` replaces --digits-root if that is not given. Raises `UserError` as `open_picture_overlay` does, and if
    options of an overlay are given without one.
    """
    if kind is None:
        for name in ("overlay_layout", "overlay_option", "digits", "digits_root"):
            if getattr(args, name) is not None:
                option = name.replace("_", "-")
                raise UserError(
                    f"--{option} is about an overlay, and none is drawn; leave it out, or choose an overlay"
                )
        return None
    shape = (3, size, size)
    overlay = open_picture_overlay(
        kind,
        shape=shape,
        split=args.split,
        layout=args.overlay_layout,
        digits=args.digits,
        digits_root=args.digits_root or (digits_root if needs_digits(kind) else None),
        options=parse_words(args.overlay_option or (), flag=OVERLAY_OPTION),
    )
    if (changed := overlay.output_shape(shape)) != shape:
        raise UserError(
            f"the overlay {kind} makes pictures of {changed} out of {shape}, and an index of tars does not measure "
            "these; build the dataset, without --keep"
        )
    return DrawnOverlay(overlay, args.split)


def run(args: argparse.Namespace) -> None:
    """Do what `python -m data_pipeline index` asks for."""
    started = time.monotonic()
    if args.out is None and is_remote(args.location):
        raise UserError(f"{args.location} is remote; name a directory on this machine for its index by --out")
    out = args.out or index_directory(args.location)
    given, size = index_options(None if args.classes_of is None else load_manifest(args.classes_of))
    size = size if args.size is None else args.size
    words = given.picture if args.image is None else re.split("[;,]", args.image)
    fields = Fields(
        picture=tuple(word.strip().lower().lstrip(".") for word in words if word.strip()),
        labels=parse_labels(args.label or ()) or given.labels,
    )
    manifest, facts = make_index(
        args.location,
        out,
        fields=fields,
        size=size,
        classes_of=args.classes_of,
        overlay=overlay_to_draw(args.overlay, args, size=size),
        num_workers=args.workers,
        show_progress=True,
    )
    seconds = max(time.monotonic() - started, 1e-3)
    print(f"{out}: indexed in {seconds:.1f} s, {manifest.num_samples / seconds:,.0f} samples a second")
    for line in describe_index(manifest, facts):
        print(line)
