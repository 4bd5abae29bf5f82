"""A linear encoder trained by instance discrimination, on any number of ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.distributed.collectives import all_reduce_sum, rank, world_size
from trainer.objectives.instance_discrimination import (
    InstanceDiscrimination,
    InstanceDiscriminationConfig,
    log_ratio,
)
from trainer.objectives.objective import ViewPair

# Batch of all ranks B, of one rank L; T steps, N samples.
NUM_SAMPLES = 23  # no multiple of 2 or 4
EMBEDDING_SIZE = 6


def toy_bank(*, num_negatives: int = 40) -> InstanceDiscrimination:
    config = InstanceDiscriminationConfig(num_negatives=num_negatives)
    return InstanceDiscrimination(config, num_samples=NUM_SAMPLES, embedding_size=EMBEDDING_SIZE, seed=7).double()


def pair_of(index_B: Tensor, *, step: int = 0, updates_state: bool = True) -> ViewPair:
    nothing = torch.zeros(len(index_B), 1, 1, 1)
    return ViewPair(nothing, nothing, index_B, step, updates_state)


def batches(num_steps: int) -> Tensor:
    """(T, B) samples, none of them twice in a batch."""
    generator = torch.Generator().manual_seed(0)
    return torch.stack([torch.randperm(NUM_SAMPLES, generator=generator)[:12] for _ in range(num_steps)])


def local_part(whole_B: Tensor) -> Tensor:
    return whole_B.chunk(world_size())[rank()]


def train(
    index_TB: Tensor, first_step: int, saved: dict[str, Tensor] | None
) -> tuple[list[Tensor], list[Tensor], Tensor, dict[str, Tensor]]:
    """Each step's loss of this rank and its gradient by this rank's embeddings, the weight's end, the saved state."""
    generator = torch.Generator().manual_seed(3)
    inputs_ND = torch.randn(NUM_SAMPLES, 9, generator=generator, dtype=torch.float64)
    weight = torch.randn(9, EMBEDDING_SIZE, generator=generator, dtype=torch.float64).requires_grad_()
    objective = toy_bank()
    if saved is not None:
        objective.load_saved(saved)
    losses, gradients = [], []
    for step, index_B in enumerate(index_TB, start=first_step):
        index_L = local_part(index_B)
        z_LD = inputs_ND[index_L] @ weight
        loss = objective(z_LD, z_LD.detach(), pair_of(index_L, step=step)).loss
        grad_LD, grad_weight = torch.autograd.grad(loss, (z_LD, weight))
        losses.append(loss.detach())
        gradients.append(grad_LD)
        with torch.no_grad():
            weight.sub_(0.1 * all_reduce_sum(grad_weight) / world_size())
    return losses, gradients, weight.detach(), objective.saved_state()


def loss_of_one_drawn_row(z_BD: Tensor, bank_ND: Tensor, index_B: Tensor, noise_BK: Tensor) -> tuple[Tensor, Tensor]:
    """Loss of this rank's part of the batch, and its gradient by this rank's embeddings."""
    z_LD = local_part(z_BD).clone().requires_grad_()
    shard_RD = bank_ND[rank() :: world_size()]
    loss = -log_ratio(z_LD, shard_RD, local_part(index_B), local_part(noise_BK), temperature=0.07).mean()
    (grad_LD,) = torch.autograd.grad(loss, z_LD)
    return loss.detach(), grad_LD


def first_bank() -> Tensor:
    return toy_bank().saved_state()["bank_ND"]
