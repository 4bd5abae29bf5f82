"""The bits of a result that say which test samples a probe gets right."""

from __future__ import annotations

import pytest
import torch

from trainer.probes.result import pack_right, unpack_right


@pytest.mark.parametrize("num", [0, 1, 7, 8, 9, 1000])
def test_bits_come_out_as_they_went_in(num: int) -> None:
    right_N = torch.rand(num, generator=torch.Generator().manual_seed(num)) < 0.5
    found = unpack_right(pack_right(right_N), num_test=num)
    assert found is not None
    assert found.tolist() == right_N.tolist()


@pytest.mark.parametrize("text", ["", "no base64!", "oAA=", "é"])
def test_damaged_bits_count_as_missing(text: str) -> None:
    assert unpack_right(text, num_test=3) is None
