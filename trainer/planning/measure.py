"""Measure the memory and messages of a training step on every rank, without training, data or a GPU.

The real modules, objective and step run on fake tensors, which have shapes but no data, as rank 0 of a process group
without other ranks. `Accounts` counts the bytes that are alive and the bytes that are sent. Formulas, which could fall
behind the code, are needed only for the work of the engines between the ranks.

The step runs as on a CPU. Only the results of expert views and spectrograms count, because their computation depends on
the data. If a number of rows depends on the data, the largest number counts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from data_pipeline.audio.log_mel import MelConfig
from data_pipeline.core.sample import BASE, OVERLAY, Batch
from trainer.build import assemble
from trainer.config import RunConfig
from trainer.distributed.engines import DDPConfig
from trainer.distributed.engines.engine import Backend
from trainer.distributed.fake_process_group import fake_ranks
from trainer.models.encoder import Encoder
from trainer.modules import build_modules, build_run_objective, objective_inputs
from trainer.objectives import Objective, build_objective
from trainer.planning.accounting import Accounts
from trainer.planning.engine_costs import PassCounter, cut_gradients, kept_by_engines, sent_by_engines
from trainer.views import BaseViewsConfig, ViewPolicy, ViewsInputs
from trainer.views.composed import MOST_TURNS, Composed
from trainer.views.viewmaker import Viewmaker


@dataclass(frozen=True)
class Fit:
    """The fewest `micro_batches` with which a step fits a device, and the bytes of a rank then; None if none fit."""

    micro_batches: int | None
    peak_bytes: int | None


@dataclass(frozen=True)
class TrainingPlan:
    """The memory and messages of a training on each rank. Bytes count tensors; an unknown number is None.

    Attributes:
        micro_batch_size: the samples of a rank that are encoded at once.
        num_parameters: the number of trained parameters, by engine.
        module_bytes: parameters and buffers of the modules, and the objective's parameters, queue, bank, momentum copy.
        engine_bytes: memory of the engine itself: DDP's buckets, or DeepSpeed's copy of its piece of the parameters.
        optimizer_bytes, host_bytes: the optimizer's state, on the device and, if it is offloaded, in host memory.
        batch_bytes: the batch from the stream.
        gradient_bytes: all gradients, in the form in which they are kept for the optimizer.
        activation_bytes: the most bytes alive at the end of a forward pass of the encoder with gradients: inputs,
            views, and activations for the backward pass.
        loss_bytes: the most bytes that the objective adds, in its forward and backward pass.
        output_bytes: the output of the last step, for the log.
        step_bytes: the most bytes alive at once in a step, including gradients, activations and loss.
        sent_bytes: the bytes that a rank sends in a step, by collective.
        device_bytes, fit: the memory of the requested device, and the micro batches that fit it.
        data_bytes: the samples that this device keeps in its memory; 0 without a device.
    """

    name: str
    world_size: int
    engine: str
    backend: Backend
    global_batch_size: int
    rank_batch_size: int
    micro_batches: int
    micro_batch_size: int
    input_shape: tuple[int, ...]
    input_shape_is_known: bool
    num_parameters: dict[str, int]
    module_bytes: int
    engine_bytes: int
    optimizer_bytes: int
    host_bytes: int
    batch_bytes: int
    gradient_bytes: int
    activation_bytes: int
    loss_bytes: int
    output_bytes: int
    step_bytes: int
    sent_bytes: dict[str, int]
    num_samples: int | None
    steps_per_epoch: int | None
    num_steps: int | None
    device_bytes: int | None = None
    fit: Fit | None = None
    data_bytes: int = 0

    @property
    def resident_bytes(self) -> int:
        """Return the bytes that are in use all the time."""
        of_training = self.module_bytes + self.engine_bytes + self.optimizer_bytes
        return of_training + self.batch_bytes + self.output_bytes + self.data_bytes

    @property
    def peak_bytes(self) -> int:
        """Return the most bytes of all tensors of a rank."""
        return self.resident_bytes + self.step_bytes


def measure(
    config: RunConfig,
    world_size: int,
    *,
    num_samples: int | None,
    num_classes: Mapping[str, int],
    shape: tuple[int, ...],
    backend: Backend,
) -> TrainingPlan:
    """Return the plan with the number of micro batches in the config.

    Leaves no process group, and must not be called inside one.
    """
    size = config.global_batch_size // world_size
    modules = build_modules(config)
    modules = replace(modules, view_policy=_fake_policy(config, modules.view_policy))
    modules = modules.to(torch.device("cpu"), config.parameter_dtype)
    mode, answers = FakeTensorMode(), _Answers()
    with fake_ranks(world_size):
        objective = _build_objective(config, modules.encoder, num_samples, num_classes, mode)
    for module in (modules.encoder, modules.view_policy, objective):
        _make_fake(module, mode)
    with mode, answers:
        # Assembled without a process group, so that an engine is the bare module with its optimizer.
        bare = config.model_copy(update={"engine": DDPConfig(), "compile": False})
        training = assemble(bare, modules, objective)
        engines = training.engines
        gradients = {name: _size(_trained(engine.module)) for name, engine in engines.items()}
        optimizers = {name: _size(engine.optimizer_state().values()) for name, engine in engines.items()}
        cut = {name: engine for name, engine in engines.items() if config.engine.of_module(name).cuts_gradients}
        cuts = cut_gradients(cut, world_size)
        # An encoder may let its trunk pass several times; most parameters are there.
        passes = {name: PassCounter(engine.module) for name, engine in engines.items()}
        passes["encoder"] = PassCounter(modules.encoder.trunk)
        with fake_ranks(world_size, sums_by_gathering=backend == "gloo"), cuts:
            batch = _batch(config, size, shape, labels={BASE, OVERLAY, *num_classes})
            phases = _Phases(modules.encoder, objective)
            with phases.accounts:
                output = training.step(batch, learning_rates=defaultdict(float))
            at_the_end = phases.accounts.live_bytes
            del output
            output_bytes = at_the_end - phases.accounts.live_bytes
    sent = phases.accounts.sent_bytes + sent_by_engines(
        config, gradients, passes, world_size=world_size, backend=backend
    )
    kept = kept_by_engines(config, gradients, optimizers, world_size=world_size)
    steps_per_epoch = None
    if num_samples is not None:
        steps_per_epoch = config.data.num_steps_per_epoch(num_samples, config.global_batch_size)
    return TrainingPlan(
        name=config.name,
        world_size=world_size,
        engine=config.engine.title,
        backend=backend,
        global_batch_size=config.global_batch_size,
        rank_batch_size=size,
        micro_batches=config.memory.micro_batches,
        micro_batch_size=size // config.memory.micro_batches,
        input_shape=shape,
        input_shape_is_known=True,
        num_parameters={
            name: sum(parameter.numel() for parameter in _trained(engine.module)) for name, engine in engines.items()
        },
        module_bytes=_size(
            tensor
            for module in (modules.encoder, modules.view_policy, objective)
            for tensor in (*module.parameters(), *module.buffers())
        ),
        engine_bytes=kept.engine_bytes,
        optimizer_bytes=kept.optimizer_bytes,
        host_bytes=kept.host_bytes,
        batch_bytes=_size(
            value for value in [*vars(batch).values(), *batch.labels.values()] if isinstance(value, Tensor)
        ),
        gradient_bytes=kept.gradient_bytes,
        activation_bytes=phases.activation_bytes,
        loss_bytes=phases.loss_bytes,
        output_bytes=output_bytes,
        step_bytes=phases.accounts.peak_bytes,
        sent_bytes={name: num for name, num in sent.items() if num},
        num_samples=num_samples,
        steps_per_epoch=steps_per_epoch,
        num_steps=None if steps_per_epoch is None else config.num_epochs * steps_per_epoch,
    )


def _build_objective(
    config: RunConfig,
    encoder: Encoder,
    num_samples: int | None,
    num_classes: Mapping[str, int],
    mode: FakeTensorMode,
) -> Objective:
    """Return the objective. A bank, which may be large, is fake from the start; other objectives are real here."""
    if not config.objective.needs_num_samples:
        return build_run_objective(
            config, encoder, num_samples=num_samples or 0, num_classes=num_classes, device=torch.device("cpu")
        )
    assert num_samples is not None
    given = objective_inputs(config, encoder, num_samples=num_samples, num_classes=num_classes)
    with mode:
        objective = build_objective(config.objective, given)
        for name, buffer in list(objective.named_buffers()):
            objective.register_buffer(name, buffer.to(config.parameter_dtype))
    return objective


def _fake_policy(config: RunConfig, policy: ViewPolicy) -> ViewPolicy:
    """Return a view policy that runs on fake tensors."""
    mel, views = config.data.mel, config.views
    if isinstance(policy, Composed):
        for composed in [module for module in policy.modules() if isinstance(module, Composed)]:
            container = next((child for child in composed.children() if isinstance(child, nn.ModuleList)), composed)
            for name, part in list(container.named_children()):
                if not isinstance(part, Composed):
                    setattr(container, name, _fake_part(part, mel, views))
        return policy
    if not (views.is_learned or views.runs_in_plans):
        return _ReadyViews(mel, views)
    if mel is None:
        return policy
    on_spectrograms = views.build(ViewsInputs(image_channels=1))
    on_spectrograms.checkpointing = policy.checkpointing
    on_spectrograms.register_forward_pre_hook(lambda _, given: (_spectrograms(given[0], mel), *given[1:]))
    return on_spectrograms


def _fake_part(part: nn.Module, mel: MelConfig | None, views: BaseViewsConfig) -> nn.Module:
    """Return a part of a composition that runs on fake tensors."""
    if not isinstance(part, Viewmaker):
        return _ReadyViews(mel, views)
    if mel is None:
        return part
    on_spectrograms = Viewmaker(part.config, image_channels=1)
    on_spectrograms.checkpointing = part.checkpointing
    on_spectrograms.register_forward_pre_hook(lambda _, given: (_spectrograms(given[0], mel), *given[1:]))
    return on_spectrograms


class _ReadyViews(nn.Module):
    """A replacement for expert views that takes their memory and does no work."""

    def __init__(self, mel: MelConfig | None, views: BaseViewsConfig) -> None:
        super().__init__()
        self._mel, self._views = mel, views

    def forward(self, inputs: Tensor, *_: object) -> Tensor:
        return inputs.clone() if self._mel is None else _spectrograms(inputs, self._mel)

    def further_view(self, inputs: Tensor, *_: object) -> Tensor:
        views_BCHW = self(inputs)
        height, width = views_BCHW.shape[-2:]
        size = self._views.further_size(height=height, width=width)
        further_BCHW: Tensor = views_BCHW.new_empty(*views_BCHW.shape[:2], *size)
        return further_BCHW


def _spectrograms(waveforms_BT: Tensor, mel: MelConfig) -> Tensor:
    return waveforms_BT.new_empty(len(waveforms_BT), 1, mel.num_mels, mel.num_frames)


def _make_fake(module: nn.Module, mode: FakeTensorMode) -> None:
    """Replace a module's tensors by fake ones."""
    for inner in module.modules():
        for name, parameter in inner._parameters.items():
            if parameter is not None and not isinstance(parameter, FakeTensor):
                fake = mode.from_tensor(parameter.detach())
                inner._parameters[name] = nn.Parameter(fake, requires_grad=parameter.requires_grad)
        for name, buffer in inner._buffers.items():
            if buffer is not None and not isinstance(buffer, FakeTensor):
                inner._buffers[name] = mode.from_tensor(buffer)


