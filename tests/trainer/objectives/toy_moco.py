"""A small encoder trained with MoCo, on any number of ranks; ranks import this file, so it imports little."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from trainer.distributed.collectives import all_reduce_sum, rank, world_size
from trainer.models.batch_norm import SplitBatchNorm2d, SynchronizedBatchNorm2d, share_running_statistics
from trainer.objectives.moco import MoCo, MoCoConfig
from trainer.objectives.objective import ViewPair

# Batch of all ranks B, of one rank L; T steps, views V, queue Q.
EMBEDDING_SIZE = 5
NUM_SPLITS = 4


def toy_encoder(batch_norm: str = "synchronized") -> nn.Sequential:
    torch.manual_seed(0)
    norm = SynchronizedBatchNorm2d(4) if batch_norm == "synchronized" else SplitBatchNorm2d(4, num_splits=NUM_SPLITS)
    layers = [nn.Conv2d(3, 4, 3), norm, nn.ReLU(), nn.AvgPool2d(2), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(4 * 9, EMBEDDING_SIZE)).double()


def toy_moco(encoder: nn.Module, config: MoCoConfig) -> MoCo:
    torch.manual_seed(1)
    return MoCo(config, encoder=encoder, embedding_size=EMBEDDING_SIZE).double()


def training_views(num_steps: int = 3, batch_size: int = 8) -> Tensor:
    """Brighter along the batch, so that each rank's own statistics would be wrong."""
    views_TVBCHW = torch.rand(num_steps, 2, batch_size, 3, 8, 8, generator=torch.Generator().manual_seed(2))
    return views_TVBCHW.double() * torch.linspace(0.2, 1, batch_size)[:, None, None, None]


def pair_of(views_VBCHW: Tensor, *, step: int = 0) -> ViewPair:
    """Return a pair with this rank's rows; the index of a sample is its row in the global batch."""
    num_rows = views_VBCHW.shape[1]
    return ViewPair(views_VBCHW[0], views_VBCHW[1], rank() * num_rows + torch.arange(num_rows), step)


def state_of(module: nn.Module) -> dict[str, Tensor]:
    return copy.deepcopy(module.state_dict())


def train(views_TVBCHW: Tensor) -> tuple[list[Tensor], dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Each step's loss over all ranks, the encoder's last gradients and end, and the objective's saved state."""
    encoder = toy_encoder("split")
    objective = toy_moco(encoder, MoCoConfig(queue_size=24, momentum=0.8))
    losses = []
    for step, views_VBCHW in enumerate(views_TVBCHW):
        views_VLCHW = views_VBCHW.chunk(world_size(), dim=1)[rank()]
        encoder.zero_grad()
        loss = objective(encoder(views_VLCHW[0]), encoder(views_VLCHW[1]), pair_of(views_VLCHW, step=step)).loss
        loss.backward()
        losses.append(loss.detach())
        with torch.no_grad():
            for parameter in encoder.parameters():
                assert parameter.grad is not None
                parameter.grad = all_reduce_sum(parameter.grad) / world_size()
                parameter.sub_(0.5 * parameter.grad)
    share_running_statistics(encoder)
    gradients = {name: parameter.grad for name, parameter in encoder.named_parameters() if parameter.grad is not None}
    return losses, gradients, state_of(encoder), objective.saved_state()
