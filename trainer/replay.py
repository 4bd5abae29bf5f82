"""`python -m trainer.replay RUN_DIR --step N`: repeat a skipped step, and name the origin of its first inf or nan."""

from __future__ import annotations

import argparse
from pathlib import Path

from data_pipeline.core.arguments import program
from data_pipeline.core.errors import run_command
from data_pipeline.core.imports import add_code_argument, import_code
from trainer.run_dir import open_run


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program("trainer.replay"),
        description="Repeat a skipped step, and name the origin of its first inf or nan.",
    )
    add = parser.add_argument
    add("run_dir", type=Path, metavar="RUN_DIR", help="The run directory.")
    add("--step", type=int, required=True, metavar="N", help="A step that has a record under RUN_DIR/nonfinite.")
    add("--device", choices=("cpu", "cuda"), help="The device (default: cuda if there is a GPU).")
    add_code_argument(parser)
    return parser


def main() -> None:
    arguments = _parser().parse_args()
    from data_pipeline.core.devices import named_device
    from trainer.fault_tolerance.step_record import read_record
    from trainer.step_replay import replay

    device = named_device(arguments.device).type
    run_dir = open_run(arguments.run_dir)
    import_code(arguments.code)
    record, states = read_record(run_dir, arguments.step)
    print("\n".join(replay(run_dir, record, states, device=device)))


if __name__ == "__main__":
    run_command(main)
