"""Read every byte of a dataset, local or remote, and report every problem by tar and key."""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from data_pipeline.core.errors import UserError
from data_pipeline.core.progress import Progress
from data_pipeline.loading.decode import DecodedSamples, decode
from data_pipeline.loading.placement import stored_order
from data_pipeline.remote.cache import read_manifest
from data_pipeline.remote.fetch import RemoteConfig
from data_pipeline.storage.index import map_file
from data_pipeline.storage.locations import MANIFEST_NAME
from data_pipeline.storage.manifest import FileEntry, Manifest
from data_pipeline.storage.store import SampleStore
from data_pipeline.storage.tar_headers import read_contents
from data_pipeline.storage.totals import Totals

_REMOTE: Final = RemoteConfig()
_REMEDY: Final = (
    "copy the named files again from a whole copy, or build or index the dataset again; training leaves out bad "
    "samples up to the share data.max_bad_share"
)
_CHUNK: Final = 256  # samples that are decoded at a time


def verify(location: str | Path, report: Callable[[str], object]) -> tuple[Manifest, int]:
    """Report every problem of a dataset, after the name of its file. Return the manifest and how many samples decode.

    `location` is a local directory or a remote location. Without a problem, each byte of a built dataset is as it was:

    - Each file beside the manifest, and each tar with a known hash, has its size and sha256.
    - Each local tar is whole, and holds nothing behind its end mark.
    - The headers of the tars confirm the place of each member, with its key if `build` wrote the tars.
    - Pictures or sounds and masks decode and fit the manifest.
    - The counts of labels, and the mean and std of all values, agree with the samples.

    Raises `UserError` if `location` holds no dataset, or one that cannot be opened.
    """
    manifest = read_manifest(location, config=_REMOTE)
    store = SampleStore(location, remote=_REMOTE, manifest=manifest, surveys=False)
    for problem in _wrong_files(store):
        report(problem)
    num_sound, are_sound = 0, True
    totals, counts = Totals(), {name: Counter[int]() for name in manifest.stored_labels}
    with Progress(f"verifying {location}", total=len(store)) as progress:
        for number in range(manifest.num_shards):
            problems = list[str]()
            try:
                problems += _wrong_tar(store, number)
                for indices in stored_order(store, range(number, number + 1), num_at_once=_CHUNK):
                    decoded = decode(store, indices)
                    problems += [f"{bad.shard}: {bad.key}: {bad.reason}" for bad in decoded.bad.values()]
                    num_sound += len(decoded) - len(decoded.bad)
                    totals += _totals_of(decoded)
                    for name, label_B in store.labels(indices).items():
                        counts[name].update(label_B.tolist())
            except UserError as error:
                problems.append(f"{store.shard_name(number)}: {error}")
            for problem in problems:
                report(problem)
            are_sound &= not problems
            progress.advance(len(store.samples_of(number)))
    if are_sound:
        for problem in _wrong_numbers(manifest, counts, totals):
            report(problem)
    return manifest, num_sound


def _wrong_files(store: SampleStore) -> Iterator[str]:
    for name, entry in store.manifest.files.items():
        try:
            if FileEntry.of(store.path(name)) != entry:
                yield f"{name}: does not have the sha256 in {MANIFEST_NAME}"
        except OSError as error:
            yield f"{name}: cannot be read ({error.strerror})"


def _wrong_tar(store: SampleStore, number: int) -> Iterator[str]:
    """Yield what is wrong with a local tar as a whole. A remote one was compared with its hash when it came."""
    if store.is_remote:
        return
    store.check_size(number)
    path = store.tar_path(number)
    data = map_file(path)
    if (due := store.sha256(number)) is not None and hashlib.sha256(data).hexdigest() != due:
        yield f"{path.name}: does not have the sha256 in the index"
    if (problem := read_contents(data).problem) is not None:
        yield f"{path.name}: {problem}"


def _wrong_numbers(manifest: Manifest, counts: dict[str, Counter[int]], totals: Totals) -> Iterator[str]:
    """Yield the numbers in the manifest that the samples do not give."""
    numbers: dict[str, tuple[object, object]] = {}
    for name, label in manifest.stored_labels.items():
        count_of = counts[name]
        numbers[f"labels.{name}.counts"] = label.counts, tuple(map(count_of.__getitem__, range(len(label.classes))))
    if not manifest.any_size:  # else they are of some of the pictures
        numbers |= {"mean": (manifest.mean, totals.mean), "std": (manifest.std, totals.std)}
    for field, (said, found) in numbers.items():
        if said != found:
            yield f"{MANIFEST_NAME}: {field} is {said}, but the samples give {found}"


def _totals_of(decoded: DecodedSamples) -> Totals:
    """Add up the values of samples. A bad one counts as black or silent; then the sums are not compared."""
    totals = Totals()
    for row in range(len(decoded)):
        pictures_BCHW = decoded.pictures_BCHW
        content = decoded.sound(row) if pictures_BCHW is None else pictures_BCHW[row].permute(1, 2, 0)
        totals += Totals.of(content.contiguous().numpy())
    return totals


def run(args: argparse.Namespace) -> None:
    problems = list[str]()

    def report(problem: str) -> None:
        print(problem)
        problems.append(problem)

    manifest, num_sound = verify(args.location, report)
    files = f"{manifest.num_shards} {'shards' if manifest.tars.numbered else 'tars'}"
    if not problems:
        print(f"{args.location} is sound: {num_sound} samples in {files}")
        return
    found = f"{len(problems)} problem{'s' * (len(problems) > 1)}"
    print(f"{args.location} has {found}: {num_sound} of {manifest.num_samples} samples sound in {files}")
    print(_REMEDY, file=sys.stderr)
    raise SystemExit(1)
