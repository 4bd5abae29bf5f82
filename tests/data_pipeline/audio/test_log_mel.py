"""Log-mel spectrograms against librosa and against the figures of the published recordings."""

from __future__ import annotations

import librosa
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from data_pipeline.audio.log_mel import (
    AUDIOMNIST,
    FSDD,
    MelConfig,
    audible_frames,
    frames_that_hear,
    log_mel,
    mel_config,
    power_mel,
)
from data_pipeline.core.errors import UserError
from data_pipeline.sources.background import read_sounds
from tests.real_data import archive

CONFIGS = pytest.mark.parametrize(
    "config", [AUDIOMNIST, FSDD, mel_config(44_100, 3 * 44_100)], ids=["audiomnist", "fsdd", "three seconds"]
)


def ours(waveforms_BT: torch.Tensor, config: MelConfig) -> torch.Tensor:
    return log_mel(power_mel(waveforms_BT, config), config)


def librosas(waveform: NDArray[np.generic], config: MelConfig) -> NDArray[np.generic]:
    power = librosa.feature.melspectrogram(
        y=waveform,
        sr=config.sample_rate,
        n_fft=config.n_fft,
        hop_length=config.hop,
        n_mels=config.num_mels,
        center=True,
        pad_mode="constant",
        power=2.0,
    )
    normalised: NDArray[np.generic] = (librosa.power_to_db(power**2, amin=1e-10, top_db=80.0) + 90.293) / 11.799
    return normalised


