"""The numbers of a GPU at the published size: steps against the CPU, recorded steps and restarts against plain ones.

On the CPU, the same tests run in a tiny form. There both sides are the CPU, so they only show that the tests can run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from configs import resolve_recipe
from data_pipeline.core.batch import Batch
from data_pipeline.core.sample import NO_LABEL
from launch.rank import train_on
from tests.killed_runs import kill_after
from tests.tiny_data import write_tiny_pair
from trainer.build import build_training
from trainer.config import RunConfig
from trainer.modules import build_modules
from trainer.recorded_step import RecordedStep
from trainer.run_dir import RunDir, steps_in
from trainer.views.inputs import from_bytes

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
NEEDS_A_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
TINY = {"simclr:digits": "debug:image", "viewmaker:digits": "debug:viewmaker"}
# Masks have the same bits on every device; in float32, expert views do not.
SAME_VIEWS = {"simclr:digits": ("views={kind: random_mask}",), "viewmaker:digits": ()}
NUM_STEPS = 12  # of a curve; a step is recorded after the third

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("device", [CPU, pytest.param(GPU, marks=NEEDS_A_GPU)], ids=str)]
of_both_recipes = pytest.mark.parametrize("recipe", TINY)


def config_of(device: torch.device, recipe: str, *overrides: str) -> RunConfig:
    is_tiny = device.type == "cpu"
    size = f"global_batch_size={8 if is_tiny else 256}"
    return resolve_recipe(TINY[recipe] if is_tiny else recipe, [size, "tracking.wandb=disabled", *overrides])


def batch_of(config: RunConfig, *, step: int, device: torch.device) -> Batch:
    """A batch of noise, the same on every device."""
    draw, size = torch.Generator().manual_seed(step), config.global_batch_size
    pictures = torch.randint(0, 256, (size, 3, 32, 32), dtype=torch.uint8, generator=draw)
    index_B = torch.randint(0, 50_000, (size,), generator=draw)
    labels = dict.fromkeys(("base", "overlay"), torch.full((size,), NO_LABEL))
    return Batch(step, step // 5, index_B, pictures, pictures, None, None, labels).to(device)


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm().clamp_min(1e-30))


@contextmanager
def full_float32() -> Iterator[None]:
    """Convolutions and products in float32 use all their bits inside the block, and no TF32."""
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


def first_step(config: RunConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    """The loss of a first step of 64 rows, and the change of all parameters in it; in float64 on the CPU."""
    config = config.model_copy(update={"global_batch_size": min(64, config.global_batch_size), "compile": False})
    with full_float32():
        training = build_training(config, num_samples=50_000, device=device)
        modules = training.modules.trained_modules.values()
        parameters = [each for module in modules for each in module.parameters() if each.requires_grad]
        before = [parameter.detach().clone() for parameter in parameters]
        rates = training.learning_rates(0, num_steps=NUM_STEPS)
        output = training.step(batch_of(config, step=0, device=device), learning_rates=rates)
    moved = [(now.detach() - old).double().cpu().flatten() for now, old in zip(parameters, before, strict=True)]
    return output.metrics["train/loss"].double().cpu(), torch.cat(moved)


@of_both_recipes
def test_a_step_in_float64_is_that_of_a_cpu(recipe: str, device: torch.device) -> None:
    config = config_of(device, recipe, "precision=float64", *SAME_VIEWS[recipe])
    (loss, change), (expected_loss, expected_change) = (first_step(config, where) for where in (device, CPU))
    print(f"measured: loss {relative(loss, expected_loss):.1e}, change {relative(change, expected_change):.1e}")
    assert relative(loss, expected_loss) <= 1e-9
    assert relative(change, expected_change) <= 1e-6


@of_both_recipes
def test_a_step_in_float32_is_as_far_from_float64_as_that_of_a_cpu(recipe: str, device: torch.device) -> None:
    """Rounding pushes some ReLU over zero, and Adam turns gradients around zero into full steps."""
    exact_loss, exact = first_step(config_of(device, recipe, "precision=float64"), CPU)
    config = config_of(device, recipe, "precision=float32")
    (loss, change), (_, on_cpu) = (first_step(config, where) for where in (device, CPU))
    print(f"measured: change {relative(change, exact):.1e}, on the CPU {relative(on_cpu, exact):.1e}")
    assert relative(loss, exact_loss) <= 1e-4
    assert relative(change, exact) <= 3 * relative(on_cpu, exact)


def test_expert_views_are_those_of_a_cpu(device: torch.device) -> None:
    config = config_of(device, "simclr:digits")
    policy, views = build_modules(config).view_policy, []
    for where in (CPU, device):
        batch = batch_of(config, step=0, device=where)
        views.append(policy(from_bytes(batch.inputs_a), batch.draw_keys(seed=config.seed, view=0)).cpu())
    assert (views[1] - views[0]).abs().max() <= 1e-4


def form_of(device: torch.device) -> tuple[str, ...]:
    return ("precision=bfloat16",) if device.type == "cuda" else ("precision=float32",)


def losses(device: torch.device, recipe: str, compiled: str) -> Tensor:
    """The losses of some steps, with learning rates in float32, as a recorded step reads them."""
    config = config_of(device, recipe, f"compile={compiled}", *form_of(device))
    training = build_training(config, num_samples=50_000, device=device)
    found = []
    for step in range(NUM_STEPS):
        rates = training.learning_rates(step, num_steps=NUM_STEPS)
        in_float32 = {name: torch.tensor(rate).item() for name, rate in rates.items()}
        output = training.step(batch_of(config, step=step, device=device), learning_rates=in_float32)
        found.append(output.metrics["train/loss"])
    is_recorded = isinstance(training.step, RecordedStep) and training.step.is_recorded
    assert is_recorded == (device.type == "cuda" and compiled in {"step", "both"})
    return torch.stack(found).double().cpu()


@of_both_recipes
@pytest.mark.parametrize(("plain", "recorded"), [("false", "step"), ("true", "both")])
def test_recorded_steps_are_plain_steps(recipe: str, plain: str, recorded: str, device: torch.device) -> None:
    """Kernels may sum in another order each time, so two plain runs may differ; recorded ones ten times as much."""
    if device == CPU:
        plain = recorded = "false"  # to compile takes minutes there
    expected, again, found = (losses(device, recipe, how) for how in (plain, plain, recorded))
    print(f"measured: {relative(found, expected):.1e}, two plain runs {relative(again, expected):.1e}")
    assert relative(found, expected) <= max(10 * relative(again, expected), 1e-3)


def trained(run_dir: RunDir, device: torch.device, *overrides: str) -> Tensor:
    """Train a run with its checkpoints; return the loss of every step."""
    data = run_dir.path.parent / "data"
    places = [f"data.train_dir={data / 'train'}", f"data.test_dir={data / 'test'}", "data.overlay=online"]
    kept = ["log_every_steps=1", "keep_checkpoints=9", "num_epochs=4", "checkpoint_every_steps=5"]
    # A replay reads its learning rate in float32, which holds this one.
    form = [*form_of(device), "optimizer.learning_rate=0.03125", "data.num_workers=0"]
    config = config_of(device, "simclr:digits", *places, *kept, *form, *overrides)
    train_on(device, config, run_dir.path, command="test")
    entries = [entry for entry in run_dir.read_metrics() if "train/loss" in entry]
    is_replay = entries[-1].get("perf/replay_fraction", 0) > 0
    assert is_replay == (device.type == "cuda" and "compile=false" not in overrides)
    return torch.tensor([entry["train/loss"] for entry in entries], dtype=torch.float64)


def test_neither_a_restart_nor_an_online_probe_nor_a_recording_changes_a_loss(
    tmp_path: Path, device: torch.device
) -> None:
    """The other tests compare steps. A run also reads its data, probes and saves between the replays of a step."""
    num_train = 64 if device == CPU else 4_096
    write_tiny_pair(tmp_path / "data", num_train=num_train, num_test=16, overlay="online")
    probed = ("probe.online_every_steps=7", "probe.online_num_train=16", "probe.online_num_test=8")
    whole = trained(RunDir(tmp_path / "whole"), device, *probed)
    killed = RunDir(tmp_path / "again")
    again = trained(killed, device, *probed)
    first = steps_in(killed.checkpoints)[0]
    kill_after(killed, first)
    kept = [entry for entry in killed.read_metrics() if entry["step"] <= first]
    killed.metrics.write_text("".join(f"{json.dumps(entry)}\n" for entry in kept))
    found = {"from a checkpoint": trained(killed, device, *probed)}
    found["plain, without a probe"] = trained(RunDir(tmp_path / "plain"), device, "compile=false")
    print(f"measured: {relative(again, whole):.1e} again, {[relative(each, whole) for each in found.values()]}")
    for name, each in found.items():
        assert relative(each, whole) <= max(10 * relative(again, whole), 1e-3), name
