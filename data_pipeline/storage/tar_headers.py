"""Read the headers of a tar in memory: which files it holds, and where.

Several times as fast as `tarfile`, and bounded in time and memory for any bytes. Reads ustar, GNU and PAX headers of
all writers, with long names and with files above 8 GiB.

Shapes: N headers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

BLOCK: Final = 512  # members start at multiples of this, each after a header of the same size
# The kinds of headers.
_FILE_TYPES: Final = frozenset(b"0\x007")  # a regular file
_EMPTY_TYPES: Final = frozenset(b"123456")  # links, devices and folders: no content
_LINK_TYPES: Final = frozenset(b"12")  # hard and symbolic
_LONG_NAME: Final = ord("L")  # GNU tar: the content is the name of the next file
_RECORDS: Final = ord("x")  # PAX: the content is records of the next file, such as its name
_MAX_RECORDS_BYTES: Final = 1 << 20
_CHUNK: Final = 2_048  # headers whose checksums are computed at once
_MANY: Final = 1 << 20  # bytes that are compared with zero at once
_SPACE: Final = np.uint8(ord(" "))
_OCTAL_SHIFTS: Final = np.arange(15, -1, -3)  # of the six digits of a checksum


@dataclass(frozen=True, slots=True)
class TarMember:
    """One file in a tar: its name, and the position and size of its content."""

    name: str
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class TarContents:
    """The files of a tar in stored order, the position after the last member, and the names of links."""

    members: list[TarMember]
    end: int
    links: list[str]


def read_contents(data: memoryview) -> TarContents:
    """Read the headers of a tar. Return its files in stored order, and the position after the last of them.

    Ends before the first block that is not a header, or whose content is cut short. Links, devices and folders are left
    out, but the names of hard and symbolic links are returned.
    """
    headers: list[int] = []  # positions
    offsets: list[int] = []  # of the contents of files; negative for other headers
    sizes: list[int] = []
    links: list[int] = []  # numbers of headers
    long_names: dict[int, bytes] = {}  # by the number of the header that they belong to
    position, num_bytes = 0, len(data)
    long_name: bytes | None = None
    long_size: int | None = None
    while position + BLOCK <= num_bytes and data[position]:
        fields = data[position + 124 : position + 157].tobytes()
        kind = fields[32]
        try:
            size = int(fields[:11], 8)  # as almost all writers store it
        except ValueError:
            number = number_in(fields[:12])
            if number is None:
                break
            size = number
        if kind in _EMPTY_TYPES or size < 0:
            size = 0
        elif kind in _FILE_TYPES and long_size is not None:
            size = long_size
        offset = position + BLOCK
        if offset + size > num_bytes:
            break
        if kind in _FILE_TYPES:
            if long_name is not None:
                long_names[len(headers)] = long_name
            long_name = long_size = None
        elif kind == _LONG_NAME and size <= _MAX_RECORDS_BYTES:
            long_name = bytes(data[offset : offset + size]).partition(b"\0")[0]
        elif kind == _RECORDS and size <= _MAX_RECORDS_BYTES:
            content = bytes(data[offset : offset + size])
            if b" path=" in content or b" size=" in content:  # most writers only add a time
                records = _pax_records(content)
                long_name = records.get(b"path", long_name)
                long_size = int(records[b"size"]) if records.get(b"size", b"").isdigit() else long_size
        elif kind in _EMPTY_TYPES:
            if kind in _LINK_TYPES:
                links.append(len(headers))
                if long_name is not None:
                    long_names[len(headers)] = long_name
            long_name = long_size = None
        headers.append(position)
        offsets.append(offset if kind in _FILE_TYPES else -1)
        sizes.append(size)
        position = offset + padded(size)
    names = _names_in(np.frombuffer(data, dtype=np.uint8), np.array(headers, dtype=np.int64))
    for number, name in long_names.items():
        if number < len(names):
            names[number] = name
    found = [
        TarMember(name.decode(errors="replace"), offset, size)
        for name, offset, size in zip(names, offsets, sizes, strict=False)
        if offset >= 0
    ]
    last = len(names) - 1
    end = min(headers[last] + BLOCK + padded(sizes[last]), num_bytes) if names else 0
    return TarContents(found, end, [names[number].decode(errors="replace") for number in links if number < len(names)])


@dataclass(frozen=True, slots=True)
class TarEnd:
    """The end of a tar: where its last member ends, whether the zeros that end a tar follow, and the bytes not read.

    `num_unread` counts the bytes behind `position`; 0 if they are all zero.
    """

    position: int
    is_whole: bool
    num_unread: int

    @property
    def problem(self) -> str | None:
        """Return what is wrong with the end, with the position and the number of bytes lost; None if nothing is."""
        if not self.is_whole:
            return (
                f"is cut short or damaged at byte {self.position:,}; the {self.num_unread:,} bytes behind are not used"
            )
        if self.num_unread:
            return (
                f"goes on behind its end mark at byte {self.position:,}; the {self.num_unread:,} bytes behind are not "
                "used, so if they are another tar, store it as a file of its own"
            )
        return None


def tar_end(data: memoryview, *, end: int) -> TarEnd:
    """Return what follows the last member of a tar, which ends at `end`."""
    is_whole = data[end : end + BLOCK].tobytes() == bytes(BLOCK)
    rest = np.frombuffer(data, dtype=np.uint8)[end:]
    is_used = is_whole and not any(rest[start : start + _MANY].any() for start in range(0, len(rest), _MANY))
    return TarEnd(end, is_whole, 0 if is_used else len(rest))


def padded(size: int) -> int:
    """Return the number of bytes that a content of `size` bytes takes in a tar."""
    return -(-size // BLOCK) * BLOCK


def number_in(field: bytes) -> int | None:
    """Return the number in a field of a header: octal, or binary above 8 GiB. None if it is neither."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    digits = field.strip(b"\0 ")
    return int(digits, 8) if digits.isdigit() and not digits.strip(b"01234567") else None


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


