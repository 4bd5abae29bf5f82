"""The two datasets of a run: where they are, how a rank reads them, and what their manifests say."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from data_pipeline.audio.log_mel import MelConfig, mel_config
from data_pipeline.building.index_tars import ensure_index
from data_pipeline.core.errors import UserError
from data_pipeline.core.random_crop import CropLaw
from data_pipeline.core.schema import Count, Line
from data_pipeline.loading.shared_memory import NodeShare, shared_memory_identity
from data_pipeline.loading.stream import ReadConfig, Stream
from data_pipeline.remote.cache import RemoteShards, is_remote
from data_pipeline.storage.manifest import Manifest, dataset_directory, load_manifest
from data_pipeline.storage.store import SampleStore
from data_pipeline.storage.tar_index import has_remote_tars
from trainer.checkpoint.run_state import DataIdentity
from trainer.distributed.collectives import (
    all_gather_object,
    barrier,
    broadcast_object,
    on_first_rank,
    rank,
    world_size,
)

_CPU = torch.device("cpu")


class DataConfig(ReadConfig):
    """The locations of both datasets, and the settings for reading them.

    train_dir, test_dir: a directory, `http(s)://...` or `pipe:COMMAND {name}`.
    overlay: when the overlay is drawn; the train set must have been built for it. A "baked" overlay was drawn into the
        shards, so it is equal at each reading. An "online" overlay is drawn from (seed, epoch, sample index): the two
        views of a sample share one draw, and each epoch has another. With "online_per_view", each view has its own
        draw, as in the published code that mixes background sounds. Ignored for data without an overlay.
    crop_from: of tars, whose pictures have any size. "original" cuts the random crops of expert views out of the stored
        pictures, "decoded" out of the squares to which they are brought. Other datasets ignore it.
    sample_rate: the points a second of sounds, which also sets the spectrogram; None means pictures.
    """

    train_dir: Line
    test_dir: Line
    overlay: Literal["baked", "online", "online_per_view"] = "baked"
    crop_from: Literal["original", "decoded"] = "original"
    sample_rate: Count | None = None

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
        """Return the spectrogram of the sounds; None for pictures. Raises `UserError` if their rate has none."""
        return None if self.sample_rate is None else mel_config(self.sample_rate)


@dataclass(frozen=True)
class Manifests:
    """The manifests of the train set and the test set."""

    train: Manifest
    test: Manifest

    @property
    def identity(self) -> DataIdentity:
        return DataIdentity(train_manifest_sha256=self.train.sha256, test_manifest_sha256=self.test.sha256)


def read_manifests(data: DataConfig) -> Manifests:
    """Return the manifests of both datasets. Tars that were not indexed are indexed first.

    Raises `UserError` if one is missing.
    """

    train = read_train_manifest(data)
    ensure_index(data.test_dir, classes_of=data.train_dir, show_progress=True)
    return Manifests(train, _read_manifest(data.test_dir, data))


def read_train_manifest(data: DataConfig) -> Manifest:
    """Return the manifest of the train set, as `read_manifests` does."""
    ensure_index(data.train_dir, show_progress=True)
    return _read_manifest(data.train_dir, data)


def _read_manifest(location: str, data: DataConfig) -> Manifest:
    if is_remote(location):
        return RemoteShards(location, config=data.remote).manifest
    return load_manifest(Path(location))


def read_agreed_manifests(data: DataConfig) -> Manifests:
    """Return the manifests, after a check that all ranks find the same. Every rank calls this.

    Raises `UserError` if one is missing; if it is missing on rank 0, the others exit without a message. If a rank finds
    other datasets than rank 0, rank 0 raises `UserError`, and the others exit.
    """
    manifests = on_first_rank(partial(read_manifests, data)) or read_manifests(data)
    found = all_gather_object(manifests.identity)
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

    `manifest` is that of the train set if it was read already; it is then not read again. `crops` is that of `Stream`,
    whose errors are raised.
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
        share=_node_share(),
        crops=crops,
    )


def _node_share() -> NodeShare | None:
    """Return how the ranks of one machine share data in memory; None if there is one rank only.

    Ranks are on one machine if they see the same /dev/shm, whatever the launcher calls a node.
    """
    if world_size() == 1:
        return None
    machines = all_gather_object(shared_memory_identity())
    token = broadcast_object(f"feature-dropout-{secrets.token_hex(8)}")
    return NodeShare(local_rank=machines[: rank()].count(machines[rank()]), barrier=barrier, token=token)
