"""The manifest of a dataset, `DIR/manifest.json`. It is written last: a directory without it is not a dataset.

A dataset is tars and an index of them, whoever wrote the tars. `data_pipeline.storage.index` says which files the index
has. The manifest names each of them with its size and sha256, so its own hash identifies the content.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Final, Literal, Self

import pydantic_core
from pydantic import (
    FailFast,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
)

from data_pipeline.core.errors import UserError
from data_pipeline.core.label_words import MAX_CLASSES, as_number
from data_pipeline.core.sample import Layout, Medium
from data_pipeline.core.schema import LabelName, Line, Schema, Share
from data_pipeline.storage.locations import MANIFEST_NAME, PICTURE_FIELDS, dataset_directory, names_tars

OVERLAY_NAME: Final = "overlay.safetensors"  # the assets of an online overlay
SOURCE_DIGESTS_NAME: Final = "source_digests.bin"  # a short hash of each sample's source
FORMAT_VERSION: Final = 7
_NUM_NAMED: Final = 12  # class names in a description
_MEND: Final = "build or index the dataset again, or copy it again from a whole copy"


Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
ClassNames = Annotated[tuple[Line, ...], FailFast(), Field(max_length=MAX_CLASSES)]
OptionValues = dict[LabelName, int | float | Line]
ClassCounts = Annotated[tuple[NonNegativeInt, ...], FailFast()]


class FileEntry(Schema):
    """A file beside the manifest: its size, and the sha256 of its content."""

    num_bytes: NonNegativeInt
    sha256: Sha256

    @classmethod
    def of(cls, path: Path) -> Self:
        """Return the entry of a file, which is read."""
        with path.open("rb") as file:
            return cls(num_bytes=path.stat().st_size, sha256=hashlib.file_digest(file, "sha256").hexdigest())


def read_file(path: Path, *, sha256: str) -> bytes:
    """Return the content of a file beside a manifest.

    Raises `UserError` if it cannot be read, or does not have the `sha256` that the manifest names.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); {_MEND}") from None
    if hashlib.sha256(data).hexdigest() != sha256:
        raise UserError(f"{path} is not the file that the manifest names by sha256; {_MEND}")
    return data


class Fields(Schema):
    """Which members of a sample in a tar are its content and its labels.

    Attributes:
        content: extensions, of which the first that a sample has is its picture or sound.
        mask: the extension of the mask of what an overlay drew; None if samples have none.
        labels: for each label by name, an extension, whose content is the label; or `EXTENSION:a.b`, the entry `b` of
            `a` in its JSON; or `path:N`, the folder number N of those that the sample lies in, from 0, or from -1 for
            the one that holds it; or `tar`, the name of the tar without its ending. None takes the first of
            `LABEL_FIELDS` that there is, as the label `base`.
    """

    content: Annotated[tuple[Line, ...], Field(min_length=1)] = PICTURE_FIELDS
    mask: Line | None = None
    labels: dict[LabelName, Line] | None = None


class Tars(Schema):
    """The tars of a dataset.

    Attributes:
        fields: what was read of each sample.
        numbered: whether the key of each sample is its index in eight digits, as `build` writes it.
    """

    fields: Fields
    numbered: bool
    num_tars: PositiveInt
    num_bytes: PositiveInt


class LabelEntry(Schema):
    """One label of a dataset.

    Attributes:
        title: what the label is about, for readers, such as "diagnosis".
        classes: the class names, in the order of their numbers.
        counts: the number of samples of each class; empty if an overlay is drawn at each reading.
        given_by: the part of a build that gives the label.
    """

    title: Line
    classes: Annotated[ClassNames, Field(min_length=1)]
    counts: ClassCounts = ()
    given_by: Literal["source", "overlay"] = "source"

    @property
    def is_number(self) -> bool:
        """Return whether the label is a number, such as an age, and no class. Probes leave it out.

        All its class names are then numbers, and more than half of the labelled samples have a value that comes once.
        """
        return 2 * self.counts.count(1) > sum(self.counts) and None not in map(as_number, self.classes)


