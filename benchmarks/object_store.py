"""How fast shards are read from an S3-compatible server on the loopback address, against plain WebDataset.

    python -m benchmarks.object_store [DIR] [--rounds R] [--out JSON]

DIR is a built dataset of pictures; without it, drawn pictures with digits are built. Each measurement reads one epoch,
of which nothing was on this machine before. We read s3:// through s3fs, into a cache, shuffled over the whole dataset.
WebDataset reads the same objects in two ways: by their http address, for which it starts curl and which needs objects
that anybody may read; and through s3fs, as a handler for s3:// that its users register. Ours has to reach 0.9 of the
first.

The server answers HEAD and GET with ranges, and sends files from the kernel, so it costs little beside the readers.
moto's server, which the tests use, holds objects in memory and costs more than they do. Debian 12's rclone is too old
to serve S3, and its packages and PyPI have no other server.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fsspec
from webdataset.gopen import gopen_schemes

from benchmarks import record
from benchmarks.data_throughput import remote_lines
from benchmarks.record import Line
from data_pipeline.building.build import build_dataset
from data_pipeline.core.errors import run_command
from data_pipeline.storage.locations import MANIFEST_NAME

PACKAGES = ("torch", "webdataset", "s3fs", "fsspec", "aiobotocore", "numpy", "pillow")
BUCKET = "benchmark"


def serve(directory: Path) -> None:
    """Serve the files of a directory as the objects of a bucket, and print the port. Does not return."""

    class Objects(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # as servers of objects do: else a small answer waits 40 ms for an ACK

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def _answer(self, *, with_body: bool) -> None:
            path = directory / self.path.partition("?")[0].removeprefix(f"/{BUCKET}/")
            if not path.is_file():
                self.send_response(404)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            size = path.stat().st_size
            asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            first = int(asked[1]) if asked else 0
            end = min(int(asked[2]) + 1, size) if asked and asked[2] else size
            self.send_response(206 if asked else 200)
            self.send_header("Content-Length", str(end - first))
            self.send_header("Content-Type", "application/x-tar")
            self.send_header("ETag", f'"{size:032x}"')
            self.send_header("Last-Modified", formatdate(path.stat().st_mtime, usegmt=True))
            if asked:
                self.send_header("Content-Range", f"bytes {first}-{end - 1}/{size}")
            self.end_headers()
            if with_body:
                self.wfile.flush()
                with path.open("rb") as file:
                    self.connection.sendfile(file, first, end - first)

        def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
            """Write nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Objects)
    print(server.server_port, flush=True)
    server.serve_forever()


@contextmanager
def object_store(directory: Path) -> Iterator[str]:
    """Serve a directory in a process of its own; yield the address. Clients find it in AWS_ENDPOINT_URL."""
    command = [sys.executable, "-m", "benchmarks.object_store", "--serve", str(directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, encoding="utf-8") as server:
        try:
            assert server.stdout is not None
            address = f"http://127.0.0.1:{int(server.stdout.readline())}"
            os.environ |= {
                "AWS_ENDPOINT_URL": address,
                "AWS_ACCESS_KEY_ID": "benchmark",
                "AWS_SECRET_ACCESS_KEY": "benchmark",
                "AWS_DEFAULT_REGION": "us-east-1",
            }
            # The first use of s3fs in a process takes a second, which is not the time of an epoch.
            fsspec.filesystem("s3").info(f"{BUCKET}/{MANIFEST_NAME}")
            yield address
        finally:
            server.terminate()


def read_s3_through_fsspec() -> None:
    """Register a handler for s3:// with WebDataset, which has none of its own."""
    gopen_schemes["s3"] = lambda url, mode="rb", bufsize=8192: fsspec.open(url, mode).open()


def lines(directory: Path, address: str) -> Iterator[Line]:
    """Lines of stored bytes and of batches, each with both ways of WebDataset."""
    location = f"s3://{BUCKET}"
    by_http = remote_lines(directory, kind="S3", location=location, url=f"{address}/{BUCKET}/{{name}}")
    by_s3fs = remote_lines(directory, kind="S3", location=location, url=f"{location}/{{name}}")
    for line, other in zip(by_http, by_s3fs, strict=True):
        yield replace(line, peers={**line.peers, "webdataset through s3fs": other.peers["webdataset"]})


def main() -> None:
    parser = record.benchmark_parser("reading from an S3-compatible server, against plain WebDataset", rounds=5)
    parser.add_argument("directory", nargs="?", type=Path, metavar="DIR", help="a built dataset of pictures")
    parser.add_argument("--serve", type=Path, metavar="DIR", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        serve(args.serve)
    read_s3_through_fsspec()
    before = record.on_one_core(packages=PACKAGES)
    work = Path(tempfile.mkdtemp(prefix="object_store-"))
    try:
        directory = args.directory
        if directory is None:
            directory = work / "online"
            build_dataset("procedural_digits", directory, overlay="online")
        with object_store(directory.resolve()) as address:
            results = record.measure_each(lines(directory, address), num_rounds=args.rounds)
    finally:
        shutil.rmtree(work)
    record.save(args.out, {**before, "rounds": args.rounds, "lines": results})


if __name__ == "__main__":
    run_command(main)
