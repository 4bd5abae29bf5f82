from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tests.gloo import run_ranks
from trainer.distributed.collectives import (
    all_gather_parts,
    all_gather_rows,
    all_reduce_mean_scalars,
    all_reduce_sum,
    any_rank,
    broadcast_json,
    from_first_rank,
    rank,
    world_size,
)


@dataclass
class Skips:
    """A value that ranks exchange."""

    rank: int
    losses: list[float]


def _weighted_gather(x_WBD: Tensor, weight_WGD: Tensor) -> tuple[Tensor, Tensor]:
    x_BD = x_WBD[rank()].clone().requires_grad_()
    gathered_GD = all_gather_rows(x_BD)
    (grad,) = torch.autograd.grad((gathered_GD * weight_WGD[rank()]).sum(), x_BD)
    return gathered_GD.detach(), grad


@pytest.mark.ranks
@pytest.mark.parametrize("num_columns", [2, 12_000], ids=["short", "long"])
def test_gathered_rows_are_in_rank_order_and_their_gradient_is_summed_at_the_owner(num_columns: int) -> None:
    """Short rows go to all ranks at once, long ones in rounds."""
    num_ranks = 3
    x_WBD = torch.randn(num_ranks, 3, num_columns, dtype=torch.float64)
    weight_WGD = torch.randn(num_ranks, 3 * num_ranks, num_columns, dtype=torch.float64)
    for r, (gathered_GD, grad_BD) in enumerate(run_ranks(_weighted_gather, num_ranks, x_WBD, weight_WGD)):
        torch.testing.assert_close(gathered_GD, x_WBD.flatten(0, 1), rtol=0, atol=0)
        torch.testing.assert_close(grad_BD, weight_WGD.sum(0)[3 * r : 3 * r + 3])


def _gathered_from_channels_last(pictures_WBCHW: Tensor) -> Tensor:
    return all_gather_rows(pictures_WBCHW[rank()].to(memory_format=torch.channels_last))


@pytest.mark.ranks
@pytest.mark.parametrize("size", [4, 120], ids=["short", "long"])
def test_gathered_pictures_are_the_same_in_any_memory_format(size: int) -> None:
    pictures_WBCHW = torch.randn(2, 2, 3, size, size)
    for gathered_GCHW in run_ranks(_gathered_from_channels_last, 2, pictures_WBCHW):
        assert torch.equal(gathered_GCHW, pictures_WBCHW.flatten(0, 1))


def _weighted_sum(x_WD: Tensor, weight_WD: Tensor) -> tuple[Tensor, Tensor]:
    x_D = x_WD[rank()].clone().requires_grad_()
    total_D = all_reduce_sum(x_D)
    (grad,) = torch.autograd.grad((total_D * weight_WD[rank()]).sum(), x_D)
    return total_D.detach(), grad


@pytest.mark.ranks
def test_sum_and_its_gradient_are_summed_over_the_ranks() -> None:
    x_WD, weight_WD = torch.randn(2, 4, 5, dtype=torch.float64)
    for total_D, grad_D in run_ranks(_weighted_sum, 4, x_WD, weight_WD):
        torch.testing.assert_close(total_D, x_WD.sum(0))
        torch.testing.assert_close(grad_D, weight_WD.sum(0))


def _agreements() -> tuple[dict[str, float], bool, bool, str, Skips, list[list[int]]]:
    means = all_reduce_mean_scalars({"b": float(rank()), "a": torch.tensor(2.0 * rank(), requires_grad=True)})
    word = broadcast_json(f"from {rank()}", str)
    skips = from_first_rank(lambda: Skips(rank(), [0.1]), Skips)
    parts = [part.tolist() for part in all_gather_parts(torch.arange(rank()))]
    return means, any_rank(rank() == 1), any_rank(False), word, skips, parts


@pytest.mark.ranks
def test_ranks_agree_on_means_flags_and_values() -> None:
    for *found, skips, parts in run_ranks(_agreements, 3):
        assert found == [{"a": 2.0, "b": 1.0}, True, False, "from 0"]
        assert skips == Skips(0, [0.1])
        assert parts == [[], [0], [0, 1]]


def test_without_a_process_group_everything_is_the_identity() -> None:
    x_BD = torch.randn(3, 2)
    assert (rank(), world_size()) == (0, 1)
    assert all_gather_rows(x_BD) is x_BD
    assert all_reduce_sum(x_BD) is x_BD
    assert all_reduce_mean_scalars({"a": torch.tensor(1.5), "b": 2}) == {"a": 1.5, "b": 2.0}
    assert all_reduce_mean_scalars({}) == {}
    assert (any_rank(True), any_rank(False), broadcast_json("x", str)) == (True, False, "x")
