"""The loss and the gradients of a training step are those of `steps.json`, for each kind of views."""

from __future__ import annotations

import pytest

from tests.golden.digests import assert_frozen, frozen
from tests.golden.steps import CASES, one_case

# Weights and spectrograms are computed in float32, which the vector units of CPUs round differently.
RTOL = dict.fromkeys(CASES, 1e-5) | {"viewmaker of sounds": 1e-3}

GOLDEN = frozen("steps")


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients(case: str) -> None:
    assert_frozen(one_case(case), GOLDEN[case], rtol=RTOL[case])
