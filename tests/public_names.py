"""Write the public names of every package, with signatures and defaults, in a form that can be compared.

    python -m tests.public_names > tests/golden/public_names.txt

A name is public if the `__all__` of its package holds it, or if docs/own-code.md lists it (`FURTHER`). A line of the
file that changes or goes breaks the code of users: say so in CHANGELOG.md.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from pydantic_core import PydanticUndefined

from data_pipeline.core.schema import Schema

ROOT = Path(__file__).parent.parent
TOPS = ("data_pipeline", "trainer", "configs", "launch")
FURTHER = {  # for code of one's own, which other code does not need
    "data_pipeline.audio.log_mel": ("MelConfig", "mel_config"),
    "data_pipeline.core.counter_rng": ("DrawKeys", "integers", "keys_of_rows", "normal", "uniform"),
    "data_pipeline.core.sample": ("MASK_OBJECT",),
    "data_pipeline.core.schema": ("Count", "Factor", "LayerSize", "PositiveFactor", "PositiveShare", "Share"),
    "trainer.config": ("RunConfig",),
    "trainer.models.encoder": ("BaseEncoderConfig",),
    "trainer.models.trunk": ("Trunk",),
}


def packages() -> list[str]:
    """Return the dotted name of every package, sorted."""
    return sorted(
        ".".join(init.parent.relative_to(ROOT).parts) for top in TOPS for init in (ROOT / top).rglob("__init__.py")
    )


def lines() -> Iterator[str]:
    """Yield a line for each public name, and one for each public member of a public class."""
    public = {package: sorted(importlib.import_module(package).__all__) for package in packages()}
    for path, names in (*public.items(), *FURTHER.items()):
        for name in names:
            yield from _described(f"{path}.{name}", getattr(importlib.import_module(path), name))


def _described(name: str, value: Any) -> Iterator[str]:
    if inspect.isclass(value) and issubclass(value, Schema):
        yield f"{name}: settings"
        for field, info in value.model_fields.items():
            required = info.default is PydanticUndefined and info.default_factory is None
            yield f"    {field}" + ("" if required else f" = {_stable(info.get_default(call_default_factory=True))}")
    elif inspect.isclass(value):
        yield f"{name}{_signature(value)}"
        for member, what in sorted(vars(value).items()):
            if member.startswith("_") or (dataclasses.is_dataclass(value) and member in value.__dataclass_fields__):
                continue
            if isinstance(what, property):
                yield f"    {member}"
            elif callable(getattr(value, member)):
                yield f"    {member}{_signature(getattr(value, member))}"
    elif members := _members(value):
        yield f"{name} = {' | '.join(members)}"
    elif callable(value):
        yield f"{name}{_signature(value)}"
    else:
        yield f"{name} = {_stable(value)}"


def _members(union: Any) -> list[str]:
    """Return the names of the classes in a union, which may be annotated; none of anything else."""
    parts = get_args(get_args(union)[0]) if get_origin(union) is Annotated else get_args(union)
    return [part.__name__ for part in parts if inspect.isclass(part)]


def _signature(value: Any) -> str:
    try:
        return _stable(inspect.signature(value), text=str)
    except ValueError:  # of an exception, which has none
        return ""


def _stable(value: Any, *, text: Any = repr) -> str:
    """Return the text of a value without addresses in memory."""
    return re.sub(r" at 0x[0-9a-f]+", "", text(value))


if __name__ == "__main__":
    print("\n".join(lines()))
