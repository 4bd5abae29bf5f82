"""Build a dataset: from a source, through an overlay, to shards and a manifest.

Sample `i` shows record `order[i % num_records]`. Its overlay is drawn from (seed, split, i) into the shard; an online
overlay is stored beside the shards instead, and drawn at each reading. The order is a seeded shuffle in rounds of one
record from every class, so that the first part of a dataset, of any length, is balanced.

A build writes to `DIR.partial`, the manifest last, and then renames it to `DIR`. An interrupted build leaves its
finished shards in `DIR.partial`, and the same build continues from them.

Guarantees: `DIR` holds a whole dataset or does not exist. The same arguments and source give the same bytes: each shard
is made by one process from its number alone.
"""

from __future__ import annotations

import argparse
import errno
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, Unpack, cast

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import ValidationError

from data_pipeline.building.catalogue import DATASETS, Choices, labels_of_overlay, open_dataset, open_folder
from data_pipeline.building.datasets import NUM_SAMPLES_PER_SHARD, OVERLAY_MODES, TAR_PICTURE_SIZE, check_at_least
from data_pipeline.building.index_tars import describe_index, overlay_to_draw
from data_pipeline.building.keep_files import pack_folder
from data_pipeline.building.locks import take_lock
from data_pipeline.building.workers import (
    FINISHED_SUFFIX,
    BuildInputs,
    FinishedShard,
    ShardTask,
    content_digests,
    finished_path,
    finished_shard,
    make_shard,
    run_all,
    wait_for_orphans,
)
from data_pipeline.core.errors import UserError, nearest
from data_pipeline.core.options import OVERLAY_OPTION, SOURCE_OPTION, parse_words
from data_pipeline.core.progress import Progress
from data_pipeline.core.randomness import generator
from data_pipeline.core.sample import BASE, NO_LABEL, Sample
from data_pipeline.core.validation import describe
from data_pipeline.overlays import Overlay, PixelOverlay, Shape, baked_keys
from data_pipeline.overlays.registry import kind_of, load_overlay, save_overlay
from data_pipeline.sources import Source, labels_of
from data_pipeline.sources.silence import SilenceSource
from data_pipeline.storage.manifest import (
    FORMAT_VERSION,
    MANIFEST_NAME,
    MAX_SHARDS,
    OVERLAY_NAME,
    SHARD_TABLE_NAME,
    SOURCE_DIGESTS_NAME,
    TABLE_FORMAT_VERSION,
    BatchEntry,
    HowMade,
    LabelEntry,
    Manifest,
    OverlayEntry,
    label_fields,
    load_manifest,
)
from data_pipeline.storage.shard_list import open_shard_list, write_shard_table
from data_pipeline.storage.shards import index_path, shard_name
from data_pipeline.storage.source_digests import check_source_digests, write_source_digests
from data_pipeline.storage.totals import Totals

logger = logging.getLogger(__name__)

_NUM_NAMED: Final = 12  # class names in the summary of a build
_NUM_MEASURED, _NUM_MEASURED_AT_ONCE = 2_000, 100  # samples of the mean and std of an overlay that changes the shape
_ARGUMENTS_NAME = "build.json"  # in DIR.partial: the arguments of the build that made its shards
_OWN_NAMES = frozenset({MANIFEST_NAME, OVERLAY_NAME, SOURCE_DIGESTS_NAME, SHARD_TABLE_NAME, _ARGUMENTS_NAME})
_MAX_IN_LIST: Final = 10_000  # shards; a manifest that lists so many is read in 0.3 s


def balanced_order(labels: NDArray[np.int64], *, seed: int, split: str, limit: int | None) -> NDArray[np.int64]:
    """Return a seeded shuffle of the records, cut at `limit`: (num_records,) int64 numbers of records.

    `labels` are the classes of the records, (num_records,); `NO_LABEL` counts as one more class. The shuffle goes in
    rounds. Each round has one record of every class that has records left.
    """
    shuffled = generator(seed, f"order {split}").permutation(len(labels))
    by_class = np.argsort(labels[shuffled], kind="stable")
    counts = np.bincount(labels - NO_LABEL)
    place_in_class = np.arange(len(labels)) - np.repeat(counts.cumsum() - counts, counts)
    rounds = np.empty_like(place_in_class)
    rounds[by_class] = place_in_class
    del by_class, place_in_class
    return shuffled[np.argsort(rounds, kind="stable")][:limit]


