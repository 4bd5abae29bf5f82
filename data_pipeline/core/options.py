"""Read the options of an overlay or a source: `--overlay-option NAME=VALUE` and `--source-option NAME=VALUE`.

A class with options has an attribute `options_schema`, a `Schema` with a field for each of them. A class without one
takes no options.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Final, TypeVar

from data_pipeline.core.arguments import AppendSetting
from data_pipeline.core.errors import UserError
from data_pipeline.core.schema import Schema

OptionValue = str | int | float
Options = Mapping[str, OptionValue]
OVERLAY_OPTION: Final = "--overlay-option"
SOURCE_OPTION: Final = "--source-option"

T = TypeVar("T", bound=Schema)


class NoOptions(Schema):
    """The options of a class that has none."""


def add_option_argument(parser: argparse.ArgumentParser, flag: str, summary: str) -> None:
    """Add `flag`, which may be given several times. Its value is a list of (name, value)."""
    parser.add_argument(
        flag, metavar="NAME=VALUE", type=_name_and_value, action=AppendSetting, default=[], help=summary
    )


def _name_and_value(word: str) -> tuple[str, str]:
    name, equals, value = word.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{word!r} is not of the form NAME=VALUE")
    return name, value


def parse_options(schema: type[T], given: Options, *, owner: str, flag: str) -> T:
    """Return the options of `owner`, such as "the overlay bits"; a value may be a number or its text.

    Raises `UserError` that names the options that there are, if one is unknown or has a wrong value.
    """
    try:
        return schema.parse(dict(given), where=f"{flag} of {owner}")
    except UserError as error:
        raise UserError(f"{error}; its options are {', '.join(schema.model_fields) or 'none'}") from None
