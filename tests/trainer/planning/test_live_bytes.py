"""Compare counts with sums by hand; `test_plan.py` compares fake tensors with real steps."""

from __future__ import annotations

import torch

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
