"""MoCo: each view must find the key of the other view among a queue of keys of earlier batches (He et al. 2020).

Keys come from a momentum copy of the encoder and carry no gradient. The symmetric form follows Huang et al. 2023: the
copy takes a step towards the encoder before it encodes the keys of each view, and keys join the queue after their use.
As published, the first key of a picture is therefore already a negative when its second view is the query.

If batch norm is not synchronised, the views are shuffled over the batch of all ranks before the key encoder, and their
keys are put back in order. Otherwise a picture and its key would share the statistics of one group, from which the key
could be recognised (He et al. 2020, section 3.3; Huang et al. 2023). Synchronised statistics do not depend on the
order. With `batch_norm="local"` in the encoder, keys depend on the number of ranks, like embeddings.

Shapes: B pictures of this rank, G = B W pictures of all W ranks, Q keys in the queue, D dimensions.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from data_pipeline.core.counter_rng import DrawKeys, integers
from data_pipeline.core.errors import UserError
from data_pipeline.core.schema import BatchSize, ShareBelowOne, Temperature
from trainer.distributed.collectives import all_gather_rows, rank
from trainer.models.batch_norm import depends_on_row_order
from trainer.models.momentum import MomentumCopy
from trainer.objectives.contrast import unit_pair
from trainer.objectives.objective import (
    BaseObjectiveConfig,
    Objective,
    ObjectiveInputs,
    ObjectiveOutput,
    ViewPair,
    contrastive_output,
)

_ORDER_PURPOSE = 200  # `purpose` in `data_pipeline.core.counter_rng`


class MoCoConfig(BaseObjectiveConfig):
    """The config of MoCo.

    momentum: the share of the old weights at every step of the key encoder towards the encoder. The symmetric form
        takes two such steps in each training step.
    direction: with "one_way", the first view is the query and the second is the key. The embeddings of the second view
        are then not trained.
    """

    copies_encoder: ClassVar[bool] = True
    can_be_recorded: ClassVar[bool] = True

    kind: Literal["moco"] = "moco"
    temperature: Temperature = 0.1
    queue_size: BatchSize = 4096
    momentum: ShareBelowOne = 0.99
    direction: Literal["symmetric", "one_way"] = "symmetric"

    @property
    def trains_second_view(self) -> bool:
        return self.direction == "symmetric"

    def check(self, run: Any) -> None:
        if self.queue_size % run.global_batch_size:
            nearest_size = max(1, round(self.queue_size / run.global_batch_size)) * run.global_batch_size
            raise UserError(
                f"objective.queue_size {self.queue_size} is not a multiple of global_batch_size "
                f"{run.global_batch_size}; the nearest is {nearest_size}"
            )

    def why_not_recorded(self, run: Any) -> str | None:
        if run.encoder.batch_norm == "synchronized":
            return None
        return "objective moco shuffles its batch anew at each step; set encoder.batch_norm=synchronized"

    def build(self, given: ObjectiveInputs) -> Objective:
        return MoCo(self, encoder=given.encoder, embedding_size=given.embedding_size)


def key_log_probability(z_BD: Tensor, keys_BD: Tensor, queue_QD: Tensor, *, temperature: float) -> Tensor:
    """Return the log softmax of each picture's own key, among this key and the queue, (B,). MoCo is minus their mean.

    With a process group, `z_BD` and `keys_BD` are this rank's part of the batch, and the queue is equal on all ranks.
    Keys and queue get no gradient.

    Args:
        z_BD, keys_BD: (B, D) embeddings of any length and float type; normalised here, in float32 even under autocast.
        queue_QD: (Q, D) unit vectors.

    Raises:
        ValueError: if the embeddings are not (B, D) with equal shapes.

    Examples:
        >>> z, key = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.6, 0.8]])
        >>> round(key_log_probability(z, key, torch.tensor([[0.0, 1.0]]), temperature=0.5).item(), 4)
        -0.2633
    """
    with torch.autocast(z_BD.device.type, enabled=False):
        u_BD, unit_keys_BD = unit_pair(z_BD, keys_BD.detach())
        own_B1 = (u_BD * unit_keys_BD).sum(1, keepdim=True)
        logits_BC = torch.cat([own_B1, u_BD @ queue_QD.to(u_BD.dtype).T], dim=1) / temperature
        return F.log_softmax(logits_BC, dim=1)[:, 0]


def enqueue(queue_QD: Tensor, keys_BD: Tensor) -> Tensor:
    """Return a new queue, oldest key first: without its first G keys, and with the keys of all ranks at its end.

    The new keys are in rank order. `keys_BD` may have any length; keys in the queue are unit vectors.
    """
    keys_GD = F.normalize(all_gather_rows(keys_BD.detach().to(queue_QD.dtype)), dim=1)
    return torch.cat([queue_QD[len(keys_GD) :], keys_GD])


def shuffled_order(index_G: Tensor, *, step: int, view: int) -> Tensor:
    """Return a permutation of a global batch, (G,) int64, drawn from dataset indices, step and view.

    Every rank, and a single process, draws the same permutation.
    """
    keys = DrawKeys(seed=0, epoch=step, index_B=index_G, view=view)
    return integers(keys, 1, (1 << 31) - 1, purpose=_ORDER_PURPOSE)[:, 0].argsort(stable=True)


class MoCo(Objective):
    """The objective of MoCo. Its state is the key encoder and the queue, equal on all and on any number of ranks.

    The queue starts with random directions from torch's default generator, which must have the same seed on all ranks.
    """

    queue_QD: Tensor

    def __init__(self, config: MoCoConfig, *, encoder: nn.Module, embedding_size: int) -> None:
        super().__init__()
        self._config = config
        self.key_encoder = MomentumCopy(encoder, momentum=config.momentum)
        self._shuffles = depends_on_row_order(encoder)
        self.register_buffer("queue_QD", F.normalize(torch.randn(config.queue_size, embedding_size), dim=1))

    def forward(self, z_a_BD: Tensor, z_b_BD: Tensor, pair: ViewPair) -> ObjectiveOutput:
        queries = (z_a_BD,) if self._config.direction == "one_way" else (z_a_BD, z_b_BD)
        log_probability_N = torch.cat([self._query(z_BD, pair, key_view=1 - view) for view, z_BD in enumerate(queries)])
        return contrastive_output(-log_probability_N.mean(), log_probability_N, z_a_BD, z_b_BD)

    def _query(self, z_BD: Tensor, pair: ViewPair, *, key_view: int) -> Tensor:
        """Return the log-probability of the own keys, and add these keys to the queue."""
        if pair.updates_state:
            self.key_encoder.follow()
        keys_BD = self._keys(pair, key_view)
        log_probability_B = key_log_probability(z_BD, keys_BD, self.queue_QD, temperature=self._config.temperature)
        if pair.updates_state:
            self.queue_QD = enqueue(self.queue_QD, keys_BD)  # a new tensor: the backward pass still needs the old one
        return log_probability_B

    def _keys(self, pair: ViewPair, view: int) -> Tensor:
        views_BCHW = (pair.views_a_BCHW, pair.views_b_BCHW)[view]
        if not self._shuffles:
            keys_BD: Tensor = self.key_encoder(views_BCHW, updates_buffers=pair.updates_state)
            return keys_BD
        order_G = shuffled_order(all_gather_rows(pair.index_B), step=pair.step, view=view)
        own = slice(rank() * len(views_BCHW), (rank() + 1) * len(views_BCHW))
        shuffled_BCHW = all_gather_rows(views_BCHW)[order_G[own]]
        keys_GD = all_gather_rows(self.key_encoder(shuffled_BCHW, updates_buffers=pair.updates_state))
        return keys_GD[order_G.argsort()[own]]
