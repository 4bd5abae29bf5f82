"""What is said of a value that no config can have: the setting, the value and what is valid, in plain words."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from configs.resolve import resolve_recipe
from data_pipeline.core.errors import UserError
from data_pipeline.core.kinds import kinds_of
from data_pipeline.core.schema import Schema
from tests.config_models import models_in
from tests.own_package import on_path
from trainer.config import RunConfig, read_config


def sentence(*overrides: str, recipe: str = "debug:image") -> str:
    """Without the command line, which every sentence begins with."""
    with pytest.raises(UserError) as raised:
        resolve_recipe(recipe, overrides)
    said = str(raised.value)
    start = f"config {recipe} with" + "".join(f" --set {override}" for override in overrides) + ": "
    assert said.startswith(start)
    assert "\n" not in said
    return said.removeprefix(start)


TIMM = ("encoder.kind=timm", "encoder.name=vit_tiny_patch16_224")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        # A kind.
        (["encoder.kind=resnet81"], 'encoder.kind is "resnet81"; did you mean "resnet18"?'),
        (["objective.kind=5"], "objective.kind is 5; valid are: barlow_twins, "),
        (["views={}"], "views.kind is null; valid are: "),
        (["optimizer=adam"], 'optimizer is "adam"; it must be a valid dictionary'),
        (["optimizer.kind=adamwe"], 'optimizer.kind is "adamwe"; did you mean "adamw"?'),
        # A key.
        (["encoder.widht=4"], 'unknown key "encoder.widht" of kind "resnet10"; did you mean "width"?'),
        (["encoder.head.batchnorm=true"], 'unknown key "encoder.head.batchnorm"; did you mean "batch_norm"?'),
        (["views.waveform={}", "views.waveform.kep=1"], 'unknown key "views.waveform.kep"'),
        (["encoder.kind=timm"], "encoder.name is missing; it has no default"),
        (["views.aspect=[1]"], "views.aspect[1] is missing; it has no default"),
        # A type, a choice and a bound.
        (["num_epochs=many"], 'num_epochs is "many"; it must be a valid integer'),
        (["encoder.head.hidden_sizes=[3, x]"], 'encoder.head.hidden_sizes[1] is "x"; it must be a valid integer'),
        ([*TIMM, "encoder.options.x=[3]"], "encoder.options.x is [3]; it must be a valid boolean or a valid integer"),
        (["precision=int8"], "precision is \"int8\"; it must be 'float32', 'bfloat16', 'float16' or 'float64'"),
        (["memory.encoder_checkpointing=x"], "is \"x\"; it must be 'none' or 'whole' or a valid integer"),
        (["probe.milestones=[0.5, 0]"], "probe.milestones[1] is 0; it must be greater than 0"),
        (["views.aspect=[1, 2, 3]"], "views.aspect is [1, 2, 3]; tuple should have at most 2 items"),
        # What only a whole section can be wrong about.
        (["views.area=[0.5, 0.2]"], "views: area must be two ascending positive numbers, got 0.5 and 0.2"),
        (["adversary={}"], 'views of kind "expert_image" take no section `adversary`'),
        # Several.
        (["num_epochs=x", "seed=y", "views.hue=z"], "(and 2 more)"),
    ],
)
def test_a_value_that_is_not_valid_is_one_plain_sentence(overrides: list[str], said: str) -> None:
    recipe = "debug:audio_viewmaker" if overrides[0].startswith("views.waveform") else "debug:image"
    assert said in sentence(*overrides, recipe=recipe)


def test_every_kind_that_is_misspelt_names_the_nearest_one() -> None:
    with on_path():  # forgets the kinds that other tests have found
        for name, field in RunConfig.model_fields.items():
            for kind in (kind for model in models_in(field.annotation) for kind in kinds_of(model)):
                said = sentence(f"{name}.kind={kind}x")
                assert said.startswith(f'{name}.kind is "{kind}x"; did you mean "{kind}"?')


def test_a_long_value_is_cut_short() -> None:
    said = sentence("num_epochs=" + "x" * 500)
    assert said.startswith(f'num_epochs is "{"x" * 76}...; it must be')


class Inner(Schema):
    kind: Literal["inner"] = "inner"
    count: Annotated[int, Field(ge=1)] = 1


class Other(Schema):
    kind: Literal["other"] = "other"


class Outer(Schema):
    parts: tuple[Annotated[Inner | Other, Field(discriminator="kind")], ...] = ()
    by_name: dict[str, Inner | int] = {}  # noqa: RUF012  pydantic copies defaults


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (
            {"parts": [{"kind": "other"}, {"kind": "inner", "count": 0}]},
            "x: parts[1].count is 0; it must be",
        ),
        ({"parts": [{"kind": "inne"}]}, 'x: parts[0].kind is "inne"; did you mean "inner"?'),
        ({"parts": [{"kind": "inner", "cont": 0}]}, 'x: unknown key "parts[0].cont" of kind "inner"; did you mean'),
        ({"by_name": {"a.b": {"count": 0}}}, "x: by_name.a.b.count is 0; it must be"),
        ({"by_name": {"a": {"cont": 0}}}, 'x: unknown key "by_name.a.cont"'),
    ],
)
def test_a_path_holds_places_and_keys_but_no_kinds(value: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as raised:
        Outer.parse(value, where="x")
    assert str(raised.value).startswith(said)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "does not hold a mapping of settings"),
        ("{", "is not valid JSON: "),
        ('{"seed": NaN}', "name is missing"),
    ],
)
def test_a_config_file_that_is_damaged_is_one_sentence(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(UserError, match=re.escape(str(path))) as raised:
        read_config(path)
    assert said in str(raised.value)


def test_a_config_file_that_is_not_utf8_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(b"name: \xff")
    with pytest.raises(UserError, match="is not valid YAML: 'utf-8' codec can't decode byte 0xff"):
        read_config(path)
