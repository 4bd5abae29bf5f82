"""`python -m trainer.export RUN_DIR --out encoder.safetensors`: write the trained encoder for use in other code.

Writes one safetensors file: the weights of the trunk by the names of its library, and a header. The header holds the
encoder's config with the mean and std of its input, the run, the step and the commit. The file is no pickle, and it is
written as a whole or not at all. `trainer.load_encoder("encoder.safetensors")` reads it.

`--out encoder.onnx --image-size 32` writes an ONNX graph from pictures in [0, 1] to pooled features. `--hub DIR` writes
the layout of the Hugging Face Hub: config.json, model.safetensors, and a model card as README.md.

The weights of a standard ResNet have torchvision's names, and those of a timm backbone have timm's. So these libraries
load them, and `trainer.load_published` reads theirs.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from data_pipeline.core.arguments import positive, program, whole
from data_pipeline.core.errors import UserError, run_command
from data_pipeline.core.imports import add_code_argument, import_code
from trainer.run_dir import open_run


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program("trainer.export"),
        description="Write the trained encoder of a run for use in other code.",
    )
    add = parser.add_argument
    add("run_dir", type=Path, metavar="RUN_DIR", help="The run directory.")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument(
        "--out", type=Path, metavar="FILE", help="The file to write, such as encoder.safetensors or encoder.onnx."
    )
    where.add_argument(
        "--hub", type=Path, metavar="DIR", help="The directory to write in the layout of the Hugging Face Hub."
    )
    add(
        "--image-size",
        type=_image_size,
        metavar="SIZE",
        help="The size of the inputs of an ONNX file in pixels, such as 32 or 128x51 (height x width).",
    )
    add("--step", type=whole, help="The checkpoint to export; 0 is the untrained encoder (default: the newest).")
    add_code_argument(parser)
    return parser


def _image_size(text: str) -> tuple[int, int]:
    numbers = [positive(number) for number in text.split("x")]
    if len(numbers) > 2:
        raise argparse.ArgumentTypeError(f"{text} has more than two numbers; write 32, or 128x51")
    return numbers[0], numbers[-1]


def main() -> None:
    arguments = _parser().parse_args()
    from trainer.exports.encoder import ONNX_SUFFIX, export_onnx, save_encoder, save_pretrained

    run_dir, step = open_run(arguments.run_dir), arguments.step
    is_onnx = arguments.out is not None and arguments.out.suffix == ONNX_SUFFIX
    if is_onnx != (arguments.image_size is not None):
        raise UserError("an ONNX file, and no other, needs --image-size; write --out FILE.onnx --image-size SIZE")
    import_code(arguments.code)
    if is_onnx:
        export_onnx(run_dir, arguments.out, image_size=arguments.image_size, step=step)
    elif arguments.hub is None:
        save_encoder(run_dir, arguments.out, step=step)
    else:
        save_pretrained(run_dir, arguments.hub, step=step)
    print(arguments.out or arguments.hub)


if __name__ == "__main__":
    run_command(main)
