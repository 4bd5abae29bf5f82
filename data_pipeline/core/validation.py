"""Describe the first problem that pydantic finds in some values, in one sentence and with the user's names."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from data_pipeline.core.errors import nearest, printable
from data_pipeline.core.sections import KIND, KINDS, field_of, kinds_of, members_of, models_at, names_at

PRINTABLE = r"^[^\p{C}\p{Zl}\p{Zp}]*$"  # the pattern of a line of text
_MAX_SHOWN = 80  # characters of a value
_SHOULD_BE = "Input should be "
_OTHER_KINDS = "; others are registered by --code FILE or an installed package"


def describe(error: ValidationError, model: type[BaseModel]) -> str:
    """Return the first problem in one sentence: the setting, its value and the valid values.

    For an unknown key, the sentence names the nearest valid key. Settings are named as the user writes them, without
    the kinds of their sections.
    """
    by_path: dict[str, list[tuple[Mapping[str, Any], list[Any]]]] = {}
    for problem in error.errors():
        is_unknown = problem["type"] == "extra_forbidden"
        path, annotations = _place(model, problem["loc"][:-1] if is_unknown else problem["loc"])
        path = _join(path, str(problem["loc"][-1])) if is_unknown else path
        by_path.setdefault(path, []).append((problem, annotations))
    path, problems = next(iter(by_path.items()))
    others = f" (and {len(by_path) - 1} more)" if len(by_path) > 1 else ""
    return printable(_sentence(path, problems)) + others


def _place(model: type[BaseModel], loc: Sequence[int | str]) -> tuple[str, list[Any]]:
    """Return the path of a setting as the user writes it, and its annotations.

    Leaves out the kinds of sections and the members of unions, which pydantic's `loc` holds too.
    """
    path, annotations = "", members_of([model])
    for part in loc:
        models = models_at(annotations)
        containers = [each for each in annotations if get_origin(each) in {dict, tuple, list}]
        if len(models) > 1 and (of_kind := [each for each in models if part in kinds_of(each)]):
            annotations = list(of_kind)
        elif inner := field_of(models, str(part)):
            path, annotations = _join(path, str(part)), members_of(inner)
        elif containers:
            path = f"{path}[{part}]" if isinstance(part, int) else _join(path, part)
            annotations = members_of(each for container in containers for each in get_args(container)[-2:])
    return path, annotations


def _join(path: str, part: str) -> str:
    return f"{path}.{part}" if path else part


def _sentence(path: str, problems: list[tuple[Mapping[str, Any], list[Any]]]) -> str:
    """Return one sentence about one setting; if it is a union, there is a problem for each member."""
    problem, annotations = problems[0]
    value, context = problem["input"], problem.get("ctx", {})
    match problem["type"]:
        case "extra_forbidden":
            models = models_at(annotations)
            kind = next((kind for each in models for kind in kinds_of(each) if kind in problem["loc"]), None)
            valid = sorted({name for each in models for name in each.model_fields})
            of_kind = "" if kind is None else f' of kind "{kind}"'
            return f'unknown key "{path}"{of_kind}{nearest(path.rpartition(".")[2], valid)}'
        case "missing":
            return f"{path} is missing; it has no default"
        case "union_tag_invalid" | "union_tag_not_found":
            kinds = names_at(annotations)
            given = value.get(KIND) if isinstance(value, dict) else getattr(value, KIND, None)
            stated = f"is {_shown(given)}" if problem["type"] == "union_tag_invalid" else "is missing"
            near = nearest(str(given), kinds)
            may_be_own = any(KINDS in vars(each) for each in annotations if isinstance(each, type))
            others = _OTHER_KINDS if may_be_own and not near.startswith("; did") else ""
            return f"{_join(path, KIND)} {stated}{near}{others}"
        case "value_error" | "assertion_error":
            message = str(context.get("error", problem["msg"]))
            if message.startswith("it must") and path:
                return f"{path} is {_shown(value)}; {message}"
            return f"{path}: {message}" if path else message
    path = path or "a value"
    if problem["type"] == "string_pattern_mismatch" and context.get("pattern") == PRINTABLE:
        return f"{path} is {_shown(value)}; it must be one line of characters that can be printed"
    said = [each["msg"] for each, _ in problems]
    for message in said:
        if not message.startswith(_SHOULD_BE):
            return f"{path} is {_shown(value)}; {message[0].lower()}{message[1:]}"
    wanted = " or ".join(dict.fromkeys(each.removeprefix(_SHOULD_BE) for each in said))
    return f"{path} is {_shown(value)}; it must be {wanted}"


def _shown(value: Any) -> str:
    """Return a value on one line and shortened, as in JSON."""
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."
