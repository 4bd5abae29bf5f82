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
    """Return the options of words such as "bits=10". Raises `UserError` without "=", or if a name comes twice.

    Examples:
        >>> parse_words(["bits=10", "join=tall"], flag="--overlay-option")
        {'bits': '10', 'join': 'tall'}
    """
    options: dict[str, OptionValue] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not (name and equals and value):
            raise UserError(f"{flag} {word} is not of the form NAME=VALUE; write it as in {flag} bits=10")
        if name in options:
            raise UserError(f"{flag} gives {name} twice ({options[name]} and {value}); give each option once")
        options[name] = value
    return options


def parse_options(schema: type[T], given: Options, *, owner: str, flag: str) -> T:
    """Return the options of `owner`, such as "the overlay bits"; a value may be a number or its text.

    Raises `UserError` that names the options that there are, if one is unknown or has a wrong value.
    """
    fields = schema.model_fields
    if given and not fields:
        raise UserError(f"{owner} has no options, so it takes no {flag}; leave it out")
    if missing := [name for name, field in fields.items() if field.is_required() and name not in given]:
        raise UserError(f"{owner} needs its option {missing[0]}; give it by {flag} {missing[0]}=VALUE")
    for name in given:
        if name not in fields:
            raise UserError(f'{owner} has no option "{name}"; its options are {", ".join(fields)}')
    try:
        return schema.parse(dict(given), where=flag)
    except UserError as error:
        raise UserError(f"{error}; the options of {owner.removeprefix('the ')} are {', '.join(fields)}") from None


def values_of(options: Schema) -> dict[str, OptionValue]:
    """Return the values of all options by name, with the defaults of those that were not given."""
    return options.model_dump(mode="python")
