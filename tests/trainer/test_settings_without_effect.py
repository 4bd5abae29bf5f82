"""A setting that was changed but that nothing reads is told at the start of a run, with what makes it count."""

from __future__ import annotations

import pytest

from configs import resolve_recipe
from configs.resolve import recipes
from trainer.training_log import settings_without_effect


@pytest.mark.parametrize(
    ("recipe", "override", "sentence"),
    [
        (
            "debug:image",
            "optimizer.reference_batch_size=512",
            "optimizer.reference_batch_size has no effect with optimizer.scaling=none; set optimizer.scaling=linear",
        ),
        (
            "debug:viewmaker",
            "adversary.optimizer.reference_batch_size=512",
            "adversary.optimizer.reference_batch_size has no effect with adversary.optimizer.scaling=none; "
            "set adversary.optimizer.scaling=linear",
        ),
        (
            "debug:image",
            "encoder.batch_norm_splits=4",
            "encoder.batch_norm_splits has no effect with encoder.batch_norm=synchronized; "
            "set encoder.batch_norm=split",
        ),
        (
            "debug:image",
            "probe.online_num_test=9",
            "probe.online_num_test has no effect with probe.online_every_steps=null; "
            "set probe.online_every_steps to a number of steps",
        ),
    ],
)
def test_a_setting_that_nothing_reads_is_told(recipe: str, override: str, sentence: str) -> None:
    assert settings_without_effect(resolve_recipe(recipe, [override])) == [sentence]
    mended = sentence.rpartition("; set ")[2].replace(" to a number of steps", "=5")
    assert settings_without_effect(resolve_recipe(recipe, [override, mended])) == []


def test_no_recipe_has_such_a_setting() -> None:
    assert {recipe: told for recipe in recipes() if (told := settings_without_effect(resolve_recipe(recipe, [])))} == {}
