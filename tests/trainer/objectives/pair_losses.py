"""How a pure loss of two views' embeddings is tested: related views, a loss and its gradient.

Shapes: views V (two), B samples, D dimensions.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

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
