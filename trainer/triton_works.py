"""Launch Triton kernels, if they give right results on this machine. This module does not import Triton itself."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from types import ModuleType
from typing import Any, Final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

DEVICE: Final = "cuda"  # the type of device of tensors that kernels take
DTYPES: Final = (torch.bfloat16, torch.float32)
logger = logging.getLogger(__name__)

_MOST_AWAY: Final = 0.02  # of the norm of what is expected; bfloat16 rounds by 0.004
_found: dict[tuple[str, torch.dtype], ModuleType | None] = {}


def launch(kernel: Any, programs: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Launch a kernel on the device of its first argument; on tensors without data, do nothing."""
    if not isinstance(arguments[0], FakeTensor):
        with torch.cuda.device_of(arguments[0]):  # type: ignore[no-untyped-call]
            kernel[programs](*arguments, **constants)


def kernels(
    module: str, device: torch.device, dtype: torch.dtype, try_out: Callable[[ModuleType, torch.dtype], None]
) -> ModuleType | None:
    """Return a module of kernels for tensors of a device and a dtype; None if there are none.

    If they do not work here, also returns None, after one warning.

    On a GPU, `try_out` compares them with torch at the first call, which takes seconds, because they are compiled. It
    gets the module and the dtype, and raises if they differ (`check_near`); it may call what calls this function.
    Without a GPU, it is enough that Triton is installed: tensors without data launch nothing.
    """
    if device.type != DEVICE or dtype not in DTYPES:
        return None
    if (module, dtype) not in _found:
        try:
            loaded = _found[module, dtype] = import_module(module)
            if torch.cuda.is_available():
                # A new thread has no autocast, mode or hook of the caller, nor its GPU.
                number = torch.cuda.current_device()
                with ThreadPoolExecutor(1, initializer=torch.cuda.set_device, initargs=(number,)) as thread:
                    thread.submit(try_out, loaded, dtype).result()
        except Exception as error:  # of Triton, a compiler, a linker, a file system or `try_out`
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            logger.warning("slower operations of torch replace %s, which does not work here: %s", module, reason)
            _found[module, dtype] = None
    return _found[module, dtype]


def check_near(found: Iterable[Tensor | None], expected: Iterable[Tensor | None]) -> None:
    """Raise `ValueError` if a kernel's results differ from the CPU's by more than rounding, or are not finite."""
    for one, other in zip(found, expected, strict=True):
        assert one is not None
        assert other is not None
        away = float((one.detach().cpu().double() - other.detach().double()).norm() / other.detach().norm())
        if not away <= _MOST_AWAY:
            raise ValueError(f"its results are not those of torch (they are {away:.0%} away)")
