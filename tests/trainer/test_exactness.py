"""Every objective on four ranks and in one process: with the loss whole and nothing recomputed, and with the loss in
chunks and micro batches whose activations are recomputed. Loss, every gradient and every buffer are those of one
process with the loss in one piece and nothing recomputed. All is in float64, each rank with its own part of the batch.

Batch norm sees one micro batch at a time, which changes the result. So the encoder of these steps has no batch norm.
The steps on two ranks have it. Most of them have both players, and FSDP cuts some encoders. They are compared with one
process that has as many micro batches, and no chunks, cuts or recomputed activations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from configs import resolve_recipe
from data_pipeline.core.batch import Batch
from tests.gloo import run_ranks
from tests.old_versions import HAS_FSDP
from tests.small_encoder import CONVNET
from trainer.build import build_training
from trainer.config import RunConfig
from trainer.distributed.collectives import all_reduce_mean_scalars, rank, world_size
from trainer.distributed.replicas import first_difference
from trainer.models.batch_norm import share_running_statistics

CPU = torch.device("cpu")
BATCH_SIZE = 8
OBJECTIVES = {
    "nt_xent": [],
    "nt_xent_published": [],
    "info_nce": [],
    "split": [],
    "linear": [],
    "barlow_twins": ["encoder.embedding_size=5"],  # of which four ranks have 1, 1, 1 and 2
    "moco": ["objective.queue_size=16"],
    "simsiam": [],
    "instance_discrimination": ["objective.num_negatives=5"],
    "symmetric_info_nce": [],
    "dcl": [],
    "macl": [],
    "ifm": [],
    "nt_xent_cycle": ["objective.period_epochs=3"],
    "nt_xent_decoder": ["objective.decoder.hidden_sizes=[8]", "objective.target_size=4"],
    "vicreg": ["encoder.embedding_size=2"],  # of which two ranks have none
    "sieve": ["encoder.early_head=1"],
    "sigreg": ["objective.num_projections=9"],
    "byol": ["objective.predictor.hidden_sizes=[8]"],
    "dino": ["objective.num_prototypes=12"],
    "supervised": ["objective.label=digit"],
    "joint_contrastive": ["objective.label=digit"],
}
CHUNKED = {"sieve", "nt_xent", "nt_xent_published", "nt_xent_cycle", "nt_xent_decoder"}
CHUNKED |= {"split", "symmetric_info_nce", "dcl", "macl", "ifm", "joint_contrastive"}
SMALL = "{kind: viewmaker, base_width: 4, num_res_blocks: 1}"
TRANSFORMER = (
    "encoder={kind: timm, name: vit_tiny_patch16_224, embedding_size: 16, "
    "mean: [0.5, 0.5, 0.5], std: [0.25, 0.25, 0.25], "
    "options: {img_size: 16, patch_size: 8, depth: 1, embed_dim: 16, num_heads: 2}}"
)
WHOLE = ["memory.micro_batches=1"]


def in_parts(objective: str, *, checkpointing: str) -> list[str]:
    """Return the settings with which all is done that can be: chunks, micro batches, recomputed activations."""
    chunks = ["objective.chunk_size=3"] if objective in CHUNKED else []
    return [*chunks, "memory.micro_batches=2", f"memory.encoder_checkpointing={checkpointing}"]


def configure(objective: str, overrides: list[str], recipe: str = "debug:viewmaker") -> RunConfig:
    kind = [f"objective.kind={objective}", *OBJECTIVES[objective]]
    every = ["precision=float64", f"global_batch_size={BATCH_SIZE}"]
    return resolve_recipe(recipe, [*kind, *every, *overrides])


def configure_game(objective: str, overrides: list[str]) -> RunConfig:
    return configure(objective, ["adversary.weight=0.5", "memory.viewmaker_checkpointing=2", *overrides])


def configure_multi_crop(objective: str, overrides: list[str]) -> RunConfig:
    crops = "views={kind: multi_crop, num_local: 3, local_size: 8}"
    return configure(objective, [crops, *overrides], "debug:image")


# Encoders, views and games whose blocks, or whose trunk, pass twice before one backward pass: how to configure each.
OTHERS: dict[str, tuple[Callable[[str, list[str]], RunConfig], str, list[str]]] = {
    "resnet": (configure_game, "nt_xent", []),
    "queue": (configure_game, "moco", [CONVNET]),
    "teacher": (configure_game, "byol", [CONVNET]),
    "in_turns": (configure_game, "simsiam", [CONVNET, "adversary.update=alternating"]),
    "crop_then_viewmaker": (
        configure_game,
        "nt_xent",
        [CONVNET, f"views={{kind: sequence, parts: [{{kind: expert_image}}, {SMALL}]}}"],
    ),
    "expert_against_viewmaker": (
        configure_game,
        "nt_xent",
        [CONVNET, f"views={{kind: pair, first: {{kind: expert_image}}, second: {SMALL}}}"],
    ),
    "viewmaker_then_lost_channels": (
        configure_game,
        "nt_xent",
        [CONVNET, f"views={{kind: sequence, parts: [{SMALL}, {{kind: channel_dropout}}]}}"],
    ),
    "masks_by_an_adversary": (
        configure_game,
        "nt_xent",
        [CONVNET, "views={kind: pair, first: {kind: expert_image}, second: {kind: adversarial_mask}}"],
    ),
    "masks_in_turns": (
        configure_game,
        "nt_xent",
        [CONVNET, "views={kind: adversarial_mask}", "adversary.update=alternating"],
    ),
    "pruned_late": (
        configure_game,
        "nt_xent",
        ["adversary.update=alternating", "encoder.late_pruning={blocks: 2, share: 0.4}"],
    ),
    "transformer_pruned_late": (configure_game, "nt_xent", [TRANSFORMER, "encoder.late_pruning={}"]),
    "transformer": (configure_game, "nt_xent", [TRANSFORMER]),
    "split_batch_norm": (configure_game, "nt_xent", ["encoder.batch_norm=split", "encoder.batch_norm_splits=2"]),
    "sieve": (configure_game, "sieve", ["encoder.early_head=2"]),
    "samples_as_negatives": (configure_game, "nt_xent", [CONVNET, "objective.negatives=samples"]),
    "two_sizes": (configure_multi_crop, "dino", []),
    "two_sizes_by_label": (configure_multi_crop, "supervised", []),
    "two_sizes_of_normal_embeddings": (configure_multi_crop, "sigreg", []),
}
CUT = ["resnet", "in_turns", "transformer", "split_batch_norm", "two_sizes", "pruned_late", "sieve"] if HAS_FSDP else []
ENGINES = [(name, "fsdp" if name in CUT else "ddp") for name in OTHERS]


def own_part() -> Batch:
    """Return this rank's part of the batch; all its pictures differ."""
    size = BATCH_SIZE // world_size()
    rows = slice(rank() * size, (rank() + 1) * size)
    draw = torch.Generator().manual_seed(5)
    pictures = torch.randint(0, 256, (BATCH_SIZE, 3, 16, 16), dtype=torch.uint8, generator=draw)[rows]
    index_B = torch.randperm(BATCH_SIZE, generator=draw)[rows]
    labels = {"digit": torch.tensor([1, 0, 2, -1, -1, -1, 2, -1])[rows]}  # with four ranks, one has none
    return Batch(3, 1, index_B, pictures, pictures, None, None, labels)


