"""Open the source and the overlay of a dataset such as `cifar10_digits` or `spoken_noise`."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TypedDict, Unpack, cast

import numpy as np

from data_pipeline.audio.log_mel import mel_config
from data_pipeline.building.datasets import (
    DIGITS,
    DRAWN_IN_ANY_SIZE,
    GENERATED,
    NOISE_CROPS,
    NOISE_VOLUME,
    OVERLAY_LAYOUTS,
    PICTURES,
    SOURCES,
    SPLITS,
    Dataset,
    datasets_with,
)
from data_pipeline.core.errors import UserError, nearest
from data_pipeline.core.options import (
    SOURCE_OPTION,
    NoOptions,
    Options,
    OptionValue,
    parse_options,
)
from data_pipeline.core.sample import NO_LABEL, OVERLAY, Layout
from data_pipeline.core.schema import Schema
from data_pipeline.overlays import NOTHING_GIVEN, Overlay, OverlayInputs, PictureOverlay, PixelOverlay, Shape
from data_pipeline.overlays.noise import Crop, Noise
from data_pipeline.overlays.registry import NAMES as OVERLAY_NAMES
from data_pipeline.overlays.registry import OVERLAYS, find_overlay
from data_pipeline.sources import (
    PictureSource,
    SoundSource,
    Source,
    SourceInputs,
    background,
    fsdd,
    labels_of,
    procedural_speech,
)
from data_pipeline.sources.audiomnist import AudioMnist
from data_pipeline.sources.digits import DigitSource, MnistKind, mnist_digits, sklearn_digits
from data_pipeline.sources.folder import ImageFolder
from data_pipeline.sources.fsdd import Fsdd
from data_pipeline.sources.picture_table import PictureTable
from data_pipeline.sources.procedural_speech import ProceduralSpeech
from data_pipeline.sources.registry import NAMES as SOURCE_NAMES
from data_pipeline.sources.registry import find_source
from data_pipeline.sources.silence import SilenceSource
from data_pipeline.storage.manifest import LabelEntry

DATASETS = datasets_with([name for name in OVERLAYS if issubclass(find_overlay(name), PixelOverlay)])
# The dataset `noise` has as many records, at the same sample rate, as its source has of speech.
_SAMPLE_RATES: Mapping[str, int] = MappingProxyType(
    {"audiomnist": AudioMnist.sample_rate, "fsdd": Fsdd.sample_rate, "procedural": procedural_speech.SAMPLE_RATE}
)
_NUM_SPOKEN_RECORDS: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        "audiomnist": MappingProxyType({"train": 24_000, "test": 6_000}),
        "fsdd": MappingProxyType({"train": 2_500, "test": 500}),
        "procedural": procedural_speech.DEFAULT_NUM_RECORDS,
    }
)


class Choices(TypedDict, total=False):
    """The optional settings of a dataset. A missing setting or `None` stands for the default.

    source: where the data comes from, one of `SOURCES` for the base; by default the first.
    root: the folder of the source's files.
    image_size: for the source `folder`: width and height in pixels to which each picture is brought. By default, all
        pictures must have one size. For `placed_digits` and `trifeature`: width and height of what is drawn.
    test_share: for the source `folder`, if `root` has no folders `train` and `test`: the share of the pictures in the
        test split, which `seed` draws.
    labels: for the source `folder`: a csv file with a column `file` and one for each label, in place of class folders.
    overlay_layout: for pictures with an overlay, one of `OVERLAY_LAYOUTS`; by default the first.
    digits: the digits to draw, one of `DIGITS`; by default `sklearn` for procedural pictures and `mnist` for others.
    digits_root: the folder of MNIST; by default `root`.
    noise_root: the folder of the background sounds; by default `root`. The source `procedural` generates its own.
    noise_volume: the largest magnitude of each whole background sound, where 1 is full scale; by default
        `NOISE_VOLUME`.
    noise_crop: the part of a background sound that is heard in training, one of `NOISE_CROPS`; by default the first.
    test_speaker: for the source `fsdd`: the speaker of the test split.
    overlay_options, source_options: the options of the overlay and of the source, by name. A value may be a number or
        its text. See the class of each for the options that it has.
    """

    source: str | None
    root: Path | None
    image_size: int | None
    test_share: float | None
    labels: Path | None
    overlay_layout: str | None
    digits: str | None
    digits_root: Path | None
    noise_root: Path | None
    noise_volume: float | None
    noise_crop: str | None
    test_speaker: str | None
    overlay_options: Options | None
    source_options: Options | None


@dataclass(frozen=True)
class Ingredients:
    """The opened source and overlay of a dataset.

    `description` becomes `how_made.source` in the manifest, and `source_options` stand beside it. `overlay_options` are
    those of the overlay's entry. `sample_rate` is in points a second, `num_points` is the length of a waveform in a
    batch; both are None for pictures.
    """

    source: Source
    overlay: Overlay | None
    description: str
    sample_rate: int | None
    num_points: int | None
    source_options: Mapping[str, OptionValue] = field(default_factory=dict)
    overlay_options: Mapping[str, OptionValue] = field(default_factory=dict)


def open_dataset(
    dataset: str, *, split: str = "train", seed: int = 0, limit: int | None = None, **choices: Unpack[Choices]
) -> Ingredients:
    """Open the source and the overlay of a dataset.

    A source that generates its records makes `limit` of them; other sources ignore it. Raises `UserError` if a name is
    unknown, a choice does not fit the dataset, or the data is missing.
    """
    if (found := find_dataset(dataset)) is None:
        raise UserError(f'unknown dataset "{dataset}"{nearest(dataset, DATASETS)}')
    if split not in SPLITS:
        raise UserError(f'unknown split "{split}"{nearest(split, SPLITS)}')
    base, overlay = found.base, found.overlay
    name = choices.get("source") or SOURCES[base][0]
    if name not in SOURCES[base] and not (base in PICTURES and _is_own_source(name)):
        raise UserError(f'{dataset} cannot come from the source "{name}"{nearest(name, SOURCES[base])}')
    _check_choices(dataset, base, overlay, name, choices)
    if base in ("spoken", "silence"):
        return _open_sounds(base, overlay, name, split=split, seed=seed, limit=limit, choices=choices)
    return _open_pictures(base, overlay, name, split=split, seed=seed, limit=limit, choices=choices)


def find_dataset(name: str) -> Dataset | None:
    """Return the dataset of a name; None if there is none.

    Besides `DATASETS`, these are the bases of pictures with an overlay of other code, such as `procedural_stripes`.
    """
    if name in DATASETS:
        return DATASETS[name]
    for base in PICTURES:
        overlay = name.removeprefix(f"{base}_")
        if overlay != name and overlay in OVERLAY_NAMES.names():
            return Dataset(base, overlay, f"{PICTURES[base]} with {overlay} on each")
    return None


def _is_own_source(name: str) -> bool:
    """Return whether a source of pictures is of other code."""
    return name not in SOURCE_NAMES.built_in and name in SOURCE_NAMES.names()


def _picture_overlay(name: str) -> type[PixelOverlay]:
    """Return the class of an overlay of pictures."""
    found = find_overlay(name)
    if not issubclass(found, PixelOverlay):
        raise UserError(f"{name} is no overlay of pictures; name a subclass of data_pipeline.overlays.PictureOverlay")
    return found


def needs_digits(overlay: str | None) -> bool:
    """Return whether an overlay draws digits, which the user chooses by `--digits`."""
    if overlay is None or overlay not in OVERLAY_NAMES.names():
        return False
    found = find_overlay(overlay)
    return issubclass(found, PixelOverlay) and found.needs_digits


def _check_choices(dataset: str, base: str, overlay: str | None, source: str, choices: Choices) -> None:
    """Raise `UserError` if a choice is for another kind of dataset or source."""
    for fits, what, names in (
        (overlay not in (None, "noise"), "has no overlay of pictures", ("overlay_layout", "overlay_options")),
        (needs_digits(overlay), "has no digits", ("digits", "digits_root")),
        (base in PICTURES and choices.get("labels") is None, "has no source with options", ("source_options",)),
        (overlay == "noise", "has no background sounds", ("noise_root", "noise_volume", "noise_crop")),
        (source == "folder", "does not come from a folder of pictures", ("labels",)),
        (
            source in ("folder", *DRAWN_IN_ANY_SIZE) or _is_own_source(source),
            "does not come from a folder of pictures",
            ("image_size",),
        ),
        (
            source == "folder" or _is_own_source(source),
            "does not come from a folder of pictures",
            ("test_share",),
        ),
        (base == "spoken" and source == "fsdd", "does not come from fsdd", ("test_speaker",)),
    ):
        wrong = [name for name in names if choices.get(name) not in (None, {})]
        if wrong and not fits:
            option = wrong[0].replace("_", "-").replace("options", "option")
            raise UserError(f"{dataset} {what}, so it takes no --{option}; leave it out")
    if source in GENERATED and choices.get("root") is not None:
        raise UserError(f"{source} data is generated, not read from {choices['root']}; leave --root out")


def _open_pictures(
    base: str, overlay: str | None, source: str, *, split: str, seed: int, limit: int | None, choices: Choices
) -> Ingredients:
    root, source_class = choices.get("root"), find_source(source)
    if root is None and getattr(source_class, "needs_root", False):
        raise UserError(f"the source {source} reads pictures from a folder; name it with --root")
    image_size = choices.get("image_size")
    source_options = _source_options(source, source_class, choices.get("source_options") or {})
    opened: Source
    if root is not None and choices.get("labels") is not None:
        opened = open_folder(root, split=split, seed=seed, image_size=image_size, choices=choices)
    else:
        opened = source_class.open(
            SourceInputs(
                base=base,
                root=root,
                split=split,
                seed=seed,
                limit=limit,
                image_size=image_size,
                test_share=choices.get("test_share"),
                options=source_options,
            )
        )
    description = opened.description
    drawn: PixelOverlay | None = None
    if overlay is not None:
        draws_digits = needs_digits(overlay)
        drawn = open_picture_overlay(
            overlay,
            shape=_shape_of(opened),
            split=split,
            seed=seed,
            layout=choices.get("overlay_layout"),
            digits=choices.get("digits") or ("sklearn" if base == "procedural" and draws_digits else None),
            digits_root=(choices.get("digits_root") or root) if draws_digits else None,
            pictures="these pictures" if root is None else f"the pictures in {root}",
            class_counts=_class_counts(opened),
            options=choices.get("overlay_options") or {},
        )
        description = f"{description}{drawn.made_from}"
    return Ingredients(
        opened,
        drawn,
        description,
        sample_rate=None,
        num_points=None,
        source_options=source_options,
        overlay_options=dict(drawn.chosen) if drawn is not None else {},
    )


def _source_options(name: str, source_class: type[PictureSource], given: Options) -> dict[str, OptionValue]:
    """Return the options of a source with their values. Raises `UserError` if one is unknown or wrong."""
    schema = getattr(source_class, "options_schema", NoOptions)
    options: Schema = parse_options(schema, given, owner=f"the source {name}", flag=SOURCE_OPTION)
    return options.model_dump()


def _shape_of(source: Source) -> Shape:
    """Return channels, height and width of the pictures of a source, which are all of one shape."""
    height, width, num_channels = source[0].content.shape
    return num_channels, height, width


def _class_counts(source: Source) -> dict[str, tuple[int, ...]]:
    """Return for each label of a source the number of records of each class."""
    return {
        name: tuple(np.bincount(column.label_N[column.label_N != NO_LABEL], minlength=len(column.classes)).tolist())
        for name, column in labels_of(source).items()
    }


def open_picture_overlay(
    kind: str,
    *,
    shape: Shape,
    split: str,
    seed: int = 0,
    layout: str | None = None,
    digits: str | None = None,
    digits_root: Path | None = None,
    pictures: str = "these pictures",
    class_counts: Mapping[str, tuple[int, ...]] = NOTHING_GIVEN,
    options: Options = NOTHING_GIVEN,
) -> PixelOverlay:
    """Open an overlay of pictures of `shape`. The other arguments mean the same as in `OverlayInputs` and `Choices`.

    None stands for the default layout, and for `mnist`. Raises `UserError` if a name or an option is unknown, if the
    digits are missing, or if the overlay cannot be drawn on such pictures.
    """
    if kind not in OVERLAY_NAMES.names():
        raise UserError(f'unknown overlay "{kind}"{nearest(kind, OVERLAY_NAMES.names())}')
    overlay = _picture_overlay(kind)
    if split not in SPLITS:
        raise UserError(f'unknown split "{split}"{nearest(split, SPLITS)}')
    if layout is not None and layout not in OVERLAY_LAYOUTS:
        raise UserError(f'unknown --overlay-layout "{layout}"{nearest(layout, OVERLAY_LAYOUTS)}')
    if layout is not None and not issubclass(overlay, PictureOverlay):
        raise UserError(f"the overlay {kind} has one layout, so it takes no --overlay-layout; leave it out")
    if not overlay.needs_digits and (digits is not None or digits_root is not None):
        raise UserError(f"the overlay {kind} has no digits, so it takes no --digits; leave it out")
    given = OverlayInputs(
        kind=kind,
        shape=shape,
        split=split,
        pictures=pictures,
        seed=seed,
        layout=cast(Layout, layout or OVERLAY_LAYOUTS[0]),
        read_digits=partial(_open_digits, digits or DIGITS[0], digits_root),
        class_counts=class_counts,
        options=options,
    )
    given.read(overlay.options_schema)  # also for an overlay that forgets to
    return overlay.open(given)


def open_folder(
    root: Path, *, split: str, seed: int, image_size: int | None, choices: Choices
) -> ImageFolder | PictureTable:
    """Open a folder of pictures, whose labels are in the table `choices["labels"]` or are its class folders."""
    test_share, table = choices.get("test_share"), choices.get("labels")
    if table is None:
        return ImageFolder(root, split=split, image_size=image_size, test_share=test_share, seed=seed)
    return PictureTable(root, table, split=split, image_size=image_size, test_share=test_share, seed=seed)


def labels_of_overlay(overlay: Overlay) -> dict[str, LabelEntry]:
    """Return every label that an overlay gives, by name, without counts."""
    classes = {OVERLAY: (overlay.title, overlay.class_names)}
    classes |= {name: (label.title, label.classes) for name, label in overlay.more_labels.items()}
    return {
        name: LabelEntry(title=title, classes=names, given_by="overlay") for name, (title, names) in classes.items()
    }


def _open_digits(kind: str, root: Path | None, split: str) -> DigitSource:
    if kind not in DIGITS:
        raise UserError(f'unknown digits "{kind}"{nearest(kind, DIGITS)}')
    if kind == "sklearn":
        return sklearn_digits(split=split)
    if root is None:
        raise UserError(
            "the digits of MNIST are read from a folder; name it with --digits-root, or choose --digits sklearn"
        )
    return mnist_digits(root, split=split, kind=cast(MnistKind, kind))


def _open_sounds(
    base: str, overlay: str | None, source: str, *, split: str, seed: int, limit: int | None, choices: Choices
) -> Ingredients:
    opened: SoundSource
    root = choices.get("root")
    if base == "silence":
        opened = SilenceSource(limit or _NUM_SPOKEN_RECORDS[source][split], sample_rate=_SAMPLE_RATES[source])
    elif source == "procedural":
        opened = ProceduralSpeech(seed, split, limit or _NUM_SPOKEN_RECORDS[source][split])
    elif root is None:
        raise UserError(f"the source {source} reads sounds from a folder; name it with --root")
    elif source == "audiomnist":
        opened = AudioMnist(root, split=split)
    else:
        test_speaker = choices.get("test_speaker") or fsdd.DEFAULT_TEST_SPEAKER
        opened = Fsdd(root, split=split, test_speaker=test_speaker)
    num_points = mel_config(opened.sample_rate).num_points
    if overlay != "noise":
        return Ingredients(opened, None, opened.description, sample_rate=opened.sample_rate, num_points=num_points)
    noise, origin, options = _open_noise(source, opened.sample_rate, num_points, split=split, choices=choices)
    made_from = f"{origin} ({options['noise_sha256']}), volume {noise.volume}, crop {noise.crop}"
    return Ingredients(
        opened,
        noise,
        f"{opened.description} + {made_from}",
        sample_rate=opened.sample_rate,
        num_points=num_points,
        overlay_options=options,
    )


def _open_noise(
    source: str, sample_rate: int, num_points: int, *, split: str, choices: Choices
) -> tuple[Noise, str, dict[str, OptionValue]]:
    """Return the overlay of background sounds, what they are called, and its options with a short hash of the sounds.

    Options are named as the flags are: `noise_volume` is `--noise-volume`.
    """
    crop = choices.get("noise_crop") or NOISE_CROPS[0]
    if crop not in NOISE_CROPS:
        raise UserError(f'unknown crop "{crop}"{nearest(crop, NOISE_CROPS)}')
    volume = NOISE_VOLUME if (given := choices.get("noise_volume")) is None else given
    root = choices.get("noise_root") or choices.get("root")
    origin = "background sounds"
    if root is not None:
        sounds = background.read_sounds(root, sample_rate=sample_rate, num_points=num_points)
    elif source == "procedural":
        origin = "procedural background sounds"
        # Always seed 0: as with recordings, every build has the same sounds, and its seed draws the parts of them.
        sounds = background.procedural_sounds(0, sample_rate=sample_rate, num_points=num_points)
    else:
        raise UserError("the background sounds are read from a folder; name it with --noise-root")
    used = "first" if split == "test" else cast(Crop, crop)
    digest = hashlib.sha256(b"".join(sound.numpy().tobytes() for sound in sounds)).hexdigest()
    noise = Noise.of(sounds, num_points=num_points, volume=volume, crop=used)
    return noise, origin, {"noise_volume": volume, "noise_crop": used, "noise_sha256": digest[:12]}
