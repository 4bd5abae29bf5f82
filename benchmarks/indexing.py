"""Time of indexing the tars of others, beside plain WebDataset and Python's tarfile on the same tars.

    python -m benchmarks.indexing [--samples N] [--tars S] [--directory DIR] [--rounds R] [--out JSON]

WebDataset's own writer writes tars of small JPEGs with a class each. One process indexes them. The peers walk through
the same tars without keeping anything. All files are in the memory of the system, so what counts is the work for each
sample, which decides for small pictures. For large ones, the disk does.
"""

from __future__ import annotations

import io
import shutil
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import webdataset
from PIL import Image

from benchmarks import record
from benchmarks.record import Line, ratio_line
from data_pipeline.building.index_tars import make_index
from data_pipeline.core.errors import run_command
from data_pipeline.storage.manifest import Fields

LEAST_RATE = 50_000  # samples a second on one core
SIZE = 32


def write_tars(directory: Path, *, num_samples: int, num_tars: int) -> str:
    """Write tars of equally many samples into a directory, and return their location as a brace pattern."""
    for number in range(num_tars):
        with webdataset.TarWriter(str(directory / f"{number:06d}.tar")) as writer:
            for sample in range(num_samples // num_tars):
                file = io.BytesIO()
                Image.new("RGB", (SIZE, SIZE), (sample % 256, sample // 256 % 256, number % 256)).save(file, "JPEG")
                writer.write({"__key__": f"{number:06d}_{sample:06d}", "jpg": file.getvalue(), "cls": sample % 10})
    return f"{directory}/{{000000..{num_tars - 1:06d}}}.tar"


def index(location: str, out: Path) -> int:
    """Index the tars into a new directory in this process. Return the number of samples."""
    shutil.rmtree(out, ignore_errors=True)
    return make_index(location, out, fields=Fields(), size=SIZE)[0].num_samples


def walk_with_webdataset(location: str) -> int:
    """Read each sample of the tars, as plain WebDataset does. Return the number of samples."""
    return sum(1 for _ in webdataset.WebDataset(location, shardshuffle=False, empty_check=False))


def walk_with_tarfile(location: str) -> int:
    """Read the header of each member of the tars with Python's tarfile. Return the number of samples."""
    num_members = 0
    for path in webdataset.shardlists.expand_urls(location):
        with tarfile.open(path) as tar:
            num_members += sum(1 for _ in tar)
    return num_members // 2


def lines_of(location: str, out: Path, *, num_samples: int) -> list[Line]:
    def rate(count: Callable[[], int]) -> Callable[[], float]:
        def measured() -> float:
            started = time.process_time()
            assert count() == num_samples
            return num_samples / (time.process_time() - started)

        return measured

    ours = rate(lambda: index(location, out))
    peers = {
        "plain WebDataset": rate(lambda: walk_with_webdataset(location)),
        "tarfile": rate(lambda: walk_with_tarfile(location)),
    }
    return [
        Line("samples indexed in a second", "samples/s", {"ours": ours}, lambda m: m["ours"], "ratio", LEAST_RATE),
        *(
            ratio_line(f"the same beside {name}", {"ours": ours, name: peer}, against=name)
            for name, peer in peers.items()
        ),
    ]


def main() -> None:
    parser = record.benchmark_parser("time of indexing the tars of others", rounds=5)
    parser.add_argument("--samples", type=int, default=100_000, metavar="N")
    parser.add_argument("--tars", type=int, default=10, metavar="S")
    parser.add_argument("--directory", type=Path, metavar="DIR", help="with 4 kB a sample free; default: in /tmp")
    args = parser.parse_args()
    before = record.circumstances(packages=["webdataset", "numpy"])
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        tars = Path(directory) / "tars"
        tars.mkdir()
        location = write_tars(tars, num_samples=args.samples, num_tars=args.tars)
        lines = lines_of(location, Path(directory) / "index", num_samples=args.samples)
        results = record.measure_each(lines, num_rounds=args.rounds)
    record.save(args.out, {**before, "num_samples": args.samples, "num_tars": args.tars, "lines": results})


if __name__ == "__main__":
    run_command(main)
