"""Check on a GPU what can only be checked there: the tests that need one, its numbers, and recorded steps."""

from __future__ import annotations

import itertools
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

import torch
from torch import Tensor

from benchmarks.gpu_stages.session import Outcome, Setting, Stage, Task, task
from benchmarks.record import rounded
from configs import resolve_recipe
from data_pipeline.core.sample import NO_LABEL, Batch
from trainer.build import build_training
from trainer.config import RunConfig
from trainer.recorded_step import RecordedStep

ROOT = Path(__file__).parents[2]
RECIPES: Final = ("simclr:digits", "viewmaker:digits")
_NEEDS_A_GPU: Final = "gpu or cuda"  # in the names of the tests
_TEST_FILES: Final = (
    "tests/trainer/test_recorded_step.py",
    "tests/trainer/models/test_batch_norm.py",
    "tests/trainer/optim/test_optim.py",
    "tests/trainer/checkpoint/test_checkpoint.py",
    "tests/trainer/test_on_a_gpu.py",
)
# The greatest relative difference of the first loss, and of the change of the parameters, between GPU and CPU. In
# float32, rounding pushes some ReLU over zero.
_TOLERANCES: Final = {"float64": (1e-9, 1e-6), "float32": (1e-4, 2e-2)}
_NUM_STEPS: Final = 12  # of a curve; a step is recorded after the third


def tasks(setting: Setting) -> Mapping[str, Task]:
    """Return the checks."""
    found = {
        f"captured against eager, {recipe}": task(partial(captured_against_eager, setting, recipe), needs_seconds=30)
        for recipe in RECIPES
    }
    found |= {
        f"GPU against CPU, {precision}, {recipe}": task(
            partial(against_cpu, setting, recipe, precision), needs_seconds=30
        )
        for precision in _TOLERANCES
        for recipe in RECIPES
    }
    files = _TEST_FILES[:1] if setting.is_tiny else _TEST_FILES
    return found | {file: task(partial(run_tests, setting, file), needs_seconds=40) for file in files}


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


def against_cpu(setting: Setting, recipe: str, precision: str) -> Outcome:
    """Compare one step on the device with the same step on the CPU: the loss, and the change of all parameters."""
    config = config_of(setting, recipe, f"precision={precision}")
    config = config.model_copy(update={"global_batch_size": min(64, config.global_batch_size)})
    losses, changes = [], []
    with full_float32():
        for device in (torch.device("cpu"), setting.device):
            training = build_training(config, num_samples=50_000, device=device)
            modules = training.modules.trained_modules.values()
            parameters = [each for module in modules for each in module.parameters() if each.requires_grad]
            before = [parameter.detach().clone() for parameter in parameters]
            batch = batch_of(config, step=0, device=device)
            output = training.step(batch, learning_rates=training.learning_rates(0, num_steps=_NUM_STEPS))
            losses.append(output.metrics["train/loss"].double().cpu())
            moved = [(now.detach() - old).double().cpu() for now, old in zip(parameters, before, strict=True)]
            changes.append(torch.cat([each.flatten() for each in moved]))
    loss, change = relative(losses[1], losses[0]), relative(changes[1], changes[0])
    most_of_loss, most_of_change = _TOLERANCES[precision]
    return Outcome(
        {
            "loss": losses[0].item(),
            "relative_difference_of_the_loss": rounded(loss),
            "relative_difference_of_the_change": rounded(change),
            "at_most": [most_of_loss, most_of_change],
        },
        holds=loss <= most_of_loss and change <= most_of_change,
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


def captured_against_eager(setting: Setting, recipe: str) -> Outcome:
    """Compare the losses of recorded and plain steps, and of two runs of plain steps.

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

    eager, again, captured = losses("false"), losses("false"), losses("step")
    noise, difference = relative(again, eager), relative(captured, eager)
    return Outcome(
        {
            "losses_eager": [rounded(loss) for loss in eager.tolist()],
            "losses_captured": [rounded(loss) for loss in captured.tolist()],
            "relative_difference": rounded(difference),
            "relative_difference_of_two_eager": rounded(noise),
            "is_captured": captures[-1],
        },
        holds=difference <= max(10 * noise, 1e-3) and (captures[-1] or setting.device.type != "cuda"),
    )


def run_tests(setting: Setting, file: str) -> Outcome:
    """Run the tests of a file that need a GPU, and return their counts and the failures."""
    wanted = "on_a_cpu" if setting.is_tiny else _NEEDS_A_GPU
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file, "-k", wanted]
        done = subprocess.run([*command, f"--junitxml={report}"], cwd=ROOT, capture_output=True, text=True)
        if not report.is_file():
            raise RuntimeError(f"pytest ended with status {done.returncode}: {done.stdout[-200:]}{done.stderr[-200:]}")
        return counted(report.read_text())


def counted(report: str) -> Outcome:
    """Return the counts of a report of pytest in the form of JUnit. It holds if a test ran and none failed."""
    cases = list(ElementTree.fromstring(report).iter("testcase"))
    kinds = {"failed": ("failure", "error"), "skipped": ("skipped",)}
    by_kind = {
        kind: [case for case in cases if any(case.find(tag) is not None for tag in tags)]
        for kind, tags in kinds.items()
    }
    num_passed = len(cases) - sum(map(len, by_kind.values()))
    failures = {
        str(case.get("name")): str(problem.get("message"))[:300]
        for case in by_kind["failed"]
        for problem in itertools.chain(case.findall("failure"), case.findall("error"))
    }
    counts = {"passed": num_passed} | {kind: len(found) for kind, found in by_kind.items()}
    return Outcome({**counts, "failures": failures}, holds=num_passed > 0 and not by_kind["failed"])


STAGE = Stage("checks", tasks)
