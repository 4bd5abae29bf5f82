"""Marks of tests that need more than the lowest versions of packages in setup.py; with make's versions, none skips."""

from __future__ import annotations

import PIL
import pytest
import torch

_IS_TORCH_2_9 = torch.__version__ < "2.10"  # by numbers, not by letters

HAS_FSDP = torch.__version__ >= "2.11"  # which is refused on several ranks elsewhere

needs_fsdp = pytest.mark.skipif(not HAS_FSDP, reason="FSDP of torch before 2.11 gives wrong gradients")
needs_compiled_checkpoints = pytest.mark.skipif(
    _IS_TORCH_2_9, reason="torch 2.9 cannot compile encoders whose blocks are computed again"
)
needs_gpu_tensors_without_data = pytest.mark.skipif(
    _IS_TORCH_2_9 and not torch.cuda.is_available(),
    reason="torch 2.9 needs a GPU to index tensors of a GPU that have no data",
)
needs_ycbcr = pytest.mark.skipif(
    int(PIL.__version__.partition(".")[0]) < 13, reason="Pillow before 13 cannot read a plain TIFF of YCbCr"
)
