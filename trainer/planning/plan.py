"""A plan before the job: what a step takes on every rank, without training, data or a GPU.

The real players, objective and step run on fake tensors, which have shapes but no data, as rank 0 of a process group
whose other ranks do not exist; `Accounts` counts what is alive and what is sent. So little here is a formula that could
fall behind the code: only what the engines do between the ranks.

The step is that of a CPU. Expert views and spectrograms are handed in ready, because how they are made there depends on
the data. Where else a number of rows depends on the data, the most is taken.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from data_pipeline.audio.log_mel import MelConfig
from data_pipeline.core.errors import UserError
from data_pipeline.core.sample import Batch
from data_pipeline.core.schema import Schema
from data_pipeline.loading.stream import check_batch_size, num_steps_per_epoch
from trainer.config import RunConfig
from trainer.distributed.engines.ddp_engine import DDPEngine
from trainer.distributed.engines.deepspeed_engine import DeepSpeedConfig, deepspeed_dictionary
from trainer.distributed.fake_process_group import fake_ranks
from trainer.models.batch_norm import check_splits
from trainer.models.encoder import Encoder
from trainer.modules import build_modules, build_run_objective
from trainer.objectives import InstanceDiscriminationConfig, Objective, build_objective
from trainer.planning.accounting import Accounts
from trainer.preflight import check_batch_norm, check_input_shape
from trainer.step import TrainingStep
from trainer.views import ViewPolicy
from trainer.views.random_mask import RandomMask
from trainer.views.viewmaker import Viewmaker

Backend = Literal["gloo", "nccl"]

MARGIN = 0.15  # the share of a device that a plan leaves to what it does not count
_ASSUMED_SIZE = 32  # height and width of pictures that nobody has seen yet


@dataclass(frozen=True)
class Fit:
    """The least `micro_batches` with which a step fits the device, and the bytes of a rank then; None where none do."""

    micro_batches: int | None
    peak_bytes: int | None


@dataclass(frozen=True)
class Plan:
    """What a run takes. Bytes are those of a rank, of tensors; a number that is not known is None.

    Attributes:
        micro_batch_size: samples of a rank that are encoded at once.
        num_parameters: that are trained, by player.
        module_bytes: parameters and buffers of the players, and the objective's parameters, queue, bank, momentum copy.
        engine_bytes: what the engine itself keeps: DDP's buckets, DeepSpeed's copy of its piece of the parameters.
        optimizer_bytes, host_bytes: its state, on the device and, where it is offloaded, in host memory.
        batch_bytes: the batch as it comes from the stream.
        gradient_bytes: of all gradients, as they are kept for the optimizer.
        activation_bytes: the most that is alive when a forward of the encoder that will go backward ends: inputs,
            views, and what backward needs.
        loss_bytes: the most that the objective takes on top of what was alive when it was called, forward and backward.
        output_bytes: what the last step leaves for the log.
        step_bytes: the most that a step has alive at once, gradients, activations and loss included.
        sent_bytes: by collective, what a rank puts into it in a step.
        device_bytes, fit: of the device that was asked for.
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

    @property
    def resident_bytes(self) -> int:
        """What is there all the time."""
        return self.module_bytes + self.engine_bytes + self.optimizer_bytes + self.batch_bytes + self.output_bytes

    @property
    def peak_bytes(self) -> int:
        """The most that the tensors of a rank take."""
        return self.resident_bytes + self.step_bytes


