"""The bits of a result that say which test samples a probe gets right."""

from __future__ import annotations

import pytest
import torch

from data_pipeline.core.sample import NO_LABEL
from trainer.probes import result
from trainer.probes.result import pack_right, unpack_right


@pytest.mark.parametrize("num", [0, 1, 7, 8, 9, 1000])
def test_bits_come_out_as_they_went_in(num: int) -> None:
    draw = torch.Generator().manual_seed(num)
    class_N, label_N = (torch.randint(-1, 3, (num,), generator=draw) for _ in range(2))
    label_N[::5] = NO_LABEL
    expected = [a == b for a, b in zip(class_N.tolist(), label_N.tolist(), strict=True) if b != NO_LABEL]
    text = pack_right(class_N, label_N)
    assert text is not None
    found = unpack_right(text, num_test=len(expected))
    assert found is not None
    assert found.tolist() == expected


def test_a_test_set_that_is_too_large_keeps_no_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(result, "MOST_SAMPLES", 9)
    assert pack_right(torch.zeros(10), torch.zeros(10)) is None


@pytest.mark.parametrize("text", ["", "no base64!", "oAA=", "é"])
def test_damaged_bits_count_as_missing(text: str) -> None:
    assert unpack_right(text, num_test=3) is None
