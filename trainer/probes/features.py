"""What probes and analyses read from: every sample of a dataset in memory, and the features of a frozen encoder.

The picture of a sound is its log-mel spectrogram: what the encoder sees of it without a view. A view is made from the
waveform, so that is kept as well.

With several ranks each of them computes its share of the features and all get the whole. The shares are cut by place
alone, so a feature has the same bits on any number of ranks.

Shapes: N samples, B batch, C channels, H height, W width, T points of a waveform, F features.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from data_pipeline.audio.log_mel import MelConfig, mel_config
from data_pipeline.core.counter_rng import DrawKeys
from data_pipeline.core.errors import UserError
from data_pipeline.core.randomness import generator
from data_pipeline.core.sample import Batch
from data_pipeline.loading.resident import Rows, place
from data_pipeline.loading.stream import Draws, ReadConfig, check_bad_share, read_all
from data_pipeline.overlays import Overlay, evaluation_keys, no_mask
from data_pipeline.remote.cache import is_remote
from data_pipeline.storage.manifest import Manifest
from data_pipeline.storage.store import SampleStore
from trainer.distributed.collectives import all_gather_rows, rank, world_size
from trainer.views.expert_audio import clean_spectrogram

LabelSpace = Literal["base", "overlay"]
LABEL_SPACES: tuple[LabelSpace, ...] = ("base", "overlay")
TRAIN_DRAW = (
    1_000_000  # a probe's train samples are of this draw: of 0, number i would bear the overlay of test sample i
)
_CHUNK = 1024  # samples that are drawn on at a time
_REMOTE_SHARDS = 8
_ENCODED_AT_ONCE = 128  # no setting: bits may depend on it
_DEFAULT_READ = ReadConfig()


class FeatureEncoder(Protocol):
    """What is asked of an encoder (`trainer.models.encoder.Encoder`); it normalises its input itself."""

    def features(self, views_BCHW: Tensor, /) -> Tensor: ...
    def pooled(self, views_BCHW: Tensor, /) -> Tensor: ...
    def train(self, mode: bool = True) -> object: ...
    def eval(self) -> object: ...


class ViewFunction(Protocol):
    """What is asked of a view policy: pictures (B, C, H, W) float32 in [0, 1], with their masks, to views of the same
    shape; or waveforms (B, T) float32, without masks, to spectrograms (B, 1, H, W).
    """

    def __call__(self, inputs: Tensor, keys: DrawKeys, masks_BHW: Tensor | None, /) -> Tensor: ...


@dataclass(frozen=True)
class InputBatch:
    """Pictures (B, C, H, W) and masks (B, H, W) uint8, or waveforms (B, T) float32 and no masks; and their labels (B,)
    int64; all on the host.
    """

    inputs: Tensor
    masks_BHW: Tensor | None
    labels: Mapping[LabelSpace, Tensor]


@dataclass(frozen=True)
class OnlinePictures:
    """Pictures (N, C, H, W) uint8 as they are stored, and the overlay that is drawn on them when they are read."""

    clean_NCHW: Tensor
    overlay: Overlay


@dataclass(frozen=True)
class Sounds:
    """Sounds as they are stored, each in its own length, and the background that is mixed into them when they are read.

    `mel` makes their pictures, and `draw` numbers the draw that the pictures of the dataset are of.
    """

    manifest: Manifest
    rows: Rows
    overlay: Overlay | None
    mel: MelConfig
    draw: int

    def drawn(self, row_B: Tensor, keys: Callable[[Tensor], DrawKeys]) -> Batch:
        """Waveforms (B, T) of some rows as training would see them under `keys(index_B)`: crop, background, label."""
        draws = Draws(self.manifest, self.overlay, False, lambda index_B, epoch, view: keys(index_B))
        return draws.drawn(draws.cropped(self.rows.take(row_B), step=0, epoch=0, bad=()))

    def evaluated(self, row_B: Tensor) -> Batch:
        """The same under the draw that is alike in every run."""
        return self.drawn(row_B, lambda index_B: evaluation_keys(index_B, draw=self.draw))


@dataclass(frozen=True)
class Pictures:
    """Every sample of a dataset once, in stored order, on the host.

    Where the overlay is online, `images_NCHW`, masks and labels are of one draw, the same in every run, and `redraw`
    gives others.

    Attributes:
        manifest: of the dataset.
        images_NCHW: uint8; of sounds, their normalised spectrograms, (N, 1, H, W) float32.
        masks_NHW: uint8; None for sounds.
        index_N, label_base_N, label_overlay_N: int64.
        online: the overlay, and the pictures (N, C, H, W) without it; None where it is baked in or there is none, and
            for sounds.
        sounds: what the spectrograms were made from; None for pictures.
    """

    manifest: Manifest
    images_NCHW: Tensor
    masks_NHW: Tensor | None
    index_N: Tensor
    label_base_N: Tensor
    label_overlay_N: Tensor
    online: OnlinePictures | None = None
    sounds: Sounds | None = None

    def __len__(self) -> int:
        return self.index_N.numel()

    def inputs(self, row_B: Tensor) -> InputBatch:
        """What a view policy is given of some rows, of the same draw as `images_NCHW`."""
        masks_BHW = None if self.masks_NHW is None else self.masks_NHW[row_B]
        inputs = self.images_NCHW[row_B] if self.sounds is None else self.sounds.evaluated(row_B).inputs_a
        return InputBatch(inputs, masks_BHW, {space: self.labels(space)[row_B] for space in LABEL_SPACES})

    def redraw(self, row_B: Tensor, keys: Callable[[Tensor], DrawKeys]) -> InputBatch:
        """Some rows, with a new overlay where it is online: drawn from `keys(index_B)`."""
        if self.sounds is not None:
            batch = self.sounds.drawn(row_B, keys)
            return InputBatch(batch.inputs_a, None, {"base": batch.label_base_B, "overlay": batch.label_overlay_B})
        if self.online is None:
            return self.inputs(row_B)
        labels: dict[LabelSpace, Tensor] = {space: self.labels(space)[row_B] for space in LABEL_SPACES}
        drawn = self.online.overlay(self.online.clean_NCHW[row_B], keys(self.index_N[row_B]))
        return InputBatch(drawn.inputs, drawn.masks_BHW, labels | {"overlay": drawn.label_B})

    @property
    def is_drawn_online(self) -> bool:
        return self.online is not None or (self.sounds is not None and self.sounds.overlay is not None)

    def with_draw(self, draw: int) -> Pictures:
        """The same samples under another draw of their overlay; themselves where nothing is drawn online."""
        if not self.is_drawn_online:
            return self
        if self.sounds is not None:
            return _of_sounds(replace(self.sounds, draw=draw))
        assert self.online is not None
        return _of_pictures(self.manifest, self.index_N, self.label_base_N, self.online, draw=draw)

    def seen(self, inputs: Tensor) -> Tensor:
        """What the encoder sees without a view, of pictures in [0, 1] or of waveforms as `redraw` gives them."""
        return inputs if self.sounds is None else clean_spectrogram(inputs, self.sounds.mel)

    def labels(self, space: LabelSpace) -> Tensor:
        return self.label_base_N if space == "base" else self.label_overlay_N

    def class_names(self, space: LabelSpace) -> tuple[str, ...]:
        """Empty for `overlay` where nothing was drawn."""
        return self.manifest.label_names.base if space == "base" else self.manifest.label_names.overlay


def read_pictures(location: Path | str, *, read: ReadConfig = _DEFAULT_READ, draw: int = 0) -> Pictures:
    """Read a whole dataset; 50,000 pictures of 32x32 are 205 MB, twice that where the overlay is online. 24,000 sounds
    at 48 kHz are about 2 GB.

    `draw` numbers the draws of an online overlay, all of them the same in every run. Raises `UserError` where there is
    no dataset, or one of sounds that do not fit in memory or whose rate has no spectrogram.
    """
    store = SampleStore(location, remote=read.remote)
    if store.manifest.medium == "sound":
        return _read_sounds(store, location, max_bad_share=read.max_bad_share, draw=draw)
    batches = list(
        read_all(location, batch_size=_CHUNK, draw=None, remote=read.remote, max_bad_share=read.max_bad_share)
    )
    images_NCHW, index_N, label_base_N, label_overlay_N, masks_NHW = (
        torch.cat([getattr(batch, name) for batch in batches])
        for name in ("inputs_a", "index_B", "label_base_B", "label_overlay_B", "masks_BHW")
    )
    if store.overlay is not None:
        return _of_pictures(
            store.manifest, index_N, label_base_N, OnlinePictures(images_NCHW, store.overlay), draw=draw
        )
    return Pictures(store.manifest, images_NCHW, masks_NHW, index_N, label_base_N, label_overlay_N)


def read_some(location: Path | str, *, num: int, read: ReadConfig = _DEFAULT_READ, draw: int = 0) -> Pictures:
    """As `read_pictures`, of `num` samples (of all, if there are fewer) that are chosen by chance, the same each time;
    of a remote dataset, from a few of its shards, so that little is fetched.

    Samples among them that cannot be read are left out. Raises `UserError` where there is no dataset, or none can be.
    """
    store = SampleStore(location, remote=read.remote)
    chosen = _choose(
        store.shard_ends,
        num=num,
        num_shards=min(_REMOTE_SHARDS, store.max_shards or _REMOTE_SHARDS) if is_remote(location) else None,
    )
    stored = store.decode(chosen)
    good = [row for row in range(len(chosen)) if row not in stored.bad]
    if not good:
        raise UserError(f"{location} holds no sample that can be read; find out with `python -m data_pipeline verify`")
    rows = Rows.of(stored, store.manifest).take(torch.tensor(good))
    if store.manifest.sample_rate is not None:
        mel = mel_config(store.manifest.sample_rate)
        return _of_sounds(Sounds(store.manifest, rows, store.overlay, mel, draw))
    assert rows.pictures_BCHW is not None
    if store.overlay is not None:
        online = OnlinePictures(rows.pictures_BCHW, store.overlay)
        return _of_pictures(store.manifest, rows.index_B, rows.label_base_B, online, draw=draw)
    masks_BHW = no_mask(rows.pictures_BCHW) if rows.masks_BHW is None else rows.masks_BHW
    return Pictures(
        store.manifest, rows.pictures_BCHW, masks_BHW, rows.index_B, rows.label_base_B, rows.label_overlay_B
    )


def _choose(shard_ends: NDArray[np.int64], *, num: int, num_shards: int | None) -> NDArray[np.int64]:
    """Ascending numbers of up to `num` samples, all alike probable, of up to `num_shards` shards."""
    draw = generator(0, "samples of an online probe")
    starts = np.concatenate([[0], shard_ends[:-1]])
    shards = np.sort(draw.permutation(len(shard_ends))[:num_shards])
    candidates = np.concatenate([np.arange(starts[shard], shard_ends[shard]) for shard in shards])
    return np.sort(draw.permutation(candidates)[:num]).astype(np.int64)


def _of_pictures(
    manifest: Manifest, index_N: Tensor, label_base_N: Tensor, online: OnlinePictures, *, draw: int
) -> Pictures:
    drawn = [
        online.overlay(clean_BCHW, evaluation_keys(index_B, draw=draw))
        for clean_BCHW, index_B in zip(
            torch.split(online.clean_NCHW, _CHUNK), torch.split(index_N, _CHUNK), strict=True
        )
    ]
    return Pictures(
        manifest=manifest,
        images_NCHW=torch.cat([part.inputs for part in drawn]),
        masks_NHW=torch.cat([part.masks_BHW for part in drawn]),
        index_N=index_N,
        label_base_N=label_base_N,
        label_overlay_N=torch.cat([part.label_B for part in drawn]),
        online=online,
    )


def _read_sounds(store: SampleStore, location: Path | str, *, max_bad_share: float, draw: int) -> Pictures:
    """Sounds that cannot be read are left out."""
    assert store.manifest.sample_rate is not None
    mel = mel_config(store.manifest.sample_rate)
    host = torch.device("cpu")
    placed = place(store, wanted="auto", resident_gigabytes=math.inf, device=host, share=None, show_progress=False)
    if placed.resident is None:
        raise UserError(f"{location} cannot be read into memory ({placed.reason}); free some memory")
    bad = placed.resident.bad
    check_bad_share(tuple(bad.values()), num_samples=len(store), max_share=max_bad_share, where=location)
    good = [row for row in range(len(store)) if row not in bad]
    rows = placed.resident.rows.take(torch.tensor(good, dtype=torch.int64))
    return _of_sounds(Sounds(store.manifest, rows, store.overlay, mel, draw))


def _of_sounds(sounds: Sounds) -> Pictures:
    labels, images = [], []
    for row_B in torch.split(torch.arange(len(sounds.rows.index_B)), _CHUNK):
        batch = sounds.evaluated(row_B)
        images.append(clean_spectrogram(batch.inputs_a, sounds.mel))
        labels.append(batch.label_overlay_B)
    return Pictures(
        manifest=sounds.manifest,
        images_NCHW=torch.cat(images),
        masks_NHW=None,
        index_N=sounds.rows.index_B,
        label_base_N=sounds.rows.label_base_B,
        label_overlay_N=torch.cat(labels),
        sounds=sounds,
    )


@contextmanager
def frozen(*modules: object) -> Iterator[None]:
    """No gradients, and every module in eval mode; what was in train mode is so again afterwards."""
    parts = [part for module in modules if isinstance(module, nn.Module) for part in module.modules()]
    training = [part.training for part in parts]
    try:
        with torch.no_grad():
            for part in parts:
                part.training = False
            yield
    finally:
        for part, mode in zip(parts, training, strict=True):
            part.training = mode


def extract(
    function: Callable[[Tensor], Tensor],
    images_NCHW: Tensor,
    *,
    device: torch.device,
    batch_size: int = _ENCODED_AT_ONCE,
) -> Tensor:
    """(N, F) features of pictures (N, C, H, W), uint8 or normalised, without views: row i is of picture i, and of it
    alone if `function` treats pictures apart, as an encoder in eval mode does. Every rank calls this, and gets all.
    """
    with torch.no_grad():
        return shared_rows(lambda part: function(to_float(part, device)), images_NCHW, chunk_size=batch_size)


def shared_rows(function: Callable[[Tensor], Tensor], x_N: Tensor, *, chunk_size: int) -> Tensor:
    """`function` of each chunk of rows, one under the other, on every rank; each chunk is the work of one rank.

    A rank with less to do than another does its last chunk twice, so that `function` may itself wait for all ranks.
    """
    chunks = torch.split(x_N, chunk_size)
    if world_size() == 1:
        return torch.cat([function(chunk) for chunk in chunks])
    num_of_rank = math.ceil(len(chunks) / world_size())
    first = rank() * num_of_rank
    parts = [function(chunks[min(number, len(chunks) - 1)]) for number in range(first, first + num_of_rank)]
    whole = [torch.cat([part, part.new_zeros(chunk_size - len(part), *part.shape[1:])]) for part in parts]
    return all_gather_rows(torch.cat(whole))[: len(x_N)]


def to_float(inputs: Tensor, device: torch.device) -> Tensor:
    """uint8 pictures as float32 in [0, 1] on the device; they travel as bytes, a quarter of the size. What is of a
    floating type, spectrograms and waveforms, stays as it is.
    """
    inputs = inputs.to(device)
    return inputs if inputs.is_floating_point() else inputs.float() / 255
