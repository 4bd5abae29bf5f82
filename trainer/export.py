"""`python -m trainer.export RUN_DIR --out encoder.safetensors`: write the trained encoder for use in other code.

`python -m trainer.export RUN_DIR... --results results.tar.xz` packs what was measured in runs, without checkpoints.

Writes one safetensors file: the weights of the trunk by the names of its library, and a header. The header holds the
encoder's config with the mean and std of its input, the run, the step and the commit. The file is no pickle, and it is
written as a whole or not at all. `trainer.models.load_encoder("encoder.safetensors")` reads it.

`--out encoder.onnx --image-size 32` writes an ONNX graph from pictures in [0, 1] to pooled features. `--hub DIR` writes
the layout of the Hugging Face Hub: config.json, model.safetensors, and a model card as README.md.

The weights of a standard ResNet have torchvision's names, and those of a timm backbone have timm's.
`trainer.exports.published_models` makes the models of these libraries from an encoder, and reads theirs.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from data_pipeline.core.arguments import positive, program
from data_pipeline.core.errors import UserError, run_command
from data_pipeline.core.imports import add_code_argument, import_code
from trainer.run_dir import open_run, runs_of, say_what_is_left_out


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program("trainer.export"),
        description="Write the trained encoder of a run for use in other code, or pack the results of runs.",
    )
    add = parser.add_argument
    add(
        "run_dirs",
        type=Path,
        nargs="+",
        metavar="RUN_DIR",
        help="The run directory; for --results several, or a study.",
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument(
        "--out", type=Path, metavar="FILE", help="The file to write, such as encoder.safetensors or encoder.onnx."
    )
    where.add_argument(
        "--hub", type=Path, metavar="DIR", help="The directory to write in the layout of the Hugging Face Hub."
    )
    where.add_argument(
        "--results",
        type=Path,
        metavar="FILE.tar.xz",
        help="The file for the configs, logs and results of all finished runs; `mkdir -p runs && tar -xf FILE -C runs` "
        "unpacks it.",
    )
    add(
        "--without-logs",
        action="store_true",
        help="Of metrics.jsonl, most of the bytes of --results, keep only the online probes.",
    )
    add(
        "--image-size",
        type=_image_size,
        metavar="SIZE",
        help="The size of the inputs of an ONNX file in pixels, such as 32 or 128x51 (height x width).",
    )
    add("--step", type=int, help="The checkpoint to export; 0 is the untrained encoder (default: the newest).")
    add_code_argument(parser)
    return parser


def _image_size(text: str) -> tuple[int, int]:
    numbers = [positive(number) for number in text.split("x")]
    if len(numbers) > 2:
        raise argparse.ArgumentTypeError(f"{text} has more than two numbers; write 32, or 128x51")
    return numbers[0], numbers[-1]


def _write_results(arguments: argparse.Namespace) -> None:
    from trainer.reports.archive import write_archive

    of_encoders = {"--image-size": arguments.image_size, "--step": arguments.step}
    for option, value in of_encoders.items():
        if value is not None:
            raise UserError(f"{option} is for an encoder; leave it out for --results")
    say_what_is_left_out(arguments.run_dirs)
    paths = runs_of(arguments.run_dirs)
    num_packed = write_archive(paths, arguments.results, with_logs=not arguments.without_logs)
    print(f"{arguments.results}: the results of {num_packed} of {len(paths)} run(s); only finished runs are packed")


def main() -> None:
    arguments = _parser().parse_args()
    if arguments.results is not None:
        _write_results(arguments)
        return
    if arguments.without_logs:
        raise UserError("--without-logs is for --results; leave it out")
    if len(arguments.run_dirs) > 1:
        raise UserError(f"one call exports the encoder of one run, and {len(arguments.run_dirs)} are given; pass one")
    from trainer.exports.encoder import export, save_pretrained
    from trainer.own_code import warn_of_changed_code

    run_dir = open_run(arguments.run_dirs[0])
    import_code(arguments.code)
    warn_of_changed_code([run_dir])
    if arguments.hub is None:
        export(run_dir, arguments.out, step=arguments.step, image_size=arguments.image_size)
    elif arguments.image_size is not None:
        raise UserError("--image-size is for --out FILE.onnx; leave it out for --hub")
    else:
        save_pretrained(run_dir, arguments.hub, step=arguments.step)
    print(arguments.out or arguments.hub)


if __name__ == "__main__":
    run_command(main)
