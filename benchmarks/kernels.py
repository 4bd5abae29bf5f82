"""Count the kernels that a training step launches on a GPU, without a GPU.

    python -m benchmarks.kernels [RECIPE ...] [--precision P ...] [--set a.b=c ...] [--operations N] [--work]

The whole step runs on tensors of a GPU that have shapes but no data: forward, loss, backward and optimizer take the
paths of a GPU, and every operation that would launch a kernel is counted, by phase. At the batch sizes of the papers a
GPU is faster than the host that launches its kernels, so their number bounds the speed.

What counts as a launch: views of a tensor, new memory without values and bookkeeping of shapes launch nothing. An
operation on a list of tensors launches as many kernels as torch cuts the list into. The backward pass of a convolution
launches one kernel for each gradient. torch's batch norm in channels_last launches three kernels, and two on the way
back. Every other operation counts as one launch; some need a second one.

With `--work`, some programs of each kernel in Triton are run on this CPU (`benchmarks.ptx`), to count what they ask of
an H100 or H200: the microseconds in which its processors can issue their instructions, and in which its memory can
move the sectors that they read and write, some of which its cache holds. The larger one is a bound of the kernel.
"""

from __future__ import annotations

import argparse
import contextlib
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final
from unittest import mock

import torch
from torch import Tensor, nn
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.ptx import SECTOR, machine_of
from configs import resolve_recipe
from data_pipeline.core.batch import Batch
from data_pipeline.core.errors import run_command
from trainer import liveness
from trainer.build import assemble
from trainer.config import RunConfig
from trainer.distributed.fake_process_group import fake_ranks
from trainer.modules import build_modules, build_run_objective

GPU = torch.device("cuda", 0)
PHASES: Final = ("views", "forward", "loss", "backward", "optimizer", "bookkeeping")
aten = torch.ops.aten

_NO_LAUNCH: Final = frozenset(
    {
        "_unsafe_view",
        "detach",
        "detach_",
        "empty",
        "empty_like",
        "empty_strided",
        "lift_fresh",
        "new_empty",
        "new_empty_strided",
        "promote_types",
        "resize_",
        "set_",
        "sym_numel",
        "sym_size",
        "sym_stride",
    }
)
_LAUNCHES: Final = {"native_batch_norm": 3, "native_batch_norm_backward": 2}
# From torch's MultiTensorApply.cuh: how many tensors and chunks of one launch, by the number of lists.
_TENSORS_OF_A_LAUNCH: Final = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}
_CHUNK, _CHUNKS_OF_A_LAUNCH = 65_536, 320
_TENSORS_OF_A_CAT: Final = 128
# In a microsecond, an H100 or H200 issues so many instructions of warps (132 processors with four schedulers each, at
# 1.7 GHz), and moves so many bytes.
_INSTRUCTIONS_PER_US: Final = 132 * 4 * 1700
_BYTES_PER_US: Final = 4_000_000
_NUM_CHOSEN: Final = 6  # programs that are run for their work


class KernelCounter(TorchDispatchMode):
    """Counts launches in `launches`, by phase and operation; `phase` is that of the moment.

    `messages` counts the collectives by operation, without those of DDP.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.phase = "bookkeeping"
        self.launches: dict[str, Counter[str]] = {phase: Counter() for phase in PHASES}
        self.messages: Counter[str] = Counter()
        self.triton: list[tuple[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        num = launches_of(func, args, kwargs)
        if func.namespace == "c10d":
            self.messages[func.overloadpacket.__name__] += 1
        if num:
            self.launches[self.phase][func.overloadpacket.__name__] += num
        if (name := func.overloadpacket.__name__).startswith("_fused_") and name.endswith("_"):
            return None  # of an optimizer, in place; some have no form without data
        if func is aten._local_scalar_dense.default:
            return False if args[0].dtype == torch.bool else 1
        if func is aten.convolution.default:
            return _in_layout_of(args[0], func(*args, **kwargs))
        if func is aten.convolution_backward.default:
            *grads, of_bias = func(*args, **kwargs)
            return *(None if grad is None else _in_layout_of(args[1], grad) for grad in grads), of_bias
        return func(*args, **kwargs)

    def count_triton(self, kernel: Any, programs: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        """Count the launch of a kernel in Triton; to be called in place of `trainer.triton_works.launch`."""
        self.launches[self.phase][kernel.fn.__name__] += 1
        self.triton.append((kernel, programs, arguments, constants))

    @property
    def total(self) -> int:
        return sum(counts.total() for counts in self.launches.values())


def launches_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Return how many kernels an operation launches; see the docstring of the file."""
    name = func.overloadpacket.__name__
    if func.is_view or name in _NO_LAUNCH or func.namespace != "aten":
        return 0
    if name.startswith("_foreach_") or (name.startswith("_fused_") and name.endswith("_")):
        return _launches_of_lists([each for each in args if isinstance(each, list | tuple) and _is_tensors(each)])
    if name == "convolution_backward":
        return sum(args[10])
    if name == "cat":
        return max(1, math.ceil(len(args[0]) / _TENSORS_OF_A_CAT))
    return _LAUNCHES.get(name, 1)


