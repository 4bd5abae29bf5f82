"""The datasets of a run: where they are, how a rank reads them, and what their manifests say."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal, Self

import torch

from data_pipeline.audio.log_mel import MelConfig, mel_config
from data_pipeline.core.errors import UserError
from data_pipeline.core.random_crop import CropLaw
from data_pipeline.core.schema import Count, Line
from data_pipeline.loading.stream import ReadConfig, Stream
from data_pipeline.remote.cache import read_manifest
from data_pipeline.storage.index import has_remote_tars
from data_pipeline.storage.locations import absolute, dataset_directory, is_remote
from data_pipeline.storage.manifest import Manifest
from data_pipeline.storage.store import SampleStore
from trainer.checkpoint.run_state import DataIdentity
from trainer.distributed.collectives import all_gather_json, on_first_rank, rank, world_size
from trainer.distributed.environment import read_env

_CPU = torch.device("cpu")
_ASSUMED_RATE: Final = 16_000  # points a second of sounds of an open rate; any rate has a spectrogram of the same shape


class DataConfig(ReadConfig):
    """The locations of the datasets, and the settings for reading them.

    train_dir, test_dir: a directory, `http(s)://...`, `s3://...` or another scheme of fsspec.
    overlay: when the overlay is drawn; the train set must have been built for it. A "baked" overlay was drawn into the
        shards, so it is equal at each reading. An "online" overlay is drawn from (seed, epoch, sample index): the two
        views of a sample share one draw, and each epoch has another. With "online_per_view", each view has its own
        draw, as in the published code that mixes background sounds. "baked" and "online" are ignored for data without
        an overlay; "online_per_view" is refused.
    crop_from: of tars, whose pictures have any size. "original" cuts the random crops of expert views out of the stored
        pictures, "decoded" out of the squares to which they are brought. Other datasets ignore it. Tars with an overlay
        cut them out of the squares, on which the overlay is drawn.
    sample_rate: the points a second of sounds, or "of_data", whatever the train set has; None means pictures.
    num_points: the length of a sound in points. None means the published 1.04 s, or with "of_data" that of the train
        set. Rate and length set the spectrogram.
    """

    train_dir: Line
    test_dir: Line
    overlay: Literal["baked", "online", "online_per_view"] = "baked"
    crop_from: Literal["original", "decoded"] = "original"
    sample_rate: Count | Literal["of_data"] | None = None
    num_points: Count | None = None

    def absolute(self) -> Self:
        """Return a copy with absolute paths of local datasets, which other commands find in other directories."""
        return self.model_copy(update={"train_dir": absolute(self.train_dir), "test_dir": absolute(self.test_dir)})

    @property
    def overlay_draw(self) -> Literal["per_item", "per_view"]:
        return "per_view" if self.overlay == "online_per_view" else "per_item"

    @property
    def fetch_seconds(self) -> float:
        """Return the time that fetching a shard of the train set may take; 0 if the train set is local."""
        is_fetched = is_remote(self.train_dir) or has_remote_tars(dataset_directory(self.train_dir))
        return self.remote.file_seconds if is_fetched else 0.0

    @property
    def mel(self) -> MelConfig | None:
        """Return the spectrogram of the sounds; None for pictures. Raises `UserError` if they have none.

        While rate and length are open, it is one of another rate with the same shape; see `with_sounds_of`.
        """
        if self.sample_rate is None:
            return None
        return mel_config(_ASSUMED_RATE if self.sample_rate == "of_data" else self.sample_rate, self.num_points)

    def with_sounds_of(self, train: Manifest) -> Self:
        """Return a copy with rate and length of the sounds of a train set, if this leaves them open."""
        if self.sample_rate != "of_data" or train.medium != "sound":
            return self
        return self.model_copy(update={"sample_rate": train.sample_rate, "num_points": train.batch_shape[0]})


@dataclass(frozen=True)
class Manifests:
    """The manifests of the train set and of the test set."""

    train: Manifest
    test: Manifest

    @property
    def identity(self) -> DataIdentity:
        return DataIdentity(train_manifest_sha256=self.train.sha256, test_manifest_sha256=self.test.sha256)


def read_manifests(data: DataConfig) -> Manifests:
    """Return the manifests of both datasets. Raises `UserError` if one is missing."""
    train, test = (read_manifest(location, config=data.remote) for location in (data.train_dir, data.test_dir))
    return Manifests(train, test)


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
        f"rank {odd[0]} finds other datasets at {data.train_dir} and {data.test_dir} than rank 0; copy the same "
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
    manifest: Manifest | None = None,
    crops: CropLaw | None = None,
) -> Stream:
    """Return this rank's batches of the train set. Every rank calls this at the same time.

    `manifest` is that of the train set if it was read already; it is then not read again. `crops` are those
    of `Stream`, whose errors are raised.
    """
    return Stream(
        SampleStore(data.train_dir, remote=data.remote, manifest=manifest),
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
