"""Count the bytes of the tensors that are alive at once, in any part of training."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context manager that counts the tensors made inside its block, also those of `FakeTensorMode`.

    It counts from the operations that torch runs. (torch's own MemTracker allows no module to run twice in a step.)

    Attributes:
        live_bytes: the bytes of the tensors that were made inside and are still alive; shared memory counts once.
        peak_bytes: the highest value of `live_bytes`.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = 0
        self.peak_bytes = 0
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # A tensor that `torch.tensor` makes from a Python number appears first as an argument.
        given = () if func is torch.ops.aten.lift_fresh.default else (args, kwargs)
        before = {leaf.untyped_storage()._cdata for leaf in tree_leaves(given) if isinstance(leaf, Tensor)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._see(leaf.untyped_storage(), before)
        return result

    def _see(self, storage: torch.UntypedStorage, before: set[int]) -> None:
        key = storage._cdata
        if key in self._storages or key in before:
            return
        size = storage.nbytes()

        def gone(_: object) -> None:
            self.live_bytes -= size
            del self._storages[key]

        self._storages[key] = weakref.ref(storage, gone)
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of memory of the tensors; memory that several tensors share counts once."""
    return sum({each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in tensors}.values())
