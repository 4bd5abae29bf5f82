"""A train set that is a mixture of datasets: its settings, and what the manifests of its sources say together.

Shapes: K sources, C channels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import AfterValidator, Field

from data_pipeline.core.errors import UserError
from data_pipeline.core.sample import Medium
from data_pipeline.core.schema import Factor, Line, Name, Schema
from data_pipeline.loading.mixture import Shares
from data_pipeline.storage.manifest import Manifest

MAX_SOURCES = 1_000


class SourceConfig(Schema):
    """A source of a mixture: its location, as of `data.train_dir`, and its weight.

    Weights need not add up to 1.
    """

    train_dir: Line
    weight: Annotated[Factor, Field(gt=0)]


# In the order of the names, so that a run does not depend on the order in which they were written.
SourceConfigs = Annotated[
    dict[Name, SourceConfig],
    Field(min_length=1, max_length=MAX_SOURCES),
    AfterValidator(lambda sources: dict(sorted(sources.items()))),
]


def weights_of(sources: Mapping[str, SourceConfig]) -> tuple[float, ...]:
    """Return the weights of the sources."""
    return tuple(source.weight for source in sources.values())


@dataclass(frozen=True)
class MixtureManifest:
    """What the manifests of the sources of a mixture say together, under the names of `Manifest`.

    Attributes:
        sources: the manifests by name. They have the same medium, shape and rate, which `check_manifests` checks.
        probed: the name of the source that probes train on.
        shares: the shares of the sources in the draws.
    """

    sources: Mapping[str, Manifest]
    probed: str
    shares: tuple[float, ...]

    @classmethod
    def of(cls, sources: Mapping[str, Manifest], weights: Sequence[float], *, probed: str) -> MixtureManifest:
        """Return the manifest of a mixture. Raises `UserError` if two sources are one dataset, as by a link."""
        names: dict[str, str] = {}
        for name, manifest in sources.items():
            if (other := names.setdefault(manifest.sha256, name)) != name:
                raise UserError(
                    f"mixture.{other} and mixture.{name} hold the same dataset, so a sample could come twice in a "
                    "batch; leave one out, and give the other the weights of both"
                )
        return cls(sources, probed, Shares(weights).shares)

    @property
    def _first(self) -> Manifest:
        return self.sources[self.probed]

    @property
    def num_samples(self) -> int:
        """Return the number of samples of all sources together."""
        return sum(manifest.num_samples for manifest in self.sources.values())

    @property
    def medium(self) -> Medium:
        return self._first.medium

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return self._first.batch_shape

    @property
    def sample_rate(self) -> int | None:
        return self._first.sample_rate

    @property
    def batch_mean(self) -> tuple[float, ...]:
        """Return the mean of each channel over what a step draws."""
        mean_KC = np.array([manifest.batch_mean for manifest in self.sources.values()])
        return tuple((np.array(self.shares) @ mean_KC).tolist())

    @property
    def batch_std(self) -> tuple[float, ...]:
        """Return the standard deviation of each channel over what a step draws."""
        mean_KC = np.array([manifest.batch_mean for manifest in self.sources.values()])
        std_KC = np.array([manifest.batch_std for manifest in self.sources.values()])
        square_C = np.array(self.shares) @ (std_KC**2 + mean_KC**2)
        return tuple(np.sqrt(np.maximum(square_C - np.square(self.batch_mean), 0)).tolist())

    @property
    def is_online(self) -> bool:
        """Return whether an overlay is drawn when the samples of some source are read."""
        return any(manifest.is_online for manifest in self.sources.values())

    @property
    def any_size(self) -> bool:
        """Return whether the pictures of all sources have any size, so that they can be decoded to crops."""
        return all(manifest.any_size for manifest in self.sources.values())

    @property
    def sha256(self) -> str:
        """Return a hash of the names of the sources and of the hashes of their manifests."""
        lines = [f"{name} {manifest.sha256}\n" for name, manifest in self.sources.items()]
        return hashlib.sha256("".join(lines).encode()).hexdigest()


# What the manifest of a train set says: of one dataset, or of a mixture.
TrainManifest = Manifest | MixtureManifest


def datasets_of(train: TrainManifest) -> tuple[Manifest, ...]:
    """Return the manifest of the train set, or of each source of a mixture."""
    return tuple(train.sources.values()) if isinstance(train, MixtureManifest) else (train,)


def num_classes(train: TrainManifest) -> dict[str, int]:
    """Return the number of classes of each label by name.

    A label of a mixture counts if all sources that have it give it the same classes.
    """
    classes: dict[str, set[tuple[str, ...]]] = {}
    for manifest in datasets_of(train):
        for name, label in manifest.labels.items():
            classes.setdefault(name, set()).add(label.classes)
    return {name: len(*found) for name, found in classes.items() if len(found) == 1}
