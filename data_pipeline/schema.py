"""The base of every config and every file that passes between stages: a frozen pydantic model without extra keys."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, Self

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from data_pipeline.errors import UserError, nearest


def _finite_or_none(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


# A number in a results file. JSON has no inf and no nan, so what is not finite is None, and null in the file.
Measured = Annotated[float | None, BeforeValidator(_finite_or_none)]


def shown(number: Measured, form: str) -> str:
    """Return a measured number in a format such as ".3f"; a dash if it is None.

    Examples:
        >>> shown(0.25, ".1%"), shown(None, ".1%")
        ('25.0%', '–')
    """
    return "–" if number is None else format(number, form)


def drawn(numbers: Sequence[Measured]) -> list[float]:
    """Return numbers for a figure, which leaves out nan."""
    return [math.nan if number is None else number for number in numbers]


class Schema(BaseModel):
    """A frozen model that forbids unknown keys, so that a misspelt setting can never be silently ignored."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    @classmethod
    def parse(cls, value: dict[str, Any], *, where: str) -> Self:
        """Validate `value`; raises `UserError` with one sentence that names `where`, the key and the mend."""
        try:
            return cls.model_validate(value)
        except ValidationError as error:
            raise UserError(f"{where}: {describe(error, cls)}") from None

    def override(self, overrides: Sequence[str], *, where: str) -> Self:
        """This, with each of `overrides` ("a.b=c", the value in YAML) set, as command lines take them after --set.

        A new `kind` starts its section from the defaults of that kind. Raises `UserError` with the nearest valid key.
        """
        value = self.model_dump(mode="json")
        for override in overrides:
            path, separator, text = override.partition("=")
            if not separator:
                raise UserError(f'--set {override} has no "="; write --set NAME=VALUE')
            try:
                new = yaml.safe_load(text)
            except yaml.YAMLError:
                raise UserError(f'--set {override}: the value is not YAML; write e.g. --set {path}="[1, 2]"') from None
            _set(value, path.strip().split("."), new)
        return type(self).parse(value, where=where + (f" with --set {' '.join(overrides)}" if overrides else ""))


def describe(error: ValidationError, model: type[BaseModel]) -> str:
    """The first problem of a validation error in one sentence; an unknown key names the nearest valid one."""
    first = error.errors()[0]
    path = _shown(".".join(str(part) for part in first["loc"]))
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    if first["type"] == "extra_forbidden":
        valid = _fields_at(model, first["loc"][:-1])
        return f'unknown key "{path}"{nearest(str(first["loc"][-1]), valid)}{more}'
    given = "" if first["type"] == "missing" else f", got {_shown(repr(first['input']))}"
    message = first["msg"].removeprefix("Value error, ")
    return (f"{path}: " if path else "") + f"{message}{given if path else ''}{more}"


def _shown(text: str) -> str:
    """Return `text` as one line of bounded length that a terminal may print: files may come from strangers."""
    return (text if text.isprintable() else ascii(text))[:200]


def _set(value: dict[str, Any], path: list[str], new: Any) -> None:
    """Set one setting in place."""
    for part in path[:-1]:
        inner = value.get(part)
        if not isinstance(inner, dict):
            raise UserError(f'--set {".".join(path)}: "{part}" has no settings of its own{nearest(part, value)}')
        value = inner
    if path[-1] == "kind" and new != value.get("kind"):
        value.clear()
    value[path[-1]] = new


def _fields_at(model: type[BaseModel], loc: tuple[int | str, ...]) -> list[str]:
    """Names of the fields of the model that sits at `loc`; union members appear in `loc` by their `kind`."""
    models: list[type[BaseModel]] = [model]
    for part in loc:
        inner: list[type[BaseModel]] = []
        for candidate in models:
            field = candidate.model_fields.get(str(part))
            if field is not None:
                inner += _models_in(field.annotation)
            elif (kind := candidate.model_fields.get("kind")) is not None and kind.default == part:
                inner.append(candidate)
        models = inner or models
    return sorted({name for candidate in models for name in candidate.model_fields})


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for part in getattr(annotation, "__args__", ()) for found in _models_in(part)]