class BatchEntry(Schema):
    """The pictures of a batch, if an overlay that is drawn at each reading changes their shape.

    Attributes:
        shape: (C, H, W) of a picture with the overlay.
        mean, std: for each channel, in [0, 1], of the first samples with one draw of the overlay.
    """

    shape: tuple[PositiveInt, PositiveInt, PositiveInt]
    mean: tuple[Share, ...]
    std: tuple[Share, ...]


class OverlayEntry(Schema):
    """The overlay of the samples, and when it is drawn.

    A `baked` overlay was drawn into the tars, once for each stored sample. An `online` overlay is drawn at each
    reading: the tars hold clean samples, and the file `OVERLAY_NAME` holds the overlay. `layout` is "scaled" at 32
    pixels, and for sounds. `options` are those that the user may choose, with their values: they say how difficult the
    dataset is. Those of sounds hold a short hash of the background sounds too, as `noise_sha256`. `batch` is there only
    if the overlay changes the shape of stored pictures.
    """

    kind: Line
    drawn: Literal["baked", "online"]
    layout: Layout = "scaled"
    options: OptionValues = Field(default_factory=dict)
    batch: BatchEntry | None = None


class HowMade(Schema):
    """The arguments of the `build` that made the dataset: the same arguments and source give the same bytes.

    `source_sha256` is the hash of the decoded records and labels in their order, so it identifies the input by content;
    it is empty for tars of others, and if files are kept. `source_options` are those of the source that the user may
    choose, with their values.
    """

    dataset: Line
    source: Line
    split: Literal["train", "test"]
    seed: NonNegativeInt = 0
    repeats: PositiveInt = 1
    limit: PositiveInt | None = None
    source_sha256: str = ""
    source_options: OptionValues = Field(default_factory=dict)


class Description(Schema):
    """What the samples of a dataset are, and how they were made.

    Attributes:
        input_shape: the shape of one stored input: (C, H, W) of a picture, (T,) of a sound. A sound is stored in its
            own length, and cropped or padded to T when it is read. `batch_shape` is that of an input in a batch.
        any_size: whether stored pictures may have any size and format, and are brought to `input_shape` when they are
            read; `mean` and `std` are then of some of the pictures.
        sample_rate: of sounds, in points a second; None for pictures.
        labels: every label by name. A sample may lack any of them.
        mean, std: over all stored values: for each channel of pictures in [0, 1], or for waveforms in [-1, 1]. A `std`
            is 0 if all values of a channel are equal.
    """

    medium: Medium
    input_shape: tuple[PositiveInt, ...]
    any_size: bool = False
    sample_rate: PositiveInt | None = None
    labels: dict[LabelName, LabelEntry]
    mean: tuple[float, ...]
    std: tuple[NonNegativeFloat, ...]
    overlay: OverlayEntry | None = None
    how_made: HowMade

    @property
    def stored_labels(self) -> dict[str, LabelEntry]:
        """Return those of `labels` that are stored with the samples: without those of an online overlay."""
        return {name: label for name, label in self.labels.items() if label.given_by == "source" or not self.is_online}

    @property
    def is_online(self) -> bool:
        """Return whether the overlay is drawn when the samples are read."""
        return self.overlay is not None and self.overlay.drawn == "online"

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """Return the shape of one input in a batch: `input_shape`, unless an online overlay changes it."""
        return self.input_shape if self._batch is None else self._batch.shape

    @property
    def batch_mean(self) -> tuple[float, ...]:
        """Return the mean of each channel of a batch: `mean`, unless an online overlay changes the shape."""
        return self.mean if self._batch is None else self._batch.mean

    @property
    def batch_std(self) -> tuple[float, ...]:
        """Return the standard deviation of each channel of a batch; see `batch_mean`."""
        return self.std if self._batch is None else self._batch.std

    @property
    def _batch(self) -> BatchEntry | None:
        return None if self.overlay is None else self.overlay.batch


