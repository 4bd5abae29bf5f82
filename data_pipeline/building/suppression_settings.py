"""The settings of the suppression benchmark: datasets in which one feature is easier than another.

`python -m data_pipeline suppression` builds them, `configs.suppression` trains on them. Each setting has several
difficulties, which are values of one option of its overlay or its source. The overlays name their sources.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from data_pipeline.core.options import OptionValue
from data_pipeline.core.sample import BASE, OVERLAY

Scale = Literal["full", "small"]
NUM_SMALL: Final[Mapping[str, int]] = {"train": 4_000, "test": 2_000}  # samples of a split at the small scale, at most
ENCODER: Final = "encoder: "  # begins the name of a cure that is none: an encoder of others
_CORRELATION: Final = "correlation"


@dataclass(frozen=True)
class Setting:
    """A dataset with two features or more, and a setting that makes one of them easier than the others.

    Attributes:
        title: its name in reports.
        base, overlay: the pictures or sounds of its dataset, and the name of the overlay on them; None if the source
            draws both features.
        hard, easy: the names of its labels. The easy feature suppresses the hard one.
        varies: the option that sets the difficulty, and whether it is the overlay's or the source's. None if the
            setting has one difficulty.
        unit: what the difficulty counts, for reports.
        difficulties: the values of the option, the easiest for the hard feature first, for each scale.
        image_size: height and width in pixels, for each scale, if the source lets one choose; else None.
        source_options: the other options of the source.
        draws_views: whether the overlay draws each view of a sample by itself (`data.overlay=online_per_view`).
    """

    title: str
    base: str
    overlay: str | None
    hard: tuple[str, ...] = (BASE,)
    easy: tuple[str, ...] = (OVERLAY,)
    varies: tuple[Literal["overlay", "source"], str] | None = None
    unit: str = ""
    difficulties: Mapping[Scale, tuple[OptionValue, ...]] = field(default_factory=dict)
    image_size: Mapping[Scale, int] = field(default_factory=dict)
    source_options: Mapping[str, OptionValue] = field(default_factory=dict)
    draws_views: bool = False

    @property
    def is_sound(self) -> bool:
        return self.base == "spoken"

    @property
    def dataset(self) -> str:
        """Return the name of the dataset for `build`."""
        return self.base if self.overlay is None else f"{self.base}_{self.overlay}"

    def names_of_difficulties(self, scale: Scale) -> tuple[str, ...]:
        """Return the names of the difficulties, which are names of directories; "all" if there is only one."""
        return tuple(str(value) for value in self.difficulties.get(scale, ("all",)))

    def factors(self, difficulty: str, *, scale: Scale, cure: str) -> dict[str, str]:
        """Return the place of an encoder in the benchmark, which its page reads (docs/reports.md)."""
        factors = {
            "setting": self.title,
            "difficulty": difficulty,
            "unit": self.unit,
            "easiest": self.names_of_difficulties(scale)[0] if self.varies is not None else "",
            "cure": cure,
            "hard": ",".join(self.hard),
            "easy": ",".join(self.easy),
        }
        return {name: level for name, level in factors.items() if level}

    def options(
        self, part: Literal["overlay", "source"], *, difficulty: str, split: str, scale: Scale
    ) -> dict[str, OptionValue]:
        """Return the options of the overlay or of the source for a difficulty."""
        options = dict(self.source_options) if part == "source" else {}
        if part == "source" and scale in self.image_size:
            options["image_size"] = self.image_size[scale]
        if self.varies is not None and self.varies[0] == part:
            name = self.varies[1]
            options[name] = "0" if name == _CORRELATION and split == "test" else difficulty
        return options


_SHARES: Final[tuple[OptionValue, ...]] = (0.0, 0.5, 0.75, 0.9, 0.95)
_THREE_SHARES: Final[tuple[OptionValue, ...]] = (0.0, 0.75, 0.95)

SETTINGS: Final[Mapping[str, Setting]] = {
    "randbit": Setting(
        title="RandBit",
        base="mnist",
        overlay="bits",
        varies=("overlay", "bits"),
        unit="bits",
        difficulties={"full": (0, 2, 4, 5, 6, 8, 10, 15, 20), "small": (0, 5, 10)},
    ),
    "multidigits": Setting(
        title="MultiDigits",
        base="placed_digits",
        overlay="second_digit",
        varies=("overlay", "size"),
        unit="pixels",
        difficulties={"full": (20, 30, 40, 50, 60, 70, 80), "small": (12, 16, 24)},
        # A digit of 20 pixels on 32: smaller ones the small network does not learn in its steps, even from labels.
        image_size={"full": 112, "small": 32},
        source_options={"digit_size": 20},
    ),
    "tiled_digits": Setting(
        title="Digits on photos",
        base="cifar10",
        overlay="tiled_digit",
        varies=("overlay", "unique"),
        unit="unique digits",
        difficulties={"full": (5_000, 1_000, 100, 20, 10), "small": (1_000, 100, 10)},
    ),
    "trifeature": Setting(
        title="Trifeature",
        base="trifeature",
        overlay=None,
        hard=(BASE, "texture"),
        easy=("colour",),
        varies=("source", _CORRELATION),
        unit="correlation",
        difficulties={"full": _SHARES, "small": _THREE_SHARES},
        image_size={"full": 224, "small": 48},
        source_options={"correlated": "colour"},
    ),
    "dominoes": Setting(
        title="Dominoes",
        base="cifar10",
        overlay="dominoes",
        varies=("overlay", _CORRELATION),
        unit="correlation",
        difficulties={"full": _SHARES, "small": _THREE_SHARES},
    ),
    "colours": Setting(
        title="Coloured digits",
        base="mnist",
        overlay="colours",
        varies=("overlay", _CORRELATION),
        unit="correlation",
        difficulties={"full": _SHARES, "small": _THREE_SHARES},
    ),
    "modalities": Setting(
        title="Digits in two modalities",
        base="cifar10",
        overlay="shared_number",
        varies=("overlay", "length"),
        unit="digits",
        difficulties={"full": (1, 2, 3, 4), "small": (1, 2, 4)},
        draws_views=True,
    ),
    "boolean": Setting(
        title="Boolean features",
        base="mnist",
        overlay="boolean",
        hard=("core",),
        varies=("overlay", "degree"),
        unit="bits of the core feature",
        difficulties={"full": (1, 2, 3, 4), "small": (1, 2, 3)},
        draws_views=True,
    ),
    "boolean_correlated": Setting(
        title="Boolean features, correlated",
        base="mnist",
        overlay="boolean",
        hard=("core",),
        varies=("overlay", _CORRELATION),
        unit="correlation",
        difficulties={"full": _SHARES, "small": _THREE_SHARES},
        draws_views=True,
    ),
    "shapes": Setting(title="C+Shapes", base="cifar10", overlay="shapes"),
    "digits": Setting(title="C+Digits", base="cifar10", overlay="digits", hard=(OVERLAY,), easy=(BASE,)),
    "letters": Setting(title="C+Letters", base="cifar10", overlay="letters", hard=(OVERLAY,), easy=(BASE,)),
    "speech": Setting(title="Speech and noise", base="spoken", overlay="noise"),
}

SMALL_SAMPLE_RATE: Final = 8_000  # points a second, of the Free Spoken Digit Dataset


def directory_of(out: str, setting: str, difficulty: str, split: str) -> str:
    """Return the directory of a dataset of the benchmark.

    Examples:
        >>> directory_of("data/suppression", "randbit", "10", "train")
        'data/suppression/randbit/10/train'
    """
    return f"{out}/{setting}/{difficulty}/{split}"
