from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from tests.trainer.objectives.pair_losses import (
    assert_near,
    assert_ranks_equal_one_process,
    loss_and_gradient,
    related_views,
    unit_rows,
)
from tests.trainer.objectives.test_nt_xent import LargestTensor
from trainer.objectives.split_loss import Negatives, SplitLoss, SplitLossConfig, split_loss

NEGATIVES: list[Negatives] = ["second_view", "both_views"]
CHUNK_SIZES = [None, 1, 3, 1000]
every_negatives = pytest.mark.parametrize("negatives", NEGATIVES)


def by_loop(
    z_a_BD: Tensor, z_b_BD: Tensor, *, temperature: float, divergence_weight: float, negatives: Negatives
) -> Tensor:
    firsts, seconds = unit_rows(z_a_BD), unit_rows(z_b_BD)
    losses = []
    for i, first in enumerate(firsts):
        others = [second for j, second in enumerate(seconds) if j != i]
        if negatives == "both_views":
            others += [other for j, other in enumerate(firsts) if j != i]
        terms = torch.stack([(first @ other / temperature).exp() for other in others])
        losses.append((first - seconds[i]).square().sum() + divergence_weight * terms.sum().log())
    return torch.stack(losses).mean()


@pytest.mark.parametrize("chunk_size", CHUNK_SIZES)
def test_values_worked_out_by_hand(chunk_size: int | None) -> None:
    z_a_BD = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    z_b_BD = torch.tensor([[0.6, 0.8], [-0.8, 0.6]])
    loss = partial(split_loss, z_a_BD, z_b_BD, temperature=0.5, chunk_size=chunk_size)
    # Squared distances are 0.8, and negatives have similarities -0.8 and 0.8; with both views, 0 as well.
    assert loss(divergence_weight=1.0).item() == pytest.approx(0.80, abs=1e-6)
    assert loss(divergence_weight=1.0, negatives="both_views").item() == pytest.approx(
        0.8 + (torch.tensor([-1.6, 1.6]).exp() + 1).log().mean().item(), abs=1e-6
    )


@every_negatives
@pytest.mark.parametrize("chunk_size", CHUNK_SIZES)
@pytest.mark.parametrize(("temperature", "divergence_weight"), [(0.2, 0.4), (0.01, 1.0)])
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-4), (torch.float64, 1e-12)])
def test_loss_and_gradient_equal_a_loop(
    negatives: Negatives,
    chunk_size: int | None,
    temperature: float,
    divergence_weight: float,
    dtype: torch.dtype,
    rtol: float,
) -> None:
    z_VBD = related_views(7, 5, dtype=dtype)
    options: dict[str, Any] = {
        "temperature": temperature,
        "divergence_weight": divergence_weight,
        "negatives": negatives,
    }
    expected = loss_and_gradient(partial(by_loop, **options), z_VBD.double())
    assert_near(loss_and_gradient(partial(split_loss, **options, chunk_size=chunk_size), z_VBD), expected, rtol=rtol)


@pytest.mark.parametrize("temperature", [0.2, 0.5])
def test_twice_the_temperature_as_weight_gives_info_nce_without_the_positive(temperature: float) -> None:
    z_VBD = related_views(7, 5)
    u_BD, v_BD = (torch.stack(unit_rows(z_BD)) for z_BD in z_VBD)
    logits_BB = u_BD @ v_BD.T / temperature
    without_positive_B = logits_BB.masked_fill(torch.eye(7, dtype=torch.bool), -torch.inf).logsumexp(1)
    info_nce = (without_positive_B - logits_BB.diagonal()).mean()
    loss = split_loss(*z_VBD, temperature=temperature, divergence_weight=2 * temperature)
    assert loss.item() == pytest.approx((2 + 2 * temperature * info_nce).item(), abs=1e-12)


def kept_and_largest(num_samples: int, chunk_size: int | None) -> tuple[int, int]:
    """Return the count of numbers kept for the backward pass, and the count in the largest tensor at any time."""
    z_VBD = related_views(num_samples, 8, dtype=torch.float32).requires_grad_()
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() // 4
        return tensor

    largest = LargestTensor()  # type: ignore[no-untyped-call]
    with largest, torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = split_loss(*z_VBD, temperature=0.2, divergence_weight=0.4, chunk_size=chunk_size)
    with largest:
        torch.autograd.grad(loss, z_VBD)
    return sum(kept.values()), largest.numel


