"""Source to overlay to shards: builds a dataset that is there whole or not at all, with the same bytes each time.

Sample `i` shows picture `order[i % num_pictures]` with an overlay drawn from (seed, split, i). The order is a seeded
shuffle dealt out in rounds, one picture of every class a round, so that any first part of a dataset is balanced. Worker
processes make and encode samples; this process alone writes them, in order, so their number cannot change a byte. All
is written to `DIR.partial`, the manifest last, and then renamed.
"""

from __future__ import annotations

import argparse
import errno
import fcntl
import hashlib
import json
import multiprocessing
import os
import shutil
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from data_pipeline.catalogue import DATASETS, DIGITS, SOURCES, SPLITS, open_dataset
from data_pipeline.errors import UserError
from data_pipeline.manifest import FORMAT_VERSION, MANIFEST_NAME, HowMade, LabelNames, Manifest, load_manifest
from data_pipeline.overlays import IMAGE_SIZE, Overlay
from data_pipeline.progress import Progress
from data_pipeline.randomness import generator
from data_pipeline.sample import MASK_OUTSIDE, NO_LABEL, Record, Sample
from data_pipeline.shards import EncodedSample, encode, write_shards
from data_pipeline.sources import Source

NUM_SAMPLES_PER_SHARD: Final = 1_000
_NUM_SAMPLES_PER_CHUNK = 200  # of a worker's turn: some tenths of a second
_NUM_CHUNKS_AHEAD = 4  # per worker: keeps all busy and bounds the memory

T = TypeVar("T")


def balanced_order(labels: NDArray[np.int64], *, seed: int, split: str, limit: int | None) -> NDArray[np.int64]:
    """A seeded shuffle of the pictures, in rounds of one picture of every class that has some left, cut at `limit`.

    Returns (num_pictures,) int64 numbers of pictures.
    """
    shuffled = generator(seed, f"order {split}").permutation(len(labels))
    by_class = np.argsort(labels[shuffled], kind="stable")
    sorted_labels = labels[shuffled][by_class]
    rounds = np.empty(len(labels), dtype=np.int64)
    rounds[by_class] = np.arange(len(labels)) - np.searchsorted(sorted_labels, sorted_labels)
    return shuffled[np.argsort(rounds, kind="stable")][:limit]


@dataclass(frozen=True)
class Recipe:
    """All that a worker needs to make any sample of a dataset; `order` as `balanced_order` gives it."""

    source: Source
    overlay: Overlay | None
    order: NDArray[np.int64]
    seed: int
    split: str

    def picture(self, index: int) -> Record:
        """The clean picture of sample `index`."""
        return self.source[int(self.order[index % len(self.order)])]

    def sample(self, record: Record, index: int) -> Sample:
        """Sample `index`, made from its picture."""
        if self.overlay is None:
            mask = np.full(record.image.shape[:2], MASK_OUTSIDE, dtype=np.uint8)
            return Sample(index, record.image, mask, record.label, NO_LABEL)
        overlaid = self.overlay(record.image, generator(self.seed, f"overlay {self.split}", index))
        return Sample(index, overlaid.image, overlaid.mask, record.label, overlaid.label)

    @property
    def label_names(self) -> LabelNames:
        return LabelNames(
            base=self.source.class_names, overlay=self.overlay.class_names if self.overlay is not None else ()
        )

    def no_totals(self) -> Totals:
        names = self.label_names
        return Totals(num_base=len(names.base), num_overlay=len(names.overlay))


