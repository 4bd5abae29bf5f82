"""Record a training step once, and replay it: the host then launches one graph in place of hundreds of kernels.

At the batch sizes of the papers a GPU computes faster than the host launches, so this decides the speed. The graph
holds views, forward pass, loss, backward pass and optimizers. Each kernel reads and writes the same memory at every
replay. So the inputs, the learning rates and the numbers of step and epoch are copied to fixed places first, and the
draws are functions of them.

This is the default on one GPU. Over several ranks a step has messages. NCCL could record them, but waits
forever if one rank replays and another, whose recording failed, does not. Such a step is not recorded, because nobody
could test it on two GPUs.

Guarantees: the steps are those of `trainer.step.TrainingStep`, with learning rates in float32, to the last bit if the
kernels are the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from data_pipeline.core.batch import Batch
from trainer.config import RunConfig
from trainer.liveness import stage
from trainer.own_code import own_packages
from trainer.profiling import untimed
from trainer.step import RecordedMoment, StepOutput, TrainingStep

logger = logging.getLogger(__name__)

T = TypeVar("T")
_Form: TypeAlias = tuple[Any, ...]  # what must be equal in the steps of one recording

_NUM_WARM_UP_STEPS = 3  # steps of training in which libraries choose kernels and allocate workspaces


def why_not_recorded(
    config: RunConfig, *, device: torch.device, num_ranks: int, has_random_layers: bool = False
) -> str | None:
    """Return the reason for which the steps of a run cannot be recorded, with what mends it; None if they can.

    `has_random_layers` says whether layers of the encoder draw random numbers.
    """
    if device.type != "cuda":
        return f"only a GPU records a step, but training runs on {device.type}"
    if config.views.changes_with_epoch:
        return f"views.kind={config.views.kind} is another step to record in another epoch; take other views"
    if num_ranks > 1:
        return (
            "a step with messages is not recorded, which is untested on two GPUs, but there are "
            f"{num_ranks} ranks; set compile=true instead"
        )
    if not config.engine.can_be_recorded:
        return f"a step of engine.kind={config.engine.kind} is not recorded; set engine.kind=ddp"
    if "lars" in {optimizer.kind for optimizer in config.engine_optimizers.values()}:
        return "optimizer lars has no fused kernel that a recorded step can skip; set sgd, adam or adamw"
    if has_random_layers:
        return (
            "a recorded step cannot seed the dropout or dropped paths of the encoder; set their rates to 0 "
            "(encoder.options.drop_path_rate=0 for timm), or set compile=true"
        )
    return config.objective.why_not_recorded(config)


def why_not_by_default(config: RunConfig) -> str | None:
    """Return the reason for which compile="auto" leaves out what could be recorded; None if there is none."""
    if config.precision == "float64":
        return "a recorded step reads its learning rates in float32; if that is exact enough, set compile=step"
    packages = own_packages(config) or (["timm"] if config.encoder.kind == "timm" else [])
    if packages:
        return (
            f"code of {packages[0]} takes part, and a replay repeats what Python decided and drew; if that code "
            "decides and draws nothing in Python, set compile=step"
        )
    return None


class CudaGraphs:
    """A recorder of what a function launches, as a CUDA graph."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def warm_up(self, run: Callable[[], T]) -> T:
        """Call `run`, under the same conditions as `record` will."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            result = run()
        torch.cuda.current_stream().wait_stream(self._stream)
        return result

    def record(self, run: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        """Record `run` without effect on any tensor. Return its result, and a function that fills it by a replay."""
        graph = torch.cuda.CUDAGraph()
        with (
            torch.cuda.stream(torch.cuda.current_stream()),  # torch does not leave its stream if a recording fails
            # Other threads go on: the loader pins memory, which would otherwise fail there and end the run.
            torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"),
        ):
            result = run()
        return result, graph.replay


@dataclass(frozen=True)
class _Inputs:
    """The places from which a recorded step reads."""

    batch: Batch
    moment: RecordedMoment
    learning_rates: dict[str, Tensor]

    @classmethod
    def like(cls, batch: Batch, learning_rates: Mapping[str, float]) -> _Inputs:
        device = batch.index_B.device
        return cls(
            batch=batch.copy(),
            moment=RecordedMoment(*(torch.zeros((), dtype=torch.int64, device=device) for _ in range(2))),
            learning_rates={name: torch.zeros((), device=device) for name in learning_rates},
        )

    def load(self, batch: Batch, learning_rates: Mapping[str, float]) -> None:
        for place, tensor in zip(self.batch.tensors(), batch.tensors(), strict=True):
            place.copy_(tensor)
        self.moment.step.fill_(batch.step)
        self.moment.epoch.fill_(batch.epoch)
        for name, rate in learning_rates.items():
            self.learning_rates[name].fill_(rate)


@dataclass(frozen=True)
class _Recording:
    """A recorded step: a replay writes to the tensors of `output`; `metrics` holds its metrics in one tensor."""

    output: StepOutput
    metrics: Tensor
    replay: Callable[[], None]

    def __call__(self) -> StepOutput:
        """Replay the step. Metrics and flag stay valid; the other tensors are overwritten by the next step."""
        self.replay()
        metrics = dict(zip(self.output.metrics, self.metrics.clone().unbind(), strict=True))
        return dataclasses.replace(self.output, metrics=metrics, skipped=self.output.skipped.clone())


class RecordedStep:
    """A training step that trains as `step` does for a few steps, and then records one and replays it.

    It records again when the form of the step changes: when the viewmaker freezes, or with inputs of other shapes. If
    recording fails, training goes on without it, after a warning.
    """

    def __init__(self, step: TrainingStep, recorder: CudaGraphs, *, stateful: list[nn.Module]) -> None:
        """Make a step that is not recorded yet; `stateful` are all modules whose buffers a step may replace."""
        self._step, self._recorder, self._stateful = step, recorder, stateful
        self._form: _Form = ()  # of the newest step; `_inputs` and `_recording` are of this form
        self._num_seen = 0
        self._inputs: _Inputs | None = None
        self._recording: _Recording | None = None
        self._can_record = True

    @property
    def is_recorded(self) -> bool:
        """Return whether a step is recorded, so that steps of its form are replays."""
        return self._recording is not None

    def __call__(self, batch: Batch, *, learning_rates: Mapping[str, float]) -> StepOutput:
        """Train on a batch, as `TrainingStep` does. Views and embeddings are valid until the next step."""
        if not self._can_record:
            return self._step(batch, learning_rates=learning_rates)
        is_frozen = self._step.viewmaker_is_frozen(batch)
        form = (is_frozen, *batch.labels, *(tensor.shape for tensor in batch.tensors()))
        if self._inputs is None or form != self._form:
            self._form, self._inputs, self._num_seen = form, _Inputs.like(batch, learning_rates), 0
            self._recording = None  # frees its memory: a form seldom returns
        inputs = self._inputs
        inputs.load(batch, learning_rates)

        def run() -> StepOutput:
            with _buffers_in_place(self._stateful), untimed():
                return self._step.run(
                    inputs.batch, inputs.learning_rates, viewmaker_is_frozen=is_frozen, moment=inputs.moment
                )

        self._num_seen += 1
        if self._num_seen <= _NUM_WARM_UP_STEPS:
            return self._recorder.warm_up(run)
        if self._recording is None:
            self._recording = self._record(run)
        if self._recording is None:
            return self._step(batch, learning_rates=learning_rates)
        with stage("replay"):
            return self._recording()

    def _record(self, run: Callable[[], StepOutput]) -> _Recording | None:
        """Record the step. Return None, after a warning, if that is not possible."""

        def with_metrics() -> tuple[StepOutput, Tensor]:
            output = run()
            return output, torch.stack([value.double() for value in output.metrics.values()])

        try:
            (output, metrics), replay = self._recorder.record(with_metrics)
        except RuntimeError as error:  # also of a GPU without memory left for the graph
            reason = " ".join(str(_first_error(error)).split())[:200]
            logger.warning("the step could not be recorded, so training goes on without that: %s", reason)
            self._can_record = False
            self._step.clear_gradients()
            return None
        return _Recording(output, metrics, replay)


def _first_error(error: RuntimeError) -> RuntimeError:
    """Return the error that came first. After it, CUDA refuses to end the recording by an error that says no more."""
    while isinstance(error.__context__, RuntimeError):
        error = error.__context__
    return error


@contextlib.contextmanager
def _buffers_in_place(modules: list[nn.Module]) -> Iterator[None]:
    """After the block, write each buffer that was replaced inside to its old place (queues and banks are replaced)."""
    places = [
        (owner, name, buffer)
        for module in modules
        for owner in module.modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        replaced = []
        for owner, name, place in places:
            now = owner._buffers[name]
            if now is not None and now is not place:
                owner._buffers[name] = place
                replaced.append((place, now))
        for place, now in replaced:  # last, because a copy fails in a recording that failed
            place.copy_(now)
