"""Read the samples of a dataset into memory, and compute features of a frozen encoder, for probes and analyses.

The picture of a sound is its log-mel spectrogram, which the encoder gets if there is no view. A view is made from the
waveform, so the waveform is kept too.

With several ranks, each computes its share of the features, and all get the whole. The shares depend only on the
position of a sample, so a feature has the same bits on any number of ranks.

Shapes: N samples, B batch, C channels, H height, W width, T points of a waveform, F features.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from data_pipeline.audio.log_mel import mel_config
from data_pipeline.core.counter_rng import DrawKeys
from data_pipeline.core.errors import UserError
from data_pipeline.core.randomness import generator
from data_pipeline.core.sample import BASE, NO_LABEL, OVERLAY, BadSample, Batch
from data_pipeline.core.schema import LabelName
from data_pipeline.loading.collate import BatchMaker
from data_pipeline.loading.decode import DecodedSamples, decode
from data_pipeline.loading.permutation import KeyedPermutation
from data_pipeline.loading.placement import free_host_bytes, place_data, read_whole, resident_bytes
from data_pipeline.loading.stream import ReadConfig, check_bad_share
from data_pipeline.overlays import Overlay, evaluation_keys
from data_pipeline.storage.manifest import Manifest
from data_pipeline.storage.store import SampleStore
from trainer.distributed.collectives import all_gather_rows, rank, world_size
from trainer.views.expert_audio import clean_spectrogram

logger = logging.getLogger(__name__)

LabelSpace = LabelName  # the name of a label of the data: `base`, `overlay` or any other
# The draw of the overlays on a probe's train samples. With draw 0, train and test sample i would share an overlay.
TRAIN_DRAW = 1_000_000
_CPU = torch.device("cpu")
_CHUNK = 1024  # samples that are drawn on at a time
_REMOTE_SHARDS = 8
_ENCODED_AT_ONCE = 128  # a constant, because bits may depend on it
_DEFAULT_READ = ReadConfig()


def label_order(names: Iterable[LabelSpace]) -> list[LabelSpace]:
    """Return different names of labels in the order in which results show them: `base`, `overlay`, then by name.

    Examples:
        >>> label_order(["site", "overlay", "age", "base", "age"])
        ['base', 'overlay', 'age', 'site']
    """
    return sorted(set(names), key=lambda name: (name != BASE, name != OVERLAY, name))


class FeatureEncoder(Protocol):
    """The methods of an encoder that probes use (`trainer.models.encoder.Encoder`). It normalises its input itself."""

    def features(self, views_BCHW: Tensor, /) -> Tensor: ...
    def pooled(self, views_BCHW: Tensor, /) -> Tensor: ...
    def train(self, mode: bool = True) -> object: ...
    def eval(self) -> object: ...


class ViewFunction(Protocol):
    """A view policy as probes call it.

    Maps pictures (B, C, H, W) float32 in [0, 1], with their masks, to views of the same shape. Maps waveforms (B, T)
    float32, without masks, to spectrograms (B, 1, H, W).
    """

    def __call__(self, inputs: Tensor, keys: DrawKeys, masks_BHW: Tensor | None, /) -> Tensor: ...


@dataclass(frozen=True)
class InputBatch:
    """The inputs of a view policy, and their labels (B,) int64, on the host.

    Inputs are pictures (B, C, H, W) with masks (B, H, W), uint8, or waveforms (B, T) float32 without masks.
    """

    inputs: Tensor
    masks_BHW: Tensor | None
    labels: Mapping[LabelSpace, Tensor]


@dataclass(frozen=True)
class StoredInputs:
    """Samples as they are stored, for datasets whose inputs are made when they are read: sounds, and online overlays.

    `draw` is the number of a draw of the overlay. Each draw is the same in every run.
    """

    manifest: Manifest
    samples: DecodedSamples
    overlay: Overlay | None
    draw: int

    def batch(self, row_B: Tensor, keys: Callable[[Tensor], DrawKeys] | None = None) -> Batch:
        """Return some rows as training would get them with `keys(index_B)`, by default with the draw `draw`."""
        chosen = keys or (lambda index_B: evaluation_keys(index_B, draw=self.draw))
        maker = BatchMaker(self.manifest, self.overlay, lambda index_B, epoch, view: chosen(index_B))
        return maker.apply_overlay(maker.collate(self.samples.take(row_B)))


@dataclass(frozen=True)
class Pictures:
    """Every sample of a dataset once, in stored order, on the host.

    If inputs are made when they are read, `images_NCHW`, masks and labels are those of one draw, which is the same in
    every run. `redraw` gives others.

    Attributes:
        manifest: of the dataset.
        images_NCHW: uint8; for sounds their normalised spectrograms, (N, 1, H, W) float32.
        masks_NHW: uint8; None for sounds.
        index_N: int64.
        by_label: each label by name, (N,) int64; `NO_LABEL` for a sample without it.
        stored: the source of the inputs; None if each reading gives the same inputs.
    """

    manifest: Manifest
    images_NCHW: Tensor
    masks_NHW: Tensor | None
    index_N: Tensor
    by_label: Mapping[LabelSpace, Tensor]
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
        """Return the inputs of a view policy for some rows, with the same draw as `images_NCHW`."""
        masks_BHW = None if self.masks_NHW is None else self.masks_NHW[row_B]
        are_waveforms = self.stored is not None and self.are_sounds
        inputs = self.stored.batch(row_B).inputs_a if self.stored and are_waveforms else self.images_NCHW[row_B]
        return InputBatch(inputs, masks_BHW, {space: label_N[row_B] for space, label_N in self.by_label.items()})

    def redraw(self, row_B: Tensor, keys: Callable[[Tensor], DrawKeys]) -> InputBatch:
        """Return some rows, drawn again from `keys(index_B)` if inputs are made when they are read."""
        if self.stored is None:
            return self.inputs(row_B)
        batch = self.stored.batch(row_B, keys)
        return InputBatch(batch.inputs_a, batch.masks_BHW, batch.labels)

    def with_draw(self, draw: int) -> Pictures:
        """Return the same samples with another draw of their overlay, or themselves if nothing is drawn online."""
        if self.stored is None or not self.is_drawn_online:
            return self
        return _finish(replace(self.stored, draw=draw))

    def seen(self, inputs: Tensor) -> Tensor:
        """Return the input of the encoder without a view, for pictures in [0, 1] or for waveforms from `redraw`."""
        return _spectrograms(inputs, self.manifest)

    def labels(self, space: LabelSpace) -> Tensor:
        return self.by_label[space]

    def class_names(self, space: LabelSpace) -> tuple[str, ...]:
        """Return the class names of a label; none if the samples do not have it."""
        label = self.manifest.labels.get(space)
        return () if label is None else label.classes


def read_pictures(location: Path | str, *, read: ReadConfig = _DEFAULT_READ, draw: int = 0) -> Pictures:
    """Read a whole dataset into memory; samples that cannot be read are left out.

    50,000 pictures of 32x32 are 205 MB, twice that with an online overlay. 24,000 sounds at 48 kHz are about 2 GB.
    `draw` is the number of a draw of an online overlay. Each draw is the same in every run.

    Raises `UserError` if there is no dataset, if too many of its samples cannot be read, or if its sounds do not fit in
    memory or have a rate without a spectrogram.
    """
    store = SampleStore(location, remote=read.remote)
    _check_bad(store, store.known_bad, read)
    num_bytes, free = resident_bytes(store.manifest), free_host_bytes()
    if store.manifest.medium == "picture" and 2 * num_bytes > free:
        raise UserError(
            f"{location} takes {num_bytes / 1e9:.3g} GB in memory, and {free / 1e9:.3g} GB are free, of which a probe "
            "takes half at most; index fewer of its tars for the probe, or free some memory"
        )
    samples = _read_sounds(store) if store.manifest.medium == "sound" else read_whole(store, _CPU)
    _check_bad(store, samples.bad.values(), read)
    for bad in samples.bad.values():
        logger.warning("%s: %s in %s is left out: %s", location, bad.key, bad.shard, bad.reason)
    return _finish(StoredInputs(store.manifest, _labelled(store, samples.without_bad()), store.overlay, draw))


def _labelled(store: SampleStore, samples: DecodedSamples) -> DecodedSamples:
    """Return the samples without those that have no label at all, although others have one."""
    stored = [samples.labels[name] for name in store.manifest.stored_labels]
    if not stored or store.manifest.is_online:
        return samples
    rows = torch.nonzero((torch.stack(stored) != NO_LABEL).any(dim=0))[:, 0]
    if len(rows) == len(samples):
        return samples
    logger.warning("%s: %d samples without a label are left out", store.location, len(samples) - len(rows))
    return samples.take(rows)


def read_some(location: Path | str, *, num: int, read: ReadConfig = _DEFAULT_READ, draw: int = 0) -> Pictures:
    """Read `num` random samples (all, if there are fewer), the same each time.

    If the dataset is remote, they come from a few of its shards, so that little is fetched. Samples that cannot be read
    are left out. Raises `UserError` if there is no dataset, or if none of the samples can be read.
    """
    store = SampleStore(location, remote=read.remote)
    chosen = _choose(
        store.shard_ends,
        num=num,
        num_shards=min(_REMOTE_SHARDS, store.max_shards or _REMOTE_SHARDS) if store.is_remote else None,
    )
    samples = _labelled(store, decode(store, chosen).without_bad())
    if not len(samples):
        raise UserError(f"{location} holds no sample that can be read; find out with `python -m data_pipeline verify`")
    return _finish(StoredInputs(store.manifest, samples, store.overlay, draw))


def _check_bad(store: SampleStore, bad: Collection[BadSample], read: ReadConfig) -> None:
    check_bad_share(bad, num_samples=len(store), max_share=read.max_bad_share, where=store.location)


def _choose(shard_ends: NDArray[np.int64], *, num: int, num_shards: int | None) -> NDArray[np.int64]:
    """Return ascending indices of up to `num` random samples, equally probable, from up to `num_shards` shards."""
    num_samples = int(shard_ends[-1])
    if num_shards is None:
        permutation = KeyedPermutation(num_samples, 0, "samples of an online probe")
        return np.sort(permutation(np.arange(min(num, num_samples))))
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
        by_label={name: torch.cat([batch.labels[name] for batch in batches]) for name in batches[0].labels},
        stored=stored if is_drawn else None,
    )


def _spectrograms(inputs: Tensor, manifest: Manifest) -> Tensor:
    """Return the spectrograms (B, 1, H, W) of waveforms (B, T), or pictures as they are."""
    return inputs if manifest.sample_rate is None else clean_spectrogram(inputs, mel_config(manifest.sample_rate))


@contextmanager
def frozen(*modules: object) -> Iterator[None]:
    """Turn gradients off and put every module into eval mode. Restores the modes at the end."""
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
    """Return features (N, F) of pictures (N, C, H, W), uint8 or normalised, without views. Every rank calls this.

    Every rank gets all rows. Row i depends only on picture i if `function` treats pictures separately, as an encoder in
    eval mode does.
    """
    with torch.no_grad():
        return shared_rows(lambda part: function(to_float(part, device)), images_NCHW, chunk_size=batch_size)


def shared_rows(function: Callable[[Tensor], Tensor], x_N: Tensor, *, chunk_size: int) -> Tensor:
    """Apply `function` to each chunk of rows, and return all results in order, on every rank.

    Each chunk is the work of one rank. A rank with fewer chunks repeats its last one, so that `function` may call
    collectives.
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
    """Return uint8 pictures as float32 in [0, 1] on the device. Spectrograms and waveforms keep their floating type.

    Pictures are moved as bytes, a quarter of the size.
    """
    inputs = inputs.to(device)
    return inputs if inputs.is_floating_point() else inputs.float() / 255