def _source_sha256(plan: BuildPlan, digests: Iterable[bytes]) -> str:
    """Hash the class names, and the labels and contents of the records in the order of the dataset."""
    source = plan.inputs.source
    sha256 = hashlib.sha256(json.dumps(source.class_names).encode())
    sha256.update(source.labels[plan.order].astype("<i8").tobytes())
    for name, column in labels_of(source).items():
        if name != BASE:
            sha256.update(json.dumps([name, column.title, column.classes]).encode())
            sha256.update(column.label_N[plan.order].astype("<i8").tobytes())
    for some in digests:
        sha256.update(some)
    return sha256.hexdigest()


@dataclass(frozen=True)
class BuildPlan:
    """A dataset to build: its inputs, the entries of its manifest, and the record of each sample."""

    inputs: BuildInputs
    how_made: HowMade
    overlay: Overlay | None
    overlay_sha256: str | None  # of the file that `save_overlay` writes
    overlay_entry: OverlayEntry | None
    order: NDArray[np.int64]  # from `balanced_order`
    num_samples_per_shard: int

    @property
    def num_samples(self) -> int:
        return self.how_made.repeats * len(self.order)

    def shard(self, number: int) -> ShardTask:
        first_index = number * self.num_samples_per_shard
        stop = min(first_index + self.num_samples_per_shard, self.num_samples)
        return ShardTask(
            number=number,
            first_index=first_index,
            records_B=self.order[np.arange(first_index, stop) % len(self.order)],
            num_new=min(max(len(self.order) - first_index, 0), stop - first_index),
        )

    @property
    def shard_sizes(self) -> tuple[int, ...]:
        starts = range(0, self.num_samples, self.num_samples_per_shard)
        return tuple(min(self.num_samples_per_shard, self.num_samples - start) for start in starts)

    @property
    def arguments(self) -> str:
        """Return as JSON what must be equal for a build to continue from the finished shards of another."""
        columns = labels_of(self.inputs.source).items()
        more = {name: hashlib.sha256(column.label_N.tobytes()).hexdigest() for name, column in columns if name != BASE}
        return json.dumps(
            {
                "how_made": self.how_made.model_dump(),
                "overlay": None if self.overlay_entry is None else self.overlay_entry.model_dump(),
                "overlay_sha256": self.overlay_sha256,
                "num_samples_per_shard": self.num_samples_per_shard,
                "labels": {name: label.model_dump() for name, label in self.inputs.labels.items()},
                "more_labels_sha256": more,
                "order_sha256": hashlib.sha256(self.order.tobytes()).hexdigest(),
                "labels_sha256": hashlib.sha256(self.inputs.source.labels.tobytes()).hexdigest(),
            },
            indent=2,
        )


def build_dataset(
    dataset: str,
    directory: Path,
    *,
    split: str = "train",
    seed: int = 0,
    limit: int | None = None,
    repeats: int = 1,
    overlay: str | None = None,
    num_samples_per_shard: int = NUM_SAMPLES_PER_SHARD,
    num_workers: int = 1,
    **choices: Unpack[Choices],
) -> Manifest:
    """Build a dataset in `directory`, or check that it was built there with the same arguments from the same data.

    `limit` bounds the number of records. Each record is stored `repeats` times, each time with another draw. `overlay`
    says when the overlay is drawn: `baked` into the shards (the default), or `online`, at each reading. See `Choices`
    for the rest. Raises `UserError` if the input is wrong, or if `directory` holds something else.
    """
    check_at_least(
        *(("--limit", limit, 1), ("--repeats", repeats, 1), ("--seed", seed, 0)),
        *(("--samples-per-shard", num_samples_per_shard, 1), ("--workers", num_workers, 1)),
        ("--image-size", choices.get("image_size"), 1),
    )
    with _manifest_errors_as_user_errors(dataset):
        plan = _plan(
            dataset,
            split=split,
            seed=seed,
            limit=limit,
            repeats=repeats,
            drawn=overlay,
            num_samples_per_shard=num_samples_per_shard,
            choices=choices,
        )
    if (num_shards := len(plan.shard_sizes)) > MAX_SHARDS:
        raise UserError(
            f"--samples-per-shard {num_samples_per_shard} makes {num_shards} shards, and a dataset has {MAX_SHARDS} "
            f"at most; give {-(-plan.num_samples // MAX_SHARDS)} or more"
        )
    if _is_taken(directory):
        return _check_finished(directory, plan, num_workers=num_workers)
    with _whole_or_nothing(directory) as unfinished:
        try:  # a build that was killed just before the renaming has left a whole dataset
            manifest = _check_finished(unfinished, plan, num_workers=num_workers)
        except UserError:
            _make_shards(plan, unfinished, title=f"building {directory.name}", num_workers=num_workers)
            with _manifest_errors_as_user_errors(dataset):
                manifest = _write_manifest(plan, unfinished)
        for path in [*unfinished.glob(".shard-*"), unfinished / _ARGUMENTS_NAME]:
            path.unlink(missing_ok=True)
    return manifest


