"""The one rule for labels that stand in files as text or numbers: which of them are no label, and what the classes are.

A csv file, a `.cls` file, a JSON file and a Parquet table give the same labels for the same values. The names of
folders are class names as they are; `normal` writes them as this rule does.
"""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from data_pipeline.core.errors import UserError
from data_pipeline.core.sample import NO_LABEL, OVERLAY
from data_pipeline.core.schema import is_label_name

MAX_CLASSES: Final = 100_000
_MISSING: Final = frozenset({"", "nan", "NaN", "NA", "N/A", "<NA>", "null", "NULL"})
_WHOLE: Final = re.compile(r"(-?)0*(\d+)\.0+", re.ASCII)  # a whole number as pandas writes it in a column with gaps
_NUMBER: Final = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)


def normal(text: str) -> str:
    """Return a text in Unicode's form NFC, so that one name is one class or key, whichever system wrote it."""
    return unicodedata.normalize("NFC", text)


def check_label_name(name: str, where: str) -> None:
    """Raise `UserError` if a name that stands at `where` cannot be that of a label of a source."""
    if not is_label_name(name):
        raise UserError(
            f"{where}: {json.dumps(name[:100])} is not a valid name of a label; use up to 32 of the letters a to z and "
            "A to Z, digits and _, and begin with a letter"
        )
    if name == OVERLAY:
        raise UserError(f"{where}: {OVERLAY} is the label of what a build draws; give yours another name")


def as_word(value: object) -> str:
    """Return a label as text in NFC, without spaces around it; "" if the value says that there is none.

    Raises `ValueError` if the value is neither text nor a number nor None.

    Examples:
        >>> as_word(" owl "), as_word(3), as_word(2.0), as_word("None"), as_word(None), as_word(float("nan"))
        ('owl', '3', '2.0', 'None', '', '')
    """
    if value is None:
        return ""
    if not isinstance(value, (str, int, float)):
        raise ValueError(f"its label is a {type(value).__name__}, neither text nor a number")
    word = normal(str(value)).strip()
    return "" if word in _MISSING else word


def as_number(word: str) -> float | None:
    """Return the finite number that a word is written as; None if it is no number.

    Examples:
        >>> as_number("-1.5"), as_number("1e-3"), as_number("1_000"), as_number("1e999"), as_number("owl")
        (-1.5, 0.001, None, None, None)
    """
    number = float(word) if _NUMBER.fullmatch(word) else math.inf
    return number if math.isfinite(number) else None


@dataclass(frozen=True)
class Classes:
    """The classes of one label.

    Attributes:
        names: the class names, in the order of their numbers.
        number_of: the number of the class of each word; `NO_LABEL` for a word that is no label, and for "".
    """

    names: tuple[str, ...]
    number_of: Mapping[str, int]


def choose_classes(words: Collection[str], *, known: tuple[str, ...] | None = None) -> Classes:
    """Return the classes of a label whose values are `words`, from `as_word`.

    If all words are whole numbers, `2.0` is written as `2`. `-1` is no label if it is the only negative number and all
    other words are whole numbers; any other negative number is a class. Whole numbers without large gaps are their own
    classes. Other numbers are sorted by their value, and words by their letters.

    `known` are the classes of a train set, which become `names`; then `number_of` lacks words that are none of them.

    Examples:
        >>> choose_classes({"wren", "owl"}).names, choose_classes({"0.0", "2.0", ""}).names
        (('owl', 'wren'), ('0', '1', '2'))
        >>> choose_classes({"0", "1", "-1"}).number_of["-1"], choose_classes({"-2", "-1"}).names
        (-1, ('-2', '-1'))
    """
    shown = {word: word for word in words if word}
    used = {*shown, *(known or ())}
    if all(re.fullmatch(r"-?\d+", _without_point(word), re.ASCII) for word in used):
        shown = {word: _without_point(word) for word in shown}
    used = {*shown.values(), *(known or ())}
    is_gap = "-1" in used and "-1" not in (known or ())
    is_gap &= all(word.isascii() and word.isdigit() for word in used - {"-1"})
    names = _names(used - {"-1"} if is_gap else used) if known is None else known
    numbers = {name: number for number, name in enumerate(names)} | ({"-1": NO_LABEL} if is_gap else {})
    number_of = {word: numbers[name] for word, name in shown.items() if name in numbers}
    return Classes(names, {"": NO_LABEL, **number_of})


def _without_point(word: str) -> str:
    """Return a whole number that is written with zeros behind a point without them, and anything else as it is."""
    match = _WHOLE.fullmatch(word)
    return word if match is None else f"{match[1] if int(match[2]) else ''}{match[2]}"


def _names(words: Collection[str]) -> tuple[str, ...]:
    """Return the class names that some words stand for, in their order."""
    if words and all(word.isascii() and word.isdigit() and str(int(word)) == word for word in words):
        largest = max(map(int, words))
        if largest < max(10 * len(words), 1_000) and largest < MAX_CLASSES:
            return tuple(map(str, range(largest + 1)))
    numbers = [(number, word) for word in words if (number := as_number(word)) is not None]
    return tuple(word for _, word in sorted(numbers)) if len(numbers) == len(words) else tuple(sorted(words))
