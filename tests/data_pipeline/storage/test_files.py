from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from data_pipeline.core.errors import UserError
from data_pipeline.storage.files import map_regular, unpack_tar


def test_a_part_that_outlives_the_block_stays_readable_and_hides_no_error(tmp_path: Path) -> None:
    """The frames of an error hold such parts. With Python 3.12, an error that was caught holds them too."""
    path = tmp_path / "file"
    path.write_bytes(b"content")
    views = []

    def read() -> None:
        with map_regular(path) as data:
            views.extend([data, data[:3]])
            raise ValueError("no picture")

    with pytest.raises(ValueError, match="no picture"):
        read()
    whole, part = views
    assert bytes(part) == b"con"
    with pytest.raises(ValueError, match="released"):
        bytes(whole)


def test_a_file_that_is_mapped_is_closed_at_the_end_of_the_block(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"content")
    with map_regular(path) as data:
        assert bytes(data) == b"content"
        assert str(path) in Path("/proc/self/maps").read_text()
    assert str(path) not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize(("name", "kind"), [("../a", tarfile.REGTYPE), ("/a", tarfile.REGTYPE), ("a", tarfile.SYMTYPE)])
def test_a_tar_that_would_write_elsewhere_is_refused(name: str, kind: bytes, tmp_path: Path) -> None:
    member = tarfile.TarInfo(name)
    member.type = kind
    with tarfile.open(tmp_path / "tar", "w") as tar:
        tar.addfile(member)
    with tarfile.open(tmp_path / "tar") as tar, pytest.raises(UserError, match="is a link, or is written outside"):
        unpack_tar(tar, tmp_path / "out")
    assert not (tmp_path / "out").exists()
