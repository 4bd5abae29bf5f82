"""What is logged of embeddings: known values, and the same on any number of ranks."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.gloo import run_ranks
from trainer.distributed.collectives import rank, world_size
from trainer.objectives.health import MAX_PICTURES, embedding_health, uniformity


def random_views(num: int, size: int) -> tuple[Tensor, Tensor]:
    """Return embeddings of two views, with a mean that is not 0 and different variances along the axes."""
    generator = torch.Generator().manual_seed(0)
    z_BD = 0.5 + torch.randn(num, size, generator=generator) * torch.linspace(0.1, 2, size)
    return z_BD, z_BD + 0.3 * torch.randn(num, size, generator=generator)


@pytest.mark.parametrize(("num", "size"), [(40, 7), (5, 30)])
def test_every_value_is_its_formula(num: int, size: int) -> None:
    z_a, z_b = random_views(num, size)
    u_a, u_b = (z.double() / z.double().norm(dim=1, keepdim=True) for z in (z_a, z_b))
    u = torch.cat([u_a, u_b])
    singular = torch.linalg.svdvals(u)
    entropy = -sum(float(s) * math.log(float(s)) for s in singular / singular.sum())

    def pairs(u: Tensor) -> float:
        energies = [
            math.exp(-2 * float((u[i] - u[j]).square().sum())) for i in range(len(u)) for j in range(len(u)) if i != j
        ]
        return math.log(sum(energies) / len(energies))

    health = embedding_health(z_a.requires_grad_(), z_b)
    assert {name: float(value) for name, value in health.items()} == pytest.approx(
        {
            "effective_rank": math.exp(entropy),
            "mean_norm": float(u.mean(0).norm()),
            "alignment": 1 - float((u_a - u_b).square().sum(1).mean()) / 2,
            "uniformity": (pairs(u_a) + pairs(u_b)) / 2,
        },
        rel=1e-5,
    )
    assert not any(value.requires_grad for value in health.values())


def test_uniformity_of_random_directions_and_of_a_point() -> None:
    directions = torch.nn.functional.normalize(torch.randn(500, 128, generator=torch.Generator().manual_seed(0)))
    assert uniformity(directions.double()) == pytest.approx(-4, abs=0.1)
    assert uniformity(directions[:1].double().expand(10, -1)) == 0


@pytest.mark.parametrize("value", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_collapsed_encoder_has_rank_1_and_no_uniformity(value: float, dtype: torch.dtype) -> None:
    """The zero vector included, which has no direction."""
    z = torch.full((32, 128), value, dtype=dtype)
    health = embedding_health(z, z)
    assert health["effective_rank"] == pytest.approx(1, abs=1e-3)
    assert health["uniformity"] == pytest.approx(0, abs=1e-6)
    assert health["mean_norm"] == pytest.approx(value, abs=1e-6)


def test_autocast_changes_nothing() -> None:
    z_a, z_b = random_views(40, 16)
    expected = embedding_health(z_a, z_b)
    with torch.autocast("cpu", torch.bfloat16):
        assert embedding_health(z_a, z_b) == expected


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_numbers_that_are_not_finite_give_nan_and_no_error(value: float) -> None:
    z_a, z_b = random_views(10, 4)
    z_a[3, 2] = value
    assert all(health.isnan() for health in embedding_health(z_a, z_b).values())


def health_of_part(z_a: Tensor, z_b: Tensor) -> dict[str, Tensor]:
    return embedding_health(z_a.chunk(world_size())[rank()], z_b.chunk(world_size())[rank()])


@pytest.mark.ranks
def test_of_a_large_batch_the_first_pictures_of_every_rank_are_taken() -> None:
    z_a, z_b = (z.double() for z in random_views(MAX_PICTURES + 100, 8))
    taken = MAX_PICTURES // 2
    first = [torch.cat([z[:taken] for z in whole.chunk(2)]) for whole in (z_a, z_b)]
    expected = embedding_health(first[0], first[1])
    assert embedding_health(z_a, z_b) == embedding_health(z_a[:MAX_PICTURES], z_b[:MAX_PICTURES])
    for health in run_ranks(health_of_part, 2, z_a, z_b):
        for name, value in expected.items():
            torch.testing.assert_close(health[name], value, rtol=1e-9, atol=0)