@contextmanager
def _manifest_errors_as_user_errors(dataset: str) -> Iterator[None]:
    """Raise `UserError` for an input that a manifest cannot hold, such as a class name with a line break."""
    try:
        yield
    except ValidationError as error:
        raise UserError(
            f"{dataset} cannot be built from this input: {describe(error, Manifest)}; change that in the source"
        ) from None


def _plan(
    dataset: str,
    *,
    split: str,
    seed: int,
    limit: int | None,
    repeats: int,
    drawn: str | None,
    num_samples_per_shard: int,
    choices: Choices,
) -> BuildPlan:
    """Open the sources, and check everything that can be checked before the first shard."""
    if drawn is not None and drawn not in OVERLAY_MODES:
        raise UserError(f'unknown --overlay "{drawn}"{nearest(drawn, OVERLAY_MODES)}')
    if drawn is not None and dataset in DATASETS and DATASETS[dataset].overlay is None:
        raise UserError(f"{dataset} has no overlay, so it takes no --overlay; leave it out")
    if drawn == "online" and repeats > 1:
        raise UserError(
            "an online overlay is drawn anew at each reading, so --repeats stores nothing new; leave it out"
        )
    ingredients = open_dataset(dataset, split=split, seed=seed, limit=limit, **choices)
    source, overlay = ingredients.source, ingredients.overlay
    labels = _labels(source, overlay)
    columns = labels_of(source)
    to_balance = next(iter(columns.values())).label_N if columns else source.labels
    order = balanced_order(to_balance, seed=seed, split=split, limit=limit)
    entry, overlay_sha256 = None, None
    if overlay is not None:
        overlay_sha256 = _overlay_sha256(overlay)
        of_pixels = overlay if isinstance(overlay, PixelOverlay) else None
        entry = OverlayEntry(
            kind=kind_of(overlay),
            drawn="online" if drawn == "online" else "baked",
            sha256=overlay_sha256 if drawn == "online" else None,
            layout="scaled" if of_pixels is None else of_pixels.layout,
            options=dict(ingredients.overlay_options),
            batch=None if of_pixels is None else _batch_entry(of_pixels, source, order, split=split, drawn=drawn),
        )
    inputs = BuildInputs(
        source=source,
        overlay=None if drawn == "online" else overlay,
        labels=labels,
        split=split,
        seed=seed,
        sample_rate=ingredients.sample_rate,
        num_points=ingredients.num_points,
    )
    how_made = HowMade(
        dataset=dataset,
        source=ingredients.description,
        split=cast(Literal["train", "test"], split),
        seed=seed,
        repeats=repeats,
        limit=limit,
        source_sha256="",
        source_options=dict(ingredients.source_options),
    )
    if isinstance(overlay, PixelOverlay):
        for note in overlay.notes(num_samples=repeats * len(order)):
            logger.warning("%s", note)
    return BuildPlan(inputs, how_made, overlay, overlay_sha256, entry, order, num_samples_per_shard)


