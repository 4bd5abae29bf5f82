"""Run an experiment: compute its parts one after the other, save each of them, and judge the claims from all parts.

A killed run continues with the first part that is missing. A part is saved under a hash of the settings and of the
code, so a part of other settings or other code is never reused.

OUT/ settings.json  parts/HASH/NAME.safetensors  NAME.png ...  result.json
"""

from __future__ import annotations

import hashlib
import inspect
import json
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

import safetensors
import torch
from pydantic import Field
from safetensors.torch import load, save
from torch import Tensor

from data_pipeline.core import counter_rng
from data_pipeline.core.counter_rng import DrawKeys
from data_pipeline.core.errors import UserError
from data_pipeline.core.progress import Progress
from data_pipeline.core.schema import Schema, Seed, difference
from data_pipeline.core.system import num_cores
from trainer.provenance import command_line, cpu_name, this_code
from trainer.run_dir import write_atomically, write_json
from trainer.theory.framework.claim import ClaimResult

PACKAGES = ("torch", "numpy", "scipy")
RESULT, SETTINGS = "result.json", "settings.json"

TwoOrMore = Annotated[int, Field(ge=2, le=10**9)]
Tensors = Mapping[str, Tensor]
Part = Callable[[torch.device], Tensors]


class TheorySettings(Schema):
    """Settings of every experiment. It runs `num_seeds` seeds: `seed`, `seed` + 1, and so on."""

    seed: Seed = 0
    num_seeds: TwoOrMore = 10

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(range(self.seed, self.seed + self.num_seeds))


@dataclass(frozen=True)
class Outcome:
    """The conclusions of an experiment: judged claims, figures (the PNG by its name) and tables of numbers."""

    claims: Sequence[ClaimResult]
    figures: Mapping[str, bytes]
    tables: Mapping[str, Any]


S = TypeVar("S", bound=TheorySettings)


@dataclass(frozen=True)
class Experiment(Generic[S]):
    """One experiment.

    Attributes:
        defaults: the default settings. They take under two minutes on two cores.
        parts: returns the parts for some settings, by name. A part is a function from a device to tensors, and depends
            on the settings alone. Its name is also a file name. A killed run loses one part, so a part takes seconds.
        conclude: returns the outcome from the settings and the tensors of all parts, which are on the CPU. It is quick.
    """

    defaults: S
    parts: Callable[[S], Mapping[str, Part]]
    conclude: Callable[[S, Mapping[str, Tensors]], Outcome]


class TheoryResult(Schema):
    """The file OUT/result.json.

    `seconds` is the time of each part. It includes the parts of an earlier run that was killed.
    """

    experiment: str
    settings: dict[str, Any]
    settings_sha256: str
    claims: tuple[ClaimResult, ...]
    tables: dict[str, Any]
    figures: tuple[str, ...]
    seeds: tuple[int, ...]
    seconds: dict[str, float]
    devices: tuple[str, ...]
    torch_threads: int
    versions: dict[str, str]
    command: str
    git_commit: str | None


def draw_keys(
    seeds: Sequence[int] | Tensor, device: torch.device | None = None, *, step: int = 0, view: int = 0
) -> DrawKeys:
    """Return the keys of the draws of all seeds at a step. A seed takes the place of the index of a sample."""
    return DrawKeys(seed=0, epoch=step, index_B=torch.as_tensor(seeds, device=device), view=view)


def seed_parts(
    name: str, seeds: Sequence[int], size: int, part: Callable[[Sequence[int], torch.device], Tensors]
) -> dict[str, Part]:
    """Return parts that compute `size` seeds each. The first dimension of all tensors of `part` is the seed."""
    blocks = [seeds[first : first + size] for first in range(0, len(seeds), size)]
    return {f"{name}_seeds_{block[0]}_to_{block[-1]}": partial(part, block) for block in blocks}


def join_seeds(name: str, found: Mapping[str, Tensors]) -> dict[str, Tensor]:
    """Join the parts that `seed_parts` made for `name`: return their tensors with all seeds in the first dimension."""
    blocks = [tensors for part, tensors in found.items() if part.startswith(f"{name}_seeds_")]
    return {label: torch.cat([block[label] for block in blocks]) for label in blocks[0]}


def require_finite(values: Tensor, setting: str, learning_rate: float) -> None:
    """Raise `UserError` if a value of a training is inf or nan. `setting` is the name of its learning rate."""
    if not bool(values.isfinite().all()):
        raise UserError(f"the training diverged at {setting} {learning_rate:g}; set a lower one")


