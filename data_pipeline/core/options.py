"""Read the options of an overlay or a source: `--overlay-option NAME=VALUE` and `--source-option NAME=VALUE`.

A class with options has an attribute `options_schema`, a `Schema` with a field for each of them. A class without one
takes no options.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, TypeVar

from data_pipeline.core.errors import UserError
from data_pipeline.core.schema import Schema

OptionValue = str | int | float
Options = Mapping[str, OptionValue]
OVERLAY_OPTION: Final = "--overlay-option"
SOURCE_OPTION: Final = "--source-option"

T = TypeVar("T", bound=Schema)


class NoOptions(Schema):
    """The options of a class that has none."""


def parse_words(words: Sequence[str], *, flag: str) -> dict[str, OptionValue]:
    """Return the options of words such as "bits=10"; the last one counts. Raises `UserError` without "=".

    Examples:
        >>> parse_words(["bits=10", "join=tall"], flag="--overlay-option")
        {'bits': '10', 'join': 'tall'}
    """
    options: dict[str, OptionValue] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise UserError(f"{flag} {word} is not of the form NAME=VALUE; write it as in {flag} bits=10")
        options[name] = value
    return options


def parse_options(schema: type[T], given: Options, *, owner: str, flag: str) -> T:
    """Return the options of `owner`, such as "the overlay bits"; a value may be a number or its text.

    Raises `UserError` that names the options that there are, if one is unknown or has a wrong value.
    """
    try:
        return schema.parse(dict(given), where=f"{flag} of {owner}")
    except UserError as error:
        raise UserError(f"{error}; its options are {', '.join(schema.model_fields) or 'none'}") from None
