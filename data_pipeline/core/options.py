"""Read the options of an overlay or a source: `--overlay-option NAME=VALUE` and `--source-option NAME=VALUE`.

A class with options has an attribute `options_schema`, a `Schema` with a field for each of them. A class without one
takes no options.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Final

OptionValue = str | int | float
Options = Mapping[str, OptionValue]
OVERLAY_OPTION: Final = "--overlay-option"
SOURCE_OPTION: Final = "--source-option"


def add_option_argument(parser: argparse.ArgumentParser, flag: str, summary: str) -> None:
    """Add `flag`, which may be given several times. Its value is a list of (name, value)."""
    parser.add_argument(flag, metavar="NAME=VALUE", type=_name_and_value, action="append", default=[], help=summary)


def _name_and_value(word: str) -> tuple[str, str]:
    name, equals, value = word.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{word!r} is not of the form NAME=VALUE")
    return name, value
