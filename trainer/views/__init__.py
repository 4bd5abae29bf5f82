"""Views: the random changes of a picture or a sound before the encoder sees it.

Input: pictures (B, C, H, W) float32 in [0, 1], or waveforms (B, T), and the keys of all random draws. Output: one view
of each. A view of a picture has the same shape and is not normalised, because the encoder normalises. A view of a sound
is a normalised log-mel spectrogram (B, 1, M, N). All policies work on whole batches, on the training device.

Invariant: no draw comes from global random state, so views are equal in one process and in many.
"""

from trainer.views.adversarial_mask import AdversarialMaskConfig
from trainer.views.channel_dropout import ChannelDropoutConfig
from trainer.views.expert_audio import SpectralConfig, WaveformConfig
from trainer.views.expert_image import ExpertImageConfig
from trainer.views.multi_crop import MultiCropConfig
from trainer.views.policy import BaseViewsConfig, ViewPolicy, ViewsConfig, ViewsInputs, build_view_policy, two_views
from trainer.views.random_mask import RandomMaskConfig
from trainer.views.viewmaker import Viewmaker, ViewmakerConfig

__all__ = [
    "AdversarialMaskConfig",
    "BaseViewsConfig",
    "ChannelDropoutConfig",
    "ExpertImageConfig",
    "MultiCropConfig",
    "RandomMaskConfig",
    "SpectralConfig",
    "ViewPolicy",
    "Viewmaker",
    "ViewmakerConfig",
    "ViewsConfig",
    "ViewsInputs",
    "WaveformConfig",
    "build_view_policy",
    "two_views",
]
