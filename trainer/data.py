"""The two datasets of a run: where they are, how a rank reads them, and what their manifests say."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from data_pipeline.audio.log_mel import MelConfig, mel_config
from data_pipeline.core.errors import UserError
from data_pipeline.core.schema import Count, Line
from data_pipeline.loading.stream import ReadConfig
from data_pipeline.remote.cache import RemoteShards, is_remote
from data_pipeline.storage.manifest import Manifest, load_manifest
from trainer.checkpoint.run_state import DataIdentity
from trainer.distributed.collectives import all_gather_object, rank


class DataConfig(ReadConfig):
    """Where the shards are: a directory, `http(s)://...` or `pipe:COMMAND {name}`; and how a rank reads them.

    `overlay` says what the science is, and the train set must have been built for it: `baked` into the shards, the same
    at each reading; `online`, drawn from (seed, epoch, sample index), so that both views of a sample share a draw that
    is new in every epoch; or `online_per_view`, where the views of a sample do not share it (the published code mixes
    its background sounds so). Where nothing is drawn it has no effect.
    `sample_rate` is that of sounds, points a second, and decides how their spectrograms are made; None says that the
    samples are pictures.
    """

    train_dir: Line
    test_dir: Line
    overlay: Literal["baked", "online", "online_per_view"] = "baked"
    sample_rate: Count | None = None

    @property
    def overlay_draw(self) -> Literal["per_item", "per_view"]:
        return "per_view" if self.overlay == "online_per_view" else "per_item"

    @property
    def fetch_seconds(self) -> float:
        """How long fetching a shard of the train set may take; 0 if the train set is not fetched."""
        return self.remote.file_seconds if is_remote(self.train_dir) else 0.0

    @property
    def mel(self) -> MelConfig | None:
        """The spectrogram of the sounds; None for pictures. Raises `UserError` where there is none for their rate."""
        return None if self.sample_rate is None else mel_config(self.sample_rate)


@dataclass(frozen=True)
class Manifests:
    """What the train set and the test set hold."""

    train: Manifest
    test: Manifest

    @property
    def identity(self) -> DataIdentity:
        return DataIdentity(train_manifest_sha256=self.train.sha256, test_manifest_sha256=self.test.sha256)


def read_manifests(data: DataConfig) -> Manifests:
    """Raises `UserError` where one is missing."""

    def manifest(location: str) -> Manifest:
        if is_remote(location):
            return RemoteShards(location, config=data.remote).manifest
        return load_manifest(Path(location))

    return Manifests(manifest(data.train_dir), manifest(data.test_dir))


def read_agreed_manifests(data: DataConfig) -> Manifests:
    """Return the manifests, which are the same on all ranks.

    Raises `UserError` if one is missing; and if a rank finds other datasets than the first, which then speaks for all.
    """
    manifests = read_manifests(data)
    found = all_gather_object(manifests.identity)
    odd = [number for number, identity in enumerate(found) if identity != found[0]]
    if not odd:
        return manifests
    if rank() > 0:
        raise SystemExit(2)
    raise UserError(
        f"rank {odd[0]} finds other datasets at {data.train_dir} and {data.test_dir} than rank 0; copy the same to "
        "every machine, or use a directory that all of them share"
    )
