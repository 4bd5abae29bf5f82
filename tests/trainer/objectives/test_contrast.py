"""The shared parts of contrastive losses: chunks, memory, extreme temperatures."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from lightly.loss import NTXentLoss
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.trainer.objectives import loops
from tests.trainer.objectives.pair_losses import Loss, assert_near, loss_and_gradient, related_views
from trainer.objectives import dcl_loss, ifm_loss, macl_loss, nt_xent_loss, published_nt_xent_loss, split_loss

both_forms = pytest.mark.parametrize(
    ("loss", "loop"), [(nt_xent_loss, loops.nt_xent), (published_nt_xent_loss, loops.published_nt_xent)]
)


@both_forms
def test_chunks_survive_the_extremes_of_a_low_temperature(loss: Loss, loop: Loss) -> None:
    e = torch.eye(2)
    collapsed, opposite = e[:1].repeat(9, 1), torch.cat([e[:1], -e[:1].repeat(8, 1)])
    for pair in [(collapsed, collapsed), (opposite, opposite), (opposite, -opposite), (collapsed, opposite)]:
        # A little to the side, because at the poles themselves every gradient is 0.
        z_VBD = torch.stack([z_BD + 1e-2 * e[1] for z_BD in pair])
        expected = loss_and_gradient(partial(loop, temperature=0.02), z_VBD.double())
        actual = loss_and_gradient(partial(loss, temperature=0.02, chunk_size=4), z_VBD)
        for ours, theirs in zip(actual, expected, strict=True):
            torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("temperature", [1e-4, 1e4])
@pytest.mark.parametrize("loss", [dcl_loss, partial(ifm_loss, epsilon=0.1), macl_loss], ids=["dcl", "ifm", "macl"])
def test_extreme_temperatures_give_finite_losses_and_gradients(loss: Loss, temperature: float) -> None:
    e = torch.eye(8)
    for z_a, z_b in ((e, e), (e, -e), (e[:1].repeat(8, 1), e[:1].repeat(8, 1))):
        value, gradient = loss_and_gradient(partial(loss, temperature=temperature), torch.stack([z_a, z_b]))
        assert value.isfinite()
        assert gradient.isfinite().all()


@pytest.mark.parametrize("chunk_size", [None, 4])
def test_any_temperature_works(chunk_size: int | None) -> None:
    z_VBD = related_views(9, 4)
    expected = loss_and_gradient(NTXentLoss(temperature=0.001), z_VBD)
    ours = partial(nt_xent_loss, temperature=0.001, chunk_size=chunk_size)
    assert_near(loss_and_gradient(ours, z_VBD), expected, rtol=1e-4)


class LargestTensor(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the number of elements of the largest tensor that any operation returns, forward and backward."""

    numel: int = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else [result]:
            if isinstance(value, Tensor):
                self.numel = max(self.numel, value.numel())
        return result


def kept_and_largest(loss: Loss, num_samples: int) -> tuple[int, int]:
    """Return the count of numbers kept for the backward pass, and the count in the largest tensor at any time."""
    z_VBD = related_views(num_samples, 8, dtype=torch.float32).requires_grad_()
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() // 4
        return tensor

    largest = LargestTensor()  # type: ignore[no-untyped-call]
    with largest, torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = loss(*z_VBD)
    assert not isinstance(output, Tensor)
    with largest:
        torch.autograd.grad(output.loss, z_VBD)
    return sum(kept.values()), largest.numel


@pytest.mark.parametrize(
    ("loss", "rows", "columns"),
    [
        (partial(split_loss, divergence_weight=0.4), 1, 1),
        (nt_xent_loss, 2, 2),
        (published_nt_xent_loss, 1, 2),
    ],
    ids=["split", "nt_xent", "published"],
)
def test_memory_of_chunks_is_linear_in_the_batch(loss: Loss, rows: int, columns: int) -> None:
    kept, largest = kept_and_largest(partial(loss, temperature=0.5), 256)
    assert kept >= largest == rows * columns * 256 * 256
    chunked = partial(loss, temperature=0.5, chunk_size=64)
    (kept, largest), (kept_twice, largest_twice) = kept_and_largest(chunked, 256), kept_and_largest(chunked, 512)
    assert largest <= columns * 64 * 256
    assert largest_twice <= 2 * largest
    assert kept_twice <= 2.1 * kept < 256 * 256 / 2