class Totals:
    """What the manifest says of all samples together. Sums of integers, so that the order of adding changes nothing."""

    def __init__(self, *, num_base: int, num_overlay: int) -> None:
        self._counts_base = np.zeros(num_base, dtype=np.int64)
        self._counts_overlay = np.zeros(num_overlay, dtype=np.int64)
        self._num_pixels = 0
        self._sum_C = np.zeros(3, dtype=np.int64)
        self._sum_of_squares_C = np.zeros(3, dtype=np.int64)

    def add(self, sample: Sample) -> None:
        self._counts_base[sample.label_base] += 1
        if sample.label_overlay != NO_LABEL:
            self._counts_overlay[sample.label_overlay] += 1
        pixels_NC = sample.image.reshape(-1, 3).astype(np.int64)
        self._num_pixels += len(pixels_NC)
        self._sum_C += pixels_NC.sum(axis=0)
        self._sum_of_squares_C += np.square(pixels_NC).sum(axis=0)

    def merge(self, other: Totals) -> None:
        self._counts_base += other._counts_base
        self._counts_overlay += other._counts_overlay
        self._num_pixels += other._num_pixels
        self._sum_C += other._sum_C
        self._sum_of_squares_C += other._sum_of_squares_C

    @property
    def counts_base(self) -> tuple[int, ...]:
        return tuple(self._counts_base.tolist())

    @property
    def counts_overlay(self) -> tuple[int, ...]:
        return tuple(self._counts_overlay.tolist())

    @property
    def mean(self) -> tuple[float, ...]:
        return tuple((self._sum_C / (255 * self._num_pixels)).tolist())

    @property
    def std(self) -> tuple[float, ...]:
        variance_C = self._sum_of_squares_C / self._num_pixels - np.square(self._sum_C / self._num_pixels)
        return tuple((np.sqrt(variance_C.clip(min=0)) / 255).tolist())


@dataclass(frozen=True)
class Chunk:
    """Some samples as a worker hands them back; `digests` as `_picture_digests` gives them."""

    encoded: list[EncodedSample]
    totals: Totals
    digests: bytes


def _make_chunk(recipe: Recipe, indices: range) -> Chunk:
    totals = recipe.no_totals()
    encoded, digests = [], []
    for index in indices:
        record = recipe.picture(index)
        sample = recipe.sample(record, index)
        totals.add(sample)
        encoded.append(encode(sample))
        if index < len(recipe.order):  # its picture comes for the first time
            digests.append(_digest(record))
    return Chunk(encoded, totals, b"".join(digests))


def _picture_digests(recipe: Recipe, indices: range) -> bytes:
    return b"".join(_digest(recipe.picture(index)) for index in indices)


def _digest(record: Record) -> bytes:
    return hashlib.sha256(repr((record.label, record.image.shape)).encode() + record.image.tobytes()).digest()


def _source_sha256(recipe: Recipe, digests: Iterable[bytes]) -> str:
    names = json.dumps(recipe.source.class_names).encode()
    return hashlib.sha256(names + b"".join(digests)).hexdigest()


_recipe_of_worker: Recipe  # set once in each worker process: a source may hold all pictures of a dataset


def _start_worker(recipe: Recipe) -> None:
    global _recipe_of_worker
    _recipe_of_worker = recipe
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A pool whose process is killed would otherwise wait for work for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _in_worker(make: Callable[[Recipe, range], T], indices: range) -> T:
    return make(_recipe_of_worker, indices)


