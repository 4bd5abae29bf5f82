"""The interface of views: what the config of a view policy says of it, how policies are built and called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, Self, TypeAlias

from pydantic import BeforeValidator, SerializeAsAny
from torch import Tensor, nn

from data_pipeline.audio.log_mel import MelConfig
from data_pipeline.core.counter_rng import DrawKeys, keys_of_rows
from data_pipeline.core.kinds import KindConfig, Kinds
from data_pipeline.core.random_crop import CropLaw
from trainer.views.inputs import to_unit_range

# The config class of each kind. A new view of this project needs a line here and its own file.
VIEWS: Final[Mapping[str, str]] = {
    "expert_image": "trainer.views.expert_image:ExpertImageConfig",
    "random_mask": "trainer.views.random_mask:RandomMaskConfig",
    "channel_dropout": "trainer.views.channel_dropout:ChannelDropoutConfig",
    "adversarial_mask": "trainer.views.adversarial_mask:AdversarialMaskConfig",
    "spectral": "trainer.views.expert_audio:SpectralConfig",
    "waveform": "trainer.views.expert_audio:WaveformConfig",
    "viewmaker": "trainer.views.viewmaker:ViewmakerConfig",
    "sequence": "trainer.views.composed:SequenceConfig",
    "pair": "trainer.views.composed:PairConfig",
    "by_epoch": "trainer.views.composed:ByEpochConfig",
    "multi_crop": "trainer.views.multi_crop:MultiCropConfig",
}

ViewPolicy: TypeAlias = nn.Module
# A view policy: one of `build_view_policy`, or a module or function of your own with these arguments.
Policy: TypeAlias = Callable[[Tensor, DrawKeys, Tensor | None], Tensor]


@dataclass(frozen=True)
class ViewsInputs:
    """The facts from which a view policy is built: the channels of pictures, and the spectrogram of sounds or None."""

    image_channels: int
    mel: MelConfig | None = None


class BaseViewsConfig(KindConfig):
    """The base of the configs of view policies. Says what its policy can do, and builds it.

    Attributes:
        is_learned: whether the policy has trained parameters: the run then has a section `adversary`, and the policy is
            the trained module "viewmaker". Its attribute `checkpointing` is set to `memory.viewmaker_checkpointing`.
        takes_pictures, takes_sounds: the media that the policy changes.
        is_bounded: whether views of pictures lie in [0, 1], up to the budget of a learned policy.
        changes_with_epoch: whether the policy is another one in another epoch.
    """

    kinds: ClassVar[Kinds] = Kinds("view policy", group="views", built_in=VIEWS)
    is_learned: ClassVar[bool] = False
    takes_pictures: ClassVar[bool] = True
    takes_sounds: ClassVar[bool] = False
    is_bounded: ClassVar[bool] = True
    changes_with_epoch: ClassVar[bool] = False

    def build(self, given: ViewsInputs) -> ViewPolicy:
        """Return the policy, with its weights, if it has any, from torch's default generator."""
        raise NotImplementedError(f"{type(self).__qualname__} has no method build")

    def check(self, run: Any) -> None:
        self.check_medium(run.data.mel)
        if self.changes_with_epoch and run.data.mixture is not None:
            raise ValueError(
                f'views of kind "{self.kind}" change with the epoch, but each source of data.mixture has epochs of its '
                "own; train on one dataset, or use other views"
            )

    def learns_in(self, epoch: int) -> bool:
        """Return whether the policy learns in an epoch; `epoch` counts from 0."""
        return self.is_learned

    def check_medium(self, mel: MelConfig | None) -> None:
        """Raise `ValueError` if the views do not fit sounds with this spectrogram, or pictures (None)."""
        if mel is not None and not self.takes_sounds:
            raise ValueError(f'views of kind "{self.kind}" are for pictures, not for sounds')
        if mel is None and not self.takes_pictures:
            raise ValueError(
                f'views of kind "{self.kind}" are for sounds, not for pictures; set data.sample_rate if the data are '
                "sounds"
            )

    def check_image_size(self, *, height: int, width: int) -> None:
        """Raise `ValueError` if views cannot be made of pictures or spectrograms of that size."""

    def check_channels(self, num_channels: int) -> None:
        """Raise `ValueError` if views cannot be made of pictures with that number of channels."""

    @property
    def num_further(self) -> int:
        """Return the number of views of a sample beside the first two.

        If it is above 0, the policy has a method `further_view` with the arguments of the policy, which returns one of
        these views, and it is not learned.
        """
        return 0

    def further_size(self, *, height: int, width: int) -> tuple[int, int]:
        """Return the height and width of the further views of pictures or spectrograms of that size."""
        return height, width

    @property
    def protects(self) -> str | None:
        """Return the setting by which the overlay of a picture is protected; None if it is not."""
        return None

    def crop_law(self) -> CropLaw | None:
        """Return how the policy crops pictures, if that can be done when they are decoded; otherwise None."""
        return None

    def without_crop(self) -> Self:
        """Return the config of the same views without the crop of `crop_law`."""
        return self


def build_view_policy(config: BaseViewsConfig, *, image_channels: int, mel: MelConfig | None = None) -> ViewPolicy:
    """Return the policy of a config, a module `policy(images_BCHW, keys, masks_BHW=None) -> views_BCHW`.

    With `mel`, it is a policy for sounds: `policy(waveforms_BT, keys, masks_BHW=None) -> views_B1MN`. Its views are
    normalised log-mel spectrograms in the dtype of the waveforms.

    `masks_BHW` (B, H, W) uint8 marks the objects on the pictures: 0 outside, 128 in the box around the object, 255 on
    it (`MASK_OUTSIDE`, `MASK_BOX` and `MASK_OBJECT` of `data_pipeline.core.sample`). Every policy accepts it. Only a
    masked viewmaker reads it, and raises `ValueError` if it is None or of another type or shape. Every policy raises
    `ValueError` if there is not one key for each picture or sound, and if its config refuses their shape.

    Raises `ValueError` like `BaseViewsConfig.check_medium`.
    """
    config.check_medium(mel)
    return config.build(ViewsInputs(image_channels, mel))


def two_views(
    policy: Policy, inputs: Tensor, *, seed: int, step: int, first_row: int = 0, masks_BHW: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return two views of each sample of a batch of pictures (B, C, H, W) or waveforms (B, T).

    Pictures are uint8, or float in [0, 1]. Waveforms are int16, or float in [-1, 1].

    `masks_BHW` (B, H, W) uint8 marks the objects on the pictures, for a masked viewmaker: 0 outside, 128 in the box
    around the object, 255 on it, as `Batch.masks_BHW` does.

    Equal arguments give equal views, because no draw comes from torch's generator. On several ranks, pass the number of
    rows of the ranks before this one as `first_row`. Raises `UserError` if inputs are of another type, pictures are
    outside [0, 1] or waveforms far outside [-1, 1], and `ValueError` as the policy does.
    """
    inputs = to_unit_range(inputs)
    a, b = (keys_of_rows(inputs, seed=seed, step=step, view=view, first_row=first_row) for view in (0, 1))
    return policy(inputs, a, masks_BHW), policy(inputs, b, masks_BHW)


# The type of a section `views`: the config of any view policy, found by its kind.
ViewsConfig = Annotated[SerializeAsAny[BaseViewsConfig], BeforeValidator(BaseViewsConfig.kinds.parse)]
