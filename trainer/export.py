"""`python -m trainer.export RUN_DIR --out encoder.safetensors`: export the trained encoder for other people's code.

Writes one safetensors file: the weights of the trunk, by the names of its library, and a header with run, step, commit
and the encoder's config, which includes the mean and std to normalise the input by.
Guarantees: no pickle, no partly written file, and no name that the library does not know.

A standard ResNet loads into torchvision's, without the classifier, because none was trained:

    model = torchvision.models.resnet18()
    model.fc = torch.nn.Identity()
    model.load_state_dict(safetensors.torch.load_file("encoder.safetensors"))

For the small-image form ("resnet18_small") change its stem before that:

    model.conv1 = torch.nn.Conv2d(3, 64, 3, padding=1, bias=False)
    model.maxpool = torch.nn.Identity()

With one input channel, `conv1` takes 1 instead of 3. If `encoder.stem_relu` is false, remove the model's first ReLU as
well (torchvision uses `model.relu` once). ResNet-10 is narrower than torchvision's and, like WRN-34-5, keeps the names
of this package. A timm backbone loads into `timm.create_model(name, num_classes=0, **options)`. Each takes pictures
normalised by mean and std. `trainer.models.load_encoder("encoder.safetensors")` does all of this for you.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import safetensors.torch

from data_pipeline.core.errors import UserError, run_command
from trainer.models.encoder import Encoder
from trainer.modules import TrainedModules
from trainer.pretrained import EXPORT_SUFFIX, HEADER_KEY, ExportHeader, load_modules, named_as_published
from trainer.run_dir import RunDir, open_run, write_atomically

_DESCRIPTION = (
    "Export the trained encoder of a run as one safetensors file, which torchvision, timm or this package loads."
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m trainer.export", description=_DESCRIPTION)
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="The run directory of a training.")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="Write this file. Its name must end in .safetensors."
    )
    parser.add_argument(
        "--step",
        type=int,
        metavar="N",
        help="Export the checkpoint of step N; 0 is the untrained encoder. Without it, the newest one is exported.",
    )
    arguments = parser.parse_args()
    export(open_run(arguments.run_dir), arguments.out, step=arguments.step)
    print(arguments.out)


def export(run_dir: RunDir, out: Path, *, step: int | None = None) -> None:
    """Write the encoder of a run at `step` (None: the newest checkpoint) to `out`; replaces an existing file.

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
    """Return the mean and std of the encoder as settings, also if they come from the data."""
    named = encoder.normalization
    assert named is not None
    return {"mean": named.mean, "std": named.std}


def _git_commit(run_dir: RunDir, modules: TrainedModules) -> str | None:
    """Return the commit of the last start that trained towards the step of `modules`; None if it is not recorded."""
    starts: list[dict[str, Any]] = run_dir.read_provenance().get("starts") or []
    before = [start.get("git_commit") for start in starts if (start.get("start_step") or 0) < modules.step]
    return before[-1] if before else None


if __name__ == "__main__":
    run_command(main)
