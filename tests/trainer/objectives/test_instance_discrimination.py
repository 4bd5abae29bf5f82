from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.gloo import run_ranks
from tests.trainer.objectives.toy_bank import (
    EMBEDDING_SIZE,
    NUM_SAMPLES,
    batches,
    first_bank,
    loss_of_one_drawn_row,
    pair_of,
    toy_bank,
    train,
)
from trainer.objectives import instance_discrimination
from trainer.objectives.instance_discrimination import (
    InstanceDiscrimination,
    InstanceDiscriminationConfig,
    drawn_rows,
    log_ratio,
    updated_rows,
)


def loss_of(z_BD: Tensor, bank_ND: Tensor, index_B: Tensor, noise_BK: Tensor, *, temperature: float) -> Tensor:
    return -log_ratio(z_BD, bank_ND, index_B, noise_BK, temperature=temperature).mean()


def loss_by_loop(z_BD: Tensor, bank_ND: Tensor, index_B: Tensor, noise_BK: Tensor, temperature: float) -> Tensor:
    losses = []
    for z, index, noise_K in zip(z_BD.double(), index_B.tolist(), noise_BK.tolist(), strict=True):
        u = z / z.norm()
        drawn = torch.stack([(u @ bank_ND[row].double() / temperature).exp() for row in noise_K])
        losses.append(-((u @ bank_ND[index].double() / temperature).exp() / drawn.mean()).log())
    return torch.stack(losses).mean()


