"""Find overlays by name, save them and load them: an online dataset stores its overlay.

An overlay is saved as a safetensors file of its persistent buffers. The header holds its name and options.

Guarantees: the same overlay gives the same bytes, and a loaded overlay draws the same objects.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import safetensors
import safetensors.torch

from data_pipeline.core.errors import UserError
from data_pipeline.core.kinds import Names, path_of
from data_pipeline.overlays import Overlay
from data_pipeline.storage.manifest import read_file

# The class of each name. A new overlay of this project needs a line here and its own file.
OVERLAYS: Final[Mapping[str, str]] = {
    "shapes": "data_pipeline.overlays.shapes:Shapes",
    "digits": "data_pipeline.overlays.digits:Digits",
    "letters": "data_pipeline.overlays.letters:Letters",
    "bits": "data_pipeline.overlays.bits:Bits",
    "colours": "data_pipeline.overlays.colours:Colours",
    "dominoes": "data_pipeline.overlays.dominoes:Dominoes",
    "second_digit": "data_pipeline.overlays.second_digit:SecondDigit",
    "tiled_digit": "data_pipeline.overlays.tiled_digit:TiledDigit",
    "shared_number": "data_pipeline.overlays.shared_number:SharedNumber",
    "boolean": "data_pipeline.overlays.boolean:Boolean",
    "noise": "data_pipeline.overlays.noise:Noise",
}
NAMES: Final = Names("overlay", group="overlays", built_in=OVERLAYS)
_HEADER_KEY: Final = "overlay"


def kind_of(overlay: Overlay) -> str:
    """Return the name of an overlay's class. Raises `UserError` if it has none."""
    for name in NAMES.names():
        if NAMES.find_object(name) is type(overlay):
            return name
    raise UserError(
        f"{path_of(type(overlay))} has no name; register it by `@data_pipeline.overlays.registry.NAMES.register(...)`"
    )


def find_overlay(kind: str) -> type[Overlay]:
    """Return the class of a name. Raises `KeyError` if there is none, and `UserError` if two classes claim the name."""
    found: type[Overlay] = NAMES.find_object(kind)
    return found


def save_overlay(overlay: Overlay, path: Path) -> str:
    """Write `overlay` to `path` and return the sha256 of the file."""
    header = json.dumps({"kind": kind_of(overlay), "options": overlay.options()}, separators=(",", ":"))
    buffers = {name: tensor.cpu().contiguous() for name, tensor in overlay.state_dict().items()}
    # One key only: safetensors writes several keys in an order that differs between processes.
    data = safetensors.torch.save(buffers, metadata={_HEADER_KEY: header})
    path.write_bytes(data)
    return hashlib.sha256(data).hexdigest()


def load_overlay(path: Path, *, sha256: str) -> Overlay:
    """Load the overlay that `save_overlay` wrote, on the CPU.

    Raises `UserError` if the file is missing, if its digest is not `sha256`, or if the overlay is not known; it may
    need `--code`.
    """
    buffers = safetensors.torch.load(read_file(path, sha256=sha256))
    with safetensors.safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()[_HEADER_KEY])
    try:
        overlay_class = find_overlay(header["kind"])
    except KeyError as error:
        raise UserError(
            f"{path} holds an unknown overlay {error}; it is registered by --code FILE or an installed package"
        ) from None
    return overlay_class(**buffers, **header["options"])
