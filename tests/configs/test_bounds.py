"""Numbers and texts that cannot work: every setting has bounds, and these refuse in a sentence."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Iterator
from typing import Annotated, Any, Union, get_args, get_origin

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from configs.resolve import resolve_recipe
from data_pipeline.core.errors import UserError
from data_pipeline.core.sections import models_at
from launch import train as launch_train
from launch.planned_run import default_run_dir
from launch.resources import RequestedResources, Resources
from trainer.analyze import ANALYSES, load_analysis
from trainer.config import RunConfig
from trainer.theory.__main__ import EXPERIMENTS, load_experiment

CONFIGS = (
    RunConfig,
    RequestedResources,
    Resources,
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
                waiting += models_at(_parts(field.annotation))
    return found


def _parts(annotation: Any) -> list[Any]:
    return [annotation, *(part for inner in get_args(annotation) for part in _parts(inner))]


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
    assert unbounded == []


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("num_epochs=1e24", "num_epochs is 1e+24; it must be"),
        (f"num_epochs={10**24}", f"num_epochs is {10**24}; it must be at most 1,000,000,000"),
        (f"seed={2**70}", f"seed is {2**70}; it must be at most 9,223,372,036,854,775,807"),
        ("encoder.width=1e5", "encoder.width is 100000.0; it must be at most 1,024"),
        ("objective.temperature=1e-300", "objective.temperature is 1e-300; it must be at least 0.0001"),
        ("optimizer={kind: adam, learning_rate: 1e38}", "optimizer.learning_rate is 1e+38; it must be at most 1e+30"),
        ("optimizer={kind: adam, epsilon: 1e-45}", "optimizer.epsilon is 1e-45; it must be at least 1e-30"),
        ("optimizer.weight_decay=1e38", "optimizer.weight_decay is 1e+38; it must be at most"),
        ("global_batch_size=1e9", "global_batch_size is 1000000000.0; it must be at most 16,777,216"),
        ("encoder.embedding_size=1e6", "it must be at most 32,768"),
        ("encoder.head.hidden_sizes=[1000000]", "encoder.head.hidden_sizes[0] is 1000000; it must be at most 32,768"),
        (f"encoder.head.hidden_sizes={[8] * 17}", "it must be a list of at most 16"),
        ("encoder.std=[1e-300, 1, 1]", "encoder.std[0] is 1e-300; it must be at least 1e-06"),
        ("encoder.mean=[1e300, 1, 1]", "encoder.mean[0] is 1e+300; it must be at most 1e+06"),
        ("views.blur_sigma=[1e-300, 1]", "views.blur_sigma[0] is 1e-300; it must be at least 0.01"),
        ("data.resident_gigabytes=1e300", "it must be at most 1e+09"),
        ("data.num_workers=1e6", "it must be at most 1,024"),
        ("watchdog.limit_seconds=1e300", "it must be at most 1e+06"),
        ("data.remote.num_attempts=1e9", "it must be at most 1,000"),
        ("alarms.max_uniformity=-1e300", "it must be at least -8"),
    ],
)
def test_a_number_that_cannot_work_is_refused(override: str, said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        resolve_recipe("debug:image", [override])


@pytest.mark.parametrize(
    "name", ["../../escape", "a/b", "/etc", "..", ".hidden", "-rf", "a b", "a\nb", "a\x1b[2J", "", "ü", "x" * 101]
)
def test_a_run_has_a_name_that_can_be_a_directory_of_runs(name: str) -> None:
    config = resolve_recipe("debug:image").model_dump(mode="json")
    with pytest.raises(UserError, match=r"^x: name: .* is not a valid name; use up to 100 of the letters") as raised:
        RunConfig.parse(config | {"name": name}, where="x")
    assert str(raised.value).isprintable()


@pytest.mark.parametrize("name", ["a", "2026-01-01", "simclr-cifar10_digits.v2+x=3", "x" * 100])
def test_a_plain_name_stays_inside_runs(name: str) -> None:
    config = RunConfig.parse(resolve_recipe("debug:image").model_dump(mode="json") | {"name": name}, where="x")
    assert default_run_dir(config).parts == ("runs", f"{name}-seed0")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"data": {"train_dir": "a\nb"}}, r'data.train_dir: "a\nb" holds the character'),
        ({"data": {"test_dir": "a\x1b[2J"}}, r"data.test_dir: "),
        ({"data": {"test_dir": ""}}, "data.test_dir: a text of 0 characters is not allowed; give 1 to 4,096"),
        ({"data": {"train_dir": "x" * 5_000}}, "data.train_dir: a text of 5,000 characters is not allowed"),
        ({"data": {"remote": {"cache_dir": "a\x07"}}}, "data.remote.cache_dir: "),
        ({"tracking": {"tags": ["a\rb"]}}, "tracking.tags[0]: "),
        ({"tracking": {"tags": ["a" * 65]}}, "tracking.tags[0] is "),
        (
            {"tracking": {"wandb_project": "a/b"}},
            'tracking.wandb_project: "a/b" is not a name that W&B allows for a project; leave out /',
        ),
        ({"tracking": {"wandb_project": "a\u202eb"}}, "tracking.wandb_project: "),
        ({"tracking": {"factors": {"cure": "a\nb"}}}, "tracking.factors"),
        ({"tracking": {"factors": {"cure": ""}}}, "tracking.factors"),
        ({"tracking": {"factors": {"cure": "x" * 129}}}, "tracking.factors"),
        ({"tracking": {"factors": {str(number): "x" for number in range(21)}}}, "tracking.factors"),
    ],
)
def test_a_text_that_cannot_be_printed_is_refused(settings: dict[str, Any], said: str) -> None:
    def merged(base: Any, changes: Any) -> Any:
        if not isinstance(changes, dict):
            return changes
        return base | {key: merged(base.get(key), value) for key, value in changes.items()}

    config = merged(resolve_recipe("debug:image").model_dump(mode="json"), settings)
    with pytest.raises(UserError) as raised:
        RunConfig.parse(config, where="x")
    assert str(raised.value).startswith(f"x: {said}")
    assert str(raised.value).isprintable()


def test_a_line_of_a_batch_script_cannot_end_early() -> None:
    for wish in ({"partition": "gpu\n#SBATCH --x"}, {"sbatch": {"comment": "a\nb"}}, {"sbatch": {"a\nb": 1}}):
        with pytest.raises(UserError, match="cannot be printed"):
            RequestedResources.parse(wish, where="x")


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        *(("--gpu-gigabytes", value) for value in ("nan", "-1", "0", "inf", "1e300", "many")),
        *(("--nodes", value) for value in ("-1", "0", "1.5", "9" * 30, "9" * 5_000, "nan")),
        ("--tasks-per-node", "0"),
    ],
)
def test_an_argument_that_cannot_work_is_refused(
    flag: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--config", "debug:image", "--plan", f"{flag}={value}"])
    with pytest.raises(SystemExit) as raised:
        launch_train.main()
    assert raised.value.code == 2
    said = capsys.readouterr().err
    assert f"argument {flag}: '{value}' is not a positive" in said
    assert "up to 1" in said