def _batch_entry(
    overlay: PixelOverlay, source: Source, order: NDArray[np.int64], *, split: str, drawn: str | None
) -> BatchEntry | None:
    """Return the shape, mean and std of pictures with an online overlay; None if it keeps the shape, or is baked.

    Mean and std are of the first samples. Raises `UserError` if the overlay is baked into pictures that no PNG holds.
    """
    height, width, num_channels = source[int(order[0])].content.shape
    shape = overlay.output_shape((num_channels, height, width))
    if drawn != "online":
        if shape[0] not in (1, 3):
            raise UserError(
                f"pictures of {shape[0]} channels cannot be stored, because a PNG holds 1 or 3; build it with "
                "`--overlay online`"
            )
        return None
    if shape == (num_channels, height, width):
        return None
    totals = Totals({})
    columns = labels_of(source)
    for start in range(0, min(_NUM_MEASURED, len(order)), _NUM_MEASURED_AT_ONCE):
        numbers_B = order[start : min(start + _NUM_MEASURED_AT_ONCE, _NUM_MEASURED)]
        pictures_BHWC = np.stack([source[number].content for number in numbers_B.tolist()])
        labels = {name: torch.from_numpy(column.label_N[numbers_B]) for name, column in columns.items()}
        keys = baked_keys(torch.arange(start, start + len(numbers_B)), seed=0, split=split)
        overlaid = overlay(torch.from_numpy(pictures_BHWC).permute(0, 3, 1, 2), keys, labels)
        for picture_HWC in overlaid.inputs.permute(0, 2, 3, 1).numpy():
            totals.add(Sample(0, picture_HWC, None, {}))
    return BatchEntry(shape=shape, mean=totals.mean, std=totals.std)


def _labels(source: Source, overlay: Overlay | None) -> dict[str, LabelEntry]:
    """Return every label of the source and of the overlay by name, without counts.

    Raises `UserError` if both give a label of the same name.
    """
    of_source = {
        name: LabelEntry(title=column.title, classes=column.classes, counts=())
        for name, column in labels_of(source).items()
    }
    if overlay is None:
        return of_source
    of_overlay = labels_of_overlay(overlay)
    if both := sorted(of_source.keys() & of_overlay.keys()):
        raise UserError(f"the source and the overlay both give the label {both[0]}; rename it in one of them")
    return {**of_source, **of_overlay}


def _overlay_sha256(overlay: Overlay) -> str:
    with tempfile.TemporaryDirectory() as directory:
        return save_overlay(overlay, Path(directory) / OVERLAY_NAME)


def _make_shards(plan: BuildPlan, directory: Path, *, title: str, num_workers: int) -> None:
    """Write the shards that `directory` lacks."""
    kept = _kept_shards(plan, directory, num_workers=num_workers)
    missing = [number for number in range(len(plan.shard_sizes)) if number not in kept]
    num_kept = sum(plan.shard_sizes[number] for number in kept)
    if not missing:
        return
    made = run_all(
        partial(make_shard, directory=directory),
        plan.inputs,
        map(plan.shard, missing),
        num_workers=min(num_workers, len(missing)),
        lock=directory / _ARGUMENTS_NAME,
    )
    with closing(made), Progress(title, total=plan.num_samples, start=num_kept) as progress:
        for num_samples in made:
            progress.advance(num_samples)


def _kept_shards(plan: BuildPlan, directory: Path, *, num_workers: int) -> set[int]:
    """Return the numbers of the shards that an interrupted build of the same plan has finished in `directory`.

    Removes all other files, and the finished shards too if a record of them is not in the source any more.
    """
    arguments = directory / _ARGUMENTS_NAME
    kept: set[int] = set()
    if arguments.is_file():
        wait_for_orphans(arguments)
        if arguments.read_text(encoding="utf-8") == plan.arguments:
            kept = {number for number in range(len(plan.shard_sizes)) if finished_shard(directory, number) is not None}
            if not _are_from_same_data(plan, directory, sorted(kept), num_workers=num_workers):
                logger.warning("%s holds shards of other data; all are built again", directory)
                kept = set()
    names = {_ARGUMENTS_NAME} if kept else set()
    for number in kept:
        shard = directory / shard_name(number)
        names |= {shard.name, index_path(shard).name, finished_path(directory, number).name}
    for path in directory.iterdir():
        if path.name in names:
            continue
        if path.is_dir():
            shutil.rmtree(path)  # of a build with --keep
        else:
            path.unlink()
    if not kept:
        arguments.write_text(plan.arguments, encoding="utf-8")
    return kept


