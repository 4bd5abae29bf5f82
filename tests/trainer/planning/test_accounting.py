"""Compare accounts with sums by hand, and fake tensors with real ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.gloo import run_ranks
from trainer.distributed.collectives import all_gather_rows, all_reduce_sum, rank
from trainer.planning.accounting import Accounts

KB = 256  # float32 numbers


def test_what_is_alive_and_the_most_that_was() -> None:
    with Accounts() as accounts:
        a = torch.ones(KB)
        b = a + a
        del a
        assert (accounts.live_bytes, accounts.peak_bytes) == (1024, 2048)
        c = torch.cat([b, b, b])
        assert (accounts.live_bytes, accounts.peak_bytes) == (4096, 4096)
        del b, c
        assert (accounts.live_bytes, accounts.peak_bytes) == (0, 4096)


def test_views_and_writing_in_place_take_nothing() -> None:
    before = torch.ones(KB)
    with Accounts() as accounts:
        a = torch.ones(4, KB)
        parts = [a[1], a.T, a.view(-1), *a.unbind(), before[:7], before.add_(1)]
        assert (accounts.live_bytes, accounts.peak_bytes) == (4096, 4096)
        del a
        assert accounts.live_bytes == 4096  # the views hold it
        del parts
        assert accounts.live_bytes == 0


def test_numbers_of_python_are_counted() -> None:
    with Accounts() as accounts:
        kept = torch.tensor([1.0, 2.0])
        assert accounts.live_bytes == 8
        del kept


def test_a_part_keeps_the_whole_alive() -> None:
    with Accounts() as accounts:
        last = torch.ones(8, KB)[-1]
        assert accounts.live_bytes == 8192
        del last
        assert accounts.live_bytes == 0


def test_the_peak_can_be_asked_for_a_while() -> None:
    with Accounts() as accounts:
        torch.ones(10 * KB)
        kept = torch.ones(KB)
        accounts.restart_peak()
        assert accounts.recent_peak_bytes == 1024
        torch.ones(2 * KB)
        assert accounts.recent_peak_bytes == 3072
        assert accounts.peak_bytes == 10240
        del kept


def test_what_is_ignored_is_not_counted() -> None:
    a = torch.ones(KB)
    with Accounts().ignore(iter([a])) as accounts:
        b = torch.ones(1).set_(a.untyped_storage())
        assert accounts.live_bytes <= 4
        del b


def test_backward_is_counted_too() -> None:
    """For x.exp().sum(), the result of exp is kept; then x's gradient is made, beside the sum's gradient, a view."""
    x = torch.ones(KB, requires_grad=True)
    with Accounts() as accounts:
        loss = x.exp().sum()
        assert accounts.live_bytes == 1024 + 4
        loss.backward()  # type: ignore[no-untyped-call]
        del loss
        assert accounts.live_bytes == 1024
        assert x.grad is not None
        assert accounts.peak_bytes == 2 * 1024 + 4 + 4


def convolutions() -> Tensor:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3, stride=2), nn.Flatten())
    loss: Tensor = net(torch.rand(6, 3, 12, 12)).square().mean()
    loss.backward()  # type: ignore[no-untyped-call]
    return loss


def attention() -> Tensor:
    net = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    loss: Tensor = net(torch.rand(3, 10, 16)).square().mean()
    loss.backward()  # type: ignore[no-untyped-call]
    return loss


@pytest.mark.parametrize("work", [convolutions, attention])
def test_fakes_take_what_real_tensors_take(work: Callable[[], Tensor]) -> None:
    with Accounts() as real:
        kept = work()
    with FakeTensorMode(), Accounts() as fake:
        work()
    assert kept.isfinite()
    assert real.peak_bytes == fake.peak_bytes > 10_000


def sent() -> dict[str, int]:
    x_BD = torch.ones(3, 5, dtype=torch.float64, requires_grad=True) + rank()
    with Accounts() as accounts:
        loss = all_gather_rows(x_BD).sum()
        loss = loss + all_reduce_sum(torch.ones(100_000)).sum() + all_reduce_sum(torch.ones(7)).sum()
        loss.backward()  # type: ignore[no-untyped-call]
    return dict(accounts.sent_bytes)


@pytest.mark.ranks
def test_what_a_rank_puts_into_collectives() -> None:
    """A gather sends rows forward and a whole gradient backward; long sums are reduced, short ones gathered."""
    expected = {"allgather": 3 * 5 * 8 + 7 * 4, "reduce_scatter": 2 * 3 * 5 * 8, "allreduce": 400_000}
    assert run_ranks(sent, 2) == [expected, expected]