def default_out(name: str, settings: TheorySettings, defaults: TheorySettings) -> Path:
    """Return runs/theory/NAME for the default settings, and runs/theory/NAME-HASH for all others."""
    return Path("runs/theory") / (name if settings == defaults else f"{name}-{settings_sha256(settings)[:8]}")


def settings_sha256(settings: TheorySettings) -> str:
    return hashlib.sha256(settings.model_dump_json().encode()).hexdigest()


def code_sha256(experiment: Experiment[S]) -> str:
    """Return the hash of the code that a part depends on: the experiment's package, the framework and the draws."""
    folders = (Path(inspect.getfile(experiment.parts)).parent, Path(__file__).parent)
    files = [*(file for folder in folders for file in sorted(folder.glob("*.py"))), Path(counter_rng.__file__)]
    return hashlib.sha256(b"\0".join(file.name.encode() + b"\0" + file.read_bytes() for file in files)).hexdigest()


def run_experiment(
    name: str, experiment: Experiment[S], settings: S, *, out: Path, device: torch.device, show_progress: bool = True
) -> TheoryResult:
    """Compute the parts that `out` lacks, judge the claims, and write figures and result.json.

    Raises `UserError` if `out` holds the result of other settings, or files of something else.
    """
    _write_or_check_settings(name, settings, out)
    origin = f"{settings_sha256(settings)} {code_sha256(experiment)}"
    saved = out / "parts" / hashlib.sha256(origin.encode()).hexdigest()[:16]
    parts = experiment.parts(settings)
    found: dict[str, Tensors] = {}
    facts_of: dict[str, dict[str, str]] = {}
    missing = {key: part for key, part in parts.items() if not (saved / f"{key}.safetensors").is_file()}
    with Progress(name, total=len(parts), start=len(parts) - len(missing), enabled=show_progress) as progress:
        for key, part in missing.items():
            started = time.monotonic()
            tensors = {label: tensor.detach().cpu().contiguous() for label, tensor in part(device).items()}
            facts = {"seconds": f"{time.monotonic() - started:.2f}", "device": _device_name(device)}
            write_atomically(saved / f"{key}.safetensors", save(tensors, metadata=facts))
            progress.advance(note=key)
    for key in parts:
        path = saved / f"{key}.safetensors"
        found[key] = dict(sorted(load(path.read_bytes()).items()))  # safetensors returns them in any order
        with safetensors.safe_open(path, framework="pt") as file:
            facts_of[key] = file.metadata()
    outcome = experiment.conclude(settings, found)
    for figure, png in outcome.figures.items():
        write_atomically(out / f"{figure}.png", png)
    result = TheoryResult(
        experiment=name,
        settings=settings.model_dump(mode="json"),
        settings_sha256=settings_sha256(settings),
        claims=tuple(outcome.claims),
        tables=dict(outcome.tables),
        figures=tuple(f"{figure}.png" for figure in outcome.figures),
        seeds=settings.seeds,
        seconds={key: float(facts["seconds"]) for key, facts in facts_of.items()},
        devices=tuple(sorted({facts["device"] for facts in facts_of.values()})),
        torch_threads=torch.get_num_threads(),
        versions={"python": platform.python_version(), **{package: metadata.version(package) for package in PACKAGES}},
        command=command_line(),
        git_commit=this_code().git_commit,
    )
    write_json(out / RESULT, result.model_dump(mode="json"))  # last: if it exists, the figures do too
    return result


def _write_or_check_settings(name: str, settings: TheorySettings, out: Path) -> None:
    """Write the name and the settings into `out`. Raises `UserError` if it holds others."""
    wanted = {"experiment": name, "settings": settings.model_dump(mode="json")}
    path = out / SETTINGS
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out} is a file; pass a directory")
    if not path.is_file():
        if out.is_dir() and any(out.iterdir()):
            raise UserError(f"--out {out} is not empty and holds no {SETTINGS}; pass a new directory")
        write_json(path, wanted)
        return
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        held = None
    if not isinstance(held, dict) or held.get("experiment") != name:
        raise UserError(f"--out {out} holds another experiment than {name}; pass another directory")
    if held["settings"] != wanted["settings"]:
        try:
            differing = difference(type(settings).model_validate(held["settings"]), settings)
        except ValueError:
            differing = ["the names of its settings"]
        raise UserError(f"--out {out} holds the result of other settings ({', '.join(differing)}); pass another --out")


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{cpu_name()}, {num_cores()} cores"