def test_memory_of_chunks_is_linear_in_the_batch() -> None:
    kept, largest = kept_and_largest(512, None)
    assert kept >= largest == 512 * 512
    (kept, largest), (kept_twice, largest_twice) = kept_and_largest(512, 16), kept_and_largest(1024, 16)
    assert (largest, largest_twice) == (16 * 512, 16 * 1024)
    assert kept_twice <= 2.1 * kept < 512 * 512 / 2


@pytest.mark.ranks
@pytest.mark.parametrize(("num_ranks", "per_rank"), [(1, 12), (2, 6), (4, 3), (4, 1)])
def test_ranks_equal_one_process(num_ranks: int, per_rank: int) -> None:
    losses = {
        f"{negatives}, {chunk_size}": partial(
            split_loss, temperature=0.2, divergence_weight=0.4, negatives=negatives, chunk_size=chunk_size
        )
        for negatives, chunk_size in product(NEGATIVES, [None, 2])
    }
    assert_ranks_equal_one_process(losses, num_ranks, per_rank=per_rank)


@pytest.mark.parametrize("chunk_size", [None, 4])
def test_low_precision_and_autocast_change_nothing(chunk_size: int | None) -> None:
    low_VBD = related_views(20, 16, dtype=torch.bfloat16)
    z_VBD = low_VBD.float().requires_grad_()
    loss = partial(split_loss, temperature=0.2, divergence_weight=0.4, chunk_size=chunk_size)
    expected = loss_and_gradient(loss, z_VBD)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        of_low, value = loss(*low_VBD), loss(*z_VBD)
        # torch wants backward outside autocast, but a user's mistake there must not cost precision in the chunks.
        gradients = torch.autograd.grad(value, z_VBD) if chunk_size else None
    gradients = gradients or torch.autograd.grad(value, z_VBD)
    assert of_low.dtype == torch.float32
    assert_near((of_low, gradients[0]), expected, rtol=1e-6)


@every_negatives
def test_the_objective_gives_the_loss_and_logs_its_parts(negatives: Negatives) -> None:
    z_VBD = related_views(8, 16, dtype=torch.float32).requires_grad_()
    output = SplitLoss(SplitLossConfig(negatives=negatives, chunk_size=3))(*z_VBD)
    torch.testing.assert_close(
        output.loss, split_loss(*z_VBD, temperature=0.2, divergence_weight=0.4, negatives=negatives)
    )
    torch.testing.assert_close(
        output.loss.detach(), 2 - 2 * output.metrics["alignment"] + 0.4 * output.metrics["divergence"]
    )
    assert output.loss.requires_grad
    assert not any(metric.requires_grad for metric in output.metrics.values())


def test_the_probability_of_positives_is_that_of_a_softmax_over_positive_and_negatives() -> None:
    apart_BD = torch.eye(4)
    logits = torch.tensor([1.0, 0.0, 0.0, 0.0]) / 0.2
    metrics = SplitLoss(SplitLossConfig())(apart_BD, apart_BD).metrics
    assert metrics["positive_probability"].item() == pytest.approx(logits.softmax(0)[0].item(), rel=1e-6)


def test_wrong_input_is_refused() -> None:
    z_BD = torch.randn(4, 3)
    loss = partial(split_loss, divergence_weight=0.4)
    for negatives in NEGATIVES:
        with pytest.raises(ValueError, match="a global batch of 1 sample has no negatives"):
            loss(z_BD[:1], z_BD[:1], temperature=0.2, negatives=negatives)
    with pytest.raises(ValueError, match=r"\(4, 3\) and \(3, 3\)"):
        loss(z_BD, z_BD[:3], temperature=0.2)
    with pytest.raises(ValueError, match=r"temperature is 0\.0; it must be positive"):
        loss(z_BD, z_BD, temperature=0.0)
    with pytest.raises(ValueError, match="negatives is 'second'; it must be one of second_view, both_views"):
        loss(z_BD, z_BD, temperature=0.2, negatives="second")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="chunk_size is 0; it must be positive"):
        loss(z_BD, z_BD, temperature=0.2, chunk_size=0)
    wrong: list[dict[str, Any]] = [
        {"temperature": 0},
        {"divergence_weight": -1},
        {"negatives": "all"},
        {"chunk_size": 0},
    ]
    for setting in wrong:
        with pytest.raises(ValidationError):
            SplitLossConfig.model_validate(setting)
