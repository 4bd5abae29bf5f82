"""The models that a section of a config may have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel

from data_pipeline.core.kinds import Kinds


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield every model in an annotation. A base class of kinds stands for the models of all its kinds."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        kinds = vars(annotation).get("kinds")
        yield from map(kinds.find_object, kinds.names()) if isinstance(kinds, Kinds) else [annotation]
    for inner in get_args(annotation):
        yield from models_in(inner)
