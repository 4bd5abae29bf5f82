"""Exact accounts of a piece of training: the bytes of the tensors that are alive at once, and what collectives send.

Both are counted from the operations that torch runs, so they hold for real tensors and for `FakeTensorMode`'s, which
have no data: a step can be accounted for without the memory or the GPUs that it needs.
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


class Accounts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context manager; what happens while it is open is counted.

    Attributes:
        live_bytes: of the tensors made since it was opened that are still alive; tensors that share memory count once.
        peak_bytes: the most that `live_bytes` has been.
        recent_peak_bytes: the same since `restart_peak` was last called.
        sent_bytes: by collective, the bytes of the tensors that this process put into it.
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
        """Leave the memory of these tensors out (a model's parameters that an operation hands on as views)."""
        self._known |= {tensor.untyped_storage()._cdata for tensor in tensors}
        return self

    def restart_peak(self) -> None:
        """Forget the `recent_peak_bytes` so far."""
        self.recent_peak_bytes = self.live_bytes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "c10d":
            name = func.name().partition("::")[2].strip("_").removesuffix("_base")
            self.sent_bytes[name] += _sent(func, args)
        # What `torch.tensor` makes of Python's numbers is first seen as an argument.
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
    """The bytes of what goes in: of a gather into one tensor and a scatter from one, that is the second argument."""
    takes_output_first = any(word in func.name() for word in ("allgather", "reduce_scatter"))
    given = args[1] if takes_output_first and len(args) > 1 else args[0]
    return sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(given) if isinstance(leaf, Tensor))
