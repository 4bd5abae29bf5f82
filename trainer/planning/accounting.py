"""Count the bytes of the tensors that are alive at once, and the bytes that collectives send, in any part of training.

Both are counted from the operations that torch runs, so the counts are exact. They are the same for the tensors of
`FakeTensorMode`, which have no data: a step can be counted without the memory or the GPUs that it needs.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainer.distributed.collectives import world_size


class Accounts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context manager that counts the operations inside its block.

    Attributes:
        live_bytes: the bytes of the tensors that were made inside and are still alive; shared memory counts once.
        peak_bytes: the highest value of `live_bytes`.
        recent_peak_bytes: the highest value since the last call of `restart_peak`.
        sent_bytes: the bytes of the tensors that this process sent, by collective.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = 0
        self.peak_bytes = 0
        self.recent_peak_bytes = 0
        self.sent_bytes: Counter[str] = Counter()
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._known: set[int] = set()

    def ignore(self, tensors: Iterator[Tensor]) -> Self:
        """Do not count these tensors, such as parameters that an operation returns as views. Return the accounts."""
        self._known |= {tensor.untyped_storage()._cdata for tensor in tensors}
        return self

    def restart_peak(self) -> None:
        """Start again to record `recent_peak_bytes`."""
        self.recent_peak_bytes = self.live_bytes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # asks for the device of a tensor
            return func(*args, **kwargs)
        if func.namespace == "c10d":
            name = func.name().partition("::")[2].strip("_").removesuffix("_base")
            size = _sent(func, args)
            if name == "alltoall":  # gloo's gather of a few numbers, whose input has a copy for each rank
                name, size = "allgather", size // world_size()
            self.sent_bytes[name] += size
        # A tensor that `torch.tensor` makes from a Python number appears first as an argument.
        given = () if func is torch.ops.aten.lift_fresh.default else (args, kwargs)
        before = {leaf.untyped_storage()._cdata for leaf in tree_leaves(given) if isinstance(leaf, Tensor)}
        result = func(*args, **kwargs)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._see(leaf.untyped_storage(), before)
        return result

    def _see(self, storage: torch.UntypedStorage, before: set[int]) -> None:
        key = storage._cdata
        if key in self._storages or key in self._known or key in before:
            return
        size = storage.nbytes()

        def gone(_: object) -> None:
            self.live_bytes -= size
            del self._storages[key]

        self._storages[key] = weakref.ref(storage, gone)
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        self.recent_peak_bytes = max(self.recent_peak_bytes, self.live_bytes)


def _sent(func: Any, args: tuple[Any, ...]) -> int:
    """Return the bytes of the input of a collective, which is the second argument of some collectives."""
    takes_output_first = any(word in func.name() for word in ("allgather", "alltoall", "reduce_scatter"))
    given = args[1] if takes_output_first and len(args) > 1 else args[0]
    return sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(given) if isinstance(leaf, Tensor))
