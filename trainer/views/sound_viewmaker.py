"""The viewmaker for sounds, which changes their spectrograms like pictures.

Input: waveforms and the keys of its noise. Output: normalised log-mel spectrograms plus a perturbation. The mean size
of the perturbation per entry is the budget, in units of the normalised spectrogram (Tamkin et al. 2022: 0.125, without
a clamp).

Shapes: B sounds, T points of a waveform, M mel bands, N frames.
"""

from __future__ import annotations

from torch import Tensor

from data_pipeline.audio.log_mel import MelConfig
from data_pipeline.core.counter_rng import DrawKeys
from trainer.views.expert_audio import Waveform, clean_spectrogram
from trainer.views.viewmaker import Viewmaker, ViewmakerConfig


class SoundViewmaker(Viewmaker):
    """The policy `viewmaker(waveforms_BT, keys) -> views_B1MN`; its parameters have the same names as a `Viewmaker`."""

    def __init__(self, config: ViewmakerConfig, mel: MelConfig) -> None:
        """Build the network for one channel. Raises `ValueError` like `check_for_sounds`."""
        check_for_sounds(config)
        super().__init__(config, image_channels=1)
        self.mel = mel
        self.waveform = None if config.waveform is None else Waveform(config.waveform, mel)

    def forward(self, waveforms_BT: Tensor, keys: DrawKeys, masks_BHW: Tensor | None = None) -> Tensor:
        """Return views (B, 1, M, N) of waveforms (B, T), in their dtype. Ignores masks, because sounds have none.

        Raises `ValueError` if the number of points T is not `mel.num_points`.
        """
        if self.waveform is not None:
            waveforms_BT = self.waveform.augment(waveforms_BT, keys)
        return super().forward(clean_spectrogram(waveforms_BT, self.mel), keys)


def check_for_sounds(config: ViewmakerConfig) -> None:
    """Raise `ValueError` if the config has a setting that does not fit spectrograms."""
    if config.clamp:
        raise ValueError("views.clamp keeps views in [0, 1], but spectrograms lie outside; set views.clamp=false")
    if config.mask != "none":
        raise ValueError(
            f"views.mask={config.mask} protects objects in pictures, but sounds have none; set views.mask=none"
        )
