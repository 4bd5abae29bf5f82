"""Train a module with DeepSpeed's ZeRO (Rajbhandari et al. 2020), on any number of ranks.

Stage 1 partitions the optimizer's state over the ranks, stage 2 also the gradients, and stage 3 also the parameters.
DeepSpeed is used as a library: the caller decides on precision, accumulation and skipped steps, so a step means the
same under every engine.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from data_pipeline.core.errors import UserError
from data_pipeline.core.imports import check_installed
from trainer.distributed.collectives import all_reduce_sum, rank, world_size
from trainer.distributed.engines.engine import (
    BaseEngineConfig,
    EngineInputs,
    check_same_names,
    without_gradients,
)
from trainer.optim.optimizers import OptimizerConfig, build_optimizer
from trainer.optim.skipping import step_unless

_STEP_COUNT = "step"  # the only optimizer state that is a single number for each parameter


class DeepSpeedConfig(BaseEngineConfig):
    """The config of ZeRO."""

    kind: Literal["deepspeed"] = "deepspeed"
    zero_stage: Literal[1, 2, 3] = 2

    def check(self, run: Any) -> None:
        """Raise `UserError` for a run that DeepSpeed cannot train, or if DeepSpeed is not installed."""
        if self.zero_stage == 3:
            if run.adversary is not None:
                raise UserError(
                    "engine.zero_stage 3 trains only one module, and a viewmaker is a second one; set "
                    "engine.zero_stage=1 or 2, or engine.kind=ddp"
                )
            if run.objective.copies_encoder:
                raise UserError(
                    "with engine.zero_stage 3 no rank has a whole encoder, but the objective keeps a momentum copy of "
                    "it; set engine.zero_stage=2"
                )
        if run.precision == "float64":
            raise UserError(
                "DeepSpeed has no precision float64; set precision=float32 or bfloat16, or engine.kind=ddp or fsdp"
            )
        if "lars" in {optimizer.kind for optimizer in run.engine_optimizers.values()}:
            raise UserError(
                "optimizer lars needs the norms of whole layers, but engine.kind=deepspeed cuts layers into "
                "pieces; set engine.kind=ddp or another optimizer"
            )
        check_installed("deepspeed", extra="deepspeed", user="engine.kind=deepspeed, for Linux,")
        if run.objective.has_trained_layers:
            self.of_module("objective")

    def of_module(self, name: str) -> DeepSpeedConfig:
        """Return this config. Raises `UserError` for an objective, which has an engine if it has trained layers."""
        if name == "objective" and self.zero_stage == 3:
            raise UserError(
                "engine.zero_stage 3 trains only the encoder, but the objective has trained layers too; set "
                "engine.zero_stage=2"
            )
        return self

    def build(self, module: nn.Module, given: EngineInputs) -> DeepSpeedEngine:
        return DeepSpeedEngine(
            module, optimizer=given.optimizer, config=self, global_batch_size=given.global_batch_size
        )

    def optimizer_share(self, world_size: int) -> float:
        return 1 / world_size


def deepspeed_dictionary(config: DeepSpeedConfig, *, global_batch_size: int, num_ranks: int) -> dict[str, Any]:
    """Return the DeepSpeed configuration of a run, in the form of a DeepSpeed JSON file.

    Overrides every default that would change the results, or make the host wait for the GPU.
    """
    stage = config.zero_stage
    zero: dict[str, Any] = {
        "stage": stage,
        "contiguous_gradients": True,
        "overlap_comm": stage == 3,
        # Counted in numbers: the default of 5e8 takes 2 GB on every rank.
        "reduce_bucket_size": 1 << 24,
        "allgather_bucket_size": 1 << 24,
    }
    if stage < 3:
        # DeepSpeed's norm is needed only for its own clipping and skipping. Without multi-rank buckets, each piece of a
        # gradient is summed only at its own rank, which sends half as much.
        zero |= {"compute_grad_norm": False, "use_multi_rank_bucket_allreduce": False}
    if stage == 3:
        zero |= {"stage3_prefetch_bucket_size": 1 << 24, "stage3_param_persistence_threshold": 10_000}
    return {
        "train_batch_size": global_batch_size,
        "train_micro_batch_size_per_gpu": global_batch_size // num_ranks,
        "gradient_accumulation_steps": 1,  # otherwise it divides the loss
        "gradient_clipping": 0.0,  # otherwise it clips at 1
        "fp16": {"enabled": False},
        "bf16": {"enabled": False},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "timers": {"throughput": {"enabled": False}},
    }


@dataclass(frozen=True)
class _Piece:
    """The part of a parameter that this rank keeps: `length` numbers from `start` of the flattened parameter.

    They begin at `flat_start` of `flat`, the tensor that the optimizer updates in place of a group of parameters.
    """

    flat: Tensor
    flat_start: int
    start: int
    length: int

    def of_flat(self, flat: Tensor) -> Tensor:
        return flat.detach().narrow(0, self.flat_start, self.length)

    def of_whole(self, whole: Tensor) -> Tensor:
        return whole.detach().flatten().narrow(0, self.start, self.length)


class DeepSpeedEngine:
    """An `Engine` with DeepSpeed. Stages 2 and 3 send gradients during the backward pass, stage 1 after it.

    The forward pass does not go through DeepSpeed's own engine, which expects one forward pass for each backward pass.
    A step has two views, and may have two trained modules. DeepSpeed's hooks on the parameters still run. Its
    work at the end of the backward pass is done when gradients are first needed. Stage 3 also skips steps that are not
    finite by itself. Parameters are made contiguous, because DeepSpeed does not accept channels_last.
    """

    def __init__(
        self, module: nn.Module, *, optimizer: OptimizerConfig, config: DeepSpeedConfig, global_batch_size: int
    ) -> None:
        self.module = module
        device = next(module.parameters()).device
        module.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
        self._trained = {name: value for name, value in module.named_parameters() if value.requires_grad}
        self._shapes = {name: value.shape for name, value in self._trained.items()}
        self._optimizer = build_optimizer(optimizer, module)
        self._take_optimizer_step = self._optimizer.step
        self._optimizer.step = self._step_unless_skipped  # type: ignore[assignment]
        self._skip: Tensor | None = None
        self._deepspeed = _join(device)
        self._engine, *_ = self._deepspeed.initialize(
            model=module,
            optimizer=self._optimizer,
            config=deepspeed_dictionary(config, global_batch_size=global_batch_size, num_ranks=world_size()),
        )
        self._stage = config.zero_stage
        self._zero = self._engine.optimizer
        self._is_averaged = False
        self._pieces = self._cut_optimizer_state()

    def __call__(self, *inputs: Any) -> Any:
        return self.module(*inputs)

    def backward(self, loss: Tensor) -> None:
        torch.autograd.backward(loss)
        if self._stage == 3:
            self._zero.backward_epilogue()

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        # DeepSpeed's own context manager sends everything at its end, but the last part of the batch comes after it.
        self._zero._coalesce_grad_reduction = True
        try:
            yield
        finally:
            self._zero._coalesce_grad_reduction = False

    def gradient_norm(self) -> Tensor:
        self._average_gradients()
        pieces = [gradient for group in self._zero.averaged_gradients.values() for gradient in group]
        return all_reduce_sum(torch.nn.utils.get_total_norm(pieces).square()).sqrt()

    def step(self, *, learning_rate: float | Tensor, skip: Tensor | None = None) -> None:
        self._average_gradients()
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._skip = skip
        self._engine.step()  # also clears the gradients
        self._skip = None
        self._is_averaged = False

    def frozen(self) -> AbstractContextManager[None]:
        return without_gradients(self._trained.values())

    def module_state(self) -> dict[str, Tensor]:
        with self._gathered():
            state = self.module.state_dict()
            return {name: value.clone() for name, value in state.items()} if self._stage == 3 else state

    def optimizer_state(self) -> dict[str, Tensor]:
        return {
            f"{key}/{name}": value if key == _STEP_COUNT else self._whole(name, value)
            for name, piece in self._pieces.items()
            for key, value in self._optimizer.state[piece.flat].items()
        }

    def load(self, module_state: Mapping[str, Tensor], optimizer_state: Mapping[str, Tensor]) -> None:
        with self._gathered(modifier_rank=0):
            self.module.load_state_dict(module_state)
        self._zero.refresh_fp32_params()
        self._load_optimizer(optimizer_state)

    def _average_gradients(self) -> None:
        """Finish the last backward pass of a step; later calls in the same step do nothing."""
        if not self._is_averaged:
            self._engine.allreduce_gradients()
            self._is_averaged = True

    def _step_unless_skipped(self, closure: None = None) -> None:
        """Replace the optimizer's step, which DeepSpeed calls once for each flat tensor."""
        step_unless(self._optimizer, self._skip, step=self._take_optimizer_step)

    def _cut_optimizer_state(self) -> dict[str, _Piece]:
        """Replace the optimizer state of the parameters by a state of the flat tensors; return the pieces by name.

        DeepSpeed itself would make this state in the first step.
        """
        names = {id(parameter): name for name, parameter in self._trained.items()}
        state = self._optimizer.state
        first_states = {id(parameter): dict(values) for parameter, values in state.items()}
        state.clear()
        if self._stage == 3:
            flats, groups = self._zero.fp32_partitioned_groups_flat, self._zero.fp16_groups
        else:
            flats, groups = self._zero.single_partition_of_fp32_groups, self._zero.bit16_groups
        pieces = {}
        for flat, group in zip(flats, groups, strict=True):
            state[flat] = {
                key: value.to(flat.device, copy=True)
                if key == _STEP_COUNT
                else torch.zeros_like(flat, requires_grad=False)
                for key, value in first_states[id(group[0])].items()
            }
            for parameter in group:
                pieces[names[id(parameter)]] = self._piece(parameter, flat)
        return pieces

    def _piece(self, parameter: nn.Parameter, flat: Tensor) -> _Piece:
        if self._stage == 3:
            _, flat_start, room = self._zero.grad_position[self._zero.get_param_id(parameter)]
            start = rank() * room
            return _Piece(flat, flat_start, start, max(0, min(room, parameter.ds_numel - start)))  # type: ignore[attr-defined]
        fragment = parameter._hp_mapping  # type: ignore[attr-defined]
        if fragment is None:
            return _Piece(flat, 0, 0, 0)
        address = fragment.lp_fragment_address
        return _Piece(flat, fragment.hp_fragment_address.start, address.start, address.numel)

    def _whole(self, name: str, flat: Tensor) -> Tensor:
        piece, shape = self._pieces[name], self._shapes[name]
        whole = flat.new_zeros(shape.numel(), device=self._trained[name].device)
        piece.of_whole(whole).copy_(piece.of_flat(flat))
        return all_reduce_sum(whole).view(shape)

    def _load_optimizer(self, given: Mapping[str, Tensor]) -> None:
        own = {
            f"{key}/{name}": (name, value)
            for name, piece in self._pieces.items()
            for key, value in self._optimizer.state[piece.flat].items()
        }
        check_same_names(own, given)
        for path, (name, value) in own.items():
            is_count = path.startswith(f"{_STEP_COUNT}/")
            if given[path].shape != (value.shape if is_count else self._shapes[name]):
                raise RuntimeError(f"the optimizer's state does not fit: {path} is {tuple(given[path].shape)}")
            if is_count:
                value.copy_(given[path])
            else:
                piece = self._pieces[name]
                piece.of_flat(value).copy_(piece.of_whole(given[path]))
        for path, (_, value) in own.items():
            if path.startswith(f"{_STEP_COUNT}/") and value.item() != given[path].item():
                raise RuntimeError(f"the optimizer's state does not fit: {path} differs within its group")

    def _gathered(self, *, modifier_rank: int | None = None) -> AbstractContextManager[None]:
        """Gather whole parameters on every rank inside the block; then all ranks keep the values of `modifier_rank`."""
        if self._stage < 3:
            return nullcontext()
        gathered: AbstractContextManager[None] = self._deepspeed.zero.GatheredParameters(
            list(self.module.parameters()), modifier_rank=modifier_rank
        )
        return gathered


def _join(device: torch.device) -> Any:
    """Return DeepSpeed, set up on the present process group; a single process gets its own group."""
    if not dist.is_initialized():
        backend, store = "nccl" if device.type == "cuda" else "gloo", dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    # DeepSpeed reads its device from the environment: on import, when an engine is made, and in stage 3 at each step.
    os.environ |= {"DS_ACCELERATOR": device.type, "LOCAL_RANK": str(device.index or 0)}
    deepspeed = importlib.import_module("deepspeed")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # Otherwise it compiles an operator for inference on the CPU, which takes half a minute and needs a compiler.
    deepspeed.ops.__compatible_ops__ = {}
    deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False)
    return deepspeed
