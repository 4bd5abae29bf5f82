"""--set: nothing on the command line is lost, in whatever order it stands."""

from __future__ import annotations

from itertools import permutations

import pytest

from configs.resolve import explain, resolve_recipe
from data_pipeline.core.errors import UserError
from launch.train import run_parser
from trainer.objectives import BYOLConfig, MoCoConfig, NTXentConfig, SplitLossConfig
from trainer.optim.optimizers import AdamConfig, ScheduleConfig
from trainer.views.expert_audio import WaveformConfig
from trainer.views.viewmaker import ViewmakerConfig


def refusal(*overrides: str, recipe: str = "debug:image") -> str:
    with pytest.raises(UserError) as raised:
        resolve_recipe(recipe, overrides)
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize(
    "overrides",
    [
        ["objective.temperature=0.3", "objective.kind=split"],
        ["objective={temperature: 0.3}", "objective.kind=split"],
        ["objective={kind: split, temperature: 0.3}", "objective.temperature=0.3", "objective.kind=split"],
    ],
)
def test_the_order_of_settings_does_not_matter(overrides: list[str]) -> None:
    for order in permutations(overrides):
        assert resolve_recipe("debug:image", order).objective == SplitLossConfig(temperature=0.3)


def test_a_setting_that_the_new_kind_lacks_is_refused_in_both_orders() -> None:
    overrides = ["objective.temprature=0.2", "objective.kind=split"]
    for order in permutations(overrides):
        assert 'unknown key "objective.temprature" of kind "split"; did you mean "temperature"?' in refusal(*order)
    for order in permutations(["objective.temperature=0.2", "objective.kind=info_nce"]):
        assert 'unknown key "objective.temperature" of kind "info_nce"; valid are: kind' in refusal(*order)


@pytest.mark.parametrize("order", list(permutations(["optimizer.kind=adam", "optimizer.schedule.kind=cosine"])))
def test_a_section_of_a_new_kind_has_sections_of_its_own(order: tuple[str, ...]) -> None:
    config = resolve_recipe("debug:image", [*order, "optimizer.schedule.warmup_fraction=0.25"])
    assert config.optimizer == AdamConfig(schedule=ScheduleConfig(kind="cosine", warmup_fraction=0.25))
    changed = resolve_recipe("debug:image", ["optimizer.schedule.warmup_fraction=0.25", "optimizer.kind=adam"])
    assert changed.optimizer == AdamConfig(schedule=ScheduleConfig(warmup_fraction=0.25))


def test_a_mapping_replaces_its_whole_section() -> None:
    base = resolve_recipe("debug:image", ["objective.chunk_size=8"])
    assert base.objective == NTXentConfig(chunk_size=8)
    assert base.override(["objective={kind: nt_xent, temperature: 0.2}"], where="x").objective == NTXentConfig(
        temperature=0.2
    )


def test_a_section_that_is_null_can_be_made_and_set_at_once() -> None:
    overrides = ["views.waveform.noise_std=0.5", "views.waveform={}"]
    for order in permutations(overrides):
        views = resolve_recipe("debug:audio_viewmaker", order).views
        assert isinstance(views, ViewmakerConfig)
        assert views.waveform == WaveformConfig(noise_std=0.5)
    said = refusal("views.waveform.noise_std=0.5", recipe="debug:audio_viewmaker")
    assert said.endswith(
        "views.waveform is null, which has no settings; write --set views.waveform={} for its defaults"
    )


def test_of_two_values_for_one_name_the_last_counts_also_on_a_command_line() -> None:
    kinds = ["objective.kind=split", "objective.kind=moco", "objective.temperature=0.2"]
    objective = resolve_recipe("debug:image", kinds).objective
    assert objective == MoCoConfig(temperature=0.2)
    words = ["--config", "debug:image", *(word for kind in kinds for word in ("--set", kind))]
    assert run_parser(None, "--list").parse_args(words).set == kinds


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("name.x=1", "which has no settings; write --set name=VALUE"),
        ("optimiser.momentum=0", 'unknown key "optimiser"; did you mean "optimizer"?'),
        ("num_epochs", 'has no "="; write --set NAME=VALUE'),
        ("num_epochs=[", "the value is not YAML"),
    ],
)
def test_what_is_no_setting_is_refused(override: str, said: str) -> None:
    assert said in refusal(override)


def test_a_section_that_a_new_kind_brings_begins_with_the_defaults_of_its_field() -> None:
    objective = resolve_recipe("debug:image", ["objective.kind=byol", "objective.predictor.bias=false"]).objective
    assert objective == BYOLConfig(predictor=BYOLConfig().predictor.model_copy(update={"bias": False}))


def test_explain_names_what_a_mapping_sets_and_what_a_new_kind_brings() -> None:
    overrides = ["optimizer={kind: adam, learning_rate: 1e-3}", "objective.temperature=0.5", "encoder.kind=resnet18"]
    lines = {line.split()[0]: line.split()[-1] for line in explain("debug:image", overrides).splitlines()}
    assert lines["optimizer.learning_rate"] == "--set"
    assert lines["optimizer.weight_decay"] == "default"
    assert lines["objective.temperature"] == "--set"
    assert lines["encoder.kind"] == "--set"
    assert lines["encoder.embedding_size"] == "default"
    assert lines["views.kind"] == "debug:image"
