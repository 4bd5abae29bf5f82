from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightly.loss import NTXentLoss
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from data_pipeline.core.errors import UserError
from tests.trainer.objectives.references import nt_xent_by_loop, published_by_loop
from trainer.objectives import (
    NTXent,
    NTXentConfig,
    PublishedNTXent,
    PublishedNTXentConfig,
    nt_xent_loss,
    published_nt_xent_loss,
)
from trainer.objectives.contrast import unit_rows
from trainer.objectives.published_nt_xent import floor_of_loss

Loss = Callable[..., Tensor]
CHUNK_SIZES = [None, 1, 4, 7, 1000]
both_forms = pytest.mark.parametrize(
    ("loss", "by_loop"), [(nt_xent_loss, nt_xent_by_loop), (published_nt_xent_loss, published_by_loop)]
)


def embeddings(
    batch_size: int, size: int, *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Two related views of random length, as an encoder gives them."""
    generator = torch.Generator().manual_seed(seed)
    z_a_BD = torch.randn(batch_size, size, generator=generator, dtype=dtype)
    z_b_BD = z_a_BD + 2 * torch.randn(batch_size, size, generator=generator, dtype=dtype)
    return z_a_BD.requires_grad_(), z_b_BD.requires_grad_()


def loss_and_gradients(loss: Loss, *inputs: Tensor, **options: Any) -> list[Tensor]:
    value = loss(*inputs, **options)
    return [value.detach(), *torch.autograd.grad(value, inputs)]


def assert_near(actual: list[Tensor], expected: list[Tensor], *, rtol: float) -> None:
    """By norms: single gradient entries near 0 carry the rounding errors of the large ones."""
    for ours, theirs in zip(actual, expected, strict=True):
        assert (ours.double() - theirs.double()).norm() <= rtol * theirs.double().norm()


@pytest.mark.parametrize("chunk_size", CHUNK_SIZES)
def test_values_worked_out_by_hand(chunk_size: int | None) -> None:
    z_a_BD = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    z_b_BD = torch.tensor([[0.6, 0.8], [-0.8, 0.6]])
    assert nt_xent_loss(z_a_BD, z_b_BD, temperature=0.5, chunk_size=chunk_size).item() == pytest.approx(
        0.6680402, abs=2e-7
    )
    assert published_nt_xent_loss(z_a_BD, z_b_BD, temperature=0.5, chunk_size=chunk_size).item() == pytest.approx(
        0.0590112, abs=2e-7
    )


@pytest.mark.parametrize("chunk_size", [None, 100])
@pytest.mark.parametrize(
    ("temperature", "batch_size", "floor"), [(0.07, 256, -5.5450), (0.1, 256, -5.5337), (0.07, 128, -4.8520)]
)
def test_floor_of_the_published_form(temperature: float, batch_size: int, floor: float, chunk_size: int | None) -> None:
    # Views coincide, and pictures are at right angles to each other, so that every negative contributes exp(0) = 1.
    z_BD = torch.eye(batch_size)
    at_right_angles = published_nt_xent_loss(z_BD, z_BD, temperature=temperature, chunk_size=chunk_size).item()
    assert at_right_angles == pytest.approx(floor, abs=5e-5)
    formula = math.log(2 * math.exp(1 / temperature) + 2 * batch_size - 2) - 1 / temperature - math.log(2 * batch_size)
    assert at_right_angles == pytest.approx(formula, abs=1e-6)
    told = floor_of_loss(temperature=temperature, num_candidates=2 * batch_size)
    assert at_right_angles == pytest.approx(told, abs=1e-6)
    note = PublishedNTXentConfig(temperature=temperature).note(global_batch_size=batch_size)
    assert note is not None
    assert f"at temperature {temperature} and batch {batch_size} is {floor:.3f}, not 0" in note


def test_the_published_form_can_fall_below_what_the_log_tells_and_the_log_says_so() -> None:
    z_BD = torch.eye(64) - 1 / 64  # the corners of a simplex: all cosines of two pictures are -1/63
    told = floor_of_loss(temperature=0.5, num_candidates=128)
    assert published_nt_xent_loss(z_BD, z_BD, temperature=0.5).item() < told - 0.02
    note = PublishedNTXentConfig(temperature=0.5).note(global_batch_size=64)
    assert note is not None
    assert note.endswith(f"is {told:.3f}, not 0, and it can fall a little lower")


@both_forms
@pytest.mark.parametrize("chunk_size", CHUNK_SIZES)
@pytest.mark.parametrize("temperature", [0.07, 0.5])
def test_loss_and_gradients_equal_a_loop_in_float64(
    loss: Loss, by_loop: Loss, temperature: float, chunk_size: int | None
) -> None:
    inputs = *embeddings(6, 5), torch.tensor(temperature, requires_grad=True)
    inputs_64 = [tensor.detach().double().requires_grad_() for tensor in inputs]
    expected = loss_and_gradients(by_loop, *inputs_64)

    def with_temperature(z_a: Tensor, z_b: Tensor, t: Tensor) -> Tensor:
        return loss(z_a, z_b, temperature=t, chunk_size=chunk_size)

    assert_near(loss_and_gradients(with_temperature, *inputs), expected, rtol=1e-5)
    assert_near(loss_and_gradients(with_temperature, *inputs_64), expected, rtol=1e-13)


@pytest.mark.parametrize("chunk_size", [None, 50])
@pytest.mark.parametrize("temperature", [0.07, 0.5])
def test_loss_and_gradients_equal_lightly(temperature: float, chunk_size: int | None) -> None:
    z_a_BD, z_b_BD = embeddings(83, 32)
    expected = loss_and_gradients(NTXentLoss(temperature=temperature), z_a_BD, z_b_BD)
    actual = loss_and_gradients(nt_xent_loss, z_a_BD, z_b_BD, temperature=temperature, chunk_size=chunk_size)
    assert_near(actual, expected, rtol=1e-5)


@both_forms
@pytest.mark.parametrize("batch_size", [1, 64, 65])
def test_tiles_equal_the_full_matrix(loss: Loss, by_loop: Loss, batch_size: int) -> None:
    z_a_BD, z_b_BD = embeddings(batch_size, 16)
    full = loss_and_gradients(loss, z_a_BD, z_b_BD, temperature=0.1)
    tiled = loss_and_gradients(loss, z_a_BD, z_b_BD, temperature=0.1, chunk_size=48)
    for ours, theirs in zip(tiled, full, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6 * theirs.abs().max().item() + 1e-6)


@both_forms
def test_tiles_survive_the_extremes_of_the_lowest_temperature(loss: Loss, by_loop: Loss) -> None:
    e = torch.eye(2)
    collapsed, opposite = e[:1].repeat(9, 1), torch.cat([e[:1], -e[:1].repeat(8, 1)])
    for z_a_BD, z_b_BD in [(collapsed, collapsed), (opposite, opposite), (opposite, -opposite), (collapsed, opposite)]:
        # A little to the side, because at the poles themselves every gradient is 0.
        inputs = [(z_BD + 1e-2 * e[1]).requires_grad_() for z_BD in (z_a_BD, z_b_BD)]
        inputs_64 = [z_BD.detach().double().requires_grad_() for z_BD in inputs]
        expected = loss_and_gradients(by_loop, *inputs_64, temperature=0.02)
        actual = loss_and_gradients(loss, *inputs, temperature=0.02, chunk_size=4)
        for ours, theirs in zip(actual, expected, strict=True):
            torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=2e-5)


class LargestTensor(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the number of elements of the largest tensor that any operation returns, forward and backward."""

    numel: int = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else [result]:
            if isinstance(value, Tensor):
                self.numel = max(self.numel, value.numel())
        return result


def largest_tensor(loss: Loss, batch_size: int, chunk_size: int | None) -> int:
    z_a_BD, z_b_BD = embeddings(batch_size, 8)
    largest = LargestTensor()  # type: ignore[no-untyped-call]
    with largest:
        loss_and_gradients(loss, z_a_BD, z_b_BD, temperature=0.5, chunk_size=chunk_size)
    return largest.numel


@pytest.mark.slow
@both_forms
def test_memory_of_tiles_is_linear_in_the_batch(loss: Loss, by_loop: Loss) -> None:
    assert largest_tensor(loss, 512, None) >= 512 * 1024
    # 2 B rows of 8 numbers outgrow a tile of 64 by 64 from B = 256 on.
    assert [largest_tensor(loss, batch_size, 64) for batch_size in (64, 512, 1024)] == [64 * 64, 8 * 1024, 8 * 2048]


@both_forms
@pytest.mark.parametrize("chunk_size", [None, 16])
def test_autocast_changes_nothing(loss: Loss, by_loop: Loss, chunk_size: int | None) -> None:
    z_a_BD, z_b_BD = embeddings(40, 16)
    options = {"temperature": 0.07, "chunk_size": chunk_size}
    expected = loss_and_gradients(loss, z_a_BD, z_b_BD, **options)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = loss(z_a_BD, z_b_BD, **options)
        # torch wants backward outside autocast, but a user's mistake there must not cost precision in the tiles.
        gradients = torch.autograd.grad(value, (z_a_BD, z_b_BD)) if chunk_size else None
    gradients = gradients or torch.autograd.grad(value, (z_a_BD, z_b_BD))
    for ours, theirs in zip([value, *gradients], expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@both_forms
def test_low_precision_embeddings_are_compared_in_float32(loss: Loss, by_loop: Loss) -> None:
    z_a_BD, z_b_BD = (z_BD.detach().bfloat16() for z_BD in embeddings(40, 16))
    value = loss(z_a_BD, z_b_BD, temperature=0.07)
    assert value.dtype == torch.float32
    assert value.item() == pytest.approx(by_loop(z_a_BD, z_b_BD, 0.07).item(), rel=1e-5)


def test_low_temperatures_need_the_full_matrix() -> None:
    z_a_BD, z_b_BD = embeddings(9, 4)
    expected = loss_and_gradients(NTXentLoss(temperature=0.001), z_a_BD, z_b_BD)
    assert_near(loss_and_gradients(nt_xent_loss, z_a_BD, z_b_BD, temperature=0.001), expected, rtol=1e-4)
    with pytest.raises(ValueError, match=r"temperature is 0\.001; with a chunk_size it must be at least 0\.02"):
        nt_xent_loss(z_a_BD, z_b_BD, temperature=0.001, chunk_size=8)
    with pytest.raises(UserError, match=r"recipe: temperature is 0\.001; with a chunk_size"):
        NTXentConfig.parse({"temperature": 0.001, "chunk_size": 8}, where="recipe")


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-14), (torch.float32, 1e-6)])
def test_unit_rows_and_their_gradients_equal_those_of_torch(dtype: torch.dtype, rtol: float) -> None:
    z_a_BD, z_b_BD = embeddings(9, 7, dtype=dtype)
    with torch.no_grad():
        z_a_BD[0] = 0  # which have no direction
        z_b_BD[0] = 1e-13
    scale = torch.tensor(3.0, dtype=dtype, requires_grad=True)
    weight_ND = torch.randn(18, 7, generator=torch.Generator().manual_seed(1), dtype=dtype)

    def ours(z_a: Tensor, z_b: Tensor, scale: Tensor) -> Tensor:
        return (weight_ND * unit_rows(z_a, z_b, scale=scale)).sum()

    def theirs(z_a: Tensor, z_b: Tensor, scale: Tensor) -> Tensor:
        return (weight_ND * (torch.nn.functional.normalize(torch.cat([z_a, z_b]), dim=1) * scale)).sum()

    inputs = z_a_BD, z_b_BD, scale
    for value, expected in zip(loss_and_gradients(ours, *inputs), loss_and_gradients(theirs, *inputs), strict=True):
        rows = (value, expected) if value.dim() < 2 else (value[:1], expected[:1], value[1:], expected[1:])
        for few, peer in zip(rows[::2], rows[1::2], strict=True):  # gradients by rows without direction are huge
            assert peer.norm() > 0
            assert_near([few], [peer], rtol=rtol)


