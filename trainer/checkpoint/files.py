"""Write and read the files of a checkpoint: tensors, and an index that shows whether they are whole.

Input: states, which are tensors by name. Output: a directory of safetensors files and `checkpoint.json`, which is
written last and holds the size and SHA-256 of each file, and the SHA-256 of its own text. Invariants: reading a file
never runs code from it; a file that was cut or changed is never loaded. Open only checkpoints that you trust.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path

import safetensors.torch
from pydantic import NonNegativeInt, PositiveInt
from torch import Tensor

from data_pipeline.core.errors import UserError
from data_pipeline.core.schema import Schema
from trainer.checkpoint.run_state import RunState
from trainer.run_dir import step_name, write_atomically

FORMAT_VERSION = 4
INDEX_NAME = "checkpoint.json"
SUFFIX = ".safetensors"
OBJECTIVE = "objective"  # a file name, besides the names of the trained modules


class FileRecord(Schema):
    """The expected size and hash of a file."""

    num_bytes: NonNegativeInt
    sha256: str


class CheckpointIndex(Schema):
    """The content of `checkpoint.json`; `files` holds the files of the same directory by name."""

    format_version: PositiveInt
    step: NonNegativeInt
    files: dict[str, FileRecord]
    run: RunState | None = None
    run_id: str | None = None


class DamagedError(Exception):
    """A checkpoint is not whole. The message is a part of a sentence, with the file and the reason."""


def write_files(
    directory: Path,
    *,
    step: int,
    states: Mapping[str, Mapping[str, Tensor]],
    run: RunState | None = None,
    run_id: str | None = None,
) -> int:
    """Write each state as `NAME.safetensors`, then the index, and flush them to the disk; return the number of bytes.

    Tensors must be contiguous and on the CPU.
    """
    files = {f"{name}{SUFFIX}": write_tensors(directory / f"{name}{SUFFIX}", state) for name, state in states.items()}
    index = CheckpointIndex(format_version=FORMAT_VERSION, step=step, files=files, run=run, run_id=run_id)
    text = _sealed(index.model_dump_json(indent=2).encode().removeprefix(b"{\n"))
    write_atomically(directory / INDEX_NAME, text)
    flush(directory)
    return sum(record.num_bytes for record in files.values()) + len(text)


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> FileRecord:
    """Write contiguous CPU tensors as a safetensors file, and flush it to the disk. Raises `OSError` if it cannot.

    Other threads run meanwhile, because the library lets go of Python's lock.
    """
    try:
        safetensors.torch.save_file(dict(tensors), path)
    except safetensors.SafetensorError as error:
        raise OSError(str(error)) from error
    with contextlib.suppress(PermissionError):  # of a file system without modes
        path.chmod(path.parent.stat().st_mode & 0o666)  # the library makes a file for its owner alone
    with path.open("rb") as file:
        os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256")
    return FileRecord(num_bytes=path.stat().st_size, sha256=digest.hexdigest())


def _sealed(fields: bytes) -> bytes:
    """Return the text of a JSON object that holds `fields`, which are all lines but the first, and their SHA-256."""
    return b'{ "sha256": "%s",\n' % hashlib.sha256(fields).hexdigest().encode() + fields


def read_index(directory: Path) -> CheckpointIndex:
    """Return the index of the checkpoint in a directory such as step_00000500.

    Raises `DamagedError` if it is missing, was changed, or belongs to another step, and `UserError` if another version
    of this project wrote it.
    """
    try:
        text = (directory / INDEX_NAME).read_bytes()
    except FileNotFoundError:
        raise DamagedError(f"{INDEX_NAME} is missing" if directory.is_dir() else "it is missing") from None
    except OSError as error:
        raise DamagedError(f"{INDEX_NAME} cannot be read: {error.strerror}") from None
    if text != _sealed(text.partition(b"\n")[2]):
        raise DamagedError(f"{INDEX_NAME} has changed since it was written, or is of format 3 or older")
    fields = json.loads(text)
    del fields["sha256"]
    if fields["format_version"] != FORMAT_VERSION:
        raise UserError(
            f"{directory} was written by another version of this project (checkpoint format "
            f"{fields['format_version']}; this one reads {FORMAT_VERSION}); use that version, or pass another --run-dir"
        )
    index = CheckpointIndex.model_validate(fields)
    if directory.name != step_name(index.step):
        raise DamagedError(f"{INDEX_NAME} is that of step {index.step}")
    return index


def check_sizes(directory: Path) -> CheckpointIndex:
    """Return the index if every file is there with its size. Raises `DamagedError` if not, and like `read_index`."""
    index = read_index(directory)
    for name, record in index.files.items():
        try:
            num_bytes = (directory / name).stat().st_size
        except OSError:
            raise DamagedError(f"{name} is missing") from None
        if num_bytes != record.num_bytes:
            raise DamagedError(f"{name} has {num_bytes:,} bytes, but {record.num_bytes:,} were written")
    return index


def read_states(
    directory: Path, index: CheckpointIndex, *, only: Collection[str] | None = None
) -> dict[str, dict[str, Tensor]]:
    """Return the states of the checkpoint with this index by name, or `only` these. Runs no code from a file.

    Each file is read once. Raises `DamagedError` if one is missing, cannot be read, or has changed.
    """
    states: dict[str, dict[str, Tensor]] = {}
    for file in index.files if only is None else [f"{name}{SUFFIX}" for name in only]:
        try:
            content = (directory / file).read_bytes()
            if hashlib.sha256(content).hexdigest() != index.files[file].sha256:
                raise DamagedError(f"{file} has changed since it was written")
            states[file.removesuffix(SUFFIX)] = safetensors.torch.load(content)
        except (FileNotFoundError, KeyError):
            raise DamagedError(f"{file} is missing") from None
        except (OSError, safetensors.SafetensorError) as error:
            raise DamagedError(f"{file} cannot be read: {str(error).splitlines()[0]}") from None
    return states


def flush(path: Path) -> None:
    """Flush a file or directory to the disk. Raises `OSError`, but not if the file system flushes no directories."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # of 9p (WSL 2) and of shared folders of virtual machines
            raise
    finally:
        os.close(descriptor)
