"""Load encoders, for probes, analyses and other people's code: from a run directory, or from an export.

An export is one safetensors file, written by `python -m trainer.export`: the trunk's weights, by the names of its
library, and a header that says how to build the trunk. It holds data only, so loading a stranger's file runs no code of
theirs. A directory in the layout of the Hugging Face Hub holds the same file as model.safetensors.

A run may also begin with weights that others have trained (`encoder.weights`): `pinned` completes its config with their
hash, and `load_start` loads them.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal

import safetensors
import torch
from torch import Tensor, nn

from data_pipeline.core.errors import UserError
from data_pipeline.core.schema import Schema
from data_pipeline.storage.manifest import Manifest
from trainer.checkpoint.restore import load_weights, newest_state
from trainer.checkpoint.run_state import NAME_DIGITS
from trainer.config import RunConfig, read_run_config
from trainer.models.encoder import (
    TIMM,
    TORCHVISION,
    Encoder,
    EncoderConfig,
    ResNetConfig,
    TimmConfig,
    build_encoder,
    inside_wrappers,
)
from trainer.models.weights import (
    TrainedWeights,
    fit,
    normalization_in,
    read_tensors,
    weights_of_timm,
    weights_of_torchvision,
)
from trainer.modules import TrainedModules, build_modules
from trainer.open_settings import decide_as_recorded
from trainer.own_code import warn_of_changed_code
from trainer.run_dir import RunDir, open_run, read_object

EXPORT_SUFFIX = ".safetensors"
HEADER_KEY = "encoder_export"
HUB_WEIGHTS = "model.safetensors"  # the name that the Hub expects
_OF_THE_HUB: Final = (HUB_WEIGHTS, "pytorch_model.bin")
_OF_TIMM: Final = "timm:"


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
    pooled features, but no embeddings. No stage of the encoder is frozen.

    Raises `UserError` if `path` is neither, has no such checkpoint, or has other weights than its header says.
    """
    path = Path(path)
    if (path / HUB_WEIGHTS).is_file():
        path /= HUB_WEIGHTS
    is_export = path.is_file() or (path.suffix == EXPORT_SUFFIX and not path.is_dir())
    if is_export and step is not None:
        raise UserError(f"{path} is an export, which holds one step; leave out step={step}, or pass a run directory")
    encoder = _load_export(path) if is_export else load_modules(open_run(path), step=step).encoder
    if encoder.config is not None and encoder.config.frozen_stages is not None:
        encoder.trunk.freeze(None)
    return encoder


def load_modules(run_dir: RunDir, *, step: int | None = None) -> TrainedModules:
    """Return the modules of a run in eval mode on the CPU, at `step` or the newest whole checkpoint.

    Step 0 is the untrained modules, rebuilt from the config, its seed and the weights with which the run began.
    Training may go on meanwhile.
    Raises `UserError` if there is no such step, or if it cannot be loaded.
    """
    config = read_run_config(run_dir)
    warn_of_changed_code(run_dir)
    modules = build_modules(decide_as_recorded(config, run_dir))
    if step == 0:
        load_start(modules.encoder)
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