def plan(
    config: RunConfig,
    *,
    world_size: int,
    num_samples: int | None,
    device_gigabytes: float | None,
    input_shape: tuple[int, ...] | None = None,
    backend: Backend = "nccl",
) -> Plan:
    """What the run of `config` on `world_size` ranks takes. Leaves no process group, and is not called inside one.

    Args:
        num_samples: of the train set; None where it is not built yet.
        device_gigabytes: memory of a device in 10^9 bytes, for which the micro batch is sought.
        input_shape: of a sample, as in the manifest; None takes pictures of 32 x 32. Sounds need none.
        backend: what the ranks talk through. It changes names of collectives, not bytes.

    Raises:
        UserError: ranks or micro batches that do not divide the batch, a bank of samples whose number is not known, or
            inputs of a size that views or encoder cannot take.
    """
    _check(config, world_size=world_size, num_samples=num_samples)
    shape = input_shape
    if shape is None:
        mel, channels = config.data.mel, config.encoder.in_channels
        shape = (channels, _ASSUMED_SIZE, _ASSUMED_SIZE) if mel is None else (mel.num_points,)
    _check_input(config, shape, world_size=world_size, is_known=input_shape is not None)

    def at(micro_batches: int) -> Plan:
        memory = config.memory.model_copy(update={"micro_batches": micro_batches})
        return _account(
            config.model_copy(update={"memory": memory}),
            world_size,
            num_samples=num_samples,
            shape=shape,
            backend=backend,
        )

    found = at(config.memory.micro_batches)
    found = replace(found, input_shape_is_known=input_shape is not None or config.data.mel is not None)
    if device_gigabytes is None:
        return found
    device_bytes = int(device_gigabytes * 1e9)
    return replace(found, device_bytes=device_bytes, fit=_fit(found, config, at, room=room_on(device_bytes)))


def room_on(device_bytes: int) -> int:
    """The bytes of a device that a plan gives to tensors."""
    return int((1 - MARGIN) * device_bytes)


def describe(plan: Plan) -> str:
    """The plan as a table, for people."""
    shape = " x ".join(map(str, plan.input_shape))
    known = "" if plan.input_shape_is_known else ", assumed: the shards are not there"
    rows = [
        ("ranks", f"{plan.world_size}, engine {plan.engine}"),
        ("global batch", f"{plan.global_batch_size:,} samples of {shape}{known}"),
        ("batch of a rank", f"{plan.rank_batch_size:,}, {plan.micro_batch_size:,} encoded at once"),
        *((f"parameters, {player}", f"{num:,}") for player, num in plan.num_parameters.items()),
        ("", ""),
        ("memory of a rank", ""),
        ("  modules and objective", _bytes(plan.module_bytes)),
        ("  kept by the engine", _bytes(plan.engine_bytes)),
        ("  optimizer", _bytes(plan.optimizer_bytes)),
        ("  batch and last output", _bytes(plan.batch_bytes + plan.output_bytes)),
        ("  step, at most", _bytes(plan.step_bytes)),
        ("    gradients", _bytes(plan.gradient_bytes)),
        ("    activations", _bytes(plan.activation_bytes)),
        ("    loss", _bytes(plan.loss_bytes)),
        ("  peak of all tensors", _bytes(plan.peak_bytes)),
        *([("  in host memory", _bytes(plan.host_bytes))] if plan.host_bytes else []),
        ("", ""),
        ("sent by a rank in a step", _bytes(sum(plan.sent_bytes.values()))),
        *((f"  {name}", _bytes(size)) for name, size in sorted(plan.sent_bytes.items())),
        ("", ""),
        ("samples", "not known: the shards are not there" if plan.num_samples is None else f"{plan.num_samples:,}"),
        (
            "steps",
            "not known" if plan.num_steps is None else f"{plan.num_steps:,} ({plan.steps_per_epoch:,} an epoch)",
        ),
    ]
    if plan.device_bytes is not None and plan.fit is not None:
        rows += [("", ""), (f"on {_bytes(plan.device_bytes)}", _fit_in_words(plan, plan.fit))]
    lines = [plan.name, *(f"{name:26}{value}".rstrip() for name, value in rows)]
    return "\n".join([*lines, "", *_not_counted(plan)])


def _fit_in_words(plan: Plan, fit: Fit) -> str:
    if fit.micro_batches is None or fit.peak_bytes is None:
        return "does not fit, however small the micro batches; take more ranks or a smaller batch"
    size = plan.rank_batch_size // fit.micro_batches
    return f"memory.micro_batches={fit.micro_batches}: {size:,} samples at once, peak {_bytes(fit.peak_bytes)}"