def _make_all(
    make: Callable[[Recipe, range], T], recipe: Recipe, *, num_samples: int, num_workers: int
) -> Generator[tuple[range, T], None, None]:
    """`make(recipe, chunk)` for every chunk of the samples, in order, by worker processes if there are several."""
    starts = range(0, num_samples, _NUM_SAMPLES_PER_CHUNK)
    chunks = [range(start, min(start + _NUM_SAMPLES_PER_CHUNK, num_samples)) for start in starts]
    if min(num_workers, len(chunks)) == 1:
        for chunk in chunks:
            yield chunk, make(recipe, chunk)
        return
    # Forked from a server that has imported this module and has no threads: forking ourselves could copy a held lock.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    pool = ProcessPoolExecutor(min(num_workers, len(chunks)), context, initializer=_start_worker, initargs=(recipe,))
    under_way: deque[tuple[range, Future[T]]] = deque()
    try:
        for chunk in chunks:
            under_way.append((chunk, pool.submit(_in_worker, make, chunk)))
            if len(under_way) == _NUM_CHUNKS_AHEAD * num_workers:
                done, future = under_way.popleft()
                yield done, future.result()
        for done, future in under_way:
            yield done, future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def build_dataset(
    dataset: str,
    directory: Path,
    *,
    source: str | None = None,
    root: Path | None = None,
    split: str = "train",
    seed: int = 0,
    limit: int | None = None,
    repeats: int = 1,
    digits: str | None = None,
    digits_root: Path | None = None,
    num_samples_per_shard: int = NUM_SAMPLES_PER_SHARD,
    num_workers: int = 1,
) -> Manifest:
    """Build a dataset in `directory`, or find it built there already with the same arguments from the same pictures.

    `limit` bounds the number of pictures, of which each is stored `repeats` times, every time with a draw of its own;
    see `open_dataset` for the rest. Raises `UserError` where the input is wrong or `directory` holds something else.
    """
    for name, value, least in (
        *(("--limit", limit, 1), ("--repeats", repeats, 1), ("--seed", seed, 0)),
        *(("--samples-per-shard", num_samples_per_shard, 1), ("--workers", num_workers, 1)),
    ):
        if value is not None and value < least:
            raise UserError(f"{name} must be at least {least}, got {value}")
    ingredients = open_dataset(
        dataset, source=source, root=root, split=split, seed=seed, limit=limit, digits=digits, digits_root=digits_root
    )
    order = balanced_order(ingredients.source.labels, seed=seed, split=split, limit=limit)
    recipe = Recipe(ingredients.source, ingredients.overlay, order, seed, split)
    height, width, _ = recipe.picture(0).image.shape
    if recipe.overlay is not None and (height, width) != (IMAGE_SIZE, IMAGE_SIZE):
        raise UserError(
            f"{dataset} draws on pictures of 32x32 pixels, but those in {root} are {width}x{height}; resize them"
        )
    how_made = HowMade(
        dataset=dataset,
        source=ingredients.description,
        split=split,
        seed=seed,
        repeats=repeats,
        limit=limit,
        source_sha256="",
    )
    num_samples = repeats * len(order)
    if directory.is_file() or (directory.is_dir() and any(directory.iterdir())):
        starts = range(0, num_samples, num_samples_per_shard)
        sizes = tuple(min(num_samples_per_shard, num_samples - start) for start in starts)
        manifest = _check_finished(directory, how_made, shard_sizes=sizes)
        made = _make_all(_picture_digests, recipe, num_samples=len(order), num_workers=num_workers)
        if manifest.how_made.source_sha256 != _source_sha256(recipe, (digests for _, digests in made)):
            raise UserError(f"{directory} was built from other pictures; choose another directory or remove it")
        return manifest
    chunks = _make_all(_make_chunk, recipe, num_samples=num_samples, num_workers=num_workers)
    progress = Progress(f"building {directory.name}", total=num_samples)
    with _whole_or_nothing(directory) as partial, closing(chunks), progress:
        return _write(chunks, recipe, how_made, partial, num_samples_per_shard=num_samples_per_shard, progress=progress)


