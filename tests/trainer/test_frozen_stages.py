"""Frozen stages keep every bit, on any engine and number of ranks, and the others train as without them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from configs import resolve_recipe
from data_pipeline.core.batch import Batch
from data_pipeline.core.errors import UserError
from tests.gloo import run_ranks
from tests.old_versions import needs_fsdp
from trainer.build import Training, build_training
from trainer.distributed.collectives import rank, world_size
from trainer.models import ResNetConfig, TimmConfig, build_encoder
from trainer.models.batch_norm import share_running_statistics

CPU = torch.device("cpu")
FROZEN = ("trunk.conv1", "trunk.bn1", "trunk.layer1", "trunk.layer2")
NUM_STEPS, BATCH_SIZE = 3, 8
CASES = {
    "ddp": [],
    "checkpointing, parts": ["memory.encoder_checkpointing=2", "memory.micro_batches=2"],
    "fsdp": ["engine.kind=fsdp"],
    "ZeRO 2": ["engine.kind=deepspeed"],
    "ZeRO 3": ["engine.kind=deepspeed", "engine.zero_stage=3"],
    "moco": ["objective.kind=moco", "encoder.batch_norm=split", "encoder.batch_norm_splits=2"],
    "byol": ["objective.kind=byol", "encoder.batch_norm=local"],
}


def take_steps(settings: Sequence[str]) -> tuple[Training, dict[str, Tensor]]:
    """Return a training after some steps on this rank's part of the batches, and the encoder's state before them."""
    config = resolve_recipe(
        "debug:image", ["optimizer.learning_rate=0.1", f"global_batch_size={BATCH_SIZE}", *settings]
    )
    training = build_training(config, num_samples=BATCH_SIZE, device=CPU)
    before = {name: value.clone() for name, value in training.engines["encoder"].module_state().items()}
    for step in range(NUM_STEPS):
        step_on(training, step)
    for module in (training.modules.encoder, training.objective):
        share_running_statistics(module)
    return training, before


def step_on(training: Training, step: int) -> None:
    size = BATCH_SIZE // world_size()
    rows = slice(rank() * size, (rank() + 1) * size)
    draw = torch.Generator().manual_seed(step)
    pictures = torch.randint(0, 256, (BATCH_SIZE, 3, 32, 32), dtype=torch.uint8, generator=draw)[rows]
    batch = Batch(step, 0, torch.arange(BATCH_SIZE)[rows], pictures, pictures, None, None, {})
    training.step(batch, learning_rates=training.learning_rates(step, num_steps=NUM_STEPS))


def states(settings: Sequence[str]) -> dict[str, Any]:
    training, before = take_steps([*settings, "encoder.frozen_stages=2"])
    engine = training.engines["encoder"]
    objective: dict[str, Tensor] = training.objective.saved_state()
    return {
        "before": before,
        "after": dict(engine.module_state()),
        "optimizer": list(engine.optimizer_state()),
        "copy": {name: value for name, value in objective.items() if "trunk" in name},
    }


@pytest.mark.ranks
@pytest.mark.parametrize(
    "settings", [pytest.param(CASES[name], id=name, marks=needs_fsdp if name == "fsdp" else ()) for name in CASES]
)
def test_frozen_stages_keep_every_bit_on_two_ranks(settings: Sequence[str]) -> None:
    for found in run_ranks(states, 2, settings, timeout_s=300):
        before, after = found["before"], found["after"]
        kept = {name for name in before if torch.equal(before[name], after[name])}
        assert {name for name in before if name.startswith(FROZEN)} == kept
        trained = {name for name in before if name not in kept and "running" not in name and "tracked" not in name}
        assert set(found["optimizer"]) == {f"momentum_buffer/{name}" for name in trained}
        for name, value in found["copy"].items():
            of_encoder = name[name.index("trunk") :]
            assert torch.equal(value, before[of_encoder]) == (of_encoder in kept), name


@pytest.mark.parametrize("recipe", ["debug:image", "debug:viewmaker"])
def test_the_other_stages_train_as_in_a_loop_that_puts_the_frozen_ones_back(recipe: str) -> None:
    """The reference trains all, with the batch norms of the frozen stages in eval mode, and undoes their steps."""
    config = resolve_recipe(recipe, ["optimizer.learning_rate=0.1", f"global_batch_size={BATCH_SIZE}"])
    frozen = config.override(["encoder.frozen_stages=2"], where="a test")
    training, reference = (build_training(each, num_samples=BATCH_SIZE, device=CPU) for each in (frozen, config))
    for name in FROZEN:
        reference.modules.encoder.get_submodule(name).eval()
    first = {
        name: value.clone() for name, value in reference.modules.encoder.state_dict().items() if name.startswith(FROZEN)
    }
    for step in range(NUM_STEPS):
        for each in (training, reference):
            step_on(each, step)
        reference.modules.encoder.load_state_dict(first, strict=False)
    for ours, expected in zip(
        training.modules.trained_modules.values(), reference.modules.trained_modules.values(), strict=True
    ):
        for name, value in expected.state_dict().items():
            assert torch.equal(ours.state_dict()[name], value), name


def test_stages_of_timm_are_those_of_its_groups() -> None:
    pytest.importorskip("timm")
    options = {"img_size": 32, "patch_size": 8, "depth": 3}
    encoder = build_encoder(TimmConfig(name="vit_tiny_patch16_224", options=options, frozen_stages=1)).train()
    model: Any = encoder.trunk.as_published
    trained = {name.partition(".")[0] for name, value in model.named_parameters() if value.requires_grad}
    assert trained == {"blocks", "norm"}
    assert not any(parameter.requires_grad for parameter in model.blocks[0].parameters())
    assert [block.training for block in model.blocks] == [False, True, True]


def test_more_stages_than_there_are_are_refused() -> None:
    with pytest.raises(UserError, match=r"frozen_stages is 5, but this encoder has 4 stages after its stem"):
        build_encoder(ResNetConfig(kind="resnet10", width=2, frozen_stages=5))
    encoder = build_encoder(ResNetConfig(kind="resnet10", width=2, frozen_stages=4))
    assert not any(parameter.requires_grad for parameter in encoder.trunk.parameters())
    encoder.trunk.freeze(None)
    assert all(layer.training for layer in encoder.modules())
    assert all(parameter.requires_grad for parameter in encoder.parameters())
