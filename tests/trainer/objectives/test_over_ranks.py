"""W ranks on different parts of a batch equal one process in float64 on the whole: loss and every gradient."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from tests.gloo import run_ranks
from trainer.distributed.collectives import rank, world_size
from trainer.models import Encoder, ResNetConfig, build_encoder
from trainer.models.heads import HeadConfig
from trainer.objectives import nt_xent_loss, published_nt_xent_loss

pytestmark = pytest.mark.ranks

# Batch of all ranks B, of one rank L; views are V.
LOSSES: dict[str, Callable[..., Tensor]] = {"standard": nt_xent_loss, "published": published_nt_xent_loss}
CASES = [(name, chunk_size) for name in LOSSES for chunk_size in (None, 3, 512)]


def local_part(whole_VB: Tensor) -> Tensor:
    return whole_VB.chunk(world_size(), dim=1)[rank()]


def losses_and_gradients(z_VBD: Tensor, temperature: float) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Loss, and its gradients by this rank's embeddings and by the temperature, of every case."""
    results = []
    for name, chunk_size in CASES:
        z_VLD = local_part(z_VBD).clone().requires_grad_()
        t = torch.tensor(temperature, dtype=z_VBD.dtype, requires_grad=True)
        loss = LOSSES[name](*z_VLD, temperature=t, chunk_size=chunk_size)
        grad_VLD, grad_t = torch.autograd.grad(loss, (z_VLD, t))
        results.append((loss.detach(), grad_VLD, grad_t))
    return results


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("temperature", [0.07, 0.5])
def test_loss_and_gradients(num_ranks: int, temperature: float) -> None:
    z_VBD = torch.randn(2, 20, 8, generator=torch.Generator().manual_seed(0))
    expected = losses_and_gradients(z_VBD.double(), temperature)
    by_rank = run_ranks(losses_and_gradients, num_ranks, z_VBD, temperature)
    for case, (loss, grad_VBD, grad_t) in enumerate(expected):
        of_ranks = [results[case] for results in by_rank]
        assert len({round(rank_loss.item(), 4) for rank_loss, _, _ in of_ranks}) == num_ranks
        mean_loss = torch.stack([rank_loss for rank_loss, _, _ in of_ranks]).mean()
        mean_grad_t = torch.stack([rank_grad for _, _, rank_grad in of_ranks]).mean()
        # The engine divides by W when it averages parameter gradients, so an embedding's gradient is W times too large.
        gathered_grad_VBD = torch.cat([rank_grad for _, rank_grad, _ in of_ranks], dim=1) / num_ranks
        torch.testing.assert_close(mean_loss.double(), loss, rtol=1e-5, atol=0)
        torch.testing.assert_close(mean_grad_t.double(), grad_t, rtol=1e-5, atol=0)
        assert (gathered_grad_VBD - grad_VBD).norm() <= 1e-5 * grad_VBD.norm()


def encoder() -> Encoder:
    torch.manual_seed(0)
    config = ResNetConfig(
        kind="resnet10", width=4, head=HeadConfig(hidden_sizes=(32,)), mean=(0.5,) * 3, std=(0.25,) * 3
    )
    return build_encoder(config)


def parameter_gradients(views_VBCHW: Tensor) -> dict[str, Tensor]:
    """One step's gradients and new buffers, views encoded one after the other, under DDP where there are ranks."""
    module = encoder().to(views_VBCHW.dtype)
    model = DistributedDataParallel(module, broadcast_buffers=False) if world_size() > 1 else module
    view_a, view_b = local_part(views_VBCHW)
    torch.autograd.backward(nt_xent_loss(model(view_a), model(view_b), temperature=0.5))
    gradients = {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}
    assert len(gradients) == len(list(module.parameters()))
    return gradients | dict(module.named_buffers())


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_gradients_of_an_encoder_with_synchronised_batch_norm(num_ranks: int) -> None:
    # Pictures get brighter along the batch, so that each rank's own statistics would be wrong.
    views_VBCHW = torch.rand(2, 12, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    views_VBCHW *= torch.linspace(0.2, 1, 12)[:, None, None, None]
    expected = parameter_gradients(views_VBCHW.double())
    scale = torch.stack([value.double().norm() for value in expected.values()]).max()
    for gradients in run_ranks(parameter_gradients, num_ranks, views_VBCHW):
        assert gradients.keys() == expected.keys()
        for name, value in expected.items():
            # A weight right before a batch norm has next to no gradient along itself; hence the second term.
            tolerance = 1e-5 * value.double().norm() + 1e-7 * scale
            assert (gradients[name].double() - value.double()).norm() <= tolerance, name