def _in_layout_of(x: Tensor, result: Tensor) -> Tensor:
    """Return the result of a convolution of `x` in the layout of a GPU; without one, torch takes another."""
    return result.contiguous(memory_format=suggest_memory_format(x))


def _is_tensors(values: Sequence[Any]) -> bool:
    return bool(values) and all(isinstance(value, Tensor) for value in values)


def _launches_of_lists(lists: Sequence[Sequence[Tensor]]) -> int:
    """Return into how many launches torch cuts an operation on lists of tensors: at most so many tensors and chunks."""
    lists = [each for each in lists if any(tensor.dim() for tensor in each)] or lists[:1]
    most = _TENSORS_OF_A_LAUNCH[min(max(1, len(lists)), 5)]
    num_launches, num_tensors, num_chunks = 1, 0, 0
    for tensor in lists[0] if lists else ():
        chunks = max(1, math.ceil(tensor.numel() / _CHUNK))
        num_tensors += 1
        if num_tensors > most:
            num_launches, num_tensors, num_chunks = num_launches + 1, 1, 0
        num_chunks += chunks
        while num_chunks > _CHUNKS_OF_A_LAUNCH:
            num_launches, num_chunks = num_launches + 1, num_chunks - _CHUNKS_OF_A_LAUNCH
    return num_launches


class _Stages(liveness.Listener):
    """A listener that tells a counter the phase of the step: `trainer.liveness.stage` names most of them."""

    def __init__(self, counter: KernelCounter) -> None:
        self._counter = counter
        self._stages = [""]

    def enter(self, stage: str) -> None:
        self._stages.append(stage)
        self._counter.phase = stage if stage in PHASES else "bookkeeping"

    def leave(self) -> None:
        self._stages.pop()
        self._counter.phase = self._stages[-1] if self._stages[-1] in PHASES else "bookkeeping"


def count_kernels(config: RunConfig, *, num_ranks: int = 1, batch_size: int | None = None) -> KernelCounter:
    """Return the counter after one plain step of a run on its first rank, in channels_last.

    A recorded step is a single launch.

    Args:
        config: the run; with the views' inputs of 32 x 32 pixels.
        num_ranks: the number of ranks, of which only the first computes; their collectives send nothing.
        batch_size: the samples of this rank; None for its part of the batch in the config.
    """
    size = batch_size or config.global_batch_size // num_ranks
    config = config.model_copy(update={"compile": False})
    modules = build_modules(config).to(torch.device("cpu"))  # in channels_last
    objective = build_run_objective(config, modules.encoder, num_samples=50_000, device=torch.device("cpu"))
    counter = KernelCounter()
    backward = mock.patch("torch.autograd.backward", backward_without_a_gpu)
    with FakeTensorMode(), _autocast_of_a_gpu(), backward, launched_by(counter.count_triton):
        for module in (modules.encoder, modules.view_policy, objective):
            _to_gpu_without_data(module)
        training = assemble(config, modules, objective)
        with fake_ranks(num_ranks, sums_by_gathering=False), _loss_phase(objective, counter):
            listener = _Stages(counter)
            liveness.listeners.append(listener)
            try:
                with counter:
                    training.step(_batch(size), learning_rates=defaultdict(float))
            finally:
                liveness.listeners.remove(listener)
    return counter


