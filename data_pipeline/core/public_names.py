"""Offer public names of a package without importing their modules."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping


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
