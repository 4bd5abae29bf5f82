"""Speed and pitch of a batch, each sound by its own amount, against torchaudio one by one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torchaudio import functional as audio

from trainer.views.speed_and_pitch import change_pitch, change_speed

RATE, NUM_POINTS = 500, 3_000  # few points a second: the peer's memory grows with the square of them
SPEEDS = [0.5, 0.8, 0.93, 1.0, 1.07, 1.25, 2.0]
SEMITONES = [-7.0, -2.5, -1.0, 0.0, 1.0, 3.0, 7.2]
TOLERANCES = pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 1e-3)])


def sounds(num: int, dtype: torch.dtype) -> Tensor:
    """(num, NUM_POINTS): noise, tones that end, and chirps, in turn."""
    generator = torch.Generator().manual_seed(0)
    time = torch.arange(NUM_POINTS, dtype=torch.float64) / RATE
    kinds = [
        0.1 * torch.randn(NUM_POINTS, generator=generator, dtype=torch.float64),
        torch.sin(2 * torch.pi * 60 * time) * (time < 4),
        0.3 * torch.sin(40 * time**2),
    ]
    return torch.stack([kinds[i % 3] for i in range(num)]).to(dtype)


def fit(sound: Tensor) -> Tensor:
    return torch.nn.functional.pad(sound[:NUM_POINTS], (0, max(0, NUM_POINTS - len(sound))))


@pytest.mark.slow
@TOLERANCES
def test_speed_equals_torchaudio(dtype: torch.dtype, tolerance: float) -> None:
    factors = [factor for factor in SPEEDS for _ in range(3)]
    x = sounds(len(factors), dtype)
    ours = change_speed(x, torch.tensor(factors, dtype=torch.float64), max_factor=max(factors))
    assert ours.dtype == dtype
    for i, factor in enumerate(factors):
        expected = fit(audio.resample(x[i], round(100 * factor), 100))
        torch.testing.assert_close(ours[i], expected, rtol=0, atol=tolerance)


@pytest.mark.slow
@TOLERANCES
def test_pitch_equals_torchaudio(dtype: torch.dtype, tolerance: float) -> None:
    steps = [step for step in SEMITONES for _ in range(3)]
    x = sounds(len(steps), dtype)
    ours = change_pitch(x, torch.tensor(steps, dtype=torch.float64), sample_rate=RATE, max_semitones=7.2)
    assert ours.dtype == dtype
    window = torch.hann_window(512, dtype=dtype)
    for i, step in enumerate(steps):
        expected = audio.pitch_shift(x[i][None], RATE, step, window=window)[0]
        torch.testing.assert_close(ours[i], expected, rtol=0, atol=tolerance)


def test_a_tone_gets_its_pitch_and_ends_where_it_should() -> None:
    time = torch.arange(24_000) / 8_000
    tone = torch.sin(2 * torch.pi * 400 * time)
    higher = change_pitch(tone[None], torch.tensor([12.0], dtype=torch.float64), sample_rate=8_000, max_semitones=12)
    faster = change_speed(tone[None], torch.tensor([2.0], dtype=torch.float64), max_factor=2)
    parts = {"higher": higher[0, 2_000:10_000], "to the end": higher[0, 14_000:22_000], "faster": faster[0, :8_000]}
    for name, part in parts.items():
        assert torch.fft.rfft(part).abs().argmax() == 800, name  # cycles in one second
    assert not faster[0, 12_000:].any()


def test_no_change_is_none() -> None:
    x, ones = sounds(3, torch.float32), torch.ones(3, dtype=torch.float64)
    assert torch.equal(change_speed(x, ones, max_factor=1.5), x)
    torch.testing.assert_close(change_pitch(x, 0 * ones, sample_rate=RATE, max_semitones=3), x, rtol=0, atol=1e-6)


def test_a_sound_does_not_depend_on_its_batch_or_on_the_largest_amount() -> None:
    x = sounds(9, torch.float64)
    amount_B = torch.linspace(0.8, 1.2, 9, dtype=torch.float64)
    together = change_speed(x, amount_B, max_factor=1.2), change_pitch(x, amount_B, sample_rate=RATE, max_semitones=1.2)
    for i in (0, 4, 8):
        one = x[i : i + 1], amount_B[i : i + 1]
        alone = change_speed(*one, max_factor=2), change_pitch(*one, sample_rate=RATE, max_semitones=12)
        for a, b in zip(alone, together, strict=True):
            torch.testing.assert_close(a[0], b[i], rtol=0, atol=1e-12)


def test_nothing_waits_for_the_device() -> None:
    """On the meta device there are shapes and no values: whatever would need a value on the host raises."""
    x = torch.empty(8, NUM_POINTS, device="meta")
    amount_B = torch.empty(8, dtype=torch.float64, device="meta")
    assert change_speed(x, amount_B, max_factor=2).shape == x.shape
    assert change_pitch(x, amount_B, sample_rate=RATE, max_semitones=2).shape == x.shape
