"""Read the headers of a tar in memory: which files it holds, and where.

Twice as fast as `tarfile`, and bounded in time and memory for any bytes. Reads ustar, GNU and PAX headers of all
writers, with long names and with files above 8 GiB.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

BLOCK: Final = 512  # members start at multiples of this, each after a header of the same size
# The kinds of headers.
_FILE_TYPES: Final = frozenset(b"0\x007")  # a regular file
_EMPTY_TYPES: Final = frozenset(b"123456")  # links, devices and folders: no content
_LINK_TYPES: Final = frozenset(b"12")  # hard and symbolic
_LONG_NAME: Final = ord("L")  # GNU tar: the content is the name of the next file
_RECORDS: Final = ord("x")  # PAX: the content is records of the next file, such as its name
_MAX_RECORDS_BYTES: Final = 1 << 20
_MANY: Final = 1 << 20  # bytes that are compared with zero at once


class TarMember(NamedTuple):
    """One file in a tar: its name, and the position and size of its content."""

    name: str
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class TarContents:
    """The files of a tar in stored order, and its end.

    Attributes:
        num_links: hard and symbolic links, which are not among the members.
        end: the position after the last member.
        is_whole: whether the zeros that end a tar follow.
        num_unread: the number of bytes behind `end`; 0 if they are all zero.
    """

    members: list[TarMember]
    num_links: int
    end: int
    is_whole: bool
    num_unread: int

    @property
    def problem(self) -> str | None:
        """Return what is wrong with the end, with the position and the number of bytes lost; None if nothing is."""
        if not self.is_whole:
            return f"is cut short or damaged at byte {self.end:,}; the {self.num_unread:,} bytes behind are not used"
        if self.num_unread:
            return (
                f"goes on behind its end mark at byte {self.end:,}; the {self.num_unread:,} bytes behind are not "
                "used, so if they are another tar, store it as a file of its own"
            )
        return None


def read_contents(data: memoryview) -> TarContents:
    """Read the headers of a tar.

    Ends before the first block that is not a header, or whose content is cut short. Links, devices and folders are left
    out.
    """
    members: list[TarMember] = []
    num_links, end = 0, 0
    long_name: bytes | None = None
    long_size: int | None = None
    while end + BLOCK <= len(data):
        header = data[end : end + BLOCK].tobytes()
        size, kind, offset = number_in(header[124:136]), header[156], end + BLOCK
        if size is None or not _is_header(header):
            break
        if kind in _EMPTY_TYPES or size < 0:
            size = 0
        elif kind in _FILE_TYPES and long_size is not None:
            size = long_size
        if offset + size > len(data):
            break
        if kind in _FILE_TYPES or kind in _EMPTY_TYPES:
            if kind in _FILE_TYPES:
                name = _name_in(header) if long_name is None else long_name
                members.append(TarMember(name.decode(errors="replace"), offset, size))
            num_links += kind in _LINK_TYPES
            long_name = long_size = None
        elif kind == _LONG_NAME and size <= _MAX_RECORDS_BYTES:
            long_name = bytes(data[offset : offset + size]).partition(b"\0")[0]
        elif kind == _RECORDS and size <= _MAX_RECORDS_BYTES:
            records = _pax_records(bytes(data[offset : offset + size]))
            long_name = records.get(b"path", long_name)
            long_size = int(records[b"size"]) if re.fullmatch(rb"\d{1,18}", records.get(b"size", b"")) else long_size
        end = min(offset + padded(size), len(data))
    is_whole = data[end : end + BLOCK].tobytes() == bytes(BLOCK)
    rest = np.frombuffer(data, dtype=np.uint8)[end:]
    is_used = is_whole and not any(rest[start : start + _MANY].any() for start in range(0, len(rest), _MANY))
    return TarContents(members, num_links, end, is_whole, 0 if is_used else len(rest))


def _is_header(header: bytes) -> bool:
    """Return whether a block has a name, and the checksum of a header, which is taken with spaces in its own place."""
    due = sum(header) - sum(header[148:156]) + 8 * ord(" ")
    return header[0] != 0 and number_in(header[148:156]) == due


def padded(size: int) -> int:
    """Return the number of bytes that a content of `size` bytes takes in a tar."""
    return -(-size // BLOCK) * BLOCK


def number_in(field: bytes) -> int | None:
    """Return the number in a field of a header: octal, or binary above 8 GiB. None if it is neither."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    digits = field.strip(b"\0 ")
    try:
        return int(digits, 8) if digits.isdigit() else None
    except ValueError:
        return None


def is_file_at(data: memoryview, *, offset: int, size: int, start: bytes = b"") -> bool:
    """Return whether the block before `offset` is the header of a file of `size` bytes, whose name begins with `start`.

    Takes a microsecond, on a page that is about to be read. The number in a header is not compared if it is 0, because
    PAX may put it elsewhere for a file above 8 GiB.
    """
    if not BLOCK <= offset <= len(data) - size:
        return False
    header = offset - BLOCK
    if data[header : header + len(start)] != start:
        return False
    is_padded = data[header + 124 : header + 135] == b"%011o" % size  # as almost all writers store a size
    return is_padded or number_in(bytes(data[header + 124 : header + 136])) in (size, 0)


def name_at(data: memoryview, *, offset: int) -> str:
    """Return the name in the header of the file that begins at `offset`: of a long name, what the header holds."""
    return _name_in(bytes(data[offset - BLOCK : offset])).decode(errors="replace")


def _name_in(header: bytes) -> bytes:
    name = header[:100].partition(b"\0")[0]
    if header[345] and header[257:263] == b"ustar\0":  # continues names of more than 100 bytes
        name = header[345:500].partition(b"\0")[0] + b"/" + name
    return name


def _pax_records(content: bytes) -> dict[bytes, bytes]:
    """Return the records of a PAX header, each `LENGTH KEY=VALUE\\n`. Ends at the first that is damaged."""
    records = {}
    while (match := re.match(rb"(\d{1,9}) ([^=\n]{1,99})=", content)) is not None:
        length = int(match[1])
        if not match.end() < length <= len(content):
            break
        records[match[2]] = content[match.end() : length - 1]
        content = content[length:]
    return records


def split_name(name: str) -> tuple[str, str]:
    """Split the name of a member into the key of its sample and its extension, as WebDataset does.

    Examples:
        >>> split_name("n01440764/n01440764_10026.seg.png"), split_name("./a/b.c/README")
        (('n01440764/n01440764_10026', 'seg.png'), ('./a/b.c/README', ''))
    """
    folder, slash, last = name.rpartition("/")
    stem, _, extension = last.partition(".")
    return f"{folder}{slash}{stem}", extension.lower()
