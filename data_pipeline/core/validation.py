"""Describe the first problem that pydantic finds in some values, in one sentence and with the user's names."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from data_pipeline.core.errors import nearest, printable

KIND: Final = "kind"  # the setting that chooses the class of a section
PRINTABLE = r"^[^\p{C}\p{Zl}\p{Zp}]*$"  # the pattern of a line of text
_MAX_SHOWN = 80  # characters of a value
_SHOULD_BE = "Input should be "


def describe(error: ValidationError, values: Any = None) -> str:
    """Return the first problem in one sentence: the setting, its value and the valid values.

    `values` are what pydantic was given. With them, a setting is named as the user writes it: without the kinds of
    sections and the members of unions, which the places in an error hold too.
    """
    by_path: dict[str, list[ErrorDetails]] = {}
    for problem in error.errors():
        by_path.setdefault(_path(problem, values), []).append(problem)
    path, problems = next(iter(by_path.items()))
    others = f" (and {len(by_path) - 1} more)" if len(by_path) > 1 else ""
    return printable(_sentence(path, problems)) + others


def _path(problem: ErrorDetails, values: Any) -> str:
    path, loc = "", problem["loc"]
    missing = loc[-1:] if problem["type"] == "missing" else ()
    for part in loc:
        is_key = values is None or part in missing or (isinstance(values, dict) and part in values)
        if isinstance(part, int):
            path = f"{path}[{part}]"
        elif is_key:
            path = _join(path, part)
        else:
            continue
        with suppress(LookupError, TypeError):
            values = values[part]
    return path


def _join(path: str, part: str) -> str:
    return f"{path}.{part}" if path else part


def _sentence(path: str, problems: Sequence[ErrorDetails]) -> str:
    """Return one sentence about one setting; if it is a union, there is a problem for each member."""
    problem = problems[0]
    value, context = problem["input"], problem.get("ctx", {})
    match problem["type"]:
        case "unknown_key":
            key, valid = context["key"], context["valid"]
            of_kind = f' of kind "{value[KIND]}"' if KIND in valid and KIND in value else ""
            return f'unknown key "{_join(path, key)}"{of_kind}{nearest(key, valid)}'
        case "missing":
            return f"{path} is missing; it has no default"
        case "union_tag_not_found":
            return f"{_join(path, KIND)} is missing; it has no default"
        case "union_tag_invalid":
            kinds = [kind.strip("'") for kind in context["expected_tags"].split(", ")]
            near = nearest(context["tag"], kinds)
            others = "" if near.startswith("; did") else context.get("others", "")
            return f"{_join(path, KIND)} is {_shown(value.get(KIND))}{near}{others}"
        case "value_error":
            message = str(context["error"])
            if message.startswith("it must") and path:
                return f"{path} is {_shown(value)}; {message}"
            return f"{path}: {message}" if path else message
    path = path or "a value"
    if problem["type"] == "string_pattern_mismatch" and context.get("pattern") == PRINTABLE:
        return f"{path} is {_shown(value)}; it must be one line of characters that can be printed"
    said = [each["msg"] for each in problems]
    for message in said:
        if not message.startswith(_SHOULD_BE):
            return f"{path} is {_shown(value)}; {message[0].lower()}{message[1:]}"
    wanted = " or ".join(dict.fromkeys(each.removeprefix(_SHOULD_BE) for each in said))
    return f"{path} is {_shown(value)}; it must be {wanted}"


def _shown(value: Any) -> str:
    """Return a value on one line and shortened, as in JSON."""
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."
