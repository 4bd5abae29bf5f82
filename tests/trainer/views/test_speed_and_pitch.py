"""Speed and pitch of a batch, each sound by its own amount, against torchaudio one by one."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from trainer.views.speed_and_pitch import change_speed_and_pitch

RATE, NUM_POINTS = 500, 3_000  # few points a second: the peer's memory grows with the square of them
SPEEDS = [0.5, 0.8, 0.93, 1.07, 1.25, 2.0]


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


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 1e-3)])
def test_speed_equals_torchaudio(dtype: torch.dtype, tolerance: float) -> None:
    audio = pytest.importorskip("torchaudio.functional")
    factors = [factor for factor in SPEEDS for _ in range(3)]
    x = sounds(len(factors), dtype)
    ours = change_speed_and_pitch(x, torch.tensor(factors, dtype=torch.float64), None, highest=2)
    assert ours.dtype == dtype
    for i, factor in enumerate(factors):
        theirs = audio.resample(x[i], round(100 * factor), 100)[:NUM_POINTS]
        expected = torch.nn.functional.pad(theirs, (0, NUM_POINTS - len(theirs)))
        torch.testing.assert_close(ours[i], expected, rtol=0, atol=tolerance)


def test_pitch_equals_torchaudio_but_near_the_ends() -> None:
    audio = pytest.importorskip("torchaudio.functional")
    pitches = [(rate + 1e-6) / RATE for rate in (350, 420, 472, 529, 590) for _ in range(3)]  # theirs are whole rates
    x = sounds(len(pitches), torch.float64)
    pitch_B = torch.tensor(pitches, dtype=torch.float64)
    ours = change_speed_and_pitch(x, torch.ones_like(pitch_B), pitch_B, highest=1.2)
    window = torch.hann_window(512, dtype=torch.float64)
    inner = slice(300, -800)
    for i, pitch in enumerate(pitches):
        theirs = audio.pitch_shift(x[i][None], RATE, 12 * math.log2(pitch), window=window)[0]
        torch.testing.assert_close(ours[i, inner], theirs[inner], rtol=0, atol=1e-5)


def test_a_tone_gets_its_pitch_and_ends_where_it_should() -> None:
    tone = torch.sin(2 * torch.pi * 400 * torch.arange(24_000) / 8_000).expand(2, -1)
    speed_B, pitch_B = torch.tensor([[1.0, 2.0], [2.0, 0.75]], dtype=torch.float64)
    higher, faster = change_speed_and_pitch(tone, speed_B, pitch_B, highest=2)
    assert torch.fft.rfft(higher[2_000:10_000]).abs().argmax() == 800  # cycles in one second
    assert torch.fft.rfft(higher[14_000:22_000]).abs().argmax() == 800
    assert torch.fft.rfft(faster[1_000:9_000]).abs().argmax() == 600
    assert not faster[12_000:].any()


def test_nothing_waits_for_the_device() -> None:
    """On the meta device there are shapes and no values: whatever would need a value on the host raises."""
    x = torch.empty(8, NUM_POINTS, device="meta")
    amount_B = torch.empty(8, dtype=torch.float64, device="meta")
    assert change_speed_and_pitch(x, amount_B, amount_B, highest=2).shape == x.shape
