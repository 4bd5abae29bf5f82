"""Open the source and the overlay of a dataset such as `cifar10_digits` or `spoken_noise`.

Each source and each overlay has its own options, a `Schema`, which is all that a user may choose of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from data_pipeline.building.datasets import DATASETS, PICTURES, SOURCES, datasets_with
from data_pipeline.core.errors import UserError, nearest
from data_pipeline.core.options import (
    OVERLAY_OPTION,
    Options,
    OptionValue,
)
from data_pipeline.core.sample import NO_LABEL, OVERLAY
from data_pipeline.core.schema import Schema
from data_pipeline.overlays import NOTHING_GIVEN, Overlay, OverlayInputs, PixelOverlay
from data_pipeline.overlays.noise import Noise, NoiseOptions
from data_pipeline.overlays.registry import NAMES as OVERLAY_NAMES
from data_pipeline.overlays.registry import find_overlay
from data_pipeline.sources import (
    SoundSource,
    Source,
    SourceInputs,
    SourceKind,
    background,
    first_record,
)
from data_pipeline.sources.procedural_speech import ProceduralSpeech
from data_pipeline.sources.registry import NAMES as SOURCE_NAMES
from data_pipeline.sources.silence import SPEECH, SilenceSource
from data_pipeline.sources.sound_folder import SoundFolder
from data_pipeline.sources.spoken_digits import AudioMnist, Fsdd
from data_pipeline.storage.manifest import LabelEntry

_SOUND_SOURCES: Final[Mapping[str, type[AudioMnist | Fsdd | ProceduralSpeech | SoundFolder]]] = {
    "audiomnist": AudioMnist,
    "fsdd": Fsdd,
    "procedural": ProceduralSpeech,
    "sound_folder": SoundFolder,
}


@dataclass(frozen=True)
class Ingredients:
    """The opened source and overlay of a dataset.

    `description` becomes `how_made.source` in the manifest, and `source_options` stand beside it. The overlay's entry
    holds `overlay_options`. A `SoundSource` gives `sample_rate` and `num_points`; for pictures they are None.
    """

    source: Source
    overlay: Overlay | None
    description: str
    source_options: Mapping[str, OptionValue] = field(default_factory=dict)
    overlay_options: Mapping[str, OptionValue] = field(default_factory=dict)
    sample_rate: int | None = None
    num_points: int | None = None


def open_dataset(
    dataset: str,
    *,
    split: str = "train",
    seed: int = 0,
    limit: int | None = None,
    source: str | None = None,
    root: Path | None = None,
    source_options: Options = NOTHING_GIVEN,
    overlay_options: Options = NOTHING_GIVEN,
    shared: dict[str, Any] | None = None,
    drawn: str | None = None,
) -> Ingredients:
    """Open the source and the overlay of a dataset.

    `source` is where the data comes from, one of `SOURCES` for the base, the first by default; `root` is the folder of
    its files. A source that generates its records makes `limit` of them; other sources ignore it. Each class of a
    source or an overlay says which options it has. Builds of several splits may give the same `shared`, empty at first.
    `drawn` is the choice of when the overlay is drawn, which takes an overlay.

    Raises `UserError` if a name is unknown, an option does not fit the source or the overlay, or the data is missing.
    """
    if (found := datasets_with(list(OVERLAY_NAMES.names())).get(dataset)) is None:
        raise UserError(f'unknown dataset "{dataset}"{nearest(dataset, DATASETS)}')
    base = found.base
    name = source or SOURCES[base][0]
    is_own = base in PICTURES and name in SOURCE_NAMES.names() and name not in SOURCE_NAMES.built_in
    if name not in SOURCES[base] and not is_own:
        raise UserError(f'{dataset} cannot come from the source "{name}"{nearest(name, SOURCES[base])}')
    if found.overlay is None and (drawn or overlay_options):
        raise UserError(f"{dataset} has no overlay, so it takes no --overlay and no option of one; leave them out")
    given = SourceInputs(base, root, split, seed, limit, source_options, {} if shared is None else shared)
    if base in PICTURES:
        return _open_pictures(name, given, found.overlay, overlay_options)
    return _open_sounds(name, given, found.overlay, overlay_options)


def _checked_options(kind: type[SourceKind], given: SourceInputs) -> dict[str, OptionValue]:
    """Return the options of a source with their values. Raises `UserError` if one is wrong."""
    schema: type[Schema] = getattr(kind, "options_schema", Schema)
    return given.read(schema).model_dump(exclude_none=True)


def _open_pictures(name: str, given: SourceInputs, overlay: str | None, options: Options) -> Ingredients:
    kind: type[SourceKind] = SOURCE_NAMES.find_object(name)
    source_options = _checked_options(kind, given)
    opened = kind.open(given)
    if overlay is None:
        return Ingredients(opened, None, opened.description, source_options)
    height, width, num_channels = first_record(opened, range(opened.num_records)).content.shape
    drawn = open_picture_overlay(
        OverlayInputs(
            name=overlay,
            shape=(num_channels, height, width),
            split=given.split,
            base=given.base,
            root=given.root,
            seed=given.seed,
            class_counts=_class_counts(opened),
            options=options,
        )
    )
    return Ingredients(opened, drawn, f"{opened.description}{drawn.made_from}", source_options, dict(drawn.chosen))


def _class_counts(source: Source) -> dict[str, tuple[int, ...]]:
    """Return for each label of a source the number of records of each class."""
    return {
        name: tuple(np.bincount(column.label_N[column.label_N != NO_LABEL], minlength=len(column.classes)).tolist())
        for name, column in source.labels.items()
    }


def open_picture_overlay(given: OverlayInputs) -> PixelOverlay:
    """Open an overlay of pictures.

    Raises `UserError` if a name or an option is unknown, if the digits are missing, or if the overlay cannot be drawn
    on such pictures.
    """
    if given.name not in OVERLAY_NAMES.names():
        raise UserError(f'unknown overlay "{given.name}"{nearest(given.name, OVERLAY_NAMES.names())}')
    overlay = find_overlay(given.name)
    if not issubclass(overlay, PixelOverlay):
        raise UserError(
            f"{given.name} is no overlay of pictures; name a subclass of data_pipeline.overlays.PictureOverlay"
        )
    given.read(overlay.options_schema)  # also for an overlay that forgets to
    return overlay.open(given)


def with_overlay(labels: dict[str, LabelEntry], overlay: Overlay | None) -> dict[str, LabelEntry]:
    """Return labels by name, and those that an overlay gives, without counts.

    Raises `UserError` if both have a label of the same name.
    """
    if overlay is None:
        return labels
    given = {OVERLAY: LabelEntry(title=overlay.title, classes=overlay.class_names), **overlay.more_labels}
    if both := sorted(labels.keys() & given.keys()):
        raise UserError(f"the source and the overlay both give the label {both[0]}; rename it in one of them")
    return labels | {name: label.model_copy(update={"given_by": "overlay"}) for name, label in given.items()}


def _open_sounds(name: str, given: SourceInputs, overlay: str | None, options: Options) -> Ingredients:
    if given.base == "silence":  # as many records, at the same rate, as the source has of speech
        mel, num_records_of = SPEECH[name]
        num_records = given.limit or num_records_of[given.split]
        opened: SoundSource = SilenceSource(num_records, mel.sample_rate, mel.num_points)
    else:
        kind = _SOUND_SOURCES[name]
        _checked_options(kind, given)
        opened = kind.open(given)
    sample_rate, num_points = opened.sample_rate, opened.num_points
    if overlay is None:
        return Ingredients(opened, None, opened.description, sample_rate=sample_rate, num_points=num_points)
    read = NoiseOptions.parse(dict(options), where=f"{OVERLAY_OPTION} of the overlay noise")
    origin, root = "background sounds", read.noise_root or given.root
    if root is not None:
        sounds = background.read_sounds(root, sample_rate=sample_rate, num_points=num_points)
    elif name == "procedural":
        origin = "procedural background sounds"
        # Always seed 0: as with recordings, every build has the same sounds, and its seed draws the parts of them.
        sounds = background.procedural_sounds(0, sample_rate=sample_rate, num_points=num_points)
    else:
        raise UserError(f"the background sounds are read from a folder; name it with {OVERLAY_OPTION} noise_root=DIR")
    crop = "first" if given.split == "test" else read.noise_crop
    noise = Noise.of(sounds, num_points=num_points, volume=read.noise_volume, crop=crop)
    digest = hashlib.sha256(b"".join(sound.numpy().tobytes() for sound in sounds)).hexdigest()[:12]
    return Ingredients(
        opened,
        noise,
        f"{opened.description} + {origin} ({digest}), volume {noise.volume}, crop {crop}",
        overlay_options={"noise_volume": noise.volume, "noise_crop": crop, "noise_sha256": digest},
        sample_rate=sample_rate,
        num_points=num_points,
    )