def _are_from_same_data(plan: BuildPlan, directory: Path, numbers: Sequence[int], *, num_workers: int) -> bool:
    """Return whether the records of finished shards are the same in the source now. Decodes all of them."""
    new = (task.records_B[: task.num_new] for task in map(plan.shard, numbers))
    made = run_all(content_digests, plan.inputs, new, num_workers=num_workers)
    title = f"comparing finished shards of {directory.name} with the source, shard"
    with closing(made), Progress(title, total=len(numbers)) as progress:
        for number, digests in zip(numbers, made, strict=True):
            finished = finished_shard(directory, number)
            assert finished is not None
            if finished.digests != digests.hex():
                return False
            progress.advance()
    return True


def _write_manifest(plan: BuildPlan, directory: Path) -> Manifest:
    """Write the manifest of the finished shards, as the last file."""
    inputs, entry = plan.inputs, plan.overlay_entry
    totals, all_digests = inputs.no_totals(), bytearray()
    num_shards = len(plan.shard_sizes)

    def finished_shards() -> Iterator[FinishedShard]:
        for number in range(num_shards):
            finished = finished_shard(directory, number)
            assert finished is not None
            yield finished

    def digests() -> Iterator[bytes]:
        for finished in finished_shards():
            totals.merge(finished.sums)
            of_shard = bytes.fromhex(finished.digests)
            all_digests.extend(of_shard)
            yield of_shard

    source_sha256 = _source_sha256(plan, digests())
    is_online = entry is not None and entry.drawn == "online"
    if is_online:
        assert plan.overlay is not None
        save_overlay(plan.overlay, directory / OVERLAY_NAME)
    source_digests_sha256 = None
    if not isinstance(inputs.source, SilenceSource):  # its records are all alike
        source_digests_sha256 = write_source_digests(
            directory / SOURCE_DIGESTS_NAME, bytes(all_digests), num_samples=plan.num_samples
        )
    counts = totals.counts
    labels = {name: label.model_copy(update={"counts": counts.get(name, ())}) for name, label in inputs.labels.items()}
    entries, table = (shard.entry for shard in finished_shards()), None
    if num_shards > _MAX_IN_LIST:
        table = write_shard_table(directory / SHARD_TABLE_NAME, entries, num_shards=num_shards)
    fields = label_fields(labels, format_version=FORMAT_VERSION, title_base=inputs.source.title)
    if table is not None:
        fields["format_version"] = TABLE_FORMAT_VERSION
    manifest = Manifest(
        num_samples=plan.num_samples,
        medium="picture" if inputs.num_points is None else "sound",
        input_shape=_stored_shape(plan) if inputs.num_points is None else (inputs.num_points,),
        sample_rate=inputs.sample_rate,
        **fields,
        mean=totals.mean,
        std=totals.std,
        overlay=entry,
        how_made=plan.how_made.model_copy(update={"source_sha256": source_sha256}),
        shards=tuple(entries) if table is None else (),
        shard_table=table,
        source_digests_sha256=source_digests_sha256,
    )
    with (directory / MANIFEST_NAME).open("w", encoding="utf-8") as file:
        file.write(manifest.model_dump_json(indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())
    return manifest


def _stored_shape(plan: BuildPlan) -> Shape:
    """Return channels, height and width of the stored pictures."""
    height, width, num_channels = plan.inputs.source[int(plan.order[0])].content.shape
    shape = (num_channels, height, width)
    return plan.inputs.overlay.output_shape(shape) if isinstance(plan.inputs.overlay, PixelOverlay) else shape


def _is_taken(directory: Path) -> bool:
    return directory.is_file() or (directory.is_dir() and any(directory.iterdir()))


def _check_finished(directory: Path, plan: BuildPlan, *, num_workers: int) -> Manifest:
    """Return the manifest of a dataset that exists already.

    Raises `UserError` unless it is whole and was made with these arguments from the same data.
    """
    if not (directory / MANIFEST_NAME).is_file():
        raise UserError(f"{directory} exists already and is not a dataset; choose another directory or remove it")
    manifest = load_manifest(directory)
    for name in HowMade.model_fields:
        before, now = getattr(manifest.how_made, name), getattr(plan.how_made, name)
        if before != now and name != "source_sha256":
            raise UserError(
                f"{directory} was built with {name} {before}, not {now}; choose another directory or remove it"
            )
    entry, planned = manifest.overlay, plan.overlay_entry
    if manifest.medium == "sound" and entry is not None and planned is not None and not entry.options:
        planned = planned.model_copy(update={"options": {}})  # older ones have them in `how_made.source` only
    if entry != planned:
        raise UserError(
            f"{directory} was built with another --overlay or --overlay-layout, or with other digits, sounds or "
            "options for it; choose another directory or remove it"
        )
    if manifest.num_samples != (now := sum(plan.shard_sizes)):
        raise UserError(
            f"{directory} was built from {manifest.num_samples} samples, and there are {now} now; choose another "
            "directory or remove it"
        )
    shards = open_shard_list(directory, manifest)
    if tuple(np.diff(shards.ends, prepend=0).tolist()) != plan.shard_sizes:
        raise UserError(
            f"{directory} was built with another --samples-per-shard; choose another directory or remove it"
        )
    for number, num_bytes in enumerate(shards.num_bytes.tolist()):
        path = directory / shards.name(number)
        if not path.is_file() or path.stat().st_size != num_bytes:
            raise UserError(f"{path} is missing or damaged; remove {directory} and build it again")
    if manifest.overlay is not None and manifest.overlay.sha256 is not None:
        load_overlay(directory / OVERLAY_NAME, sha256=manifest.overlay.sha256)
    if manifest.source_digests_sha256 is not None:
        check_source_digests(directory / SOURCE_DIGESTS_NAME, manifest)
    starts = range(0, len(plan.order), NUM_SAMPLES_PER_SHARD)
    slices = (plan.order[start : start + NUM_SAMPLES_PER_SHARD] for start in starts)
    with closing(run_all(content_digests, plan.inputs, slices, num_workers=num_workers)) as digests:
        if manifest.how_made.source_sha256 != _source_sha256(plan, digests):
            raise UserError(f"{directory} was built from other data; choose another directory or remove it")
    return manifest


@contextmanager
def _whole_or_nothing(directory: Path) -> Iterator[Path]:
    """Make the folder `directory.partial` to build in, and rename it to `directory` at the end.

    The folder may hold files of an earlier build. After an error it is kept if it holds a finished shard, and removed
    if not. A file lock, which is free again when the process ends, keeps two builds apart. Raises `UserError` if the
    folder cannot be made, or if another build has made `directory` meanwhile.
    """
    if not directory.name:
        raise UserError(f"--out {directory} does not name a new folder; give a name, such as --out {directory}/data")
    unfinished = directory.with_name(f"{directory.name}.partial")
    try:
        unfinished.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the folder {unfinished} ({error.strerror}); choose another --out") from None

    def refuse() -> None:
        raise UserError(f"another build is writing {unfinished}; wait for it or choose another --out") from None

    descriptor = os.open(unfinished, os.O_RDONLY)
    try:
        take_lock(descriptor, when_held=refuse)
        if _is_taken(directory):  # another build ended after this one had looked for `directory`
            with suppress(OSError):
                unfinished.rmdir()
            raise UserError(f"another build has just finished {directory}; run the same command again to compare them")
        for path in unfinished.iterdir():
            if path.name not in _OWN_NAMES and not path.name.startswith(("shard-", ".shard-")):
                raise UserError(f"{path} is not from a build, so it is not removed; move it or choose another --out")
        try:
            yield unfinished
        except BaseException as error:
            if not any([*unfinished.glob(f".*{FINISHED_SUFFIX}"), *unfinished.glob(MANIFEST_NAME)]):
                shutil.rmtree(unfinished, ignore_errors=True)
            if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                error.filename = unfinished  # the error of a write has no file name
            raise
        unfinished.rename(directory)
    finally:
        os.close(descriptor)


def describe_manifest(manifest: Manifest) -> list[str]:
    """Return lines that describe a dataset: its samples, each label with its classes, the overlay, the source."""
    size = " x ".join(map(str, manifest.input_shape[:0:-1]))
    samples = (
        f"pictures of {size} pixels"
        if manifest.sample_rate is None
        else f"sounds at {manifest.sample_rate} points a second, read as {manifest.input_shape[0]} points"
    )
    megabytes = manifest.num_bytes / 1e6
    lines = [f"samples: {samples}, {megabytes:.1f} MB in all"]
    for name, label in manifest.labels.items():
        classes, of_each = label.classes, ""
        if label.counts:
            least, most = min(label.counts), max(label.counts)
            of_each = f" of {least} samples each" if least == most else f" of {least} to {most} samples each"
        more = ", ..." if len(classes) > _NUM_NAMED else ""
        shown = ", ".join(classes[:_NUM_NAMED])
        lines.append(f"label_{name}, {label.title}: {len(classes)} classes{of_each}, {shown}{more}")
    if manifest.overlay is not None:
        when = "anew at each reading" if manifest.is_online else "into the shards"
        layout = ", tiled" if manifest.overlay.layout == "tiled" else ""
        options = "".join(f", {name}={value}" for name, value in manifest.overlay.options.items())
        lines.append(f"overlay: {manifest.overlay.kind}{layout}{options}, drawn {when}")
        if manifest.batch_shape != manifest.input_shape:
            channels, height, width = manifest.batch_shape
            lines.append(f"in a batch: pictures of {channels} channels and {width} x {height} pixels")
    made = manifest.how_made
    lines.append(f"made from: {made.source}; split {made.split}, seed {made.seed}")
    return lines


def run(args: argparse.Namespace) -> None:
    if args.keep:
        _run_keep(args)
        return
    existed = (args.out / MANIFEST_NAME).is_file()
    choices: dict[str, Any] = {name: getattr(args, name, None) for name in Choices.__annotations__}
    choices["overlay_options"] = parse_words(args.overlay_option or (), flag=OVERLAY_OPTION)
    choices["source_options"] = parse_words(args.source_option or (), flag=SOURCE_OPTION)
    manifest = build_dataset(
        args.dataset,
        args.out,
        split=args.split,
        seed=args.seed,
        limit=args.limit,
        repeats=args.repeats,
        overlay=args.overlay,
        num_samples_per_shard=args.samples_per_shard,
        num_workers=args.workers,
        **choices,
    )
    done = "exists already, built from the same data with the same arguments" if existed else "built"
    print(f"{args.out} {done}: {manifest.num_samples} samples in {manifest.num_shards} shards, {manifest.sha256[:12]}")
    for line in describe_manifest(manifest):
        print(line)


def _run_keep(args: argparse.Namespace) -> None:
    """Pack the files of a folder as they are."""
    dataset = DATASETS.get(args.dataset)
    if dataset is None or dataset.base != "folder" or args.repeats != 1:
        raise UserError(
            "--keep packs the files of a folder as they are; use it with folder, folder_digits or another dataset of "
            "a folder, without --repeats"
        )
    if args.overlay != (None if dataset.overlay is None else "online"):
        raise UserError(
            "--keep stores pictures as they are, so an overlay can be drawn on them only when they are read; build "
            "folder without --overlay, or folder_digits or another with `--overlay online`"
        )
    if args.source_option:
        raise UserError("--keep packs the files of a folder as they are, so it takes no --source-option; leave it out")
    if args.root is None:
        raise UserError("--keep packs the files of a folder; name it with --root")
    check_at_least(
        *(("--limit", args.limit, 1), ("--seed", args.seed, 0), ("--image-size", args.image_size, 1)),
        ("--samples-per-shard", args.samples_per_shard, 1),
    )
    if _is_taken(args.out):
        raise UserError(f"{args.out} is not empty; choose another directory, or remove it")
    size = args.image_size or TAR_PICTURE_SIZE
    choices = Choices(test_share=args.test_share, labels=args.labels)
    folder = open_folder(args.root, split=args.split, seed=args.seed, image_size=size, choices=choices)
    order = None
    if args.limit is not None:
        to_balance = next(iter(labels_of(folder).values())).label_N
        order = balanced_order(to_balance, seed=args.seed, split=args.split, limit=args.limit)
    overlay = overlay_to_draw(dataset.overlay, args, size=size, digits_root=args.root)
    with _whole_or_nothing(args.out) as unfinished:
        manifest, facts = pack_folder(
            folder,
            unfinished,
            args.out,
            size=size,
            seed=args.seed,
            order=order,
            num_samples_per_shard=args.samples_per_shard,
            overlay=overlay,
        )
    for line in describe_index(manifest, facts):
        print(line)
    print(f"made from: {folder.description}; split {args.split}, seed {args.seed}")
