"""WAV bytes against libsndfile, one length for a batch against lists, resampling against sines."""

from __future__ import annotations

import io
import math

import numpy as np
import pytest
import soundfile
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from data_pipeline.audio.wav import decode_wav, encode_wav
from data_pipeline.audio.waveform import (
    crop_last,
    fit_length,
    gather_clips,
    resample,
    to_float,
)
from data_pipeline.core.counter_rng import DrawKeys

INT16 = st.lists(st.integers(-32_768, 32_767), min_size=1, max_size=50).map(lambda x: np.array(x, dtype=np.int16))
FLOAT32 = st.lists(st.floats(-2, 2, width=32), min_size=1, max_size=50).map(lambda x: np.array(x, dtype=np.float32))


def wav(points: NDArray[np.generic], *, rate: int = 8_000, subtype: str = "PCM_16", container: str = "WAV") -> bytes:
    file = io.BytesIO()
    soundfile.write(file, points, rate, subtype=subtype, format=container)
    return file.getvalue()


@given(st.one_of(INT16, FLOAT32), st.sampled_from([8_000, 48_000]))
@settings(max_examples=100, deadline=None)
def test_what_is_encoded_is_read_back_by_us_and_by_libsndfile(
    points: NDArray[np.int16] | NDArray[np.float32], rate: int
) -> None:
    data = encode_wav(points, sample_rate=rate)
    assert data == encode_wav(points.copy(), sample_rate=rate)
    theirs, their_rate = soundfile.read(io.BytesIO(data), dtype=points.dtype.name)
    for decoded in (decode_wav(data), decode_wav(memoryview(data)), theirs):
        assert decoded.dtype == points.dtype
        assert decoded.tobytes() == points.tobytes()
    assert their_rate == rate


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not a WAV"),
        (wav(np.zeros(20, dtype=np.int16))[:-2], "cut off"),
        (wav(np.zeros((20, 2), dtype=np.int16)), "2 channels"),
        (wav(np.zeros(20, dtype=np.int16), subtype="PCM_24"), "24 bits"),
        (wav(np.zeros(0, dtype=np.int16)), "0 bytes"),
    ],
)
def test_what_is_no_whole_mono_wav_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        decode_wav(data)


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_damage_is_either_seen_or_harmless(data: st.DataObject) -> None:
    whole = encode_wav(np.arange(100, dtype=np.int16), sample_rate=8_000)
    damaged = bytearray(whole[: data.draw(st.integers(0, len(whole)))])
    for place in data.draw(st.lists(st.integers(0, max(0, len(damaged) - 1)), max_size=3)):
        if damaged:
            damaged[place] = data.draw(st.integers(0, 255))
    try:
        points = decode_wav(bytes(damaged))
    except ValueError:
        return
    assert 1 <= points.size <= 100


def test_all_levels_become_floats_exactly() -> None:
    points = torch.arange(-32_768, 32_768, dtype=torch.int32).to(torch.int16)
    waveform = to_float(points)
    assert waveform.dtype == torch.float32
    assert waveform[[0, -1]].tolist() == [-1.0, 32_767 / 32_768]
    assert torch.equal((waveform.double() * 32_768).to(torch.int16), points)
    assert np.array_equal(waveform.numpy(), soundfile.read(io.BytesIO(wav(points.numpy())), dtype="float32")[0])


@given(
    st.lists(st.tuples(st.lists(st.integers(1, 100), min_size=1, max_size=12), st.booleans()), min_size=1, max_size=6),
    st.integers(1, 12),
    st.sampled_from([torch.int16, torch.float32]),
)
@settings(max_examples=150, deadline=None)
def test_one_length_from_clips_and_from_one_flat_tensor(
    rows: list[tuple[list[int], bool]], num_points: int, dtype: torch.dtype
) -> None:
    expected = []
    for values, last in rows:
        kept = values[max(0, len(values) - num_points) :] if last else values[:num_points]
        expected.append(kept + [0] * (num_points - len(kept)))
    clips = [torch.tensor(values, dtype=dtype) for values, _ in rows]
    last_B = torch.tensor([last for _, last in rows])
    length_B = torch.tensor([len(clip) for clip in clips])
    start_B, flat_X = length_B.cumsum(0) - length_B, torch.cat(clips)
    waveforms_BT = fit_length(clips, num_points, last_B=last_B)
    assert waveforms_BT.dtype == dtype
    assert waveforms_BT.tolist() == expected
    order_B = torch.randperm(len(rows), generator=torch.Generator().manual_seed(len(rows)))
    gathered_BT = gather_clips(flat_X, start_B[order_B], length_B[order_B], num_points, last_B=last_B[order_B])
    assert gathered_BT.dtype == dtype
    assert torch.equal(gathered_BT, waveforms_BT[order_B])


def test_the_crop_is_a_fair_coin_of_the_key() -> None:
    index_B = torch.arange(10_000)
    first, second = (crop_last(DrawKeys(seed=3, epoch=1, index_B=index_B, view=view)) for view in (0, 1))
    assert first.dtype == torch.bool
    assert abs(first.float().mean().item() - 0.5) < 4 * 0.5 / math.sqrt(len(index_B))
    assert abs((first == second).float().mean().item() - 0.5) < 4 * 0.5 / math.sqrt(len(index_B))
    alone = crop_last(DrawKeys(seed=3, epoch=1, index_B=index_B[[7, 1_234]], view=0))
    assert torch.equal(alone, first[[7, 1_234]])


@pytest.mark.parametrize(
    ("num_points", "num_resampled", "num_made"),
    [(1_323_000, 1_440_001, 1_440_000), (44_107, 48_008, 48_007), (441, 481, 480), (44_101, 48_002, 48_001)],
)
def test_a_resampled_sound_has_the_points_of_the_published_one(
    num_points: int, num_resampled: int, num_made: int
) -> None:
    """Thirty seconds, the length of the traffic, get a point too many, because 48,000 / 44,100 is rounded up."""
    resampled = resample(torch.ones(num_points), from_rate=44_100, to_rate=48_000)
    assert len(resampled) == num_resampled
    assert (resampled[:num_made] > 0.4).all()
    assert not resampled[num_made:].any()


@pytest.mark.parametrize(("from_rate", "to_rate"), [(44_100, 48_000), (44_100, 8_000)])
def test_a_resampled_sine_is_that_sine_and_what_no_longer_fits_is_gone(from_rate: int, to_rate: int) -> None:
    time = torch.arange(from_rate + 7, dtype=torch.float64) / from_rate
    resampled = resample(torch.sin(2 * math.pi * 997 * time), from_rate=from_rate, to_rate=to_rate)
    assert len(resampled) == math.ceil((from_rate + 7) * to_rate / from_rate)
    expected = torch.sin(2 * math.pi * 997 * torch.arange(len(resampled), dtype=torch.float64) / to_rate)
    inner = slice(to_rate // 10, -(to_rate // 10))
    torch.testing.assert_close(resampled[inner], expected[inner], rtol=0, atol=1e-3)
    if to_rate < from_rate:
        too_high = resample(torch.sin(2 * math.pi * 0.55 * to_rate * time), from_rate=from_rate, to_rate=to_rate)
        assert too_high[inner].abs().max() < 1e-3
