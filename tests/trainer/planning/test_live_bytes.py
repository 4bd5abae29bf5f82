"""Compare counts with sums by hand, and fake tensors with real ones."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from trainer.planning.live_bytes import LiveBytes

KB = 256  # float32 numbers


def test_what_is_alive_and_the_most_that_was() -> None:
    with LiveBytes() as live:
        a = torch.ones(KB)
        b = a + a
        del a
        assert (live.live_bytes, live.peak_bytes) == (1024, 2048)
        c = torch.cat([b, b, b])
        assert (live.live_bytes, live.peak_bytes) == (4096, 4096)
        del b, c
        assert (live.live_bytes, live.peak_bytes) == (0, 4096)


def test_views_and_writing_in_place_take_nothing() -> None:
    before = torch.ones(KB)
    with LiveBytes() as live:
        a = torch.ones(4, KB)
        parts = [a[1], a.T, a.view(-1), *a.unbind(), before[:7], before.add_(1)]
        assert (live.live_bytes, live.peak_bytes) == (4096, 4096)
        del a
        assert live.live_bytes == 4096  # the views hold it
        del parts
        assert live.live_bytes == 0
        kept = torch.tensor([1.0, 2.0])
        assert live.live_bytes == 8
        del kept


def test_backward_is_counted_too() -> None:
    """For x.exp().sum(), the result of exp is kept; then x's gradient is made, beside the sum's gradient, a view."""
    x = torch.ones(KB, requires_grad=True)
    with LiveBytes() as live:
        loss = x.exp().sum()
        assert live.live_bytes == 1024 + 4
        loss.backward()  # type: ignore[no-untyped-call]
        del loss
        assert live.live_bytes == 1024
        assert live.peak_bytes == 2 * 1024 + 4 + 4


def convolutions() -> Tensor:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3, stride=2), nn.Flatten())
    loss: Tensor = net(torch.rand(6, 3, 12, 12)).square().mean()
    loss.backward()  # type: ignore[no-untyped-call]
    return loss


def test_fakes_take_what_real_tensors_take() -> None:
    with LiveBytes() as real:
        kept = convolutions()
    with FakeTensorMode(), LiveBytes() as fake:
        convolutions()
    assert kept.isfinite()
    assert real.peak_bytes == fake.peak_bytes > 10_000
