"""Compose view policies: one after the other on the same view, another policy for each view, or for each epoch.

A sequence of a crop and a viewmaker lets the viewmaker change what the crop has left. A pair of an expert policy and a
viewmaker compares a hand-made view with a learned one. Policies by epoch train the encoder on hand-made views in one
epoch, and against the viewmaker in the next one.

Draws: the last part of a sequence draws what it would draw alone. Each part before it draws from keys of its own, so
no two parts share a number. A draw that both views of a pair share is therefore one only if as many parts come after it
in both. The views of a pair, and the epochs, have different keys already.

Legend: B samples, C channels, H rows, W columns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Final, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from data_pipeline.audio.log_mel import MelConfig
from data_pipeline.core.counter_rng import DrawKeys
from trainer.views.adversarial_mask import AdversarialMaskConfig
from trainer.views.channel_dropout import ChannelDropoutConfig
from trainer.views.expert_audio import SpectralConfig, WaveformConfig
from trainer.views.expert_image import ExpertImageConfig
from trainer.views.inputs import without_autocast
from trainer.views.policy import BaseViewsConfig, ViewsInputs
from trainer.views.random_mask import RandomMask, RandomMaskConfig
from trainer.views.viewmaker import Viewmaker, ViewmakerConfig

MOST_TURNS: Final = 8  # policies of a `by_epoch`
_VIEWS_OF_A_PART = 1 << 20  # the numbers of views that a part has for itself; even, so first views stay first

SingleConfig = (
    ExpertImageConfig
    | RandomMaskConfig
    | ChannelDropoutConfig
    | AdversarialMaskConfig
    | ViewmakerConfig
    | SpectralConfig
    | WaveformConfig
)
_Part = Annotated[SingleConfig, Field(discriminator="kind")]


class _ComposedConfig(BaseViewsConfig):
    """The base of the configs of compositions: what they can do follows from their single policies."""

    takes_sounds: ClassVar[bool] = True  # if all its policies do, which `check_medium` says

    @property
    def members(self) -> tuple[SingleConfig | SequenceConfig, ...]:
        """Return the policies of the composition, in their order."""
        raise NotImplementedError

    @property
    def is_learned(self) -> bool:  # type: ignore[override]
        return any(member.is_learned for member in self.members)

    @property
    def is_bounded(self) -> bool:  # type: ignore[override]
        return all(member.is_bounded for member in self.members)

    @property
    def protects(self) -> str | None:
        return next((member.protects for member in self.members if member.protects is not None), None)

    def check_medium(self, mel: MelConfig | None) -> None:
        super().check_medium(mel)
        for member in self.members:
            member.check_medium(mel)

    def check_image_size(self, *, height: int, width: int) -> None:
        for member in self.members:
            member.check_image_size(height=height, width=width)

    def check_channels(self, num_channels: int) -> None:
        for member in self.members:
            member.check_channels(num_channels)

    @model_validator(mode="after")
    def _has_one_viewmaker(self) -> Self:
        if (num := sum(member.is_learned for member in self.members)) > 1:
            raise ValueError(f'views of kind "{self.kind}" hold {num} viewmakers, but a run trains one; leave one')
        return self


class SequenceConfig(_ComposedConfig):
    """The config of policies for pictures that are applied one after the other.

    parts: the policies, in their order. The gradient of a viewmaker passes the parts behind it; the parts before it get
        none. So no part behind a viewmaker may jitter colours, which has no gradient here.
    """

    takes_sounds: ClassVar[bool] = False

    kind: Literal["sequence"] = "sequence"
    parts: Annotated[tuple[_Part, ...], Field(min_length=1, max_length=8)]

    @property
    def members(self) -> tuple[SingleConfig | SequenceConfig, ...]:
        return self.parts

    def build(self, given: ViewsInputs) -> Sequence:
        return Sequence(part.build(given) for part in self.parts)

    @model_validator(mode="after")
    def _each_part_works_in_its_place(self) -> Self:
        for number, part in enumerate(self.parts):
            before = self.parts[:number]
            where = f"views.parts[{number}]"
            if isinstance(part, SpectralConfig | WaveformConfig):
                raise ValueError(
                    f'{where} has kind "{part.kind}", which turns sounds into spectrograms, but the parts of a '
                    "sequence change pictures; take it alone, or in a pair"
                )
            if any(isinstance(each, RandomMaskConfig) and each.rescale for each in before):
                raise ValueError(
                    f"{where} expects values in [0, 1], but a random mask before it doubles them; set its "
                    "rescale=false, or put it last"
                )
            if isinstance(part, ViewmakerConfig) and part.mask != "none" and any(map(_moves_pixels, before)):
                raise ValueError(
                    f"{where} has mask={part.mask}, which knows where the object was before the crop or flip ahead of "
                    "it; put the viewmaker first, or set its mask=none"
                )
            if isinstance(part, ExpertImageConfig) and part.jitters and any(each.is_learned for each in before):
                raise ValueError(
                    f"{where} jitters colours behind a viewmaker, whose gradient cannot pass a colour jitter; put it "
                    "before the viewmaker, or set its jitter_probability=0"
                )
        return self


_Member = Annotated[SingleConfig | SequenceConfig, Field(discriminator="kind")]


class PairConfig(_ComposedConfig):
    """The config of another policy for each of the two views.

    first, second: the policy of the first and of the second view.
    """

    kind: Literal["pair"] = "pair"
    first: _Member
    second: _Member

    @property
    def members(self) -> tuple[SingleConfig | SequenceConfig, ...]:
        return self.first, self.second

    def build(self, given: ViewsInputs) -> Pair:
        return Pair(self.first.build(given), self.second.build(given))

    def check(self, run: Any) -> None:
        super().check(run)
        if self.second.is_learned and not run.objective.trains_second_view:
            raise ValueError(
                f"views.second holds the viewmaker, but objective.kind={run.objective.kind} with these settings does "
                "not train the second view, so the viewmaker would never learn; put it into views.first"
            )

    @model_validator(mode="after")
    def _both_views_share_a_draw(self) -> Self:
        first, second = _places_of_shared_draws(self.first), _places_of_shared_draws(self.second)
        for kind in first.keys() & second.keys():
            if first[kind] != second[kind]:
                raise ValueError(
                    f'views.first and views.second hold a part of kind "{kind}", whose draw the two views share only '
                    "if as many parts come after it in both; put it last in both"
                )
        return self


class ByEpochConfig(_ComposedConfig):
    """The config of policies that take turns: an epoch of the first one, an epoch of the second one, and so on.

    policies: the policies, in their order. In the epochs of the others, a viewmaker does not learn.
    """

    changes_with_epoch: ClassVar[bool] = True

    kind: Literal["by_epoch"] = "by_epoch"
    policies: Annotated[tuple[_Member, ...], Field(min_length=2, max_length=MOST_TURNS)]

    @property
    def members(self) -> tuple[SingleConfig | SequenceConfig, ...]:
        return self.policies

    def learns_in(self, epoch: int) -> bool:
        return self.policies[epoch % len(self.policies)].is_learned

    def build(self, given: ViewsInputs) -> ByEpoch:
        return ByEpoch(policy.build(given) for policy in self.policies)

    def check(self, run: Any) -> None:
        super().check(run)
        if run.num_epochs < len(self.policies):
            raise ValueError(
                f"views.policies has {len(self.policies)} policies, each for an epoch, but num_epochs is "
                f"{run.num_epochs}; set num_epochs={len(self.policies)} or more"
            )


class Composed(nn.Module):
    """The base of compositions."""

    def _apply_part(self, part: nn.Module, inputs: Tensor, keys: DrawKeys, masks_BHW: Tensor | None) -> Tensor:
        """Return the views by one policy. Only a viewmaker runs under autocast and in float64, as it does alone."""
        view: Tensor
        if isinstance(part, Composed | Viewmaker):
            view = part(inputs, keys, masks_BHW)
            return view
        given = inputs.float() if isinstance(part, RandomMask) else inputs
        with without_autocast(inputs.device):
            view = part(given, keys, masks_BHW).to(inputs.dtype)
            return view


class Sequence(Composed):
    """The view policy of a sequence: a module `policy(images_BCHW, keys, masks_BHW) -> views_BCHW`."""

    def __init__(self, parts: Iterable[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, images_BCHW: Tensor, keys: DrawKeys, masks_BHW: Tensor | None = None) -> Tensor:
        """Return one view of each picture, in the dtype of the pictures."""
        for number, part in enumerate(self.parts):
            to_come = len(self.parts) - 1 - number
            own_keys = dataclasses.replace(keys, view=keys.view + to_come * _VIEWS_OF_A_PART)
            images_BCHW = self._apply_part(part, images_BCHW, own_keys, masks_BHW)
        return images_BCHW


class Pair(Composed):
    """The view policy of a pair: a module `policy(inputs, keys, masks_BHW) -> views_BCHW`.

    The number of the view in the keys chooses the policy: even numbers belong to first views.
    """

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, inputs: Tensor, keys: DrawKeys, masks_BHW: Tensor | None = None) -> Tensor:
        """Return one view of each picture or sound.

        Keys of two views (`DrawKeys.two_views`) have all rows of the first view before those of the second.
        """
        if keys.is_next_B is None:
            return self._apply_part(self.second if keys.view % 2 else self.first, inputs, keys, masks_BHW)
        assert keys.view % 2 == 0  # both views of a pair
        half, views = len(inputs) // 2, []
        for number, rows in enumerate((slice(0, half), slice(half, None))):
            own_keys = dataclasses.replace(keys.rows(rows), view=keys.view + number, is_next_B=None)
            own_masks_BHW = None if masks_BHW is None else masks_BHW[rows]
            policy = self.second if number else self.first
            views.append(self._apply_part(policy, inputs[rows], own_keys, own_masks_BHW))
        return torch.cat(views)


class ByEpoch(Composed):
    """The view policy of policies that take turns: a module `policy(inputs, keys, masks_BHW) -> views_BCHW`."""

    def __init__(self, policies: Iterable[nn.Module]) -> None:
        super().__init__()
        self.policies = nn.ModuleList(policies)

    def forward(self, inputs: Tensor, keys: DrawKeys, masks_BHW: Tensor | None = None) -> Tensor:
        """Return one view of each picture or sound by the policy of the epoch in the keys."""
        assert keys.recorded_epoch is None  # a recorded step has one policy
        return self._apply_part(self.policies[keys.epoch % len(self.policies)], inputs, keys, masks_BHW)


def _places_of_shared_draws(member: SingleConfig | SequenceConfig) -> dict[str, set[int]]:
    """Return where the parts stand whose draw both views of a pair share, by kind: how many parts come after each."""
    places: dict[str, set[int]] = {}
    for num_after, part in enumerate(reversed(member.parts if isinstance(member, SequenceConfig) else (member,))):
        if isinstance(part, RandomMaskConfig) or (isinstance(part, ChannelDropoutConfig) and part.shared == "step"):
            places.setdefault(part.kind, set()).add(num_after)
    return places


def _moves_pixels(config: SingleConfig) -> bool:
    return isinstance(config, ExpertImageConfig) and (config.area is not None or config.flip_probability > 0)
