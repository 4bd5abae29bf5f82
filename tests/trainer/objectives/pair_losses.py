"""How a pure loss of two views' embeddings is tested: related views, a loss and its gradient, ranks and one process.

Shapes: views V (two), B samples of all ranks, L of one rank, D dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from tests.gloo import run_ranks
from trainer.distributed.collectives import rank, world_size
from trainer.objectives import ObjectiveOutput

Loss = Callable[..., ObjectiveOutput | Tensor]


def related_views(num_samples: int, size: int, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Embeddings of random length, (2, B, D), the second view's near the first's."""
    generator = torch.Generator().manual_seed(seed)
    z_a_BD = torch.randn(num_samples, size, generator=generator, dtype=torch.float64)
    z_b_BD = z_a_BD + torch.randn(num_samples, size, generator=generator, dtype=torch.float64)
    return torch.stack([z_a_BD, z_b_BD]).to(dtype)


def loss_and_gradient(loss: Loss, z_VBD: Tensor) -> tuple[Tensor, Tensor]:
    leaf_VBD = z_VBD.detach().clone().requires_grad_()
    found = loss(*leaf_VBD)
    value = found.loss if isinstance(found, ObjectiveOutput) else found
    return value.detach(), torch.autograd.grad(value, leaf_VBD)[0]


def assert_near(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...], *, rtol: float) -> None:
    """Gradients by norm: single entries near 0 carry the rounding errors of the large ones."""
    for ours, theirs in zip(actual, expected, strict=True):
        assert (ours.double() - theirs.double()).norm() <= rtol * theirs.double().norm()


def of_this_rank(losses: Mapping[str, Loss], batches: Sequence[Tensor]) -> list[dict[str, tuple[Tensor, Tensor]]]:
    rows = [z_VBD.chunk(world_size(), dim=1)[rank()] for z_VBD in batches]
    return [{name: loss_and_gradient(loss, z_VLD) for name, loss in losses.items()} for z_VLD in rows]


def assert_ranks_equal_one_process(losses: Mapping[str, Loss], batches: Sequence[Tensor], *, num_ranks: int) -> None:
    """Check losses, by name, on ranks with different rows of each batch (2, B, D): loss and gradient in float64."""
    by_rank = run_ranks(of_this_rank, num_ranks, losses, batches)
    for number, z_VBD in enumerate(batches):
        for name, loss in losses.items():
            values, gradients = zip(*(results[number][name] for results in by_rank), strict=True)
            # The engine divides by W when it averages parameter gradients: an embedding's gradient is W times as large.
            combined = torch.stack(values).mean(), torch.cat(gradients, dim=1) / num_ranks
            assert_near(combined, loss_and_gradient(loss, z_VBD), rtol=1e-9)