def sounds(config: MelConfig, dtype: torch.dtype) -> torch.Tensor:
    """(5, T): loud and faint noise, a chirp, a click, and a sound that ends halfway."""
    generator = torch.Generator().manual_seed(0)
    noise_2T = torch.randn((2, config.num_points), generator=generator, dtype=dtype) * torch.tensor([[0.3], [1e-4]])
    time = torch.arange(config.num_points, dtype=dtype) / config.num_points
    chirp = 0.5 * torch.sin(config.num_points * time**2)
    click = torch.zeros_like(time)
    click[config.num_points // 3] = 1
    return torch.stack([*noise_2T.to(dtype), chirp, click, chirp * (time < 0.5)])


@pytest.mark.slow
@CONFIGS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_to_librosa(config: MelConfig, dtype: torch.dtype) -> None:
    """To 1e-5 of a deviation; to 1e-4 for a chirp, most of whose bands have next to no power."""
    waveforms_BT = sounds(config, dtype)
    spectrograms = ours(waveforms_BT, config)
    assert spectrograms.shape == (5, 64, 64)
    assert spectrograms.dtype == dtype
    expected = np.stack([librosas(waveform, config) for waveform in waveforms_BT.numpy()])
    for sound, tolerance in enumerate((1e-5, 1e-5, 1e-4, 1e-5, 1e-4)):
        np.testing.assert_allclose(spectrograms[sound].numpy(), expected[sound], rtol=0, atol=tolerance)


@CONFIGS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_audible_frames_are_those_with_power_in_every_band(config: MelConfig, dtype: torch.dtype) -> None:
    """Sounds, silence, clicks at eight places of a hop and at both ends, and sounds with silence in the middle."""
    apart = config.hop + config.hop // 8
    click_at = [0, 1, config.num_points - 1, *range(config.num_points // 2, config.num_points, apart)]
    click_XT = torch.zeros(len(click_at), config.num_points, dtype=dtype)
    click_XT[torch.arange(len(click_at)), torch.tensor(click_at)] = 1
    gap_5T = sounds(config, dtype)
    gap_5T[:, config.num_points // 4 : config.num_points // 2] = 0
    waveforms_BT = torch.cat([sounds(config, dtype), 0 * gap_5T, click_XT, gap_5T])
    is_audible_BN = audible_frames(waveforms_BT, config)
    power_BMN = power_mel(waveforms_BT, config)
    assert torch.equal(is_audible_BN, (power_BMN > 0).any(dim=1))
    assert torch.equal(is_audible_BN, (power_BMN > 0).all(dim=1))
    with_gradient = audible_frames(waveforms_BT.clone().requires_grad_(), config)  # as on an accelerator
    assert torch.equal(with_gradient, is_audible_BN)


def test_the_published_backgrounds_have_the_published_figures() -> None:
    num_points = AUDIOMNIST.num_points
    crops = []
    for sound in read_sounds(archive("noise"), sample_rate=48_000, num_points=num_points):
        scaled = 0.05 * sound / sound.abs().max()
        crops += [scaled[:num_points], scaled[-num_points:]]
    crops_6T = torch.stack(crops)
    rms = crops_6T.square().mean(dim=1).sqrt()
    assert [round(value, 4) for value in rms.tolist()] == [0.0083, 0.0060, 0.0030, 0.0066, 0.0092, 0.0086]
    spectrograms = ours(crops_6T, AUDIOMNIST)
    means, stds = spectrograms.mean(dim=(1, 2)), spectrograms.flatten(1).std(dim=1)
    assert [round(value, 2) for value in (means.min().item(), means.max().item())] == [1.19, 2.84]
    assert means.argmin() == 2  # traffic, its first points
    assert means.argmax() in (4, 5)  # machinery
    assert [round(value, 2) for value in (stds.min().item(), stds.max().item())] == [1.46, 1.97]


@CONFIGS
def test_silence_and_the_range_below_the_loudest(config: MelConfig) -> None:
    silent_and_loud = torch.stack([torch.zeros(config.num_points), sounds(config, torch.float32)[2]])
    silence, loud = ours(silent_and_loud, config)
    assert round(silence.unique().item(), 3) == -0.823
    assert (loud.max() - loud.min()).item() == pytest.approx(80 / 11.799, abs=1e-5)


def test_a_masked_band_falls_to_the_floor_of_the_item() -> None:
    power_BMN = torch.full((2, 64, 64), 1.0)
    power_BMN[0, 10] = 0
    power_BMN[1] = 1e-4  # -80 of the doubled decibels, so 80 below it lies under the floor of -100
    power_BMN[1, 10] = 0
    spectrograms = log_mel(power_BMN, FSDD)
    assert spectrograms[:, 10, 0].tolist() == pytest.approx([(-80 + 90.293) / 11.799, (-100 + 90.293) / 11.799])
    assert spectrograms[:, 0, 0].tolist() == pytest.approx([90.293 / 11.799, (-80 + 90.293) / 11.799])


@CONFIGS
def test_a_sound_is_the_same_in_any_batch(config: MelConfig) -> None:
    waveforms_BT = sounds(config, torch.float32).repeat(4, 1)[:19]
    together = ours(waveforms_BT, config)
    alone = torch.cat([ours(waveform[None], config) for waveform in waveforms_BT])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-4)


@CONFIGS
@pytest.mark.parametrize("has_gradients", [False, True], ids=["without gradients", "with gradients"])
def test_frames_that_are_not_needed_are_zero_and_the_others_as_ever(config: MelConfig, has_gradients: bool) -> None:
    waveforms_BT = sounds(config, torch.float64).repeat(4, 1).requires_grad_(has_gradients)
    needed_BN = torch.rand(20, 64, generator=torch.Generator().manual_seed(0)) < 0.6
    needed_BN[:3] = False  # a whole part without a frame
    needed_BN[7] = True
    needed_BN[-1] = False
    power_BMN = power_mel(waveforms_BT, config, needed_BN=needed_BN)
    expected = power_mel(waveforms_BT, config) * needed_BN[:, None, :]
    torch.testing.assert_close(power_BMN, expected, rtol=1e-12, atol=1e-12)
    assert power_BMN.is_contiguous() or has_gradients
    assert not power_mel(waveforms_BT, config, needed_BN=torch.zeros_like(needed_BN)).any()


@CONFIGS
def test_frames_that_hear_a_range_are_those_with_power(config: MelConfig) -> None:
    first_B = torch.tensor([0, 1, config.n_fft // 2, config.hop, config.num_points // 3, config.num_points - 1])
    length_B = torch.tensor([1, 2, 1, config.hop, config.num_points // 5, 1])
    place_T = torch.arange(config.num_points)
    is_inside_BT = (place_T >= first_B[:, None]) & (place_T < (first_B + length_B)[:, None])
    ones_power_BMN = power_mel(is_inside_BT.double(), config)
    assert torch.equal(frames_that_hear(first_B, length_B, config), ones_power_BMN.sum(dim=1) > 0)


def test_gradients_after_first_use_without_them() -> None:
    config = MelConfig(sample_rate=8_000, num_points=600, n_fft=256, hop=100, num_mels=32)
    with torch.inference_mode():
        ours(torch.randn(1, 600), config)
    waveforms_BT = torch.randn(2, 600, requires_grad=True)
    ours(waveforms_BT, config).sum().backward()  # type: ignore[no-untyped-call]
    assert waveforms_BT.grad is not None
    assert waveforms_BT.grad.abs().sum() > 0


def test_what_is_differentiated_is_the_same() -> None:
    """Gradients need torch where NumPy would compute without them."""
    waveforms_BT = sounds(FSDD, torch.float64)
    with_gradients = ours(waveforms_BT.clone().requires_grad_(), FSDD).detach()
    torch.testing.assert_close(with_gradients, ours(waveforms_BT, FSDD), rtol=0, atol=1e-10)


def test_autocast_does_not_coarsen_it() -> None:
    waveforms_BT = sounds(FSDD, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = ours(waveforms_BT, FSDD)
    assert inside.dtype == torch.float32
    assert torch.equal(inside, ours(waveforms_BT, FSDD))


def test_every_rate_and_length_has_a_spectrogram_of_one_shape_that_hears_every_point() -> None:
    assert mel_config(48_000) is mel_config(48_000, 50_000) is AUDIOMNIST
    assert mel_config(8_000) is mel_config(8_000, 8_333) is FSDD
    assert mel_config(16_000) == MelConfig(sample_rate=16_000, num_points=16_666, n_fft=1_024, hop=264)
    for rate in (4_000, 8_000, 11_025, 16_000, 22_050, 44_100, 48_000, 96_000):
        for num_points in (None, rate, 3 * rate, 10 * rate):
            config = mel_config(rate, num_points)
            assert (config.num_mels, config.num_frames) == (64, 64)
            assert config.n_fft >= max(0.037 * rate, config.hop)
            assert config.n_fft <= max(0.074 * rate, 2 * config.hop)
            click = torch.zeros(1, config.num_points, dtype=torch.float64)
            click[0, config.num_points // 2 + config.hop // 2] = 1  # all frequencies alike, between two frames
            assert (power_mel(click, config).amax(dim=2) > 0).all()
    for rate, num_points in ((8_000, 1_000), (1_000, 5_000)):
        with pytest.raises(UserError, match=f"{num_points} points at {rate} a second are too short"):
            mel_config(rate, num_points)
