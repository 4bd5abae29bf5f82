"""Build view policies from their configs. The unions below are the registry."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from data_pipeline.audio.log_mel import MelConfig
from trainer.views import expert_image, random_mask, viewmaker
from trainer.views.expert_audio import Spectral, SpectralConfig, Waveform, WaveformConfig
from trainer.views.expert_image import ExpertImage, ExpertImageConfig
from trainer.views.random_mask import RandomMask, RandomMaskConfig
from trainer.views.sound_viewmaker import SoundViewmaker, check_for_sounds
from trainer.views.viewmaker import Viewmaker, ViewmakerConfig

ViewsConfig = Annotated[
    ExpertImageConfig | RandomMaskConfig | ViewmakerConfig | SpectralConfig | WaveformConfig,
    Field(discriminator="kind"),
]
ViewPolicy = ExpertImage | RandomMask | Viewmaker | Spectral | Waveform

__all__ = ["ViewPolicy", "ViewsConfig", "build_view_policy", "check_image_size", "check_views_fit"]


def build_view_policy(config: ViewsConfig, *, image_channels: int, mel: MelConfig | None = None) -> ViewPolicy:
    """Return the policy of a config, a module `policy(images_BCHW, keys, masks_BHW=None) -> views_BCHW`.

    With `mel`, it is a policy for sounds: `policy(waveforms_BT, keys, masks_BHW=None) -> views_B1MN`. Its views are
    normalised log-mel spectrograms in the dtype of the waveforms.

    `masks_BHW` (uint8, in the levels of `data_pipeline.core.sample`) marks the objects on the pictures. Every policy
    accepts it. Only a masked viewmaker reads it, and raises `ValueError` if it is None.

    Raises `ValueError` like `check_views_fit`.
    """
    check_views_fit(config, mel)
    if mel is None:
        match config:
            case ExpertImageConfig():
                return ExpertImage(config)
            case RandomMaskConfig():
                return RandomMask(config)
            case ViewmakerConfig():
                return Viewmaker(config, image_channels=image_channels)
    else:
        match config:
            case SpectralConfig():
                return Spectral(config, mel)
            case WaveformConfig():
                return Waveform(config, mel)
            case ViewmakerConfig():
                return SoundViewmaker(config, mel)
    raise AssertionError(config.kind)


def check_views_fit(config: ViewsConfig, mel: MelConfig | None) -> None:
    """Raise `ValueError`, with one sentence, if views do not fit sounds with this spectrogram, or pictures (None)."""
    if isinstance(config, ExpertImageConfig | RandomMaskConfig) and mel is not None:
        raise ValueError(
            f'views of kind "{config.kind}" are for pictures, not for sounds; use spectral, waveform or viewmaker'
        )
    if isinstance(config, SpectralConfig | WaveformConfig) and mel is None:
        raise ValueError(
            f'views of kind "{config.kind}" are for sounds, not for pictures; use expert_image, random_mask or '
            "viewmaker, or set data.sample_rate if the data are sounds"
        )
    if isinstance(config, SpectralConfig) and mel is not None:
        Spectral(config, mel)  # raises if a mask is as wide as the spectrogram
    if isinstance(config, ViewmakerConfig):
        if mel is not None:
            check_for_sounds(config)
        elif config.waveform is not None:
            raise ValueError("views.waveform changes sounds, but these are pictures; set views.waveform=null")


def check_image_size(config: ViewsConfig, *, height: int, width: int) -> None:
    """Raise `ValueError`, with one sentence, if views cannot be made of pictures or spectrograms of that size."""
    match config:
        case ExpertImageConfig():
            expert_image.check_image_size(height=height, width=width)
        case ViewmakerConfig():
            viewmaker.check_image_size(config, height=height, width=width)
        case RandomMaskConfig():
            random_mask.check_image_size(config, height=height, width=width)
