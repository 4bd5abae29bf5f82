"""Folders of one's own sounds: one rate and length for all, labels, what is said of odd files, and noise."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import soundfile

from data_pipeline.audio.sound_file import read_sound
from data_pipeline.building.build import build_dataset
from data_pipeline.core.errors import UserError
from data_pipeline.storage.manifest import Manifest
from data_pipeline.storage.store import SampleStore
from tests.data_pipeline import layouts
from tests.data_pipeline.stored_samples import decode_sample

sound = partial(layouts.sound, rate=16_000, seconds=0.8)
# One of each kind in each class and split, among sounds of the commonest kind.
KINDS = {
    "a.wav": {},
    "b.wav": {"seconds": 0.6},
    "c.wav": {},
    "stereo.flac": {"rate": 22_050, "kind": "FLAC", "channels": 2},
    "deep/fine.wav": {"coding": "PCM_24"},
    "lossy.ogg": {"rate": 48_000, "kind": "OGG", "coding": "VORBIS"},
    "lossy.mp3": {"kind": "MP3", "coding": "MPEG_LAYER_III"},
    "short.wav": {"seconds": 0.05},
    "long.wav": {"seconds": 3},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    names = [f"{split}/{word}/{name}" for split in ("train", "test") for word in ("owl", "wren") for name in KINDS]
    files = {name: sound(i, **KINDS[name.split("/", 2)[2]]) for i, name in enumerate(names)}  # type: ignore[arg-type]
    root = tmp_path_factory.mktemp("sounds")
    for name, data in {**files, "train/owl/silent.wav": sound(0)[:44] + b"\0" * 25_600, "README.txt": b""}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root


def built(folder: Path, out: Path, dataset: str = "sounds", **arguments: object) -> Manifest:
    return build_dataset(dataset, out, root=folder, **arguments)  # type: ignore[arg-type]


def test_all_sounds_get_one_rate_and_what_is_changed_or_odd_is_said(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        manifest = built(folder, tmp_path / "train", num_workers=2)
    assert (manifest.medium, manifest.sample_rate, manifest.num_samples) == ("sound", 16_000, 19)
    assert manifest.input_shape == (48_000,)  # 3 s, the length below which 95 % of the sounds are
    assert manifest.labels["base"].classes == ("owl", "wren")
    for num, remark in (
        (2, "has 2 channels, which are mixed down"),
        (2, "has 22050 points a second and is resampled to 16000"),
        (2, "has 48000 points a second and is resampled to 16000"),
        (2, "holds PCM_24, which is rounded to 16 bits"),
        (2, "is shorter than 0.1 s"),
        (1, "is silent, such as train/owl/silent.wav"),
    ):
        assert f"{num} of 19 files: it {remark}" in caplog.text
    store = SampleStore(tmp_path / "train")
    files = [store.file_of(index) for index in range(len(store))]
    for index, file in enumerate(files):
        expected, _ = read_sound((folder / file).read_bytes(), sample_rate=16_000)
        assert np.array_equal(decode_sample(store, index).content, expected)
    assert len(set(files)) == 19
    assert built(folder, tmp_path / "test", split="test").input_shape == (48_000,)


def test_rate_and_length_can_be_chosen_and_noise_is_heard_behind(folder: Path, tmp_path: Path) -> None:
    options = {"sample_rate": "8000", "seconds": "0.75"}
    manifest = built(folder, tmp_path / "clean", source_options=options)
    assert (manifest.sample_rate, manifest.input_shape) == (8_000, (6_000,))
    noise = np.random.default_rng(0).normal(0, 0.1, 8_000)
    for name in ("BabbleNoise/Babble1.wav", "DrivingcarNoise/Traffic10.wav", "MachineryNoise/Machinery1.wav"):
        (tmp_path / name).parent.mkdir()
        soundfile.write(tmp_path / name, noise, 8_000)
    noisy = built(
        folder,
        tmp_path / "noisy",
        "sounds_noise",
        source_options=options,
        overlay_options={"noise_root": str(tmp_path), "noise_volume": "0.2"},
    )
    assert set(noisy.labels) == {"base", "overlay"}
    clean, heard = (decode_sample(SampleStore(tmp_path / name), 0) for name in ("clean", "noisy"))
    behind = heard.content[: len(clean.content)] - clean.content[:6_000] / 32_768
    expected = 0.2 * noise / np.abs(noise).max()
    assert min(np.abs(behind - part[: len(behind)]).max() for part in (expected[:6_000], expected[2_000:])) < 1e-4
    with pytest.raises(UserError, match=r"lacks .*feature-dropout"):
        built(folder, tmp_path / "none", "sounds_noise", overlay_options={"noise_root": str(folder)})
