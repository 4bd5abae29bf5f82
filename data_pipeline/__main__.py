"""`python -m data_pipeline COMMAND`: build, look at and check datasets."""

from __future__ import annotations

import argparse
from typing import NoReturn

from data_pipeline.building import build
from data_pipeline.core.errors import UserError, run_command
from data_pipeline.tools import batch_trace, bench, preview, verify

COMMANDS = {
    "build": (build, "make a dataset: shards and a manifest"),
    "verify": (verify, "read every byte and name what is wrong"),
    "preview": (preview, "draw the first samples as a picture"),
    "trace": (batch_trace, "print which samples training would see, batch by batch"),
    "bench": (bench, "measure how many samples a second can be read"),
}


class Parser(argparse.ArgumentParser):
    """Reports a wrong argument as every other mistake of the user is: in one sentence."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see `{self.prog} --help`")


def main() -> None:
    parser = Parser(prog="python -m data_pipeline", description="Build, look at and check datasets.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, (module, summary) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    run_command(main)