def _names_in(data: NDArray[np.uint8], positions_N: NDArray[np.int64]) -> list[bytes]:
    """Return the names in headers, up to the first header whose checksum is wrong."""
    names: list[bytes] = []
    for start in range(0, len(positions_N), _CHUNK):
        headers_NB = data[positions_N[start : start + _CHUNK, None] + np.arange(BLOCK)]
        checksum_N8 = headers_NB[:, 148:156]
        # The checksum is taken with spaces in its own field.
        due_N = headers_NB.sum(axis=1, dtype=np.int64) - checksum_N8.sum(axis=1, dtype=np.int64) + 8 * ord(" ")
        chunk: list[bytes] = headers_NB[:, :100].copy().view("S100")[:, 0].tolist()  # NumPy ends them at the zeros
        is_long_N = (headers_NB[:, 345] > 0) & (headers_NB[:, 257:263] == np.frombuffer(b"ustar\0", np.uint8)).all(
            axis=1
        )
        for number in np.flatnonzero(is_long_N).tolist():
            chunk[number] = _name_in(headers_NB[number].tobytes())
        digits_N6 = (due_N[:, None] >> _OCTAL_SHIFTS & 7) + ord("0")  # as almost all writers store it
        is_other_N = (checksum_N8[:, :6] != digits_N6).any(axis=1) | (checksum_N8[:, 6:] & ~_SPACE).any(axis=1)
        for number in np.flatnonzero(is_other_N).tolist():
            if number_in(checksum_N8[number].tobytes()) != due_N[number]:
                return names + chunk[:number]
        names += chunk
    return names


def split_name(name: str) -> tuple[str, str]:
    """Split the name of a member into the key of its sample and its extension, as WebDataset does.

    Examples:
        >>> split_name("n01440764/n01440764_10026.seg.png"), split_name("./a/b.c/README")
        (('n01440764/n01440764_10026', 'seg.png'), ('./a/b.c/README', ''))
    """
    folder, slash, last = name.rpartition("/")
    stem, _, extension = last.partition(".")
    return f"{folder}{slash}{stem}", extension.lower()
