"""Build a dataset: from a source, through an overlay, to tars, which are then indexed.

Sample `i` shows record `order[i % num_records]`. Its overlay is drawn from (seed, split, i) into the tar; an online
overlay is stored beside the tars instead, and drawn at each reading. The order is a seeded shuffle in rounds of one
record from every class, so that the first part of a dataset, of any length, is balanced.

A build writes to `DIR.partial` and then renames it to `DIR`. An interrupted build begins again.

Guarantees: `DIR` holds a whole dataset or does not exist. The same arguments and source give the same bytes: each tar
is made by one process from its number alone.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray

from data_pipeline.building.catalogue import Ingredients, open_dataset, with_overlay
from data_pipeline.building.datasets import BOTH, NUM_SAMPLES_PER_SHARD, SPLITS, TAR_PICTURE_SIZE
from data_pipeline.building.index_tars import write_index
from data_pipeline.building.pool import run_all
from data_pipeline.building.tar_scan import LeftOut, ScanInputs, mean_and_std
from data_pipeline.building.workers import BuildPlan, MadeTar, UnreadableError, content_digests, make_tar, unreadable
from data_pipeline.core.errors import UserError
from data_pipeline.core.options import Options
from data_pipeline.core.progress import Progress
from data_pipeline.core.randomness import generator, shuffled_in_rounds
from data_pipeline.overlays import NOTHING_GIVEN, PixelOverlay, Shape, baked_keys
from data_pipeline.overlays.registry import kind_of, save_overlay
from data_pipeline.sources import Source, first_record
from data_pipeline.sources.folder import PictureFiles
from data_pipeline.sources.silence import SilenceSource
from data_pipeline.storage.locations import MANIFEST_NAME, PICTURE_FIELDS
from data_pipeline.storage.locks import LOCK_NAME, locked
from data_pipeline.storage.manifest import (
    OVERLAY_NAME,
    SOURCE_DIGESTS_NAME,
    BatchEntry,
    Description,
    Fields,
    HowMade,
    LabelEntry,
    Manifest,
    OverlayEntry,
    describe_manifest,
)
from data_pipeline.storage.source_digests import write_source_digests
from data_pipeline.storage.store import SampleStore
from data_pipeline.storage.totals import Totals

logger = logging.getLogger(__name__)

T = TypeVar("T")

_NUM_BAD_NAMED = 10  # records in a sentence
_NUM_MEASURED, _NUM_MEASURED_AT_ONCE = 2_000, 100  # samples of the mean and std, if not of all samples


def _source_sha256(plan: BuildPlan, digests: Iterable[bytes]) -> str:
    """Hash the labels, and the contents of the records in the order of the dataset."""
    source, sha256 = plan.ingredients.source, hashlib.sha256()
    for name, column in source.labels.items():
        sha256.update(json.dumps([name, column.title, column.classes]).encode())
        sha256.update(column.label_N[plan.order].astype("<i8").tobytes())
    for some in digests:
        sha256.update(some)
    return sha256.hexdigest()


def build_dataset(
    dataset: str,
    directory: Path,
    *,
    split: str = "train",
    seed: int = 0,
    limit: int | None = None,
    repeats: int = 1,
    overlay: str | None = None,
    keep: bool = False,
    num_samples_per_shard: int = NUM_SAMPLES_PER_SHARD,
    num_workers: int = 1,
    skip_bad: int = 0,
    source: str | None = None,
    root: Path | None = None,
    source_options: Options = NOTHING_GIVEN,
    overlay_options: Options = NOTHING_GIVEN,
    shared: dict[str, Any] | None = None,
) -> Manifest:
    """Build a dataset in `directory`, or check that it was built there with the same arguments from the same data.

    `limit` bounds the number of records. Each record is stored `repeats` times, each time with another draw. `overlay`
    says when the overlay is drawn: `baked` into the tars (the default), or `online`, at each reading. `keep` stores the
    files of a folder as they are. Up to `skip_bad` records that cannot be read are left out; `DIR.bad.txt` lists all.
    `open_dataset` explains the rest. Raises `UserError` if the input is wrong, or if `directory` holds something else.
    """
    if keep and "folder" not in (source, dataset.partition("_")[0]):
        raise UserError("--keep stores the files of a folder as they are; use it with a dataset of a folder")
    if keep:
        source_options = {"image_size": TAR_PICTURE_SIZE, **source_options}
    ingredients = open_dataset(
        dataset,
        split=split,
        seed=seed,
        limit=limit,
        source=source,
        root=root,
        source_options=source_options,
        overlay_options=overlay_options,
        shared=shared,
        drawn=overlay,
    )
    how_made = HowMade(
        dataset=dataset,
        source=f"{ingredients.description}, files as they are" if keep else ingredients.description,
        split=cast(Literal["train", "test"], split),
        seed=seed,
        repeats=repeats,
        limit=limit,
        source_options=dict(ingredients.source_options),
    )
    bad: dict[int, str] = {}  # the numbers of records that the source cannot read, with the error of each
    _leave_out([], directory, skip_bad=skip_bad)  # of an earlier command
    while True:
        plan = _plan(
            ingredients,
            how_made,
            directory.with_name(f"{directory.name}.partial"),
            without=bad,
            drawn=overlay,
            keep=keep,
            num_samples_per_shard=num_samples_per_shard,
        )
        try:
            if directory.is_file() or (directory.is_dir() and any(directory.iterdir())):
                return _check_finished(directory, plan, num_workers=num_workers)
            with _whole_or_nothing(directory, plan.scan.directory):
                tars = _make_tars(plan, title=f"building {directory}", num_workers=num_workers)
                return _write_index(plan, tars)
        except UnreadableError:
            for some in _of_all_records(unreadable, plan, num_workers=num_workers):
                bad |= some
            reasons = [bad[number].removesuffix("; mend or remove it") for number in sorted(bad)]
            _leave_out(reasons, directory, skip_bad=skip_bad)


def _leave_out(reasons: Sequence[str], directory: Path, *, skip_bad: int) -> None:
    """List why records cannot be read in the file `DIRECTORY.bad.txt`, and warn of them; without any, remove the file.

    Raises `UserError` if there are more than `skip_bad`.
    """
    listing = directory.with_name(f"{directory.name}.bad.txt")
    if not reasons:
        if listing.is_file():
            listing.unlink()
        return
    listing.parent.mkdir(parents=True, exist_ok=True)
    listing.write_text("".join(f"{reason}\n" for reason in reasons), errors="surrogateescape")
    said = f"{'; '.join(reasons[:_NUM_BAD_NAMED])}{'; ...' if len(reasons) > _NUM_BAD_NAMED else ''}; see {listing}"
    if len(reasons) > skip_bad:
        raise UserError(
            f"{len(reasons)} records cannot be used: {said}, which lists all; mend or remove them, or leave them out "
            f"with --skip-bad {len(reasons)}"
        )
    logger.warning("left out %d records that cannot be used: %s", len(reasons), said)


def _plan(
    ingredients: Ingredients,
    how_made: HowMade,
    unfinished: Path,
    *,
    without: Collection[int],
    drawn: str | None,
    keep: bool,
    num_samples_per_shard: int,
) -> BuildPlan:
    """Check everything that can be checked before the first tar."""
    source, overlay = ingredients.source, ingredients.overlay
    split, seed, limit, repeats = how_made.split, how_made.seed, how_made.limit, how_made.repeats
    if drawn == "online" and repeats > 1:
        raise UserError(
            "an online overlay is drawn anew at each reading, so --repeats stores nothing new; leave it out"
        )
    if keep and (repeats > 1 or (overlay is not None and drawn != "online")):
        raise UserError("--keep stores pictures as they are; leave out --repeats, and draw with `--overlay online`")
    columns = source.labels
    to_balance = next(iter(columns.values())).label_N if columns else np.zeros(source.num_records, dtype=np.int64)
    used = np.setdiff1d(np.arange(len(to_balance)), list(without))
    order = used[shuffled_in_rounds(to_balance[used], generator(seed, f"order {split}"))][:limit]
    if without:
        how_made = how_made.model_copy(
            update={"source": f"{how_made.source}, without {len(without)} records that cannot be read"}
        )
    of_pixels = overlay if isinstance(overlay, PixelOverlay) else None
    entry = batch = None
    input_shape: tuple[int, ...]
    if ingredients.num_points is not None:
        input_shape, stored = (ingredients.num_points,), "wav"
    else:
        height, width, num_channels = first_record(source, order.tolist()).content.shape
        shape = num_channels, height, width
        drawn_shape = shape if of_pixels is None else of_pixels.output_shape(shape)
        if of_pixels is not None and drawn == "online" and drawn_shape != shape:
            batch = _batch_entry(of_pixels, source, order, shape=drawn_shape, split=split)
        input_shape, stored = shape if drawn == "online" else drawn_shape, "png"
        if input_shape[0] not in (1, 3):
            raise UserError(f"pictures of {input_shape[0]} channels cannot be stored; draw with `--overlay online`")
    if overlay is not None:
        entry = OverlayEntry(
            kind=kind_of(overlay),
            drawn="online" if drawn == "online" else "baked",
            layout="scaled" if of_pixels is None else of_pixels.layout,
            options=dict(ingredients.overlay_options),
            batch=batch,
        )
    of_source = {name: LabelEntry(title=column.title, classes=column.classes) for name, column in columns.items()}
    labels = with_overlay(of_source, overlay)
    fields = Fields(
        content=PICTURE_FIELDS if keep else (stored,),
        mask="mask.png" if of_pixels is not None and drawn != "online" else None,
        labels={
            name: f"json:{name}" for name, label in labels.items() if label.given_by == "source" or drawn != "online"
        },
    )
    scan = ScanInputs(
        fields=fields,
        directory=unfinished,
        size=(source.image_size or 0) if isinstance(source, PictureFiles) else 0,
        num_measured=-(-_NUM_MEASURED * num_samples_per_shard // len(order)) if keep else 0,
    )
    return BuildPlan(ingredients, how_made, entry, labels, order, input_shape, num_samples_per_shard, keep, scan)


def _batch_entry(
    overlay: PixelOverlay, source: Source, order: NDArray[np.int64], *, shape: Shape, split: str
) -> BatchEntry:
    """Return the entry of pictures with an online overlay, which brings them to `shape`.

    Mean and std are of the first samples.
    """
    totals = Totals()
    columns = source.labels
    for start in range(0, min(_NUM_MEASURED, len(order)), _NUM_MEASURED_AT_ONCE):
        contents = {}
        for number in order[start : min(start + _NUM_MEASURED_AT_ONCE, _NUM_MEASURED)].tolist():
            with suppress(UserError):  # it is named when the tars are made, and the plan is made again without it
                contents[number] = source[number].content
        if not contents:
            continue
        numbers_B = np.array(list(contents), dtype=np.int64)
        pictures_BHWC = np.stack([*contents.values()])
        labels = {name: torch.from_numpy(column.label_N[numbers_B]) for name, column in columns.items()}
        keys = baked_keys(torch.arange(start, start + len(numbers_B)), seed=0, split=split)
        overlaid = overlay(torch.from_numpy(pictures_BHWC).permute(0, 3, 1, 2), keys, labels)
        for picture_HWC in overlaid.inputs.permute(0, 2, 3, 1).numpy():
            totals += Totals.of(picture_HWC)
    return BatchEntry(shape=shape, mean=totals.mean, std=totals.std)


def _make_tars(plan: BuildPlan, *, title: str, num_workers: int) -> list[MadeTar]:
    """Write all tars."""
    tars, remarks = list[MadeTar](), LeftOut()
    made = run_all(make_tar, plan, range(plan.num_shards), num_workers=num_workers)
    with closing(made), Progress(title, total=plan.num_samples) as progress:
        for tar in made:
            tars.append(tar)
            remarks += tar.remarks
            progress.advance(tar.scanned.num_samples)
    for line in remarks.lines():
        logger.warning(line)
    return tars


def _write_index(plan: BuildPlan, tars: list[MadeTar]) -> Manifest:
    """Write what lies beside the tars, the manifest last."""
    out, how_made = plan.scan.directory, plan.how_made
    scanned, beside = [tar.scanned for tar in tars], []
    if plan.overlay is not None and plan.baked is None:
        assert plan.ingredients.overlay is not None
        save_overlay(plan.ingredients.overlay, out / OVERLAY_NAME)
        beside.append(OVERLAY_NAME)
    if plan.keeps_files:
        mean, std = mean_and_std(scanned)
    else:
        totals, digests = Totals(), [tar.digests for tar in tars]
        for tar in tars:
            totals += tar.totals
        mean, std = totals.mean, totals.std
        how_made = how_made.model_copy(update={"source_sha256": _source_sha256(plan, digests)})
        if not isinstance(plan.ingredients.source, SilenceSource):  # its records are all alike
            write_source_digests(out / SOURCE_DIGESTS_NAME, b"".join(digests), num_samples=plan.num_samples)
            beside.append(SOURCE_DIGESTS_NAME)
    description = Description(
        how_made=how_made,
        input_shape=plan.input_shape,
        mean=mean,
        std=std,
        labels=dict(plan.labels),
        medium="picture" if plan.ingredients.num_points is None else "sound",
        sample_rate=plan.ingredients.sample_rate,
        any_size=plan.keeps_files,
        overlay=plan.overlay,
    )
    return write_index(scanned, out, description, fields=plan.scan.fields, numbered=True, beside=beside)


def _check_finished(directory: Path, plan: BuildPlan, *, num_workers: int) -> Manifest:
    """Return the manifest of a dataset that exists already.

    Raises `UserError` unless it was made with these arguments from the same data.
    """
    manifest = SampleStore(directory).manifest  # raises if a tar is missing
    other = "choose another directory or remove it"
    before_and_now: dict[str, tuple[object, object]] = {
        **{name: (before, getattr(plan.how_made, name)) for name, before in manifest.how_made},
        "overlay": (manifest.overlay, plan.overlay),
        "--keep or image_size": (manifest.tars.fields, plan.scan.fields),
        "number of samples": (manifest.num_samples, plan.num_samples),
        "number of shards": (manifest.num_shards, plan.num_shards),
    }
    del before_and_now["source_sha256"]
    differs = [what for what, (before, now) in before_and_now.items() if before != now]
    is_read = not plan.keeps_files and not {*differs} - {"source", "number of samples", "number of shards"}
    # Raises if some records are to be left out.
    digests = _of_all_records(content_digests, plan, num_workers=num_workers) if is_read else []
    for what in differs:
        before, now = before_and_now[what]
        raise UserError(f"{directory} was built with {what} {before}, not {now}; {other}")
    if is_read and manifest.how_made.source_sha256 != _source_sha256(plan, digests):
        raise UserError(f"{directory} was built from other data; {other}")
    return manifest


def _of_all_records(work: Callable[[BuildPlan, NDArray[np.int64]], T], plan: BuildPlan, *, num_workers: int) -> list[T]:
    """Return what `work` finds in some records of a plan at a time."""
    starts = range(0, len(plan.order), NUM_SAMPLES_PER_SHARD)
    slices = [plan.order[start : start + NUM_SAMPLES_PER_SHARD] for start in starts]
    with closing(run_all(work, plan, slices, num_workers=num_workers)) as found:
        return list(found)


@contextmanager
def _whole_or_nothing(directory: Path, unfinished: Path) -> Iterator[None]:
    """Make the empty folder `unfinished` to build in, and rename it to `directory` at the end.

    Removes what a killed build has left there. Raises `UserError` if another build is writing there, or if the folder
    is not from a build.
    """
    if unfinished.exists() and not (unfinished / LOCK_NAME).exists():
        raise UserError(f"{unfinished} is not from a build; move it, or choose another --out")
    unfinished.mkdir(parents=True, exist_ok=True)
    with locked(unfinished / LOCK_NAME):
        for path in unfinished.iterdir():
            if path.name != LOCK_NAME:
                path.unlink()
        try:
            yield
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        (unfinished / LOCK_NAME).unlink()
        unfinished.rename(directory)


def run(args: argparse.Namespace) -> None:
    shared: dict[str, Any] = {}
    # The test split first: if there is none, that is said before the long build.
    places = {split: args.out / split for split in reversed(SPLITS)} if args.split == BOTH else {args.split: args.out}
    for split, out in places.items():
        existed = (out / MANIFEST_NAME).is_file()
        manifest = build_dataset(
            args.dataset,
            out,
            split=split,
            seed=args.seed,
            limit=args.limit,
            repeats=args.repeats,
            overlay=args.overlay,
            keep=args.keep,
            num_samples_per_shard=args.samples_per_shard,
            num_workers=args.workers,
            skip_bad=args.skip_bad,
            source=args.source,
            root=args.root,
            source_options=dict(args.source_option),
            overlay_options=dict(args.overlay_option),
            shared=shared,
        )
        done = "exists already, built from the same data with the same arguments" if existed else "built"
        print(f"{out} {done}: {manifest.num_samples} samples in {manifest.num_shards} shards, {manifest.sha256[:12]}")
        for line in describe_manifest(manifest):
            print(line)
