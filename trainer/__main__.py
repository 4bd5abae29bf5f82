"""Print the version, or the commands of this package: python -m trainer --version."""

import argparse

from trainer import __version__

if __name__ == "__main__":
    _parser = argparse.ArgumentParser(
        prog="python -m trainer",
        description="The commands are python -m trainer.NAME; each explains itself with --help.",
        epilog="NAME: probe, analyze, report, export or theory. Training is python launch/train.py.",
    )
    _parser.add_argument("--version", action="version", version=__version__, help="Print the version and stop.")
    _parser.parse_args()
    _parser.print_help()
