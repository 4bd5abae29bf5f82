"""Import code by its import path `package.module:Name`, from a file, by `--code`, or when a name is first used.

Invariant: only a path that the user has typed, or that this project or an installed package holds, comes here.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from data_pipeline.core.errors import UserError, nearest

PYTHON_SUFFIX: Final = ".py"
_given: list[str] = []  # the modules of `import_code`, in their order


def imported_when_used(package: str, modules: Mapping[str, str]) -> Callable[[str], object]:
    """Return a `__getattr__` for a package's `__init__`: each name is imported from its module at its first use.

    `--help` of a command imports the packages around it, and must not wait for torch. `modules` maps each module in the
    package to the names that it defines, with spaces between them. A type checker reads the imports under
    `if TYPE_CHECKING`.

    Examples:
        >>> get = imported_when_used("data_pipeline", {"core.errors": "UserError nearest"})
        >>> get("nearest").__module__
        'data_pipeline.core.errors'
    """
    module_of = {name: f"{package}.{module}" for module, names in modules.items() for name in names.split()}

    def get(name: str) -> object:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(module_of[name]), name)

    return get


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Let Python not search for garbage in a block that imports much: a fifth of its time, and hardly any is found."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def add_code_argument(parser: argparse.ArgumentParser) -> None:
    """Add the option --code. A command passes its values to `import_code` before it reads a config or a dataset."""
    parser.add_argument(
        "--code",
        action="append",
        default=[],
        metavar="FILE",
        help="Import your own FILE.py or module first, which registers objectives, views, encoders, engines, overlays "
        "or sources. May be repeated.",
    )


def import_code(given: Sequence[str]) -> list[str]:
    """Import the files and modules of `--code`, and return their names. Raises `UserError` if one is not found."""
    names = []
    for each in given:
        if each.endswith(PYTHON_SUFFIX):
            name = import_file(Path(each))
        else:
            find_in_working_directory()
            import_module(name := each, wanted=each)
        names.append(name)
    _given.extend(name for name in names if name not in _given)
    return names


def given_code() -> tuple[str, ...]:
    """Return the modules that `import_code` has imported, which the processes of a job or a probe import as well."""
    return tuple(_given)


def import_object(path: str) -> Any:
    """Return what an import path names: `package.module:Name`. Runs the code of the module.

    Raises `UserError` if there is no such module, or if it has no such name.
    """
    module_name, _, name = path.partition(":")
    module = import_module(module_name, wanted=path)
    if not hasattr(module, name):
        public = [each for each in dir(module) if not each.startswith("_")]
        raise UserError(f'the module {module_name} of {path} has no "{name}"{nearest(name, public)}')
    return getattr(module, name)


def import_module(name: str, *, wanted: str) -> Any:
    """Import a module for the import path `wanted`. Raises `UserError` if there is none."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module is there, and what it needs is not: the traceback shows the line
        raise UserError(
            f'{wanted} needs the module "{error.name}", which is not found; install its package, or put its directory '
            "on PYTHONPATH"
        ) from None


def check_installed(*modules: str, extra: str, user: str) -> None:
    """Raise `UserError` that says how `user` gets an extra of setup.py, if one of its modules is not installed."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise UserError(f"{user} needs the package {module}; install it with pip install -e '.[{extra}]'")


def import_file(path: Path) -> str:
    """Import a Python file as a module with the name of the file, and return that name.

    The directory of the file is put on the path, so that the file can import its neighbours. Raises `UserError` if
    there is no such file, or if its name is that of another module.
    """
    if not path.is_file():
        raise UserError(f"{path} is not a file; name a Python file")
    name, path = path.stem, path.resolve()
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
