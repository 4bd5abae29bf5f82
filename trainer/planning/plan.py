"""Plan a training: check its config, measure the memory of a step, and find the micro batches that fit a device.

The real modules, objective and step run on fake tensors, which have shapes but no data, as rank 0 of a process group
without other ranks. The step runs as on a CPU. Only the results of expert views and spectrograms count, because their
computation depends on the data. If a number of rows depends on the data, the largest number counts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from data_pipeline.audio.log_mel import MelConfig
from data_pipeline.core.batch import Batch
from data_pipeline.core.errors import UserError
from data_pipeline.core.sample import BASE, OVERLAY
from data_pipeline.loading.placement import resident_bytes
from trainer.build import assemble
from trainer.config import RunConfig
from trainer.distributed.engines import DDPConfig
from trainer.distributed.fake_process_group import fake_ranks
from trainer.mixture import TrainManifest, datasets_of, num_classes
from trainer.modules import build_modules, build_run_objective
from trainer.open_settings import input_size
from trainer.original_crops import original_crops
from trainer.planning.live_bytes import LiveBytes, bytes_of
from trainer.preflight import check_batch, check_batch_norm, check_input_shape
from trainer.views import BaseViewsConfig, ViewPolicy, ViewsInputs
from trainer.views.adversarial_mask import AdversarialMask
from trainer.views.composed import MOST_TURNS, Composed
from trainer.views.viewmaker import Viewmaker

MARGIN = 0.15  # the share of a device's memory that is left for what a plan does not count
_ASSUMED_SIZE = 32  # height and width of pictures if there is no manifest
_UNITS = (("GB", 10**9), ("MB", 10**6), ("kB", 10**3))


@dataclass(frozen=True)
class TrainingPlan:
    """The memory of a training on each rank. Bytes count tensors.

    Attributes:
        input_shape: the shape of a sample.
        num_parameters: the number of trained parameters, by engine.
        module_bytes: parameters and buffers of the modules and of the objective.
        optimizer_bytes: the optimizer's state on the device.
        engine_bytes: a second copy of the gradients, in which the engine of several ranks sends them.
        batch_bytes: the batch from the stream, and the samples that the device keeps.
        step_bytes: the most bytes alive at once in a step, including gradients, activations and loss.
        step_flops: the floating-point operations of products and convolutions in a step, forward and backward.
        fit: the fewest micro batches with which a step fits the requested device, and the peak then; None if none fit.
    """

    world_size: int
    rank_batch_size: int
    input_shape: tuple[int, ...]
    num_parameters: dict[str, int]
    module_bytes: int
    optimizer_bytes: int
    engine_bytes: int
    batch_bytes: int
    step_bytes: int
    step_flops: int
    fit: tuple[int, int] | None = None

    @property
    def peak_bytes(self) -> int:
        """Return the most bytes of all tensors of a rank."""
        resident = self.module_bytes + self.optimizer_bytes + self.engine_bytes + self.batch_bytes
        return resident + self.step_bytes


def plan(
    config: RunConfig,
    *,
    world_size: int,
    train: TrainManifest | None,
    device_gigabytes: float | None,
) -> TrainingPlan:
    """Return the memory of the run of `config` on `world_size` ranks. Must not be called inside a process group.

    Args:
        train: the train set; None if it is not built yet, which assumes pictures of 32 x 32.
        device_gigabytes: the memory of a device in 10^9 bytes, for which to find micro batches, and which may keep the
            data; None finds none.

    Raises:
        UserError: ranks or micro batches do not divide the batch, the objective needs the unknown number of samples or
            labels, or views or encoder do not accept inputs of this size.
    """
    check_batch(config, train, num_ranks=world_size)
    if train is None and (config.objective.needs_num_samples or config.objective.needs_labels):
        raise UserError(
            f"objective.kind={config.objective.kind} needs the samples or labels of {config.data.train_name}, which "
            "are not known; build it first"
        )
    num_samples, classes, data_bytes = 0, dict[str, int](), 0
    mel, channels = config.data.mel, config.encoder.in_channels
    shape: tuple[int, ...] = (channels, _ASSUMED_SIZE, _ASSUMED_SIZE) if mel is None else (mel.num_points,)
    if train is not None:
        num_samples, classes, shape = train.num_samples, num_classes(train), train.batch_shape
        config.objective.check_labels(classes)
        if device_gigabytes is not None:
            data_bytes = bytes_of_data(config, train, device_bytes=int(device_gigabytes * 1e9))
    height, width = input_size(config, shape)
    check_input_shape(config, height=height, width=width, where=config.data.train_name)
    check_batch_norm(config, height=height, width=width, num_ranks=world_size)
    encoder = config.encoder.with_form(height=height, width=width)
    if encoder.normalization is None:  # of the data, which a plan does not need
        ones = (1.0,) * encoder.in_channels
        encoder = encoder.model_copy(update={"mean": ones, "std": ones})

    def cut(micro_batches: int) -> RunConfig:
        memory = config.memory.model_copy(update={"micro_batches": micro_batches})
        return config.model_copy(update={"memory": memory, "encoder": encoder})

    @cache
    def at(micro_batches: int) -> TrainingPlan:
        found = _measure(cut(micro_batches), world_size, num_samples=num_samples, num_classes=classes, shape=shape)
        return replace(found, batch_bytes=found.batch_bytes + data_bytes)

    def can_be_cut(micro_batches: int) -> bool:
        try:
            check_batch(cut(micro_batches), None, num_ranks=world_size)
            check_batch_norm(cut(micro_batches), height=height, width=width, num_ranks=world_size)
        except UserError:
            return False
        return True

    found = at(config.memory.micro_batches)
    if device_gigabytes is None:
        return found
    room = (1 - MARGIN) * device_gigabytes * 1e9
    choices = [number for number in range(1, found.rank_batch_size + 1) if can_be_cut(number)]
    place = bisect_left(choices, True, key=lambda number: at(number).peak_bytes <= room)
    fit = None if place == len(choices) else (choices[place], at(choices[place]).peak_bytes)
    return replace(found, fit=fit)


def bytes_of_data(config: RunConfig, train: TrainManifest, *, device_bytes: int) -> int:
    """Return the bytes of the train set that a GPU with so much memory keeps there, by `data.placement`.

    As `place_data` decides when all memory is free.
    """
    if config.data.placement in {"stream", "host"} or original_crops(config, train) is not None:
        return 0
    room, kept = config.data.resident_gigabytes * 1e9, 0
    for manifest in datasets_of(train):
        num_bytes = resident_bytes(manifest)
        if config.data.placement == "device" or (num_bytes <= room and 2 * num_bytes <= device_bytes - kept):
            room -= num_bytes
            kept += num_bytes
    return kept


def describe(planned: TrainingPlan, config: RunConfig, *, device_gigabytes: float | None) -> str:
    """Return the plan as a page."""
    shape = " x ".join(map(str, planned.input_shape))
    rows = [
        ("ranks", f"{planned.world_size}, engine {config.engine.kind}"),
        ("global batch", f"{config.global_batch_size:,} samples of {shape}"),
        ("batch of a rank", f"{planned.rank_batch_size:,} in {config.memory.micro_batches} micro batches"),
        *((f"parameters, {name}", f"{num:,}") for name, num in planned.num_parameters.items()),
        ("modules and objective", _in_words(planned.module_bytes)),
        ("optimizer", _in_words(planned.optimizer_bytes)),
        ("buffers of the engine", _in_words(planned.engine_bytes)),
        ("batch and data", _in_words(planned.batch_bytes)),
        ("step, at most", _in_words(planned.step_bytes)),
        ("peak of a rank", _in_words(planned.peak_bytes)),
        ("arithmetic of a step", f"{planned.step_flops / 1e12:.4g} TFLOP"),
    ]
    if device_gigabytes is not None:
        fit = "does not fit with any number of micro batches; use more ranks or a smaller batch"
        if planned.fit is not None:
            fit = f"memory.micro_batches={planned.fit[0]}, peak {_in_words(planned.fit[1])}"
        rows.append((f"on {device_gigabytes:g} GB", fit))
    lines = [config.name, *(f"{name:26}{value}" for name, value in rows)]
    not_counted = (
        f"These are the bytes of tensors; {MARGIN:.0%} of a GPU are left for its allocator, CUDA, cuDNN and NCCL.\n"
        "Whole gradients and parameters count, also where an engine cuts them. Making expert views and\n"
        "spectrograms, and batches that the stream has ready, do not count."
    )
    return "\n".join([*lines, "", not_counted])


def _in_words(size: int) -> str:
    return next((f"{size / factor:.2f} {unit}" for unit, factor in _UNITS if size >= factor), f"{size} B")


def _measure(
    config: RunConfig, world_size: int, *, num_samples: int, num_classes: Mapping[str, int], shape: tuple[int, ...]
) -> TrainingPlan:
    size, cpu = config.global_batch_size // world_size, torch.device("cpu")
    modules = build_modules(config)
    policy = _fake_policy(modules.view_policy, config.data.mel, config.views)
    modules = replace(modules, view_policy=policy).to(cpu, config.parameter_dtype)
    with fake_ranks(world_size):
        objective = build_run_objective(
            config, modules.encoder, num_samples=num_samples, num_classes=num_classes, device=cpu
        )
    mode, live, arithmetic = FakeTensorMode(), LiveBytes(), _Arithmetic()
    for module in (modules.encoder, modules.view_policy, objective):
        _make_fake(module, mode)
    with mode, _Answers():
        # Assembled without a process group, so that an engine is the bare module with its optimizer.
        bare = config.model_copy(update={"engine": DDPConfig(), "compile": False})
        training = assemble(bare, modules, objective)
        engines = training.engines
        trained = {
            name: [parameter for parameter in engine.module.parameters() if parameter.requires_grad]
            for name, engine in engines.items()
        }
        optimizer_bytes = sum(
            bytes_of(engine.optimizer_state().values()) * config.engine.of_module(name).optimizer_share(world_size)
            for name, engine in engines.items()
        )
        batch = _batch(config, size, shape, labels={BASE, OVERLAY, *num_classes})
        with fake_ranks(world_size), live, arithmetic:
            training.step(batch, learning_rates=defaultdict(float))
    parts = (modules.encoder, modules.view_policy, objective)
    states = [tensor for part in parts for tensor in (*part.parameters(), *part.buffers())]
    gradient_bytes = bytes_of(parameter for parameters in trained.values() for parameter in parameters)
    return TrainingPlan(
        world_size=world_size,
        rank_batch_size=size,
        input_shape=shape,
        num_parameters={name: sum(each.numel() for each in parameters) for name, parameters in trained.items()},
        module_bytes=bytes_of(states),
        optimizer_bytes=round(optimizer_bytes),
        engine_bytes=gradient_bytes if world_size > 1 else 0,
        batch_bytes=bytes_of(
            value for value in (*vars(batch).values(), *batch.labels.values()) if isinstance(value, Tensor)
        ),
        step_bytes=live.peak_bytes,
        step_flops=arithmetic.flops,
    )


def _fake_policy(policy: ViewPolicy, mel: MelConfig | None, views: BaseViewsConfig) -> ViewPolicy:
    """Return a view policy that runs on fake tensors; expert views take their memory and do no work."""
    if isinstance(policy, Composed):
        for composed in [module for module in policy.modules() if isinstance(module, Composed)]:
            container = next((child for child in composed.children() if isinstance(child, nn.ModuleList)), composed)
            for name, part in list(container.named_children()):
                if isinstance(part, Viewmaker | AdversarialMask):
                    setattr(container, name, _on_spectrograms(part, mel, part.config))
                elif not isinstance(part, Composed):
                    setattr(container, name, _ReadyViews(mel, views))
        return policy
    if not views.is_learned:
        return _ReadyViews(mel, views)
    return _on_spectrograms(policy, mel, views)


def _on_spectrograms(policy: ViewPolicy, mel: MelConfig | None, views: BaseViewsConfig) -> ViewPolicy:
    """Return the policy; for sounds, one that gets a spectrogram without data in the place of each waveform."""
    if mel is None:
        return policy
    fake = views.build(ViewsInputs(image_channels=1))
    fake.checkpointing = policy.checkpointing
    fake.register_forward_pre_hook(lambda _, given: (_spectrograms(given[0], mel), *given[1:]))
    return fake


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
            if parameter is not None:
                fake = mode.from_tensor(parameter.detach())
                inner._parameters[name] = nn.Parameter(fake, requires_grad=parameter.requires_grad)
        for name, buffer in inner._buffers.items():
            if buffer is not None:
                inner._buffers[name] = mode.from_tensor(buffer)


def _batch(config: RunConfig, size: int, shape: tuple[int, ...], *, labels: set[str]) -> Batch:
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


class _Arithmetic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts in `flops` as torch's FlopCounterMode, which also changes what is alive."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if (count := flop_registry.get(func.overloadpacket)) is not None:
            self.flops += count(*args, **(kwargs or {}), out_val=result)
        return result


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
        return func(*args, **(kwargs or {}))
