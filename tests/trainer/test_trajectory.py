"""Training on W ranks follows training in one process, for every kind of step; and a step touches only its player."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from configs import resolve_recipe
from data_pipeline.core.batch import Batch
from tests.gloo import run_ranks
from tests.killed_runs import kill_after
from tests.old_versions import needs_fsdp
from tests.small_encoder import CONVNET, convnet
from tests.tiny_data import on_data, write_tiny_pair, write_tiny_sound_pair
from trainer.config import RunConfig
from trainer.data import open_stream
from trainer.modules import build_modules
from trainer.provenance import RECORDED_CONFIG, add_to_provenance
from trainer.run_dir import RunDir
from trainer.train import train

CPU = torch.device("cpu")
NUM_TRAIN, NUM_STEPS, HALF = 35, 4, 3  # two epochs; `HALF` is within the second
IN_FLOAT64 = ["precision=float64", f"checkpoint_every_steps={HALF}"]  # the same for all, so that they share runs
CONVNET_OF_32 = convnet(32)
ALTERNATING = ["adversary.update=alternating", "adversary.weight=0.5"]
BANK = ["objective.kind=instance_discrimination", "objective.num_negatives=32"]
NUM_SOUNDS, FEW_SOUNDS = 19, ["global_batch_size=8"]  # a step of sounds takes longer than one of pictures
CROP_AND_VIEWMAKER = "{kind: sequence, parts: [{kind: expert_image}, {kind: viewmaker, base_width: 4}]}"
COMPOSED = f"views={{kind: pair, first: {CROP_AND_VIEWMAKER}, second: {{kind: expert_image}}}}"
STEPS = {
    "simultaneous": ("debug:viewmaker", ["adversary.freeze_step=3", CONVNET]),
    "alternating": ("debug:viewmaker", [*ALTERNATING, CONVNET]),
    "moco": ("debug:image", ["objective.kind=moco", "objective.queue_size=64", CONVNET]),
    "byol": ("debug:viewmaker", ["objective.kind=byol", "objective.predictor.hidden_sizes=[8]", *ALTERNATING, CONVNET]),
    "composed": ("debug:viewmaker", [COMPOSED]),
    "instance_discrimination": ("debug:viewmaker", [*BANK, *ALTERNATING, CONVNET]),
    "online_per_view": ("debug:image", ["data.overlay=online_per_view", "data.placement=stream", CONVNET_OF_32]),
    "sounds_viewmaker": ("debug:audio_viewmaker", [*FEW_SOUNDS, "views.waveform={}", "views.downsample_to=16"]),
}

# Others have tests of their own below, in which two ranks go on from one process.
FOLLOWED = ["simultaneous", "online_per_view", "sounds_viewmaker"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_pair(tmp_path_factory.mktemp("data"), num_train=NUM_TRAIN, num_test=20)


@pytest.fixture(scope="module")
def online_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_pair(tmp_path_factory.mktemp("online"), num_train=NUM_TRAIN, num_test=20, overlay="online")


@pytest.fixture(scope="module")
def sounds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_sound_pair(tmp_path_factory.mktemp("sounds"), num_train=NUM_SOUNDS, num_test=20)


def configure(data: Path, recipe: str, overrides: list[str]) -> RunConfig:
    return resolve_recipe(recipe, on_data(data, "global_batch_size=16", "num_epochs=2", *overrides))


def train_on_rank(config: RunConfig, run_dir: Path, device: torch.device = CPU) -> None:
    train(config, RunDir(run_dir), device=device, command="test")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[RunConfig], Path]:
    """Return a function that gives the run of one process, which is trained once; a test writes to a copy only."""
    runs: dict[str, Path] = {}

    def run_of(config: RunConfig) -> Path:
        key = config.model_dump_json()
        if key not in runs:
            runs[key] = tmp_path_factory.mktemp("alone")
            run_ranks(train_on_rank, 1, config, runs[key])  # a thread as on the others: sums have an order
        return runs[key]

    return run_of


def copy_at_half(run_dir: Path, copy: Path) -> RunDir:
    """Copy a run as a kill after its step `HALF` would have left it."""
    run = RunDir(shutil.copytree(run_dir, copy))
    kill_after(run, HALF)
    return run


def final_state(run_dir: Path, player: str) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(RunDir(run_dir).checkpoint(NUM_STEPS) / f"{player}.safetensors")


def has_no_effect(player: str, name: str) -> bool:
    """Return whether a parameter has a true gradient of zero, so that Adam scales rounding noise to full steps.

    The last bias of a residual block shifts whole channels, and the next instance norm removes the shift.
    """
    return player == "viewmaker" and name.endswith("second.norm.bias")


def assert_same_runs(together: Path, one: Path, config: RunConfig) -> None:
    """Compare the losses of two runs, and how far each of their parameters has moved."""
    curves = {
        path: np.array([entry["train/loss"] for entry in RunDir(path).read_metrics()]) for path in (one, together)
    }
    assert len(curves[one]) == NUM_STEPS
    assert np.ptp(curves[one]) > 0.1  # the runs moved
    np.testing.assert_allclose(curves[together], curves[one], rtol=1e-9)
    assert_same_ends(together, one, config)


def assert_same_ends(end: Path, one: Path, config: RunConfig) -> None:
    """Compare the parameters in which two runs end, up to a share of how far each has moved."""
    for player in build_modules(config).trained_modules:
        expected, found = final_state(one, player), final_state(end, player)
        untrained = build_modules(config).trained_modules[player].state_dict()
        for name, tensor in expected.items():
            if not has_no_effect(player, name):
                moved = (tensor - untrained[name]).double().norm()
                assert (found[name] - tensor).double().norm() <= 1e-8 * moved, (end, name)


@pytest.mark.ranks
@pytest.mark.parametrize(("kind", "world_size"), [(kind, 4 if kind == "simultaneous" else 2) for kind in FOLLOWED])
def test_ranks_follow_one_process(
    kind: str,
    world_size: int,
    data: Path,
    online_data: Path,
    sounds: Path,
    tmp_path: Path,
    alone: Callable[[RunConfig], Path],
) -> None:
    """Four steps with the recipe's learning rates, each rank on its part of the batch, in float64.

    In float32 the same trajectories diverge after some ten steps, when rounding pushes the first ReLU over zero. So do
    two runs of one process whose weights differ by 1e-7. Float64 shows the equality that the system promises.
    """
    recipe, overrides = STEPS[kind]
    where = {"online": online_data, "sounds": sounds}.get(kind.partition("_")[0], data)
    config = configure(where, recipe, [*IN_FLOAT64, *overrides])
    one, together = alone(config), tmp_path / "together"
    run_ranks(train_on_rank, world_size, config, together)
    assert_same_runs(together, one, config)


def test_an_overlay_is_new_in_every_epoch_unless_it_is_baked_in(data: Path, online_data: Path) -> None:
    """In an online dataset the views of a sample share a draw or have their own, as the config says."""

    def two_epochs(directory: Path, overlay: str) -> list[Batch]:
        config = configure(directory, "debug:image", [f"data.overlay={overlay}"])
        return list(open_stream(config.data, global_batch_size=NUM_TRAIN, seed=0, end_step=2))

    def labels(batch: Batch) -> list[int]:
        return batch.labels["overlay"][batch.index_B.argsort()].tolist()

    first, second = two_epochs(data, "baked")
    assert labels(first) == labels(second)
    first, second = two_epochs(online_data, "online")
    assert labels(first) != labels(second)
    assert first.inputs_a is first.inputs_b
    first, _ = two_epochs(online_data, "online_per_view")
    assert not torch.equal(first.inputs_a, first.inputs_b)


@pytest.mark.ranks
@pytest.mark.parametrize("kind", ["moco", "instance_discrimination"])
def test_the_state_of_an_objective_is_taken_up_by_any_number_of_ranks(
    kind: str, data: Path, tmp_path: Path, alone: Callable[[RunConfig], Path]
) -> None:
    """From a checkpoint of one process at step 3, one process ends in the same bits, two in the same numbers."""
    recipe, overrides = STEPS[kind]
    config = configure(data, recipe, [*IN_FLOAT64, *overrides])
    whole = alone(config)
    for num_ranks in (1, 2):
        run_dir = copy_at_half(whole, tmp_path / f"{num_ranks}")
        run_ranks(train_on_rank, num_ranks, config, run_dir.path)
        for player in ("encoder", "objective"):
            expected, found = final_state(whole, player), final_state(run_dir.path, player)
            for name, tensor in expected.items():
                if num_ranks == 1:
                    assert torch.equal(found[name], tensor), name
                torch.testing.assert_close(found[name], tensor, rtol=1e-7, atol=1e-9, msg=name)


@pytest.mark.ranks
def test_deepspeed_goes_on_from_itself_on_other_ranks(data: Path, tmp_path: Path) -> None:
    """Both players train under ZeRO 2 on two ranks, then from step 3 on one rank; only rounding differs.

    Two things would raise the rounding of float32 to 10⁻⁴ within these steps, by chance of seed and processor: pixels
    at the edge of the clamp, and Adam, which turns the smallest gradients into whole steps.
    """
    slow = [
        "optimizer.learning_rate=0.001",
        "adversary.optimizer.learning_rate=0.0001",
        f"checkpoint_every_steps={HALF}",
    ]
    slow += ["views.clamp=false", "adversary.optimizer.epsilon=0.001", CONVNET]
    config = configure(data, "debug:viewmaker", ["engine.kind=deepspeed", *slow])
    run_ranks(train_on_rank, 2, config, tmp_path / "whole")
    whole = [entry["train/loss"] for entry in RunDir(tmp_path / "whole").read_metrics()]
    run_dir = copy_at_half(tmp_path / "whole", tmp_path / "again")
    run_ranks(train_on_rank, 1, config, run_dir.path)
    again = [entry["train/loss"] for entry in run_dir.read_metrics()]
    assert len(whole) == NUM_STEPS
    np.testing.assert_allclose(again, whole, rtol=1e-5)


def goes_on(run_dir: Path, config: RunConfig, num_ranks: int, copy: Path) -> Path:
    """Train a copy of a run from its step 3 on, with the engine of `config` on so many ranks; return the copy."""
    run = copy_at_half(run_dir, copy)
    run.config.write_text(config.model_dump_json())  # a run keeps its settings, so this is another run
    add_to_provenance(run, **{RECORDED_CONFIG: config.model_dump(mode="json")})
    run_ranks(train_on_rank, num_ranks, config, copy)
    return copy


@needs_fsdp
@pytest.mark.ranks
def test_fsdp_follows_one_process_and_each_goes_on_from_the_other(
    data: Path, tmp_path: Path, alone: Callable[[RunConfig], Path]
) -> None:
    """An encoder in pieces on two ranks ends in the numbers of one process, and goes on with the other engine.

    BYOL plays in turns, has a predictor and a teacher that follows the encoder.
    """
    recipe, overrides = STEPS["byol"]
    every = [*IN_FLOAT64, *overrides]
    whole, cut = configure(data, recipe, every), configure(data, recipe, [*every, "engine.kind=fsdp"])
    one = alone(whole)
    run_ranks(train_on_rank, 2, cut, tmp_path / "cut")
    to_cut, to_alone = (
        goes_on(one, cut, 2, tmp_path / "to_cut"),
        goes_on(tmp_path / "cut", whole, 1, tmp_path / "to_alone"),
    )
    for end in (tmp_path / "cut", to_cut, to_alone):
        assert_same_ends(end, one, whole)
        expected, found = final_state(one, "objective"), final_state(end, "objective")
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-7, atol=1e-9, msg=name)


@pytest.mark.slow
def test_bfloat16_changes_the_loss_by_their_rounding_only(data: Path, tmp_path: Path) -> None:
    losses = {}
    for name, overrides in {"plain": [], "fast": ["precision=bfloat16"]}.items():
        config = configure(data, "debug:viewmaker", ["num_epochs=1", *overrides])
        train_on_rank(config, tmp_path / name)
        losses[name] = [entry["train/loss"] for entry in RunDir(tmp_path / name).read_metrics()]
    assert losses["fast"] != losses["plain"]
    np.testing.assert_allclose(losses["fast"][:2], losses["plain"][:2], rtol=0.03)
