"""Compute what the engines of a run keep and send, and cut gradients like them: all else in a plan is measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn

from trainer.config import RunConfig
from trainer.distributed.engines.engine import Backend, Engine, KeptBytes, Passes


class PassCounter:
    """A counter of the passes of a module from now on."""

    def __init__(self, module: nn.Module) -> None:
        self.passes = Passes(forward=0, backward=0, trained=0)
        module.register_forward_hook(self._passed)

    def _passed(self, module: nn.Module, _: object, output: object) -> None:
        self._add(1, 0, 0)
        if isinstance(output, Tensor) and output.requires_grad:
            trained = int(any(parameter.requires_grad for parameter in module.parameters()))
            output.register_hook(lambda _: self._add(0, 1, trained))  # type: ignore[no-untyped-call]

    def _add(self, forward: int, backward: int, trained: int) -> None:
        now = self.passes
        self.passes = Passes(now.forward + forward, now.backward + backward, now.trained + trained)


def sent_by_engines(
    config: RunConfig,
    gradients: Mapping[str, int],
    passes: Mapping[str, PassCounter],
    *,
    world_size: int,
    backend: Backend,
) -> Counter[str]:
    """Return the bytes that the engines send in a step, for the bytes of the gradients of each module."""
    sent: Counter[str] = Counter()
    adversary = config.adversary
    for name, size in gradients.items() if world_size > 1 else ():
        alternates = name == "viewmaker" and adversary is not None and adversary.update == "alternating"
        num_times = adversary.viewmaker_steps if alternates and adversary is not None else 1
        engine = config.engine.of_module(name)
        for collective, num in engine.sent_bytes(
            size, world_size=world_size, backend=backend, passes=passes[name].passes
        ).items():
            sent[collective] += num_times * num
    return sent


def kept_by_engines(
    config: RunConfig, gradients: Mapping[str, int], optimizers: Mapping[str, int], *, world_size: int
) -> KeptBytes:
    """Return the bytes that a rank keeps, for the bytes of the gradients and the optimizer state of each module."""
    kept = KeptBytes(0, 0, 0, 0)
    engines = {name: config.engine.of_module(name) for name in gradients}
    for engine in {each.kind: each for each in engines.values()}.values():
        names = [name for name, each in engines.items() if each.kind == engine.kind]
        of_kind = engine.kept_bytes(
            sum(gradients[name] for name in names),
            sum(optimizers[name] for name in names),
            world_size=world_size,
            itemsize=config.parameter_dtype.itemsize,
            global_batch_size=config.global_batch_size,
        )
        kept = KeptBytes(
            kept.engine_bytes + of_kind.engine_bytes,
            kept.optimizer_bytes + of_kind.optimizer_bytes,
            kept.host_bytes + of_kind.host_bytes,
            kept.gradient_bytes + of_kind.gradient_bytes,
        )
    return kept


@contextmanager
def cut_gradients(engines: Mapping[str, Engine], world_size: int) -> Iterator[None]:
    """Inside the block, keep only a rank's piece of each finished gradient, like ZeRO 2 and 3 and FSDP."""
    pieces: dict[nn.Parameter, Tensor] = {}

    def keep_piece(parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        parameter.grad = None
        if parameter not in pieces:
            pieces[parameter] = parameter.new_empty(-(-parameter.numel() // world_size))

    parameters = [parameter for engine in engines.values() for parameter in engine.module.parameters()]
    parameters = [parameter for parameter in parameters if parameter.requires_grad]
    handles = [
        parameter.register_post_accumulate_grad_hook(keep_piece)  # type: ignore[no-untyped-call]
        for parameter in parameters
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
