"""List the overlays by name, save them and load them: an online dataset stores its overlay.

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
from data_pipeline.core.schema import Schema
from data_pipeline.overlays import Overlay
from data_pipeline.overlays.digits import Digits
from data_pipeline.overlays.letters import Letters
from data_pipeline.overlays.noise import Noise
from data_pipeline.overlays.shapes import Shapes
from data_pipeline.storage.files import read_regular

OVERLAYS: Final[Mapping[str, type[Overlay]]] = MappingProxyType(
    {"shapes": Shapes, "digits": Digits, "letters": Letters, "noise": Noise}
)
MAX_OVERLAY_BYTES: Final = 1 << 30
_HEADER_KEY: Final = "overlay"


class OverlayHeader(Schema):
    """The header of an overlay file: the overlay's name in `OVERLAYS`, and its options."""

    kind: str
    options: dict[str, str | int | float]


def kind_of(overlay: Overlay) -> str:
    """Return the name of an overlay's class in `OVERLAYS`; raise `UserError` if it has none."""
    for kind, overlay_class in OVERLAYS.items():
        if type(overlay) is overlay_class:
            return kind
    raise UserError(
        f"{type(overlay).__name__} has no name in data_pipeline.overlays.registry.OVERLAYS; add a line there"
    )


def save_overlay(overlay: Overlay, path: Path) -> str:
    """Write `overlay` to `path` and return the sha256 of the file.

    Raises `UserError` if the overlay has no name, or if its file would be larger than what `load_overlay` reads.
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
    version does not know the overlay.
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
    if kind not in OVERLAYS:
        raise UserError(f'{path} holds an unknown overlay "{kind}"{nearest(kind, OVERLAYS)}')
    try:
        return OVERLAYS[kind](**buffers, **header.options)
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
