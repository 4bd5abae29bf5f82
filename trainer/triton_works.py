"""Whether kernels in Triton work in this process. This module needs no Triton."""

from __future__ import annotations

import logging
from functools import cache

import torch

logger = logging.getLogger(__name__)


@cache
def triton_works() -> bool:
    """Return whether Triton compiles and runs a kernel on the GPU of this process; warns once if it does not.

    Without a GPU, it is enough that Triton is installed: tensors without data launch nothing.
    """
    try:
        from trainer.triton_launch import try_out

        if torch.cuda.is_available():
            try_out()
    except Exception as error:  # of Triton, a compiler, a linker or a file system
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        logger.warning("slower kernels of torch are used, because Triton does not work here: %s", reason)
        return False
    return True
