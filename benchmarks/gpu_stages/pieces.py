"""Carry a run directory from one machine to the next, in files that are small enough for any channel.

Guarantees: a directory that was put together from pieces has the bytes that were packed, or is not there at all.
"""

from __future__ import annotations

import hashlib
import shutil
import tarfile
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from data_pipeline.core.errors import UserError
from data_pipeline.core.schema import Schema
from trainer.run_dir import read_object, write_atomically, write_json

PIECE_BYTES: Final = 15_000_000


class Piece(Schema):
    """One file of a packed directory, by its name, its bytes and the hash of its content."""

    name: str
    num_bytes: int
    sha256: str


class Packed(Schema):
    """The file `NAME.json` of a packed run: its newest step, and the pieces in their order."""

    step: int
    pieces: tuple[Piece, ...]


def pack(directory: Path, files: Iterable[Path], out: Path, *, name: str, step: int) -> None:
    """Pack files of a directory into pieces `out/NAME_STEP.tar.000`, ..., and write `out/NAME.json`, which lists them.

    The pieces of another step go once the new list is written.
    """
    out.mkdir(parents=True, exist_ok=True)
    pieces: list[Piece] = []
    with tempfile.TemporaryFile(dir=out) as file:
        with tarfile.open(fileobj=file, mode="w") as tar:
            for path in sorted(files):
                tar.add(path, arcname=str(path.relative_to(directory)), recursive=False)
        file.seek(0)
        while content := file.read(PIECE_BYTES):
            piece_name = f"{name}_{step:08}.tar.{len(pieces):03}"
            write_atomically(out / piece_name, content)
            digest = hashlib.sha256(content).hexdigest()
            pieces.append(Piece(name=piece_name, num_bytes=len(content), sha256=digest))
    packed = Packed(step=step, pieces=tuple(pieces))
    write_json(out / f"{name}.json", packed.model_dump(mode="json"))
    for old in set(out.glob(f"{name}_*.tar.*")) - {out / piece.name for piece in pieces}:
        old.unlink()


def unpack(name: str, source: Path, directory: Path) -> bool:
    """Put a packed directory together again at `directory`, which is not there yet. Return whether there is one.

    Raises `UserError` if a piece is missing or has other bytes than were packed.
    """
    listing = source / f"{name}.json"
    if not listing.is_file():
        return False
    packed = Packed.parse(read_object(listing, mend=_mend(name, source)), where=str(listing))
    partial = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        with tempfile.TemporaryFile(dir=partial.parent) as file:
            for piece in packed.pieces:
                file.write(_content(piece, source, mend=_mend(name, source)))
            file.seek(0)
            with tarfile.open(fileobj=file) as tar:
                tar.extractall(partial)
        partial.replace(directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return True


def _mend(name: str, source: Path) -> str:
    return f"bring {name}.json and all its pieces to {source} again, or remove {name}.json to begin the run anew"


def _content(piece: Piece, source: Path, *, mend: str) -> bytes:
    path = source / piece.name
    if not path.is_file():
        raise UserError(f"{path} is missing, a piece of a run that goes on; {mend}")
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != piece.sha256:
        raise UserError(f"{path} is damaged: its sha256 is not the one that was written with it; {mend}")
    return content