def _not_counted(plan: Plan) -> list[str]:
    return [
        "Counted are the bytes of tensors. A GPU also holds the CUDA context, buffers of NCCL, workspaces of cuDNN and",
        f"what its allocator cannot use; {MARGIN:.0%} of a stated memory is left for them. Not counted either: making",
        "expert views and spectrograms, batches that the stream has ready, and a checkpoint while it is copied.",
        *(
            ["ZeRO 3: parameters count as whole, because a rank may gather them all; what gathering sends is a least."]
            if plan.engine.endswith("ZeRO 3")
            else []
        ),
    ]


def _bytes(size: int) -> str:
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= factor:
            return f"{size / factor:.2f} {unit}"
    return f"{size} B"


def _check(config: RunConfig, *, world_size: int, num_samples: int | None) -> None:
    size = config.global_batch_size
    # An epoch of one batch stands for a dataset that is not there.
    check_batch_size(size if num_samples is None else num_samples, global_batch_size=size, world_size=world_size)
    if isinstance(config.objective, InstanceDiscriminationConfig) and num_samples is None:
        raise UserError(
            "objective.kind=instance_discrimination keeps a row for each sample, and their number is not known; build "
            f"{config.data.train_dir} first"
        )
    if size // world_size % config.memory.micro_batches:
        raise UserError(
            f"memory.micro_batches {config.memory.micro_batches} does not divide the {size // world_size} samples of a "
            f"rank; global_batch_size is {size} on {world_size} ranks"
        )
    if config.encoder.batch_norm == "split":
        check_splits(
            config.encoder.batch_norm_splits,
            global_batch_size=size // config.memory.micro_batches,
            num_ranks=world_size,
            forwards=2 if config.view_forwards == "two" else 1,
        )


def _check_input(config: RunConfig, shape: tuple[int, ...], *, world_size: int, is_known: bool) -> None:
    mel = config.data.mel
    height, width = shape[1:] if mel is None else (mel.num_mels, mel.num_frames)
    where = config.data.train_dir if is_known or mel is not None else f"{config.data.train_dir}, which is not built yet"
    check_input_shape(config, height=height, width=width, where=where)
    check_batch_norm(config, height=height, width=width, num_ranks=world_size)


def _fit(planned: Plan, config: RunConfig, at: Callable[[int], Plan], *, room: int) -> Fit:
    """The least micro batches whose peak is within `room`: with one less it is accounted for, and does not fit."""
    choices = [
        number
        for number in range(1, planned.rank_batch_size + 1)
        if planned.rank_batch_size % number == 0 and _can_be_cut(config, planned.rank_batch_size, number)
    ]
    peaks = {planned.micro_batches: planned.peak_bytes}

    def fits(number: int) -> bool:
        if number not in peaks:
            peaks[number] = at(number).peak_bytes
        return peaks[number] <= room

    if planned.resident_bytes + planned.loss_bytes > room:  # which no cut makes smaller
        return Fit(None, None)
    # A first guess, because many parts take long to account for: activations go down with their size.
    step_bytes = planned.step_bytes * planned.micro_batches
    guesses = (place for place, number in enumerate(choices) if planned.resident_bytes + step_bytes / number <= room)
    place = next(guesses, len(choices) - 1)
    while place > 0 and fits(choices[place - 1]):
        place -= 1
    while place < len(choices) and not fits(choices[place]):
        place += 1
    return Fit(choices[place], peaks[choices[place]]) if place < len(choices) else Fit(None, None)


