"""The rules between the sections of a config. Training checks them before it starts; a run is read without them."""

from __future__ import annotations

from data_pipeline.core.errors import UserError
from data_pipeline.core.kinds import path_of
from trainer.config import RunConfig


def check_sections(config: RunConfig, *, where: str) -> None:
    """Raise `UserError` that begins with `where` if sections of a config that was parsed do not fit each other."""
    try:
        _check_views(config)
        for section in (config.views, config.encoder, config.objective, config.engine):
            section.check(config)
    except ValueError as error:
        raise UserError(f"{where}: {error}") from None


def check_classes(config: RunConfig) -> None:
    """Raise `UserError` if config.json would be read with other classes, such as the base of one without a kind."""
    again = RunConfig.parse(config.model_dump(mode="json"), where=f"the config {config.name}")
    changed = [name for name in RunConfig.model_fields if getattr(again, name) != getattr(config, name)]
    if changed:
        raise UserError(
            f"the config {config.name} has {path_of(type(getattr(config, changed[0])))} in the section {changed[0]}, "
            "which config.json cannot name; declare a `kind` of its own in it, or use a class of this project there"
        )


def _check_views(config: RunConfig) -> None:
    """Raise `ValueError` if encoder, objective or adversary do not take the views, or the encoder not the data."""
    views, num = config.views, 2 + config.views.num_further
    if views.is_learned != (config.adversary is not None):
        raise ValueError(
            f'views of kind "{views.kind}" {"need" if config.adversary is None else "take no"} section '
            "`adversary`, which holds the training of learned views, such as a viewmaker"
        )
    if config.data.mel is not None and config.encoder.in_channels != 1:
        raise ValueError(
            f"spectrograms have one channel, but encoder.in_channels is {config.encoder.in_channels}; set "
            "encoder.in_channels=1, and encoder.mean and encoder.std to null"
        )
    if num > 2 and not config.objective.takes_further_views:
        raise ValueError(
            f"objective.kind={config.objective.kind} takes two views of a sample, but views.kind={views.kind} "
            f"makes {num}; set objective.kind=dino, or another views.kind"
        )
    if num > 2 and views.is_learned:
        raise ValueError(f"views.kind={views.kind} is learned and makes {num} views; learned views are two")
