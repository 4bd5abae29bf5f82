"""Compare the state that every rank keeps, so that a rank which has parted from the others is noticed.

The engines average gradients, so ranks stay equal only if they were equal before. A flipped bit or a rank that has read
another file would spoil the gradients of all ranks, and no metric shows it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from trainer.distributed.collectives import all_gather_rows, is_distributed, message_device

_WHOLE_NUMBERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


def first_difference(states: Mapping[str, Mapping[str, Tensor]]) -> str | None:
    """Return a clause that names the first rank with other bits than most ranks, and a tensor; None if all are equal.

    Every rank must call this at the same time, with the same names and shapes, and gets the same clause. Sends one
    number for each tensor: the sum of its bits as whole numbers. A single flipped bit always changes that sum.
    """
    names = [f"{name} ({part})" for part, state in states.items() for name in state]
    if not is_distributed() or not names:
        return None
    sums = [_sum_of_bits(tensor).to(message_device()) for state in states.values() for tensor in state.values()]
    of_ranks = [tuple(row) for row in all_gather_rows(torch.stack(sums)[None]).tolist()]
    (common, _), *others = Counter(of_ranks).most_common()  # of two ranks, those of rank 0
    if not others:
        return None
    odd = next(rank for rank, found in enumerate(of_ranks) if found != common)
    differing = [name for name, one, other in zip(names, of_ranks[odd], common, strict=True) if one != other]
    other = of_ranks.index(common)
    return f"rank {odd} has other bits than rank {other} in {len(differing)} of {len(names)} tensors ({differing[0]})"


def _sum_of_bits(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's numbers, read as whole numbers of the same size: an int64 scalar, modulo 2^64."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.detach().view(_WHOLE_NUMBERS[real.itemsize]).sum(dtype=torch.int64)
