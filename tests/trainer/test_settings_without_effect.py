"""A setting that was changed but that nothing reads is told at the start of a run, with what makes it count."""

from __future__ import annotations

import pytest

from configs import resolve_recipe
from configs.resolve import recipes
from trainer.optim.learning_rates import learning_rate_at
from trainer.optim.optimizers import SGDConfig
from trainer.optim.schedules import ConstantConfig
from trainer.training_log import settings_without_effect


def told(recipe: str, *overrides: str) -> list[str]:
    config = resolve_recipe(recipe, list(overrides))
    return settings_without_effect(config, num_steps=10 * config.num_epochs)


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
            "debug:viewmaker",
            "adversary.optimizer.decay=matrices",
            "adversary.optimizer.decay has no effect with adversary.optimizer.weight_decay=0; "
            "set adversary.optimizer.weight_decay=0.0001",
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
    assert told(recipe, override) == [sentence]
    mended = sentence.rpartition("; set ")[2].replace(" to a number of steps", "=5")
    assert told(recipe, override, mended) == []


@pytest.mark.parametrize(
    ("recipe", "override", "sentence", "mended"),
    [
        (
            "debug:image",
            "optimizer.schedule={kind: constant, warmup_fraction: 0.02}",
            "optimizer.schedule.warmup_fraction=0.02 has no effect with a run of 20 steps; "
            "set optimizer.schedule.warmup_fraction=0.1 or more",
            "optimizer.schedule={kind: constant, warmup_fraction: 0.1}",
        ),
        (
            "debug:image",
            "optimizer.schedule={kind: constant, warmup_fraction: 0.05}",
            "optimizer.schedule.warmup_fraction=0.05 has no effect with a run of 20 steps; "
            "set optimizer.schedule.warmup_fraction=0.1 or more",
            "optimizer.schedule={kind: cosine, warmup_fraction: 0.05}",
        ),
        (
            "debug:image",
            "objective={kind: nt_xent_cycle, period_epochs: 1}",
            "objective.lowest=0.1 is not reached with objective.period_epochs=1; set objective.period_epochs=2 or more",
            "objective={kind: nt_xent_cycle, period_epochs: 2}",
        ),
        (
            "debug:viewmaker",
            "adversary.freeze_step=20",
            "adversary.freeze_step=20 has no effect with a run of 20 steps; "
            "set adversary.freeze_step to fewer steps, or to null",
            "adversary.freeze_step=19",
        ),
        (
            "debug:image",
            "objective={kind: nt_xent_cycle, period_epochs: 4}",
            "objective.lowest=0.1 is not reached with objective.period_epochs=4 and num_epochs=2; "
            "set fewer objective.period_epochs, or more num_epochs",
            "objective={kind: nt_xent_cycle, period_epochs: 3}",
        ),
        (
            "debug:image",
            "objective={kind: dino, warmup_epochs: 3}",
            "objective.teacher_temperature=0.07 is not reached with objective.warmup_epochs=3 and num_epochs=2; "
            "set fewer objective.warmup_epochs, or more num_epochs",
            "objective={kind: dino, warmup_epochs: 2}",
        ),
    ],
)
def test_a_setting_whose_time_does_not_come_is_told(recipe: str, override: str, sentence: str, mended: str) -> None:
    assert told(recipe, override) == [sentence]
    assert told(recipe, mended) == []


def test_no_recipe_has_such_a_setting() -> None:
    assert {recipe: said for recipe in recipes() if (said := told(recipe))} == {}


def test_the_share_of_a_warm_up_that_is_named_changes_a_rate() -> None:
    rates = {}
    for share in (0.0, 0.05, 0.1):
        optimizer = SGDConfig(schedule=ConstantConfig(warmup_fraction=share))
        rates[share] = [learning_rate_at(optimizer, step=step, num_steps=20, global_batch_size=8) for step in range(20)]
    assert rates[0.05] == rates[0.0] != rates[0.1]


def test_which_parameters_decay_also_says_which_are_adapted() -> None:
    assert told("debug:image", "optimizer={kind: lars, weight_decay: 0, decay: all}") == []
