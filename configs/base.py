"""Settings that several recipes share. No function here is a recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from data_pipeline.core.overrides import Path, parse_setting, set_paths
from data_pipeline.core.validation import KIND
from trainer.config import RunConfig
from trainer.data import DataConfig
from trainer.optim.optimizers import AdamConfig, SGDConfig

CIFAR10_MEAN, CIFAR10_STD = (0.491, 0.482, 0.446), (0.247, 0.243, 0.261)  # the values of Tamkin et al. 2022
NAME_OF_DATA = "+DATA+"  # `configs.resolve` puts the name of the data in its place, in the name of a recipe
PUBLISHED_SGD = SGDConfig(learning_rate=0.03, momentum=0.9, weight_decay=1e-4)
PUBLISHED_ADAM = AdamConfig(learning_rate=1e-3)


def data(
    dataset: str,
    *,
    num_workers: int = 2,
    overlay: Literal["baked", "online", "online_per_view"] = "baked",
    sample_rate: int | Literal["of_data"] | None = None,
) -> DataConfig:
    """Return the config of the shards that the documented build commands write to data/DATASET/train and .../test."""
    return DataConfig(
        train_dir=f"data/{dataset}/train",
        test_dir=f"data/{dataset}/test",
        num_workers=num_workers,
        overlay=overlay,
        sample_rate=sample_rate,
    )


def changed(recipe: RunConfig, **settings: Any) -> RunConfig:
    """Return the recipe with other settings."""
    return RunConfig.model_validate(recipe.model_dump() | settings)


def named(recipe: RunConfig, ending: str, **settings: Any) -> RunConfig:
    """Return the recipe with other settings and an ending of its name that says so."""
    return changed(recipe, name=f"{recipe.name}-{ending}", **settings)


def overridden(runs: Sequence[RunConfig], overrides: Sequence[str], *, where: str) -> list[RunConfig]:
    """Return the runs of a study, each with those of the overrides, such as "a.b=c", for which it has a setting `a.b`.

    So `views.clamp=false` changes the runs with a viewmaker, and not those with expert views. Raises `UserError` like
    `RunConfig.override` if no run has the setting, or if a value is wrong.
    """
    given = set_paths(overrides)
    known = [{one for one in overrides if _has(run, one, given)} for run in runs]
    of_none = set(overrides).difference(*known)
    return [
        run.override(
            [one for one in overrides if one in of_run | of_none], where=f"{where} ({run.name}, seed {run.seed})"
        )
        for run, of_run in zip(runs, known, strict=True)
    ]


def _has(run: RunConfig, override: str, given: set[Path]) -> bool:
    """Return whether a run has the setting of an override, or a section of it gets another kind by the `given` ones."""
    (*outer, last), _ = parse_setting(override)
    section: Any = run
    for depth, name in enumerate(outer, start=1):
        if (*outer[:depth], KIND) in given:
            return True
        section = getattr(section, name, None)
    return isinstance(section, Mapping) or last in getattr(type(section), "model_fields", ())
