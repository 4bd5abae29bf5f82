"""Instance discrimination with a memory bank (Wu et al. 2018), in the form published with Tamkin et al. 2022.

A picture must be nearer to its own row of the bank than to rows drawn at random. The second view is used only for the
log.

Row i of the bank lies on rank i modulo W, so a bank may be larger than one device. The bank is constant within a step,
so the gradient can be computed together with the loss. Each rank sums value and gradient over its own rows, for the
pictures of all ranks, and the backward pass needs no collective.

Shapes: B pictures of this rank, G = B W pictures of all W ranks, N rows in the bank, R rows of this rank, K rows drawn
for each picture, D dimensions; I pictures at a time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from data_pipeline.core.counter_rng import DrawKeys, integers, uniform
from data_pipeline.core.schema import BatchSize, ShareBelowOne, Temperature
from trainer.distributed.collectives import all_gather_rows, all_reduce_sum, rank, world_size
from trainer.objectives.objective import (
    BaseObjectiveConfig,
    Objective,
    ObjectiveInputs,
    ObjectiveOutput,
    ViewPair,
    contrastive_output,
)

_FIRST_ROWS, _NOISE = 200, 201  # `purpose` in `data_pipeline.core.counter_rng`
_MAX_ENTRIES = 1 << 22  # entries in memory at once, of the matrix of pictures times rows


class InstanceDiscriminationConfig(BaseObjectiveConfig):
    """The config of instance discrimination.

    num_negatives: the number of rows that are drawn for each picture at each step.
    momentum: the share of the old row in the new row.
    """

    needs_num_samples: ClassVar[bool] = True

    kind: Literal["instance_discrimination"] = "instance_discrimination"
    temperature: Temperature = 0.07
    num_negatives: BatchSize = 4096
    momentum: ShareBelowOne = 0.5

    @property
    def trains_second_view(self) -> bool:
        return False

    def build(self, given: ObjectiveInputs) -> Objective:
        return InstanceDiscrimination(
            self, num_samples=given.num_samples, embedding_size=given.embedding_size, seed=given.seed
        )


def log_ratio(z_BD: Tensor, shard_RD: Tensor, index_B: Tensor, noise_BK: Tensor, *, temperature: float) -> Tensor:
    """Return log(exp(z . own row / t) / mean over K of exp(z . drawn row / t)) for each picture, (B,).

    The loss is minus their mean. The own row is in the denominator only if it was drawn.

    With a process group, all arguments but `shard_RD` are this rank's part of the batch, equally large on every rank.
    The mean of the losses of the ranks is the loss of the whole batch, and averaging parameter gradients over the ranks
    gives its gradient.

    Args:
        z_BD: (B, D) embeddings of any length and float type; normalised here, in float32 even under autocast.
        shard_RD: (R, D) unit vectors: the rows rank, rank + W, rank + 2 W, ... of the bank.
        index_B: (B,) int64, the pictures' own rows in the bank.
        noise_BK: (B, K) int64, the rows drawn for each picture.

    Examples:
        >>> bank, own, noise = torch.eye(2), torch.tensor([0]), torch.tensor([[1, 1, 0]])
        >>> round(log_ratio(torch.tensor([[0.6, 0.8]]), bank, own, noise, temperature=0.5).item(), 4)
        -0.2836
    """
    with torch.autocast(z_BD.device.type, enabled=False):
        u_BD = F.normalize(z_BD.to(torch.promote_types(z_BD.dtype, torch.float32)), dim=1)
        with torch.no_grad():
            shard_RD = shard_RD.to(u_BD.dtype)
            own_rows_BD = _fetch(shard_RD, index_B)
            log_sum_B, slope_BD = _noise_log_sum(u_BD, shard_RD, noise_BK, temperature)
        noise_B: Tensor = _WithSlope.apply(u_BD, log_sum_B, slope_BD)  # type: ignore[no-untyped-call]
        return (u_BD * own_rows_BD).sum(1) / temperature - (noise_B - math.log(noise_BK.shape[1]))


def drawn_rows(index_B: Tensor, num_negatives: int, *, num_samples: int, seed: int, step: int) -> Tensor:
    """Draw (B, K) int64 rows of the bank, uniformly with replacement, as a function of (seed, step, sample index)."""
    keys = DrawKeys(seed=seed, epoch=step, index_B=index_B, view=0)  # the step in place of the epoch
    return integers(keys, num_negatives, num_samples, purpose=_NOISE)


@torch.no_grad()
def updated_rows(shard_RD: Tensor, z_BD: Tensor, index_B: Tensor, *, momentum: float) -> Tensor:
    """Return this rank's rows, (R, D), with each row m of a picture set to normalise(momentum m + (1 - momentum) z).

    Counts the pictures of all ranks, and normalises z first. No picture may be in a global batch twice.
    """
    u_GD = F.normalize(all_gather_rows(z_BD.detach().to(shard_RD.dtype)), dim=1)
    is_mine_G, row_G = _place(all_gather_rows(index_B))
    # Rows of other ranks go into a spare row that is dropped: a selection of this rank's rows would wait for the GPU.
    with_spare_RD = torch.cat([shard_RD, shard_RD[:1]])
    row_G = torch.where(is_mine_G, row_G, len(shard_RD))
    new_GD = F.normalize(momentum * with_spare_RD[row_G] + (1 - momentum) * u_GD, dim=1)
    return with_spare_RD.index_copy_(0, row_G, new_GD)[:-1].clone()


class InstanceDiscrimination(Objective):
    """The objective of instance discrimination. Its state is the bank, which starts with random directions.

    The first directions are a function of (seed, sample index), and the drawn rows of (seed, step, sample index). Both
    are equal on any number of ranks.
    """

    shard_RD: Tensor

    def __init__(
        self, config: InstanceDiscriminationConfig, *, num_samples: int, embedding_size: int, seed: int
    ) -> None:
        super().__init__()
        self._config = config
        self._num_samples = num_samples
        self._seed = seed
        keys = DrawKeys(seed=seed, epoch=0, index_B=torch.arange(rank(), num_samples, world_size()), view=0)
        self.register_buffer("shard_RD", F.normalize(2 * uniform(keys, embedding_size, purpose=_FIRST_ROWS) - 1, dim=1))

    def forward(self, z_a_BD: Tensor, z_b_BD: Tensor, pair: ViewPair) -> ObjectiveOutput:
        noise_BK = drawn_rows(
            pair.index_B,
            self._config.num_negatives,
            num_samples=self._num_samples,
            seed=self._seed,
            step=pair.step,
        )
        log_ratio_B = log_ratio(z_a_BD, self.shard_RD, pair.index_B, noise_BK, temperature=self._config.temperature)
        if pair.updates_state:
            self.shard_RD = updated_rows(self.shard_RD, z_a_BD, pair.index_B, momentum=self._config.momentum)
        # For the log: the probability of the own row among the own row and the drawn rows.
        log_probability_B = F.logsigmoid(log_ratio_B - math.log(self._config.num_negatives))
        return contrastive_output(-log_ratio_B.mean(), log_probability_B, z_a_BD, z_b_BD)

    def saved_state(self) -> dict[str, Tensor]:
        """Return the whole bank, (N, D)."""
        num_rows = -(-self._num_samples // world_size())  # of the largest shard
        padded_RD = F.pad(self.shard_RD, (0, 0, 0, num_rows - len(self.shard_RD)))
        rows_WRD = all_gather_rows(padded_RD).view(world_size(), num_rows, -1)
        return {"bank_ND": rows_WRD.transpose(0, 1).flatten(0, 1)[: self._num_samples].contiguous()}

    def load_saved(self, state: Mapping[str, Tensor]) -> None:
        self.load_state_dict({"shard_RD": state["bank_ND"][rank() :: world_size()]})


def _fetch(shard_RD: Tensor, index_B: Tensor) -> Tensor:
    """Fetch rows `index_B` of the bank from the ranks that hold them."""
    is_mine_G, row_G = _place(all_gather_rows(index_B))
    return _own_part(all_reduce_sum(shard_RD[row_G] * is_mine_G[:, None]), len(index_B))


def _noise_log_sum(u_BD: Tensor, shard_RD: Tensor, noise_BK: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return the log of the sum over K of exp(u . drawn row / t), (B,), and its gradient by u, (B, D)."""
    num_pictures = max(1, _MAX_ENTRIES // len(shard_RD))
    parts = [
        _noise_part(u_ID, shard_RD, noise_IK, temperature)
        for u_ID, noise_IK in zip(
            torch.split(all_gather_rows(u_BD), num_pictures),
            torch.split(all_gather_rows(noise_BK), num_pictures),
            strict=True,
        )
    ]
    part_G, slope_GD = (torch.cat(of_parts) for of_parts in zip(*parts, strict=True))
    log_sum_G = all_gather_rows(part_G[None]).logsumexp(0)
    slope_GD = all_reduce_sum(slope_GD * (part_G - log_sum_G).exp()[:, None])
    return _own_part(log_sum_G, len(u_BD)), _own_part(slope_GD, len(u_BD))


def _noise_part(u_ID: Tensor, shard_RD: Tensor, noise_IK: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Do `_noise_log_sum`, (I,) and (I, D), for the rows of this rank; -inf and 0 if it has none of the drawn rows.

    Multiplies with all rows and picks the drawn rows from the products. For 256 pictures and a bank of 50,000 rows on a
    CPU, this takes a fifth of the time of a lookup of K rows for each picture.
    """
    is_mine_IK, row_IK = _place(noise_IK)
    products_IR = u_ID @ shard_RD.T
    logits_IK = products_IR.gather(1, row_IK).div_(temperature).masked_fill_(~is_mine_IK, -torch.inf)
    log_sum_I = logits_IK.logsumexp(1)
    weight_IK = (logits_IK - log_sum_I[:, None]).exp_().nan_to_num_(0)  # -inf - -inf is nan if it has none
    weight_IR = products_IR.zero_().scatter_add_(1, row_IK, weight_IK)
    return log_sum_I, (weight_IR @ shard_RD).div_(temperature)


def _place(index: Tensor) -> tuple[Tensor, Tensor]:
    """Return whether this rank holds the rows `index` of the bank, and their positions in its shard (0 if not)."""
    is_mine = index % world_size() == rank()
    return is_mine, index // world_size() * is_mine


def _own_part(x_GX: Tensor, num_rows: int) -> Tensor:
    return x_GX[rank() * num_rows :][:num_rows]


class _WithSlope(torch.autograd.Function):
    """A function of the rows of `u_BD` with the value `value_B` and the gradient `slope_BD`."""

    @staticmethod
    def forward(ctx: Any, u_BD: Tensor, value_B: Tensor, slope_BD: Tensor) -> Tensor:
        ctx.save_for_backward(slope_BD)
        return value_B.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_B: Tensor) -> tuple[Tensor, None, None]:
        (slope_BD,) = ctx.saved_tensors
        return grad_B[:, None] * slope_BD, None, None
