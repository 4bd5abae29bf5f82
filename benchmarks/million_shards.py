"""Time and memory from opening a built dataset of a million shards to its first batch.

    python -m benchmarks.million_shards [--shards S] [--directory DIR] [--out JSON]

The manifest and the table of S shards of ten small pictures are as a build would write them. Of the shards themselves,
only those exist that this benchmark needs. The shards from which the measured steps draw samples are real. Those that
are looked at when a dataset is opened are empty files of the right size: all shards, or 1,000 of more than 100,000. A
new process opens the dataset and makes the batch of one rank at one step: the first, and one at 90 % of an epoch.
"""

from __future__ import annotations

import hashlib
import time
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.billion_samples import (
    BATCH_SIZE,
    RANKS,
    SHARES,
    WINDOW,
    in_new_process,
    lines_of,
    measure_dataset,
    options,
    peak_bytes,
)
from benchmarks.record import Line
from data_pipeline.building.build import build_dataset
from data_pipeline.core.errors import UserError, run_command
from data_pipeline.core.sample import Sample
from data_pipeline.loading.order import BatchOrder
from data_pipeline.storage.manifest import (
    MANIFEST_NAME,
    MAX_LISTED_SHARDS,
    SHARD_TABLE_NAME,
    TABLE_FORMAT_VERSION,
    ShardEntry,
    load_manifest,
)
from data_pipeline.storage.shard_list import write_shard_table
from data_pipeline.storage.shards import encode, index_path, shard_name, write_shard
from data_pipeline.storage.store import SampleStore

PER_SHARD = 10
SIZE = 32
_HASH = "0" * 64


def make_dataset(directory: Path, *, num_shards: int) -> Path:
    """Write manifest, table and the shards that the benchmark reads. Return the directory of the dataset."""
    dataset = directory / "dataset"
    build_dataset("procedural", dataset, limit=PER_SHARD)
    manifest = load_manifest(dataset)
    for path in dataset.iterdir():
        path.unlink()
    num_samples = PER_SHARD * num_shards
    ends = PER_SHARD * np.arange(1, num_shards + 1)
    orders = [
        BatchOrder(num_samples, 0, BATCH_SIZE, rank=1, world_size=RANKS, shard_ends=ends, shuffle_shards=window)
        for window in (None, WINDOW)
    ]
    steps = [int(share * (num_samples // BATCH_SIZE)) for share in SHARES]
    read = np.unique(np.concatenate([order.at(step, bad={})[1] for order in orders for step in steps]) // PER_SHARD)
    made = {number: _write_shard(dataset, number) for number in read.tolist()}
    num_bytes = max(entry.num_bytes for entry in made.values())
    num_surveyed = num_shards if num_shards <= MAX_LISTED_SHARDS else 1_000
    surveyed = np.linspace(0, num_shards - 1, num_surveyed, dtype=int)
    for number in set(surveyed.tolist()) - made.keys():
        path = dataset / shard_name(number)
        for file, size in ((path, num_bytes), (index_path(path), PER_SHARD * 32)):
            with file.open("wb") as sparse:
                sparse.truncate(size)
    entries = (
        made.get(number)
        or ShardEntry.model_construct(
            name=shard_name(number), num_samples=PER_SHARD, num_bytes=num_bytes, sha256=_HASH, index_sha256=_HASH
        )
        for number in range(num_shards)
    )
    table = write_shard_table(dataset / SHARD_TABLE_NAME, entries, num_shards=num_shards)
    counts = (num_samples, *(0,) * (len(manifest.counts_base) - 1))
    changed = {"format_version": TABLE_FORMAT_VERSION, "num_samples": num_samples, "counts_base": counts}
    changed |= {"shards": (), "shard_table": table, "source_digests_sha256": None}
    (dataset / MANIFEST_NAME).write_text(manifest.model_copy(update=changed).model_dump_json(), encoding="utf-8")
    return dataset


def _write_shard(directory: Path, number: int) -> ShardEntry:
    """Write a shard of small pictures. The bytes of all shards of a number are the same each time."""
    content = np.frombuffer(hashlib.sha256(str(number).encode()).digest() * (SIZE * SIZE * 3 // 32), dtype=np.uint8)
    samples = (
        Sample(index, content.reshape(SIZE, SIZE, 3), None, {"base": 0})
        for index in range(PER_SHARD * number, PER_SHARD * (number + 1))
    )
    return write_shard(map(encode, samples), directory / shard_name(number))


def open_store(dataset: Path) -> dict[str, float]:
    """Open the dataset in this process."""
    before = peak_bytes()
    started = time.perf_counter()
    store = SampleStore(dataset)
    seconds = time.perf_counter() - started
    assert len(store.shard_ends) * PER_SHARD == len(store)
    return {"seconds": seconds, "megabytes": (peak_bytes() - before) / 1e6}


def opening_lines(dataset: Path) -> list[Line]:
    """Return the lines of opening the dataset alone."""

    def line(title: str, unit: str, field: str, most: float) -> Line:
        def measured() -> float:
            return in_new_process(open_store, dataset)[field]

        return Line(title, unit, {"ours": measured}, lambda m: m["ours"], "seconds", most, at_most=True)

    return [
        line("seconds to open it", "s", "seconds", 1.0),
        line("megabytes more than after the imports to open it", "MB", "megabytes", 50.0),
    ]


def check_size(num_shards: int) -> None:
    """Raise `UserError` if so many shards do not fill a batch."""
    least = -(-BATCH_SIZE // PER_SHARD)
    if num_shards < least:
        raise UserError(
            f"--shards {num_shards} gives {PER_SHARD * num_shards:,} samples, too few for a batch of {BATCH_SIZE:,}; "
            f"pass --shards {least} or more"
        )


def main() -> None:
    parser = options("from opening a dataset of a million shards to its first batch", space="80 bytes a shard")
    parser.add_argument("--shards", type=int, default=10**6, metavar="S")
    args = parser.parse_args()
    check_size(args.shards)

    def lines(dataset: Path) -> list[Line]:
        return [*opening_lines(dataset), *lines_of(dataset, num_samples=PER_SHARD * args.shards)]

    measure_dataset(
        args,
        make=partial(make_dataset, num_shards=args.shards),
        lines=lines,
        settings={"num_shards": args.shards},
    )


if __name__ == "__main__":
    run_command(main)
