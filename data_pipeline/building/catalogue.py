"""Open the source and the overlay of a dataset such as `cifar10_digits` or `spoken_noise`."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TypedDict, Unpack, cast

from data_pipeline.audio.log_mel import mel_config
from data_pipeline.building.datasets import (
    DIGITS,
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
from data_pipeline.core.imports import find_in_working_directory, import_object
from data_pipeline.core.sample import OVERLAY, Layout
from data_pipeline.overlays import IMAGE_SIZE, Overlay, PictureOverlay
from data_pipeline.overlays.digits import Digits
from data_pipeline.overlays.noise import Crop, Noise
from data_pipeline.overlays.registry import NAMES as OVERLAY_NAMES
from data_pipeline.overlays.registry import OVERLAYS, find_overlay
from data_pipeline.sources import SoundSource, Source, SourceInputs, background, fsdd, procedural_speech
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

DATASETS = datasets_with([name for name in OVERLAYS if issubclass(find_overlay(name), PictureOverlay)])
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
        pictures must have one size.
    test_share: for the source `folder`, if `root` has no folders `train` and `test`: the share of the pictures in the
        test split, which `seed` draws.
    labels: for the source `folder`: a csv file with a column `file` and one for each label, in place of class folders.
    overlay_layout: for pictures with an overlay, one of `OVERLAY_LAYOUTS`; by default the first.
    digits: the digits to draw, one of `DIGITS`; by default `sklearn` for procedural pictures and `mnist` for others.
    digits_root: the folder of MNIST; by default `root`.
    noise_root: the folder of the background sounds; by default `root`. The source `procedural` generates its own.
    noise_volume: the largest magnitude of each background sound, where 1 is full scale; by default `NOISE_VOLUME`.
    noise_crop: the part of a background sound that is heard in training, one of `NOISE_CROPS`; by default the first.
    test_speaker: for the source `fsdd`: the speaker of the test split.
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


@dataclass(frozen=True)
class Ingredients:
    """The opened source and overlay of a dataset.

    `description` becomes `how_made.source` in the manifest. `sample_rate` is in points a second, `num_points` is the
    length of a waveform in a batch; both are None for pictures.
    """

    source: Source
    overlay: Overlay | None
    description: str
    sample_rate: int | None
    num_points: int | None


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

    Besides `DATASETS`, these are the bases of pictures with an overlay of another package, by its name or import path:
    `procedural_stripes`, or `procedural_my_package.overlays:Stripes`.
    """
    if name in DATASETS:
        return DATASETS[name]
    for base in PICTURES:
        overlay = name.removeprefix(f"{base}_")
        if overlay != name and (":" in overlay or overlay in OVERLAY_NAMES.names()):
            return Dataset(base, overlay, f"{PICTURES[base]} with {overlay} on each")
    return None


def _is_own_source(name: str) -> bool:
    """Return whether a source of pictures is of another package."""
    return ":" in name or (name not in SOURCE_NAMES.built_in and name in SOURCE_NAMES.names())


def _picture_overlay(name: str) -> type[PictureOverlay]:
    """Return the class of an overlay of pictures. Imports the module of an import path, which the user has typed."""
    if ":" in name:
        find_in_working_directory()
        import_object(name)
    found = find_overlay(name)
    if not issubclass(found, PictureOverlay):
        raise UserError(f"{name} is no overlay of pictures; name a subclass of data_pipeline.overlays.PictureOverlay")
    return found


def _check_choices(dataset: str, base: str, overlay: str | None, source: str, choices: Choices) -> None:
    """Raise `UserError` if a choice is for another kind of dataset or source."""
    for fits, what, names in (
        (overlay not in (None, "noise"), "has no overlay of pictures", ("overlay_layout",)),
        (overlay == "digits", "has no digits", ("digits", "digits_root")),
        (overlay == "noise", "has no background sounds", ("noise_root", "noise_volume", "noise_crop")),
        (source == "folder", "does not come from a folder of pictures", ("labels",)),
        (
            source == "folder" or _is_own_source(source),
            "does not come from a folder of pictures",
            ("image_size", "test_share"),
        ),
        (base == "spoken" and source == "fsdd", "does not come from fsdd", ("test_speaker",)),
    ):
        wrong = [name for name in names if choices.get(name) is not None]
        if wrong and not fits:
            option = wrong[0].replace("_", "-")
            raise UserError(f"{dataset} {what}, so it takes no --{option}; leave it out")
    if source == "procedural" and choices.get("root") is not None:
        raise UserError(f"procedural data is generated, not read from {choices['root']}; leave --root out")


