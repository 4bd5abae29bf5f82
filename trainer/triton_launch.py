# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Launch kernels in Triton. `trainer.triton_works` says whether that is possible here."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes


def launch(kernel: Any, programs: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Launch a kernel on the device of its first argument; on tensors without data, do nothing."""
    if not isinstance(arguments[0], FakeTensor):
        with torch.cuda.device_of(arguments[0]):
            kernel[programs](*arguments, **constants)


def try_out() -> None:
    """Compile and run a kernel on the GPU. Raises what Triton raises if it does not work here."""
    with _disable_current_modes():
        launch(_trial_kernel, (1,), torch.empty(1, device="cuda"))


@triton.jit
def _trial_kernel(place_ptr):
    tl.store(place_ptr, 1.0)
