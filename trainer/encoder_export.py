"""Write the encoder of a run as one safetensors file, which `trainer.pretrained` reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import safetensors.torch

from data_pipeline.core.errors import UserError
from trainer.models.encoder import Encoder
from trainer.modules import TrainedModules
from trainer.pretrained import EXPORT_SUFFIX, HEADER_KEY, ExportHeader, load_modules, named_as_published
from trainer.run_dir import RunDir, write_atomically


def export(run_dir: RunDir, out: Path, *, step: int | None = None) -> None:
    """Write the encoder of a run at `step` (None: the newest checkpoint) to `out`. Replaces an existing file.

    The same encoder gives the same bytes each time. Raises `UserError` if there is no such checkpoint or if `out` does
    not end in .safetensors, and `OSError` if `out` cannot be written.
    """
    if out.suffix != EXPORT_SUFFIX:
        raise UserError(
            f"cannot export to {out}: an encoder is written as {EXPORT_SUFFIX}; pass --out NAME{EXPORT_SUFFIX}"
        )
    if out.is_dir():
        raise UserError(f"cannot export to {out}: it is a directory; pass the name of a file in --out")
    modules = load_modules(run_dir, step=step)
    header = ExportHeader(
        run=modules.config.name,
        step=modules.step,
        git_commit=_git_commit(run_dir, modules),
        encoder=modules.config.encoder.model_copy(update=_normalization_of(modules.encoder)),
    )
    weights = {name: tensor.contiguous() for name, tensor in named_as_published(modules.encoder).state_dict().items()}
    # One key only: safetensors writes several keys in an order that differs from process to process.
    write_atomically(out, safetensors.torch.save(weights, metadata={HEADER_KEY: header.model_dump_json()}))


def _normalization_of(encoder: Encoder) -> dict[str, tuple[float, ...]]:
    """Return the mean and std of the encoder as settings, even if the config takes them from the data."""
    named = encoder.normalization
    assert named is not None
    return {"mean": named.mean, "std": named.std}


def _git_commit(run_dir: RunDir, modules: TrainedModules) -> str | None:
    """Return the commit of the last start before the step of `modules`; None if it is not recorded."""
    starts: list[dict[str, Any]] = run_dir.read_provenance().get("starts") or []
    before = [start.get("git_commit") for start in starts if (start.get("start_step") or 0) < modules.step]
    return before[-1] if before else None
