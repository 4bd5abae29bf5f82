from __future__ import annotations

import pytest
import torch
from lightly.loss import NegativeCosineSimilarity
from torch import Tensor, nn

from trainer.models.heads import HeadConfig
from trainer.objectives.objective import ViewPair
from trainer.objectives.simsiam import SimSiam, SimSiamConfig, simsiam_loss

CONFIG = SimSiamConfig(predictor=HeadConfig(hidden_sizes=(6,), batch_norm=True))


def rows(batch_size: int, size: int, *, number: int) -> list[Tensor]:
    """`number` batches of embeddings that change along the batch, so that a rank's own statistics would be wrong."""
    generator = torch.Generator().manual_seed(0)
    slope_B1 = torch.linspace(-2, 2, batch_size, dtype=torch.float64)[:, None]
    batches = (torch.randn(batch_size, size, generator=generator, dtype=torch.float64) for _ in range(number))
    return [(batch + slope_B1).requires_grad_() for batch in batches]


def pair() -> ViewPair:
    return ViewPair(torch.empty(0), torch.empty(0), torch.empty(0), step=0)


def objective() -> SimSiam:
    torch.manual_seed(0)
    return SimSiam(CONFIG, embedding_size=5).double()


def by_loop(p_a_BD: Tensor, p_b_BD: Tensor, z_a_BD: Tensor, z_b_BD: Tensor) -> Tensor:
    cosines = []
    for p_a, p_b, z_a, z_b in zip(p_a_BD, p_b_BD, z_a_BD.detach(), z_b_BD.detach(), strict=True):
        cosines += [p_a @ z_b / (p_a.norm() * z_b.norm()), p_b @ z_a / (p_b.norm() * z_a.norm())]
    return -torch.stack(cosines).mean()


def test_loss_and_gradients_equal_a_loop_in_float64() -> None:
    p_a, p_b, z_a, z_b = rows(7, 4, number=4)
    value, expected = simsiam_loss(p_a, p_b, z_a, z_b), by_loop(p_a, p_b, z_a, z_b)
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=0)
    ours, theirs = (torch.autograd.grad(loss, (p_a, p_b)) for loss in (value, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-14)


def test_embeddings_get_no_gradient_but_through_the_predictor() -> None:
    p_a, p_b, z_a, z_b = rows(7, 4, number=4)
    torch.autograd.backward(simsiam_loss(p_a, p_b, z_a, z_b))
    assert [z.grad is None for z in (p_a, p_b, z_a, z_b)] == [False, False, True, True]


def test_loss_equals_lightlys() -> None:
    p_a, p_b, z_a, z_b = rows(30, 8, number=4)
    peer = NegativeCosineSimilarity()
    expected = (peer(p_a, z_b.detach()) + peer(p_b, z_a.detach())) / 2
    value = simsiam_loss(p_a, p_b, z_a, z_b)
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=0)
    ours, theirs = (torch.autograd.grad(loss, (p_a, p_b)) for loss in (value, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-14)


def test_the_predictor_is_the_published_one() -> None:
    published = SimSiam(SimSiamConfig(), embedding_size=2048)
    assert sum(parameter.numel() for parameter in published.parameters()) == 2_100_736
    assert all(parameter.requires_grad for parameter in published.parameters())


def test_views_pass_the_predictor_one_by_one() -> None:
    z_a, z_b = rows(9, 5, number=2)
    linear_in, _, relu, linear_out = objective().predictor.children()
    plain = nn.Sequential(linear_in, nn.BatchNorm1d(6).double(), relu, linear_out)
    expected = simsiam_loss(plain(z_a), plain(z_b), z_a, z_b)
    simsiam = objective()
    output = simsiam(z_a, z_b, pair())
    torch.testing.assert_close(output.loss, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(simsiam.predictor.state_dict(), plain.state_dict(), rtol=1e-12, atol=0)
    assert output.metrics.keys() == {"alignment"}
    assert output.metrics["alignment"].item() == pytest.approx(
        torch.cosine_similarity(z_a, z_b).mean().item(), rel=1e-5
    )
