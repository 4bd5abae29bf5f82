"""Train on batches of near neighbours: samples that the encoder cannot yet tell apart.

A contrastive loss falls as soon as the encoder tells samples apart by one easy feature, and then it hardly learns the
others. Among samples that share this feature, only the others help. So from some epoch on, a batch consists of groups:
a sample and its nearest neighbours among the features of the encoder. A sample is compared with its group only
(`symmetric_info_nce_loss`). No label is read.

This is a form of multistage contrastive learning (Zhang et al. 2024, "Learning the Unlearned"), which takes negatives
from the cluster of a sample. There, each stage trains another encoder, and their features are put side by side. Here,
one encoder goes on, and its nearest neighbours take the place of clusters.

Groups are found when an epoch begins, from the pictures or sounds as that epoch shows them, and written to the run
directory: in every epoch, in every k-th one, or once. A run that goes on reads them.

Shapes: N samples of the train set, B batch, F features, G samples in a group, C chunk.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from data_pipeline.audio.log_mel import MelConfig
from data_pipeline.core.errors import UserError
from data_pipeline.core.sample import BadSample
from data_pipeline.core.schema import Count, Schema
from data_pipeline.loading.order import BatchOrder, Rows, rows_of_bad
from data_pipeline.loading.stream import Stream
from trainer.data import DataConfig
from trainer.distributed.collectives import all_gather_rows, on_every_rank, on_first_rank
from trainer.models.batch_norm import share_running_statistics
from trainer.models.encoder import Encoder
from trainer.probes.features import frozen
from trainer.run_dir import write_atomically
from trainer.views.expert_audio import clean_spectrogram
from trainer.views.inputs import to_floating

_COMPARED_AT_ONCE = 1_024  # samples whose similarity with all others is in memory


class NeighboursConfig(Schema):
    """The config of batches of near neighbours.

    from_epoch: the first epoch with such batches, counted from 0. The encoder must have learned the easy feature.
    group_size: the samples in a group: one and its nearest neighbours. It must divide a rank's part of the batch.
    find_every_epochs: the epochs between two searches of neighbours; None: the groups of `from_epoch` stay.
    """

    from_epoch: Count = 2
    group_size: Annotated[int, Field(ge=2, le=1_024)] = 4
    find_every_epochs: Annotated[int, Field(ge=1, le=100_000)] | None = 1

    def found_in(self, epoch: int) -> int | None:
        """Return the epoch in which the groups of an epoch were found; None for an epoch without groups."""
        if epoch < self.from_epoch:
            return None
        since = epoch - self.from_epoch
        return epoch - (since if self.find_every_epochs is None else since % self.find_every_epochs)


def nearest_neighbours(features_NF: Tensor, known_N: Tensor, *, group_size: int) -> NDArray[np.int64]:
    """Return each sample and its nearest neighbours by the cosine of centred features, (N, G) int64, itself first.

    Only samples that are `known_N` (bool) are neighbours. The row of another sample repeats the known one before it.
    Raises `UserError` if fewer than `group_size` samples are known.
    """
    known = known_N.nonzero()[:, 0]
    if len(known) < group_size:
        raise UserError(f"neighbours.group_size is {group_size}, but only {len(known)} samples can be read")
    unit_KF = F.normalize(features_NF[known] - features_NF[known].mean(0))
    rows: list[Tensor] = []
    for start in range(0, len(known), _COMPARED_AT_ONCE):
        similarity_CK = unit_KF[start : start + _COMPARED_AT_ONCE] @ unit_KF.T
        own_C = torch.arange(len(similarity_CK), device=known.device)
        similarity_CK[own_C, own_C + start] = torch.inf
        rows.append(known[similarity_CK.topk(group_size, dim=1).indices])
    last_known_N = (known_N.cumsum(0) - 1).clamp(min=0)
    neighbours: NDArray[np.int64] = torch.cat(rows)[last_known_N].cpu().numpy()
    return neighbours


@dataclass(frozen=True)
class NeighbourOrder(BatchOrder):
    """The order of one dataset in groups of samples, which stand together in a batch and never on two ranks.

    The first samples of the epoch's order are read, each followed by the rest of its group. A sample may come twice in
    a batch, in two groups.

    `groups` returns the groups of a step, (N, G) int64, one for each of the N samples; None for a step without groups.
    Samples that were bad when the groups were found are in none. `rows` raises `UserError` for a sample in a group that
    cannot be read since then.
    """

    groups: Callable[[int], NDArray[np.int64] | None] = field(kw_only=True)

    def rows(self, number: int, step: int, *, bad: Mapping[int, BadSample]) -> Rows:
        if (groups_NG := self.groups(step)) is None:
            return super().rows(number, step, bad=bad)
        group_size = groups_NG.shape[1]
        epoch, step_in_epoch = divmod(step, self.num_steps_per_epoch)
        num_groups = self.global_batch_size // group_size
        num_own = num_groups // self.world_size
        first = step_in_epoch * num_groups + self.rank * num_own
        samples = self.epochs.of_epoch(epoch)(np.arange(first, first + num_own, dtype=np.int64))
        indices_R = groups_NG[samples].reshape(-1)
        if rows := rows_of_bad(indices_R, bad):
            raise UserError(
                f"sample {bad[int(indices_R[rows[0]])].key} cannot be read, but it is in a group of neighbours that "
                "was found when it could be; build or copy the dataset again"
            )
        return Rows(indices_R, indices_R, epoch, (), group_size=group_size)


def in_memory(data: DataConfig, device: torch.device) -> DataConfig:
    """Return settings that keep the samples in memory, among which neighbours are found, if `data` leaves it open."""
    if data.placement != "auto":
        return data
    return data.model_copy(update={"placement": "device" if device.type == "cuda" else "host"})


@dataclass
class NeighbourSearch:
    """The groups of a run by step.

    Attributes:
        config: when groups are found, and their size.
        directory: the directory of the run, which holds `neighbours/epoch_NNNNN.npy`.
        stream: the samples. Every rank reads the same steps.
        encoder: whose pooled features tell which samples are near.
        mel: the spectrogram of sounds; None for pictures.
        is_new: whether the run goes on with another train set, to which no group in the directory belongs. Its groups
            are then found before the first step that needs them.
        patience: is entered while groups are found, which takes longer than a step.
    """

    config: NeighboursConfig
    directory: Path
    stream: Stream
    encoder: Encoder
    mel: MelConfig | None
    is_new: bool
    patience: Callable[[], AbstractContextManager[None]]
    _found_in: int | None = None  # the epoch in which `_groups_NG` were found
    _groups_NG: NDArray[np.int64] | None = None

    def __call__(self, step: int) -> NDArray[np.int64] | None:
        """Return the groups of a step, (N, G) int64; find them if the step is the first that needs them."""
        epoch, in_epoch = divmod(step, self.stream.num_steps_per_epoch)
        found_in = self.config.found_in(epoch)
        if found_in is None or found_in == self._found_in:
            return self._groups_NG if found_in is not None else None
        with self.patience():
            if (in_epoch == 0 and found_in == epoch) or self.is_new:
                features_NF, known_N = self._features(epoch)
                size = self.config.group_size
                on_first_rank(lambda: self._find(features_NF, known_N, found_in, group_size=size))
            self._groups_NG = on_every_rank(lambda: read_groups(self.directory, found_in), catch=OSError)
        self._found_in, self.is_new = found_in, False
        return self._groups_NG

    def _find(self, features_NF: Tensor, known_N: Tensor, epoch: int, *, group_size: int) -> None:
        content = io.BytesIO()
        np.save(content, nearest_neighbours(features_NF, known_N, group_size=group_size))
        write_atomically(_file(self.directory, epoch), content.getvalue())

    def _features(self, epoch: int) -> tuple[Tensor, Tensor]:
        """Return the pooled features (N, F) of all samples as an epoch shows them, and which it shows, (N,) bool."""
        encoder = self.encoder
        share_running_statistics(encoder)  # as before a checkpoint, from which the run may go on
        parameter = next(encoder.parameters())
        num_samples, num_steps = self.stream.num_samples, self.stream.num_steps_per_epoch
        features_NF, known_N = torch.empty(0), torch.zeros(num_samples, dtype=torch.bool, device=parameter.device)
        with frozen(encoder):
            for batch in self.stream.batches(range(epoch * num_steps, (epoch + 1) * num_steps)):
                inputs = to_floating(batch.inputs_a.to(parameter.device))
                inputs = inputs if self.mel is None else clean_spectrogram(inputs, self.mel)
                features_BF = all_gather_rows(encoder.pooled(inputs.to(parameter.dtype)))
                index_B = all_gather_rows(batch.index_B)
                if not len(features_NF):
                    features_NF = features_BF.new_zeros(num_samples, features_BF.shape[1])
                features_NF[index_B], known_N[index_B] = features_BF, True
        return features_NF, known_N


def neighbour_order(search: NeighbourSearch) -> NeighbourOrder:
    """Return the order of a stream in groups of neighbours, which are found when the first of their steps is read.

    Raises `UserError` if the samples are not in memory, or if the groups do not divide the batch of a rank.
    """
    stream, size = search.stream, search.config.group_size
    order = stream.order
    assert isinstance(order, BatchOrder)
    if stream.placement == "stream":
        raise UserError(
            f"neighbours are found among all samples, so they must be in memory, but {stream.location} is streamed "
            f"({stream.placement_reason}); set data.placement=host, or leave out the section neighbours"
        )
    own = order.global_batch_size // order.world_size
    if own % size:
        raise UserError(
            f"neighbours.group_size {size} does not divide the {own} samples of a batch on each rank; set another "
            "group_size, global_batch_size or number of ranks"
        )
    return NeighbourOrder(**vars(order), groups=search)


def read_groups(directory: Path, epoch: int) -> NDArray[np.int64]:
    """Return the groups that were found in an epoch, (N, G) int64. Raises `OSError` if they are not there."""
    groups: NDArray[np.int64] = np.load(_file(directory, epoch), allow_pickle=False)
    return groups


def _file(directory: Path, epoch: int) -> Path:
    return directory / "neighbours" / f"epoch_{epoch:05d}.npy"
