"""Steps with compiled networks against plain steps, in float64: every objective, and both games."""

from __future__ import annotations

import pytest
import torch

from tests.trainer.test_recorded_step import CPU, NUM_CLASSES, NUM_STEPS, OBJECTIVES, batch_of, configure
from trainer.build import Training, build_training
from trainer.views.viewmaker import Viewmaker


def losses(training: Training, num_steps: int) -> list[float]:
    """Return the losses over an end of an epoch, at which no network may be compiled again."""
    return [
        training.step(batch_of(step), learning_rates=training.learning_rates(step, num_steps=NUM_STEPS))
        .metrics["train/loss"]
        .item()
        for step in range(3, 3 + num_steps)
    ]


def compiled(training: Training, backend: str) -> Training:
    training.modules.encoder.compile(backend=backend)
    if isinstance(training.modules.viewmaker, Viewmaker):
        training.modules.viewmaker.compile_layers(backend=backend)
    return training


GAMES = [
    ("debug:viewmaker", ["adversary.update=simultaneous"]),
    ("debug:viewmaker", ["adversary.update=alternating"]),
    ("debug:viewmaker", ["adversary.freeze_step=4"]),
    ("debug:viewmaker", ["views.mask=none", "views.dropout_rate=0.5", "memory.micro_batches=2"]),
    ("debug:viewmaker", ["memory.encoder_checkpointing=whole", "memory.viewmaker_checkpointing=whole"]),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "overrides"),
    [
        *[("debug:image", [f"objective.kind={kind}"]) for kind in [*OBJECTIVES, "instance_discrimination"]],
        ("debug:image", ["objective={kind: moco, queue_size: 16}"]),
        *GAMES,
    ],
    ids=str,
)
def test_compiled_networks_train_alike(recipe: str, overrides: list[str]) -> None:
    torch._dynamo.reset()
    config = configure(recipe, [*overrides, "encoder.width=2"])
    plain, training = (build_training(config, num_samples=64, num_classes=NUM_CLASSES, device=CPU) for _ in range(2))
    found = losses(compiled(training, "aot_eager"), 2)
    assert found == pytest.approx(losses(plain, 2), rel=1e-9)


@pytest.mark.process
def test_a_compiled_viewmaker_is_one_graph_that_an_epoch_does_not_change() -> None:
    """By inductor, which refuses the padding by repeated pixels (see `trainer.views.viewmaker`)."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    config = configure("debug:viewmaker", ["encoder.width=2", "views.base_width=2"])
    plain, training = (build_training(config, num_samples=64, device=CPU) for _ in range(2))
    assert isinstance(training.modules.viewmaker, Viewmaker)
    training.modules.viewmaker.compile_layers()
    assert losses(training, 2) == pytest.approx(losses(plain, 2), rel=1e-9)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]
