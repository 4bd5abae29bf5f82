from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from trainer.objectives import ViewPair, instance_discrimination
from trainer.objectives.instance_discrimination import (
    InstanceDiscrimination,
    InstanceDiscriminationConfig,
    drawn_rows,
    log_ratio,
    updated_bank,
)

NUM_SAMPLES, EMBEDDING_SIZE = 23, 6


def toy_bank(*, num_negatives: int = 40) -> InstanceDiscrimination:
    config = InstanceDiscriminationConfig(num_negatives=num_negatives)
    return InstanceDiscrimination(config, num_samples=NUM_SAMPLES, embedding_size=EMBEDDING_SIZE, seed=7).double()


def pair_of(index_B: Tensor, *, step: int) -> ViewPair:
    nothing = torch.zeros(len(index_B), 1, 1, 1)
    return ViewPair(nothing, nothing, index_B, step)


def loss_of(z_BD: Tensor, bank_ND: Tensor, index_B: Tensor, noise_BK: Tensor, *, temperature: float) -> Tensor:
    return -log_ratio(z_BD, bank_ND, index_B, noise_BK, temperature=temperature).mean()


def loss_by_loop(z_BD: Tensor, bank_ND: Tensor, index_B: Tensor, noise_BK: Tensor, temperature: float) -> Tensor:
    losses = []
    for z, index, noise_K in zip(z_BD.double(), index_B.tolist(), noise_BK.tolist(), strict=True):
        u = z / z.norm()
        drawn = torch.stack([(u @ bank_ND[row].double() / temperature).exp() for row in noise_K])
        losses.append(-((u @ bank_ND[index].double() / temperature).exp() / drawn.mean()).log())
    return torch.stack(losses).mean()


def random_inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Embeddings, a bank of 11 rows, own rows, and drawn rows: more than there are, so some are drawn twice."""
    generator = torch.Generator().manual_seed(0)
    z_BD = 3 * torch.randn(8, 6, generator=generator)
    bank_ND = F.normalize(torch.randn(11, 6, generator=generator), dim=1)
    index_B = torch.randperm(11, generator=generator)[:8]
    return z_BD, bank_ND, index_B, torch.randint(11, (8, 15), generator=generator)


@pytest.mark.parametrize("max_entries", [1, 35, 1 << 22])
@pytest.mark.parametrize("temperature", [0.01, 0.07, 0.5])
def test_loss_and_gradient_equal_a_loop_in_float64(
    temperature: float, max_entries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instance_discrimination, "_MAX_ENTRIES", max_entries)
    z_BD, bank_ND, index_B, noise_BK = random_inputs()
    # At 0.01 a rounding error of a cosine weighs a hundred times.
    for dtype, rtol in ((torch.float32, 1e-5 if temperature > 0.05 else 2e-4), (torch.float64, 1e-12)):
        ours, theirs = (z_BD.to(dtype).requires_grad_() for _ in range(2))
        bank = F.normalize(bank_ND.to(dtype), dim=1)
        loss = loss_of(ours, bank, index_B, noise_BK, temperature=temperature)
        expected = loss_by_loop(theirs, bank, index_B, noise_BK, temperature)
        torch.testing.assert_close(loss.double(), expected, rtol=rtol, atol=0)
        (grad_BD,), (expected_grad_BD,) = torch.autograd.grad(loss, ours), torch.autograd.grad(expected, theirs)
        assert (grad_BD - expected_grad_BD).norm() <= rtol * expected_grad_BD.norm()


def test_rows_move_towards_their_embeddings_and_stay_unit_vectors() -> None:
    z_BD, bank_ND, index_B, _ = random_inputs()
    before_ND = bank_ND.clone()
    after_ND = updated_bank(bank_ND, z_BD, index_B, momentum=0.5)
    assert torch.equal(bank_ND, before_ND)
    for row, index in enumerate(index_B.tolist()):
        mean = (before_ND[index] + z_BD[row] / z_BD[row].norm()) / 2
        torch.testing.assert_close(after_ND[index], mean / mean.norm())
    others = sorted(set(range(11)) - set(index_B.tolist()))
    assert torch.equal(after_ND[others], before_ND[others])


def test_the_first_rows_are_random_directions() -> None:
    config = InstanceDiscriminationConfig()
    bank_ND = InstanceDiscrimination(config, num_samples=2000, embedding_size=16, seed=0).bank_ND
    torch.testing.assert_close(bank_ND.norm(dim=1), torch.ones(2000))
    assert bank_ND.mean(0).abs().max() < 0.028  # 5 standard errors
    cosine_NN = bank_ND @ bank_ND.T
    off_diagonal = cosine_NN[~torch.eye(2000, dtype=torch.bool)]
    assert off_diagonal.std().item() == pytest.approx(16**-0.5, rel=0.02)
    other = InstanceDiscrimination(config, num_samples=2000, embedding_size=16, seed=1).bank_ND
    assert (bank_ND * other).sum(1).mean().abs() < 0.028


def test_rows_are_drawn_by_step_and_sample_uniformly_own_row_included() -> None:
    noise_BK = drawn_rows(torch.tensor([3, 8, 5]), 4600, num_samples=NUM_SAMPLES, seed=0, step=2)
    alone = torch.tensor([8])
    assert torch.equal(drawn_rows(alone, 4600, num_samples=NUM_SAMPLES, seed=0, step=2)[0], noise_BK[1])
    for seed, step in ((0, 3), (1, 2)):
        assert not torch.equal(drawn_rows(alone, 4600, num_samples=NUM_SAMPLES, seed=seed, step=step)[0], noise_BK[1])
    assert not torch.equal(noise_BK[0], noise_BK[1])
    counts = torch.bincount(noise_BK.flatten(), minlength=NUM_SAMPLES)
    chi_square = ((counts - 600.0).square() / 600).sum().item()
    assert chi_square < 56  # 22 degrees of freedom: p = 1e-4
    assert (noise_BK[0] == 3).sum() > 100


def test_what_is_logged() -> None:
    objective = toy_bank(num_negatives=9)
    bank_ND = objective.bank_ND.clone()
    z_BD = torch.randn(5, EMBEDDING_SIZE, dtype=torch.float64)
    index_B = torch.arange(5)
    noise_BK = drawn_rows(index_B, 9, num_samples=NUM_SAMPLES, seed=7, step=4)
    output = objective(z_BD, z_BD, pair_of(index_B, step=4))
    probabilities = []
    for z, index, noise_K in zip(z_BD, index_B.tolist(), noise_BK, strict=True):
        scores = (torch.cat([bank_ND[index][None], bank_ND[noise_K]]) @ (z / z.norm()) / 0.07).softmax(0)
        probabilities.append(scores[0])
    torch.testing.assert_close(output.metrics["positive_probability"], torch.stack(probabilities).mean())
    assert output.metrics["alignment"].item() == pytest.approx(1)
