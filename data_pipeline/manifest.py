"""The manifest of a built dataset: `DIR/manifest.json`, written last: a directory without one is not a dataset."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from data_pipeline.errors import UserError
from data_pipeline.schema import Schema

MANIFEST_NAME = "manifest.json"
FORMAT_VERSION = 1


class ShardEntry(Schema):
    """One shard: its file name, number of samples, size in bytes and sha256 of the tar file."""

    name: str
    num_samples: int
    num_bytes: int
    sha256: str


class LabelNames(Schema):
    """Class names by label; `overlay` is empty where nothing was drawn."""

    base: tuple[str, ...]
    overlay: tuple[str, ...]


class HowMade(Schema):
    """The arguments of the `build` that made the dataset: the same arguments and source give the same bytes.

    `source_sha256` is over the decoded source pictures and labels in their order, so it names the input by content.
    """

    dataset: str
    source: str
    split: str
    seed: int
    repeats: int
    limit: int | None
    source_sha256: str


class Manifest(Schema):
    """What a dataset holds and how it was made.

    `mean` and `std` are per channel over all stored pixels, in [0, 1] units. `counts_base` and `counts_overlay` are the
    number of samples of each class, in label order.
    """

    format_version: int
    num_samples: int
    image_shape: tuple[int, int, int]  # C, H, W
    label_names: LabelNames
    counts_base: tuple[int, ...]
    counts_overlay: tuple[int, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    how_made: HowMade
    shards: tuple[ShardEntry, ...]

    @property
    def sha256(self) -> str:
        """Names the dataset by content: the hash of the canonical JSON, which holds the hash of every shard."""
        canonical = json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()


def load_manifest(directory: Path) -> Manifest:
    """Read `directory/manifest.json`; raises `UserError` if it is missing or is not a manifest."""
    path = directory / MANIFEST_NAME
    if not directory.is_dir():
        raise UserError(
            f"{directory} does not exist; build it with `python -m data_pipeline build DATASET --out {directory}`"
        )
    if not path.is_file():
        raise UserError(
            f"{directory} holds no {MANIFEST_NAME}, so it is not a finished dataset; "
            f"build it with `python -m data_pipeline build DATASET --out {directory}`"
        )
    try:
        value = json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}); build the dataset again") from None
    if not isinstance(value, dict) or value.get("format_version") != FORMAT_VERSION:
        raise UserError(f"{path} is not of format version {FORMAT_VERSION}; build the dataset again")
    return Manifest.parse(value, where=str(path))
