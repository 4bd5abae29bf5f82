"""Write encoders for use in other code: as one safetensors file, as ONNX, or in the layout of the Hugging Face Hub.

`trainer.pretrained.load_encoder` reads the first and the last. ONNX is for other runtimes only.

Guarantees: the same encoder gives the same safetensors bytes. A file is written as a whole or not at all.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, TypeAlias

import safetensors.torch
import torch
from torch import Tensor, nn

from data_pipeline.core.errors import UserError
from data_pipeline.core.imports import check_installed
from trainer.exports.model_card import ExportedRun, config_of_the_hub, model_card
from trainer.models.encoder import Encoder
from trainer.open_settings import RECORDED_INPUT_SIZE
from trainer.pretrained import (
    EXPORT_SUFFIX,
    HEADER_KEY,
    HUB_WEIGHTS,
    ExportHeader,
    load_modules,
    unwrapped,
)
from trainer.run_dir import RunDir, open_run, write_atomically, write_json

ONNX_SUFFIX = ".onnx"
Source: TypeAlias = nn.Module | RunDir | str | Path
"""An encoder, also inside DataParallel, DistributedDataParallel or `torch.compile`; or a run, or its directory."""


def save_encoder(source: Source, out: str | Path, *, name: str | None = None, step: int | None = None) -> None:
    """Write an encoder as a file that `load_encoder` reads, without its head. Replaces an existing file.

    Of a run, takes the checkpoint `step` (None: the newest). Of an encoder of your own training loop, `name` and `step`
    are kept in the file, for the reader. Raises `UserError` if `out` does not end in .safetensors, if there is no such
    checkpoint, or if the encoder does not come from `build_encoder` or has no mean and std. Raises `OSError` if `out`
    cannot be written.
    """
    out = _checked(out, EXPORT_SUFFIX)
    encoder, header, _ = _open(source, name=name, step=step)
    write_atomically(out, _safetensors_bytes(encoder, header))


def save_pretrained(source: Source, directory: str | Path, *, name: str | None = None, step: int | None = None) -> None:
    """Write an encoder in the layout of the Hugging Face Hub: config.json, model.safetensors, README.md. No network.

    `source`, `name` and `step` are those of `save_encoder`. The README.md is a model card of the title `name` (default:
    the name of the run). For a run it says on which data, with which settings and for how many steps it was trained,
    and the accuracies of its probes. `load_encoder(directory)` reads it back; `huggingface_hub.upload_folder` publishes
    it.

    Replaces the three files if they are there. Raises `UserError` as `save_encoder` does, or if `directory` is the
    directory of a run.
    """
    directory = Path(directory)
    if (directory / "checkpoints").is_dir():
        raise UserError(f"{directory} is a run directory, whose config.json would be lost; pass another directory")
    encoder, header, run = _open(source, name=name, step=step)
    input_size = None if run is None else run.run_dir.read_provenance().get(RECORDED_INPUT_SIZE)
    write_json(directory / "config.json", config_of_the_hub(header, input_size=input_size))
    write_atomically(directory / "README.md", model_card(header, title=name, run=run, input_size=input_size))
    write_atomically(directory / HUB_WEIGHTS, _safetensors_bytes(encoder, header))  # last: it makes the directory whole


def export_onnx(source: Source, out: str | Path, *, image_size: int | tuple[int, int], step: int | None = None) -> None:
    """Write an encoder as an ONNX graph from "pictures" (B, C, H, W) in [0, 1] to "pooled" features (B, F), float32.

    The graph normalises the pictures. B is free; `image_size` is H and W, or one number for both. `source` and `step`
    are those of `save_encoder`. Raises `UserError` if the packages onnx and onnxscript are missing, or if the encoder
    does not take inputs of that size.
    """
    out = _checked(out, ONNX_SUFFIX)
    size = (image_size, image_size) if isinstance(image_size, int) else image_size
    encoder, header, _ = _open(source, name=None, step=step)
    write_atomically(out, _onnx_bytes(encoder, header, image_size=size))


def _checked(out: str | Path, suffix: str) -> Path:
    out = Path(out)
    if out.suffix != suffix or out.is_dir():
        raise UserError(f"cannot write the encoder to {out}: pass the name of a file that ends in {suffix}")
    return out


def _open(source: Source, *, name: str | None, step: int | None) -> tuple[Encoder, ExportHeader, ExportedRun | None]:
    """Return the encoder, the header of its export, and the run that it comes from, if it comes from one."""
    run = None
    git_commit: str | None = None
    if isinstance(source, nn.Module):
        encoder, name, step = unwrapped(source), name or "encoder", step or 0
    else:
        run_dir = source if isinstance(source, RunDir) else open_run(Path(source))
        run = ExportedRun(run_dir, load_modules(run_dir, step=step))
        encoder, name, step = run.modules.encoder, run.modules.config.name, run.modules.step
        git_commit = _git_commit(run)
    if encoder.config is None:
        raise UserError(
            "the encoder does not come from build_encoder, so no config says how to build it again; save its "
            "state_dict() yourself"
        )
    if encoder.normalization is None:
        raise UserError(
            "the encoder has no mean and std by which it normalises pictures; set them in its config, or pass "
            "normalization= to build_encoder"
        )
    config = encoder.config
    if config.weights_path is not None:  # a path of this machine
        config = config.model_copy(update={"weights": config.weights_path.name})
    return encoder, ExportHeader(run=name, step=step, git_commit=git_commit, encoder=config), run


def _git_commit(run: ExportedRun) -> str | None:
    """Return the commit of the last start before the step of the modules; None if it is not recorded."""
    starts: list[dict[str, Any]] = run.run_dir.read_provenance().get("starts") or []
    before = [start.get("git_commit") for start in starts if (start.get("start_step") or 0) < run.modules.step]
    return before[-1] if before else None


def _safetensors_bytes(encoder: Encoder, header: ExportHeader) -> bytes:
    weights = {
        name: tensor.detach().cpu().contiguous() for name, tensor in encoder.trunk.as_published.state_dict().items()
    }
    # One key only: safetensors writes several keys in an order that differs from process to process.
    return safetensors.torch.save(weights, metadata={HEADER_KEY: header.model_dump_json()})


class _Pooled(nn.Module):
    """The part of an encoder that an ONNX file holds."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, pictures: Tensor) -> Tensor:
        return self.encoder.pooled(pictures)


def _onnx_bytes(encoder: Encoder, header: ExportHeader, *, image_size: tuple[int, int]) -> bytes:
    check_installed("onnx", "onnxscript", extra="onnx", user="writing ONNX")
    pooled = _Pooled(copy.deepcopy(encoder)).cpu().float().eval()
    pooled.encoder.feature_size(*image_size)  # raises UserError if the encoder does not take this size
    with torch.no_grad():
        program = torch.onnx.export(
            pooled,
            (torch.zeros(2, header.encoder.in_channels, *image_size),),
            input_names=["pictures"],
            output_names=["pooled"],
            dynamic_shapes={"pictures": {0: torch.export.Dim("batch")}},
            dynamo=True,
            verbose=False,
        )
    assert program is not None
    program.model.metadata_props[HEADER_KEY] = header.model_dump_json()
    return bytes(program.model_proto.SerializeToString())
