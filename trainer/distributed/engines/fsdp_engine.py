"""Train the encoder with torch's FSDP2 (`fully_shard`): each rank keeps a piece of every parameter.

A rank also keeps only that piece of the gradient and of the optimizer state. The parameters of a block are gathered
when its forward or backward pass begins, and freed when it ends (Rajbhandari et al. 2020, stage 3; Zhao et al. 2023).
Unlike ZeRO 3, it trains an encoder beside a viewmaker. The viewmaker and the objective are small, and the first rank
draws views with the viewmaker alone, so they are trained with DDP. In a single process, everything is.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from data_pipeline.core.errors import UserError
from trainer.distributed.collectives import all_reduce_sum, rank, world_size
from trainer.distributed.engines.ddp_engine import DDPConfig, DDPEngine, step_and_clear
from trainer.distributed.engines.engine import (
    BaseEngineConfig,
    EngineInputs,
    check_same_names,
    without_gradients,
)
from trainer.optim.optimizers import OptimizerConfig, build_optimizer

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class FSDPConfig(BaseEngineConfig):
    """The config of FSDP2 for the encoder; the viewmaker and the objective are trained with DDP."""

    kind: Literal["fsdp"] = "fsdp"

    def check(self, run: Any) -> None:
        """Raise `UserError` for a run that needs the whole encoder on a rank. A `MomentumCopy` does not."""
        if run.engine_optimizers["encoder"].kind == "lars":
            raise UserError(
                "optimizer lars needs the norms of whole parameters, but engine.kind=fsdp cuts them into pieces; "
                "set engine.kind=ddp or another optimizer"
            )
        if run.compiles_networks:
            setting = "true" if run.compile is True else run.compile
            raise UserError(f"compile={setting} needs whole parameters; with engine.kind=fsdp, set compile=false")
        if run.probe.online_every_steps is not None:
            raise UserError(
                "probe.online_every_steps needs a whole encoder on each rank; with engine.kind=fsdp, set it to null "
                "and probe the checkpoints"
            )

    def of_module(self, name: str) -> BaseEngineConfig:
        return self if name == "encoder" else DDPConfig()

    def build(self, module: nn.Module, given: EngineInputs) -> FSDPEngine | DDPEngine:
        if world_size() == 1:
            return DDPEngine(module, optimizer=given.optimizer)
        if torch.__version__ < "2.11":  # by numbers
            raise UserError(
                "on several ranks, engine.kind=fsdp needs torch 2.11 or newer, because older ones give wrong gradients "
                f"or fail in gradient checkpointing, but this is {torch.__version__}; set engine.kind=ddp or deepspeed"
            )
        return FSDPEngine(module, optimizer=given.optimizer, blocks=given.blocks)

    def optimizer_share(self, world_size: int) -> float:
        return 1 / world_size


class FSDPEngine:
    """An `Engine` that keeps a piece of each parameter, cut along its first dimension, on two ranks or more.

    FSDP gathers and frees the parameters of each of `blocks` together, and the others of the module together. The
    optimizer updates the pieces as plain tensors. Its update of a number must therefore depend only on the gradient and
    the state of that number. Parameters are made contiguous, because FSDP does not accept channels_last. Parameters
    that are not trained when the engine is built stay whole.

    Raises `UserError` if a trained parameter has no dimension.
    """

    def __init__(self, module: nn.Module, *, optimizer: OptimizerConfig, blocks: Sequence[nn.Module] = ()) -> None:
        self.module = module
        device = next(module.parameters()).device
        module.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
        self._mesh = importlib.import_module("torch.distributed.device_mesh").DeviceMesh.from_group(
            dist.group.WORLD, device.type
        )
        self._tensor_class = importlib.import_module("torch.distributed.tensor").DTensor
        fully_shard = importlib.import_module("torch.distributed.fsdp").fully_shard
        for name, parameter in module.named_parameters():
            if parameter.requires_grad and parameter.dim() == 0:
                raise UserError(
                    f"engine.kind=fsdp cannot cut the parameter {name}, which is a single number; set engine.kind=ddp "
                    "or choose another encoder"
                )
        whole = {parameter for parameter in module.parameters() if not parameter.requires_grad}
        for unit in (*blocks, module):
            # Also the outermost unit: the parameters are then pieces whenever no pass runs.
            fully_shard(unit, mesh=self._mesh, reshard_after_forward=True, ignored_params=whole)
            # gloo sums, but has no mean.
            unit.set_force_sum_reduction_for_comms(device.type == "cpu")  # type: ignore[operator]
        self._trained: dict[str, DTensor] = {
            name: parameter  # type: ignore[misc]
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
        }
        self._pieces = {name: nn.Parameter(_piece_of(value)) for name, value in self._trained.items()}
        self._optimizer = build_optimizer(optimizer, nn.ParameterList(self._pieces.values()))

    def __call__(self, *inputs: Any) -> Any:
        return self.module(*inputs)

    def backward(self, loss: Tensor) -> None:
        torch.autograd.backward(loss)

    def accumulating(self) -> AbstractContextManager[None]:
        """Send the gradients of each part, and add them to this rank's piece.

        Without sending, a rank would keep all gradients whole until the last part.
        """
        return nullcontext()

    def gradient_norm(self) -> Tensor:
        gradients = [_piece_of(value.grad) for value in self._trained.values() if value.grad is not None]
        square = torch.zeros((), dtype=torch.float64, device=next(iter(self._pieces.values())).device)
        if gradients := [gradient for gradient in gradients if gradient.numel() > 0]:
            # In float64, where the square of a norm does not overflow.
            square += torch.stack(torch._foreach_norm(gradients)).double().square().sum()
        return all_reduce_sum(square).sqrt().float()

    def step(self, *, learning_rate: float | Tensor, skip: Tensor | None = None) -> None:
        for name, value in self._trained.items():
            self._pieces[name].grad = None if value.grad is None else _piece_of(value.grad)
            value.grad = None
        step_and_clear(self._optimizer, learning_rate=learning_rate, skip=skip)

    def frozen(self) -> AbstractContextManager[None]:
        return without_gradients(self._trained.values())

    @torch.no_grad()
    def module_state(self) -> dict[str, Tensor]:
        """Return the whole state in host memory, because a GPU may have no room for it."""
        state = self.module.state_dict()
        return {name: self._gathered(name, value) if name in self._trained else value for name, value in state.items()}

    @torch.no_grad()
    def optimizer_state(self) -> dict[str, Tensor]:
        """Return the whole state, that of the size of a parameter in host memory."""
        state = self._optimizer.state
        return {
            f"{key}/{name}": self._gathered(name, value) if value.dim() > 0 else value
            for name, piece in self._pieces.items()
            for key, value in state.get(piece, {}).items()
        }

    @torch.no_grad()
    def load(self, module_state: Mapping[str, Tensor], optimizer_state: Mapping[str, Tensor]) -> None:
        self.module.load_state_dict(
            {
                name: self._cut(name, value) if self._has_shape(name, value) else value
                for name, value in module_state.items()
            }
        )
        own = {
            f"{key}/{name}": (name, value)
            for name, piece in self._pieces.items()
            for key, value in self._optimizer.state.get(piece, {}).items()
        }
        check_same_names(own, optimizer_state)
        for path, (name, value) in own.items():
            given = optimizer_state[path]
            if value.dim() == 0:
                value.copy_(given)
            elif self._has_shape(name, given):
                value.copy_(_piece_of(self._cut(name, given)))
            else:
                raise RuntimeError(f"the optimizer's state does not fit: {path} is {tuple(given.shape)}")

    def _has_shape(self, name: str, whole: Tensor) -> bool:
        return name in self._trained and self._trained[name].shape == whole.shape

    def _gathered(self, name: str, piece: Tensor) -> Tensor:
        """Return the whole tensor of which every rank has a piece like that of the parameter, in host memory."""
        cut = piece if isinstance(piece, self._tensor_class) else self._from_piece(name, piece)
        return cut.full_tensor().cpu()

    def _cut(self, name: str, whole: Tensor) -> DTensor:
        """Return this rank's piece of a whole tensor of the parameter's shape, without a collective."""
        pieces = whole.detach().chunk(world_size())  # perhaps fewer than there are ranks
        piece = pieces[rank()] if rank() < len(pieces) else whole.detach()[:0]
        return self._from_piece(name, piece.to(self._pieces[name].device))

    def _from_piece(self, name: str, piece: Tensor) -> DTensor:
        parameter = self._trained[name]
        cut: DTensor = self._tensor_class.from_local(
            piece, self._mesh, parameter.placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
        )
        return cut


def _piece_of(value: Any) -> Tensor:
    """Return this rank's piece of a DTensor as a plain tensor, which shares its memory."""
    with torch.no_grad():
        piece: Tensor = value.to_local()
        return piece
