"""The interface of engines: an engine trains one module with its optimizer on all ranks.

Each trained module (encoder, viewmaker, objective) has its own engine. With simultaneous updates, one backward pass
computes the gradients of all modules, reversed for the viewmaker, and then each engine steps. With alternating updates,
one engine is frozen while the other steps. An engine therefore separates backward from step. Its state is whole and
named by parameter, so any kind of engine on any number of ranks can load it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, Protocol

from pydantic import BeforeValidator, SerializeAsAny
from torch import Tensor, nn

from data_pipeline.core.kinds import KindConfig, Kinds
from trainer.optim.optimizers import OptimizerConfig

# The config class of each kind. A new engine of this project needs a line here and its own file.
ENGINES: Final[Mapping[str, str]] = {
    "ddp": "trainer.distributed.engines.ddp_engine:DDPConfig",
    "deepspeed": "trainer.distributed.engines.deepspeed_engine:DeepSpeedConfig",
    "fsdp": "trainer.distributed.engines.fsdp_engine:FSDPConfig",
}


@dataclass(frozen=True)
class EngineInputs:
    """The facts from which an engine is built, besides its module.

    Attributes:
        blocks: inner modules that run one after the other, and together hold most parameters; empty if unknown.
    """

    optimizer: OptimizerConfig
    global_batch_size: int
    blocks: tuple[nn.Module, ...] = ()


class Engine(Protocol):
    """A trained module with its optimizer on all ranks; `module` is the bare module, for use outside training."""

    module: nn.Module

    def __call__(self, *inputs: Any) -> Any:
        """Run a forward pass; `backward` will average its gradients over the ranks."""
        ...

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass of `loss`, whose mean over the ranks is the global loss.

        Adds to the gradients of every module that the loss depends on and that is not frozen. Call it once for each
        loss, on any of the engines of these modules.
        """
        ...

    def accumulating(self) -> AbstractContextManager[None]:
        """Let forward and backward passes inside the block add to the gradients, if possible without sending them.

        Run the last part of a batch after the block: then the gradients are the sum of all parts, averaged over the
        ranks.
        """
        ...

    def gradient_norm(self) -> Tensor:
        """Return the Euclidean norm of the whole gradient after `backward`, a float32 scalar, equal on all ranks.

        It is inf or nan if any value of the gradient is, and inf if the norm overflows float32. Every rank must call
        this at the same time.
        """
        ...

    def step(self, *, learning_rate: float | Tensor, skip: Tensor | None = None) -> None:
        """Take one optimizer step, then clear the gradients.

        Args:
            learning_rate: a number, or a scalar that fused optimizers read on the device.
            skip: a bool scalar, equal on all ranks. If it is true, parameters and optimizer state do not change.
        """
        ...

    def frozen(self) -> AbstractContextManager[None]:
        """Inside the block, let the module pass gradients on without gradients of its own or synchronisation."""
        ...

    def module_state(self) -> dict[str, Tensor]:
        """Return the module's whole state_dict, perhaps without a copy. Every rank must call this at the same time."""
        ...

    def optimizer_state(self) -> dict[str, Tensor]:
        """Return the whole optimizer state by parameter: "momentum_buffer/trunk.conv1.weight", "step/...".

        The tensors may be in use, without a copy. Every rank must call this at the same time.
        """
        ...

    def load(self, module_state: Mapping[str, Tensor], optimizer_state: Mapping[str, Tensor]) -> None:
        """Load states from `module_state` and `optimizer_state` of any kind of engine.

        Raises `RuntimeError` if they belong to another module or optimizer.
        """
        ...


def check_same_names(own: Mapping[str, object], given: Mapping[str, object]) -> None:
    """Raise `RuntimeError` if the state of an optimizer and the state given to it do not hold the same tensors."""
    if odd := sorted(own.keys() ^ given.keys()):
        raise RuntimeError(f"the optimizer's state does not fit: {odd[0]} is in only one of the two")


@contextmanager
def without_gradients(parameters: Collection[Tensor]) -> Iterator[None]:
    """Let trained parameters need no gradients inside the block."""
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)


class BaseEngineConfig(KindConfig):
    """The base of the configs of engines. Builds the engine of a module.

    Attributes:
        can_be_recorded: whether a step can be recorded as one CUDA graph (`compile`).
    """

    kinds: ClassVar[Kinds] = Kinds("engine", group="engines", built_in=ENGINES)

    can_be_recorded: ClassVar[bool] = False

    def optimizer_share(self, world_size: int) -> float:
        """Return the share of the optimizer's state that a rank keeps on its device."""
        return 1.0

    def of_module(self, name: str) -> BaseEngineConfig:
        """Return the config of the engine of a module: "encoder", "viewmaker" or "objective"; by default this one."""
        return self

    def build(self, module: nn.Module, given: EngineInputs) -> Engine:
        """Return the engine of a module that is on the training device. Every rank calls this at the same time."""
        raise NotImplementedError(f"{type(self).__qualname__} has no method build")


# The type of a section `engine`: the config of any engine, found by its kind.
EngineConfig = Annotated[SerializeAsAny[BaseEngineConfig], BeforeValidator(BaseEngineConfig.kinds.parse)]
