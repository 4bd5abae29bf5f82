"""The names of all that can be built: datasets, their sources, and the choices of a build.

Invariant: this module imports nothing heavy, so that `python -m data_pipeline build --help` answers at once. An overlay
that is added to the registry can be built at once; the help lists it when its name is in `PICTURE_OVERLAYS`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

SPLITS: Final = ("train", "test")
DRAWN: Final = ("baked", "online")  # overlays are drawn into the shards, or anew at each reading
DIGITS: Final = ("mnist", "mnist_test_for_test", "mnist_t10k", "sklearn")
NOISE_CROPS: Final = ("first_or_last", "random_offset")  # of the train split; the test split keeps the first points
NOISE_VOLUME: Final = 0.05  # Tamkin et al. 2022
TEST_SPEAKER: Final = "yweweler"  # of the Free Spoken Digit Dataset
NUM_SAMPLES_PER_SHARD: Final = 1_000

# The sources that each base can come from, the default first.
SOURCES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "cifar10": ("torchvision", "folder"),
        "cifar100": ("torchvision", "folder"),
        "folder": ("folder",),
        "procedural": ("procedural",),
        "spoken": ("audiomnist", "fsdd", "procedural"),
        "silence": ("audiomnist", "fsdd", "procedural"),
    }
)
SOURCE_SUMMARIES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "torchvision": "the files that torchvision downloads, in --root",
        "folder": "pictures in --root, as train/CLASS/* and test/CLASS/*, or as CLASS/* with --test-share",
        "procedural": "made by the build; needs no data",
        "audiomnist": "the folders 01 to 60 of AudioMNIST in --root; 48 kHz",
        "fsdd": "the recordings of the Free Spoken Digit Dataset in --root; 8 kHz",
    }
)
PICTURE_OVERLAYS: Final = ("shapes", "digits", "letters")
_PICTURES = ("cifar10", "cifar100", "folder", "procedural")


@dataclass(frozen=True)
class Dataset:
    """The base of a dataset, a key of `SOURCES`, and the name of its overlay."""

    base: str
    overlay: str | None


def datasets_with(picture_overlays: Sequence[str]) -> Mapping[str, Dataset]:
    """Return all datasets by name: those of pictures plain and with each overlay, and those of sounds."""
    return MappingProxyType(
        {base: Dataset(base, None) for base in _PICTURES}
        | {f"{base}_{overlay}": Dataset(base, overlay) for base in _PICTURES for overlay in picture_overlays}
        | {"spoken": Dataset("spoken", None), "noise": Dataset("silence", "noise")}
        | {"spoken_noise": Dataset("spoken", "noise")}
    )


def describe_datasets() -> str:
    """Return lines that list every dataset with its sources, and every source."""
    by_base: dict[str, list[str]] = {}
    for name, dataset in datasets_with(PICTURE_OVERLAYS).items():
        by_base.setdefault(dataset.base, []).append(name)
    lines = ["datasets, and the sources of each (the first is the default):"]
    lines += [f"  {', '.join(names)}: {', '.join(SOURCES[base])}" for base, names in by_base.items()]
    lines += ["sources:", *(f"  {name}: {summary}" for name, summary in SOURCE_SUMMARIES.items())]
    return "\n".join(lines)
