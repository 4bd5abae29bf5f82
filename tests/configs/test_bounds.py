"""Numbers and texts that cannot work: every setting has bounds, and these refuse in a sentence."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Annotated, Any, Union, get_args, get_origin

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from configs.resolve import resolve_recipe
from data_pipeline.core.errors import UserError
from launch.resources import RequestedResources
from tests.config_models import models_in
from trainer.analyze import ANALYSES, load_analysis
from trainer.config import RunConfig
from trainer.theory.__main__ import EXPERIMENTS, load_experiment

CONFIGS = (
    RunConfig,
    RequestedResources,
    *(load_analysis(name).settings for name in ANALYSES),
    *(type(load_experiment(name).defaults) for name in EXPERIMENTS),
)


def all_sections(*models: Any) -> list[type[BaseModel]]:
    """Return the models and the models of all their sections."""
    found: list[type[BaseModel]] = []
    waiting = list(models)
    while waiting:
        model = waiting.pop()
        if model not in found:
            found.append(model)
            for field in model.model_fields.values():
                waiting += models_in(field.annotation)
    return found


def scalars(annotation: Any, constraints: tuple[Any, ...]) -> Iterator[tuple[type, list[Any]]]:
    """Each int, float and str of an annotation, with its constraints."""
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *more = get_args(annotation)
        yield from scalars(inner, (*constraints, *more))
    elif origin in {Union, types.UnionType}:
        for inner in get_args(annotation):
            yield from scalars(inner, constraints)
    elif origin in {tuple, list, dict}:
        for inner in get_args(annotation):
            yield from scalars(inner, ())
    elif annotation in {int, float, str}:
        flat = [each.metadata if isinstance(each, FieldInfo) else [each] for each in constraints]
        yield annotation, [each for group in flat for each in group]


def test_every_number_has_a_least_and_a_greatest_value_and_every_text_is_checked() -> None:
    seen, unbounded = 0, []
    for model in all_sections(*CONFIGS):
        for name, field in model.model_fields.items():
            for kind, constraints in scalars(field.annotation, tuple(field.metadata)):
                seen += 1
                has_least = any(hasattr(each, limit) for each in constraints for limit in ("ge", "gt"))
                has_greatest = any(hasattr(each, limit) for each in constraints for limit in ("le", "lt"))
                if not (constraints if kind is str else has_least and has_greatest):
                    unbounded.append(f"{model.__name__}.{name}: {kind.__name__}")
    assert seen > 200
    assert unbounded == [
        "TimmConfig.options: int",
        "TimmConfig.options: float",
    ]  # timm knows them


@pytest.mark.parametrize(
    "override",
    ["num_epochs=1e24", f"seed={2**70}", "objective.temperature=1e-300", "encoder.std=[1e-300, 1, 1]"],
)
def test_a_number_that_cannot_work_is_refused(override: str) -> None:
    with pytest.raises(UserError, match=r"it must be|maximum size"):
        resolve_recipe("debug:image", [override])


@pytest.mark.parametrize("name", ["../../escape", ".hidden", "-rf", "a b", "a\x1b[2J", "x" * 101])
def test_a_run_has_a_name_that_can_be_a_directory_of_runs(name: str) -> None:
    config = resolve_recipe("debug:image").model_dump(mode="json")
    with pytest.raises(UserError, match=r"^x: name is ") as raised:
        RunConfig.parse(config | {"name": name}, where="x")
    assert str(raised.value).isprintable()


def test_a_line_of_a_batch_script_cannot_end_early() -> None:
    for wish in ({"partition": "gpu\n#SBATCH --x"}, {"sbatch": {"comment": "a\nb"}}, {"sbatch": {"a\nb": 1}}):
        with pytest.raises(UserError, match=r"^x: (partition|sbatch)"):
            RequestedResources.parse(wish, where="x")
