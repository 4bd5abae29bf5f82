from __future__ import annotations

import pytest
import torch
from torch import Tensor

from data_pipeline.audio.log_mel import FSDD
from data_pipeline.core.counter_rng import DrawKeys
from trainer.views.expert_audio import SpectralConfig, Waveform, WaveformConfig, clean_spectrogram
from trainer.views.expert_image import ExpertImageConfig
from trainer.views.policy import ViewsConfig, build_view_policy
from trainer.views.viewmaker import SoundViewmaker, Viewmaker, ViewmakerConfig

CONFIG = ViewmakerConfig(base_width=4, num_res_blocks=1, budget=0.125, clamp=False)
KEYS = DrawKeys(seed=1, epoch=2, index_B=torch.tensor([7, 3, 11]), view=0)


def waveforms(dtype: torch.dtype = torch.float32) -> Tensor:
    draw = torch.Generator().manual_seed(0)
    return (0.1 * torch.randn(3, FSDD.num_points, generator=draw)).to(dtype)


def viewmaker(config: ViewmakerConfig = CONFIG) -> SoundViewmaker:
    torch.manual_seed(0)
    return SoundViewmaker(config, FSDD)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_is_the_viewmaker_of_pictures_on_the_spectrogram(dtype: torch.dtype) -> None:
    on_sounds = viewmaker().to(dtype)
    on_pictures = Viewmaker(CONFIG, image_channels=1).to(dtype)
    on_pictures.load_state_dict(on_sounds.state_dict())
    views_BCHW = on_sounds(waveforms(dtype), KEYS)
    assert views_BCHW.shape == (3, 1, 64, 64)
    assert views_BCHW.dtype == dtype
    assert torch.equal(views_BCHW, on_pictures(clean_spectrogram(waveforms(dtype), FSDD), KEYS))


def test_the_waveform_is_changed_first_where_the_config_says_so() -> None:
    """With the weights of one without: the same as that on waveforms that were changed beforehand."""
    behind = viewmaker(CONFIG.model_copy(update={"waveform": WaveformConfig()}))
    changed_BT = Waveform(WaveformConfig(), FSDD).augment(waveforms(), KEYS)
    assert torch.equal(behind(waveforms(), KEYS), viewmaker()(changed_BT, KEYS))
    assert not torch.equal(behind(waveforms(), KEYS), viewmaker()(waveforms(), KEYS))
    assert behind.state_dict().keys() == viewmaker().state_dict().keys()


@pytest.mark.parametrize(
    ("config", "is_sound", "message"),
    [
        (ExpertImageConfig(), True, "are for pictures, not for sounds"),
        (SpectralConfig(), False, "are for sounds, not for pictures"),
        (WaveformConfig(), False, "are for sounds, not for pictures"),
        (SpectralConfig(max_masked_frames=64), True, "max_masked_frames is 64"),
        (ViewmakerConfig(), True, "set views.clamp=false"),
        (ViewmakerConfig(clamp=False, mask="object"), True, "set views.mask=none"),
        (ViewmakerConfig(waveform=WaveformConfig()), False, "set views.waveform=null"),
    ],
)
def test_views_of_the_other_medium_are_refused(config: ViewsConfig, is_sound: bool, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_view_policy(config, image_channels=1, mel=FSDD if is_sound else None)
