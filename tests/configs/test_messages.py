"""What is said of a value that no config can have: the setting, the value and what is valid, in plain words."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from configs.resolve import resolve_recipe
from data_pipeline.core.errors import UserError
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


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        # A kind.
        (["encoder.kind=resnet81"], 'encoder.kind is "resnet81"; did you mean "resnet18"?'),
        (["views={}"], "views.kind is null; valid are: "),
        (["optimizer=adam"], 'optimizer is "adam"; it must be a valid dictionary'),
        (["optimizer.kind=adamwe"], 'optimizer.kind is "adamwe"; did you mean "adamw"?'),
        # A key.
        (["encoder.widht=4"], 'unknown key "encoder.widht" of kind "resnet10"; did you mean "width"?'),
        (["views.waveform={}", "views.waveform.kep=1"], 'unknown key "views.waveform.kep"'),
        (["encoder.kind=timm"], "encoder.name is missing; it has no default"),
        # A type, a choice and a bound.
        (["num_epochs=many"], 'num_epochs is "many"; it must be a valid integer'),
        (["encoder.head.hidden_sizes=[3, x]"], 'encoder.head.hidden_sizes[1] is "x"; it must be a valid integer'),
        (["precision=int8"], "precision is \"int8\"; it must be 'float32', 'bfloat16' or 'float64'"),
        # What only a whole section can be wrong about.
        (["views.area=[0.5, 0.2]"], "views.area is [0.5, 0.2]; it must be two ascending numbers"),
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
            kinds = (
                model.model_fields["kind"] for model in models_in(field.annotation) if "kind" in model.model_fields
            )
            for kind in (kind for each in kinds for kind in get_args(each.annotation)):
                said = sentence(f"{name}.kind={kind}x")
                assert said.startswith(f'{name}.kind is "{kind}x"; did you mean "{kind}"?')


@pytest.mark.parametrize("damaged", [b"[]", b"{", b"name: \xff"])
def test_a_config_file_that_is_damaged_is_named(damaged: bytes, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(damaged)
    with pytest.raises(UserError, match=re.escape(str(path))):
        read_config(path)
