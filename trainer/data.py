"""The datasets of a run: where they are, how a rank reads them, and what their manifests say."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal, Self

import torch
from pydantic import model_validator

from data_pipeline.audio.log_mel import MelConfig, mel_config
from data_pipeline.core.errors import UserError, nearest
from data_pipeline.core.random_crop import CropLaw
from data_pipeline.core.schema import Count, Line, Name
from data_pipeline.loading.mixture import Mixture, num_steps_per_mixture_epoch
from data_pipeline.loading.order import num_steps_per_epoch
from data_pipeline.loading.stream import ReadConfig, Stream
from data_pipeline.remote.cache import read_manifest
from data_pipeline.storage.index import has_remote_tars
from data_pipeline.storage.locations import absolute, dataset_directory, is_remote
from data_pipeline.storage.manifest import Manifest
from data_pipeline.storage.store import SampleStore
from trainer.checkpoint.run_state import DataIdentity
from trainer.distributed.collectives import all_gather_json, on_first_rank, rank, world_size
from trainer.distributed.environment import read_env
from trainer.mixture import MixtureManifest, SourceConfigs, TrainManifest, datasets_of, weights_of

_CPU = torch.device("cpu")
_ASSUMED_RATE: Final = 16_000  # points a second of sounds of an open rate; any rate has a spectrogram of the same shape


class DataConfig(ReadConfig):
    """The locations of the datasets, and the settings for reading them.

    train_dir, test_dir: a directory, `http(s)://...`, `s3://...` or another scheme of fsspec.
    mixture: several train sets in place of one, by name, each with its location and weight. `train_dir` is then null.
    mixture_epoch: the number of samples that count as an epoch of a mixture. None means as many as its sources hold.
    probed_source: the source of a mixture that probes train on. None means the first by name.
    overlay: when the overlay is drawn; the train set must have been built for it. A "baked" overlay was drawn into the
        shards, so it is equal at each reading. An "online" overlay is drawn from (seed, epoch, sample index): the two
        views of a sample share one draw, and each epoch has another. With "online_per_view", each view has its own
        draw, as in the published code that mixes background sounds. "baked" and "online" are ignored for data without
        an overlay; "online_per_view" is refused.
    crop_from: of tars, whose pictures have any size. "original" cuts the random crops of expert views out of the stored
        pictures, "decoded" out of the squares to which they are brought. Other datasets ignore it. A mixture of tars
    and other datasets cuts them out of the squares, and so do tars with an overlay, which is drawn on the squares.
    sample_rate: the points a second of sounds, or "of_data", whatever the train set has; None means pictures.
    num_points: the length of a sound in points. None means the published 1.04 s, or with "of_data" that of the train
        set. Rate and length set the spectrogram.
    """

    train_dir: Line | None
    test_dir: Line
    mixture: SourceConfigs | None = None
    mixture_epoch: Count | None = None
    probed_source: Name | None = None
    overlay: Literal["baked", "online", "online_per_view"] = "baked"
    crop_from: Literal["original", "decoded"] = "original"
    sample_rate: Count | Literal["of_data"] | None = None
    num_points: Count | None = None

    @model_validator(mode="after")
    def _has_one_train_set(self) -> Self:
        if self.mixture is None:
            if self.train_dir is None:
                raise ValueError("train_dir and mixture are both null; set one of them")
            for name in ("mixture_epoch", "probed_source"):
                if getattr(self, name):
                    raise ValueError(f"{name} is for a mixture, but mixture is null; set data.mixture, or leave it out")
            return self
        if self.train_dir is not None:
            raise ValueError(
                "train_dir and mixture are both set; add --set data.train_dir=null to train on the mixture"
            )
        if self.probed_source is not None and self.probed_source not in self.mixture:
            raise ValueError(
                f"probed_source is {self.probed_source}, which is no source of the mixture"
                f"{nearest(self.probed_source, self.mixture)}"
            )
        return self

    @property
    def train_locations(self) -> Mapping[str, str]:
        """Return the location of each train set by its name; the one of no mixture is named by its location."""
        if self.mixture is not None:
            return {name: source.train_dir for name, source in self.mixture.items()}
        assert self.train_dir is not None
        return {self.train_dir: self.train_dir}

    @property
    def train_name(self) -> str:
        """Return the train set as messages name it."""
        return self.train_dir or f"the mixture of {' and '.join(self.train_locations)}"

    @property
    def probed_name(self) -> str:
        """Return the name of the train set of probes, a key of `train_locations`."""
        return self.probed_source or next(iter(self.train_locations))

    @property
    def probed_dir(self) -> str:
        """Return the location of the train set of probes: the only one, or one source of a mixture."""
        return self.train_locations[self.probed_name]

    def absolute(self) -> Self:
        """Return a copy with absolute paths of local datasets, which other commands find in other directories."""
        sources = {
            name: source.model_copy(update={"train_dir": absolute(source.train_dir)})
            for name, source in (self.mixture or {}).items()
        }
        train_dir = None if self.train_dir is None else absolute(self.train_dir)
        update = {"train_dir": train_dir, "test_dir": absolute(self.test_dir), "mixture": sources or None}
        return self.model_copy(update=update)

    @property
    def overlay_draw(self) -> Literal["per_item", "per_view"]:
        return "per_view" if self.overlay == "online_per_view" else "per_item"

    @property
    def fetch_seconds(self) -> float:
        """Return the time that fetching a shard of the train set may take; 0 if the train set is local."""
        is_fetched = any(
            is_remote(location) or has_remote_tars(dataset_directory(location))
            for location in self.train_locations.values()
        )
        return self.remote.file_seconds if is_fetched else 0.0

    @property
    def mel(self) -> MelConfig | None:
        """Return the spectrogram of the sounds; None for pictures. Raises `UserError` if they have none.

        While rate and length are open, it is one of another rate with the same shape; see `with_sounds_of`.
        """
        if self.sample_rate is None:
            return None
        return mel_config(_ASSUMED_RATE if self.sample_rate == "of_data" else self.sample_rate, self.num_points)

    def with_sounds_of(self, train: TrainManifest) -> Self:
        """Return a copy with rate and length of the sounds of a train set, if this leaves them open."""
        if self.sample_rate != "of_data" or train.medium != "sound":
            return self
        return self.model_copy(update={"sample_rate": train.sample_rate, "num_points": train.batch_shape[0]})

    def num_steps_per_epoch(self, num_samples: int, global_batch_size: int) -> int:
        """Return the number of steps in an epoch of a train set of `num_samples`.

        Raises `UserError` if a single dataset does not fill one global batch.
        """
        if self.mixture is None:
            return num_steps_per_epoch(num_samples, global_batch_size)
        return num_steps_per_mixture_epoch(self.mixture_epoch or num_samples, global_batch_size)


@dataclass(frozen=True)
class Manifests:
    """The manifests of the train set, or of the sources of a mixture, and of the test set."""

    train: TrainManifest
    test: Manifest

    @property
    def identity(self) -> DataIdentity:
        sources = self.train.sources if isinstance(self.train, MixtureManifest) else {}
        return DataIdentity(
            train_manifest_sha256=self.train.sha256,
            test_manifest_sha256=self.test.sha256,
            train_sources={name: manifest.sha256 for name, manifest in sources.items()},
        )

    @property
    def datasets(self) -> tuple[Manifest, ...]:
        """Return the manifest of each dataset: of the train set or of its sources, and of the test set."""
        return (*datasets_of(self.train), self.test)

    @property
    def probed(self) -> Manifest:
        """Return the manifest of the train set of probes."""
        return self.train.sources[self.train.probed] if isinstance(self.train, MixtureManifest) else self.train


def read_manifests(data: DataConfig) -> Manifests:
    """Return the manifests of all datasets. Raises `UserError` if one is missing."""
    sources = {name: read_manifest(location, config=data.remote) for name, location in data.train_locations.items()}
    train: TrainManifest = sources[data.probed_name]
    if data.mixture is not None:
        train = MixtureManifest.of(sources, weights_of(data.mixture), probed=data.probed_name)
    return Manifests(train, read_manifest(data.test_dir, config=data.remote))


def read_agreed_manifests(data: DataConfig) -> Manifests:
    """Return the manifests, after a check that all ranks find the same. Every rank calls this.

    Raises `UserError` if one is missing; if it is missing on rank 0, the others exit without a message. If a rank finds
    other datasets than rank 0, rank 0 raises `UserError`, and the others exit.
    """
    manifests = on_first_rank(partial(read_manifests, data)) or read_manifests(data)
    found = all_gather_json(manifests.identity, DataIdentity)
    odd = [number for number, identity in enumerate(found) if identity != found[0]]
    if not odd:
        return manifests
    if rank() > 0:
        raise SystemExit(2)
    raise UserError(
        f"rank {odd[0]} finds other datasets at {data.train_name} and {data.test_dir} than rank 0; copy the same "
        "datasets to every machine, or use a directory that all machines share"
    )


def open_stream(
    data: DataConfig,
    *,
    global_batch_size: int,
    seed: int,
    end_step: int,
    start_step: int = 0,
    device: torch.device = _CPU,
    manifest: TrainManifest | None = None,
    crops: CropLaw | None = None,
) -> Stream:
    """Return this rank's batches of the train set. Every rank calls this at the same time.

    `manifest` is that of the train set if it was read already; it is then not read again. `crops` are those
    of `Stream`, whose errors are raised.
    """
    return Stream(
        _open_train_set(data, manifest),
        read=data,
        global_batch_size=global_batch_size,
        seed=seed,
        rank=rank(),
        world_size=world_size(),
        start_step=start_step,
        end_step=end_step,
        device=device,
        overlay_draw=data.overlay_draw,
        ranks_on_node=read_env(os.environ).local_world_size if world_size() > 1 else 1,
        crops=crops,
    )


def _open_train_set(data: DataConfig, manifest: TrainManifest | None) -> SampleStore | Mixture:
    """Open the train set, or all sources of a mixture."""
    if data.mixture is None:
        assert not isinstance(manifest, MixtureManifest)
        return SampleStore(data.probed_dir, remote=data.remote, manifest=manifest)
    known = manifest.sources if isinstance(manifest, MixtureManifest) else {}
    sources = {
        name: SampleStore(location, remote=data.remote, manifest=known.get(name))
        for name, location in data.train_locations.items()
    }
    return Mixture(sources, weights_of(data.mixture), data.mixture_epoch)
