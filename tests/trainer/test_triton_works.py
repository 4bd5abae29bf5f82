"""Kernels are compared with torch before they are used, and left out where they are wrong."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from trainer import liveness, triton_works
from trainer.triton_works import check_near, kernels

MODULE = "trainer.liveness"  # any module
GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _gpu_that_nothing_ran_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_works, "_found", {})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)


def test_wrong_kernels_are_left_out_for_their_dtype_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    def try_out(module: ModuleType, dtype: torch.dtype) -> None:
        exact = torch.ones(100)
        check_near([exact * (1.0 if dtype == torch.float32 else 1.1)], [exact])

    for _ in range(2):
        assert kernels(MODULE, GPU, torch.float32, try_out) is liveness
        assert kernels(MODULE, GPU, torch.bfloat16, try_out) is None
    assert caplog.messages == [
        f"slower operations of torch replace {MODULE}, which does not work here: its results are not those of torch "
        "(they are 10% away)"
    ]
    with pytest.raises(ValueError, match="nan% away"):
        check_near([torch.full((2,), torch.nan)], [torch.ones(2)])


def test_a_trial_is_apart_from_what_its_caller_does(caplog: pytest.LogCaptureFixture) -> None:
    seen = []

    def try_out(module: ModuleType, dtype: torch.dtype) -> None:
        assert kernels(MODULE, GPU, dtype, try_out) is module  # as the code does that it tries
        weight = torch.ones(2, 2, requires_grad=True)
        out = weight @ weight
        (grad,) = torch.autograd.grad(out.sum(), weight)
        seen.append((out.dtype, grad))

    def fail(_: Any) -> Tensor:
        raise AssertionError("a hook of the caller was called")

    hooks = torch.autograd.graph.saved_tensors_hooks(fail, fail)
    with hooks, torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert kernels(MODULE, GPU, torch.float32, try_out) is liveness
    ((dtype, grad),) = seen
    assert dtype == torch.float32
    assert torch.equal(grad, torch.full((2, 2), 4.0))