class Manifest(Description):
    """The content of a dataset, and how it was made.

    Attributes:
        labels: with the counts of those that are stored.
        files: the files beside the manifest, by name, without the tars.
    """

    format_version: Literal[7] = FORMAT_VERSION
    num_samples: PositiveInt
    tars: Tars
    files: dict[str, FileEntry]

    @property
    def sha256(self) -> str:
        """Return the hash of the canonical JSON. It covers the hash of every file, so it identifies the content."""
        canonical = json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    @property
    def num_shards(self) -> int:
        return self.tars.num_tars

    @property
    def num_bytes(self) -> int:
        """Return the size of all tars in bytes."""
        return self.tars.num_bytes

    @property
    def has_mask(self) -> bool:
        """Return whether each sample is stored with the mask of its overlay."""
        return self.tars.fields.mask is not None


def load_manifest(directory: str | Path) -> Manifest:
    """Read the manifest of a local dataset. Raises `UserError` if it is missing, or is not a manifest."""
    directory = dataset_directory(directory)
    path = directory / MANIFEST_NAME
    if names_tars(directory):
        raise UserError(f"{directory} names tars without an index; run `python -m data_pipeline index {directory}`")
    if not path.is_file():
        what = f"holds no {MANIFEST_NAME}, so it is not a finished dataset" if directory.exists() else "does not exist"
        raise UserError(
            f"{directory} {what}; build it with `python -m data_pipeline build DATASET --out {directory}`, or, if the "
            "data of a run have moved, write their new place into its config.json"
        )
    return parse_manifest(path.read_bytes(), where=str(path))


def parse_manifest(text: str | bytes, *, where: str) -> Manifest:
    """Return a manifest from its JSON.

    Raises `UserError` that names `where` if it is not a manifest, has another format, or lacks a value.
    """
    try:
        value = pydantic_core.from_json(text)
    except ValueError as error:
        raise UserError(f"{where} is not valid JSON ({error}); {_MEND}") from None
    if not isinstance(value, dict) or value.get("format_version") != FORMAT_VERSION:
        raise UserError(f"{where} does not have format version {FORMAT_VERSION}; build the dataset again")
    return Manifest.parse(value, where=where)


def describe_manifest(manifest: Manifest) -> list[str]:
    """Return lines that describe a dataset: its samples, each label with its classes, the overlay, the source."""
    size = " x ".join(map(str, manifest.input_shape[:0:-1]))
    samples = (
        f"pictures {'brought to' if manifest.any_size else 'of'} {size} pixels"
        if manifest.sample_rate is None
        else f"sounds at {manifest.sample_rate} points a second, read as {manifest.input_shape[0]} points"
    )
    lines = [f"samples: {samples}, {manifest.num_bytes / 1e6:.1f} MB in all"]
    for name, label in manifest.labels.items():
        classes, of_each = label.classes, ""
        if label.counts:
            least, most = min(label.counts), max(label.counts)
            of_each = f" of {least} samples each" if least == most else f" of {least} to {most} samples each"
        more = ", ..." if len(classes) > _NUM_NAMED else ""
        shown = ", ".join(classes[:_NUM_NAMED])
        lines.append(f"label_{name}, {label.title}: {len(classes)} classes{of_each}, {shown}{more}")
        if 0 < (num_labelled := sum(label.counts)) < manifest.num_samples:
            lines.append(f"{manifest.num_samples - num_labelled} samples have no label ({name})")
    if manifest.overlay is not None:
        when = "anew at each reading" if manifest.is_online else "into the shards"
        layout = ", tiled" if manifest.overlay.layout == "tiled" else ""
        options = "".join(f", {name}={value}" for name, value in manifest.overlay.options.items())
        lines.append(f"overlay: {manifest.overlay.kind}{layout}{options}, drawn {when}")
        if manifest.batch_shape != manifest.input_shape:
            channels, height, width = manifest.batch_shape
            lines.append(f"in a batch: pictures of {channels} channels and {width} x {height} pixels")
    made = manifest.how_made
    lines.append(f"made from: {made.source}; split {made.split}, seed {made.seed}")
    return lines
