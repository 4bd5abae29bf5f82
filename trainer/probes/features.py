"""What probes and analyses read from: every sample of a dataset in memory, and the features of a frozen encoder.

The picture of a sound is its log-mel spectrogram: what the encoder sees of it without a view. A view is made from the
waveform, so that is kept as well.

With several ranks each of them computes its share of the features and all get the whole. The shares are cut by place
alone, so a feature has the same bits on any number of ranks.

Shapes: N samples, B batch, C channels, H height, W width, T points of a waveform, F features.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from data_pipeline.audio.log_mel import mel_config
from data_pipeline.core.counter_rng import DrawKeys
from data_pipeline.core.errors import UserError
from data_pipeline.core.randomness import generator
from data_pipeline.core.sample import BadSample, Batch
from data_pipeline.loading.collate import BatchMaker
from data_pipeline.loading.decode import DecodedSamples, decode
from data_pipeline.loading.placement import place_data, read_whole
from data_pipeline.loading.stream import ReadConfig, check_bad_share
from data_pipeline.overlays import Overlay, evaluation_keys
from data_pipeline.remote.cache import is_remote
from data_pipeline.storage.manifest import Manifest
from data_pipeline.storage.store import SampleStore
from trainer.distributed.collectives import all_gather_rows, rank, world_size
from trainer.views.expert_audio import clean_spectrogram

logger = logging.getLogger(__name__)

LabelSpace = Literal["base", "overlay"]
LABEL_SPACES: tuple[LabelSpace, ...] = ("base", "overlay")
TRAIN_DRAW = (
    1_000_000  # a probe's train samples are of this draw: of 0, number i would bear the overlay of test sample i
)
_CPU = torch.device("cpu")
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
class StoredInputs:
    """Samples as they are stored, for datasets whose inputs are drawn as they are read: sounds, and online overlays.

    `draw` numbers the draws of the overlay, all of them the same in every run.
    """

    manifest: Manifest
    samples: DecodedSamples
    overlay: Overlay | None
    draw: int

    def batch(self, row_B: Tensor, keys: Callable[[Tensor], DrawKeys] | None = None) -> Batch:
        """Return some rows as training would see them under `keys(index_B)`; by default under the draw `draw`."""
        chosen = keys or (lambda index_B: evaluation_keys(index_B, draw=self.draw))
        maker = BatchMaker(self.manifest, self.overlay, lambda index_B, epoch, view: chosen(index_B))
        return maker.apply_overlay(maker.collate(self.samples.take(row_B)))


@dataclass(frozen=True)
class Pictures:
    """Every sample of a dataset once, in stored order, on the host.

    If inputs are drawn as they are read, `images_NCHW`, masks and labels are of one draw, the same in every run, and
    `redraw` gives others.

    Attributes:
        manifest: of the dataset.
        images_NCHW: uint8; of sounds, their normalised spectrograms, (N, 1, H, W) float32.
        masks_NHW: uint8; None for sounds.
        index_N, label_base_N, label_overlay_N: int64.
        stored: what the inputs are drawn from; None if each reading gives the same inputs.
    """

    manifest: Manifest
    images_NCHW: Tensor
    masks_NHW: Tensor | None
    index_N: Tensor
    label_base_N: Tensor
    label_overlay_N: Tensor
    stored: StoredInputs | None = None

    def __len__(self) -> int:
        return self.index_N.numel()

    @property
    def are_sounds(self) -> bool:
        return self.manifest.medium == "sound"

    @property
    def is_drawn_online(self) -> bool:
        return self.stored is not None and self.stored.overlay is not None

    def inputs(self, row_B: Tensor) -> InputBatch:
        """Return what a view policy is given of some rows, of the same draw as `images_NCHW`."""
        masks_BHW = None if self.masks_NHW is None else self.masks_NHW[row_B]
        are_waveforms = self.stored is not None and self.are_sounds
        inputs = self.stored.batch(row_B).inputs_a if self.stored and are_waveforms else self.images_NCHW[row_B]
        return InputBatch(inputs, masks_BHW, {space: self.labels(space)[row_B] for space in LABEL_SPACES})

    def redraw(self, row_B: Tensor, keys: Callable[[Tensor], DrawKeys]) -> InputBatch:
        """Return some rows, drawn anew from `keys(index_B)` if inputs are drawn as they are read."""
        if self.stored is None:
            return self.inputs(row_B)
        batch = self.stored.batch(row_B, keys)
        labels: dict[LabelSpace, Tensor] = {"base": batch.label_base_B, "overlay": batch.label_overlay_B}
        return InputBatch(batch.inputs_a, batch.masks_BHW, labels)

    def with_draw(self, draw: int) -> Pictures:
        """Return the same samples under another draw of their overlay; themselves if none is drawn online."""
        if self.stored is None or not self.is_drawn_online:
            return self
        return _finish(replace(self.stored, draw=draw))

    def seen(self, inputs: Tensor) -> Tensor:
        """Return what the encoder sees without a view, of pictures in [0, 1] or of waveforms as `redraw` gives them."""
        return _spectrograms(inputs, self.manifest)

    def labels(self, space: LabelSpace) -> Tensor:
        return self.label_base_N if space == "base" else self.label_overlay_N

    def class_names(self, space: LabelSpace) -> tuple[str, ...]:
        """Return the class names; none for `overlay` if nothing was drawn."""
        return self.manifest.label_names.base if space == "base" else self.manifest.label_names.overlay


def read_pictures(location: Path | str, *, read: ReadConfig = _DEFAULT_READ, draw: int = 0) -> Pictures:
    """Read a whole dataset into memory; samples that cannot be read are left out.

    50,000 pictures of 32x32 are 205 MB, twice that with an online overlay. 24,000 sounds at 48 kHz are about 2 GB.
    `draw` numbers the draws of an online overlay, all of them the same in every run.

    Raises `UserError` if there is no dataset, if too many of its samples cannot be read, or if its sounds do not fit in
    memory or have a rate without a spectrogram.
    """
    store = SampleStore(location, remote=read.remote)
    _check_bad(store, store.known_bad, read)
    samples = _read_sounds(store) if store.manifest.medium == "sound" else read_whole(store, _CPU)
    _check_bad(store, samples.bad.values(), read)
    for bad in samples.bad.values():
        logger.warning("%s: %s in %s is left out: %s", location, bad.key, bad.shard, bad.reason)
    return _finish(StoredInputs(store.manifest, samples.without_bad(), store.overlay, draw))


def read_some(location: Path | str, *, num: int, read: ReadConfig = _DEFAULT_READ, draw: int = 0) -> Pictures:
    """Read `num` samples (all, if there are fewer) that are chosen by chance, the same each time.

    Those of a remote dataset come from a few of its shards, so that little is fetched. Samples that cannot be read are
    left out. Raises `UserError` if there is no dataset, or if none of the samples can be read.
    """
    store = SampleStore(location, remote=read.remote)
    chosen = _choose(
        store.shard_ends,
        num=num,
        num_shards=min(_REMOTE_SHARDS, store.max_shards or _REMOTE_SHARDS) if is_remote(location) else None,
    )
    samples = decode(store, chosen).without_bad()
    if not len(samples):
        raise UserError(f"{location} holds no sample that can be read; find out with `python -m data_pipeline verify`")
    return _finish(StoredInputs(store.manifest, samples, store.overlay, draw))


def _check_bad(store: SampleStore, bad: Collection[BadSample], read: ReadConfig) -> None:
    check_bad_share(bad, num_samples=len(store), max_share=read.max_bad_share, where=store.location)


def _choose(shard_ends: NDArray[np.int64], *, num: int, num_shards: int | None) -> NDArray[np.int64]:
    """Ascending numbers of up to `num` samples, all alike probable, of up to `num_shards` shards."""
    draw = generator(0, "samples of an online probe")
    starts = np.concatenate([[0], shard_ends[:-1]])
    shards = np.sort(draw.permutation(len(shard_ends))[:num_shards])
    candidates = np.concatenate([np.arange(starts[shard], shard_ends[shard]) for shard in shards])
    return np.sort(draw.permutation(candidates)[:num]).astype(np.int64)


def _read_sounds(store: SampleStore) -> DecodedSamples:
    placed = place_data(store, wanted="auto", resident_gigabytes=math.inf, device=_CPU, share=None, show_progress=False)
    if placed.samples is None:
        raise UserError(f"{store.location} cannot be read into memory ({placed.reason}); free some memory")
    return placed.samples


def _finish(stored: StoredInputs) -> Pictures:
    manifest, samples = stored.manifest, stored.samples
    batches = [stored.batch(row_B) for row_B in torch.split(torch.arange(len(samples)), _CHUNK)]
    masks = [batch.masks_BHW for batch in batches if batch.masks_BHW is not None]
    is_drawn = manifest.medium == "sound" or stored.overlay is not None
    return Pictures(
        manifest=manifest,
        images_NCHW=torch.cat([_spectrograms(batch.inputs_a, manifest) for batch in batches]),
        masks_NHW=torch.cat(masks) if masks else None,
        index_N=samples.index_B,
        label_base_N=samples.label_base_B,
        label_overlay_N=torch.cat([batch.label_overlay_B for batch in batches]),
        stored=stored if is_drawn else None,
    )


def _spectrograms(inputs: Tensor, manifest: Manifest) -> Tensor:
    """Return what the encoder sees of pictures, which is themselves, or of waveforms (B, T): (B, 1, H, W)."""
    return inputs if manifest.sample_rate is None else clean_spectrogram(inputs, mel_config(manifest.sample_rate))


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
