"""Digests of tensors, and how a test compares them with frozen ones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

FOLDER = Path(__file__).parent
NUM_ENTRIES = 8
Numbers = dict[str, list[float]]


def digest(tensor: Tensor) -> list[float]:
    """Return the norm and the mean of a tensor, and some of its entries, from the first to the last."""
    flat = tensor.detach().double().flatten()
    places = torch.linspace(0, flat.numel() - 1, min(NUM_ENTRIES, flat.numel())).long()
    return [flat.norm().item(), flat.mean().item(), *flat[places].tolist()]


def assert_frozen(found: Numbers, golden: Mapping[str, list[float]], *, rtol: float) -> None:
    """Compare each digest by its norm.

    A gradient that is zero in exact arithmetic is rounding of its neighbours, hence the second term.
    """
    assert found.keys() == golden.keys()
    largest = max((abs(numbers[0]) for numbers in golden.values()), default=0)
    for name, numbers in golden.items():
        assert len(found[name]) == len(numbers), name
        tolerance = rtol * abs(numbers[0]) + 1e-3 * rtol * largest
        for ours, theirs in zip(found[name], numbers, strict=True):
            assert math.isclose(ours, theirs, rel_tol=0, abs_tol=tolerance), (name, ours, theirs)
