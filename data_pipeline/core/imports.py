"""Import code by its import path `package.module:Name`, or from a file. Runs the code of the module.

Only a path that the user has typed, or that the user's own code holds, may come here: see docs/trust.md.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

from data_pipeline.core.errors import UserError, nearest


def import_object(path: str) -> Any:
    """Return what an import path names: `package.module:Name`. Runs the code of the module.

    Raises `UserError` if there is no such module, or if it has no such name.
    """
    module_name, _, name = path.partition(":")
    module = import_module(module_name, wanted=path)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            public = [each for each in dir(found) if not each.startswith("_")]
            raise UserError(f'the module {module_name} of {path} has no "{part}"{nearest(part, public)}')
        found = getattr(found, part)
    return found


def import_module(name: str, *, wanted: str) -> Any:
    """Import a module for the import path `wanted`. Raises `UserError` if there is none."""
    if not all(part.isidentifier() for part in name.split(".")):
        raise UserError(f"{wanted} is not an import path; write it as package.module:Name")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module is there, and what it needs is not: the traceback shows the line
        raise UserError(
            f'{wanted} needs the module "{error.name}", which is not found; install its package, or put its directory '
            "on PYTHONPATH"
        ) from None


def import_file(path: Path) -> str:
    """Import a Python file as a module with the name of the file, and return that name.

    The directory of the file is put on the path, so that the file can import its neighbours. Raises `UserError` if
    there is no such file, or if its name is that of another module.
    """
    if not path.is_file():
        raise UserError(f"{path} is not a file; name a Python file and a function in it, such as ./mine.py:big")
    name, path = path.stem, path.resolve()
    if not name.isidentifier():
        raise UserError(f"{path} cannot be imported, because {name} is not a name in Python; rename the file")
    _append_to_path(path.parent)
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None or Path(spec.origin).resolve() != path:
        other = None if spec is None else spec.origin
        raise UserError(f"{path} has the name of another module ({other}); rename the file")
    importlib.import_module(name)
    return name


def find_in_working_directory() -> None:
    """Let imports find modules in the working directory, after all others, as `python -m` does."""
    _append_to_path(Path.cwd())


def _append_to_path(directory: Path) -> None:
    if not any(os.path.realpath(each) == str(directory) for each in sys.path):
        sys.path.append(str(directory))