@pytest.mark.parametrize("loss", [nt_xent_loss, published_nt_xent_loss])
def test_wrong_input_is_refused(loss: Loss) -> None:
    z_BD = torch.randn(4, 3)
    for temperature in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match=r"temperature is .*; it must be positive"):
            loss(z_BD, z_BD, temperature=temperature)
    with pytest.raises(ValueError, match="chunk_size is 0"):
        loss(z_BD, z_BD, temperature=0.5, chunk_size=0)
    with pytest.raises(ValueError, match=r"\(4, 3\) and \(3, 3\)"):
        loss(z_BD, z_BD[:3], temperature=0.5)
    with pytest.raises(ValueError, match=r"an empty batch has no loss: .* are \(0, 3\)"):
        loss(z_BD[:0], z_BD[:0], temperature=0.5)
    with pytest.raises(ValueError, match=r"must be \(B, D\)"):
        loss(z_BD[0], z_BD[0], temperature=0.5)


def test_objectives_log_what_they_see() -> None:
    standard = NTXent(NTXentConfig(temperature=0.1, chunk_size=3))
    published = PublishedNTXent(PublishedNTXentConfig())
    z_a_BD, z_b_BD = embeddings(8, 16)
    output = standard(z_a_BD, z_b_BD)
    torch.testing.assert_close(output.loss, nt_xent_loss(z_a_BD, z_b_BD, temperature=0.1))
    cosine_B = torch.cosine_similarity(z_a_BD, z_b_BD)
    torch.testing.assert_close(output.metrics["alignment"], cosine_B.mean().detach())
    assert not any(metric.requires_grad for metric in output.metrics.values())
    torch.testing.assert_close(published(z_a_BD, z_b_BD).loss, published_nt_xent_loss(z_a_BD, z_b_BD, temperature=0.07))

    # Views that coincide, far from all others: the positive is certain, but for the published form's self-similarity.
    apart_BD = torch.eye(8)
    assert standard(apart_BD, apart_BD).metrics["positive_probability"].item() == pytest.approx(1, abs=1e-3)
    assert published(apart_BD, apart_BD).metrics["positive_probability"].item() == pytest.approx(0.5, abs=1e-3)
    assert standard(apart_BD, apart_BD).metrics["alignment"].item() == pytest.approx(1)
