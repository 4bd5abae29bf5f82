"""Instance discrimination with a memory bank (Wu et al. 2018), in the form published with Tamkin et al. 2022.

A picture must be nearer to its own row of the bank than to rows drawn at random. The second view is used only for the
log.

Every rank holds the whole bank. It is constant within a step, and then takes up the pictures of all ranks.

Shapes: B pictures of this rank, G = B W pictures of all W ranks, N rows in the bank, K rows drawn for each picture, D
dimensions; I pictures at a time.
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from data_pipeline.core.counter_rng import DrawKeys, integers, uniform
from data_pipeline.core.schema import BatchSize, ShareBelowOne, Temperature
from trainer.distributed.collectives import all_gather_rows
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


def log_ratio(z_BD: Tensor, bank_ND: Tensor, index_B: Tensor, noise_BK: Tensor, *, temperature: float) -> Tensor:
    """Return log(exp(z . own row / t) / mean over K of exp(z . drawn row / t)) for each picture, (B,).

    The loss is minus their mean. The own row is in the denominator only if it was drawn.

    With a process group, all arguments but `bank_ND` are this rank's part of the batch, as in `nt_xent_loss`.

    Args:
        z_BD: (B, D) embeddings of any length and float type; normalised here, in float32 even under autocast.
        bank_ND: (N, D) unit vectors, which get no gradient.
        index_B: (B,) int64, the pictures' own rows in the bank.
        noise_BK: (B, K) int64, the rows drawn for each picture.

    Examples:
        >>> bank, own, noise = torch.eye(2), torch.tensor([0]), torch.tensor([[1, 1, 0]])
        >>> round(log_ratio(torch.tensor([[0.6, 0.8]]), bank, own, noise, temperature=0.5).item(), 4)
        -0.2836
    """
    with torch.autocast(z_BD.device.type, enabled=False):
        u_BD = F.normalize(z_BD.to(torch.promote_types(z_BD.dtype, torch.float32)), dim=1)
        bank_ND = bank_ND.detach().to(u_BD.dtype)
        num_pictures = max(1, _MAX_ENTRIES // len(bank_ND))
        # Products with all rows, of which the drawn ones are picked: on a CPU, 256 pictures and a bank of 50,000 rows
        # take a fifth of the time of a lookup of K rows for each picture.
        parts = zip(torch.split(u_BD, num_pictures), torch.split(noise_BK, num_pictures), strict=True)
        cosines_BK = torch.cat([(u_ID @ bank_ND.T).gather(1, noise_IK) for u_ID, noise_IK in parts])
        noise_B = cosines_BK.div(temperature).logsumexp(1)
        return (u_BD * bank_ND[index_B]).sum(1) / temperature - (noise_B - math.log(noise_BK.shape[1]))


def drawn_rows(index_B: Tensor, num_negatives: int, *, num_samples: int, seed: int, step: int) -> Tensor:
    """Draw (B, K) int64 rows of the bank, uniformly with replacement, as a function of (seed, step, sample index)."""
    keys = DrawKeys(seed=seed, epoch=step, index_B=index_B, view=0)  # the step in place of the epoch
    return integers(keys, num_negatives, num_samples, purpose=_NOISE)


@torch.no_grad()
def updated_bank(bank_ND: Tensor, z_BD: Tensor, index_B: Tensor, *, momentum: float) -> Tensor:
    """Return a new bank, with each row m of a picture set to normalise(momentum m + (1 - momentum) z).

    Counts the pictures of all ranks, and normalises z first. No picture may be in a global batch twice.
    """
    u_GD = F.normalize(all_gather_rows(z_BD.to(bank_ND.dtype)), dim=1)
    index_G = all_gather_rows(index_B)
    return bank_ND.index_copy(0, index_G, F.normalize(momentum * bank_ND[index_G] + (1 - momentum) * u_GD, dim=1))


class InstanceDiscrimination(Objective):
    """The objective of instance discrimination. Its state is the bank, which starts with random directions.

    The first directions are a function of (seed, sample index), and the drawn rows of (seed, step, sample index). Both
    are equal on any number of ranks.
    """

    bank_ND: Tensor

    def __init__(
        self, config: InstanceDiscriminationConfig, *, num_samples: int, embedding_size: int, seed: int
    ) -> None:
        super().__init__()
        self._config = config
        self._seed = seed
        keys = DrawKeys(seed=seed, epoch=0, index_B=torch.arange(num_samples), view=0)
        self.register_buffer("bank_ND", F.normalize(2 * uniform(keys, embedding_size, purpose=_FIRST_ROWS) - 1, dim=1))

    def forward(self, z_a_BD: Tensor, z_b_BD: Tensor, pair: ViewPair) -> ObjectiveOutput:
        config, index_B = self._config, pair.index_B
        noise_BK = drawn_rows(
            index_B, config.num_negatives, num_samples=len(self.bank_ND), seed=self._seed, step=pair.step
        )
        log_ratio_B = log_ratio(z_a_BD, self.bank_ND, index_B, noise_BK, temperature=config.temperature)
        if pair.updates_state:
            self.bank_ND = updated_bank(self.bank_ND, z_a_BD, index_B, momentum=config.momentum)
        # For the log: the probability of the own row among the own row and the drawn rows.
        log_probability_B = F.logsigmoid(log_ratio_B - math.log(config.num_negatives))
        return contrastive_output(-log_ratio_B.mean(), log_probability_B, z_a_BD, z_b_BD)
