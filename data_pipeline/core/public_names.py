"""Offer public names of a package without importing their modules."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping


def imported_when_used(package: str, modules: Mapping[str, str]) -> Callable[[str], object]:
    """Return a `__getattr__` for a package's `__init__`: each name is imported from its module at its first use.

    `--help` of a command imports the packages around it, and must not wait for torch. `modules` maps each name to the
    module that defines it. A type checker reads the imports under `if TYPE_CHECKING`.

    Examples:
        >>> get = imported_when_used("example", {"nearest": "data_pipeline.core.errors"})
        >>> get("nearest").__module__
        'data_pipeline.core.errors'
    """

    def get(name: str) -> object:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(modules[name]), name)

    return get
