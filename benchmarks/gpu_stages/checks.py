"""Check on a GPU what can only be checked there: the tests that need one, its numbers, and recorded steps."""

from __future__ import annotations

import functools
import hashlib
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from benchmarks.gpu_stages.session import Outcome, Setting, Stage, Task
from benchmarks.gpu_stages.whole_runs import restart_against_whole
from benchmarks.record import rounded
from configs import resolve_recipe
from data_pipeline.core.batch import Batch
from data_pipeline.core.sample import NO_LABEL
from trainer.build import build_training
from trainer.config import RunConfig
from trainer.modules import build_modules
from trainer.recorded_step import RecordedStep
from trainer.views.inputs import from_bytes

ROOT = Path(__file__).parents[2]
RECIPES: Final = ("simclr:digits", "viewmaker:digits")
_NEEDS_A_GPU: Final = "gpu or cuda"  # in the names of the tests
_TEST_FILES: Final = (
    "tests/trainer/test_recorded_step.py",
    "tests/trainer/models/test_batch_norm.py",
    "tests/trainer/optim/test_optim.py",
    "tests/trainer/checkpoint/test_checkpoint.py",
    "tests/trainer/test_on_a_gpu.py",
    "tests/trainer/distributed/test_ranks_on_a_gpu.py",
)
# Masks have the same bits on every device; in float32, expert views do not.
_SAME_VIEWS: Final = {"simclr:digits": ("views={kind: random_mask}",), "viewmaker:digits": ()}
# The greatest relative difference of the first loss, and of the change of the parameters, in float64.
_TOLERANCES: Final = (1e-9, 1e-6)
# In float32, rounding pushes some ReLU over zero, and Adam turns gradients around zero into full steps. So float32 on
# the CPU tells how far from float64 a right step may be.
_TIMES_AS_FAR: Final = 3.0
_MOST_OF_A_VIEW: Final = 1e-4  # the greatest difference of a pixel in [0, 1]
_NUM_ROWS: Final = 64  # of a step on the CPU
_NUM_STEPS: Final = 12  # of a curve; a step is recorded after the third


def tasks(setting: Setting) -> Mapping[str, Task]:
    """Return the checks."""
    found = {
        f"captured against eager, {recipe}": Task(partial(captured_against_eager, setting, recipe), needs_seconds=30)
        for recipe in RECIPES
    }
    found["views of the GPU against the CPU"] = Task(partial(views_against_cpu, setting), needs_seconds=20)
    for recipe in RECIPES:
        for precision, check in {"float64": against_cpu, "float32": against_rounding}.items():
            name = f"GPU against CPU, {precision}, {recipe}"
            found[name] = Task(partial(check, setting, recipe), needs_seconds=30)
    found["a run, again, from a checkpoint and plain"] = Task(partial(restart_against_whole, setting), needs_seconds=60)
    files = _TEST_FILES[:1] if setting.is_tiny else _TEST_FILES
    for file in files:
        version = hashlib.sha256((ROOT / file).read_bytes()).hexdigest()[:8]  # tests that have changed run again
        found[f"{file} {version}"] = Task(partial(run_tests, setting, file), needs_seconds=40)
    return found


def config_of(setting: Setting, recipe: str, *overrides: str) -> RunConfig:
    """Return a recipe of the papers; of a dry run, the same parts in their smallest form."""
    if setting.is_tiny:
        recipe = {"simclr:digits": "debug:image", "viewmaker:digits": "debug:viewmaker"}[recipe]
    size = 8 if setting.is_tiny else 256
    return resolve_recipe(recipe, [f"global_batch_size={size}", "tracking.wandb=disabled", *overrides])


