"""Budgets for the kernels that a step launches on a GPU: numbers of launches, not timings."""

from __future__ import annotations

import functools
import math

import pytest
import torch

from benchmarks.kernels import PHASES, KernelCounter, count_kernels, work_of
from configs import resolve_recipe
from tests.old_versions import needs_gpu_tensors_without_data

aten = torch.ops.aten
BUDGETS = {
    ("simclr:digits", "float32"): 247,
    ("simclr:digits", "bfloat16"): 251,
    ("viewmaker:digits", "float32"): 346,
    ("viewmaker:digits", "bfloat16"): 350,
}


@functools.cache
def counted(recipe: str, precision: str) -> KernelCounter:
    return count_kernels(resolve_recipe(recipe, ["tracking.wandb=disabled", f"precision={precision}"]))


@pytest.mark.slow
@needs_gpu_tensors_without_data
@pytest.mark.parametrize(("recipe", "precision"), BUDGETS)
def test_a_step_launches_few_kernels(recipe: str, precision: str) -> None:
    counter = counted(recipe, precision)
    assert all(counter.launches[phase].total() for phase in PHASES if phase != "bookkeeping")
    assert counter.total <= BUDGETS[recipe, precision], {p: counter.launches[p].total() for p in PHASES}


@pytest.mark.slow
@needs_gpu_tensors_without_data
def test_the_number_of_kernels_does_not_depend_on_the_batch() -> None:
    config = resolve_recipe("simclr:digits", ["tracking.wandb=disabled", "precision=bfloat16"])
    assert count_kernels(config, batch_size=8).launches == counted("simclr:digits", "bfloat16").launches


@pytest.mark.slow
@pytest.mark.pinned
@needs_gpu_tensors_without_data
def test_kernels_of_batch_norm_move_each_value_once_in_whole_sectors() -> None:
    """By their machine code, for maps of 64 x 32 x 32; and memory bounds them, not instructions."""
    config = resolve_recipe("simclr:digits", ["tracking.wandb=disabled", "precision=bfloat16"])
    counter = count_kernels(config, batch_size=128)
    shape = (256, 64, 32, 32)
    counter.triton = [one for one in counter.triton if any(getattr(each, "shape", None) == shape for each in one[2])]
    works = work_of(counter)
    tensors = {each: each.sectors_us * 4e6 / (2 * math.prod(shape)) for each in works}
    assert {(each.name, round(num)) for each, num in tensors.items()} == {
        ("_statistics_kernel", 1),
        *(("_normalise_kernel", num) for num in (2, 3)),
        *(("_sums_kernel", num) for num in (2, 4)),
        ("_gradient_kernel", 3),
    }
    assert all(num <= 1.2 * round(num) for num in tensors.values())  # every warp also reads statistics
    assert all(each.instructions_us < each.sectors_us for each in works)


@pytest.mark.slow
@needs_gpu_tensors_without_data
def test_a_step_sends_few_messages_on_any_number_of_ranks() -> None:
    """One gathers the embeddings, and each batch norm sends one each way for both views. DDP's buckets come on top."""
    counter = count_kernels(resolve_recipe("viewmaker:digits", ["tracking.wandb=disabled"]), num_ranks=64)
    num_norms = 20
    assert counter.messages == {
        "_allgather_base_": 1 + num_norms,
        "_reduce_scatter_base_": 1,
        "allreduce_": num_norms,
    }


def test_what_launches_is_counted() -> None:
    with KernelCounter() as counter:
        x = torch.zeros(4, 6)
        y = x + 1
        y.t().contiguous().mul_(2)
        torch.cat([x] * 129)
    assert counter.launches["bookkeeping"] == {"zeros": 1, "add": 1, "clone": 1, "mul_": 1, "cat": 2}
