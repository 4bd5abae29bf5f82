"""An S3-compatible server on the loopback address, for tests of remote data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import boto3
import pytest
import s3fs
from moto.server import ThreadedMotoServer


@contextmanager
def served_bucket(name: str) -> Iterator[str]:
    """Serve an empty bucket, and set the variables by which clients find it, such as AWS_ENDPOINT_URL.

    s3fs keeps its clients, with the address of the server at their time, so they are forgotten.
    """
    with pytest.MonkeyPatch.context() as patch:
        server = ThreadedMotoServer(port=0, verbose=False)
        server.start()
        host, port = server.get_host_and_port()
        for variable, value in (
            ("AWS_ENDPOINT_URL", f"http://{host}:{port}"),
            ("AWS_ACCESS_KEY_ID", "test"),
            ("AWS_SECRET_ACCESS_KEY", "test"),
            ("AWS_DEFAULT_REGION", "us-east-1"),
        ):
            patch.setenv(variable, value)
        s3fs.S3FileSystem.clear_instance_cache()
        boto3.client("s3").create_bucket(Bucket=name)
        try:
            yield name
        finally:
            s3fs.S3FileSystem.clear_instance_cache()
            server.stop()
