"""How fast data is read, opened and prepared, against peers: one figure a line, all of them from one run.

    python -m benchmarks.data_throughput [DIR ...] [--only GROUP ...] [--rounds R] [--seconds T] [--out JSON]

DIR is a built dataset of pictures; where none is given, drawn pictures with digits are built, once with the overlay
baked in and once online. Lines that say "one core" are measured in this process with one thread, by its processor time;
the others by the wall clock. The shuffles are not equal: WebDataset's is of the shards, then within a buffer; ours is
over the whole dataset, and can start at any step. `--out` files all that was measured, with the command, the commit and
the machine.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count, islice
from pathlib import Path

import numpy as np
import torch

from benchmarks import record, webdataset_peer
from benchmarks.record import Line, Peers, rate, ratio_line
from benchmarks.sounds import spectrogram_peers
from benchmarks.views import expert_peers
from benchmarks.webdataset_peer import epoch_after_epoch
from data_pipeline.building.build import build_dataset
from data_pipeline.core.errors import UserError, run_command
from data_pipeline.loading.order import EpochOrders
from data_pipeline.loading.stream import ReadConfig, Stream
from data_pipeline.remote.fetch import RemoteConfig
from data_pipeline.storage.manifest import Manifest, load_manifest
from data_pipeline.storage.store import SampleStore

BATCH_SIZE = 256
NUM_SOUNDS = 64  # in a batch
ORDER_CHUNK = 4_096  # positions whose samples are looked up at once, as in a large batch
PACKAGES = ("torch", "torchaudio", "torchvision", "webdataset", "librosa", "numpy", "pillow")
GROUPS = ("local", "remote", "opening", "views", "sounds")


def one_core(counts: Callable[[], Iterator[int]], *, seconds: float) -> Callable[[], float]:
    """A measurement of the samples a second of processor time of what yields their numbers."""
    return lambda: rate(counts(), seconds=seconds, clock=time.process_time)


def calls(call: Callable[[], object], num_samples: int) -> Iterator[int]:
    while True:
        call()
        yield num_samples


def encoded_counts(store: SampleStore) -> Iterator[int]:
    """Read the stored bytes of samples in shuffled order, epoch after epoch."""
    for epoch in count():
        order = EpochOrders(len(store), 0).of_epoch(epoch)
        for start in range(0, len(store), ORDER_CHUNK):
            indices = order(np.arange(start, min(start + ORDER_CHUNK, len(store))))
            for first in range(0, len(indices), 100):
                store.read(indices[first : first + 100])
                yield len(indices[first : first + 100])


def stream_counts(directory: Path, read: ReadConfig) -> Iterator[int]:
    """Read finished batches from an endless stream, without workers; the first is not counted."""
    stream = Stream(directory, read=read, global_batch_size=BATCH_SIZE, seed=0, rank=0, world_size=1, end_step=1 << 40)
    for batch in islice(stream, 1, None):
        yield len(batch)


def described(manifest: Manifest) -> str:
    made = manifest.how_made
    drawn = f", overlay {manifest.overlay.drawn}" if manifest.overlay is not None else ""
    return f"{manifest.num_samples:,} samples of {made.dataset} ({made.source}{drawn})"


def local_lines(directory: Path, *, seconds: float) -> Iterator[Line]:
    """Shards of a local dataset, shuffled, as stored bytes and as finished batches."""
    manifest = load_manifest(directory)
    urls = [str(directory / name) for name in SampleStore(directory).tar_names]

    def ours(placement: str) -> Callable[[], Iterator[int]]:
        read = ReadConfig.parse({"num_workers": 0, "placement": placement}, where="benchmark")
        return lambda: stream_counts(directory, read)

    def theirs(decoder: str) -> Callable[[], Iterator[int]]:
        return lambda: epoch_after_epoch(
            lambda: webdataset_peer.batch_counts(urls, manifest, decoder=decoder, batch_size=BATCH_SIZE)
        )

    def line(title: str, peers: Mapping[str, Callable[[], Iterator[int]]], target: float | None) -> Line:
        measured = {name: one_core(counts, seconds=seconds) for name, counts in peers.items()}
        title = f"{title}, one core: {described(manifest)}"
        return ratio_line(title, measured, against=next(iter(peers)), target=target)

    yield line(
        "stored bytes",
        {
            "webdataset": lambda: epoch_after_epoch(lambda: webdataset_peer.stored_counts(urls)),
            "ours": lambda: encoded_counts(SampleStore(directory)),
        },
        10,
    )
    yield line(
        f"batches of {BATCH_SIZE}",
        {
            "webdataset": theirs("PIL"),
            "webdataset with torchvision's decoder": theirs("torchvision"),
            "ours": ours("stream"),
        },
        3,
    )
    yield line(f"resident batches of {BATCH_SIZE}", {"webdataset": theirs("PIL"), "ours": ours("host")}, None)


@contextmanager
def http_server(directory: Path) -> Iterator[str]:
    """Serves a directory on the loopback address by Python's own server, in its own process; yields the address."""
    command = [sys.executable, "-u", "-m", "http.server", "--bind", "127.0.0.1", "--directory", str(directory), "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, encoding="utf-8") as server:
        try:
            assert server.stdout is not None
            port = int(server.stdout.readline().partition(" port ")[2].split()[0])
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()


def remote_lines(directory: Path, *, kind: str, location: str, url: str) -> Iterator[Line]:
    """One epoch from elsewhere, from opening to the last sample, where nothing of it was on this machine before.

    `location` is what we read, `url` the address of a file for WebDataset, both with {name} in the place of its name.
    """
    manifest = load_manifest(directory)
    urls = [url.format(name=name) for name in SampleStore(directory).tar_names]
    # Batches that divide an epoch without a rest, so that both sides deliver every sample.
    batch_size = next(size for size in range(BATCH_SIZE, 0, -1) if manifest.num_samples % size == 0)

    def our_bytes(remote: RemoteConfig) -> int:
        store = SampleStore(location, remote=remote)
        order = EpochOrders(len(store), 0).of_epoch(0)
        for start in range(0, len(store), 100):
            store.read(order(np.arange(start, min(start + 100, len(store)))))
        return len(store)

    def our_batches(remote: RemoteConfig) -> int:
        stream = Stream(
            location,
            read=ReadConfig(num_workers=0, placement="stream", remote=remote),
            global_batch_size=batch_size,
            seed=0,
            rank=0,
            world_size=1,
            end_step=manifest.num_samples // batch_size,
        )
        return sum(map(len, stream))

    def epoch_rate(read_epoch: Callable[[], int]) -> float:
        start = time.perf_counter()
        num_samples = read_epoch()
        seconds = time.perf_counter() - start
        assert num_samples == manifest.num_samples, (num_samples, manifest.num_samples)
        return num_samples / seconds

    def cold(read_epoch: Callable[[RemoteConfig], int]) -> float:
        spool = tempfile.mkdtemp(prefix="data_throughput-")
        try:
            return epoch_rate(partial(read_epoch, RemoteConfig(cache_dir=spool)))
        finally:
            shutil.rmtree(spool)

    def line(title: str, theirs: Callable[[], int], ours: Callable[[RemoteConfig], int]) -> Line:
        peers: Peers = {"webdataset": lambda: epoch_rate(theirs), "ours": lambda: cold(ours)}
        title = f"{title} by {kind}, one epoch, nothing cached: {described(manifest)}"
        return ratio_line(title, peers, against="webdataset", target=0.9)

    yield line("stored bytes", lambda: sum(1 for _ in webdataset_peer.stored_samples(urls)), our_bytes)
    peer = partial(webdataset_peer.batch_counts, urls, manifest, decoder="PIL", batch_size=batch_size)
    yield line(f"batches of {batch_size}", lambda: sum(peer()), our_batches)


def opening_lines(directory: Path) -> Iterator[Line]:
    """Seconds to the first batch, at the start and at 90 % of an epoch."""
    manifest = load_manifest(directory)
    urls = [str(directory / name) for name in SampleStore(directory).tar_names]
    num_steps = manifest.num_samples // BATCH_SIZE
    step = 9 * num_steps // 10
    seeds = iter(range(1 << 30))  # a new order each time, so that none is remembered

    def ours(start_step: int) -> float:
        start = time.perf_counter()
        stream = Stream(
            directory,
            read=ReadConfig(num_workers=2, placement="stream"),
            global_batch_size=BATCH_SIZE,
            seed=next(seeds),
            rank=0,
            world_size=1,
            start_step=start_step,
            end_step=num_steps,
        )
        batches = iter(stream)
        next(batches)
        return time.perf_counter() - start

    def webdataset() -> float:
        start = time.perf_counter()
        next(islice(webdataset_peer.stored_samples(urls), step * BATCH_SIZE, None))
        return time.perf_counter() - start

    name = f"{len(urls):,} shards, {manifest.num_samples:,} samples, 2 workers"
    at_start, at_90 = "ours, at the start", "ours, at 90 %"
    yield Line(
        f"opening to the first batch: {name}",
        "s",
        {"ours": lambda: ours(0)},
        lambda measured: measured["ours"],
        "seconds",
        target=2,
        at_most=True,
    )
    yield Line(
        f"resuming at 90 % of an epoch, above opening: {name}",
        "s",
        {at_start: lambda: ours(0), at_90: lambda: ours(step), "webdataset, skipping stored bytes": webdataset},
        lambda measured: measured[at_90] - measured[at_start],
        "seconds",
        target=2,
        at_most=True,
    )


def one_core_line(
    title: str, peers: Mapping[str, Callable[[], object]], *, num_samples: int, target: float, seconds: float
) -> Line:
    """A line of calls that each make `num_samples`, against the first peer."""
    measured = {name: one_core(partial(calls, call, num_samples), seconds=seconds) for name, call in peers.items()}
    return ratio_line(f"{title}, one core", measured, against=next(iter(peers)), target=target)


def lines(group: str, directories: Sequence[Path], work: Path, *, seconds: float) -> Iterator[Line]:
    """All lines of one of `GROUPS`; what they need is made when they are asked for, in the folder `work`."""
    match group:
        case "local":
            for directory in directories:
                yield from local_lines(directory, seconds=seconds)
        case "remote":
            first = directories[0].resolve()
            with http_server(first) as address:
                yield from remote_lines(first, kind="http", location=address, url=f"{address}/{{name}}")
        case "opening":
            build_dataset("procedural", work / "many", limit=10_000, num_samples_per_shard=10)
            yield from opening_lines(work / "many")
        case "views":
            pictures_BCHW = torch.rand(BATCH_SIZE, 3, 32, 32, generator=torch.Generator().manual_seed(0))
            title = "two expert views of 32x32 pictures"
            peers = {name: call for name, call in expert_peers(pictures_BCHW).items() if "one draw" not in name}
            yield one_core_line(title, peers, num_samples=BATCH_SIZE, target=8, seconds=seconds)
        case "sounds":
            title = f"mixing and log-mel of {NUM_SOUNDS} sounds at 48 kHz"
            peers = dict(spectrogram_peers(NUM_SOUNDS))
            yield one_core_line(title, peers, num_samples=NUM_SOUNDS, target=10, seconds=seconds)


def main() -> None:
    parser = record.benchmark_parser("reading and preparing data, against WebDataset, torchvision, librosa", rounds=5)
    parser.add_argument("directories", nargs="*", type=Path, metavar="DIR", help="built datasets of pictures")
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=GROUPS, metavar="GROUP", help=", ".join(GROUPS))
    parser.add_argument("--seconds", type=float, default=2.0, metavar="T", help="length of one measurement of a rate")
    args = parser.parse_args()
    for directory in args.directories:
        if load_manifest(directory).medium != "picture":
            raise UserError(f"{directory} holds sounds; give a dataset of pictures")
    before = record.on_one_core(packages=PACKAGES)
    results = []
    with tempfile.TemporaryDirectory(prefix="data_throughput-") as name:
        work = Path(name)
        directories = args.directories
        if not directories and {"local", "remote"} & set(args.only):
            directories = [work / "baked", work / "online"]
            build_dataset("procedural_digits", directories[0], overlay="baked")
            build_dataset("procedural_digits", directories[1], overlay="online")
        for group in args.only:
            results += record.measure_each(
                lines(group, directories, work, seconds=args.seconds), num_rounds=args.rounds
            )
    settings = {"rounds": args.rounds, "seconds_a_measurement": args.seconds}
    record.save(args.out, {**before, **settings, "lines": results})


if __name__ == "__main__":
    run_command(main)
