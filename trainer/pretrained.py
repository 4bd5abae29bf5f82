"""Load encoders, for probes, analyses and other people's code: from a run directory, or from an export.

An export is one safetensors file, written by `python -m trainer.export`: the trunk's weights, by the names of its
library, and a header that says how to build the trunk. It holds data only, so loading a stranger's file runs no code of
theirs. A directory in the layout of the Hugging Face Hub holds the same file as model.safetensors.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Literal

import safetensors
import torch
from torch import Tensor, nn

from data_pipeline.core.errors import UserError
from data_pipeline.core.schema import Schema
from data_pipeline.storage.manifest import Manifest
from trainer.checkpoint.restore import load_weights
from trainer.checkpoint.run_state import NAME_DIGITS
from trainer.config import read_run_config
from trainer.models.encoder import Encoder, EncoderConfig, build_encoder, inside_wrappers
from trainer.modules import TrainedModules, build_modules
from trainer.open_settings import decide_as_recorded
from trainer.own_code import warn_of_changed_code
from trainer.run_dir import RunDir, open_run

EXPORT_SUFFIX = ".safetensors"
HEADER_KEY = "encoder_export"
HUB_WEIGHTS = "model.safetensors"  # the name that the Hub expects


class ExportHeader(Schema):
    """The header of an export: JSON under `HEADER_KEY` of the file's metadata.

    `encoder.mean` and `encoder.std` normalise each input channel. `git_commit` is the commit of the code that trained
    up to this step; None if it is not known.
    """

    version: Literal[1] = 1
    run: str
    step: int
    git_commit: str | None
    encoder: EncoderConfig


def load_encoder(path: str | Path, *, step: int | None = None) -> Encoder:
    """Return the encoder of a run directory, or of an export (a file or a Hub's directory), on the CPU in eval mode.

    `step` is a checkpoint of the run; None means the newest. An export has no head, so its encoder returns features and
    pooled features, but no embeddings.

    Raises `UserError` if `path` is neither, has no such checkpoint, or has other weights than its header says.
    """
    path = Path(path)
    if (path / HUB_WEIGHTS).is_file():
        path /= HUB_WEIGHTS
    is_export = path.is_file() or (path.suffix == EXPORT_SUFFIX and not path.is_dir())
    if is_export and step is not None:
        raise UserError(f"{path} is an export, which holds one step; leave out step={step}, or pass a run directory")
    return _load_export(path) if is_export else load_modules(open_run(path), step=step).encoder


def load_modules(run_dir: RunDir, *, step: int | None = None) -> TrainedModules:
    """Return the modules of a run in eval mode on the CPU, at `step` or the newest whole checkpoint.

    Step 0 is the untrained modules, rebuilt from the config and its seed. Training may go on meanwhile.
    Raises `UserError` if there is no such step, or if it cannot be loaded.
    """
    config = read_run_config(run_dir)
    warn_of_changed_code(run_dir)
    modules = build_modules(decide_as_recorded(config, run_dir))
    step, trained_on = load_weights(run_dir, modules.trained_modules, step=step)
    for module in modules.trained_modules.values():
        module.eval()
    return replace(modules, step=step, trained_on=trained_on)


def warn_of_other_data(modules: TrainedModules, which: Literal["train", "test"], manifest: Manifest) -> None:
    """Print a warning if a dataset is not the one on which the modules were trained, if that is known.

    `manifest` was read at the location in the config; for the train set of a mixture, at that of the probed source.
    """
    trained_on, data, sha256 = modules.trained_on, modules.config.data, manifest.sha256
    if trained_on is None:
        return
    if which == "train":
        location, before = data.probed_dir, trained_on.train_manifest_sha256
        known = {before, *trained_on.train_sources.values()}
    else:
        location, before = data.test_dir, trained_on.test_manifest_sha256
        known = {before}
    if sha256 not in known:
        print(
            f"warning: {location} holds another dataset (manifest {sha256[:NAME_DIGITS]}) than the one with which the "
            f"run was trained (manifest {before[:NAME_DIGITS]}); the numbers belong to the present dataset",
            file=sys.stderr,
        )


def unwrapped(encoder: nn.Module) -> Encoder:
    """Return the encoder inside DataParallel, DistributedDataParallel and `torch.compile`, or the encoder itself.

    Raises `UserError` if there is no encoder inside.
    """
    module = inside_wrappers(encoder)
    if not isinstance(module, Encoder):
        raise UserError(
            f"{type(module).__name__} is not an encoder; pass one from build_encoder or load_encoder, also inside "
            "DataParallel, DistributedDataParallel or torch.compile"
        )
    return module


class NoHead(nn.Module):
    """A stand-in for the head, which an export does not have."""

    def forward(self, pooled_BC: Tensor) -> Tensor:
        """Raise `UserError`."""
        raise UserError(
            "this encoder comes from an export, which has no head and so no embeddings; call features() or pooled(), "
            "or load the run directory"
        )


def _load_export(path: Path) -> Encoder:
    header, weights = _read_export(path)
    try:
        with torch.random.fork_rng(devices=[]):
            encoder = build_encoder(header.encoder)
        encoder.trunk.as_published.load_state_dict(weights)
    except Exception as error:  # timm may raise anything for a stranger's options
        reason = " ".join(str(error).split())
        raise UserError(
            f'{path} does not hold the "{header.encoder.kind}" that its header names ({reason}); export it again'
        ) from None
    encoder.head = NoHead()
    return encoder.eval()


def _read_export(path: Path) -> tuple[ExportHeader, dict[str, Tensor]]:
    try:
        with safetensors.safe_open(path, "pt") as file:
            header = json.loads((file.metadata() or {})[HEADER_KEY])
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  it is no mapping
    except (OSError, safetensors.SafetensorError, KeyError, ValueError) as error:
        raise UserError(
            f"{path} is not an encoder that python -m trainer.export wrote ({type(error).__name__}: {error}); export "
            "the encoder again"
        ) from None
    return ExportHeader.parse(header, where=f"the header of {path}"), weights