def _can_be_cut(config: RunConfig, rank_batch_size: int, micro_batches: int) -> bool:
    """Batch norm needs two samples; split batch norm equal groups, which a rank's part holds whole."""
    size, left = divmod(rank_batch_size, micro_batches)
    if config.encoder.batch_norm == "split":
        num_ranks = config.global_batch_size // rank_batch_size
        left += size * (2 if config.view_forwards == "one" else 1) % (config.encoder.batch_norm_splits // num_ranks)
    return left == 0 and (size > 1 or micro_batches == 1)


def _account(
    config: RunConfig, world_size: int, *, num_samples: int | None, shape: tuple[int, ...], backend: Backend
) -> Plan:
    """The plan at the config's own number of micro batches."""
    size = config.global_batch_size // world_size
    players = build_modules(config)
    policy, learned = _view_policy(config, players.view_policy)
    memory_format = torch.channels_last if config.channels_last else torch.contiguous_format
    for module in (players.encoder, policy):
        module.to(dtype=config.parameter_dtype).to(memory_format=memory_format)  # type: ignore[call-overload]
    mode, answers = FakeTensorMode(), _Answers()
    with fake_ranks(world_size):
        objective = _build_objective(config, players.encoder, num_samples, mode)
    for module in (players.encoder, policy, objective):
        _make_fake(module, mode)
    with mode, answers:
        # Made outside the group, where an engine is the bare module with its optimizer.
        optimizers = config.player_optimizers | {"objective": config.objective_optimizer}
        engines = {
            name: DDPEngine(module.train(), optimizer=optimizers[name])
            for name, module in {"encoder": players.encoder, **learned, "objective": objective}.items()
            if _trained(module)
        }
        gradients = {name: _size(_trained(engine.module)) for name, engine in engines.items()}
        optimizer_bytes = _size(tensor for engine in engines.values() for tensor in engine.optimizer_state().values())
        cuts = _cut_gradients(engines, world_size) if _zero_stage(config) >= 2 else nullcontext()
        with fake_ranks(world_size, sums_by_gathering=backend == "gloo"), cuts:
            step = TrainingStep(config, engines=engines, view_policy=policy, objective=objective)  # type: ignore[arg-type]
            batch = _batch(config, size, shape)
            phases = _Phases(players.encoder, objective)
            with phases.accounts:
                output = step(batch, learning_rates=defaultdict(float))
            at_the_end = phases.accounts.live_bytes
            del output
    sent = phases.accounts.sent_bytes + _sent_by_engines(config, gradients, world_size=world_size, backend=backend)
    kept = _kept_by_engines(config, sum(gradients.values()), optimizer_bytes, world_size=world_size)
    steps_per_epoch = None if num_samples is None else num_steps_per_epoch(num_samples, config.global_batch_size)
    return Plan(
        name=config.name,
        world_size=world_size,
        engine=config.engine.kind if _zero_stage(config) < 0 else f"{config.engine.kind}, ZeRO {_zero_stage(config)}",
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
        module_bytes=_size(tensor for module in (players.encoder, policy, objective) for tensor in _state(module)),
        engine_bytes=kept.engine_bytes,
        optimizer_bytes=kept.optimizer_bytes,
        host_bytes=kept.host_bytes,
        batch_bytes=_size(tensor for tensor in vars(batch).values() if isinstance(tensor, Tensor)),
        gradient_bytes=kept.gradient_bytes,
        activation_bytes=phases.activation_bytes,
        loss_bytes=phases.loss_bytes,
        output_bytes=at_the_end - phases.accounts.live_bytes,
        step_bytes=phases.accounts.peak_bytes,
        sent_bytes={name: num for name, num in sent.items() if num},
        num_samples=num_samples,
        steps_per_epoch=steps_per_epoch,
        num_steps=None if steps_per_epoch is None else config.num_epochs * steps_per_epoch,
    )


def _build_objective(config: RunConfig, encoder: Encoder, num_samples: int | None, mode: FakeTensorMode) -> Objective:
    """A bank, which may be large, is a fake from the start; a copy of an encoder can only be made of a real one."""
    if not isinstance(config.objective, InstanceDiscriminationConfig):
        return build_run_objective(config, encoder, num_samples=num_samples or 0, device=torch.device("cpu"))
    assert num_samples is not None
    size = config.encoder.embedding_size
    with mode:
        objective = build_objective(
            config.objective, encoder=encoder, embedding_size=size, num_samples=num_samples, seed=config.seed
        )
        for name, buffer in list(objective.named_buffers()):
            objective.register_buffer(name, buffer.to(config.parameter_dtype))
    return objective


def _view_policy(config: RunConfig, policy: ViewPolicy) -> tuple[nn.Module, dict[str, nn.Module]]:
    """What makes the views on fakes; and the same by its player's name, where it learns."""
    mel = config.data.mel
    if isinstance(policy, RandomMask):
        return policy, {}
    if not isinstance(policy, Viewmaker):
        return _ReadyViews(mel), {}
    if mel is None:
        return policy, {"viewmaker": policy}
    viewmaker = Viewmaker(policy.config, image_channels=1)
    viewmaker.checkpointing = policy.checkpointing
    viewmaker.register_forward_pre_hook(lambda _, given: (_spectrograms(given[0], mel), *given[1:]))
    return viewmaker, {"viewmaker": viewmaker}


class _ReadyViews(nn.Module):
    """In the place of expert views: their memory, and nothing that makes them."""

    def __init__(self, mel: MelConfig | None) -> None:
        super().__init__()
        self._mel = mel

    def forward(self, inputs: Tensor, *_: object) -> Tensor:
        return torch.empty_like(inputs) if self._mel is None else _spectrograms(inputs, self._mel)


def _spectrograms(waveforms_BT: Tensor, mel: MelConfig) -> Tensor:
    return waveforms_BT.new_empty(len(waveforms_BT), 1, mel.num_mels, mel.num_frames)


def _make_fake(module: nn.Module, mode: FakeTensorMode) -> None:
    """Exchange a module's tensors for fakes."""
    for inner in module.modules():
        for name, parameter in inner._parameters.items():
            if parameter is not None and not isinstance(parameter, FakeTensor):
                fake = mode.from_tensor(parameter.detach())
                inner._parameters[name] = nn.Parameter(fake, requires_grad=parameter.requires_grad)
        for name, buffer in inner._buffers.items():
            if buffer is not None and not isinstance(buffer, FakeTensor):
                inner._buffers[name] = mode.from_tensor(buffer)


def _batch(config: RunConfig, size: int, shape: tuple[int, ...]) -> Batch:
    is_sound = config.data.mel is not None

    def inputs() -> Tensor:
        return torch.empty((size, *shape), dtype=torch.float32 if is_sound else torch.uint8)

    def masks() -> Tensor | None:
        return None if is_sound else torch.empty((size, *shape[1:]), dtype=torch.uint8)

    inputs_a, masks_BHW = inputs(), masks()
    per_view = config.data.overlay_draw == "per_view"
    numbers = [torch.empty(size, dtype=torch.int64) for _ in range(3)]
    return Batch(
        step=0,
        epoch=0,
        index_B=numbers[0],
        inputs_a=inputs_a,
        inputs_b=inputs() if per_view else inputs_a,
        masks_BHW=masks_BHW,
        masks_b_BHW=masks() if per_view else masks_BHW,
        label_base_B=numbers[1],
        label_overlay_B=numbers[2],
    )


class _Answers(TorchDispatchMode):
    """Answers for tensors without data: a flag is off (no step is skipped), a number 1, and a mask picks every row."""

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
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.native_batch_norm.default and args[1] is not None:
            # The fakes have statistics in the input's type, where the kernels have them in that of the weights.
            result = (result[0], *(statistics.to(args[1].dtype) for statistics in result[1:]))
        return result


class _Phases:
    """Accounts of a step, with what was alive at its turning points."""

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
        is_over, is_leaf = False, given[0].is_leaf  # a hook that held the embeddings would keep them alive

        def answered(_: Tensor) -> None:
            nonlocal is_over
            if not is_over:
                self.loss_bytes = max(self.loss_bytes, self.accounts.recent_peak_bytes - self._before_loss)
            # Of two embeddings that an encoder made, the second hears of its gradient when the first one's is through
            # the encoder already. Those of micro batches have nothing behind them.
            is_over = not is_leaf

        for embeddings in given[:2]:
            embeddings.register_hook(answered)


@contextmanager
def _cut_gradients(engines: Mapping[str, DDPEngine], world_size: int) -> Iterator[None]:
    """As ZeRO 2 and 3 do: of a gradient that is ready, a rank keeps its piece."""
    pieces: dict[nn.Parameter, Tensor] = {}

    def keep_piece(parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        parameter.grad = None
        if parameter not in pieces:
            pieces[parameter] = parameter.new_empty(-(-parameter.numel() // world_size))

    parameters = [parameter for engine in engines.values() for parameter in _trained(engine.module)]
    handles = [
        parameter.register_post_accumulate_grad_hook(keep_piece)  # type: ignore[no-untyped-call]
        for parameter in parameters
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True)
class _Kept:
    """What a rank keeps for its engines, in bytes; the gradients too."""

    engine_bytes: int
    optimizer_bytes: int
    host_bytes: int
    gradient_bytes: int


def _zero_stage(config: RunConfig) -> int:
    """-1 for DDP."""
    engine: Schema = config.engine
    return engine.zero_stage if isinstance(engine, DeepSpeedConfig) else -1


def _kept_by_engines(config: RunConfig, gradient_bytes: int, optimizer_bytes: int, *, world_size: int) -> _Kept:
    """DDP and ZeRO 0 hold the gradients in buckets as well. ZeRO 1 to 3 cut the state of the optimizer, and have a copy
    of the piece of the parameters that it steps, and a bucket. 1 has gradients and a piece of them, 2 and 3 the piece
    alone; 3 a piece of the parameters beside them.
    """
    engine: Schema = config.engine
    stage = _zero_stage(config)
    if not isinstance(engine, DeepSpeedConfig) or stage == 0:
        buckets = gradient_bytes if world_size > 1 else 0
        return _Kept(buckets, optimizer_bytes, host_bytes=0, gradient_bytes=gradient_bytes)
    piece = -(-gradient_bytes // world_size)
    told = deepspeed_dictionary(engine, global_batch_size=config.global_batch_size, num_ranks=world_size)
    bucket: int = told["zero_optimization"]["reduce_bucket_size"] * config.parameter_dtype.itemsize
    state = -(-optimizer_bytes // world_size)
    return _Kept(
        engine_bytes=bucket + (0 if engine.offload_optimizer else piece) + (0 if stage == 2 else piece),
        optimizer_bytes=0 if engine.offload_optimizer else state,
        host_bytes=state + piece if engine.offload_optimizer else 0,
        gradient_bytes=gradient_bytes if stage == 1 else piece,
    )


def _sent_by_engines(
    config: RunConfig, gradients: Mapping[str, int], *, world_size: int, backend: Backend
) -> Counter[str]:
    """Gradients, once for each backward of their player; and with ZeRO the parameters, and a number for the norm."""
    sent: Counter[str] = Counter()
    if world_size == 1:
        return sent
    stage, adversary = _zero_stage(config), config.adversary
    for player, size in gradients.items():
        alternates = player == "viewmaker" and adversary is not None and adversary.update == "alternating"
        num_times = adversary.viewmaker_steps if alternates and adversary is not None else 1
        summed = "allgather" if backend == "gloo" else "allreduce"
        by_stage = {-1: summed, 0: "allreduce", 1: "reduce", 2: "reduce", 3: "reduce_scatter"}
        sent[by_stage[stage]] += num_times * size
        if stage > 0:
            sent["allgather"] += num_times * -(-size // world_size)
            sent[summed] += num_times * 4
    return sent


def _trained(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def _state(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _size(tensors: Iterable[Tensor]) -> int:
    """The bytes of the memory under the tensors; what two of them share counts once."""
    return sum({each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in tensors}.values())
