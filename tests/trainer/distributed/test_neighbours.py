"""What ranks of one machine say to each other through shared memory, against gloo; and when one of them ends."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from data_pipeline.core.errors import UserError
from tests.gloo import run_ranks
from trainer.distributed import collectives, neighbours
from trainer.distributed.collectives import (
    all_gather_object,
    all_gather_rows,
    all_reduce_mean_scalars,
    all_reduce_sum,
    leave_neighbours,
    meet_neighbours,
    rank,
    sum_in_rank_order,
    world_size,
)


def everything(sizes: list[int], dtype: torch.dtype) -> list[Tensor]:
    """Every collective on different tensors of each rank, with gradients."""
    generator = torch.Generator().manual_seed(rank())
    results: list[Tensor] = []
    for size in sizes:
        x_BD = torch.randn(size, 3, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        gathered_GD = all_gather_rows(x_BD)
        weight_GD = torch.randn(gathered_GD.shape, generator=generator, dtype=torch.float64).to(dtype)
        total_BD = all_reduce_sum(x_BD.transpose(0, 1))  # not contiguous
        (grad_BD,) = torch.autograd.grad((gathered_GD * weight_GD).sum() + total_BD.square().sum(), x_BD)
        results += [gathered_GD.detach(), total_BD.detach(), grad_BD, sum_in_rank_order(x_BD.detach())]
    mean = all_reduce_mean_scalars({"rank": rank(), "third": torch.tensor(rank() / 3, dtype=dtype)})
    return [*results, torch.tensor([mean["rank"], mean["third"]])]


@pytest.mark.parametrize(
    ("num_ranks", "dtype"), [(2, torch.float32), (3, torch.float64), (4, torch.float32), (2, torch.bfloat16)]
)
def test_the_same_as_through_gloo(num_ranks: int, dtype: torch.dtype) -> None:
    """Gathers bit for bit; sums as well, where gloo's were added up in rank order."""
    sizes = [1, 2, 700, 5]
    shared = run_ranks(everything, num_ranks, sizes, dtype)
    through_gloo = run_ranks(everything, num_ranks, sizes, dtype, neighbours=False)
    for mine, theirs in zip(shared, through_gloo, strict=True):
        for number, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            if number % 4 != 2 and number < 4 * len(sizes):
                assert torch.equal(a, b)
            else:
                torch.testing.assert_close(a, b)


def long_tensors(slot_bytes: int) -> bool:
    """Tensors of several rounds, whose last piece is smaller; exact sums, since they are of whole numbers."""
    num = 3 * slot_bytes // 8 + 5
    x_N = torch.arange(num, dtype=torch.float64)
    total_N = sum_in_rank_order(x_N * (rank() + 1))
    gathered_WN = all_gather_rows((x_N + rank())[None])
    expected_WN = x_N + torch.arange(world_size(), dtype=torch.float64)[:, None]
    return torch.equal(total_N, x_N * sum(range(1, world_size() + 1))) and torch.equal(gathered_WN, expected_WN)


def test_a_tensor_longer_than_the_shared_memory() -> None:
    assert run_ranks(long_tensors, 3, neighbours.SLOT_BYTES) == [True] * 3


def out_of_step() -> bool:
    """Ranks that are slow in turn never read what is written for a later call."""
    for number in range(60):
        if number % world_size() == rank():
            time.sleep(0.002)
        if not torch.equal(all_gather_rows(torch.tensor([[number]])), torch.full((world_size(), 1), number)):
            return False
    return True


def test_a_slow_rank_reads_what_was_meant_for_it() -> None:
    assert run_ranks(out_of_step, 3) == [True] * 3


def say_who_is_gone(seconds_late: Sequence[float]) -> str:
    time.sleep(seconds_late[rank()])
    if rank() == 1:
        leave_neighbours()
        return ""
    with pytest.raises(RuntimeError) as raised:
        all_reduce_sum(torch.ones(3))
    return str(raised.value)


@pytest.mark.parametrize("seconds_late", [(0.0, 0.0, 0.0), (0.6, 0.3, 0.0), (0.0, 0.3, 0.6), (0.0, 0.3, 0.0)])
def test_a_rank_that_hangs_up_is_named(seconds_late: tuple[float, ...]) -> None:
    """Whoever comes first, also by the rank that already waits for another when it happens."""
    said = run_ranks(say_who_is_gone, 3, seconds_late, timeout_s=20)
    assert all("rank 1 has hung up while this one waits" in said[one] for one in (0, 2)), said


def never_come() -> str:
    leave_neighbours()
    assert meet_neighbours(timeout_seconds=2)
    if rank() == 1:
        return ""  # its process stays until it is killed: it neither comes nor hangs up
    with pytest.raises(RuntimeError) as raised:
        all_reduce_sum(torch.ones(3))
    return str(raised.value)


def test_waiting_has_a_limit() -> None:
    assert run_ranks(never_come, 2)[0] == "rank 1 did not come to a collective in 2.0 s"


def one_cannot() -> tuple[bool, list[Tensor]]:
    leave_neighbours()
    if rank() == 1:
        neighbours.Doorbell.connect = refuse  # type: ignore[method-assign]
    neighbours._MEETING_SECONDS = 1.0
    met = meet_neighbours(timeout_seconds=1000)  # which is for what is exchanged later
    assert not collectives._neighbours
    return met, everything([4], torch.float32)


def refuse(*_: object, **__: object) -> neighbours.Neighbours:
    raise UserError("no such socket")


def test_where_one_rank_cannot_all_stay_with_gloo() -> None:
    (met, mine), (_, _) = run_ranks(one_cannot, 2)
    assert not met
    torch.testing.assert_close(mine, run_ranks(everything, 2, [4], torch.float32, neighbours=False)[0])


def num_open() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def open_files() -> list[bool]:
    before = num_open()
    leave_neighbours()
    without = num_open()
    assert meet_neighbours(timeout_seconds=5)
    return [without < before, num_open() == before, bool(all_gather_object(0))]


def test_nothing_is_left_open() -> None:
    assert run_ranks(open_files, 3) == [[True, True, True]] * 3
