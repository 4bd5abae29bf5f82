"""Steps with compiled networks against plain steps, in float64: all ways to encode, both games, every kind of views.

The cases share what the compiler has made, so that only the first case of each network takes seconds. Most of them run
the traced network as it is, which shows what tracing could break. Differentiating it takes twice as long as tracing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager

from tests.old_versions import needs_compiled_checkpoints
from tests.small_encoder import CONVNET
from tests.trainer.test_recorded_step import (
    CPU,
    NUM_CLASSES,
    NUM_STEPS,
    SMALL,
    STEPS_OF_AN_EPOCH,
    LikeAGraph,
    batch_of,
    configure,
    train,
)
from trainer.build import Training, build_training
from trainer.modules import learned_part
from trainer.recorded_step import RecordedStep
from trainer.views.policy import VIEWS
from trainer.views.viewmaker import upsample_convolve


def losses(training: Training, num_steps: int) -> list[float]:
    """Return the losses over an end of an epoch, at which no network may be compiled again."""
    return [
        training.step(batch_of(step), learning_rates=training.learning_rates(step, num_steps=NUM_STEPS))
        .metrics["train/loss"]
        .item()
        for step in range(3, 3 + num_steps)
    ]


class CountingBackend:
    """A backend that runs what the compiler has traced, and counts how often it traces and runs.

    If `differentiates`, the compiler also makes the backward pass of what it has traced.
    """

    def __init__(self, *, differentiates: bool = False) -> None:
        self._differentiates = differentiates
        self.num_graphs = self.num_runs = 0

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        self.num_graphs += 1
        traced = aot_eager(graph, inputs) if self._differentiates else graph.forward

        def run(*values: Any) -> Any:
            self.num_runs += 1
            return traced(*values)

        return run


@pytest.fixture(scope="module")
def backends() -> Iterator[dict[bool, CountingBackend]]:
    """Return the backends of all cases, for a compiler that has seen nothing yet and may not give up in silence."""
    torch._dynamo.reset()
    config = torch._dynamo.config  # the limit is for the networks of all cases
    with config.patch(recompile_limit=32, fail_on_recompile_limit_hit=True, automatic_dynamic_shapes=False):
        yield {differentiates: CountingBackend(differentiates=differentiates) for differentiates in (False, True)}
    torch._dynamo.reset()


def compiled(training: Training, backend: CountingBackend) -> Training:
    training.modules.encoder.compile(backend=backend)
    if (viewmaker := training.modules.viewmaker) is not None:
        # As `trainer.build.assemble` does, and the network must be one graph.
        learned = learned_part(viewmaker)
        getattr(learned, "compile_layers", learned.compile)(backend=backend, fullgraph=True)
    return training


CHECKPOINTED = "memory.encoder_checkpointing=whole"
GAMES: list[list[str]] = [
    ["adversary.update=simultaneous"],
    ["adversary.update=alternating"],
    ["adversary.freeze_step=4"],
    ["objective.kind=byol"],
    ["views.mask=none", "views.dropout_rate=0.5", "memory.micro_batches=2"],
    [CHECKPOINTED, "memory.viewmaker_checkpointing=whole"],
    [f"views={{kind: sequence, parts: [{{kind: expert_image}}, {SMALL}]}}"],
    [f"views={{kind: pair, first: {{kind: expert_image}}, second: {SMALL}}}"],
    [f"views={{kind: by_epoch, policies: [{{kind: expert_image}}, {SMALL}]}}"],
]
RESNET_OF_TWO_SIZES = [
    "encoder.width=2",
    "views={kind: multi_crop, num_local: 2, local_size: 8}",
    "objective={kind: dino, num_prototypes: 8}",
]
CASES = [  # objectives are not compiled
    ("debug:image", RESNET_OF_TWO_SIZES),
    *(("debug:image", [f"views.kind={kind}", CONVNET]) for kind in ("expert_image", "random_mask", "channel_dropout")),
    *(("debug:viewmaker", [*overrides, CONVNET]) for overrides in GAMES),
    ("debug:viewmaker", ["views={kind: adversarial_mask}", CONVNET]),
    ("debug:image", [CONVNET, "objective.kind=sieve", "encoder.early_head=1"]),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "overrides", "differentiates"),
    [
        *(
            pytest.param(*case, False, marks=needs_compiled_checkpoints if CHECKPOINTED in case[1] else ())
            for case in CASES
        ),
        ("debug:viewmaker", [CONVNET], True),
    ],
    ids=str,
)
def test_compiled_networks_train_alike(
    recipe: str, overrides: list[str], differentiates: bool, backends: dict[bool, CountingBackend]
) -> None:
    config, backend = configure(recipe, overrides), backends[differentiates]
    plain, training = (build_training(config, num_samples=64, num_classes=NUM_CLASSES, device=CPU) for _ in range(2))
    num_before = backend.num_runs
    found = losses(compiled(training, backend), 2)
    assert backend.num_runs >= num_before + 2  # once in each step
    assert found == pytest.approx(losses(plain, 2), rel=1e-9)


@pytest.mark.slow
def test_a_step_with_compiled_networks_is_recorded_as_it_is(backends: dict[bool, CountingBackend]) -> None:
    """Nothing is compiled while the step is recorded, which a CUDA graph could not hold."""
    backend = backends[False]

    class CountsGraphs(LikeAGraph):
        def record(self, run: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
            before = backend.num_graphs
            recorded = super().record(run)
            assert backend.num_graphs == before
            return recorded

    config = configure("debug:viewmaker", [CONVNET])
    plain, training = (build_training(config, num_samples=64, num_classes=NUM_CLASSES, device=CPU) for _ in range(2))
    compiled(training, backend)
    assert not isinstance(training.step, RecordedStep)
    recorder, stateful = CountsGraphs(training), [*training.modules.trained_modules.values(), training.objective]
    recorded = RecordedStep(training.step, recorder, stateful=stateful)
    num_before = backend.num_runs
    found, expected = train(training, recorded, num_steps=4), train(plain, plain.step, num_steps=4)
    assert recorder.num_replays == 1
    assert backend.num_runs >= num_before + 4
    for metrics, others in zip(found, expected, strict=True):
        torch.testing.assert_close(metrics["train/loss"], others["train/loss"], rtol=1e-9, atol=0)


def test_every_kind_of_views_of_pictures_is_compiled() -> None:
    tried = " ".join(override for _, overrides in CASES for override in overrides)
    assert [kind for kind in VIEWS if kind not in tried] == ["spectral", "waveform"]


BY_EPOCH = f"views={{kind: by_epoch, policies: [{{kind: expert_image}}, {SMALL}, {{kind: random_mask}}]}}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "compiles_in", "patient_in"),
    [(BY_EPOCH, {2, 4}, {4, 8, 12}), ("adversary.freeze_step=3", {2, 3}, {3})],
    ids=str,
)
def test_networks_are_compiled_again_in_steps_for_which_the_watchdog_has_patience(
    override: str, compiles_in: set[int], patient_in: set[int]
) -> None:
    """Compiling gives no sign of life. Random masks come last: the encoder sees them as it sees the expert views."""
    torch._dynamo.reset()
    config = configure("debug:viewmaker", [override, CONVNET, "num_epochs=3", "watchdog.enabled=false"])
    training = build_training(config, num_samples=64, num_classes=NUM_CLASSES, device=CPU)
    backend = CountingBackend()
    compiled(training, backend)
    graphs = {}
    for step in range(2, 14):
        before = backend.num_graphs
        training.step(batch_of(step), learning_rates=training.learning_rates(step, num_steps=20))
        graphs[step] = backend.num_graphs - before
    assert {step for step, number in graphs.items() if number} == compiles_in
    may_compile = config.model_copy(update={"compile": True}).may_compile_again
    assert {step for step in range(2, 14) if may_compile(step, steps_per_epoch=STEPS_OF_AN_EPOCH)} == patient_in
    assert patient_in >= compiles_in - {2}  # the first step of a start has its own patience


@pytest.mark.process
def test_inductor_compiles_the_upsampling_of_the_viewmaker() -> None:
    """It refuses the backward pass of torch's padding by repeated pixels (see `trainer.views.viewmaker`)."""
    torch._dynamo.reset()
    inputs = [torch.randn(3, 4, 8, 8).double().requires_grad_(), torch.randn(2, 4, 3, 3).double().requires_grad_()]
    # Without vector instructions, for which the C++ compiler takes twice as long.
    functions = upsample_convolve, torch.compile(upsample_convolve, fullgraph=True, options={"cpp.simdlen": 1})
    plain, compiled = ([y, *torch.autograd.grad(y.square().sum(), inputs)] for y in (f(*inputs) for f in functions))
    torch.testing.assert_close(compiled, plain)
