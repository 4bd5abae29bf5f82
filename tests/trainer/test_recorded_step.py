"""Recorded steps against plain steps, to the last bit, with a recorder that acts on a CPU like a CUDA graph."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any, TypeVar
from unittest import mock

import pytest
import torch
from torch import Tensor

from configs import resolve_recipe
from data_pipeline.audio.log_mel import MelConfig
from data_pipeline.core.batch import Batch
from tests.small_encoder import CONVNET
from trainer.build import Training, build_training
from trainer.config import RunConfig
from trainer.objectives.objective import OBJECTIVES as KINDS
from trainer.recorded_step import CudaGraphs, RecordedStep, why_not_by_default, why_not_recorded
from trainer.step import StepOutput

T = TypeVar("T")
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
NUM_ROWS, NUM_STEPS, STEPS_OF_AN_EPOCH = 8, 10, 4  # the learning rate follows this number of steps
NUM_CLASSES = {"base": 3}
SMALL = "{kind: viewmaker, base_width: 4, num_res_blocks: 1}"
PLAIN_OBJECTIVES = [
    "nt_xent",
    "nt_xent_published",
    "info_nce",
    "split",
    "linear",
    "barlow_twins",
    "simsiam",
    "supervised",
]
PLAIN_OBJECTIVES += ["symmetric_info_nce", "dcl", "macl", "ifm", "vicreg", "joint_contrastive"]
OBJECTIVES: dict[str, list[str]] = {
    **{kind: [] for kind in PLAIN_OBJECTIVES},
    "moco": ["objective.queue_size=16"],
    "byol": ["objective.predictor.hidden_sizes=[8]"],
    "nt_xent_decoder": ["objective.decoder.hidden_sizes=[8]", "objective.target_size=4"],
    "sieve": ["encoder.early_head=1"],
}


every_case = pytest.mark.parametrize(
    ("recipe", "overrides", "num_recordings"),
    [
        *[("debug:image", [f"objective.kind={kind}", CONVNET, *more], 1) for kind, more in OBJECTIVES.items()],
        ("debug:image", ["encoder.batch_norm=split", "encoder.batch_norm_splits=2"], 1),
        ("debug:image", ["memory.micro_batches=2", "memory.encoder_checkpointing=whole", CONVNET], 1),
        ("debug:image", ["views.kind=random_mask", "objective.negatives=samples", CONVNET], 1),
        ("debug:image", ["views.kind=channel_dropout", CONVNET], 1),
        ("debug:image", ["encoder.late_pruning={}", CONVNET], 1),
        ("debug:image", ["optimizer.kind=adamw", CONVNET], 1),
        ("debug:viewmaker", ["views={kind: adversarial_mask}", CONVNET], 1),
        ("debug:viewmaker", ["adversary.freeze_step=5", CONVNET], 2),
        ("debug:viewmaker", ["adversary.update=alternating", "adversary.viewmaker_steps=2", CONVNET], 1),
        ("debug:viewmaker", ["views.mask=box", "views.dropout_rate=0.4", "memory.micro_batches=2", CONVNET], 1),
        ("debug:viewmaker", [f"views={{kind: sequence, parts: [{{kind: expert_image}}, {SMALL}]}}", CONVNET], 1),
        ("debug:viewmaker", [f"views={{kind: pair, first: {{kind: expert_image}}, second: {SMALL}}}", CONVNET], 1),
        ("debug:audio", ["views.kind=waveform"], 1),
        ("debug:audio_viewmaker", ["views.waveform={}", "views.downsample_to=16"], 1),
    ],
    ids=lambda value: ",".join(value).replace("=", "-") if isinstance(value, list) else str(value).replace(":", "-"),
)


def tensors_of(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if dataclasses.is_dataclass(value):
        return tensors_of(vars(value))
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for part in parts for tensor in tensors_of(part)]


class LikeAGraph(CudaGraphs):
    """A recorder that recomputes: recording changes no state, and a replay overwrites the recorded results."""

    def __init__(self, training: Training) -> None:
        self._training, self.num_recordings, self.num_replays = training, 0, 0

    def warm_up(self, run: Callable[[], T]) -> T:
        return run()

    def record(self, run: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        self.num_recordings += 1
        state = state_of(self._training)
        copies = [tensor.clone() for tensor in state]
        recorded = run()
        with torch.no_grad():
            for place, copy in zip(state, copies, strict=True):
                place.copy_(copy)

        def replay() -> None:
            self.num_replays += 1
            for place, tensor in zip(tensors_of(recorded), tensors_of(run()), strict=True):
                place.copy_(tensor)

        return recorded, replay


class FailsToRecord(LikeAGraph):
    """A recorder that fails as a CUDA graph does: ending the recording raises another error."""

    def record(self, run: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        try:
            raise torch.OutOfMemoryError("no memory\n  left")
        finally:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")


def state_of(training: Training) -> list[Tensor]:
    """Return all tensors that a step changes, without copies."""
    engines = training.engines.values()
    state = [tensor for engine in engines for tensor in (engine.module_state() | engine.optimizer_state()).values()]
    return state + list(training.objective.state_dict().values())


def batch_of(step: int, mel: MelConfig | None = None) -> Batch:
    draw = torch.Generator().manual_seed(step)
    pictures = torch.randint(0, 256, (NUM_ROWS, 3, 16, 16), dtype=torch.uint8, generator=draw)
    index_B = torch.randperm(64, generator=draw)[:NUM_ROWS]
    labels = {"base": torch.randint(-1, NUM_CLASSES["base"], (NUM_ROWS,), generator=draw)}
    epoch = step // STEPS_OF_AN_EPOCH
    if mel is not None:
        a, b = (torch.rand(NUM_ROWS, mel.num_points, generator=draw) - 0.5 for _ in range(2))
        return Batch(step, epoch, index_B, a, b, None, None, labels)
    masks_BHW = (pictures[:, 0] < 64).to(torch.uint8)
    return Batch(step, epoch, index_B, pictures, pictures, masks_BHW, masks_BHW, labels)


def configure(recipe: str, overrides: list[str]) -> RunConfig:
    every = [f"global_batch_size={NUM_ROWS}", "tracking.wandb=disabled", "optimizer.schedule.kind=cosine"]
    return resolve_recipe(recipe, ["precision=float64", *every, *overrides])


def device_of(training: Training) -> torch.device:
    return next(training.modules.encoder.parameters()).device


def rates_of(training: Training, step: int) -> dict[str, float]:
    """Return the learning rates, in float32, because fused kernels read a recorded rate in float32."""
    rates = training.learning_rates(step, num_steps=NUM_STEPS)
    return {name: torch.tensor(rate).item() for name, rate in rates.items()}


def train(
    training: Training, step: Callable[..., StepOutput], *, num_steps: int = NUM_STEPS
) -> list[dict[str, Tensor]]:
    """Return the metrics of each step, which are read one step later."""
    outputs = []
    mel = training.modules.config.data.mel
    for number in range(num_steps):
        rates = rates_of(training, number)
        output = step(batch_of(number, mel).to(device_of(training)), learning_rates=rates)
        outputs.append(dict(output.metrics) | {"skipped": output.skipped})
    return outputs


@pytest.mark.slow
@every_case
def test_recorded_steps_are_plain_steps(recipe: str, overrides: list[str], num_recordings: int) -> None:
    """Over two epochs, with a learning rate that changes at every step."""
    config = configure(recipe, overrides)
    plain, training = (build_training(config, num_samples=64, num_classes=NUM_CLASSES, device=CPU) for _ in range(2))
    recorder = LikeAGraph(training)
    assert not isinstance(training.step, RecordedStep)
    recorded = RecordedStep(training.step, recorder, stateful=[training.modules.encoder, training.objective])
    num_steps = 5 * num_recordings  # the fourth step of a form is recorded, and replayed
    found_steps = train(training, recorded, num_steps=num_steps)
    for found, expected in zip(found_steps, train(plain, plain.step, num_steps=num_steps), strict=True):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(found[name], value.to(found[name].dtype)), name
    assert all(torch.equal(*pair) for pair in zip(state_of(training), state_of(plain), strict=True))
    assert recorder.num_recordings == num_recordings
    assert recorder.num_replays == 2 * num_recordings


def test_a_form_that_returns_after_another_is_recorded_again() -> None:
    """Batches of other shapes or other labels come in turns of five steps."""
    config = configure("debug:image", [CONVNET])
    plain, training = (build_training(config, num_samples=64, num_classes=NUM_CLASSES, device=CPU) for _ in range(2))
    recorder = LikeAGraph(training)
    assert not isinstance(training.step, RecordedStep)
    recorded = RecordedStep(training.step, recorder, stateful=[training.modules.encoder, training.objective])
    for number in range(20):
        batch = batch_of(number)
        if number // 5 % 2:
            batch = dataclasses.replace(batch, labels={"other": batch.labels["base"]})
        if number // 5 == 3:
            batch = dataclasses.replace(batch, inputs_b=batch.inputs_a.clone())
        for trained, step in ((training, recorded), (plain, plain.step)):
            step(batch, learning_rates=rates_of(trained, number))
    assert all(torch.equal(*pair) for pair in zip(state_of(training), state_of(plain), strict=True))
    assert recorder.num_recordings == 4


def test_a_step_that_cannot_be_recorded_is_taken_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    config = configure("debug:image", [CONVNET])
    plain, training = (build_training(config, num_samples=64, device=CPU) for _ in range(2))
    assert not isinstance(training.step, RecordedStep)
    recorded = RecordedStep(training.step, FailsToRecord(training), stateful=[training.modules.encoder])
    with caplog.at_level(logging.WARNING):
        found = train(training, recorded, num_steps=5)
    assert [record.getMessage() for record in caplog.records] == [
        "the step could not be recorded, so training goes on without that: no memory left"
    ]
    for metrics, expected in zip(found, train(plain, plain.step, num_steps=5), strict=True):
        assert torch.equal(metrics["train/loss"], expected["train/loss"])


@pytest.mark.parametrize(
    ("overrides", "device", "num_ranks", "reason"),
    [
        ([], CPU, 1, "runs on cpu"),
        ([], CUDA, 2, "2 ranks"),
        (["engine.kind=deepspeed", "precision=float32"], CUDA, 1, "engine.kind=deepspeed"),
        (["optimizer.kind=lars"], CUDA, 1, "optimizer lars"),
        (["views={kind: by_epoch, policies: [{kind: expert_image}, {kind: random_mask}]}"], CUDA, 1, "by_epoch"),
        (["objective.kind=instance_discrimination"], CUDA, 1, "instance_discrimination"),
        (["objective.kind=dino"], CUDA, 1, "dino"),
        (["objective.kind=nt_xent_cycle"], CUDA, 1, "nt_xent_cycle"),
        (["objective={kind: moco, queue_size: 16}", "encoder.batch_norm=local"], CUDA, 1, "moco"),
        (["objective={kind: moco, queue_size: 16}"], CUDA, 1, None),
        ([], CUDA, 1, None),
    ],
)
def test_the_reason_is_given_if_a_step_cannot_be_recorded(
    overrides: list[str], device: torch.device, num_ranks: int, reason: str | None
) -> None:
    found = why_not_recorded(configure("debug:image", overrides), device=device, num_ranks=num_ranks)
    assert found is None if reason is None else reason in str(found)


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["precision=float32"], None),
        ([], "reads its learning rates in float32"),
        (["precision=float32", "encoder={kind: timm, name: resnet10t, embedding_size: 16}"], "code of timm takes part"),
    ],
)
def test_what_could_be_recorded_is_not_always_recorded_by_default(overrides: list[str], reason: str | None) -> None:
    config = configure("debug:image", overrides)
    assert config.compile == "auto"
    assert why_not_recorded(config, device=CUDA, num_ranks=1) is None
    found = why_not_by_default(config)
    assert found is None if reason is None else reason in str(found)


def test_every_objective_that_can_be_recorded_is_recorded_here() -> None:
    refused = {"instance_discrimination", "dino", "nt_xent_cycle", "sigreg"}  # another step is another one to record
    assert OBJECTIVES.keys() == KINDS.keys() - refused
    for kind, overrides in OBJECTIVES.items():
        config = configure("debug:image", [f"objective.kind={kind}", *overrides])
        assert why_not_recorded(config, device=CUDA, num_ranks=1) is None


def test_on_a_cpu_no_step_is_recorded_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    training = build_training(configure("debug:image", ["compile=step"]), num_samples=64, device=CPU)
    assert not isinstance(training.step, RecordedStep)
    assert "only a GPU records a step" in caplog.text


@pytest.fixture
def cuda_calls(monkeypatch: pytest.MonkeyPatch) -> mock.MagicMock:
    """Replace what a recorder calls of CUDA, and return the calls."""
    calls = mock.MagicMock()
    for name in ("Stream", "CUDAGraph", "graph", "stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(calls, name))
    return calls


def test_a_recording_does_not_stop_other_threads_from_pinning_memory(cuda_calls: mock.MagicMock) -> None:
    assert CudaGraphs().record(lambda: 3)[0] == 3
    assert cuda_calls.graph.call_args.kwargs["capture_error_mode"] == "thread_local"


def test_a_recording_that_fails_leaves_the_stream_of_training_in_use(cuda_calls: mock.MagicMock) -> None:
    """If the end of a recording raises, `torch.cuda.graph` leaves its own stream in use."""
    cuda_calls.graph.return_value.__exit__.side_effect = RuntimeError("previous error during capture")
    with pytest.raises(RuntimeError, match="previous error"):
        CudaGraphs().record(lambda: 3)
    cuda_calls.stream.assert_called_once_with(cuda_calls.current_stream.return_value)
    cuda_calls.stream.return_value.__exit__.assert_called_once()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@every_case
def test_on_a_gpu_a_graph_trains_like_plain_steps(recipe: str, overrides: list[str], num_recordings: int) -> None:
    """Kernels may sum in another order each time, so the last digits may differ."""
    plain, recorded = (
        build_training(
            configure(recipe, [*overrides, f"compile={setting}"]), num_samples=64, num_classes=NUM_CLASSES, device=CUDA
        )
        for setting in ("false", "step")
    )
    for found, expected in zip(train(recorded, recorded.step), train(plain, plain.step), strict=True):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value.to(found[name].dtype), rtol=1e-9, atol=1e-9)
    assert isinstance(recorded.step, RecordedStep)
    assert recorded.step.is_recorded
