# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Launch kernels in Triton. `trainer.triton_works` says which ones work here."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor


def launch(kernel: Any, programs: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Launch a kernel on the device of its first argument; on tensors without data, do nothing."""
    if not isinstance(arguments[0], FakeTensor):
        with torch.cuda.device_of(arguments[0]):
            kernel[programs](*arguments, **constants)