def _open_pictures(
    base: str, overlay: str | None, source: str, *, split: str, seed: int, limit: int | None, choices: Choices
) -> Ingredients:
    root, source_class = choices.get("root"), find_source(source)
    if root is None and getattr(source_class, "needs_root", False):
        raise UserError(f"the source {source} reads pictures from a folder; name it with --root")
    image_size = choices.get("image_size")
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
            )
        )
    description = opened.description
    drawn: Overlay | None = None
    if overlay is not None:
        drawn, digits = open_picture_overlay(
            overlay,
            image_size=_size_to_draw_on(opened, root),
            split=split,
            layout=choices.get("overlay_layout"),
            digits=choices.get("digits") or ("sklearn" if (base, overlay) == ("procedural", "digits") else None),
            digits_root=(choices.get("digits_root") or root) if overlay == "digits" else None,
        )
        description = f"{description}{digits}"
    return Ingredients(opened, drawn, description, sample_rate=None, num_points=None)


def open_picture_overlay(
    kind: str,
    *,
    image_size: int,
    split: str,
    layout: str | None = None,
    digits: str | None = None,
    digits_root: Path | None = None,
) -> tuple[PictureOverlay, str]:
    """Open an overlay of pictures of `image_size` pixels. Return it, and what to add to the manifest's source.

    None stands for the default layout, and for `mnist`. Raises `UserError` if a name is unknown, if the digits are
    missing, or if the pictures are too small.
    """
    if ":" not in kind and kind not in OVERLAY_NAMES.names():
        raise UserError(f'unknown overlay "{kind}"{nearest(kind, OVERLAY_NAMES.names())}')
    overlay = _picture_overlay(kind)
    if split not in SPLITS:
        raise UserError(f'unknown split "{split}"{nearest(split, SPLITS)}')
    if image_size < IMAGE_SIZE:
        raise UserError(
            f"overlays are drawn on pictures of {IMAGE_SIZE}x{IMAGE_SIZE} pixels or more, not of "
            f"{image_size}x{image_size}; give a larger size"
        )
    layout = layout or OVERLAY_LAYOUTS[0]
    if layout not in OVERLAY_LAYOUTS:
        raise UserError(f'unknown --overlay-layout "{layout}"{nearest(layout, OVERLAY_LAYOUTS)}')
    if kind == "digits":
        source = _open_digits(digits or DIGITS[0], digits_root, split=split)
        return Digits.of(source, image_size=image_size, layout=cast(Layout, layout)), f" + {source.description}"
    if digits is not None or digits_root is not None:
        raise UserError(f"the overlay {kind} has no digits, so it takes no --digits; leave it out")
    return overlay(image_size=image_size, layout=cast(Layout, layout)), ""


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
        name: LabelEntry(title=title, classes=names, counts=(), given_by="overlay")
        for name, (title, names) in classes.items()
    }


def _size_to_draw_on(source: Source, root: Path | None) -> int:
    """Return the height and width of the pictures; raise `UserError` unless overlays can be drawn on them."""
    height, width = source[0].content.shape[:2]
    if height != width or height < IMAGE_SIZE:
        raise UserError(
            f"overlays are drawn on square pictures of {IMAGE_SIZE}x{IMAGE_SIZE} pixels or more, but the pictures in "
            f"{root} have {width}x{height}; give --image-size {max(IMAGE_SIZE, min(height, width))}"
        )
    return int(height)


def _open_digits(kind: str, root: Path | None, *, split: str) -> DigitSource:
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
    description, heard = opened.description, None
    if overlay == "noise":
        noise, heard = _open_noise(source, opened.sample_rate, num_points, split=split, choices=choices)
        description = f"{description} + {noise}"
    return Ingredients(opened, heard, description, sample_rate=opened.sample_rate, num_points=num_points)


def _open_noise(source: str, sample_rate: int, num_points: int, *, split: str, choices: Choices) -> tuple[str, Noise]:
    """Return a description of the background sounds for the manifest, and their overlay."""
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
    description = f"{origin} ({digest[:12]}), volume {volume}, crop {used}"
    return description, Noise.of(sounds, num_points=num_points, volume=volume, crop=used)
