"""Budgets for the kernels that a step launches on a GPU: numbers of launches, not timings."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from benchmarks.kernels import PHASES, KernelCounter, count_kernels, launches_of
from configs import resolve_recipe

aten = torch.ops.aten
BUDGETS = {
    ("simclr:digits", "float32"): 515,
    ("simclr:digits", "bfloat16"): 520,
    ("viewmaker:digits", "float32"): 550,
    ("viewmaker:digits", "bfloat16"): 605,
}


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "precision"), BUDGETS)
def test_a_step_launches_few_kernels(recipe: str, precision: str) -> None:
    config = resolve_recipe(recipe, ["tracking.wandb=disabled", f"precision={precision}"])
    counter = count_kernels(config)
    assert all(counter.launches[phase].total() for phase in PHASES if phase != "bookkeeping")
    assert counter.total <= BUDGETS[recipe, precision], {p: counter.launches[p].total() for p in PHASES}


@pytest.mark.slow
def test_the_number_of_kernels_does_not_depend_on_the_batch() -> None:
    config = resolve_recipe("viewmaker:digits", ["tracking.wandb=disabled"])
    small, large = (count_kernels(config, batch_size=size) for size in (8, 1_024))
    assert small.launches == large.launches


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 64])
@pytest.mark.parametrize("recipe", ["simclr:digits", "viewmaker:digits"])
def test_a_step_sends_few_messages_on_any_number_of_ranks(recipe: str, num_ranks: int) -> None:
    """One gathers the embeddings, and each batch norm sends one each way for both views. DDP's buckets come on top."""
    counter = count_kernels(resolve_recipe(recipe, ["tracking.wandb=disabled"]), num_ranks=num_ranks)
    num_norms = 20
    assert counter.messages == {
        "_allgather_base_": 1 + num_norms,
        "_reduce_scatter_base_": 1,
        "allreduce_": num_norms,
    }


def test_views_and_new_memory_launch_nothing() -> None:
    with KernelCounter() as counter:
        x = torch.empty(4, 6)
        x.view(2, 12).t().detach().unsqueeze(0).expand(3, -1, -1).chunk(2)
        x.to(torch.float32).contiguous()
    assert counter.total == 0


def test_what_launches_is_counted() -> None:
    with KernelCounter() as counter:
        x = torch.zeros(4, 6)
        y = x + 1
        y.t().contiguous().mul_(2)
        torch.cat([x] * 129)
    assert counter.launches["bookkeeping"] == {"zeros": 1, "add": 1, "clone": 1, "mul_": 1, "cat": 2}


def test_a_convolution_goes_backward_in_a_kernel_for_each_gradient() -> None:
    layer = nn.Conv2d(3, 4, 3)
    with KernelCounter() as counter:
        torch.autograd.backward(layer(torch.ones(2, 3, 8, 8)).sum())
    assert counter.launches["bookkeeping"]["convolution_backward"] == 2  # weight and bias; the input has none


def lists(num_tensors: int, num_values: int, num_lists: int) -> list[list[Tensor]]:
    return [[torch.empty(num_values)] * num_tensors for _ in range(num_lists)]


@pytest.mark.parametrize(
    ("num_tensors", "num_values", "num_lists", "expected"),
    [(1, 10, 1, 1), (110, 10, 1, 1), (111, 10, 1, 2), (36, 10, 4, 1), (37, 10, 4, 2), (1, 320 * 65_536 + 1, 1, 2)],
)
def test_lists_are_cut_as_torch_cuts_them(num_tensors: int, num_values: int, num_lists: int, expected: int) -> None:
    with torch.device("meta"):
        args = lists(num_tensors, num_values, num_lists)
    assert launches_of(aten._foreach_add.List, args, {}) == expected