def random_inputs(num_negatives: int = 15) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Embeddings, a bank of 11 rows, own rows, and drawn rows: more than there are, so some are drawn twice."""
    generator = torch.Generator().manual_seed(0)
    z_BD = 3 * torch.randn(8, 6, generator=generator)
    bank_ND = F.normalize(torch.randn(11, 6, generator=generator), dim=1)
    index_B = torch.randperm(11, generator=generator)[:8]
    return z_BD, bank_ND, index_B, torch.randint(11, (8, num_negatives), generator=generator)


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


def test_autocast_and_low_precision_change_nothing() -> None:
    z_BD, *others = random_inputs()
    ours, theirs = z_BD.clone().requires_grad_(), z_BD.clone().requires_grad_()
    expected = loss_of(theirs, *others, temperature=0.07)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loss_of(ours, *others, temperature=0.07)
    assert torch.equal(loss, expected)
    assert torch.equal(*torch.autograd.grad(loss, ours), *torch.autograd.grad(expected, theirs))
    low = loss_of(z_BD.bfloat16(), *others, temperature=0.07)
    assert torch.equal(low, loss_of(z_BD.bfloat16().float(), *others, temperature=0.07))


def test_rows_move_towards_their_embeddings_and_stay_unit_vectors() -> None:
    z_BD, bank_ND, index_B, _ = random_inputs()
    before_ND = bank_ND.clone()
    after_ND = updated_rows(bank_ND, z_BD, index_B, momentum=0.5)
    assert torch.equal(bank_ND, before_ND)
    for row, index in enumerate(index_B.tolist()):
        mean = (before_ND[index] + z_BD[row] / z_BD[row].norm()) / 2
        torch.testing.assert_close(after_ND[index], mean / mean.norm())
    others = sorted(set(range(11)) - set(index_B.tolist()))
    assert torch.equal(after_ND[others], before_ND[others])


def test_the_first_rows_are_random_directions() -> None:
    config = InstanceDiscriminationConfig()
    bank_ND = InstanceDiscrimination(config, num_samples=4000, embedding_size=16, seed=0).shard_RD
    torch.testing.assert_close(bank_ND.norm(dim=1), torch.ones(4000))
    assert bank_ND.mean(0).abs().max() < 0.02  # 5 standard errors
    cosine_NN = bank_ND @ bank_ND.T
    off_diagonal = cosine_NN[~torch.eye(4000, dtype=torch.bool)]
    assert off_diagonal.std().item() == pytest.approx(16**-0.5, rel=0.02)
    other = InstanceDiscrimination(config, num_samples=4000, embedding_size=16, seed=1).shard_RD
    assert (bank_ND * other).sum(1).mean().abs() < 0.02


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


def test_a_call_that_may_not_update_leaves_every_bit() -> None:
    objective = toy_bank()
    before = objective.shard_RD.clone()
    z_BD = torch.randn(4, EMBEDDING_SIZE, dtype=torch.float64, requires_grad=True)
    index_B = torch.arange(4)
    without = objective(z_BD, z_BD, pair_of(index_B, updates_state=False)).loss
    assert torch.equal(objective.shard_RD, before)
    output = objective(z_BD, z_BD, pair_of(index_B))
    assert torch.equal(output.loss, without)
    assert not torch.equal(objective.shard_RD[:4], before[:4])
    assert torch.equal(objective.shard_RD[4:], before[4:])
    output.loss.backward()  # the bank that changed since is not needed
    assert z_BD.grad is not None


def test_what_is_logged() -> None:
    objective = toy_bank(num_negatives=9)
    bank_ND = objective.shard_RD.clone()
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


@pytest.mark.ranks
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_equal_one_process(num_ranks: int) -> None:
    index_TB = batches(4)
    losses, gradients, weight, state = train(index_TB, 0, None)
    assert state["bank_ND"].shape == (NUM_SAMPLES, EMBEDDING_SIZE)
    by_rank = run_ranks(train, num_ranks, index_TB, 0, None)
    for step, (loss, grad_BD) in enumerate(zip(losses, gradients, strict=True)):
        of_ranks = torch.stack([rank_losses[step] for rank_losses, *_ in by_rank])
        assert len(set(of_ranks.tolist())) == num_ranks
        torch.testing.assert_close(of_ranks.mean(), loss, rtol=1e-9, atol=0)
        # The engine divides by W when it averages parameter gradients, so an embedding's gradient is W times too large.
        gathered_BD = torch.cat([rank_gradients[step] for _, rank_gradients, *_ in by_rank]) / num_ranks
        torch.testing.assert_close(gathered_BD, grad_BD, rtol=1e-9, atol=1e-13)
    for _, _, rank_weight, rank_state in by_rank:
        torch.testing.assert_close(rank_weight, weight, rtol=1e-9, atol=1e-13)
        torch.testing.assert_close(rank_state["bank_ND"], state["bank_ND"], rtol=1e-9, atol=1e-13)


@pytest.mark.ranks
def test_ranks_that_hold_none_of_the_rows_drawn() -> None:
    z_BD, bank_ND, index_B, noise_BK = random_inputs(num_negatives=1)
    inputs = z_BD.double(), F.normalize(bank_ND.double(), dim=1), index_B, noise_BK
    loss, grad_BD = loss_of_one_drawn_row(*inputs)
    by_rank = run_ranks(loss_of_one_drawn_row, 4, *inputs)
    torch.testing.assert_close(torch.stack([rank_loss for rank_loss, _ in by_rank]).mean(), loss, rtol=1e-9, atol=0)
    gathered_BD = torch.cat([rank_grad_LD for _, rank_grad_LD in by_rank]) / 4
    torch.testing.assert_close(gathered_BD, grad_BD, rtol=1e-9, atol=1e-13)


@pytest.mark.ranks
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_first_bank_knows_no_ranks(num_ranks: int) -> None:
    expected = first_bank()
    assert all(torch.equal(bank_ND, expected) for bank_ND in run_ranks(first_bank, num_ranks))


@pytest.mark.ranks
def test_what_two_ranks_saved_goes_on_in_one_process_and_on_four() -> None:
    index_TB = batches(6)
    *_, saved = run_ranks(train, 2, index_TB[:3], 0, None)[1]
    losses, _, weight, expected = train(index_TB[3:], 3, saved)
    assert losses != train(index_TB[3:], 3, None)[0]
    for _, _, rank_weight, state in run_ranks(train, 4, index_TB[3:], 3, saved):
        torch.testing.assert_close(rank_weight, weight, rtol=1e-9, atol=1e-13)
        torch.testing.assert_close(state["bank_ND"], expected["bank_ND"], rtol=1e-9, atol=1e-13)
