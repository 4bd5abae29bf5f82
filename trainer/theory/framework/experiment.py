"""Run an experiment: measure what its settings choose, judge its claims, and write OUT/result.json and the figures."""

from __future__ import annotations

import hashlib
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

import torch
from pydantic import Field
from torch import Tensor

from data_pipeline.core.counter_rng import DrawKeys
from data_pipeline.core.errors import UserError
from data_pipeline.core.schema import Count, Schema, Seed
from data_pipeline.core.system import num_cores
from trainer.provenance import command_line, cpu_name, this_code
from trainer.run_dir import write_atomically, write_json
from trainer.theory.framework.claim import ClaimResult, Measurements, judge_rows, read_claims
from trainer.theory.framework.figures import PanelGrid, draw

PACKAGES = ("torch", "numpy", "scipy")
RESULT = "result.json"

TwoOrMore = Annotated[int, Field(ge=2, le=10**9)]
Tensors = Mapping[str, Tensor]


class TheorySettings(Schema):
    """Settings of every experiment. It runs `num_seeds` seeds: `seed`, `seed` + 1, and so on.

    `studies` names the sections to compute and judge.
    `seeds_at_once` is the number of seeds that train in one computation. On a GPU, take all.
    """

    seed: Seed = 0
    num_seeds: TwoOrMore = 10
    seeds_at_once: Count = 2
    studies: tuple[str, ...] = Field(min_length=1)

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(range(self.seed, self.seed + self.num_seeds))


@dataclass(frozen=True)
class Outcome:
    """The measurements of a study, words for its claims, figures and tables of numbers by name."""

    measured: Measurements
    words: Mapping[str, object] = field(default_factory=dict)
    figures: Mapping[str, PanelGrid] = field(default_factory=dict)
    tables: Mapping[str, Any] = field(default_factory=dict)


S = TypeVar("S", bound=TheorySettings)


@dataclass(frozen=True)
class Experiment(Generic[S]):
    """The default settings, which take under two minutes on two cores, and a function for each study.

    The outcome depends on the settings alone, but for the rounding of the device.
    """

    defaults: S
    studies: Mapping[str, Callable[[S, torch.device], Outcome]]

    def run(self, settings: S, device: torch.device) -> Outcome:
        """Return the outcome of the chosen studies together. Raises `UserError` if a training diverged."""
        outcomes = [self.studies[name](settings, device) for name in settings.studies]

        def merged(part: str) -> dict[str, Any]:
            return {name: value for one in outcomes for name, value in getattr(one, part).items()}

        return Outcome(merged("measured"), merged("words"), merged("figures"), merged("tables"))


class TheoryResult(Schema):
    """The file OUT/result.json."""

    experiment: str
    settings: dict[str, Any]
    claims: tuple[ClaimResult, ...]
    tables: dict[str, Any]
    figures: tuple[str, ...]
    seeds: tuple[int, ...]
    seconds: float
    device: str
    torch_threads: int
    versions: dict[str, str]
    command: str
    git_commit: str | None


def draw_keys(
    seeds: Sequence[int] | Tensor, device: torch.device | None = None, *, step: int = 0, view: int = 0
) -> DrawKeys:
    """Return the keys of the draws of all seeds at a step. A seed takes the place of the index of a sample."""
    return DrawKeys(seed=0, epoch=step, index_B=torch.as_tensor(seeds, device=device), view=view)


def on_cpu(found: Tensors) -> dict[str, Tensor]:
    """Return the tensors on the CPU, without gradients."""
    return {name: tensor.detach().cpu().contiguous() for name, tensor in found.items()}


def in_blocks(
    seeds: Sequence[int], size: int, measure: Callable[[Sequence[int]], Tensors], *, dim: int = 0
) -> dict[str, Tensor]:
    """Measure `size` seeds at a time, and join their tensors on the CPU in `dim`, the dimension of the seeds."""
    blocks = [on_cpu(measure(seeds[first : first + size])) for first in range(0, len(seeds), size)]
    return {name: torch.cat([block[name] for block in blocks], dim) for name in blocks[0]}


def require_finite(values: Tensor, setting: str, learning_rate: float) -> None:
    """Raise `UserError` if a value of a training is inf or nan. `setting` is the name of its learning rate."""
    if not bool(values.isfinite().all()):
        raise UserError(f"the training diverged at {setting} {learning_rate:g}; set a lower one")


def default_out(name: str, settings: TheorySettings, defaults: TheorySettings) -> Path:
    """Return runs/theory/NAME for the default settings, and runs/theory/NAME-HASH for all others."""
    sha256 = hashlib.sha256(settings.model_dump_json().encode()).hexdigest()
    return Path("runs/theory") / (name if settings == defaults else f"{name}-{sha256[:8]}")


def judge(name: str, outcome: Outcome) -> list[ClaimResult]:
    """Return the verdicts on the claims of the experiment that have been measured."""
    return judge_rows(read_claims(name), outcome.measured, **outcome.words)


def run_experiment(
    name: str, experiment: Experiment[S], settings: S, *, out: Path, device: torch.device
) -> TheoryResult:
    """Run the experiment, judge its claims, and write the figures and result.json into `out`."""
    started = time.monotonic()
    outcome = experiment.run(settings, device)
    for figure, grid in outcome.figures.items():
        write_atomically(out / f"{figure}.png", draw(grid))
    result = TheoryResult(
        experiment=name,
        settings=settings.model_dump(mode="json"),
        claims=tuple(judge(name, outcome)),
        tables=dict(outcome.tables),
        figures=tuple(f"{figure}.png" for figure in outcome.figures),
        seeds=settings.seeds,
        seconds=round(time.monotonic() - started, 2),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else f"{cpu_name()}, {num_cores()} cores",
        torch_threads=torch.get_num_threads(),
        versions={"python": platform.python_version(), **{package: metadata.version(package) for package in PACKAGES}},
        command=command_line(),
        git_commit=this_code().git_commit,
    )
    write_json(out / RESULT, result.model_dump(mode="json"))  # last: if it exists, the figures do too
    return result
