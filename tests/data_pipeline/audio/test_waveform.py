"""WAV bytes against libsndfile, one length for a batch against lists."""

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
        (b"", "no WAV"),
        (wav(np.zeros(20, dtype=np.int16)).replace(b"fmt ", b"fmx "), "not a WAV that can be read"),
        (wav(np.zeros(20, dtype=np.int16))[:-2], "cut off"),
        (wav(np.zeros((20, 2), dtype=np.int16)), r"points \(20, 2\)"),
        (wav(np.zeros(20, dtype=np.int16), subtype="PCM_24"), "int32"),
        (wav(np.zeros(0, dtype=np.int16)), r"points \(0,\)"),
    ],
)
def test_what_is_no_whole_mono_wav_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        decode_wav(data)


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
