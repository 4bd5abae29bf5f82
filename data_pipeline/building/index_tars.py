"""Index WebDataset tars, so that they can be trained from as they are.

The tars are scanned as `data_pipeline.building.tar_scan` says, and what was found is joined into one index, whose files
`data_pipeline.storage.index` lists. `build` writes tars and indexes them in the same way.

An index may name an overlay that is drawn on the pictures each time they are read. Its file lies beside the index.

Shapes: N samples of a tar, S tars.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal

import numpy as np

from data_pipeline.building.catalogue import open_picture_overlay, with_overlay
from data_pipeline.building.datasets import TAR_PICTURE_SIZE
from data_pipeline.building.pool import run_all
from data_pipeline.building.tar_scan import (
    LABEL_FIELDS,
    UNREAD_LABELS,
    LeftOut,
    ScanInputs,
    ScannedTar,
    mean_and_std,
    scan_tar,
)
from data_pipeline.core.errors import UserError, printable
from data_pipeline.core.label_words import Classes, check_label_name, choose_classes
from data_pipeline.core.progress import Progress
from data_pipeline.core.sample import BASE, NO_LABEL, OVERLAY
from data_pipeline.overlays import OverlayInputs, PixelOverlay
from data_pipeline.overlays.registry import kind_of, save_overlay
from data_pipeline.storage.index import HASHES_NAME, NUMBERS_NAME, SAMPLES_NAME, TIMES_NAME, labels_name
from data_pipeline.storage.locations import (
    MANIFEST_NAME,
    PICTURE_FIELDS,
    TARS_NAME,
    index_directory,
    is_remote,
    listed_tars,
)
from data_pipeline.storage.locks import LOCK_NAME, locked
from data_pipeline.storage.manifest import (
    OVERLAY_NAME,
    Description,
    Fields,
    FileEntry,
    HowMade,
    LabelEntry,
    Manifest,
    OverlayEntry,
    Tars,
    describe_manifest,
    load_manifest,
)

_NUM_MEASURED: Final = 2_000  # pictures from which the mean and the deviation are computed

Split = Literal["train", "test"]

logger = logging.getLogger(__name__)


def make_index(
    location: str,
    out: Path,
    *,
    fields: Fields,
    size: int = TAR_PICTURE_SIZE,
    classes_of: Path | None = None,
    overlay: PixelOverlay | None = None,
    split: Split = "train",
    num_workers: int = 1,
) -> tuple[Manifest, list[ScannedTar]]:
    """Index the tars of a location into the directory `out`. Return its manifest, and what was found in each tar.

    Pictures are brought to `size` when they are read. `classes_of` is an index whose class numbers are used; for a test
    set, the index of its train set. `overlay` is drawn on the pictures when they are read, with digits of `split`.

    Raises `UserError` if the location names no tars, no sample has a picture, a named label is in no sample, a value of
    a label is none of `classes_of`, or another process is making an index in `out`.
    """
    paths = listed_tars(location)
    num_measured = -(-_NUM_MEASURED // len(paths))
    settings = ScanInputs(fields, out, size=size, num_measured=num_measured)
    out.mkdir(parents=True, exist_ok=True)
    with locked(out / LOCK_NAME):
        tars: list[ScannedTar] = []
        num_samples = 0
        with Progress("index", total=len(paths)) as progress:
            for tar in run_all(scan_tar, settings, list(enumerate(paths)), num_workers=num_workers):
                tars.append(tar)
                num_samples += tar.num_samples
                progress.advance(note=f"{num_samples} samples")
                for problem in tar.problems:
                    logger.warning("%s %s", tar.path, problem)
        found = _found_labels(location, tars, fields, classes_of=classes_of)
        labels = {name: LabelEntry(title=name, classes=classes.names) for name, classes in found.items()}
        mean, std = mean_and_std(tars)
        entry = None
        _remove_index(out)
        if overlay is not None:
            save_overlay(overlay, out / OVERLAY_NAME)
            options = dict(overlay.chosen)
            entry = OverlayEntry(kind=kind_of(overlay), drawn="online", layout=overlay.layout, options=options)
        description = Description(
            medium="picture",
            how_made=HowMade(
                dataset="tars" if entry is None else f"tars_{entry.kind}",
                source=location if overlay is None else f"{location}{overlay.made_from}",
                split=split,
            ),
            input_shape=(len(mean), size, size),
            mean=mean,
            std=std,
            labels=with_overlay(labels, overlay),
            any_size=True,
            overlay=entry,
        )
        beside = () if entry is None else (OVERLAY_NAME,)
        numbers = {name: classes.number_of for name, classes in found.items()}
        return write_index(tars, out, description, fields=fields, numbered=False, beside=beside, numbers=numbers), tars


def write_index(
    tars: Sequence[ScannedTar],
    out: Path,
    description: Description,
    *,
    fields: Fields,
    numbered: bool,
    beside: Sequence[str],
    numbers: Mapping[str, Mapping[str, int]] | None = None,
) -> Manifest:
    """Write the index of tars into the directory `out`, and the manifest at last.

    `description` says what the samples are, `beside` names further files, which are there already. `numbers` give the
    class number of each value of a label in the tars; without them, values are class names. The labels that are stored
    get their counts from the tars. The caller keeps `out` locked, and has removed an older index.
    """
    ends = np.cumsum([tar.num_samples for tar in tars], dtype=np.int64)
    numbers_S2 = np.stack([ends, np.array([tar.num_bytes for tar in tars], dtype=np.int64)], axis=1)
    contents = {
        TARS_NAME: "".join(f"{_stored(tar.path, out)}\n" for tar in tars).encode(),
        NUMBERS_NAME: numbers_S2.astype("<i8").tobytes(),
        HASHES_NAME: bytes.fromhex("".join(tar.sha256 for tar in tars)),
        SAMPLES_NAME: np.concatenate([tar.packed_NM for tar in tars if tar.num_samples]).astype("<i8").tobytes(),
    }
    labels = dict(description.labels)
    for name, label in description.stored_labels.items():
        number_of = (numbers or {}).get(name, {word: number for number, word in enumerate(label.classes)})
        # The last entry is for samples without a label.
        classes = [np.array([*(number_of.get(word, NO_LABEL) for word in tar.labels[name]), NO_LABEL]) for tar in tars]
        label_N = np.concatenate([of_tar[tar.label_of[name]] for of_tar, tar in zip(classes, tars, strict=True)])
        counts = np.bincount(label_N[label_N >= 0], minlength=len(label.classes))
        labels[name] = label.model_copy(update={"counts": tuple(counts.tolist())})
        contents[labels_name(name)] = label_N.astype("<i4").tobytes()
    for name, content in contents.items():
        (out / name).write_bytes(content)
    if not contents[HASHES_NAME]:
        (out / TIMES_NAME).write_bytes(np.array([tar.changed_ns for tar in tars], dtype="<i8").tobytes())
    num_bytes = int(numbers_S2[:, 1].sum())
    manifest = Manifest.model_validate(
        {
            **dict(description),
            "labels": {name: labels[name] for name in (BASE, OVERLAY, *labels) if name in labels},
            "num_samples": int(ends[-1]),
            "tars": Tars(fields=fields, numbered=numbered, num_tars=len(tars), num_bytes=num_bytes),
            "files": {name: FileEntry.of(out / name) for name in (*contents, *beside)},
        }
    )
    with (out / MANIFEST_NAME).open("w", encoding="utf-8") as file:
        file.write(manifest.model_dump_json(indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    return manifest


def _stored(path: str, out: Path) -> str:
    """Return a path as the index names it: relative to the index if it lies there, so that both can be moved."""
    inside = out.absolute()
    return str(Path(path).relative_to(inside)) if not is_remote(path) and Path(path).is_relative_to(inside) else path


def _remove_index(out: Path) -> None:
    """Remove an index, the manifest first, so that nothing reads half of one. A run keeps what it has mapped."""
    names = (MANIFEST_NAME, OVERLAY_NAME, TARS_NAME, NUMBERS_NAME, HASHES_NAME, TIMES_NAME, SAMPLES_NAME)
    for path in (*(out / name for name in names), *out.glob(labels_name("*"))):
        path.unlink(missing_ok=True)


def _count_fields(tars: Sequence[ScannedTar]) -> Counter[str]:
    """Return how many samples of all tars have each extension."""
    return sum((Counter(each.fields) for each in tars), Counter())


def _found_labels(
    location: str, tars: Sequence[ScannedTar], fields: Fields, *, classes_of: Path | None
) -> dict[str, Classes]:
    """Return the classes of each label of which some sample has a value. Raises `UserError` as `make_index` does."""
    seen = ", ".join(name for name, _ in _count_fields(tars).most_common(10)) or "none"
    if not any(each.num_samples for each in tars):
        where = "a known ending" if fields.content == PICTURE_FIELDS else f"one of {', '.join(fields.content)}"
        raise UserError(
            f"no sample of {location} has a picture under {where}; its fields are {seen}, so name yours with --image "
            f"({'; '.join(all_left_out(tars).lines())})"
        )
    of_train = None if classes_of is None else load_manifest(classes_of).labels
    found: dict[str, Classes] = {}
    for name in tars[0].labels:
        words = {word for each in tars for word in each.labels[name]}
        if not words and fields.labels is not None:
            reason = all_left_out(tars).first.get(UNREAD_LABELS)
            unread = "" if reason is None else f" ({reason})"
            raise UserError(
                f"no sample of {location} has a label under {fields.labels[name]}{printable(unread)}; its fields are "
                f"{seen}, so name yours with --label"
            )
        known = of_train[name].classes if of_train is not None and name in of_train else None
        if not words or (of_train is not None and known is None):
            continue
        classes = choose_classes(words, known=known)
        if unknown := sorted(words - classes.number_of.keys())[:3]:
            raise UserError(
                f"{location} has labels that {classes_of} lacks, such as {', '.join(unknown)}; index both with the "
                "same --label, or leave samples of other classes out"
            )
        if classes.names:
            found[name] = classes
    return found


def describe_tars(tars: Sequence[ScannedTar], fields: Fields) -> Iterator[str]:
    """Yield lines that say what was found in tars, and what was left out."""
    found = _count_fields(tars)
    yield f"fields: {', '.join(f'{name} {count}' for name, count in found.most_common(10))}"
    if fields.labels is None and len(several := [name for name in LABEL_FIELDS if name in found]) > 1:
        yield f"the label of a sample is the first of its fields {', '.join(several)}; name one with --label"
    yield from all_left_out(tars).lines()
    if fields.labels is None and not any(tar.labels[BASE] for tar in tars):
        yield f"samples have no label in {', '.join(LABEL_FIELDS)}; name one with --label, such as path:0 or json:NAME"


def all_left_out(tars: Sequence[ScannedTar]) -> LeftOut:
    """Return what of all tars is not used."""
    left_out = LeftOut()
    for tar in tars:
        left_out += tar.left_out
    return left_out


def parse_labels(words: Sequence[str]) -> dict[str, str] | None:
    """Return the field of each label from words such as `colour=json:attr.colour`; a word without a name is `base`.

    An extension may have capitals and a dot before it, as in the name of a file.

    Raises `UserError` if a label is named twice, or its name is not a plain word.

    Examples:
        >>> parse_labels(["cls", "colour=json:attr.colour", "site=path:0"]), parse_labels([])
        ({'base': 'cls', 'colour': 'json:attr.colour', 'site': 'path:0'}, None)
    """
    labels: dict[str, str] = {}
    for word in words:
        name, equals, field = word.partition("=")
        name, field = (name, field) if equals and ":" not in name else (BASE, word)
        extension, colon, entry = field.lstrip(".").partition(":")
        field = f"{extension.lower()}{colon}{entry}"
        check_label_name(name, f"--label {word}")
        if name in labels:
            raise UserError(f"--label names {name} twice ({labels[name]} and {field}); give each label once")
        labels[name] = field
    return labels or None


def overlay_to_draw(args: argparse.Namespace, *, size: int) -> PixelOverlay | None:
    """Open the overlay that a command line asks for; None if it asks for none.

    Raises `UserError` as `open_picture_overlay` does, and if options of an overlay are given without one.
    """
    options = dict(args.overlay_option)
    if args.overlay is None:
        if options:
            raise UserError(f"{next(iter(options))} is an option of an overlay; leave it out, or give --overlay")
        return None
    shape = (3, size, size)
    overlay = open_picture_overlay(OverlayInputs(args.overlay, shape, args.split, options=options))
    if (changed := overlay.output_shape(shape)) != shape:
        raise UserError(
            f"the overlay {args.overlay} makes pictures of {changed} out of {shape}, and an index of tars does not "
            "measure these; build the dataset"
        )
    return overlay


def run(args: argparse.Namespace) -> None:
    """Do what `python -m data_pipeline index` asks for."""
    if args.out is None and is_remote(args.location):
        raise UserError(f"{args.location} is remote; name a directory on this machine for its index by --out")
    out = args.out or index_directory(args.location)
    given, size = Fields(), TAR_PICTURE_SIZE
    if args.classes_of is not None and (of_train := load_manifest(args.classes_of)).any_size:
        given, size = of_train.tars.fields, of_train.input_shape[1]
    size = size if args.size is None else args.size
    words = given.content if args.image is None else re.split("[;,]", args.image)
    fields = Fields(
        content=tuple(word.strip().lower().lstrip(".") for word in words if word.strip()),
        labels=parse_labels(args.label or ()) or given.labels,
    )
    manifest, tars = make_index(
        args.location,
        out,
        fields=fields,
        size=size,
        classes_of=args.classes_of,
        overlay=overlay_to_draw(args, size=size),
        split=args.split,
        num_workers=args.workers,
    )
    print(f"{out}: {manifest.num_samples} samples in {len(tars)} tars")
    for line in (*describe_manifest(manifest), *describe_tars(tars, fields)):
        print(line)
