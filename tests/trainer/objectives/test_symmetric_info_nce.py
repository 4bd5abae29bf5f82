"""Symmetric InfoNCE: against a loop in float64, against the published lines, and on several ranks."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.trainer.objectives.pair_losses import (
    assert_near,
    assert_ranks_equal_one_process,
    loss_and_gradient,
    related_views,
    unit_rows,
)
from trainer.objectives import SymmetricInfoNCEConfig, symmetric_info_nce_loss
from trainer.objectives.symmetric_info_nce import SymmetricInfoNCE


def by_loop(z_a_BD: Tensor, z_b_BD: Tensor, *, temperature: float) -> Tensor:
    """The sum of two cross-entropies, each view of a sample against all views of the other kind."""
    total = torch.zeros((), dtype=torch.float64)
    for anchors, others in ((z_a_BD, z_b_BD), (z_b_BD, z_a_BD)):
        rows, columns = unit_rows(anchors), unit_rows(others)
        for number, anchor in enumerate(rows):
            terms = torch.stack([(anchor @ other / temperature).exp() for other in columns])
            total = total - (terms[number] / terms.sum()).log() / len(rows)
    return total


def as_published(z_a_BD: Tensor, z_b_BD: Tensor, *, temperature: float) -> Tensor:
    """The lines of the notebook of Chen, Luo and Li: normalise, one matrix, cross-entropy of it and its transpose."""
    logits_BB = F.normalize(z_a_BD, dim=1) @ F.normalize(z_b_BD, dim=1).T / temperature
    labels_B = torch.arange(len(logits_BB))
    return F.cross_entropy(logits_BB, labels_B) + F.cross_entropy(logits_BB.T, labels_B)


@pytest.mark.parametrize("chunk_size", [None, 1, 4, 1000])
@pytest.mark.parametrize("temperature", [0.05, 0.5])
def test_loss_and_gradient_equal_a_loop_in_float64(temperature: float, chunk_size: int | None) -> None:
    loss = partial(symmetric_info_nce_loss, temperature=temperature, chunk_size=chunk_size)
    z_VBD = related_views(6, 5)
    expected = loss_and_gradient(partial(by_loop, temperature=temperature), z_VBD)
    assert_near(loss_and_gradient(loss, z_VBD), expected, rtol=1e-12)
    assert_near(loss_and_gradient(loss, z_VBD.float()), expected, rtol=1e-5)


def test_loss_and_gradient_equal_the_published_lines() -> None:
    z_VBD = related_views(50, 16)
    ours = loss_and_gradient(partial(symmetric_info_nce_loss, temperature=0.05), z_VBD)
    assert_near(ours, loss_and_gradient(partial(as_published, temperature=0.05), z_VBD), rtol=1e-12)


def test_the_mean_is_half_of_the_sum() -> None:
    z_a, z_b = related_views(9, 4)
    mean = symmetric_info_nce_loss(z_a, z_b, temperature=0.2, total="mean")
    torch.testing.assert_close(2 * mean, symmetric_info_nce_loss(z_a, z_b, temperature=0.2))


def test_a_batch_of_identical_embeddings_costs_the_log_of_its_size_twice() -> None:
    z_BD = torch.ones(10, 3)
    loss = symmetric_info_nce_loss(z_BD, z_BD, temperature=0.1)
    assert loss.item() == pytest.approx(2 * torch.tensor(10.0).log().item(), rel=1e-5)


def test_autocast_changes_nothing_and_low_precision_is_raised() -> None:
    z_VBD = related_views(7, 6, dtype=torch.float32)
    loss = partial(symmetric_info_nce_loss, temperature=0.1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = loss(*z_VBD)
    assert torch.equal(value, loss(*z_VBD))
    assert loss(*z_VBD.bfloat16()).dtype == torch.float32


@pytest.mark.ranks
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_equal_one_process(num_ranks: int) -> None:
    losses = {
        str(chunk_size): partial(symmetric_info_nce_loss, temperature=0.2, chunk_size=chunk_size)
        for chunk_size in (None, 2)
    }
    assert_ranks_equal_one_process(losses, num_ranks, per_rank=3)


def test_the_class_is_the_function_and_logs_the_probability_of_both_kinds_of_anchors() -> None:
    z_a, z_b = related_views(8, 6)
    output = SymmetricInfoNCE(SymmetricInfoNCEConfig(temperature=0.2, total="mean"))(z_a, z_b)
    assert torch.equal(output.loss, symmetric_info_nce_loss(z_a, z_b, temperature=0.2, total="mean"))
    logits_BB = F.normalize(z_a, dim=1) @ F.normalize(z_b, dim=1).T / 0.2
    probability = (logits_BB.softmax(1).diagonal() + logits_BB.softmax(0).diagonal()).mean() / 2
    assert output.metrics["positive_probability"].item() == pytest.approx(probability.item())


def test_wrong_input_is_refused() -> None:
    z_BD = torch.randn(4, 3)
    with pytest.raises(ValueError, match="temperature is -1; it must be positive"):
        symmetric_info_nce_loss(z_BD, z_BD, temperature=-1)
    with pytest.raises(ValueError, match="total is 'add'; it must be one of sum, mean"):
        symmetric_info_nce_loss(z_BD, z_BD, temperature=0.5, total="add")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="chunk_size is 0"):
        symmetric_info_nce_loss(z_BD, z_BD, temperature=0.5, chunk_size=0)
    with pytest.raises(ValueError, match=r"\(4, 3\) and \(3, 3\)"):
        symmetric_info_nce_loss(z_BD, z_BD[:3], temperature=0.5)
    with pytest.raises(ValueError, match="a global batch of 1 sample has no negatives"):
        symmetric_info_nce_loss(z_BD[:1], z_BD[:1], temperature=0.5)