def one_step(config: RunConfig, device: torch.device = CPU, batch: Batch | None = None) -> dict[str, torch.Tensor]:
    """Return the loss, every gradient, every buffer and every frozen parameter after one step on this rank's part."""
    batch = own_part() if batch is None else batch
    classes = {"digit": 3}
    training = build_training(config, num_samples=BATCH_SIZE, num_classes=classes, device=device)
    engines = training.engines
    found: dict[str, torch.Tensor] = {}

    def note_gradients(engine: str, **_: object) -> None:
        for name, parameter in engines[engine].module.named_parameters():
            if parameter.requires_grad:
                gradient: Any = parameter.grad
                assert gradient is not None, name
                is_cut = hasattr(gradient, "full_tensor")
                found[f"{engine}/{name}"] = gradient.full_tensor() if is_cut else gradient.clone()

    for name, engine in engines.items():
        engine.step = functools.partial(note_gradients, name)  # type: ignore[method-assign]
    output = training.step(batch.to(device), learning_rates=dict.fromkeys(engines, 0.0))
    assert not output.skipped
    share_running_statistics(training.modules.encoder)  # of split batch norm, as before each save
    found["loss"] = torch.tensor(all_reduce_mean_scalars({"": output.metrics["train/loss"]})[""])
    found |= {f"encoder/{name}": buffer.clone() for name, buffer in training.modules.encoder.named_buffers()}
    found |= {f"objective state/{name}": tensor.clone() for name, tensor in training.objective.saved_state().items()}
    assert first_difference({"step": found}) is None  # to the bit, which a checkpoint asks for
    return {name: tensor.cpu() for name, tensor in found.items()}


