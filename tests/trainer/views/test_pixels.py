"""Pixels from 0 to 1, with the bits of a division on every device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.views.inputs import from_bytes

LEVELS = torch.arange(256, dtype=torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_pixels_are_divided_by_255(dtype: torch.dtype) -> None:
    expected = np.arange(256).astype(str(dtype).removeprefix("torch.")) / 255
    for levels in (LEVELS, LEVELS.to(dtype)):
        assert np.array_equal(from_bytes(levels, dtype).numpy(), expected)
    assert LEVELS[-1] == 255


def test_pixels_are_divided_by_a_tensor() -> None:
    """By a number of Python's, a GPU would multiply by its reciprocal, which has other bits."""
    reciprocal = torch.tensor(1.0) / 255
    assert not torch.equal(LEVELS.float() * reciprocal, from_bytes(LEVELS))
    divisors: list[Any] = []

    class Divisions(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            assert "mul" not in str(func)
            if "div" in str(func):
                divisors.append(args[1])
            return func(*args, **(kwargs or {}))

    with Divisions():  # type: ignore[no-untyped-call]
        from_bytes(LEVELS)
    assert [(divisor.device, divisor.numel()) for divisor in divisors] == [(LEVELS.device, 1)]
