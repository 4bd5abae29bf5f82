"""The manifest of a built dataset, `DIR/manifest.json`. It is written last: a directory without it is not a dataset.

A manifest may come from a stranger. Invariants, checked at each reading:

- Every shard has a plain file name, so no path leads out of the directory.
- All numbers are bounded and agree with each other, so the size of the shards bounds the memory of a reader.

A file of a dataset may be a symbolic link to a regular file, which readers follow. Nothing is written through a link: a
new file is written beside it and renamed.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

import pydantic_core
from pydantic import (
    AfterValidator,
    FailFast,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from data_pipeline.core.environment import with_home
from data_pipeline.core.errors import UserError
from data_pipeline.core.sample import BASE, OVERLAY, Layout, Medium
from data_pipeline.core.schema import LabelName, Line, Schema, Share
from data_pipeline.storage.files import read_regular
from data_pipeline.storage.tar_lists import is_tars, list_difference, tars_in

MANIFEST_NAME: Final = "manifest.json"
OVERLAY_NAME: Final = "overlay.safetensors"  # the assets of an online overlay, beside the shards
INDEX_NAME: Final = ".tar_index"  # the directory of an index of tars, beside them
SOURCE_DIGESTS_NAME: Final = "source_digests.bin"  # a short hash of each sample's source, beside the shards
SHARD_TABLE_NAME: Final = "shards.bin"  # the shards of a dataset that has too many for a list
FORMAT_VERSION: Final = 3
TARS_FORMAT_VERSION: Final = 4  # of an index of tars; readers of format 3 know no tars
LABELS_FORMAT_VERSION: Final = 5  # of a dataset with more labels than base and overlay, of either kind
TABLE_FORMAT_VERSION: Final = 6  # of a dataset with a table of its shards in place of a list

MAX_MANIFEST_BYTES: Final = 1 << 25
MAX_SAMPLES: Final = 10**12
MAX_SHARDS: Final = 10_000_000
MAX_LISTED_SHARDS: Final = 100_000  # that are read; `build` lists fewer
MAX_CLASSES: Final = 100_000
MAX_LABELS: Final = 100  # beside base and overlay
MAX_CHANNELS: Final = 256  # of a picture with an overlay
MAX_OPTIONS: Final = 100  # of an overlay or a source
MAX_VALUES: Final = 1 << 26  # of one input: a picture of 4,729x4,729 pixels, or 23 minutes of sound at 48 kHz
_LISTS: Final = (".txt", ".list")  # endings of a file that names tars
_MAX_WORDS: Final = 100  # letters of a location's name in that of its index
_MAX_LABEL_BYTES: Final = 256  # of the JSON of a sample, which holds three numbers, and for each other label
_MAX_MORE_LABEL_BYTES: Final = 64
_MAX_METADATA_BYTES: Final = 1 << 20  # that another program may have added to a picture or a sound
MAX_SHARD_BYTES: Final = 1 << 44
_MAX_SAMPLE_RATE: Final = 1_000_000
MIN_MEMBER_BYTES: Final = 1024  # in a tar: a header and at least one block of content
_MAX_DEFLATE_RATIO: Final = 1032  # the largest ratio of a picture's size to the size of its PNG
_READABLE: Final = (FORMAT_VERSION, TARS_FORMAT_VERSION, LABELS_FORMAT_VERSION, TABLE_FORMAT_VERSION)
_MEND: Final = "build the dataset again, or copy it again from a whole copy"


def is_plain_name(name: str) -> bool:
    """Return whether `name` is safe as a file name: no path, no option, nothing that a shell or a URL would interpret.

    Examples:
        >>> is_plain_name("shard-00000.tar"), is_plain_name("../x.tar"), is_plain_name("a;rm b")
        (True, False, False)
    """
    return re.fullmatch(r"\w[\w.-]{0,199}", name, flags=re.ASCII) is not None


def _checked_shard_name(name: str) -> str:
    # With this ending, the name of a shard's index differs from all other names in the directory.
    if not (is_plain_name(name) and name.endswith(".tar")):
        raise ValueError("it must be a plain file name that ends in .tar")
    return name


def _checked_sha256(text: str) -> str:
    if re.fullmatch(r"[0-9a-f]{64}", text) is None:
        raise ValueError("it must be a sha256 in 64 hexadecimal digits")
    return text


def _checked_names(names: tuple[str, ...]) -> tuple[str, ...]:
    for name, count in Counter(names).items():
        if count > 1:
            raise ValueError(f"the class {name!r} is named {count} times")
    return names


Sha256 = Annotated[str, AfterValidator(_checked_sha256)]
ClassNames = Annotated[tuple[Line, ...], FailFast(), Field(max_length=MAX_CLASSES), AfterValidator(_checked_names)]
OptionValues = Annotated[dict[LabelName, int | float | Line], Field(max_length=MAX_OPTIONS)]
ClassCounts = Annotated[tuple[NonNegativeInt, ...], FailFast(), Field(max_length=MAX_CLASSES)]


class ShardEntry(Schema):
    """One shard: its file name, number of samples, size in bytes, and the sha256 of the tar file and of its index."""

    name: Annotated[str, AfterValidator(_checked_shard_name)]
    num_samples: Annotated[PositiveInt, Field(le=MAX_SAMPLES)]
    num_bytes: Annotated[PositiveInt, Field(le=MAX_SHARD_BYTES)]
    sha256: Sha256
    index_sha256: Sha256


class LabelNames(Schema):
    """The class names of the labels `base` and `overlay`, and titles that say what they are about, such as "digit".

    `overlay` is empty without an overlay, and `base` is empty if records have no base label. The title of a label
    without classes is not used. A source supplies `title_base`, an overlay class `title_overlay`. Other labels are in
    `Manifest.more_labels`.
    """

    base: ClassNames
    overlay: ClassNames
    title_base: Line = "base"
    title_overlay: Line = "overlay"


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
    counts: ClassCounts
    given_by: Literal["source", "overlay"] = "source"


class BatchEntry(Schema):
    """The pictures of a batch, if an overlay that is drawn at each reading changes their shape.

    Attributes:
        shape: (C, H, W) of a picture with the overlay.
        mean, std: for each channel, in [0, 1], of the first samples with one draw of the overlay.
    """

    shape: tuple[PositiveInt, PositiveInt, PositiveInt]
    mean: Annotated[tuple[Share, ...], Field(max_length=MAX_CHANNELS)]
    std: Annotated[tuple[Share, ...], Field(max_length=MAX_CHANNELS)]

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if not self.shape[0] == len(self.mean) == len(self.std):
            raise ValueError(f"mean and std have {len(self.mean)} and {len(self.std)} numbers for {self.shape}")
        if math.prod(self.shape) > MAX_VALUES:
            raise ValueError(f"shape is {self.shape}, but an input may hold at most {MAX_VALUES} values")
        return self


class OverlayEntry(Schema):
    """The overlay of the samples, and when it is drawn.

    A `baked` overlay was drawn into the shards, once for each stored sample. An `online` overlay is drawn at each
    reading: the shards hold clean samples, and the file `OVERLAY_NAME`, which has this sha256, holds the overlay.
    `layout` is "scaled" at 32 pixels, and for sounds. `options` are those that the user may choose, with their values:
    they say how difficult the dataset is. Those of sounds hold a short hash of the background sounds too, as
    `noise_sha256`; sounds of before have no options. `batch` is there only if the overlay changes the shape of stored
    pictures.
    """

    kind: Line
    drawn: Literal["baked", "online"]
    sha256: Sha256 | None
    layout: Layout = "scaled"
    options: OptionValues = Field(default_factory=dict)
    batch: BatchEntry | None = None

    @model_serializer(mode="wrap")
    def _without_defaults(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out what is not used, so that the manifest of a dataset from before it keeps its sha256."""
        values: dict[str, Any] = handler(self)
        unused = {"layout": self.layout == "scaled", "options": not self.options, "batch": self.batch is None}
        return {name: value for name, value in values.items() if not unused.get(name, False)}


