"""Time and memory from opening a dataset of a billion samples to its first batch.

    python -m benchmarks.billion_samples [--samples N] [--tars S] [--directory DIR] [--out JSON]

One tar of N / S small pictures is written and indexed. The dataset is S symbolic links to it. Its index repeats the
places of that one tar, so it is as large as a real one, 8 bytes a sample, and every sample is read from where the index
says. A new process opens it and makes the batch of one step: of the first, and of one at 90 % of an epoch.
"""

from __future__ import annotations

import io
import json
import multiprocessing
import re
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image
from webdataset import TarWriter

from benchmarks import record
from benchmarks.record import Line
from data_pipeline.building.index_tars import make_index
from data_pipeline.core.errors import UserError, run_command
from data_pipeline.loading.order import BatchOrder, EpochOrders
from data_pipeline.loading.stream import ReadConfig, Stream
from data_pipeline.storage.index import NUMBERS_NAME, SAMPLES_NAME, TIMES_NAME
from data_pipeline.storage.locations import MANIFEST_NAME, TARS_NAME
from data_pipeline.storage.manifest import Fields, FileEntry

BATCH_SIZE = 4_096
RANKS = 4
SIZE = 32
WINDOW = 8
SHARES = (0.0, 0.9)  # of an epoch


def make_dataset(directory: Path, *, num_samples: int, num_tars: int) -> Path:
    """Write one tar, links to it, and an index of all of them. Return the directory of the index."""
    per_tar = num_samples // num_tars
    tar = directory / "one.tar"
    with TarWriter(str(tar), encoder=False) as writer:
        for number in range(per_tar):
            file = io.BytesIO()
            Image.new("RGB", (SIZE, SIZE), (number % 256, number // 256 % 256, 0)).save(file, "JPEG")
            writer.write({"__key__": f"{number:08d}", "jpg": file.getvalue()})
    index = directory / "index"
    manifest, _ = make_index(str(tar), index, fields=Fields(), size=SIZE)
    links = directory / "tars"
    links.mkdir()
    paths = [str(links / f"{number:06d}.tar") for number in range(num_tars)]
    for path in paths:
        Path(path).symlink_to(tar)
    status = tar.stat()
    ends = per_tar * np.arange(1, num_tars + 1, dtype=np.int64)
    numbers_S2 = np.stack([ends, np.full(num_tars, status.st_size)], axis=1)
    (index / TARS_NAME).write_text("".join(f"{path}\n" for path in paths), encoding="utf-8")
    (index / NUMBERS_NAME).write_bytes(numbers_S2.astype("<i8").tobytes())
    (index / TIMES_NAME).write_bytes(np.full(num_tars, status.st_mtime_ns, dtype="<i8").tobytes())
    once = (index / SAMPLES_NAME).read_bytes()
    with (index / SAMPLES_NAME).open("wb") as file_of_all:
        for _ in range(num_tars):
            file_of_all.write(once)
    tars = manifest.tars.model_copy(update={"num_tars": num_tars, "num_bytes": num_tars * status.st_size})
    files = {name: FileEntry.of(index / name) for name in manifest.files}
    whole = manifest.model_copy(update={"num_samples": per_tar * num_tars, "tars": tars, "files": files})
    (index / MANIFEST_NAME).write_text(whole.model_dump_json(), encoding="utf-8")
    return index


def peak_bytes() -> int:
    """Return the peak memory of this process. `ru_maxrss` would begin with that of its parent."""
    (line,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"))
    return 1024 * int(line)


def first_batch(index: Path, *, share: float, shuffle_shards: int | None) -> dict[str, float]:
    """Open the dataset and make the batch of one rank at a share of the first epoch, in this process."""
    before = peak_bytes()
    started = time.perf_counter()
    num_samples = json.loads((index / MANIFEST_NAME).read_text(encoding="utf-8"))["num_samples"]
    step = int(share * (num_samples // BATCH_SIZE))
    stream = Stream(
        index,
        read=ReadConfig(num_workers=0, placement="stream", shuffle_shards=shuffle_shards, max_bad_share=0),
        global_batch_size=BATCH_SIZE,
        seed=0,
        rank=1,
        world_size=RANKS,
        start_step=step,
        end_step=step + 1,
    )
    (batch,) = stream
    seconds = time.perf_counter() - started
    assert len(batch) == BATCH_SIZE // RANKS
    assert not batch.bad
    megabytes = (peak_bytes() - before) / 1e6
    return {"seconds": seconds, "megabytes": megabytes}


def in_new_process(index: Path, *, share: float, shuffle_shards: int | None) -> dict[str, float]:
    """Return what `first_batch` returns in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(first_batch, (index,), {"share": share, "shuffle_shards": shuffle_shards})


def milliseconds_of_order(num_samples: int) -> float:
    """Return the time of the order of a global batch, the median of 50 steps."""
    order = BatchOrder(EpochOrders(num_samples, 0), BATCH_SIZE)
    seconds = []
    for step in range(50):
        started = time.perf_counter()
        order.rows(0, step * (num_samples // BATCH_SIZE // 60), bad={})
        seconds.append(time.perf_counter() - started)
    return 1e3 * float(np.median(seconds))


def lines_of(index: Path, *, num_samples: int) -> list[Line]:
    def line(title: str, unit: str, share: float, shuffle_shards: int | None, most: float) -> Line:
        def measured() -> float:
            found = in_new_process(index, share=share, shuffle_shards=shuffle_shards)
            return found["seconds" if unit == "s" else "megabytes"]

        return Line(title, unit, {"ours": measured}, lambda m: m["ours"], "seconds", most, at_most=True)

    lines = [
        line(f"{what} to the first batch, at {share:.0%} of an epoch, {how}", unit, share, windows, most)
        for how, windows in (("shuffled globally", None), (f"in windows of {WINDOW} tars", WINDOW))
        for share in SHARES
        for what, unit, most in (("seconds", "s", 5.0), ("megabytes more than after the imports", "MB", 300.0))
    ]
    title = f"milliseconds of the order of a batch of {BATCH_SIZE:,}"
    peer = {"ours": lambda: milliseconds_of_order(num_samples)}
    return [*lines, Line(title, "ms", peer, lambda m: m["ours"], "seconds", 2.0, at_most=True)]


def main() -> None:
    parser = record.benchmark_parser("from opening a dataset of a billion samples to its first batch", rounds=3)
    parser.add_argument("--directory", type=Path, metavar="DIR", help="with 8 bytes a sample free; default: in /tmp")
    parser.add_argument("--samples", type=int, default=10**9, metavar="N")
    parser.add_argument("--tars", type=int, default=10**5, metavar="S")
    args = parser.parse_args()
    if not 1 <= args.tars <= args.samples >= BATCH_SIZE:
        raise UserError(
            f"--samples {args.samples} in --tars {args.tars} is not possible; give {BATCH_SIZE} samples or more, and 1 "
            "to as many tars"
        )
    before = record.circumstances(packages=["torch", "numpy"])
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        index = make_dataset(Path(directory), num_samples=args.samples, num_tars=args.tars)
        results = record.measure_each(lines_of(index, num_samples=args.samples), num_rounds=args.rounds)
    settings = {"num_samples": args.samples, "num_tars": args.tars, "batch_size": BATCH_SIZE, "ranks": RANKS}
    record.save(args.out, {**before, **settings, "lines": results})


if __name__ == "__main__":
    run_command(main)
