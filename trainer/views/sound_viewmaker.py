"""The viewmaker on sounds: it changes their spectrograms as it changes pictures.

Comes in: waveforms, and the keys of its noise. Goes out: normalised log-mel spectrograms with a perturbation whose mean
size per entry is the budget, in units of the normalised spectrogram (Tamkin et al. 2022: 0.125, without a clamp).

Shapes: B sounds, T points of a waveform, M mel bands, N frames.
"""

from __future__ import annotations

from torch import Tensor

from data_pipeline.audio.log_mel import MelConfig
from data_pipeline.core.counter_rng import DrawKeys
from trainer.views.expert_audio import Waveform, clean_spectrogram
from trainer.views.viewmaker import Viewmaker, ViewmakerConfig


class SoundViewmaker(Viewmaker):
    """`viewmaker(waveforms_BT, keys) -> views_B1MN`; its parameters are named as those of a `Viewmaker`."""

    def __init__(self, config: ViewmakerConfig, mel: MelConfig) -> None:
        """Raises `ValueError` as `check_for_sounds` does."""
        check_for_sounds(config)
        super().__init__(config, image_channels=1)
        self.mel = mel
        self.waveform = None if config.waveform is None else Waveform(config.waveform, mel)

    def forward(self, waveforms_BT: Tensor, keys: DrawKeys, masks_BHW: Tensor | None = None) -> Tensor:
        """Views (B, 1, M, N) of waveforms (B, T), in their dtype. Sounds have no masks, and none are read.

        Raises `ValueError` where the waveforms do not have the points of the spectrogram.
        """
        if self.waveform is not None:
            waveforms_BT = self.waveform.augment(waveforms_BT, keys)
        return super().forward(clean_spectrogram(waveforms_BT, self.mel), keys)


def check_for_sounds(config: ViewmakerConfig) -> None:
    """Raises `ValueError` where the config asks for what spectrograms do not have."""
    if config.clamp:
        raise ValueError("views.clamp holds views in [0, 1], and spectrograms lie outside; set views.clamp=false")
    if config.mask != "none":
        raise ValueError(
            f"views.mask={config.mask} protects objects in pictures; sounds have none: set views.mask=none"
        )
