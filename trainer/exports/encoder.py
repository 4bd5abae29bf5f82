"""Write encoders for use in other code: as one safetensors file, as ONNX, or in the layout of the Hugging Face Hub.

`trainer.pretrained.load_encoder` reads the first and the last. ONNX is for other runtimes only.

Guarantees: the same encoder gives the same safetensors bytes. A file is written as a whole or not at all.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import io
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from data_pipeline.core.errors import UserError
from trainer.exports.model_card import config_of_the_hub, model_card, model_card_of_run
from trainer.models.encoder import Encoder
from trainer.modules import TrainedModules
from trainer.open_settings import recorded_input_size
from trainer.pretrained import (
    EXPORT_SUFFIX,
    HEADER_KEY,
    HUB_WEIGHTS,
    ExportHeader,
    load_modules,
    named_as_published,
    unwrapped,
)
from trainer.run_dir import RunDir, open_run, write_atomically, write_json

ONNX_SUFFIX = ".onnx"


def export(run_dir: RunDir, out: Path, *, step: int | None = None, image_size: tuple[int, int] | None = None) -> None:
    """Write the encoder of a run at `step` (None: the newest checkpoint) to `out`. Replaces an existing file.

    The ending of `out` is .safetensors or .onnx. ONNX needs `image_size`, the height and width of the inputs. Raises
    `UserError` if there is no such checkpoint or if `out` has another ending, and `OSError` if `out` cannot be written.
    """
    if out.suffix not in {EXPORT_SUFFIX, ONNX_SUFFIX}:
        raise UserError(
            f"cannot export to {out}: an encoder is written as {EXPORT_SUFFIX} or {ONNX_SUFFIX}; pass "
            f"--out NAME{EXPORT_SUFFIX}, or --hub DIR"
        )
    if out.is_dir():
        raise UserError(f"cannot export to {out}: it is a directory; pass the name of a file in --out")
    if (out.suffix == ONNX_SUFFIX) != (image_size is not None):
        raise UserError(
            f"cannot export to {out}: an ONNX file, and no other, is for inputs of one size; "
            f"{'pass' if image_size is None else 'leave out'} --image-size"
        )
    modules = load_modules(run_dir, step=step)
    header = _header_of_run(run_dir, modules)
    if image_size is None:
        write_atomically(out, _safetensors_bytes(modules.encoder, header))
    else:
        write_atomically(out, _onnx_bytes(modules.encoder, header, image_size=image_size))


def save_encoder(encoder: nn.Module, out: str | Path, *, name: str = "encoder", step: int = 0) -> None:
    """Write an encoder of your own training loop as a file that `load_encoder` reads, without its head.

    The encoder may be inside DataParallel, DistributedDataParallel or `torch.compile`. `name` and `step` are kept in
    the file, for the reader. Raises `UserError` if `out` does not end in .safetensors, or if the encoder does not come
    from `build_encoder` or has no mean and std.
    """
    out, encoder = Path(out), unwrapped(encoder)
    if out.suffix != EXPORT_SUFFIX or out.is_dir():
        raise UserError(f"cannot save the encoder to {out}: pass the name of a file that ends in {EXPORT_SUFFIX}")
    write_atomically(out, _safetensors_bytes(encoder, _header_of(encoder, name=name, step=step)))


def save_pretrained(
    source: nn.Module | RunDir | str | Path, directory: str | Path, *, name: str | None = None, step: int | None = None
) -> None:
    """Write an encoder in the layout of the Hugging Face Hub: config.json, model.safetensors, README.md. No network.

    `source` is an encoder, as `save_encoder` takes it, or a run directory, of which `step` is taken (None: the newest
    checkpoint). The README.md is a model card. For a run it says on which data, with which settings and for how many
    steps it was trained, and the accuracies of its probes. `load_encoder(directory)` reads it back;
    `huggingface_hub.upload_folder` publishes it.

    `name` is the title of the card (default: the name of the run). Replaces the three files if they are there. Raises
    `UserError` as `load_encoder` and `save_encoder` do, or if `directory` is the directory of a run.
    """
    directory = Path(directory)
    if (directory / "checkpoints").is_dir():
        raise UserError(f"{directory} is a run directory, whose config.json would be lost; pass another directory")
    if isinstance(source, nn.Module):
        encoder, input_size = unwrapped(source), None
        header = _header_of(encoder, name=name or "encoder", step=step or 0)
        card = model_card(header)
    else:
        run_dir = source if isinstance(source, RunDir) else open_run(Path(source))
        modules = load_modules(run_dir, step=step)
        encoder, header = modules.encoder, _header_of_run(run_dir, modules)
        input_size = recorded_input_size(run_dir.read_provenance())
        card = model_card_of_run(run_dir, modules, header, title=name)
    write_json(directory / "config.json", config_of_the_hub(header, input_size=input_size))
    write_atomically(directory / "README.md", card)
    write_atomically(directory / HUB_WEIGHTS, _safetensors_bytes(encoder, header))  # last: it makes the directory whole


def export_onnx(encoder: nn.Module, out: str | Path, *, image_size: int | tuple[int, int]) -> None:
    """Write an encoder as an ONNX graph from "pictures" (B, C, H, W) in [0, 1] to "pooled" features (B, F), float32.

    The graph normalises the pictures. B is free; `image_size` is H and W, or one number for both. The encoder may be
    wrapped, as for `save_encoder`. Raises `UserError` if the packages onnx and onnxscript are missing, or if the
    encoder does not take inputs of that size.
    """
    out, encoder = Path(out), unwrapped(encoder)
    size = (image_size, image_size) if isinstance(image_size, int) else image_size
    if out.suffix != ONNX_SUFFIX or out.is_dir():
        raise UserError(f"cannot write ONNX to {out}: pass the name of a file that ends in {ONNX_SUFFIX}")
    write_atomically(out, _onnx_bytes(encoder, _header_of(encoder, name="encoder", step=0), image_size=size))


def _header_of(encoder: Encoder, *, name: str, step: int, git_commit: str | None = None) -> ExportHeader:
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
    return ExportHeader(run=name, step=step, git_commit=git_commit, encoder=encoder.config)


def _header_of_run(run_dir: RunDir, modules: TrainedModules) -> ExportHeader:
    commit = _git_commit(run_dir, modules)
    return _header_of(modules.encoder, name=modules.config.name, step=modules.step, git_commit=commit)


def _git_commit(run_dir: RunDir, modules: TrainedModules) -> str | None:
    """Return the commit of the last start before the step of `modules`; None if it is not recorded."""
    starts: list[dict[str, Any]] = run_dir.read_provenance().get("starts") or []
    before = [start.get("git_commit") for start in starts if (start.get("start_step") or 0) < modules.step]
    return before[-1] if before else None


def _safetensors_bytes(encoder: Encoder, header: ExportHeader) -> bytes:
    weights = {
        name: tensor.detach().cpu().contiguous() for name, tensor in named_as_published(encoder).state_dict().items()
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
    for package in ("onnx", "onnxscript"):
        if importlib.util.find_spec(package) is None:
            raise UserError(f"writing ONNX needs the package {package}; install it with pip install -e '.[onnx]'")
    encoder.feature_size(*image_size)  # raises UserError if the encoder does not take this size
    with torch.no_grad(), _quiet():
        program = torch.onnx.export(
            _Pooled(copy.deepcopy(encoder)).cpu().float().eval(),
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


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hold back what the exporter prints about its own versions and passes."""
    exporter = logging.getLogger("torch.onnx")
    level = exporter.level
    exporter.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        exporter.setLevel(level)