def _write(
    chunks: Iterable[tuple[range, Chunk]],
    recipe: Recipe,
    how_made: HowMade,
    directory: Path,
    *,
    num_samples_per_shard: int,
    progress: Progress,
) -> Manifest:
    """Write the shards and, when they are complete, the manifest."""
    totals, digests = recipe.no_totals(), []

    def encoded() -> Iterator[EncodedSample]:
        for indices, chunk in chunks:
            totals.merge(chunk.totals)
            digests.append(chunk.digests)
            yield from chunk.encoded
            progress.advance(len(indices))

    shards = write_shards(encoded(), directory, num_samples_per_shard=num_samples_per_shard)
    height, width, num_channels = recipe.picture(0).image.shape
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        num_samples=sum(entry.num_samples for entry in shards),
        image_shape=(num_channels, height, width),
        label_names=recipe.label_names,
        counts_base=totals.counts_base,
        counts_overlay=totals.counts_overlay,
        mean=totals.mean,
        std=totals.std,
        how_made=how_made.model_copy(update={"source_sha256": _source_sha256(recipe, digests)}),
        shards=shards,
    )
    with (directory / MANIFEST_NAME).open("w") as file:
        file.write(manifest.model_dump_json(indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())
    return manifest


def _check_finished(directory: Path, how_made: HowMade, *, shard_sizes: tuple[int, ...]) -> Manifest:
    """The manifest of a dataset that is there already.

    Raises `UserError` unless it is whole and was made with these arguments; `source_sha256` is not compared.
    """
    if not (directory / MANIFEST_NAME).is_file():
        raise UserError(f"{directory} is there already and is not a dataset; choose another directory or remove it")
    manifest = load_manifest(directory)
    for name in HowMade.model_fields:
        before, now = getattr(manifest.how_made, name), getattr(how_made, name)
        if before != now and name != "source_sha256":
            raise UserError(
                f"{directory} was built with {name} {before}, not {now}; choose another directory or remove it"
            )
    if tuple(entry.num_samples for entry in manifest.shards) != shard_sizes:
        raise UserError(
            f"{directory} was built with another --samples-per-shard; choose another directory or remove it"
        )
    for entry in manifest.shards:
        path = directory / entry.name
        if not path.is_file() or path.stat().st_size != entry.num_bytes:
            raise UserError(f"{path} is missing or damaged; remove {directory} and build it again")
    return manifest


@contextmanager
def _whole_or_nothing(directory: Path) -> Iterator[Path]:
    """An empty folder `directory.partial` to build in: becomes `directory` at the end, or is removed on any error.

    What a killed build left there is cleared away. A lock, which ends with its process, keeps two builds apart.
    """
    partial = directory.with_name(f"{directory.name}.partial")
    try:
        partial.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the folder {partial} ({error.strerror}); choose another --out") from None
    descriptor = os.open(partial, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another build is writing {partial}; wait for it or choose another --out") from None
        except OSError:
            pass  # a file system without locks
        left_over = list(partial.iterdir())
        for path in left_over:
            if path.name != MANIFEST_NAME and not path.name.startswith(("shard-", ".shard-")):
                raise UserError(f"{path} is not of a build, so it is not cleared away; move it or choose another --out")
        for path in left_over:
            path.unlink()
        try:
            yield partial
        except BaseException as error:
            shutil.rmtree(partial, ignore_errors=True)
            if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                error.filename = partial  # a failed write knows no name
            raise
        partial.rename(directory)
    finally:
        os.close(descriptor)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dataset", metavar="DATASET", help=", ".join(DATASETS))
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="the folder to make")
    sources = "; ".join(f"{family}: {' or '.join(names)}" for family, names in SOURCES.items())
    parser.add_argument("--source", metavar="S", help=f"where the pictures come from ({sources}; default: the first)")
    parser.add_argument("--root", metavar="PATH", type=Path, help="the folder that holds the source's data")
    parser.add_argument("--split", metavar="|".join(SPLITS), default="train", help="default: train")
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="of the order and the overlays (default: 0)")
    parser.add_argument("--limit", metavar="N", type=int, help="at most N pictures, balanced over the classes")
    parser.add_argument(
        "--repeats", metavar="R", type=int, default=1, help="store each picture R times, each with its own overlay"
    )
    parser.add_argument(
        "--digits", metavar="|".join(DIGITS), help="default: sklearn for procedural pictures, else mnist"
    )
    parser.add_argument(
        "--digits-root", metavar="PATH", type=Path, help="folder that holds MNIST/raw (default: --root)"
    )
    parser.add_argument(
        "--samples-per-shard", metavar="N", type=int, default=NUM_SAMPLES_PER_SHARD, help="default: %(default)s"
    )
    num_cpus = len(os.sched_getaffinity(0))
    parser.add_argument("--workers", metavar="N", type=int, default=num_cpus, help="processes (default: one per CPU)")


def run(args: argparse.Namespace) -> None:
    there_already = (args.out / MANIFEST_NAME).is_file()
    manifest = build_dataset(
        args.dataset,
        args.out,
        source=args.source,
        root=args.root,
        split=args.split,
        seed=args.seed,
        limit=args.limit,
        repeats=args.repeats,
        digits=args.digits,
        digits_root=args.digits_root,
        num_samples_per_shard=args.samples_per_shard,
        num_workers=args.workers,
    )
    done = "is there already, built from the same pictures with the same arguments" if there_already else "built"
    print(f"{args.out} {done}: {manifest.num_samples} samples in {len(manifest.shards)} shards, {manifest.sha256[:12]}")