@contextmanager
def launched_by(launch: Callable[..., None]) -> Iterator[None]:
    """Let a function launch the kernels in Triton, of all modules that have any."""
    with contextlib.ExitStack() as stack:
        for module in ("models.batch_norm_kernels", "views.expert_image_kernels", "views.viewmaker_kernels"):
            stack.enter_context(mock.patch(f"trainer.{module}.launch", launch))
        yield


@contextmanager
def _loss_phase(objective: nn.Module, counter: KernelCounter) -> Iterator[None]:
    """Count what runs inside the objective as phase "loss"."""

    def enter(*_: object) -> None:
        counter.phase = "loss"

    def leave(*_: object) -> None:
        counter.phase = "bookkeeping"

    hooks = [objective.register_forward_pre_hook(enter), objective.register_forward_hook(leave)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _autocast_of_a_gpu() -> Iterator[None]:
    """Let autocast work on tensors of a GPU that is not there."""
    with (
        mock.patch("torch.cuda.amp.common.amp_definitely_not_available", return_value=False),
        mock.patch("torch.cuda.is_bf16_supported", return_value=True),
    ):
        yield


@torch.no_grad()
def backward_without_a_gpu(loss: Tensor) -> None:
    """Do what `torch.autograd.backward` does, which needs the driver of a GPU even for tensors without data."""
    assert loss.grad_fn is not None
    num_missing = _num_inputs(loss.grad_fn)
    gradients: dict[Any, list[Tensor | None]] = {loss.grad_fn: [torch.ones_like(loss)]}
    ready: list[Any] = [loss.grad_fn]
    while ready:
        node = ready.pop()
        given = gradients.pop(node)
        if (parameter := getattr(node, "variable", None)) is not None:
            _accumulate(parameter, given[0])
            continue
        run: Callable[..., Any] = getattr(node, "apply", node)  # of a `Function`; others are called
        results = run(*given)
        results = results if isinstance(results, tuple) else (results,)
        for (following, number), gradient in zip(node.next_functions, results, strict=False):
            if following is None:
                continue
            buffer = gradients.setdefault(following, [None] * len(following._input_metadata))
            if gradient is not None:
                gradient = _fitted(gradient, following._input_metadata[number])
                before = buffer[number]
                buffer[number] = gradient if before is None else before + gradient
            num_missing[following] -= 1
            if num_missing[following] == 0:
                ready.append(following)


def _num_inputs(root: Any) -> Counter[Any]:
    """Return how many gradients each node of a graph waits for."""
    counts: Counter[Any] = Counter()
    open_nodes, seen = [root], {root}
    while open_nodes:
        for following, _ in open_nodes.pop().next_functions:
            if following is not None:
                counts[following] += 1
                if following not in seen:
                    seen.add(following)
                    open_nodes.append(following)
    return counts


def _fitted(gradient: Tensor, metadata: Any) -> Tensor:
    """Sum what was broadcast, and cast, as autograd does between two nodes."""
    if gradient.shape != torch.Size(metadata.shape):
        gradient = gradient.sum_to_size(metadata.shape)
    return gradient.to(metadata.dtype)


def _accumulate(parameter: Tensor, gradient: Tensor | None) -> None:
    if gradient is None:
        return
    if parameter.grad is not None:
        parameter.grad.add_(gradient)
    elif all(size == 1 or gradient.stride(dim) == parameter.stride(dim) for dim, size in enumerate(parameter.shape)):
        parameter.grad = gradient.detach()
    else:
        parameter.grad = torch.empty_like(parameter).copy_(gradient)


def _to_gpu_without_data(module: nn.Module) -> None:
    for inner in module.modules():
        for name, parameter in inner._parameters.items():
            if parameter is not None:
                on_gpu = _without_data(parameter)
                inner._parameters[name] = nn.Parameter(on_gpu, requires_grad=parameter.requires_grad)
        for name, buffer in inner._buffers.items():
            if buffer is not None:
                inner._buffers[name] = _without_data(buffer)


def _without_data(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=GPU)


def _batch(size: int) -> Batch:
    index_B = torch.empty(size, dtype=torch.int64, device=GPU)
    pictures = torch.empty(size, 3, 32, 32, dtype=torch.uint8, device=GPU)
    return Batch(0, 0, index_B, pictures, pictures, pictures[:, 0], pictures[:, 0], {})


def table(counters: Mapping[str, KernelCounter]) -> str:
    """Return a table with a line for each counter and a column for each phase."""
    lines = [f"{'':<36}" + "".join(f"{phase:>12}" for phase in PHASES) + f"{'all':>8}"]
    for name, counter in counters.items():
        numbers = "".join(f"{counter.launches[phase].total():>12}" for phase in PHASES)
        lines.append(f"{name:<36}{numbers}{counter.total:>8}")
    return "\n".join(lines)


@dataclass(frozen=True)
class Work:
    """Launches of a kernel with equal sizes, and the microseconds that each needs for instructions and for sectors."""

    name: str
    programs: tuple[int, ...]
    shape: tuple[int, ...]
    num_launches: int
    instructions_us: float
    sectors_us: float

    @property
    def bound_us(self) -> float:
        return self.num_launches * max(self.instructions_us, self.sectors_us)


def work_of(counter: KernelCounter) -> list[Work]:
    """Return the work of each kernel in Triton, the largest first."""
    launches: dict[str, list[Any]] = defaultdict(list)
    for one in counter.triton:
        launches[repr(one)].append(one)  # a tensor without data is told by its type and size
    works = []
    for equal in launches.values():
        kernel, programs, arguments, constants = equal[0]
        num = math.prod(programs)
        chosen = sorted({number * (num - 1) // (_NUM_CHOSEN - 1) for number in range(_NUM_CHOSEN)})
        machine = machine_of(kernel, programs, *map(_with_data, arguments), chosen=chosen, **constants)
        machine.run()
        work, of_all = machine.work, num / len(chosen)
        sectors = work["sectors read"] + work["sectors written"]
        shape = next((tuple(each.shape) for each in arguments if isinstance(each, Tensor) and each.dim() > 1), ())
        times = of_all * work["instructions"] / _INSTRUCTIONS_PER_US, of_all * sectors * SECTOR / _BYTES_PER_US
        works.append(Work(kernel.fn.__name__, programs, shape, len(equal), *times))
    return sorted(works, key=lambda each: -each.bound_us)


def _with_data(value: Any) -> Any:
    """Return a tensor of a CPU in the form of one without data; other values as they are."""
    if not isinstance(value, Tensor):
        return value
    size = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    return (torch.arange(size) % 4).to(value.dtype).as_strided(value.shape, value.stride())


def table_of_work(works: Sequence[Work]) -> str:
    """Return a table with a line for each kernel and size, and their sums."""
    lines = [
        f"{'':<30}{'programs':>16}{'of':>20}{'launches':>10}{'instructions':>14}{'sectors':>10}{'bound, all':>12}  (us)"
    ]
    for each in works:
        form = f"{'x'.join(map(str, each.programs)):>16}{'x'.join(map(str, each.shape)):>20}{each.num_launches:>10}"
        lines.append(
            f"{each.name:<30}{form}{each.instructions_us:>14.1f}{each.sectors_us:>10.1f}{each.bound_us:>12.1f}"
        )
    return "\n".join([*lines, f"{'all':<30}{sum(each.bound_us for each in works):>82.1f}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", default=["simclr:digits", "viewmaker:digits"], metavar="RECIPE")
    parser.add_argument("--precision", nargs="+", default=["float32", "bfloat16"], metavar="P")
    parser.add_argument("--set", nargs="+", default=[], metavar="a.b=c", dest="overrides", help="settings of the runs")
    parser.add_argument("--operations", type=int, default=0, metavar="N", help="also list the N commonest operations")
    parser.add_argument("--work", action="store_true", help="also bound the time of each kernel in Triton on an H100")
    arguments = parser.parse_args()
    counters = {
        f"{recipe}, {precision}": count_kernels(
            resolve_recipe(recipe, ["tracking.wandb=disabled", f"precision={precision}", *arguments.overrides])
        )
        for recipe in arguments.recipes
        for precision in arguments.precision
    }
    print(table(counters))
    for name, counter in counters.items() if arguments.operations else ():
        print(f"\n{name}")
        for phase in PHASES:
            for operation, num in counter.launches[phase].most_common(arguments.operations):
                print(f"  {phase:<12}{operation:<40}{num:>6}")
    for name, counter in counters.items() if arguments.work else ():
        print(f"\n{name}\n{table_of_work(work_of(counter))}")


if __name__ == "__main__":
    run_command(main)
