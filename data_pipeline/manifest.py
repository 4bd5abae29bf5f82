"""The manifest of a built dataset: `DIR/manifest.json`, written last: a directory without one is not a dataset."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Final, Literal

from data_pipeline.errors import UserError
from data_pipeline.sample import Medium
from data_pipeline.schema import Schema

MANIFEST_NAME: Final = "manifest.json"
OVERLAY_NAME: Final = "overlay.safetensors"  # the assets of an online overlay, beside the shards
SOURCE_DIGESTS_NAME: Final = "source_digests.bin"  # a short hash of each sample's source, beside the shards
FORMAT_VERSION: Final = 3


class ShardEntry(Schema):
    """One shard: its file name, number of samples, size in bytes and sha256 of the tar file."""

    name: str
    num_samples: int
    num_bytes: int
    sha256: str


class LabelNames(Schema):
    """Class names of both labels, and a title of each label for readers, such as "picture" and "digit".

    `overlay` is empty if nothing is drawn, `base` if only the overlay has a class. The title of a label without
    classes means nothing. A source gives `title_base`, an overlay class gives `title_overlay`.
    """

    base: tuple[str, ...]
    overlay: tuple[str, ...]
    title_base: str = "base"
    title_overlay: str = "overlay"


class OverlayEntry(Schema):
    """What is drawn on the samples, and when.

    `baked`: into the shards, once a stored sample. `online`: the shards hold clean samples, and `OVERLAY_NAME` beside
    them, with this sha256, what a reader needs to draw on each as it reads it.
    """

    kind: str
    drawn: Literal["baked", "online"]
    sha256: str | None


class HowMade(Schema):
    """The arguments of the `build` that made the dataset: the same arguments and source give the same bytes.

    `source_sha256` is over the decoded records and labels in their order, so it names the input by content.
    """

    dataset: str
    source: str
    split: Literal["train", "test"]
    seed: int
    repeats: int
    limit: int | None
    source_sha256: str


class Manifest(Schema):
    """What a dataset holds and how it was made.

    `input_shape` is that of one input as a batch holds it: (C, H, W) of a picture; (T,) of a sound, which is stored in
    its own length and cut or filled up to T when it is read. `mean` and `std` are over all stored values: of each
    channel in [0, 1] units for pictures, of the waveform in [-1, 1] for sounds. `counts_base` and `counts_overlay` are
    the number of samples of each class, in label order; `counts_overlay` is empty where the overlay is online.
    `source_digests_sha256` is of the file `SOURCE_DIGESTS_NAME`; None if the source has no content, which is silence.
    """

    format_version: int
    num_samples: int
    medium: Medium
    input_shape: tuple[int, ...]
    sample_rate: int | None  # points a second; None for pictures
    label_names: LabelNames
    counts_base: tuple[int, ...]
    counts_overlay: tuple[int, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    overlay: OverlayEntry | None
    how_made: HowMade
    shards: tuple[ShardEntry, ...]
    source_digests_sha256: str | None = None

    @property
    def sha256(self) -> str:
        """Names the dataset by content: the hash of the canonical JSON, which holds the hash of every shard."""
        canonical = json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    @property
    def is_online(self) -> bool:
        """Whether the overlay is drawn as the samples are read."""
        return self.overlay is not None and self.overlay.drawn == "online"

    @property
    def members(self) -> tuple[str, ...]:
        """The extensions of a sample's members, in the order in which they lie in the tar."""
        if self.medium == "sound":
            return ("json", "wav")
        return ("json", "mask.png", "png") if self.overlay is not None and not self.is_online else ("json", "png")


def load_manifest(directory: Path) -> Manifest:
    """Read `directory/manifest.json`; raises `UserError` if it is missing, cannot be read or is not a manifest."""
    path = directory / MANIFEST_NAME
    try:
        if not directory.is_dir():
            raise UserError(
                f"{directory} does not exist; build it with `python -m data_pipeline build DATASET --out {directory}`"
            )
        if not path.is_file():
            raise UserError(
                f"{directory} holds no {MANIFEST_NAME}, so it is not a finished dataset; "
                f"build it with `python -m data_pipeline build DATASET --out {directory}`"
            )
        content = path.read_bytes()
    except OSError as error:
        raise UserError(
            f"{path} cannot be read ({error.strerror}); make it readable, or choose another dataset"
        ) from None
    return parse_manifest(content, where=str(path))


def parse_manifest(text: str | bytes, *, where: str) -> Manifest:
    """A manifest from its JSON; raises `UserError` that names `where` if it is none, or of another format."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise UserError(f"{where} is not valid JSON ({error}); build the dataset again") from None
    if not isinstance(value, dict) or value.get("format_version") != FORMAT_VERSION:
        raise UserError(f"{where} is not of format version {FORMAT_VERSION}; build the dataset again")
    return Manifest.parse(value, where=where)
