"""Types for the arguments of `argparse`, and the name of a program in its help."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

SCRIPT_PREFIX = "overlay-"  # of the scripts that setup.py installs
_MAX_NUMBER = 10**7


def program(module: str) -> str:
    """Return the name of this program for its help: that of an installed script, or `python -m` with its module."""
    name = Path(sys.argv[0]).name
    return name if name.startswith(SCRIPT_PREFIX) else f"python -m {module}"


def positive(text: str) -> int:
    """Return a whole number from 1, such as a number of nodes. Raises `ArgumentTypeError` for any other text."""
    if not (text.isdecimal() and 1 <= int(text) <= _MAX_NUMBER):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number up to {_MAX_NUMBER:,}")
    return int(text)


def whole(text: str) -> int:
    """Return a whole number from 0, such as a step. Raises `ArgumentTypeError` for any other text."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0")
    return int(text)


def number(meaning: str, is_valid: Callable[[float], bool]) -> Callable[[str], float]:
    """Return a type of numbers, such as "a share from 0 to 1". It raises `ArgumentTypeError` for any other text."""

    def parse(text: str) -> float:
        with suppress(ValueError):
            if is_valid(found := float(text)):
                return found
        raise argparse.ArgumentTypeError(f"{text!r} is not {meaning}")

    return parse
