"""The runs of a sweep: their names, their settings, and the refusals, each in one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.resolve import resolve_recipe
from configs.sweep import read_space, resolve_sweep, run_name, short_names, split_values
from data_pipeline.core.errors import UserError
from data_pipeline.core.schema import difference, flatten
from launch.planned_run import default_run_dir
from trainer.config import RunConfig


def runs(*sweeps: str, file: Path | None = None, overrides: tuple[str, ...] = ()) -> list[RunConfig]:
    space = read_space(sweeps, file, overrides=overrides)
    return list(resolve_sweep("debug:image", space, overrides=overrides).runs)


def directories(configs: list[RunConfig]) -> list[str]:
    return [default_run_dir(config).name for config in configs]


def test_a_sweep_is_the_product_of_its_values_and_the_last_changes_fastest() -> None:
    found = runs("objective.temperature=0.1,0.5", "seed=0,1", overrides=("num_epochs=3",))
    assert directories(found) == [
        "debug-image-temperature=0.1-seed0",
        "debug-image-temperature=0.1-seed1",
        "debug-image-temperature=0.5-seed0",
        "debug-image-temperature=0.5-seed1",
    ]
    assert {config.num_epochs for config in found} == {3}


def test_a_run_of_a_sweep_is_what_set_makes_but_for_its_name_and_the_record_of_the_sweep() -> None:
    (found,) = runs("objective.temperature=0.1", "optimizer.kind=adam")
    same = resolve_recipe("debug:image", ["objective.temperature=0.1", "optimizer.kind=adam"])
    assert difference(found, same) == ["name", "tracking.group", "tracking.axes"]
    assert found.tracking.axes == ("objective.temperature", "optimizer.kind")
    assert found.tracking.group == "debug-image-sweep-temperature-optimizer"


def test_a_name_depends_neither_on_other_values_nor_on_the_order_nor_on_the_notation() -> None:
    alone = runs("seed=1", "objective.temperature=0.5")
    assert alone[0] in runs("seed=0,1,2", "objective.temperature=0.1,0.50,1")
    other_order = runs("objective.temperature=5e-1", "seed=1")
    assert difference(alone[0], other_order[0]) == ["tracking.axes"]
    assert directories(runs("objective.temperature=1.0,0.07")) == [
        "debug-image-temperature=1-seed0",
        "debug-image-temperature=0.07-seed0",
    ]


@pytest.mark.parametrize(
    ("sweep", "endings"),
    [
        ("objective.kind=nt_xent,barlow_twins", ["objective=nt_xent", "objective=barlow_twins"]),
        ("encoder.head.hidden_sizes=[],[8, 8]", ["hidden_sizes=empty", "hidden_sizes=8-8"]),
        ("compile=false,true", ["compile=false", "compile=true"]),
        ("tracking.pictures_every_steps=null,5", ["pictures_every_steps=null", "pictures_every_steps=5"]),
        ("data.train_dir=data/a/train,'/b, c/train'", ["train_dir=data-a-train", "train_dir=b-c-train"]),
        ("alarms.max_uniformity=-1,-2", ["max_uniformity=-1", "max_uniformity=-2"]),
    ],
)
def test_values_of_every_kind_have_a_name(sweep: str, endings: list[str]) -> None:
    assert [config.name for config in runs(sweep)] == [f"debug-image-{ending}" for ending in endings]


def test_settings_that_end_alike_have_longer_names() -> None:
    assert [config.name for config in runs("optimizer.learning_rate=0.1", "probe.learning_rate=0.2")] == [
        "debug-image-optimizer.learning_rate=0.1-probe.learning_rate=0.2"
    ]


def test_sweeps_of_settings_that_end_alike_share_no_directory_and_no_name() -> None:
    overrides = ("views.kind=viewmaker", "adversary={}")
    found = {
        key: runs(f"{key}=0.1", overrides=overrides)[0]
        for key in ("optimizer.learning_rate", "adversary.optimizer.learning_rate", "probe.learning_rate")
    }
    assert [config.name for config in found.values()] == [
        "debug-image-learning_rate=0.1",
        "debug-image-adversary.optimizer.learning_rate=0.1",
        "debug-image-probe.learning_rate=0.1",
    ]
    assert [config.tracking.group for config in found.values()] == [
        "debug-image-sweep-learning_rate",
        "debug-image-sweep-adversary.optimizer.learning_rate",
        "debug-image-sweep-probe.learning_rate",
    ]
    assert runs("probe.seed=1")[0].name == "debug-image-probe.seed=1", "the seed of the run is another setting"


@pytest.mark.parametrize("recipe", ["debug:image", "debug:viewmaker", "debug:audio", "moco:cifar10"])
def test_every_setting_has_a_short_name_of_its_own(recipe: str) -> None:
    settings = list(flatten(resolve_recipe(recipe)))
    alone = [short_names([key], settings)[key] for key in settings]
    assert len(set(alone)) == len(settings)
    last_words = [key.removesuffix(".kind").rpartition(".")[2] for key in settings]
    for name, word in zip(alone, last_words, strict=True):
        assert name == word or (last_words.count(word) > 1 and name.endswith(f".{word}"))


def test_settings_that_are_there_in_the_sweep_alone_have_short_names_too() -> None:
    """The overrides are valid only with the views of the sweep, so the names are chosen among those of the recipe."""
    space = ("views.kind=viewmaker", "adversary.weight=2", "adversary.optimizer.learning_rate=0.1")
    (found,) = runs(*space, overrides=("adversary={}",))
    assert found.name == "debug-image-adversary.optimizer.learning_rate=0.1-weight=2-views=viewmaker"


def test_more_values_of_a_sweep_rename_none_of_its_runs() -> None:
    (alone,) = runs("objective.kind=nt_xent", "optimizer.momentum=0.8")
    assert alone.name in {config.name for config in runs("objective.kind=nt_xent,moco", "optimizer.momentum=0.8")}


def test_a_name_that_would_be_too_long_ends_in_a_hash() -> None:
    one, other = runs(f"data.train_dir={'x' * 90}a,{'x' * 90}b", "objective.temperature=0.1", "num_epochs=7")
    assert one.name != other.name
    assert len(one.name) <= 100
    assert default_run_dir(one).name == f"{one.name}-seed0"
    many = [f"encoder.{key}=1" for key in ("width", "embedding_size", "batch_norm_splits")]
    (long,) = runs(*many, "global_batch_size=16", "num_epochs=12", "checkpoint_every_steps=17", "log_every_steps=18")
    assert len(long.name) <= 100


texts = st.text(alphabet="ab1.,[]{}'\" :-", max_size=20)


@given(st.lists(texts, min_size=1, max_size=4))
def test_quoted_values_are_split_at_their_commas_alone(values: list[str]) -> None:
    quoted = [json.dumps(value.replace('"', "'")) for value in values]
    assert split_values(",".join(quoted)) == quoted


@given(texts)
def test_splitting_loses_no_character(text: str) -> None:
    assert ",".join(split_values(text)) == text


@given(st.dictionaries(st.sampled_from(["a.b", "c.b", "a.kind", "seed", "d"]), st.text(max_size=300), min_size=1))
def test_every_name_of_a_run_can_be_a_directory(point: dict[str, str]) -> None:
    config = resolve_recipe("debug:image").model_dump(mode="json")
    name = run_name("debug-image", point, short_names(list(point)))
    assert RunConfig.parse(config | {"name": name}, where="x").name == name


def test_a_file_lists_sets_of_settings_and_multiplies_with_a_sweep(tmp_path: Path) -> None:
    file = tmp_path / "runs.yaml"
    file.write_text("- {objective.temperature: 0.1, num_epochs: 3}\n- objective.temperature: 0.5\n  name: mine\n")
    found = runs("seed=0,1", file=file)
    assert directories(found) == [
        "debug-image-num_epochs=3-temperature=0.1-seed0",
        "mine-temperature=0.5-seed0",
        "debug-image-num_epochs=3-temperature=0.1-seed1",
        "mine-temperature=0.5-seed1",
    ]
    assert {config.tracking.axes for config in found} == {("seed", "objective.temperature", "num_epochs", "name")}


@pytest.mark.parametrize(
    ("sweeps", "overrides", "said"),
    [
        (["objective.temprature=0.1"], [], 'did you mean "temperature"'),
        (["num_epoch=1,2"], [], 'unknown key "num_epoch"; did you mean "num_epochs"?'),
        (["objective.temperature=0.1,-1"], [], "objective.temperature is -1; it must be at least 0.0001"),
        (["objective.temperature=0.1,many"], [], "objective.temperature"),
        (["objective.temperature="], [], "--sweep objective.temperature= has no values; write --sweep objective.temp"),
        (["objective.temperature=0.1,,0.2"], [], "has an empty value; write --sweep"),
        (["objective.temperature"], [], '--sweep objective.temperature has no "="; write --sweep NAME=VALUE,VALUE'),
        (["seed=[1"], [], "--sweep seed=[1: the value is not YAML"),
        (["seed=0,1", "seed=2"], [], "--sweep seed and --sweep seed both give seed; give all its values in one of"),
        (["seed=0,1"], ["seed=2"], "--sweep seed gives seed, and so does --set; leave one of them out"),
        (["views.crop=true"], ["views={kind: expert_image, crop: false}"], "gives views.crop, and so does --set"),
        (["seed=0,1,0"], [], "the sweep has 2 runs called debug-image with seed 0 (seed=0); leave the others out"),
        (["objective.temperature=0.1,1e-1"], [], "2 runs called debug-image-temperature=0.1 with seed 0"),
    ],
)
def test_a_mistake_is_one_sentence(sweeps: list[str], overrides: list[str], said: str) -> None:
    with pytest.raises(UserError) as raised:
        runs(*sweeps, overrides=tuple(overrides))
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "holds no list of runs; write one line for each"),
        ("", "holds no list of runs"),
        ("seed: 1", "holds no list of runs"),
        ("- seed: 1\n- 2", "run 2 is not a mapping of settings"),
        ("- {}", "run 1 is not a mapping of settings"),
        ("- {seed: 1, seed: 2}", 'the key "seed" is there twice'),
        ("- {seed: [", "is not valid YAML"),
        ("- {sed: 1}", 'unknown key "sed"; did you mean "seed"?'),
    ],
)
def test_a_wrong_sweep_file_is_one_sentence(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "runs.yaml"
    file.write_text(text)
    with pytest.raises(UserError) as raised:
        runs(file=file)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)
    with pytest.raises(UserError, match="cannot read the sweep file"):
        runs(file=tmp_path / "none.yaml")


def test_a_million_runs_are_counted_without_being_made() -> None:
    space = read_space([f"{key}={','.join(map(str, range(100)))}" for key in ("seed", "a", "b")], None, overrides=[])
    assert space.num_runs == 1_000_000
