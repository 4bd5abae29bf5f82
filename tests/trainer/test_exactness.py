"""Every objective on four ranks and in one process: with the loss whole and nothing recomputed, and with the loss in
chunks and micro batches whose activations are recomputed. Loss, every gradient and every buffer are those of one
process with the loss in one piece and nothing recomputed.

Both players take part: a viewmaker and an encoder with synchronised batch norm, in the simultaneous game, in float64,
each rank with its own part of the batch. The encoder is a convnet, which has fewer batch norms and so fewer messages
than a ResNet; the ResNet has a row of its own. What a micro batch changes is what batch norm sees, so a reference has
as many micro batches; that these do not matter otherwise is shown with an encoder without batch norm.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from configs import resolve_recipe
from data_pipeline.core.sample import Batch
from tests.gloo import run_ranks
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
    "split": ["view_forwards=one"],
    "linear": [],
    "barlow_twins": [],
    "moco": ["objective.queue_size=16"],
    "simsiam": [],
    "instance_discrimination": ["objective.num_negatives=5"],
    "symmetric_info_nce": [],
    "dcl": [],
    "macl": [],
    "ifm": [],
    "nt_xent_cycle": ["objective.period_epochs=3"],
    "nt_xent_decoder": ["objective.decoder.hidden_sizes=[8]", "objective.target_size=4"],
    "vicreg": [],
    "byol": ["objective.predictor.hidden_sizes=[8]"],
    "dino": ["objective.num_prototypes=12"],
    "supervised": ["objective.label=digit"],
}
CHUNKED = {"nt_xent", "nt_xent_published", "nt_xent_cycle", "nt_xent_decoder"}
CHUNKED |= {"split", "symmetric_info_nce", "dcl", "macl", "ifm"}
SMALL = "{kind: viewmaker, base_width: 4, num_res_blocks: 1}"
COMPOSED = {  # NT-Xent with encoders and views of several parts: the settings of each
    "resnet": [],
    "crop_then_viewmaker": [CONVNET, f"views={{kind: sequence, parts: [{{kind: expert_image}}, {SMALL}]}}"],
    "expert_against_viewmaker": [CONVNET, f"views={{kind: pair, first: {{kind: expert_image}}, second: {SMALL}}}"],
    "viewmaker_then_lost_channels": [CONVNET, f"views={{kind: sequence, parts: [{SMALL}, {{kind: channel_dropout}}]}}"],
}
MULTI_CROP = {
    "dino": ["objective.num_prototypes=12"],
    "supervised": ["objective.label=digit"],
}
WITHOUT_BATCH_NORM = (
    "encoder={kind: timm, name: vit_tiny_patch16_224, embedding_size: 16, "
    "mean: [0.5, 0.5, 0.5], std: [0.25, 0.25, 0.25], "
    "options: {img_size: 16, patch_size: 8, depth: 2, embed_dim: 16, num_heads: 2}}"
)


@dataclass(frozen=True)
class Cell:
    """A way to compute a step. If `recomputes`, activations are checkpointed too."""

    chunked: bool = False
    micro_batches: int = 1
    recomputes: bool = False

    def overrides(self) -> list[str]:
        return [
            *(["objective.chunk_size=3"] if self.chunked else []),
            *(["memory.encoder_checkpointing=1", "memory.viewmaker_checkpointing=2"] if self.recomputes else []),
            f"memory.micro_batches={self.micro_batches}",
        ]


def configure(objective: str, overrides: list[str]) -> RunConfig:
    kind = [f"objective.kind={objective}", *OBJECTIVES[objective]]
    every = ["precision=float64", f"global_batch_size={BATCH_SIZE}", "adversary.weight=0.5"]
    return resolve_recipe("debug:viewmaker", [*kind, *every, *overrides])


def configure_multi_crop(objective: str, overrides: list[str]) -> RunConfig:
    kind = [f"objective.kind={objective}", *MULTI_CROP[objective]]
    crops = ["views={kind: multi_crop, num_local: 3, local_size: 8}", "precision=float64"]
    return resolve_recipe("debug:image", [*kind, *crops, f"global_batch_size={BATCH_SIZE}", *overrides])


# Encoders whose blocks pass twice before one backward pass, or whose trunk does, and engines of other modules beside.
ENCODERS: dict[str, tuple[Callable[[str, list[str]], RunConfig], str, list[str]]] = {
    "resnet": (configure, "nt_xent", []),
    "in_turns": (configure, "simsiam", ["adversary.update=alternating"]),
    "split_batch_norm": (configure, "nt_xent", ["encoder.batch_norm=split", "encoder.batch_norm_splits=2"]),
    "transformer": (configure, "nt_xent", [WITHOUT_BATCH_NORM]),
    "two_sizes": (configure_multi_crop, "dino", []),
    "two_sizes_by_label": (configure_multi_crop, "supervised", []),
}
ENGINES = [(name, "fsdp") for name in ENCODERS] + [(name, "ddp") for name in ENCODERS if name.startswith("two_sizes")]


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


WHOLE, IN_PARTS = Cell(), Cell(micro_batches=2)  # the references
ROWS = (*OBJECTIVES, *COMPOSED)


def last_cell(row: str) -> Cell:
    """Return the cell in which all is done that can be: chunks, micro batches, recomputed activations."""
    return Cell(chunked=row in CHUNKED, micro_batches=2, recomputes=True)


def cells_of(row: str) -> dict[Cell, Cell]:
    """Return the cells of a row on four ranks, each with its reference."""
    last = {last_cell(row): IN_PARTS}
    return last if row in COMPOSED else {WHOLE: WHOLE} | last


def config_of(row: str, cell: Cell) -> RunConfig:
    objective, overrides = ("nt_xent", COMPOSED[row]) if row in COMPOSED else (row, [CONVNET])
    return configure(objective, [*overrides, *cell.overrides()])


@functools.cache
def alone(row: str, cell: Cell) -> dict[str, torch.Tensor]:
    found = one_step(config_of(row, cell))
    assert any(name.startswith("viewmaker/") for name in found)
    return found


@functools.cache
def of_four_ranks() -> dict[tuple[str, Cell], list[dict[str, torch.Tensor]]]:
    """Return the results of every cell on each rank, from one call: to start ranks takes longer than a cell."""
    cells = [(row, cell) for row in ROWS for cell in cells_of(row)]
    by_rank = run_ranks(steps, 4, [config_of(row, cell) for row, cell in cells], timeout_s=600)
    return dict(zip(cells, map(list, zip(*by_rank, strict=True)), strict=True))


@pytest.mark.ranks
@pytest.mark.parametrize("row", ROWS)
def test_four_ranks_are_one_process(row: str) -> None:
    for cell, reference in cells_of(row).items():
        for result in of_four_ranks()[row, cell]:
            assert_equal(result, alone(row, reference), cell)


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS)
def test_chunks_and_recomputed_activations_change_nothing(row: str) -> None:
    assert_equal(alone(row, last_cell(row)), alone(row, IN_PARTS), row)


def settings_of(name: str) -> list[list[str]]:
    """Return the settings of a step whole, and of one in micro batches whose activations are recomputed."""
    checkpointed = "whole" if name == "transformer" else "2"  # it counts as one block
    recomputed = ["memory.micro_batches=2", f"memory.encoder_checkpointing={checkpointed}"]
    return [["memory.micro_batches=1"], recomputed]


@functools.cache
def of_two_ranks() -> dict[tuple[str, str], list[list[dict[str, torch.Tensor]]]]:
    """Return the results of both cells of an encoder with an engine, by rank."""
    configs = []
    for name, engine in ENGINES:
        build, objective, overrides = ENCODERS[name]
        configs += [build(objective, [*overrides, *cell, f"engine.kind={engine}"]) for cell in settings_of(name)]
    by_rank = run_ranks(steps, 2, configs, timeout_s=600)
    return {case: [of_rank[2 * number : 2 * number + 2] for of_rank in by_rank] for number, case in enumerate(ENGINES)}


@pytest.mark.ranks
@pytest.mark.parametrize(("name", "engine"), ENGINES)
def test_two_ranks_with_other_encoders_and_engines_are_one_process(name: str, engine: str) -> None:
    """With FSDP, the encoder is in pieces."""
    results = of_two_ranks()[name, engine]
    build, objective, overrides = ENCODERS[name]
    for number, cell in enumerate(settings_of(name)):
        expected = one_step(build(objective, [*overrides, cell[0]]))
        for of_rank in results:
            assert_equal(of_rank[number], expected, cell)


@pytest.mark.slow
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_without_batch_norm_micro_batches_are_one_batch(objective: str) -> None:
    configs = [
        configure(objective, [WITHOUT_BATCH_NORM, f"memory.micro_batches={micro_batches}", checkpointing])
        for micro_batches, checkpointing in (
            (1, "memory.encoder_checkpointing=none"),
            (4, "memory.encoder_checkpointing=whole"),
        )
    ]
    whole, *cut = steps(configs)
    assert any(name.startswith("viewmaker/") for name in whole)
    for found in cut:
        assert_equal(found, whole, "micro batches")


@pytest.mark.parametrize("objective", sorted(OBJECTIVES.keys() - CHUNKED))
def test_where_a_chunked_loss_is_meaningless_the_config_says_so(objective: str) -> None:
    """These objectives have no matrix of similarities over the batch that could be cut into tiles."""
    with pytest.raises(Exception, match="chunk_size"):
        configure(objective, ["objective.chunk_size=3"])
