"""Find the pydantic models that a section of a config may have.

A section is given by its annotations, such as `SGDConfig | AdamConfig | None`. The models of one section differ in
their field `kind`, a literal of one or several names. A base class with `Kinds` (`data_pipeline.core.kinds`) stands for
all models that its kinds name.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Final, Union, get_args, get_origin

from pydantic import BaseModel

KIND: Final = "kind"
KINDS: Final = "kinds"  # the attribute of a base class that holds its `Kinds`


def members_of(annotations: Iterable[Any]) -> list[Any]:
    """Return the members of unions, without the metadata of `Annotated`."""
    found: list[Any] = []
    for annotation in annotations:
        if get_origin(annotation) is Annotated:
            found += members_of(get_args(annotation)[:1])
        elif get_origin(annotation) in {Union, types.UnionType}:
            found += members_of(get_args(annotation))
        else:
            found.append(annotation)
    return found


def models_at(annotations: Iterable[Any]) -> list[type[BaseModel]]:
    """Return the models that a section may have."""
    models = [each for each in members_of(annotations) if isinstance(each, type) and issubclass(each, BaseModel)]
    return [one for each in models for one in (vars(each)[KINDS].configs() if KINDS in vars(each) else [each])]


def names_at(annotations: Iterable[Any]) -> list[str]:
    """Return the kinds that a section may have, with those of installed packages that were not imported yet."""
    models = [each for each in members_of(annotations) if isinstance(each, type) and issubclass(each, BaseModel)]
    named = [name for each in models if KINDS in vars(each) for name in vars(each)[KINDS].names()]
    return list(dict.fromkeys([*named, *(kind for each in models_at(annotations) for kind in kinds_of(each))]))


def field_of(models: Iterable[type[BaseModel]], name: str) -> list[Any]:
    """Return the annotations of the field `name` in the `models` that have it."""
    return [model.model_fields[name].annotation for model in models if name in model.model_fields]


def kinds_of(model: type[BaseModel]) -> tuple[str, ...]:
    """Return the kinds of a model; an empty tuple if it has no field `kind`."""
    return get_args(model.model_fields[KIND].annotation) if KIND in model.model_fields else ()


def models_of_kind(models: list[type[BaseModel]], values: Mapping[str, Any]) -> list[type[BaseModel]]:
    """Return the `models` of the kind in `values`; all models if none has that kind."""
    return [model for model in models if values.get(KIND) in kinds_of(model)] or models


def default_at(models: Iterable[type[BaseModel]], name: str) -> Any:
    """Return the default of the field `name` as JSON values; an empty mapping if the field has no default.

    Raises `KeyError` if no model has the field.
    """
    for model in models:
        if name in model.model_fields:
            field = model.model_fields[name]
            default = {} if field.is_required() else field.get_default(call_default_factory=True)
            return default.model_dump(mode="json") if isinstance(default, BaseModel) else default
    raise KeyError(name)
