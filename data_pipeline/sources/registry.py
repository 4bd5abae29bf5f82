"""Find sources of pictures by name: those of this project, of installed packages, and of code that was imported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from data_pipeline.core.kinds import Names

# The class of each name, a `SourceKind`. A new source of pictures of this project needs a line here and its own file.
PICTURE_SOURCES: Final[Mapping[str, str]] = {
    "torchvision": "data_pipeline.sources.cifar:Cifar",
    "folder": "data_pipeline.sources.folder:Folder",
    "mnist": "data_pipeline.sources.mnist:Mnist",
    "placed_digits": "data_pipeline.sources.placed_digits:PlacedDigits",
    "procedural": "data_pipeline.sources.procedural:Procedural",
    "trifeature": "data_pipeline.sources.trifeature:Trifeature",
}
NAMES: Final = Names("source", group="sources", built_in=PICTURE_SOURCES)
