"""Train on batches of near neighbours: samples that the encoder cannot yet tell apart.

A contrastive loss falls as soon as the encoder tells samples apart by one easy feature, and then it hardly learns the
others. Among samples that share this feature, only the others help. So from some epoch on, a batch consists of groups:
a sample and its nearest neighbours among the features of the encoder. A sample is compared with its group only
(`SymmetricInfoNCE`). No label is read.

This is a form of multistage contrastive learning (Zhang et al. 2024, "Learning the Unlearned"), which takes negatives
from the cluster of a sample. There, each stage trains another encoder, and their features are put side by side. Here,
one encoder goes on, and its nearest neighbours take the place of clusters.

Groups are found when an epoch begins, from the pictures or sounds as that epoch shows them, and written to the run
directory: in every epoch, in every k-th one, or once. A run that goes on reads them.

Shapes: N samples of the train set, B batch, F features, G samples in a group, C chunk.
"""

from __future__ import annotations

import io
from contextlib import AbstractContextManager
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
from data_pipeline.core.schema import Count, Schema
from data_pipeline.loading.stream import Stream
from trainer.distributed.collectives import all_gather_rows, broadcast_object, on_first_rank
from trainer.models.batch_norm import average_running_statistics
from trainer.models.encoder import Encoder
from trainer.probes.features import frozen, to_float
from trainer.run_dir import write_atomically
from trainer.views.expert_audio import clean_spectrogram

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


class NeighbourGroups:
    """The groups of a run. Every rank calls its methods at the same time.

    Args:
        config: None for a run without groups; then nothing happens here.
        directory: the directory of the run, which holds `neighbours/epoch_NNNNN.npy`.
        mel: the spectrogram of sounds; None for pictures.
        is_new: whether the run goes on with another train set, to which no group in the directory belongs. Its groups
            are then found before the first step that needs them.

    Raises `UserError` if the stream cannot be read in groups.
    """

    def __init__(
        self,
        config: NeighboursConfig | None,
        directory: Path,
        stream: Stream,
        encoder: Encoder,
        *,
        mel: MelConfig | None,
        is_new: bool = False,
    ) -> None:
        if config is not None:
            stream.check_groups(config.group_size)
        self._config, self._directory = config, directory
        self._stream, self._encoder, self._mel = stream, encoder, mel
        self._is_new = is_new
        self._found_in: int | None = None  # the epoch in which the groups that the stream reads were found

    def before(self, step: int, *, patience: AbstractContextManager[None]) -> None:
        """Give the stream its groups before it reads a step, if these are others than before."""
        epoch, in_epoch = divmod(step, self._stream.num_steps_per_epoch)
        found_in = None if self._config is None else self._config.found_in(epoch)
        if self._config is None or found_in is None or found_in == self._found_in:
            return
        with patience:
            if (in_epoch == 0 and found_in == epoch) or self._is_new:
                features_NF, known_N = self._features(epoch)
                size = self._config.group_size
                on_first_rank(lambda: self._find(features_NF, known_N, found_in, group_size=size))
            groups_NG = broadcast_object(on_first_rank(lambda: read_groups(self._directory, found_in)))
            assert groups_NG is not None
            self._stream.read_in_groups(groups_NG)
        self._found_in, self._is_new = found_in, False

    def _find(self, features_NF: Tensor, known_N: Tensor, epoch: int, *, group_size: int) -> None:
        content = io.BytesIO()
        np.save(content, nearest_neighbours(features_NF, known_N, group_size=group_size))
        write_atomically(_file(self._directory, epoch), content.getvalue())

    def _features(self, epoch: int) -> tuple[Tensor, Tensor]:
        """Return the pooled features (N, F) of all samples as an epoch shows them, and which it shows, (N,) bool."""
        encoder = self._encoder
        average_running_statistics(encoder)  # as before a checkpoint, from which the run may go on
        parameter = next(encoder.parameters())
        num_samples = self._stream.num_samples
        features_NF, known_N = torch.empty(0), torch.zeros(num_samples, dtype=torch.bool, device=parameter.device)
        with frozen(encoder):
            for batch in self._stream.epoch_batches(epoch):
                inputs = to_float(batch.inputs_a, parameter.device)
                inputs = inputs if self._mel is None else clean_spectrogram(inputs, self._mel)
                features_BF = all_gather_rows(encoder.pooled(inputs.to(parameter.dtype)))
                index_B = all_gather_rows(batch.index_B)
                if not len(features_NF):
                    features_NF = features_BF.new_zeros(num_samples, features_BF.shape[1])
                features_NF[index_B], known_N[index_B] = features_BF, True
        return features_NF, known_N


def read_groups(directory: Path, epoch: int) -> NDArray[np.int64]:
    """Return the groups that were found in an epoch, (N, G) int64. Raises `UserError` if they are not there."""
    path = _file(directory, epoch)
    try:
        groups: NDArray[np.int64] = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise UserError(
            f"{path} cannot be read ({error}), but it holds the groups that the next batches consist of; put the file "
            "back, or start the run again in another directory"
        ) from None
    return groups


def _file(directory: Path, epoch: int) -> Path:
    return directory / "neighbours" / f"epoch_{epoch:05d}.npy"
