"""Every kind of sound file against libsndfile's own reading, wrong lengths, and files that are cut off."""

from __future__ import annotations

import io
import struct

import numpy as np
import pytest
import soundfile
import torch
from numpy.typing import NDArray

from data_pipeline.audio.sound_file import read_sound, resample, sound_facts

RATE = 16_000


def tone(num_channels: int = 1, *, seconds: float = 0.5) -> NDArray[np.float64]:
    """(T, C): another tone in each channel, with noise."""
    time = np.arange(round(seconds * RATE)) / RATE
    noise = np.random.default_rng(0).normal(0, 0.01, (len(time), num_channels))
    return np.stack([0.3 * np.sin(2 * np.pi * 300 * (1 + c) * time) for c in range(num_channels)], axis=1) + noise


def encoded(container: str, coding: str, points: NDArray[np.generic], *, rate: int = RATE) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, points, rate, format=container, subtype=coding)
    return file.getvalue()


@pytest.mark.parametrize(
    ("container", "coding"),
    [
        *(("WAV", coding) for coding in ("PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "ALAW")),
        ("WAVEX", "PCM_16"),
        ("WAVEX", "PCM_24"),
        ("RF64", "PCM_16"),
        ("FLAC", "PCM_16"),
        ("FLAC", "PCM_24"),
        ("OGG", "VORBIS"),
        ("OGG", "OPUS"),
        ("MP3", "MPEG_LAYER_III"),
        ("AIFF", "PCM_24"),
    ],
)
@pytest.mark.parametrize("num_channels", [1, 2, 6])
def test_all_kinds_equal_libsndfiles_reading(container: str, coding: str, num_channels: int) -> None:
    num_channels = min(num_channels, 2) if container == "MP3" else num_channels  # it holds no more
    data = encoded(container, coding, tone(num_channels))
    theirs, rate = soundfile.read(io.BytesIO(data), dtype="float64", always_2d=True)
    points, read = read_sound(data)
    assert points.dtype == np.int16
    assert (read.sample_rate, len(points)) == (rate, len(theirs))
    assert np.abs(points - 32_768 * theirs.mean(axis=1)).max() <= (0.51 if container == "MP3" else 0.5)
    if num_channels == 1 and coding in ("PCM_U8", "PCM_16", "ULAW", "ALAW"):
        assert np.array_equal(points, soundfile.read(io.BytesIO(data), dtype="int16")[0])
        assert not read.remarks
    assert any("mixed down" in remark for remark in read.remarks) == (num_channels > 1)
    assert any("rounded" in r for r in read.remarks) == (coding in ("PCM_24", "PCM_32", "FLOAT", "DOUBLE"))
    facts = sound_facts(io.BytesIO(data))
    assert (facts.coding, facts.sample_rate, facts.num_channels, facts.num_points) == (
        coding,
        rate,
        num_channels,
        len(theirs),
    )
    assert sound_facts(io.BytesIO(data), full=True) == facts
    for cut in (len(data) // 2, len(data) - 30):
        if container in ("WAV", "WAVEX", "FLAC"):
            with pytest.raises(ValueError, match=r"cut off|does not decode"):
                read_sound(data[:cut])


def burst(rate: int) -> NDArray[np.float64]:
    """Return half a second of a tone of 3 kHz that comes and goes, exactly, at any rate."""
    time = np.arange(rate // 2) / rate
    points: NDArray[np.float64] = 0.9 * np.exp(-(((time - 0.25) / 0.04) ** 2)) * np.sin(2 * np.pi * 3_000 * time)
    return points


@pytest.mark.parametrize("from_rate", [8_000, 11_025, 22_050, 44_100, 48_000, 44_056])
def test_resampled_points_are_exact_and_equal_torchaudios(from_rate: int) -> None:
    audio = pytest.importorskip("torchaudio.functional")
    ours, facts = read_sound(encoded("WAV", "DOUBLE", burst(from_rate), rate=from_rate), sample_rate=RATE)
    assert facts.remarks[-1] == f"has {from_rate} points a second and is resampled to {RATE}"
    theirs = audio.resample(
        torch.from_numpy(burst(from_rate)),
        from_rate,
        RATE,
        lowpass_filter_width=64,
        rolloff=0.9475937167399596,
        resampling_method="sinc_interp_kaiser",
        beta=14.769656459379492,
    ).numpy()
    for expected in (burst(RATE), theirs):
        num = min(len(ours), len(expected))
        assert num >= RATE // 2 - 1
        # An odd ratio is taken as the nearest small one: here within 5e-7 of it.
        assert np.abs(ours[:num] - 32_768 * expected[:num]).max() < (80 if from_rate == 44_056 else 0.6)


@pytest.mark.parametrize(("from_rate", "to_rate"), [(44_100, 48_000), (44_100, 8_000)])
def test_a_resampled_sine_is_that_sine_and_what_no_longer_fits_is_gone(from_rate: int, to_rate: int) -> None:
    time = np.arange(from_rate + 7) / from_rate
    resampled = resample(np.sin(2 * np.pi * 997 * time), from_rate=from_rate, to_rate=to_rate)
    expected = np.sin(2 * np.pi * 997 * np.arange(len(resampled)) / to_rate)
    inner = slice(to_rate // 10, -(to_rate // 10))
    np.testing.assert_allclose(resampled[inner], expected[inner], rtol=0, atol=1e-3)
    if to_rate < from_rate:
        too_high = resample(np.sin(2 * np.pi * 0.55 * to_rate * time), from_rate=from_rate, to_rate=to_rate)
        assert np.abs(too_high[inner]).max() < 1e-3


def wav(
    *, data_size: int | None = None, riff_size: int | None = None, before: bytes = b"", after: bytes = b""
) -> bytes:
    """Return a WAV of 1,000 points with chunks around them, and with these sizes in its header if they are given."""
    points = (32_767 * tone()[:1_000, 0]).astype("<i2").tobytes()
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, RATE, 2 * RATE, 2, 16)
    size = len(points) if data_size is None else data_size
    content = b"WAVE" + form + before + struct.pack("<4sI", b"data", size) + points + after
    return struct.pack("<4sI", b"RIFF", len(content) if riff_size is None else riff_size) + content


EXTRA = struct.pack("<4sI", b"LIST", 7) + b"1234567\0"


@pytest.mark.parametrize(
    "data",
    [
        wav(before=EXTRA, after=EXTRA),
        wav(data_size=0xFFFF_FFFF, riff_size=0xFFFF_FFFF),
        wav(data_size=0x7FFF_F000, before=EXTRA),
        wav(data_size=9_000),
        wav(riff_size=3),
    ],
)
def test_what_is_there_is_read_if_a_header_gives_a_wrong_length(data: bytes) -> None:
    assert np.array_equal(read_sound(data)[0], read_sound(wav())[0])
    assert sound_facts(io.BytesIO(data)).num_points == 1_000


SILENT = np.full(RATE, 100, dtype=np.int16)


@pytest.mark.parametrize(
    ("data", "remark"),
    [
        (encoded("WAV", "PCM_16", SILENT), "is silent"),
        (encoded("WAV", "PCM_16", tone(seconds=0.09)), "is shorter than 0.1 s"),
        (encoded("WAV", "FLOAT", 4 * tone()), "goes beyond full scale and is clipped"),
    ],
)
def test_odd_sounds_are_remarked(data: bytes, remark: str) -> None:
    points, facts = read_sound(data)
    assert remark in facts.remarks
    assert remark in sound_facts(io.BytesIO(data), full=True).remarks
    assert np.abs(points.astype(int)).max() <= 32_768


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (encoded("WAV", "PCM_16", SILENT)[:-6], "it is cut off: 31994 of 32000 bytes of sound are there"),
        (encoded("WAV", "PCM_16", SILENT[:0]), "it holds no sound"),
        (wav(data_size=0), "it holds no sound"),
        (encoded("WAV", "FLOAT", np.array([0, np.nan, 1])), "no finite numbers"),
        (b"an error page of a server", "it is no sound of a known format"),
        (b"", "it is no sound of a known format"),
    ],
    ids=["cut off", "no points", "no data", "not a number", "a page", "nothing"],  # bytes of a WAV hold the time
)
def test_a_wrong_file_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read_sound(data)
    with pytest.raises(ValueError, match=reason):
        sound_facts(io.BytesIO(data), full=True)