class HowMade(Schema):
    """The arguments of the `build` that made the dataset: the same arguments and source give the same bytes.

    `source_sha256` is the hash of the decoded records and labels in their order, so it identifies the input by content.
    `source_options` are those of the source that the user may choose, with their values.
    """

    dataset: Line
    source: Line
    split: Literal["train", "test"]
    seed: NonNegativeInt
    repeats: PositiveInt
    limit: PositiveInt | None
    source_sha256: str
    source_options: OptionValues = Field(default_factory=dict)

    @model_serializer(mode="wrap")
    def _without_no_options(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out `source_options` if there are none, so that the manifest of such a dataset keeps its bytes."""
        values: dict[str, Any] = handler(self)
        return values if self.source_options else {name: values[name] for name in values if name != "source_options"}


class TarSet(Schema):
    """Somebody else's tars, which stay as they are: see `data_pipeline.storage.tar_index`.

    Attributes:
        location: as it was given to `index`.
        picture_fields: the extensions that hold the picture; of several in a sample, the first of this list is read.
        label_field: the field of the label `base`; None if there is none. With more labels, each as NAME=FIELD, joined
            by commas.
        num_tars, num_bytes: how many tars there are, and their size.
        sha256: of their names, sizes and numbers of samples.
    """

    location: Line
    picture_fields: tuple[Line, ...]
    label_field: Line | None
    num_tars: PositiveInt
    num_bytes: PositiveInt
    sha256: Sha256


class ShardTableEntry(Schema):
    """The table of the shards of a dataset that has too many for a list: see `data_pipeline.storage.shard_list`.

    `num_bytes` is the size of all tars together, and `sha256` that of the file `SHARD_TABLE_NAME`.
    """

    num_shards: Annotated[PositiveInt, Field(le=MAX_SHARDS)]
    num_bytes: Annotated[PositiveInt, Field(le=1 << 62)]  # so sums of sizes are int64
    sha256: Sha256


class Manifest(Schema):
    """The content of a dataset, and how it was made.

    Attributes:
        input_shape: the shape of one stored input: (C, H, W) of a picture, (T,) of a sound. A sound is stored in its
            own length, and cropped or padded to T when it is read. `batch_shape` is that of an input in a batch.
        sample_rate: of sounds, in points a second; None for pictures.
        counts_base, counts_overlay: the number of samples of each class, in label order; `counts_overlay` is empty if
            the overlay is online.
        mean, std: over all stored values: for each channel of pictures in [0, 1], or for waveforms in [-1, 1]. A `std`
            is 0 if all values of a channel are equal.
        source_digests_sha256: of the file `SOURCE_DIGESTS_NAME`; None if the source is silence, which has no content,
            and for tars.
        tars: somebody else's tars, in place of `shards`. Their pictures are brought to `input_shape` when they are
            read. `mean` and `std` are then of some of the pictures, and samples without a label are in no count.
        more_labels: the labels beside `base` and `overlay`, by name. A sample may lack any of them. `labels` has all.
        shard_table: the table of the shards, in place of `shards`.
    """

    format_version: int
    num_samples: Annotated[PositiveInt, Field(le=MAX_SAMPLES)]
    medium: Medium
    input_shape: Annotated[tuple[PositiveInt, ...], Field(min_length=1, max_length=3)]
    sample_rate: Annotated[PositiveInt, Field(le=_MAX_SAMPLE_RATE)] | None
    label_names: LabelNames
    counts_base: ClassCounts
    counts_overlay: ClassCounts
    mean: Annotated[tuple[float, ...], Field(max_length=3)]
    std: Annotated[tuple[NonNegativeFloat, ...], Field(max_length=3)]
    overlay: OverlayEntry | None
    how_made: HowMade
    shards: Annotated[tuple[ShardEntry, ...], FailFast(), Field(max_length=MAX_LISTED_SHARDS)]
    source_digests_sha256: Sha256 | None = None
    tars: TarSet | None = None
    more_labels: Annotated[dict[LabelName, LabelEntry], Field(max_length=MAX_LABELS)] = Field(default_factory=dict)
    shard_table: ShardTableEntry | None = None

    @model_serializer(mode="wrap")
    def _without_what_it_lacks(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out `more_labels` and `shard_table` if there are none, so that other manifests keep their bytes."""
        values: dict[str, Any] = handler(self)
        lacks = {name for name in ("more_labels", "shard_table") if not getattr(self, name)}
        return {name: value for name, value in values.items() if name not in lacks}

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        for contradiction in _contradictions(self):
            raise ValueError(contradiction)
        return self

    @property
    def sha256(self) -> str:
        """Return the hash of the canonical JSON. It covers the hash of every shard, so it identifies the content."""
        fields = self.model_dump(mode="json")
        if self.tars is None:
            del fields["tars"]  # which older manifests do not have
        if self.medium == "sound" and self.overlay is not None:
            fields["overlay"].pop("options", None)  # which older manifests have in `how_made.source` only
        canonical = json.dumps(fields, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    @property
    def num_shards(self) -> int:
        """Return the number of shards, or of somebody else's tars."""
        named = self.tars or self.shard_table
        if named is None:
            return len(self.shards)
        return named.num_tars if isinstance(named, TarSet) else named.num_shards

    @property
    def num_bytes(self) -> int:
        """Return the size of all shards, or of somebody else's tars, in bytes."""
        named = self.tars or self.shard_table
        return sum(entry.num_bytes for entry in self.shards) if named is None else named.num_bytes

    @property
    def labels(self) -> dict[str, LabelEntry]:
        """Return every label that has classes, by name: `base`, `overlay`, and then the others."""
        names, entry = self.label_names, LabelEntry.model_construct
        found: dict[str, LabelEntry] = {}
        if names.base:
            found[BASE] = entry(title=names.title_base, classes=names.base, counts=self.counts_base)
        if names.overlay:
            found[OVERLAY] = entry(
                title=names.title_overlay, classes=names.overlay, counts=self.counts_overlay, given_by="overlay"
            )
        return found | self.more_labels

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

    @property
    def members(self) -> tuple[str, ...]:
        """Return the extensions of a sample's members, in their order in the tar."""
        if self.tars is not None:
            return ("picture",)
        if self.medium == "sound":
            return ("json", "wav")
        return ("json", "mask.png", "png") if self.overlay is not None and not self.is_online else ("json", "png")

    @property
    def max_member_bytes(self) -> Mapping[str, int]:
        """Return the largest size in bytes that a reader accepts for each of `members`, by extension."""
        values = math.prod(self.input_shape)
        return {
            "json": _MAX_LABEL_BYTES + _MAX_MORE_LABEL_BYTES * len(self.more_labels),
            "mask.png": 2 * values + _MAX_METADATA_BYTES,
            "png": 2 * values + _MAX_METADATA_BYTES,
            "wav": 4 * MAX_VALUES + _MAX_METADATA_BYTES,
        }


def label_fields(labels: Mapping[str, LabelEntry], *, format_version: int, title_base: str = BASE) -> dict[str, Any]:
    """Return the fields of a manifest that hold labels and their counts, and its `format_version`.

    A dataset that has only `base` and `overlay` has the fields that it had before there were others, and the format
    `format_version`. `title_base` stands in it even if records have no base label.
    """
    nothing = LabelEntry.model_construct(title=OVERLAY, classes=(), counts=())
    base, overlay = labels.get(BASE, nothing), labels.get(OVERLAY, nothing)
    more = {name: label for name, label in labels.items() if name not in (BASE, OVERLAY)}
    return {
        "format_version": LABELS_FORMAT_VERSION if more else format_version,
        "label_names": LabelNames(
            base=base.classes, overlay=overlay.classes, title_base=title_base, title_overlay=overlay.title
        ),
        "counts_base": base.counts,
        "counts_overlay": overlay.counts,
        "more_labels": more,
    }


def _contradictions(manifest: Manifest) -> Iterator[str]:
    """Yield contradictions between the fields of a manifest."""
    if manifest.tars is not None:
        yield from _wrong_tars(manifest, manifest.tars)
    else:
        yield from _wrong_shards(manifest)
    yield from _wrong_inputs(manifest)
    yield from _wrong_labels(manifest)


def _wrong_tars(manifest: Manifest, tars: TarSet) -> Iterator[str]:
    if manifest.shards or manifest.shard_table is not None:
        yield f"tars are named beside {manifest.shard_table or len(manifest.shards)} shards"
    if manifest.medium != "picture" or not (manifest.overlay is None or manifest.is_online):
        yield "tars hold pictures, on which an overlay can be drawn only when they are read"
    if manifest.num_samples * MIN_MEMBER_BYTES > tars.num_bytes:
        yield f"{manifest.num_samples} samples cannot be in {tars.num_bytes} bytes of tars"


def _wrong_shards(manifest: Manifest) -> Iterator[str]:
    if (table := manifest.shard_table) is not None:
        if manifest.shards:
            yield f"a table of {table.num_shards} shards is named beside a list of {len(manifest.shards)}"
        if manifest.num_samples < table.num_shards:
            yield f"{manifest.num_samples} samples cannot be in {table.num_shards} shards"
        if manifest.num_samples * len(manifest.members) * MIN_MEMBER_BYTES > table.num_bytes:
            yield f"{manifest.num_samples} samples cannot be in {table.num_bytes} bytes of shards"
        return
    if not manifest.shards:
        yield "no shards are named"
    for name, count in Counter(entry.name for entry in manifest.shards).items():
        if count > 1:
            yield f"the shard {name} is named {count} times"
    if manifest.num_samples != (found := sum(entry.num_samples for entry in manifest.shards)):
        yield f"num_samples is {manifest.num_samples}, but its shards add up to {found}"
    for entry in manifest.shards:
        if entry.num_samples * len(manifest.members) * MIN_MEMBER_BYTES > entry.num_bytes:
            yield f"{entry.num_samples} samples cannot be in the {entry.num_bytes} bytes of {entry.name}"


def _wrong_inputs(manifest: Manifest) -> Iterator[str]:
    shape, num_channels = manifest.input_shape, 1
    if manifest.medium == "picture":
        if len(shape) != 3 or shape[0] not in (1, 3):
            yield f"input_shape is {shape}, but pictures have (1, H, W) or (3, H, W)"
            return
        num_channels, height, width = shape
        num_bytes = manifest.num_bytes
        if (
            manifest.tars is None
            and manifest.num_samples * height * (1 + width * num_channels) > _MAX_DEFLATE_RATIO * num_bytes
        ):
            yield f"{manifest.num_samples} pictures of {shape} cannot be in {num_bytes} bytes"
    elif len(shape) != 1:
        yield f"input_shape is {shape}, but sounds have (T,)"
    if math.prod(shape) > MAX_VALUES:
        yield f"input_shape is {shape}, but an input may hold at most {MAX_VALUES} values"
    if (manifest.medium == "sound") != (manifest.sample_rate is not None):
        yield f"sample_rate is {manifest.sample_rate} for a dataset of {manifest.medium}s"
    for name, values in (("mean", manifest.mean), ("std", manifest.std)):
        if len(values) != num_channels:
            yield f"{name} has {len(values)} numbers for {num_channels} channels"
        if manifest.medium == "picture" and not all(0 <= value <= 1 for value in values):
            yield f"{name} is {values}, but for pictures it is from 0 to 1"


def _wrong_labels(manifest: Manifest) -> Iterator[str]:
    overlay, names = manifest.overlay, manifest.label_names
    if (overlay is not None) != bool(names.overlay):
        yield f"label_names.overlay is {names.overlay[:3]}, but overlay is {overlay}"
    if overlay is not None and (overlay.drawn == "online") != (overlay.sha256 is not None):
        yield f"overlay.drawn is {overlay.drawn}, but overlay.sha256 is {overlay.sha256}"
    if overlay is not None and overlay.batch is not None and (overlay.drawn, manifest.medium) != ("online", "picture"):
        yield f"overlay.batch is {overlay.batch.shape}, but only an online overlay of pictures changes their shape"
    stored = () if manifest.is_online else names.overlay
    for field, counts, classes in (
        ("counts_base", manifest.counts_base, names.base),
        ("counts_overlay", manifest.counts_overlay, stored),
    ):
        if len(counts) != len(classes):
            yield f"{field} has {len(counts)} numbers for {len(classes)} classes"
        elif (
            counts
            and sum(counts) != manifest.num_samples
            and (manifest.tars is None or sum(counts) > manifest.num_samples)
        ):
            yield f"{field} adds up to {sum(counts)}, but num_samples is {manifest.num_samples}"
    for name, label in manifest.more_labels.items():
        if name in (BASE, OVERLAY):
            yield f"more_labels names {name}, which stands in label_names"
        is_stored = label.given_by == "source" or not manifest.is_online
        if len(label.counts) != (len(label.classes) if is_stored else 0):
            yield f"more_labels.{name}.counts has {len(label.counts)} numbers for {len(label.classes)} classes"
        if sum(label.counts) > manifest.num_samples:
            yield (
                f"more_labels.{name}.counts adds up to {sum(label.counts)}, but num_samples is {manifest.num_samples}"
            )
        if label.given_by == "overlay" and overlay is None:
            yield f"more_labels.{name} is given by an overlay, but overlay is None"


def dataset_directory(location: str | Path) -> Path:
    """Return the directory that holds the manifest of a local dataset.

    That is `location` itself, or the index of the tars that `location` names (see `index_directory`) if there is one.
    """
    path = with_home(location)
    try:
        if not (path / MANIFEST_NAME).is_file() and ((index := index_directory(path)) / MANIFEST_NAME).is_file():
            return index
    except OSError:  # a directory that may not be entered
        pass
    return path


def index_directory(location: str | Path) -> Path:
    """Return the directory of the index of a location of tars, unless another is named: beside the tars.

    It has the name of the location in letters and digits. If other locations could have the same, it ends in a hash of
    the name, unless it is an index from before there were hashes.
    """
    path = with_home(location).absolute()
    if path.is_dir():
        return path / INDEX_NAME
    words = re.sub(r"[^A-Za-z0-9]+", "-", path.name).strip("-")
    plain = path.parent / f"{INDEX_NAME}-{words}"
    is_own = re.fullmatch(r"[A-Za-z0-9]+(-[A-Za-z0-9]+)*\.[A-Za-z0-9]+", path.name) is not None
    if (plain / MANIFEST_NAME).is_file():
        is_own = _is_index_of(plain, path)
    if is_own:
        return plain
    digest = hashlib.sha256(os.fsencode(path.name)).hexdigest()[:8]
    return path.parent / f"{INDEX_NAME}-{words[:_MAX_WORDS]}-{digest}"


def _is_index_of(index: Path, location: Path) -> bool:
    """Return whether an index was made for a location of this name, or has its tars; True if it cannot be read."""
    try:
        made_for = pydantic_core.from_json(read_regular(index / MANIFEST_NAME, max_bytes=MAX_MANIFEST_BYTES))
        name = Path(made_for["tars"]["location"]).name
    except (OSError, ValueError, TypeError, KeyError):
        return True
    return name == location.name or list_difference(index, location) is None


def names_tars(location: str | Path) -> bool:
    """Return whether a location seems to name tars and no dataset: by their ending, or a directory that holds some.

    Shards that `build` has not finished are a dataset: indexes lie beside them.
    """
    path = with_home(location)
    if path.is_dir():
        is_built = (path / MANIFEST_NAME).exists() or any(path.glob("*.index")) or any(path.glob(".shard-*"))
        return not is_built and any(tars_in(path))
    return is_tars(path.name) or (path.suffix in _LISTS and path.is_file())


def load_manifest(directory: Path) -> Manifest:
    """Read `directory/manifest.json`. Raises `UserError` if it is missing, cannot be read or is not a manifest."""
    directory = dataset_directory(directory)
    path = directory / MANIFEST_NAME
    try:
        if names_tars(directory):
            raise UserError(f"{directory} names tars without an index; run `python -m data_pipeline index {directory}`")
        if not directory.is_dir():
            raise UserError(
                f"{directory} does not exist; build it with `python -m data_pipeline build DATASET --out {directory}`"
            )
        if not path.is_file():
            raise UserError(
                f"{directory} holds no {MANIFEST_NAME}, so it is not a finished dataset; "
                f"build it with `python -m data_pipeline build DATASET --out {directory}`"
            )
        content = read_regular(path, max_bytes=MAX_MANIFEST_BYTES)
    except OSError as error:
        raise UserError(
            f"{path} cannot be read ({error.strerror}); make it readable, or choose another dataset"
        ) from None
    return parse_manifest(content, where=str(path))


def parse_manifest(text: str | bytes, *, where: str) -> Manifest:
    """Return a manifest from its JSON.

    Raises `UserError` that names `where` if it is not a manifest, has another format, or contradicts itself.
    """
    try:
        value = pydantic_core.from_json(text)  # unlike json.loads, it limits the depth
    except ValueError as error:
        raise UserError(f"{where} is not valid JSON ({error}); {_MEND}") from None
    if not isinstance(value, dict) or value.get("format_version") not in _READABLE:
        raise UserError(f"{where} does not have format version {FORMAT_VERSION}; build the dataset again")
    try:
        return Manifest.parse(value, where=where)
    except UserError as error:
        raise UserError(f"{error}; {_MEND}") from None
