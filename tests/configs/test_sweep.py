"""The runs of a sweep: their names, their settings, and the refusals, each in one sentence."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from configs.resolve import resolve_recipe
from configs.sweep import resolve_sweep, run_name
from data_pipeline.core.errors import UserError
from data_pipeline.core.schema import Name, difference
from launch.planned_run import default_run_dir
from trainer.config import RunConfig


def runs(*sweeps: str, overrides: tuple[str, ...] = ()) -> list[RunConfig]:
    return resolve_sweep("debug:image", sweeps, overrides=overrides)[1]


def directories(configs: list[RunConfig]) -> list[str]:
    return [default_run_dir(config).name for config in configs]


def test_a_sweep_is_the_product_of_its_values_and_the_last_changes_fastest() -> None:
    found = runs("objective.temperature=0.1,0.5", "seed=0,1", overrides=("num_epochs=3",))
    assert directories(found) == [
        "debug-image-objective.temperature=0.1-seed0",
        "debug-image-objective.temperature=0.1-seed1",
        "debug-image-objective.temperature=0.5-seed0",
        "debug-image-objective.temperature=0.5-seed1",
    ]
    assert {config.num_epochs for config in found} == {3}


def test_a_run_of_a_sweep_is_what_set_makes_but_for_its_name_and_the_record_of_the_sweep() -> None:
    (found,) = runs("objective.temperature=0.1", "optimizer.kind=adam")
    same = resolve_recipe("debug:image", ["objective.temperature=0.1", "optimizer.kind=adam"])
    assert difference(found, same) == ["name", "tracking.group", "tracking.axes"]
    assert found.tracking.axes == ("objective.temperature", "optimizer.kind")
    assert found.tracking.group == "debug-image-sweep-objective.temperature-optimizer.kind"


def test_a_name_depends_neither_on_other_values_nor_on_the_order_nor_on_the_notation() -> None:
    alone = runs("seed=1", "objective.temperature=0.5")
    assert alone[0] in runs("seed=0,1,2", "objective.temperature=0.1,0.50,1")
    other_order = runs("objective.temperature=5e-1", "seed=1")
    assert difference(alone[0], other_order[0]) == ["tracking.axes"]
    assert directories(runs("objective.temperature=1.0,0.07")) == [
        "debug-image-objective.temperature=1-seed0",
        "debug-image-objective.temperature=0.07-seed0",
    ]


@pytest.mark.parametrize(
    ("sweep", "endings"),
    [
        ("objective.kind=nt_xent,barlow_twins", ["objective.kind=nt_xent", "objective.kind=barlow_twins"]),
        ("encoder.head.hidden_sizes=[],[8, 8]", ["encoder.head.hidden_sizes=empty", "encoder.head.hidden_sizes=8-8"]),
        (
            "tracking.pictures_every_steps=null,5",
            ["tracking.pictures_every_steps=null", "tracking.pictures_every_steps=5"],
        ),
        ("data.train_dir=data/a/train,'/b, c/train'", ["data.train_dir=data-a-train", "data.train_dir=b-c-train"]),
    ],
)
def test_values_of_every_kind_have_a_name(sweep: str, endings: list[str]) -> None:
    assert [config.name for config in runs(sweep)] == [f"debug-image-{ending}" for ending in endings]


def test_a_name_that_would_be_too_long_ends_in_a_hash() -> None:
    one, other = runs(f"data.train_dir={'x' * 90}a,{'x' * 90}b", "objective.temperature=0.1", "num_epochs=7")
    assert one.name != other.name
    assert len(one.name) <= 100
    assert default_run_dir(one).name == f"{one.name}-seed0"


@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow])  # it first makes a table of all characters
@given(st.dictionaries(st.sampled_from(["a.b", "c.b", "a.kind", "seed", "d"]), st.text(max_size=300), min_size=1))
def test_every_name_of_a_run_can_be_a_directory(point: dict[str, str]) -> None:
    name = run_name("debug-image", point)
    assert TypeAdapter(Name).validate_python(name) == name


@pytest.mark.parametrize(
    ("sweeps", "overrides", "said"),
    [
        (["objective.temperature"], [], "has no values; write --sweep objective.temperature=VALUE,VALUE"),
        (["seed=0,1", "seed=2"], [], "--sweep seed: another --sweep or --set gives seed, too"),
        (["views.crop=true"], ["views={kind: expert_image, crop: false}"], "gives views.crop, too"),
        (["seed=0,1,0"], [], "the sweep has 2 runs called debug-image with seed 0"),
    ],
)
def test_a_mistake_is_one_sentence(sweeps: list[str], overrides: list[str], said: str) -> None:
    with pytest.raises(UserError) as raised:
        runs(*sweeps, overrides=tuple(overrides))
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)
