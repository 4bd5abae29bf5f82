"""Copy the code for a job, so that later edits do not change a job that waits in the queue.

The copy has the four packages of the working tree, and the user's own code that the runs use. It lies in a directory
that is named after their content.
"""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType

from trainer.own_code import hash_of_files
from trainer.provenance import REPOSITORY, SNAPSHOT_FILE, this_code
from trainer.run_dir import write_json

PACKAGES = ("data_pipeline", "trainer", "configs", "launch")


@dataclass(frozen=True)
class Snapshot:
    """The bytes of every file of the code, by its path below the repository."""

    files: Mapping[str, bytes]

    @property
    def sha256(self) -> str:
        return hash_of_files(self.files)

    def folder(self, into: Path) -> Path:
        """Return the directory of the copy below `into`."""
        return into / "code" / self.sha256[:16]


def read_snapshot(root: Path = REPOSITORY, *, own_files: Mapping[str, Path] = MappingProxyType({})) -> Snapshot:
    """Read the code below `root`, and `own_files` by their paths in the copy."""
    paths = {
        str(path.relative_to(root)): path
        for package in PACKAGES
        for path in sorted((root / package).rglob("*"))
        if "__pycache__" not in path.parts and path.is_file()
    }
    return Snapshot({name: path.read_bytes() for name, path in {**paths, **own_files}.items()})


def write_snapshot(snapshot: Snapshot, *, into: Path) -> Path:
    """Write the copy below `into`, as a whole or not at all, and return its directory. Keeps a copy that is there."""
    folder = snapshot.folder(into)
    if folder.is_dir():
        return folder
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    try:
        for name, content in snapshot.files.items():
            path = partial / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        write_json(partial / SNAPSHOT_FILE, asdict(replace(this_code(), snapshot_sha256=snapshot.sha256)))
        partial.rename(folder)
    except OSError:
        if not folder.is_dir():  # another process has written it meanwhile
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def python_environment(folder: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that put the copy first on Python's path, before the working directory of `python -m`."""
    earlier = environ.get("PYTHONPATH")
    return {"PYTHONPATH": f"{folder}:{earlier}" if earlier else str(folder), "PYTHONSAFEPATH": "1"}


def shell_lines(folder: Path) -> list[str]:
    """Return the same variables as lines of a batch script. Its PYTHONPATH is known only when it runs."""
    return [f"export PYTHONPATH={shlex.quote(str(folder))}${{PYTHONPATH:+:$PYTHONPATH}}", "export PYTHONSAFEPATH=1"]