def steps(configs: list[RunConfig], device: torch.device = CPU) -> list[dict[str, torch.Tensor]]:
    return [one_step(config, device) for config in configs]


def assert_equal(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], cell: object) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        # A gradient that is zero in exact arithmetic comes out as rounding of what its neighbours are made of.
        torch.testing.assert_close(found[name], tensor, rtol=1e-8, atol=1e-11, msg=f"{name}, {cell}")


def configs_of(objective: str) -> list[RunConfig]:
    """Return a step of an encoder without batch norm, whole and in parts."""
    settings = WHOLE, in_parts(objective, checkpointing="whole")
    return [configure(objective, [TRANSFORMER, *cell], "debug:image") for cell in settings]


@functools.cache
def whole(objective: str) -> dict[str, torch.Tensor]:
    return one_step(configs_of(objective)[0])


@functools.cache
def of_four_ranks() -> list[list[dict[str, torch.Tensor]]]:
    """Return the results of each rank, from one call: to start ranks takes longer than a step."""
    return run_ranks(steps, 4, [config for objective in OBJECTIVES for config in configs_of(objective)], timeout_s=600)


@pytest.mark.ranks
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_four_ranks_are_one_process(objective: str) -> None:
    number = 2 * list(OBJECTIVES).index(objective)
    for of_rank in of_four_ranks():
        for cell, found in zip(("whole", "in parts"), of_rank[number : number + 2], strict=True):
            assert_equal(found, whole(objective), cell)


@pytest.mark.slow
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_chunks_micro_batches_and_recomputed_activations_change_nothing(objective: str) -> None:
    assert_equal(one_step(configs_of(objective)[1]), whole(objective), objective)


@functools.cache
def of_two_ranks() -> list[list[dict[str, torch.Tensor]]]:
    configs = []
    for name, engine in ENGINES:
        build, objective, overrides = OTHERS[name]
        parts = in_parts(objective, checkpointing="whole" if name.startswith("transformer") else "2")
        configs.append(build(objective, [*overrides, *parts, f"engine.kind={engine}"]))
    return run_ranks(steps, 2, configs, timeout_s=600)


@pytest.mark.ranks
@pytest.mark.parametrize(("name", "engine"), ENGINES)
def test_two_ranks_with_batch_norm_games_and_engines_are_one_process(name: str, engine: str) -> None:
    """With FSDP, the encoder is in pieces."""
    build, objective, overrides = OTHERS[name]
    expected = one_step(build(objective, [*overrides, "memory.micro_batches=2"]))
    assert build is not configure_game or any(name.startswith("viewmaker/") for name in expected)
    for of_rank in of_two_ranks():
        assert_equal(of_rank[ENGINES.index((name, engine))], expected, engine)


@pytest.mark.parametrize("objective", sorted(OBJECTIVES.keys() - CHUNKED))
def test_where_a_chunked_loss_is_meaningless_the_config_says_so(objective: str) -> None:
    """These objectives have no matrix of similarities over the batch that could be cut into chunks."""
    with pytest.raises(Exception, match="chunk_size"):
        configure(objective, ["objective.chunk_size=3"])