def _batch(config: RunConfig, size: int, shape: tuple[int, ...], *, labels: Iterable[str]) -> Batch:
    is_sound = config.data.mel is not None

    def inputs() -> Tensor:
        return torch.empty((size, *shape), dtype=torch.float32 if is_sound else torch.uint8)

    def masks() -> Tensor | None:
        return None if is_sound else torch.empty((size, *shape[1:]), dtype=torch.uint8)

    inputs_a, masks_BHW = inputs(), masks()
    per_view = config.data.overlay_draw == "per_view"
    return Batch(
        step=0,
        epoch=next((epoch for epoch in range(MOST_TURNS) if config.views.learns_in(epoch)), 0),  # it takes more memory
        index_B=torch.empty(size, dtype=torch.int64),
        inputs_a=inputs_a,
        inputs_b=inputs() if per_view else inputs_a,
        masks_BHW=masks_BHW,
        masks_b_BHW=masks() if per_view else masks_BHW,
        labels={name: torch.empty(size, dtype=torch.int64) for name in labels},
    )


class _Answers(TorchDispatchMode):
    """Values for tensors without data: a flag is False (no step is skipped), a number is 1, a mask selects all rows."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return False if args[0].dtype == torch.bool else 1
        if func is torch.ops.aten.index.Tensor:
            rows: list[Tensor | None] = []
            for index in args[1]:
                is_mask = index is not None and index.dtype == torch.bool
                rows += [torch.empty(index.numel(), dtype=torch.int64)] * index.dim() if is_mask else [index]
            return func(args[0], rows)
        if func is torch.ops.aten.native_batch_norm.out:  # its fake kernel takes milliseconds
            assert kwargs is not None
            return kwargs["out"], kwargs["save_mean"], kwargs["save_invstd"]
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.native_batch_norm.default and args[1] is not None:
            # Fake kernels return statistics in the dtype of the input, real kernels in the dtype of the weights.
            result = (result[0], *(statistics.to(args[1].dtype) for statistics in result[1:]))
        return result


class _Phases:
    """The accounts of a step, with the bytes that are alive after the encoder and around the loss."""

    def __init__(self, encoder: nn.Module, objective: nn.Module) -> None:
        self.accounts = Accounts()
        self.activation_bytes = 0
        self.loss_bytes = 0
        self._before_loss = 0
        encoder.register_forward_hook(self._encoded)
        objective.register_forward_pre_hook(self._asked)

    def _encoded(self, *_: object) -> None:
        if torch.is_grad_enabled():
            self.activation_bytes = max(self.activation_bytes, self.accounts.live_bytes)

    def _asked(self, _: nn.Module, given: tuple[Any, ...]) -> None:
        self._before_loss = self.accounts.live_bytes
        self.accounts.restart_peak()
        is_over, is_leaf = False, given[0].is_leaf  # the hook must not hold the embeddings, which would keep them alive

        def answered(_: Tensor) -> None:
            nonlocal is_over
            if not is_over:
                self.loss_bytes = max(self.loss_bytes, self.accounts.recent_peak_bytes - self._before_loss)
            # When the gradient of the second embedding arrives, the gradient of the first has already passed the
            # encoder. The embeddings of micro batches are leaves, without an encoder behind them.
            is_over = not is_leaf

        for embeddings in given[:2]:
            embeddings.register_hook(answered)


def _trained(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def _size(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of memory of the tensors; memory that several tensors share counts once."""
    return sum({each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in tensors}.values())