def load_published(encoder: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy weights of others, such as `model.state_dict()` of torchvision or timm, into the trunk of an encoder.

    The encoder may be inside DataParallel or DistributedDataParallel. Its head and its mean and std do not change: set
    those with which the weights were trained. Raises `UserError` if the weights do not fit by the rule of
    `trainer.models.weights.fit`.
    """
    _take(unwrapped(encoder), TrainedWeights("the weights", weights))


def pinned(config: RunConfig, run_dir: RunDir) -> RunConfig:
    """Return the config of a run with the hash, the mean and the std of the weights with which its encoder begins.

    A run with a checkpoint does not need these weights: if their file is gone, these values are those in its
    config.json.
    Raises `UserError` if they cannot be read.
    """
    encoder = config.encoder
    if encoder.weights is None:
        return config
    is_there = encoder.weights_path is not None and encoder.weights_path.exists()
    before = read_run_config(run_dir).encoder if not is_there and newest_state(run_dir).step > 0 else None
    if before is not None and before.weights == encoder.weights:
        sha256, normalization = before.weights_sha256, before.normalization
    else:
        weights = read_weights(encoder)
        sha256, normalization = encoder.weights_sha256 or weights.sha256, weights.normalization
    update: dict[str, Any] = {"weights_sha256": sha256}
    if encoder.weights_normalization == "own" and normalization is not None:
        update |= dict(normalization)
    return config.model_copy(update={"encoder": encoder.model_copy(update=update)})


def load_start(encoder: Encoder) -> str | None:
    """Load the weights that the config of an encoder names into its trunk, and say in a sentence what was taken.

    Returns None if it names none. Raises `UserError` if the weights cannot be read, do not fit, or are not those of
    `weights_sha256`.
    """
    config = encoder.config
    if config is None or config.weights is None:
        return None
    weights = read_weights(config)
    if config.weights_sha256 not in {None, weights.sha256}:
        raise UserError(
            f"{weights.where} holds other weights (hash {weights.sha256[:NAME_DIGITS]}) than those of encoder."
            f"weights_sha256 ({str(config.weights_sha256)[:NAME_DIGITS]}); put those back"
        )
    said = _take(encoder, weights, prefix=config.weights_prefix, exceptions=config.weights_except)
    return f"the encoder begins with {said}; inputs are normalised by {encoder.normalization}"


def _take(encoder: Encoder, weights: TrainedWeights, **settings: Any) -> str:
    trunk = encoder.trunk.as_published
    own = trunk.state_dict()
    taken, said = fit(own, weights, **settings)
    trunk.load_state_dict({**own, **taken})
    return said


def read_weights(config: EncoderConfig) -> TrainedWeights:
    """Return the weights that the config of an encoder names. Raises `UserError` if they cannot be read.

    Their normalisation is not known if it is for another number of channels.
    """
    weights = _read_weights(config)
    if weights.normalization is not None and len(weights.normalization.mean) != config.in_channels:
        return replace(weights, normalization=None)
    return weights


def _read_weights(config: EncoderConfig) -> TrainedWeights:
    path = config.weights_path
    if config.weights == TIMM:
        if not isinstance(config, TimmConfig):
            raise UserError(
                f"encoder.weights=timm is for encoder.kind=timm, but this is {config.kind}; pass a file, or "
                "torchvision:NAME"
            )
        return weights_of_timm(config.name, in_channels=config.in_channels, options=config.options)
    if path is None:
        return weights_of_torchvision(str(config.weights).removeprefix(TORCHVISION))
    path = next((path / name for name in _OF_THE_HUB if (path / name).is_file()), path)
    if path.is_dir():
        checkpoint = re.fullmatch("step_([0-9]+)", path.name)
        run_dir, step = (path, None) if checkpoint is None else (path.parent.parent, int(checkpoint[1]))
        encoder = load_modules(open_run(run_dir), step=step).encoder
        return TrainedWeights(str(path), encoder.trunk.as_published.state_dict(), encoder.normalization)
    return TrainedWeights(str(path), read_tensors(path), normalization_in(_facts_beside(path)))


def _facts_beside(path: Path) -> Mapping[str, Any]:
    """Return what an export, or the config.json of a directory of the Hub, says of the pictures of its weights."""
    if path.suffix == EXPORT_SUFFIX and (header := _header(path)):
        return dict(header["encoder"])
    config = path.with_name("config.json")
    if path.name not in _OF_THE_HUB or not config.is_file():
        return {}
    return dict(read_object(config, mend="fetch the directory again").get("pretrained_cfg", {}))


def open_network(text: str) -> nn.Module:
    """Return a network with its pretrained weights, from pictures (B, C, H, W) in [0, 1] to rows (B, D).

    `text` is "timm:NAME", or "torchvision:NAME" of a ResNet (see `weights_of_torchvision`). The network resizes
    pictures to the size of its weights, and normalises them. It is on the CPU in eval mode. Raises `UserError` if there
    is none.
    """
    config: EncoderConfig
    if text.startswith(_OF_TIMM):
        config = TimmConfig(name=text.removeprefix(_OF_TIMM), weights=TIMM)
    else:
        kind = text.removeprefix(TORCHVISION).partition("_")[0].lower()
        config = ResNetConfig.parse({"kind": kind, "weights": text}, where=text)
    weights = read_weights(config)
    with torch.random.fork_rng(devices=[]):
        encoder = build_encoder(config, normalization=weights.normalization).eval()
    _take(encoder, weights)
    encoder.head = nn.Identity()
    from torchvision.transforms import Resize  # takes as long to import as torch

    return nn.Sequential(Resize(weights.image_size), encoder)


def _load_export(path: Path) -> Encoder:
    header = ExportHeader.parse(_header(path), where=f"the header of {path}")
    try:
        with torch.random.fork_rng(devices=[]):
            encoder = build_encoder(header.encoder)
        encoder.trunk.as_published.load_state_dict(read_tensors(path))
    except Exception as error:  # timm may raise anything for a stranger's options
        reason = " ".join(str(error).split())
        raise UserError(
            f'{path} does not hold the "{header.encoder.kind}" that its header names ({reason}); export it again'
        ) from None
    encoder.head = NoHead()
    return encoder.eval()


def _header(path: Path) -> dict[str, Any]:
    """Return the header of an export; empty if a file of safetensors has none. Raises `UserError` if it has no JSON."""
    try:
        with safetensors.safe_open(path, "pt") as file:
            return dict(json.loads((file.metadata() or {}).get(HEADER_KEY, "{}")))
    except (OSError, safetensors.SafetensorError, ValueError) as error:
        raise UserError(
            f"{path} is not an encoder that python -m trainer.export wrote ({type(error).__name__}: {error}); export "
            "the encoder again"
        ) from None
