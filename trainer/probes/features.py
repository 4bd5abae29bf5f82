"""Read the samples of a dataset, and compute features of a frozen encoder, for probes and analyses.

A dataset is read into memory once. Pictures that do not fit are streamed: decoded again each time they are asked for,
and only their features are kept. Features lie on the device, or on the host if they do not fit there.

The picture of a sound is its log-mel spectrogram, which the encoder gets if there is no view. A view is made from the
waveform, so the waveform is kept too.

With several ranks, each computes its share of the features, and all get the whole. The shares depend only on the
position of a sample, so a feature has the same bits on any number of ranks.

Shapes: N samples, B batch, C channels, H height, W width, T points of a waveform, F features.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from data_pipeline.audio.log_mel import MelConfig, mel_config
from data_pipeline.core.batch import Batch
from data_pipeline.core.counter_rng import DrawKeys
from data_pipeline.core.errors import UserError
from data_pipeline.core.randomness import generator
from data_pipeline.core.sample import BASE, NO_LABEL, OVERLAY
from data_pipeline.core.schema import LabelName
from data_pipeline.loading.collate import BatchMaker
from data_pipeline.loading.decode import DecodedSamples, decode
from data_pipeline.loading.permutation import KeyedPermutation
from data_pipeline.loading.placement import read_whole, resident_bytes, shortage
from data_pipeline.loading.sources import check_bad_share
from data_pipeline.loading.stream import ReadConfig
from data_pipeline.overlays import Overlay, evaluation_keys
from data_pipeline.storage.manifest import Manifest
from data_pipeline.storage.store import SampleStore
from trainer.data import DataConfig
from trainer.distributed.collectives import all_gather_rows, any_rank, rank, world_size
from trainer.probes.streamed_samples import StreamedSamples, find_readable
from trainer.views.expert_audio import clean_spectrogram
from trainer.views.inputs import to_floating

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
    """The methods of an encoder that probes use (`trainer.models.encoder.Encoder`). It normalises its input itself.

    `features_and_pooled` returns the features (B, F) of the linear probe and those of kNN, (B, C).
    """

    def features_and_pooled(self, views_BCHW: Tensor, /) -> tuple[Tensor, Tensor]: ...
    def train(self, mode: bool = True) -> object: ...
    def eval(self) -> object: ...


class ViewFunction(Protocol):
    """A view policy as probes call it.

    Maps pictures (B, C, H, W) float32 in [0, 1], with their masks, to views of the same shape. Maps waveforms (B, T)
    float32, without masks, to spectrograms (B, 1, H, W).
    """

    def __call__(self, inputs: Tensor, keys: DrawKeys, masks_BHW: Tensor | None, /) -> Tensor: ...


@dataclass(frozen=True)
class Pictures:
    """Every sample of a dataset once, in stored order, on one device; as read, on the host.

    The inputs of a batch are made when they are asked for.

    Attributes:
        manifest: of the dataset.
        samples: in memory, or decoded each time they are asked for.
        by_label: each label by name, (N,) int64; `NO_LABEL` for a sample without it.
        overlay: drawn on the samples of a batch; None if there is none, or if it was drawn into the shards.
        draw: the number of a draw of the overlay, that of pictures and labels. Each draw is the same in every run.
        num_left_out: the number of samples of the dataset that are not among these, because they have no label at all.
    """

    manifest: Manifest
    samples: DecodedSamples | StreamedSamples
    by_label: Mapping[LabelSpace, Tensor]
    overlay: Overlay | None = None
    draw: int = 0
    num_left_out: int = 0

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def are_sounds(self) -> bool:
        return self.manifest.medium == "sound"

    @property
    def size(self) -> tuple[int, int]:
        """Return the height and width of the pictures, or of the spectrograms of sounds."""
        if (mel := self.mel) is not None:
            return mel.num_mels, mel.num_frames
        _, height, width = self.manifest.batch_shape
        return height, width

    @property
    def mel(self) -> MelConfig | None:
        rate = self.manifest.sample_rate
        return None if rate is None else mel_config(rate, self.manifest.batch_shape[0])

    def on(self, device: torch.device) -> Pictures:
        """Return the same samples on a device, where their overlays and views are then drawn without copies.

        Streamed pictures, and samples for which the device has no memory, are returned as they are. Every rank calls
        this.
        """
        samples = self.samples
        if isinstance(samples, StreamedSamples) or samples.index_B.device == device:
            return self
        if not fits_in_memory(sum(each.nbytes for each in vars(samples).values() if isinstance(each, Tensor)), device):
            return self
        return replace(
            self,
            samples=samples.to(device),
            by_label={name: label_N.to(device) for name, label_N in self.by_label.items()},
            # A copy, because a module is moved in place.
            overlay=None if self.overlay is None else copy.deepcopy(self.overlay).to(device),
        )

    def ahead(self, rows: Sequence[Tensor], *, title: str) -> Iterable[Tensor]:
        """Return `rows` to loop over. Streamed pictures of the next ones are decoded during the loop.

        `inputs` and `pictures` must get the same tensors. `title` is that of the progress.
        """
        return self.samples.ahead(rows, title=title) if isinstance(self.samples, StreamedSamples) else rows

    def inputs(self, row_B: Tensor, keys: Callable[[Tensor], DrawKeys] | None = None) -> Batch:
        """Return some rows as training gets them, with overlays from `keys(index_B)`, by default those of `draw`.

        Views are of `inputs_a`.
        """
        chosen = keys or (lambda index_B: evaluation_keys(index_B, draw=self.draw))
        maker = BatchMaker(self.manifest, self.overlay, lambda index_B, epoch, view: chosen(index_B))
        return maker.apply_overlay(maker.collate(self.samples.take(row_B)))

    def seen(self, inputs: Tensor) -> Tensor:
        """Return the input of the encoder without a view, for pictures or waveforms from `inputs`, as (B, C, H, W)."""
        return inputs if (mel := self.mel) is None else clean_spectrogram(inputs, mel)

    def pictures(self, row_B: Tensor) -> Tensor:
        """Return the input of the encoder without a view: uint8 (B, C, H, W), or (B, 1, H, W) float32 of sounds."""
        return self.seen(self.inputs(row_B).inputs_a)

    def images(self, row_X: Tensor) -> Tensor:
        """Return `pictures` of any number of rows, (X..., C, H, W)."""
        rows = torch.split(row_X.flatten(), _ENCODED_AT_ONCE)
        parts = [self.pictures(row_B) for row_B in self.ahead(rows, title="pictures")]
        return torch.cat(parts).view(*row_X.shape, *parts[0].shape[1:])

    @property
    def class_labels(self) -> tuple[LabelSpace, ...]:
        """Return the labels that are classes, and no numbers."""
        return tuple(name for name, label in self.manifest.labels.items() if not label.is_number)

    def class_names(self, space: LabelSpace) -> tuple[str, ...]:
        """Return the class names of a label; none if the samples do not have it."""
        label = self.manifest.labels.get(space)
        return () if label is None else label.classes


def read_pictures(location: Path | str, *, read: ReadConfig = _DEFAULT_READ, draw: int = 0) -> Pictures:
    """Read a whole dataset; samples that cannot be read are left out. Every rank calls this.

    50,000 pictures of 32x32 take 154 MB, or 205 MB with masks. 24,000 sounds at 48 kHz take about 2 GB.
    Pictures that take more than half of the free memory are decoded once, to find those that can be read, and streamed
    from then on. The encoder gets a fixed number of readable pictures at a time, so they must be known before it runs.
    `draw` is the number of a draw of an online overlay. Each draw is the same in every run.

    Raises `UserError` if there is no dataset, if too many of its samples cannot be read, or if its sounds do not fit in
    memory or have a rate without a spectrogram.
    """
    store = SampleStore(location, remote=read.remote)
    labels_of = partial(_labels, store, draw=draw)
    samples: DecodedSamples | StreamedSamples
    if fits_in_memory(num_bytes := resident_bytes(store.manifest)):
        whole = read_whole(store, _CPU)
        samples, bad = _usable(store, whole), tuple(whole.bad.values())
        by_label = labels_of(samples)
    elif store.manifest.medium == "sound":
        raise UserError(
            f"{location} takes {num_bytes / 1e9:.3g} GB in memory, more than half of what is free; free some"
        )
    else:
        logger.info("%s takes %.3g GB in memory, so it is streamed", location, num_bytes / 1e9)
        samples, bad = find_readable(store, labels_of)
        if (rows := _labelled_rows(store, samples.labels)) is not None:
            samples = samples.chosen(rows)
        by_label = samples.labels
    check_bad_share(bad, num_samples=len(store), max_share=read.max_bad_share, where=store.location)
    for sample in bad:
        logger.warning("%s: %s in %s is left out: %s", location, sample.key, sample.shard, sample.reason)
    num_left_out = len(store) - len(bad) - len(samples)
    return Pictures(store.manifest, samples, by_label, store.overlay, draw, num_left_out)


def read_train(data: DataConfig) -> Pictures:
    """Read the train set of probes and analyses. Its online overlays are not those of the test samples."""
    return read_pictures(data.probed_dir, read=data, draw=TRAIN_DRAW)


def _labels(store: SampleStore, samples: DecodedSamples, *, draw: int) -> Mapping[LabelSpace, Tensor]:
    """Return the labels of decoded samples, with those that a draw of an online overlay gives."""
    if store.overlay is None or not len(samples):
        return samples.labels
    pictures = Pictures(store.manifest, samples, samples.labels, store.overlay, draw)
    parts = [pictures.inputs(row_B).labels for row_B in torch.split(torch.arange(len(samples)), _CHUNK)]
    return {name: torch.cat([labels[name] for labels in parts]) for name in parts[0]}


def _usable(store: SampleStore, samples: DecodedSamples) -> DecodedSamples:
    """Return the samples that could be read and have a label, if samples of their dataset have labels."""
    samples = samples.without_bad()
    rows = _labelled_rows(store, samples.labels)
    return samples if rows is None else samples.take(rows)


def _labelled_rows(store: SampleStore, labels: Mapping[LabelSpace, Tensor]) -> Tensor | None:
    """Return the rows that have a label, if only some of the samples have one; None if all rows are used."""
    stored = [labels[name] for name in store.manifest.stored_labels]
    if not stored or store.manifest.is_online:
        return None
    rows = torch.nonzero((torch.stack(stored) != NO_LABEL).any(dim=0))[:, 0]
    if len(rows) == len(stored[0]):
        return None
    logger.warning("%s: %d samples without a label are left out", store.location, len(stored[0]) - len(rows))
    return rows


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
    samples = _usable(store, decode(store, chosen))
    if not len(samples):
        raise UserError(f"{location} holds no sample that can be read; find out with `python -m data_pipeline verify`")
    return Pictures(store.manifest, samples, _labels(store, samples, draw=draw), store.overlay, draw)


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


def encode(
    function: Callable[[Tensor], Sequence[Tensor]],
    images: Tensor | Pictures,
    *,
    device: torch.device,
    batch_size: int = _ENCODED_AT_ONCE,
) -> Sequence[Tensor]:
    """Return each result (N, F) of `function` for pictures (N, C, H, W), uint8 or normalised, without views.

    Every rank calls this, and gets all rows, on `device`, or on the CPU if `images` are `Pictures` whose features do
    not fit there. Row i depends only on picture i if `function` treats pictures separately, as an encoder in eval mode
    does.
    """
    with torch.no_grad():
        return shared_rows(lambda part: function(to_floating(part.to(device))), images, chunk_size=batch_size)


def shared_rows(
    function: Callable[[Tensor], Sequence[Tensor]], inputs: Tensor | Pictures, *, chunk_size: int
) -> Sequence[Tensor]:
    """Apply `function` to each chunk of rows, and return each of its results for all rows in order, on every rank.

    Each chunk is the work of one rank. A rank with fewer chunks repeats its last one, so that `function` may call
    collectives.
    """
    chunks = [range(start, min(start + chunk_size, len(inputs))) for start in range(0, len(inputs), chunk_size)]
    num_of_rank = math.ceil(len(chunks) / world_size())
    first = rank() * num_of_rank
    mine = [chunks[min(number, len(chunks) - 1)] for number in range(first, first + num_of_rank)]
    wholes: Sequence[Tensor] = ()
    for number, parts in enumerate(map(function, _read_in_turn(inputs, mine))):
        wholes = wholes or [_room_for(inputs, part) for part in parts]
        for whole, part in zip(wholes, parts, strict=True):
            if world_size() > 1:
                part = torch.cat([part, part.new_zeros(chunk_size - len(part), *part.shape[1:])])
            # In a round, each rank does one chunk. Chunks past the end are repeated ones.
            for of_rank, rows in enumerate(torch.split(all_gather_rows(part), chunk_size)):
                start = (of_rank * num_of_rank + number) * chunk_size
                if start < len(inputs):
                    whole[start : start + chunk_size] = rows[: len(inputs) - start]
    return wholes


def _read_in_turn(inputs: Tensor | Pictures, chunks: Sequence[range]) -> Iterator[Tensor]:
    """Yield chunks of consecutive rows."""
    if isinstance(inputs, Tensor):
        yield from (inputs[chunk.start : chunk.stop] for chunk in chunks)
        return
    rows = [torch.arange(chunk.start, chunk.stop, device=inputs.samples.index_B.device) for chunk in chunks]
    yield from map(inputs.pictures, inputs.ahead(rows, title="pictures encoded"))


def _room_for(inputs: Tensor | Pictures, part: Tensor) -> Tensor:
    """Return a tensor for the results of all rows, whose first ones are `part`."""
    shape = (len(inputs), *part.shape[1:])
    if isinstance(inputs, Tensor):
        return part.new_empty(shape)
    return empty_features(shape, dtype=part.dtype, device=part.device)


def fits_in_memory(num_bytes: int, device: torch.device = _CPU) -> bool:
    """Return whether `num_bytes` take at most half of the free memory of a device; ranks share that of the host.

    Every rank calls this, and all get the same answer: no, if one of them has too little memory.
    """
    return not any_rank(bool(shortage(num_bytes, device, ranks_on_node=world_size())))


def empty_features(shape: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor for features: on `device` if they fit there, else on the CPU. Every rank calls this.

    Raises `UserError` if they do not fit on the CPU either.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    for place in dict.fromkeys((device, _CPU)):
        if fits_in_memory(num_bytes, place):
            return torch.empty(*shape, dtype=dtype, device=place)
    raise UserError(
        f"the features take {num_bytes / 1e9:.3g} GB on each rank, more than half of the free memory; use a machine "
        "with more, fit with views=policy, which keeps no train features, or train with encoder.probe_reads=pooled"
    )
