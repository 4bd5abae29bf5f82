"""Expert views of sounds against NumPy and torchaudio one by one, and the laws of what is drawn."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from data_pipeline.audio.log_mel import AUDIOMNIST, FSDD, MelConfig, audible_frames
from data_pipeline.core.counter_rng import DrawKeys
from tests.data_pipeline.building.draws import keys_of as keys
from tests.trainer.views.kolmogorov import ks_p_value
from trainer.views.expert_audio import (
    MaskDraws,
    Spectral,
    SpectralConfig,
    Waveform,
    WaveformConfig,
    clean_spectrogram,
    draw_masks,
    draw_waveform,
    mask_power,
    white_noise,
)
from trainer.views.speed_and_pitch import change_speed_and_pitch

MELS = pytest.mark.parametrize("mel", [AUDIOMNIST, FSDD], ids=["audiomnist", "fsdd"])
POLICIES = pytest.mark.parametrize(
    "policy",
    [
        Spectral(SpectralConfig(), FSDD),
        Waveform(WaveformConfig(), FSDD),
        Waveform(WaveformConfig(speed=(0.9, 1.1), semitones=(-3, 3)), FSDD),
    ],
    ids=["spectral", "waveform", "speed and pitch"],
)


def sounds(num: int, mel: MelConfig, dtype: torch.dtype = torch.float32) -> Tensor:
    """(num, T): noise of all loudnesses, chirps, and chirps that end half-way."""
    generator = torch.Generator().manual_seed(0)
    time_T = torch.arange(mel.num_points, dtype=torch.float64) / mel.num_points
    noise_BT = torch.randn(num, mel.num_points, generator=generator, dtype=torch.float64)
    noise_BT *= torch.logspace(-4, -1, num, dtype=torch.float64)[:, None]
    chirp_T = 0.3 * torch.sin(mel.num_points * time_T**2)
    noise_BT[1::3] = chirp_T
    noise_BT[2::3] = chirp_T * (time_T < 0.5)
    return noise_BT.to(dtype)


def torchaudios_log_mel(waveform_T: Tensor, mel: MelConfig, masks: tuple[slice, slice] | None = None) -> Tensor:
    """Return the spectrogram of one waveform; bands and frames of `masks` are silenced before the logarithm.

    The tests of `data_pipeline.audio` compare the spectrogram with librosa's, which takes longer to import.
    """
    transforms = pytest.importorskip("torchaudio.transforms")
    to_power = transforms.MelSpectrogram(
        mel.sample_rate, mel.n_fft, hop_length=mel.hop, n_mels=mel.num_mels, pad_mode="constant", norm="slaney",
        mel_scale="slaney",
    )  # fmt: skip
    power_MN = to_power.to(waveform_T.dtype)(waveform_T)
    if masks is not None:
        bands, frames = masks
        power_MN[bands] = 0
        power_MN[:, frames] = 0
    decibels_MN: Tensor = transforms.AmplitudeToDB("power", top_db=80.0)(power_MN**2)
    return (decibels_MN - mel.mean) / mel.std


@pytest.mark.slow
@MELS
def test_spectral_views_equal_torchaudio_one_by_one(mel: MelConfig) -> None:
    x = sounds(6, mel, torch.float64)
    views = Spectral(SpectralConfig(), mel)(x, keys(6))
    draws = draw_masks(SpectralConfig(), keys(6), mel, audible_BN=audible_frames(x, mel))
    assert views.shape == (6, 1, 64, 64)
    noise = views[:, 0] - Spectral(SpectralConfig(noise_std=0), mel)(x, keys(6))[:, 0]
    assert noise.std() == pytest.approx(0.25, rel=0.05)
    for i in range(6):
        first_band, num_bands, first_frame, num_frames = (int(part[i]) for part in dataclasses.astuple(draws))
        bands, frames = slice(first_band, first_band + num_bands), slice(first_frame, first_frame + num_frames)
        expected = torchaudios_log_mel(x[i], mel, (bands, frames))
        torch.testing.assert_close(views[i, 0] - noise[i], expected, rtol=0, atol=1e-3)


@pytest.mark.slow
@MELS
def test_waveform_views_equal_numpy_and_torchaudio_one_by_one(mel: MelConfig) -> None:
    x, num_points = sounds(6, mel, torch.float64), mel.num_points
    draws = draw_waveform(WaveformConfig(), keys(6), num_points=num_points)
    noise = Waveform(WaveformConfig(kept=None), mel).augment(torch.zeros_like(x), keys(6))
    views = Waveform(WaveformConfig(), mel)(x, keys(6))
    assert views.shape == (6, 1, 64, 64)
    for i in range(6):
        first, length = int(draws.first_B[i]), int(draws.length_B[i])
        outside = np.ones(num_points, dtype=bool)
        outside[first : first + length] = False
        waveform = x[i].numpy().copy()
        if draws.crops_last_B[i]:
            waveform += noise[i].numpy()
            waveform[outside] = 0
        else:
            waveform[outside] = 0
            waveform += noise[i].numpy()
        expected = torchaudios_log_mel(torch.from_numpy(waveform), mel)
        torch.testing.assert_close(views[i, 0], expected, rtol=0, atol=1e-3)


def test_masks_equal_torchaudio() -> None:
    """torchaudio draws by itself, so what it drew is read from its result and given to ours."""
    audio = pytest.importorskip("torchaudio.functional")
    torch.manual_seed(0)
    power_BMN = torch.rand(100, 64, 64) + 0.1
    theirs = torch.stack(
        [audio.mask_along_axis(audio.mask_along_axis(power[None], 40, 0.0, 1), 40, 0.0, 2)[0] for power in power_BMN]
    )
    is_masked = theirs == 0
    ranges = []
    for across in (2, 1):
        of_axis = is_masked.all(dim=across)
        ranges += [of_axis.to(torch.uint8).argmax(dim=1), of_axis.sum(dim=1)]
    assert torch.equal(mask_power(power_BMN, MaskDraws(*ranges)), theirs)
    assert ranges[1].max() > 30


@pytest.mark.parametrize("num_points", [9, 10, 400])
def test_white_noise_has_the_law_of_numpys_inverse_transform(num_points: int) -> None:
    """Both are linear in normal numbers, so equal covariances of all points are equal laws."""
    numbers = np.eye(num_points // 2 + 1)
    ours = white_noise(torch.from_numpy(numbers), num_points, std=num_points**-0.5).numpy()
    theirs = np.fft.irfft(numbers, n=num_points)
    np.testing.assert_allclose(ours.T @ ours, theirs.T @ theirs, rtol=0, atol=1e-15)


@MELS
def test_the_noise_has_the_published_deviation_and_level_and_is_the_same_backwards(mel: MelConfig) -> None:
    silence = torch.zeros(32, mel.num_points, dtype=torch.float64)
    policy = Waveform(WaveformConfig(kept=None), mel)
    noise = policy.augment(silence, keys(32))
    assert noise.std() == pytest.approx(0.00447, rel=0.01)
    half = noise[:, 1 : mel.num_points // 2]
    torch.testing.assert_close(half, noise.flip(1)[:, : mel.num_points // 2 - 1], rtol=0, atol=1e-12)
    assert ks_p_value(torch.special.ndtr(half.flatten()[:20_000] / WaveformConfig().noise_std).numpy()) > 1e-3
    if mel is AUDIOMNIST:
        assert policy(silence, keys(32)).mean() == pytest.approx(2.18, abs=0.02)


def test_noise_on_the_spectrogram_is_normal_and_independent_from_cell_to_cell() -> None:
    x, config = sounds(50, FSDD, torch.float64), SpectralConfig(max_masked_bands=0, max_masked_frames=0)
    noise = (Spectral(config, FSDD)(x, keys(50)) - clean_spectrogram(x, FSDD))[:, 0] / 0.25
    assert ks_p_value(torch.special.ndtr(noise.flatten()).numpy()) > 1e-3
    for a, b in ((noise[:, 1:], noise[:, :-1]), (noise[..., 1:], noise[..., :-1]), (noise[1:], noise[:-1])):
        assert abs(np.corrcoef(a.flatten(), b.flatten())[0, 1]) < 4 / a.numel() ** 0.5


def mask_as_published(is_power_MN: NDArray[np.bool_], rng: np.random.Generator) -> list[int]:
    """Draw the published masks of bands and of frames, each until it changes the spectrogram, at most four times.

    Returns the first band, the number of bands, the first frame and the number of frames.
    """
    drawn = []
    for rows in (is_power_MN, is_power_MN.T):  # the second mask sees what the first one left
        first = width = 0
        for _ in range(4):
            width = int(rng.integers(40))
            first = int(rng.integers(64 - width))
            if rows[first : first + width].any():
                break
        rows[first : first + width] = False
        drawn += [first, width]
    return drawn


@pytest.mark.parametrize("num_silent", [0, 24])
def test_masks_have_the_published_law(num_silent: int) -> None:
    """Against one sound after the other, with no silent frame and with silence at the end."""
    num, rng = 6_000, np.random.default_rng(0)
    audible_BN = (torch.arange(64) < 64 - num_silent).expand(num, -1)
    draws = draw_masks(SpectralConfig(), keys(num), FSDD, audible_BN=audible_BN)
    is_power_MN = np.broadcast_to(audible_BN[0].numpy(), (64, 64))
    theirs = np.array([mask_as_published(is_power_MN.copy(), rng) for _ in range(num)]).T
    ours = torch.stack(dataclasses.astuple(draws)).numpy()
    for first, width in ((0, 1), (2, 3)):
        for of_ours, of_theirs in (
            (ours[first], theirs[first]),
            (ours[width], theirs[width]),
            (ours[first] + ours[width], theirs[first] + theirs[width]),
        ):
            assert ks_p_value(of_ours, of_theirs) > 1e-3
        assert ours[width].max() == 39
        assert (ours[width] == 0).sum() <= num_silent  # some: where four masks were drawn in vain
        assert (ours[first] + ours[width]).max() == 63  # as published: a mask never reaches the last cell
        assert ours[first].min() == 0
    correlation = np.corrcoef(ours)
    for a, b in ((0, 2), (0, 3), (1, 2), (1, 3)):
        assert abs(correlation[a, b]) < 4 / num**0.5


@pytest.mark.parametrize(
    ("tries", "of_width_0", "mean_width", "unheard"), [(4, 0.0, 20.0, 0.0006), (1, 0.025, 19.5, 0.151)]
)
def test_a_mask_that_changes_nothing_is_drawn_again(
    tries: int, of_width_0: float, mean_width: float, unheard: float
) -> None:
    """With 24 silent frames at the end, `unheard` of the masks of frames would hide nothing audible."""
    num, config = 20_000, SpectralConfig(mask_tries=tries)
    for width_B in (draws := draw_masks(config, keys(num), AUDIOMNIST)).num_bands_B, draws.num_frames_B:
        assert float((width_B == 0).double().mean()) == pytest.approx(of_width_0, abs=0.004 * (tries == 1))
        assert float(width_B.double().mean()) == pytest.approx(mean_width, abs=0.35)  # 4 standard errors
    audible_BN = (torch.arange(64) < 40).expand(num, -1)
    draws = draw_masks(config, keys(num), AUDIOMNIST, audible_BN=audible_BN)
    is_unheard_B = (draws.num_frames_B == 0) | (draws.first_frame_B >= 40)
    assert float(is_unheard_B.double().mean()) == pytest.approx(unheard, abs=4 * (unheard / num) ** 0.5)


def test_crops_have_the_published_law() -> None:
    num, rng = 20_000, np.random.default_rng(0)
    draws = draw_waveform(WaveformConfig(), keys(num), num_points=50_000)
    lengths = np.floor(50_000 * rng.uniform(0.08, 1, num)).astype(int)
    starts = rng.integers(0, 50_000 - lengths)
    assert ks_p_value(draws.length_B.numpy(), lengths) > 1e-3
    assert ks_p_value(draws.first_B.numpy(), starts) > 1e-3
    assert ks_p_value((draws.first_B + draws.length_B).numpy(), starts + lengths) > 1e-3
    assert 4_000 <= int(draws.length_B.min()) < 4_020
    assert int((draws.first_B + draws.length_B).max()) == 49_999  # as published: no crop holds the last point
    assert abs(float(draws.crops_last_B.double().mean()) - 0.5) < 4 * 0.5 / num**0.5
    table = np.stack([draws.length_B.numpy(), draws.crops_last_B.numpy()])
    assert abs(np.corrcoef(table)[0, 1]) < 4 / num**0.5


def test_speed_and_pitch_are_uniform_and_come_before_crop_and_noise() -> None:
    config = WaveformConfig(speed=(0.9, 1.2), semitones=(-2, 3))
    draws, without = (draw_waveform(each, keys(9_000), num_points=8_333) for each in (config, WaveformConfig()))
    assert without.speed_B is None
    assert draws.speed_B is not None
    assert draws.pitch_B is not None
    assert ks_p_value(((draws.speed_B - 0.9) / 0.3).numpy()) > 1e-3
    assert ks_p_value(((12 * draws.pitch_B.log2() + 2) / 5).numpy()) > 1e-3
    assert (draws.pitch_B * draws.speed_B.clamp(min=1)).max() <= config.highest
    for name in ("first_B", "length_B", "crops_last_B"):
        assert torch.equal(getattr(draws, name), getattr(without, name))
    x = sounds(6, FSDD)
    changed = change_speed_and_pitch(x, draws.speed_B[:6], draws.pitch_B[:6], highest=config.highest)
    expected = Waveform(WaveformConfig(), FSDD).augment(changed, keys(6))
    torch.testing.assert_close(Waveform(config, FSDD).augment(x, keys(6)), expected)


@pytest.mark.parametrize(("kept", "num_points"), [((0.5, 0.5), 4), ((0.999, 1.0), 2), ((1.0, 1.0), 10), (None, 10)])
def test_crops_of_few_points_start_where_the_published_ones_do(
    kept: tuple[float, float] | None, num_points: int
) -> None:
    """Each of the starts 0 to T - L - 1 occurs, and none else; a crop of everything starts at 0."""
    draws = draw_waveform(WaveformConfig(kept=kept), keys(500), num_points=num_points)
    (length,) = set(draws.length_B.tolist())
    assert set(draws.first_B.tolist()) == set(range(max(1, num_points - length)))


@pytest.mark.parametrize("noise_std", [0, 0.01], ids=["no noise", "noise"])
def test_frames_that_are_left_out_change_nothing(noise_std: float) -> None:
    x, policy = sounds(24, FSDD, torch.float64), Waveform(WaveformConfig(noise_std=noise_std), FSDD)
    expected = clean_spectrogram(policy.augment(x, keys(24)), FSDD)
    torch.testing.assert_close(policy(x, keys(24)), expected, rtol=0, atol=1e-9)


@pytest.mark.slow
def test_what_is_switched_off_leaves_the_sound_as_it_is() -> None:
    x = sounds(3, FSDD)
    off = Waveform(WaveformConfig(kept=None, noise_std=0), FSDD)
    assert torch.equal(off.augment(x, keys(3)), x)
    clean = clean_spectrogram(x, FSDD)
    assert torch.equal(off(x, keys(3)), clean)
    config = SpectralConfig(max_masked_bands=0, max_masked_frames=0, noise_std=0)
    assert torch.equal(Spectral(config, FSDD)(x, keys(3)), clean)
    assert clean.shape == (3, 1, 64, 64)
    for i in range(3):
        torch.testing.assert_close(clean[i, 0], torchaudios_log_mel(x[i], FSDD), rtol=0, atol=1e-3)


@POLICIES
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_views_have_the_dtype_of_the_waveforms_even_under_autocast(
    policy: Spectral | Waveform, dtype: torch.dtype
) -> None:
    x = sounds(4, FSDD, dtype)
    x[3] = 0
    views = policy(x, keys(4))
    assert views.dtype == dtype
    assert views.isfinite().all()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(policy(x, keys(4)), views)


def test_views_are_made_without_waiting_for_the_device() -> None:
    """On the meta device there are shapes and no values: whatever would need a value on the host raises."""
    on_meta = DrawKeys(seed=0, epoch=0, index_B=torch.arange(8, device="meta"), view=0)
    x = torch.empty(8, FSDD.num_points, device="meta")
    policy = Waveform(WaveformConfig(speed=(0.9, 1.1), semitones=(-3, 3)), FSDD)
    assert policy.augment(x, on_meta).shape == x.shape
    masks = draw_masks(SpectralConfig(), on_meta, FSDD, audible_BN=audible_frames(x, FSDD))
    assert mask_power(torch.empty(8, 64, 64, device="meta"), masks).shape == (8, 64, 64)


@POLICIES
@pytest.mark.parametrize("shape", [(2, 8_000), (2, 3, 32, 32)])
def test_other_inputs_are_refused(policy: Spectral | Waveform, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"need waveforms \(B, 8333\), got \(2, "):
        policy(torch.zeros(shape), keys(2))
