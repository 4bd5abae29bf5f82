"""Find sources of pictures by name: those of this project, of installed packages, and of code that was imported."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from data_pipeline.core.errors import UserError
from data_pipeline.core.kinds import Names
from data_pipeline.sources import SourceKind

# The class of each name. A new source of pictures of this project needs a line here and its own file.
PICTURE_SOURCES: Final = MappingProxyType(
    {
        "torchvision": "data_pipeline.sources.cifar:Cifar",
        "folder": "data_pipeline.sources.picture_table:Folder",
        "mnist": "data_pipeline.sources.mnist:Mnist",
        "placed_digits": "data_pipeline.sources.placed_digits:PlacedDigits",
        "procedural": "data_pipeline.sources.procedural:Procedural",
        "trifeature": "data_pipeline.sources.trifeature:Trifeature",
    }
)
NAMES: Final = Names("source", group="sources", built_in=PICTURE_SOURCES)


def find_source(name: str) -> type[SourceKind]:
    """Return the class of a source of pictures.

    Raises `KeyError` if there is no such name, and `UserError` if two classes claim it, or if what it names cannot be
    opened.
    """
    found = NAMES.find_object(name)
    if not (isinstance(found, type) and callable(getattr(found, "open", None))):
        raise UserError(f"{name} is no source of pictures; name a class with a class method open(given: SourceInputs)")
    return found
