"""Find the first tensor of a step that is not finite, with hooks on every module and parameter.

Shapes: B samples of the global batch, R rows of a tensor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class Finding:
    """The first tensor that is not finite.

    Attributes:
        what: a description, such as "the output of encoder.trunk.conv1 (Conv2d)".
        share: the share of its values that are not finite, above 0, up to 1.
        given: a description of the inputs of the module; may be empty.
        rows: the rows of the batch that are not finite there, in this call of the module or a later one; empty if the
            rows of the tensor are not samples.
    """

    what: str
    share: float
    given: str
    rows: tuple[int, ...] = ()


@dataclass(frozen=True)
class Length:
    """The Euclidean length of a gradient, and its largest absolute value, both computed in float64."""

    length: float
    largest: float


class Inspector:
    """Hooks that check all tensors between modules, forward and backward, until one is not finite.

    A module's output is checked before the output of the module that contains it, so the innermost module is found. A
    tensor that a plain function computes between two modules is found as the input of the second module.

    Attributes:
        forward, backward: the first finding in each direction; None if everything is finite.
        lengths: the length of the gradient of each parameter.
    """

    def __init__(
        self, modules: Mapping[str, nn.Module], *, batch_size: int, num_parts: int = 1, num_views: int = 2
    ) -> None:
        """Add hooks to `modules`, whose input will be `num_views` of B samples, cut into `num_parts` micro batches."""
        self.forward: Finding | None = None
        self.backward: Finding | None = None
        self.lengths: dict[str, Length] = {}
        self._part_size, self._num_parts = batch_size // num_parts, num_parts
        # With further views, the number of calls of a micro batch does not follow from the rows of a call.
        self._knows_rows = num_views == 2 or num_parts == 1
        self._calls: Counter[str] = Counter()
        self._last_finite = ""
        for prefix, whole in modules.items():
            for name, module in whole.named_modules(prefix=prefix):
                label = f"{name} ({type(module).__name__})"
                module.register_forward_pre_hook(partial(self._before, label))
                module.register_forward_hook(partial(self._after, label))
            for name, parameter in whole.named_parameters(prefix=prefix):
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                        partial(self._accumulated, name)
                    )

    def _before(self, label: str, _module: nn.Module, given: Any) -> None:
        self._calls[label] += 1
        for tensor in _tensors(given):
            self._look(f"the input of {label}", tensor, label, lambda: "")

    def _after(self, label: str, module: nn.Module, given: Any, output: Any) -> None:
        def in_words() -> str:
            inputs = " and ".join(_describe(tensor) for tensor in _tensors(given))
            own = (f"its {name} {_describe(tensor)}" for name, tensor in module.named_parameters(recurse=False))
            return ", ".join([f"its input {inputs}", *own])

        for tensor in _tensors(output):
            self._look(f"the output of {label}", tensor, label, in_words)
            if tensor.requires_grad:
                seen = partial(self._gradient, f"the gradient that reaches the output of {label}")
                tensor.register_hook(seen)  # type: ignore[no-untyped-call]

    def _look(self, what: str, tensor: Tensor, label: str, given: Callable[[], str]) -> None:
        found = self.forward
        if (found is not None and found.what != what) or num_bad(tensor) == 0:
            return
        found = found or Finding(what, num_bad(tensor) / tensor.numel(), given())
        self.forward = replace(found, rows=tuple(sorted({*found.rows, *self._rows(tensor, label)})))

    def _accumulated(self, name: str, parameter: Tensor) -> None:
        """Check the gradient that a parameter has accumulated so far."""
        assert parameter.grad is not None
        self._gradient(f"the gradient of {name}", parameter.grad)
        gradient = parameter.grad.detach().double()
        self.lengths[name] = Length(float(gradient.norm()), float(gradient.abs().max()))

    def _gradient(self, what: str, gradient: Tensor) -> None:
        if self.backward is not None:
            return
        if num_bad(gradient) == 0:
            self._last_finite = what
            return
        given = f"the last finite gradient before it is {self._last_finite}" if self._last_finite else ""
        self.backward = Finding(what, num_bad(gradient) / gradient.numel(), given)

    def _rows(self, tensor_R: Tensor, label: str) -> Iterator[int]:
        """Yield the rows of the batch that are not finite in a tensor of one view or both views of a micro batch."""
        size = self._part_size
        num_rows = tensor_R.shape[0] if tensor_R.dim() > 1 else 0
        if num_rows not in {size, 2 * size} or not self._knows_rows:
            return
        calls_a_part = 2 * size // num_rows
        part = (self._calls[label] - 1) // calls_a_part % self._num_parts
        for row in (~tensor_R.detach().isfinite()).flatten(1).any(1).nonzero().flatten().tolist():
            yield part + self._num_parts * (row % size)


def num_bad(tensor: Tensor) -> int:
    """Return the number of values that are inf or nan."""
    return int((~tensor.detach().isfinite()).sum())


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the floating-point tensors in the arguments or the output of a module."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            if leaf.is_floating_point():
                yield leaf
        elif is_dataclass(leaf):
            yield from _tensors(vars(leaf))


def _describe(tensor: Tensor) -> str:
    """Return a description of the range of a tensor, and of the number of values that are not finite."""
    finite = tensor.detach()[tensor.detach().isfinite()]
    if not finite.numel():
        return "has no finite value"
    bad = tensor.numel() - finite.numel()
    return f"lies in [{float(finite.min()):.4g}, {float(finite.max()):.4g}]" + (
        f" except {bad} of {tensor.numel()} values" if bad else ""
    )
