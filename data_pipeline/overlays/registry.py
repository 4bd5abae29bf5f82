"""Find overlays by name, save them and load them: an online dataset stores its overlay.

An overlay is saved as a safetensors file of its persistent buffers. The header holds its name and options.

Guarantees: the same overlay gives the same bytes, and a loaded overlay draws the same objects.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

import pydantic_core
import safetensors
import safetensors.torch

from data_pipeline.core.errors import UserError, nearest
from data_pipeline.core.kinds import Names
from data_pipeline.core.schema import Schema
from data_pipeline.overlays import Overlay
from data_pipeline.storage.files import read_regular

# The class of each name. A new overlay of this project needs a line here and its own file.
OVERLAYS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "shapes": "data_pipeline.overlays.shapes:Shapes",
        "digits": "data_pipeline.overlays.digits:Digits",
        "letters": "data_pipeline.overlays.letters:Letters",
        "bits": "data_pipeline.overlays.bits:Bits",
        "colours": "data_pipeline.overlays.colours:Colours",
        "dominoes": "data_pipeline.overlays.dominoes:Dominoes",
        "second_digit": "data_pipeline.overlays.second_digit:SecondDigit",
        "tiled_digit": "data_pipeline.overlays.tiled_digit:TiledDigit",
        "noise": "data_pipeline.overlays.noise:Noise",
    }
)
NAMES: Final = Names("overlay", group="overlays", built_in=OVERLAYS)
MAX_OVERLAY_BYTES: Final = 1 << 30
_HEADER_KEY: Final = "overlay"


class OverlayNotImportedError(UserError):
    """The error of a dataset whose overlay `kind` is an import path of a module that is not imported."""

    def __init__(self, kind: str) -> None:
        super().__init__(
            f"the overlay {kind} is code that a dataset names, and reading data imports no code; register it by an "
            f"entry point in the group {NAMES.group} and build the dataset by that name, which every command finds, or "
            "import its module in the recipe, which training alone reads; if you trust the writer of the dataset, "
            "commands of data_pipeline take --allow-code"
        )
        self.kind = kind


class OverlayHeader(Schema):
    """The header of an overlay file: the overlay's name or import path, and its options."""

    kind: str
    options: dict[str, str | int | float]


def kind_of(overlay: Overlay) -> str:
    """Return the name of an overlay's class, or its import path if it has no name."""
    path = f"{type(overlay).__module__}:{type(overlay).__qualname__}"
    return next((name for name in NAMES.names() if NAMES.path_of(name) == path), path)


def find_overlay(kind: str) -> type[Overlay]:
    """Return the class of a name, or of an import path whose module is imported already.

    Raises `KeyError` if there is no such name, `OverlayNotImportedError` if the module is not imported, and `UserError`
    if what it names is no overlay, or if two packages claim the name.
    """
    found = NAMES.find_object(kind)
    if found is None:
        raise OverlayNotImportedError(kind)
    if not (isinstance(found, type) and issubclass(found, Overlay)):
        raise UserError(f"{kind} is no overlay; name a subclass of {Overlay.__module__}.{Overlay.__qualname__}")
    return found


def save_overlay(overlay: Overlay, path: Path) -> str:
    """Write `overlay` to `path` and return the sha256 of the file.

    Raises `UserError` if its file would be larger than what `load_overlay` reads.
    """
    header = OverlayHeader(kind=kind_of(overlay), options=overlay.options())
    buffers = {name: tensor.cpu().contiguous() for name, tensor in overlay.state_dict().items()}
    # One key only: safetensors writes several keys in an order that differs between processes.
    data = safetensors.torch.save(buffers, metadata={_HEADER_KEY: header.model_dump_json()})
    if len(data) > MAX_OVERLAY_BYTES:
        raise UserError(
            f"the {header.kind} overlay takes {len(data):,} bytes in this size, and its file may have "
            f"{MAX_OVERLAY_BYTES:,}; give a smaller --image-size, or --overlay-layout tiled"
        )
    path.write_bytes(data)
    return hashlib.sha256(data).hexdigest()


def load_overlay(path: Path, *, sha256: str | None) -> Overlay:
    """Load the overlay that `save_overlay` wrote, on the CPU.

    Raises `UserError` if the file is missing or damaged, if its digest is not `sha256` (None accepts any), or if this
    version does not know the overlay; `OverlayNotImportedError` if the file is sound so far, and names other code.
    """
    try:
        data = read_regular(path, max_bytes=MAX_OVERLAY_BYTES)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); copy or build the dataset again") from None
    if sha256 is not None and hashlib.sha256(data).hexdigest() != sha256:
        raise UserError(f"{path} is not the file that the manifest names by sha256; copy or build the dataset again")
    try:
        header = _read_header(data)
        buffers = safetensors.torch.load(data)
    except (ValueError, KeyError, TypeError, safetensors.SafetensorError) as error:
        raise UserError(f"{path} is not a whole overlay file ({error}); copy or build the dataset again") from None
    kind = header.kind
    try:
        overlay_class = find_overlay(kind)
    except KeyError:
        raise UserError(f'{path} holds an unknown overlay "{kind}"{nearest(kind, NAMES.names())}') from None
    try:
        return overlay_class(**buffers, **header.options)
    except (ValueError, TypeError) as error:
        raise UserError(f"{path} does not hold a {kind} overlay ({error}); copy or build the dataset again") from None


def _read_header(data: bytes) -> OverlayHeader:
    """Return the header that `save_overlay` wrote; raise `ValueError`, `KeyError` or `TypeError` if there is none.

    Parses the bytes itself, because safetensors returns the metadata of a file only, not of bytes in memory. A file
    begins with the length of its JSON header in eight bytes, little-endian.
    """
    num_bytes = int.from_bytes(data[:8], "little")
    header = pydantic_core.from_json(data[8 : 8 + num_bytes])["__metadata__"][_HEADER_KEY]
    return OverlayHeader.parse(pydantic_core.from_json(header), where="its header")
