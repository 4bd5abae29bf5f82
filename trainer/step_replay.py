"""Repeats a skipped step in one process, and finds where its first inf or nan comes from.

Comes in: a run directory with a record of the step (`trainer.fault_tolerance.nonfinite`) and the shards its config
names. Goes out: lines that name the first module with an output that is not finite, and the samples. The whole global
batch goes through the run's own training step in this one process. What may never happen: a change to the run.

Shapes: B samples of the global batch, D embedding size.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from data_pipeline.core.errors import UserError
from data_pipeline.core.sample import Batch
from data_pipeline.loading.stream import Stream
from trainer.build import DDPConfig, build_engines
from trainer.config import RunConfig, read_config
from trainer.fault_tolerance.nonfinite import NonFiniteRecord
from trainer.modules import build_players, build_run_objective
from trainer.normalization import recorded_normalization
from trainer.optim.loss_scale import LossScale
from trainer.run_dir import RunDir
from trainer.step import StepOutput, TrainingStep

_NUM_SAMPLES_LISTED = 10
_NUM_PARAMETERS_LISTED = 3


@dataclass(frozen=True)
class Finding:
    """A tensor that is not finite, the first that was seen.

    Attributes:
        what: such as "the output of encoder.trunk.conv1 (Conv2d)".
        share: of its values, above 0, up to 1.
        given: what the module was given, in words; empty where that does not matter.
        rows: the places in the batch of the samples whose values are not finite there, in this call of the module or
            a later one; empty where rows are no samples.
    """

    what: str
    share: float
    given: str
    rows: tuple[int, ...]


@dataclass(frozen=True)
class Length:
    """The length of a gradient, and its largest number without its sign, both computed in float64."""

    length: float
    largest: float


@dataclass(frozen=True)
class Replay:
    """The result of a step that was replayed.

    Attributes:
        bad_parameters: those with values that were not finite before the step, each with how many.
        too_long: engines whose gradient is finite, but longer than float32 can say.
        lengths: of the gradient of each parameter.
    """

    batch: Batch
    output: StepOutput
    bad_parameters: Mapping[str, int]
    forward: Finding | None
    backward: Finding | None
    too_long: Sequence[str]
    lengths: Mapping[str, Length]


class Inspector:
    """Looks at what goes into and out of every module, going forward and back, until something is not finite.

    A module's output is seen before that of the one which holds it, so what is found is the innermost. What a plain
    function makes between two modules is found as the input of the second.
    """

    def __init__(self, modules: Mapping[str, nn.Module], config: RunConfig, *, batch_size: int) -> None:
        self.forward: Finding | None = None
        self.backward: Finding | None = None
        self.lengths: dict[str, Length] = {}
        self._batch_size = batch_size
        self._num_parts = config.memory.micro_batches
        self._calls: Counter[str] = Counter()
        self._last_finite = ""
        for player, whole in modules.items():
            for name, module in whole.named_modules(prefix=player):
                label = f"{name} ({type(module).__name__})"
                module.register_forward_pre_hook(partial(self._before, label))
                module.register_forward_hook(partial(self._after, label))
            for name, parameter in whole.named_parameters(prefix=player):
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
        if (found is None or found.what == what) and not _is_finite(tensor):
            rows = self._rows(tensor, label)
            if found is None:
                self.forward = Finding(what, _bad_share(tensor), given(), rows)
            else:
                self.forward = replace(found, rows=tuple(sorted({*found.rows, *rows})))

    def _accumulated(self, name: str, parameter: Tensor) -> None:
        """Look at the gradient of a parameter with all that was added to it so far."""
        assert parameter.grad is not None
        self._gradient(f"the gradient of {name}", parameter.grad)
        gradient = parameter.grad.detach().double()
        self.lengths[name] = Length(float(gradient.norm()), float(gradient.abs().max()))

    def _gradient(self, what: str, gradient: Tensor) -> None:
        if self.backward is not None:
            return
        if _is_finite(gradient):
            self._last_finite = what
            return
        given = f"the last before it that was finite is {self._last_finite}" if self._last_finite else ""
        self.backward = Finding(what, _bad_share(gradient), given, ())

    def _rows(self, tensor: Tensor, label: str) -> tuple[int, ...]:
        """The places in the batch of the rows that are not finite."""
        num_rows = tensor.shape[0] if tensor.dim() > 1 else 0
        size = self._batch_size // self._num_parts
        if num_rows not in {size, 2 * size}:
            return ()
        bad = (~tensor.detach().isfinite()).flatten(1).any(1).nonzero().flatten().tolist()
        calls_a_part = 2 * size // num_rows  # of a view each, or of both
        part = (self._calls[label] - 1) // calls_a_part % self._num_parts
        return tuple(sorted({part + self._num_parts * (row % size) for row in bad}))


def replay(
    run_dir: RunDir,
    record: NonFiniteRecord,
    states: Mapping[str, Mapping[str, Tensor]],
    *,
    device: str,
    allow_pipe: bool = False,
) -> Replay:
    """The recorded step in one process. Raises `UserError` where the dataset or the state are not those of the run."""
    config = read_config(run_dir.config, allow_pipe=allow_pipe)
    config = config.model_copy(update={"engine": DDPConfig()})  # one process needs no more
    where = torch.device(device)
    stream = Stream(
        config.data.train_dir,
        read=config.data.model_copy(update={"placement": "stream", "num_workers": 0}),
        global_batch_size=config.global_batch_size,
        seed=record.seed,
        rank=0,
        world_size=1,
        start_step=record.step,
        end_step=record.step + 1,
        device=where,
        overlay_draw=config.data.overlay_draw,
    )
    batch = next(iter(stream))
    if batch.keys != record.keys or record.train_manifest_sha256 not in {None, stream.manifest.sha256}:
        raise UserError(
            f"{config.data.train_dir} is not the dataset from which step {record.step} was recorded, but another one; "
            "put that back"
        )
    players = build_players(config, normalization=recorded_normalization(run_dir, config))
    players = players.to(where, config.parameter_dtype)
    objective = build_run_objective(config, players.encoder, num_samples=stream.manifest.num_samples, device=where)
    modules = dict(players.trained_modules)
    try:
        for name, module in modules.items():
            module.load_state_dict(states[name])
        objective.load_saved(states["objective"])
    except (KeyError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"the recorded state of step {record.step} does not fit the config ({reason})") from None
    engines = build_engines(config, modules, objective)
    training_step = TrainingStep(config, engines=engines, view_policy=players.view_policy, objective=objective)
    training_step.loss_scale = LossScale(enabled=False, device=where)  # a search for the scale overflows by design
    watched = {"views": players.view_policy} | modules | {"objective": objective}
    if "viewmaker" in modules:
        del watched["views"]
    bad_parameters = {
        f"{player}.{name}": int((~tensor.isfinite()).sum())
        for player, module in watched.items()
        for name, tensor in module.state_dict().items()
        if not _is_finite(tensor)
    }
    inspector = Inspector(watched, config, batch_size=len(batch))
    output = training_step(batch, learning_rates=record.learning_rates)
    too_long = [
        name
        for name in engines
        if inspector.backward is None and not bool(output.metrics[f"train/{name}_gradient_norm"].isfinite())
    ]
    return Replay(
        batch, output, bad_parameters, inspector.forward, inspector.backward, too_long, dict(inspector.lengths)
    )


def explain(record: NonFiniteRecord, result: Replay, *, device: str) -> Iterator[str]:
    """The result in lines."""
    bad_ranks = record.bad_ranks
    who = (
        f"the loss of rank{'s' if len(bad_ranks) > 1 else ''} {', '.join(map(str, bad_ranks))} was not finite"
        if bad_ranks
        else "every loss was finite, a gradient or its length was not"
    )
    yield (
        f"step {record.step}, epoch {record.epoch}, seed {record.seed}: {len(record.keys)} samples on "
        f"{len(record.ranks)} rank{'s' if len(record.ranks) > 1 else ''}, precision {record.precision}; {who}"
    )
    if record.state_step != record.step:
        yield (
            f"the state is a later one (after {record.state_step} steps at the most): the run had gone on before it "
            "knew, or the encoder had taken its step before the viewmaker's was skipped"
        )
    for name, count in result.bad_parameters.items():
        yield f"before the step, {name} held {count} value{'s' if count > 1 else ''} that {_are(count)} not finite"
    for engine in result.too_long:
        yield from _too_long(engine, result.lengths)
    if result.forward is None and result.backward is None and not result.too_long:
        loss = float(result.output.metrics["train/loss"])
        yield f"here, on {device} in one process, everything is finite: loss {loss:.6g}"
        yield (
            "that may be because the run had other kernels (a GPU), another number of ranks, whose sums round "
            "differently, another loss scale (float16), or had gone on by a step"
        )
    for going, finding in (("forward", result.forward), ("back", result.backward)):
        if finding is not None:
            yield f"going {going}, the first that is not finite: {finding.what}, {finding.share:.3g} of its values"
            if finding.given:
                yield f"  {finding.given}"
    yield from _samples(result)


def _too_long(engine: str, lengths: Mapping[str, Length]) -> Iterator[str]:
    """Name the parameters that make a gradient too long for float32."""
    own = {name: length for name, length in lengths.items() if name.partition(".")[0] == engine}
    whole = math.hypot(*(length.length for length in own.values()))
    yield (
        f"going back, every gradient is finite, but the length of the whole gradient of {engine} is {whole:.4g}, and "
        f"float32 ends at {torch.finfo(torch.float32).max:.4g} for it and for the sum of squares that it comes from"
    )
    longest = sorted(own, key=lambda name: own[name].length, reverse=True)[:_NUM_PARAMETERS_LISTED]
    for name in longest:
        yield f"  the gradient of {name} has length {own[name].length:.4g}, its largest number {own[name].largest:.4g}"


def _samples(result: Replay) -> Iterator[str]:
    """The samples that are concerned, or else those with the largest embeddings."""
    keys = result.batch.keys
    norm_a_B, norm_b_B = (z_BD.double().norm(dim=1) for z_BD in (result.output.z_a_BD, result.output.z_b_BD))
    rows = list(result.forward.rows) if result.forward is not None else []
    if not rows:
        rows = (~(norm_a_B + norm_b_B).isfinite()).nonzero().flatten().tolist()
    if rows:
        every = "all " if len(rows) == len(keys) else ""
        yield f"samples concerned: {every}{len(rows)} of {len(keys)}"
    else:
        yield f"samples: {len(keys)}, of which these have the largest embeddings"
        rows = torch.maximum(norm_a_B, norm_b_B).argsort(descending=True).tolist()
    yield "  key       length of embedding a, b"
    for row in rows[:_NUM_SAMPLES_LISTED]:
        yield f"  {keys[row]}  {float(norm_a_B[row]):.4g}, {float(norm_b_B[row]):.4g}"
    if len(rows) > _NUM_SAMPLES_LISTED:
        yield f"  and {len(rows) - _NUM_SAMPLES_LISTED} more"


def _are(count: int) -> str:
    return "are" if count > 1 else "is"


def _tensors(value: Any) -> Iterator[Tensor]:
    """All tensors of floating point in an argument or result of a module."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for part in value:
            yield from _tensors(part)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _tensors(getattr(value, field.name))


def _is_finite(tensor: Tensor) -> bool:
    return bool(tensor.detach().isfinite().all())


def _bad_share(tensor: Tensor) -> float:
    return float((~tensor.detach().isfinite()).double().mean())


def _describe(tensor: Tensor) -> str:
    """Its range, and how much of it is not finite."""
    finite = tensor.detach()[tensor.detach().isfinite()]
    lies = (
        f"lies in [{float(finite.min()):.4g}, {float(finite.max()):.4g}]" if finite.numel() else "has no finite value"
    )
    bad = tensor.numel() - finite.numel()
    return lies + (f" but for {bad} of {tensor.numel()} values" if bad and finite.numel() else "")