def batch_of(config: RunConfig, *, step: int, device: torch.device) -> Batch:
    """Return a batch of noise, the same on every device."""
    draw = torch.Generator().manual_seed(step)
    size = config.global_batch_size
    pictures = torch.randint(0, 256, (size, 3, 32, 32), dtype=torch.uint8, generator=draw)
    index_B = torch.randint(0, 50_000, (size,), generator=draw)
    none_B = torch.full((size,), NO_LABEL)
    labels = {"base": none_B, "overlay": none_B}
    return Batch(step, step // 5, index_B, pictures, pictures, None, None, labels).to(device)


def views_against_cpu(setting: Setting) -> Outcome:
    """Compare expert views of the same pictures and draws, on the device and on the CPU."""
    config = config_of(setting, "simclr:digits")
    policy = build_modules(config).view_policy
    views = []
    for device in (torch.device("cpu"), setting.device):
        batch = batch_of(config, step=0, device=device)
        views.append(policy(from_bytes(batch.inputs_a), batch.draw_keys(seed=config.seed, view=0)).cpu())
    apart = (views[1] - views[0]).abs()
    most = apart.max().item()
    values = {"largest_difference": rounded(most), "mean_difference": rounded(apart.mean().item())}
    return Outcome(values | {"at_most": _MOST_OF_A_VIEW}, holds=most <= _MOST_OF_A_VIEW)


@dataclass(frozen=True)
class FirstStep:
    """The loss of a first step, and the change of all parameters in it, as one vector; in float64 on the CPU."""

    loss: Tensor
    change_P: Tensor

    def distance(self, other: FirstStep) -> tuple[float, float]:
        """Return the relative differences from the loss and the change of another step."""
        return relative(self.loss, other.loss), relative(self.change_P, other.change_P)


@functools.cache  # two checks compare with the same step in float64, which takes a CPU up to twenty seconds
def first_step(setting: Setting, device: torch.device, recipe: str, *overrides: str) -> FirstStep:
    """Take the first step of a recipe on a device."""
    # A recorded step would take the learning rate in float32.
    config = config_of(setting, recipe, "compile=false", *overrides)
    config = config.model_copy(update={"global_batch_size": min(_NUM_ROWS, config.global_batch_size)})
    with full_float32():
        training = build_training(config, num_samples=50_000, device=device)
        modules = training.modules.trained_modules.values()
        parameters = [each for module in modules for each in module.parameters() if each.requires_grad]
        before = [parameter.detach().clone() for parameter in parameters]
        batch = batch_of(config, step=0, device=device)
        output = training.step(batch, learning_rates=training.learning_rates(0, num_steps=_NUM_STEPS))
        moved = [(now.detach() - old).double().cpu() for now, old in zip(parameters, before, strict=True)]
        return FirstStep(output.metrics["train/loss"].double().cpu(), torch.cat([each.flatten() for each in moved]))


def against_cpu(setting: Setting, recipe: str) -> Outcome:
    """Compare one step on the device with the same step on the CPU, both in float64 and from the same views."""
    overrides = ("precision=float64", *_SAME_VIEWS[recipe])
    expected = first_step(setting, torch.device("cpu"), recipe, *overrides)
    loss, change = first_step(setting, setting.device, recipe, *overrides).distance(expected)
    return Outcome(
        {
            "loss": expected.loss.item(),
            "relative_difference_of_the_loss": rounded(loss),
            "relative_difference_of_the_change": rounded(change),
            "at_most": list(_TOLERANCES),
        },
        holds=loss <= _TOLERANCES[0] and change <= _TOLERANCES[1],
    )


def against_rounding(setting: Setting, recipe: str) -> Outcome:
    """Compare how far a step in float32 is from float64 on the CPU: a step on the device, and a step on the CPU."""
    cpu = torch.device("cpu")
    exact = first_step(setting, cpu, recipe, "precision=float64")
    _, on_cpu = first_step(setting, cpu, recipe, "precision=float32").distance(exact)
    loss, on_device = first_step(setting, setting.device, recipe, "precision=float32").distance(exact)
    return Outcome(
        {
            "relative_difference_of_the_loss": rounded(loss),
            "relative_difference_of_the_change": rounded(on_device),
            "relative_difference_of_the_change_on_the_cpu": rounded(on_cpu),
        },
        holds=loss <= 1e-4 and on_device <= _TIMES_AS_FAR * on_cpu,
    )


def relative(found: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference, over that of what was expected."""
    return float(((found - expected).norm() / expected.norm().clamp_min(1e-30)).item())


@contextmanager
def full_float32() -> Iterator[None]:
    """Let convolutions and products in float32 use all their bits inside the block, and no TF32."""
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


def captured_against_eager(setting: Setting, recipe: str, *, eager: str = "false", captured: str = "step") -> Outcome:
    """Compare the losses of recorded and plain steps, and of two runs of plain steps.

    `eager` and `captured` are the settings of `compile` for the two.

    Kernels may sum in another order each time, so two runs of plain steps may differ; recorded steps may differ ten
    times as much.
    """
    settings = ["precision=bfloat16", "channels_last=true"]

    captures: list[bool] = []
    num_steps = 4 if setting.is_tiny else _NUM_STEPS

    def losses(compile_setting: str) -> Tensor:
        config = config_of(setting, recipe, f"compile={compile_setting}", *settings)
        training = build_training(config, num_samples=50_000, device=setting.device)
        found = []
        for step in range(num_steps):
            batch = batch_of(config, step=step, device=setting.device)
            rates = training.learning_rates(step, num_steps=num_steps)
            # A recorded step reads its rates in float32.
            in_float32 = {name: torch.tensor(rate).item() for name, rate in rates.items()}
            output = training.step(batch, learning_rates=in_float32)
            found.append(output.metrics["train/loss"])
        captures.append(isinstance(training.step, RecordedStep) and training.step.is_recorded)
        return torch.stack(found).double().cpu()

    expected, again, found = losses(eager), losses(eager), losses(captured)
    noise, difference = relative(again, expected), relative(found, expected)
    return Outcome(
        {
            "losses_eager": [rounded(loss) for loss in expected.tolist()],
            "losses_captured": [rounded(loss) for loss in found.tolist()],
            "relative_difference": rounded(difference),
            "relative_difference_of_two_eager": rounded(noise),
            "is_captured": captures[-1],
        },
        holds=difference <= max(10 * noise, 1e-3) and (captures[-1] or setting.device.type != "cuda"),
    )


def run_tests(setting: Setting, file: str) -> Outcome:
    """Run the tests of a file that need a GPU. It holds if a test ran and none failed."""
    wanted = "on_a_cpu" if setting.is_tiny else _NEEDS_A_GPU
    command = [sys.executable, "-m", "pytest", "-q", "-rf", "-p", "no:cacheprovider", file, "-k", wanted]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8")
    *_, summary = done.stdout.strip().splitlines() or [done.stderr[-200:]]
    failures = [line[:300] for line in done.stdout.splitlines() if line.startswith("FAILED ")]
    return Outcome({"summary": summary, "failures": failures}, holds=done.returncode == 0 and " passed" in summary)


STAGE = Stage("checks", tasks)
