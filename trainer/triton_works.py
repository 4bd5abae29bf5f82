"""Kernels in Triton, which are used where they are right. This module needs no Triton."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from types import ModuleType
from typing import Final

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

_MOST_AWAY: Final = 0.02  # of the norm of what is expected; bfloat16 rounds by 0.004
_found: dict[tuple[str, torch.dtype], ModuleType | None] = {}


def kernels(module: str, dtype: torch.dtype, try_out: Callable[[ModuleType, torch.dtype], None]) -> ModuleType | None:
    """Return a module of kernels for tensors of a dtype; None, after one warning, if they do not work here.

    On a GPU, `try_out` compares them with torch at the first call, which takes seconds, because they are compiled. It
    gets the module and the dtype, and raises if they differ (`check_near`); it may call what calls this function.
    Without a GPU, it is enough that Triton is installed: tensors without data launch nothing.
    """
    if (module, dtype) not in _found:
        try:
            loaded = _found[module, dtype] = import_module(module)
            if torch.cuda.is_available():
                # A new thread has no autocast, mode or hook of the caller, nor its GPU.
                device = torch.cuda.current_device()
                with ThreadPoolExecutor(1, initializer=torch.cuda.set_device, initargs=(device,)) as thread:
                    thread.submit(try_out, loaded, dtype).result()
        except Exception as error:  # of Triton, a compiler, a linker, a file system or `try_out`
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            logger.warning("slower operations of torch replace %s, which does not work here: %s", module, reason)
            _found[module, dtype] = None
    return _found[module, dtype]


def check_near(found: Tensor, expected: Tensor) -> None:
    """Raise `ValueError` if the results of kernels differ by more than rounding, or are no numbers."""
    away = float((found.detach().cpu().double() - expected.detach().double()).norm() / expected.detach().norm())
    if not away <= _MOST_AWAY:
        raise ValueError(f"its results are not those of torch (they are {away:.0%} away)")
