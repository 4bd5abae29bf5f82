"""Types and an action for the arguments of `argparse`, and the name of a program in its help."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from data_pipeline.core.errors import UserError

SCRIPT_PREFIX = "overlay-"  # of the scripts that setup.py installs
_MAX_NUMBER = 10**7


def program(module: str) -> str:
    """Return the name of this program for its help: that of an installed script, or `python -m` with its module."""
    name = Path(sys.argv[0]).name
    return name if name.startswith(SCRIPT_PREFIX) else f"python -m {module}"


class AppendSetting(argparse.Action):
    """Append NAME=VALUE, or a pair of both, to a list. Raises `UserError` if the name was given before."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option_string: Any = None) -> None:
        given = getattr(namespace, self.dest)
        names = [(each if isinstance(each, str) else each[0]).partition("=")[0].strip() for each in (*given, values)]
        if names[-1] in names[:-1]:
            raise UserError(f"{option_string} {names[-1]} is given twice; give it once")
        setattr(namespace, self.dest, [*given, values])


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
