"""Sources of sound: published splits and order, files that are wrong, and sounds that are made."""

from __future__ import annotations

import pickle
import shutil
import tarfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from data_pipeline.audio.log_mel import FSDD, log_mel, power_mel
from data_pipeline.audio.wav import encode_wav
from data_pipeline.audio.waveform import fit_length, to_float
from data_pipeline.core.errors import UserError
from data_pipeline.sources.background import FILE_NAMES, procedural_sounds, read_sounds
from data_pipeline.sources.procedural_speech import ProceduralSpeech
from data_pipeline.sources.spoken_digits import AudioMnist, Fsdd
from tests.real_data import archive
from tests.tars import unpack_tar

# As the authors of AudioMNIST printed it: training, validation (both serve to train here), test.
TRAIN = (
    "28 56 07 19 35 01 06 16 23 34 46 53 36 57 09 24 37 02 08 17 29 39 48 54 43 58 14 25 38 03 10 20 30 40 49 55 "
    "12 47 59 15 27 41 04 11 21 31 44 50"
)
TEST = "26 52 60 18 32 42 05 13 22 33 45 51"


def write_points(path: Path, *, num: int = 10, rate: int = 48_000) -> None:
    path.write_bytes(encode_wav(np.full(num, 7, dtype=np.int16), sample_rate=rate))


@pytest.fixture
def audiomnist(tmp_path: Path) -> Path:
    """All 60 folders, two takes of two digits in each, none of them a sound yet."""
    for speaker in range(1, 61):
        folder = tmp_path / "data" / f"{speaker:02d}"
        folder.mkdir(parents=True)
        for name in (f"3_{speaker:02d}_10.wav", f"3_{speaker:02d}_9.wav", f"0_{speaker:02d}_0.WAV", "._x.wav", "a.txt"):
            (folder / name).touch()
    return tmp_path


def test_the_published_speakers_in_the_order_of_speaker_digit_and_take(audiomnist: Path) -> None:
    for split, speakers in (("train", TRAIN.split()), ("test", TEST.split())):
        for root in (audiomnist, audiomnist / "data"):
            source = AudioMnist(root, split=split)  # knows its labels, though no file holds a sound
            digit_N = source.labels["base"].label_N
            assert digit_N.dtype == np.int64
            assert digit_N.tolist() == [0, 3, 3] * len(speakers)
        for position, speaker in enumerate(sorted(speakers)):
            for offset, name in enumerate((f"0_{speaker}_0.WAV", f"3_{speaker}_9.wav", f"3_{speaker}_10.wav")):
                write_points(audiomnist / "data" / speaker / name, num=3 * position + offset + 1)
        again = pickle.loads(pickle.dumps(source))
        for number in range(source.num_records):
            record = again[number]
            assert record.content.dtype == np.int16
            assert len(record.content) == number + 1
            assert record.file.startswith(f"{sorted(speakers)[number // 3]}/{digit_N[number]}_")


def test_missing_speakers_are_named(audiomnist: Path) -> None:
    for speaker in ("07", "60", "41"):
        shutil.rmtree(audiomnist / "data" / speaker)
    with pytest.raises(
        UserError, match=r"2 of the train split's 48 speakers \(07, 41\), which are at https://github.com/soerenab"
    ):
        AudioMnist(audiomnist, split="train")
    with pytest.raises(UserError, match=r"1 of the test split's 12 speakers \(60\)"):
        AudioMnist(audiomnist, split="test")
    with pytest.raises(UserError, match=r"nowhere .*https://github.com/soerenab/AudioMNIST"):
        AudioMnist(audiomnist / "nowhere", split="train")


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fsdd")
    with tarfile.open(archive("fsdd-recordings.tar.gz")) as tar:
        unpack_tar(tar, folder)
    return folder


@pytest.mark.slow
def test_each_speaker_can_be_the_test_speaker(recordings: Path) -> None:
    for speaker in ("george", "yweweler"):
        train, test = (Fsdd(recordings, split=split, test_speaker=speaker) for split in ("train", "test"))
        assert np.bincount(train.labels["base"].label_N).tolist() == [250] * 10
        assert np.bincount(test.labels["base"].label_N).tolist() == [50] * 10
        assert speaker in test.description
        assert test.description == train.description
    last = train.num_records - 1
    with tarfile.open(archive("fsdd-recordings.tar.gz")) as tar:
        for source, number, name in ((test, 0, "0_yweweler_0"), (train, last, "9_theo_49")):
            record = source[number]
            file = tar.extractfile(f"recordings/{name}.wav")
            assert file is not None
            assert record.content.tobytes() == file.read()[44 : 44 + 2 * len(record.content)]
            assert source.labels["base"].label_N[number] == int(name[0])


def test_wrong_recordings_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere .*https://github.com/Jakobovski"):
        Fsdd(tmp_path / "nowhere", split="train")
    write_points(tmp_path / "0_theo_0.wav", rate=8_000)
    with pytest.raises(UserError, match="holds only one speaker, theo"):
        Fsdd(tmp_path, split="train", test_speaker="theo")
    write_points(tmp_path / "1_george_0.wav", rate=48_000)
    with pytest.raises(UserError, match='no speaker "teho"; did you mean "theo"'):
        Fsdd(tmp_path, split="train", test_speaker="teho")
    write_points(tmp_path / "one_george.wav")
    with pytest.raises(UserError, match=r"one_george\.wav is not named"):
        Fsdd(tmp_path, split="train", test_speaker="theo")


def test_melodies_depend_on_their_number_alone() -> None:
    source = ProceduralSpeech(0, "train", 40)
    assert Counter(source.labels["base"].label_N.tolist()) == dict.fromkeys(range(10), 4)
    longer = ProceduralSpeech(0, "train", 1_000)
    for number in (39, 0, 17):
        assert source[number].content.tobytes() == longer[number].content.tobytes()
    others = [ProceduralSpeech(1, "train", 40)[0], ProceduralSpeech(0, "test", 40)[0], source[10]]
    assert len({other.content.tobytes() for other in [source[0], *others]}) == 4
    lengths = [len(longer[number].content) for number in range(100)]
    assert min(lengths) < FSDD.num_points < max(lengths) < 1.2 * 8_000  # some are cut when they are read


@pytest.mark.slow
def test_neither_the_bands_nor_the_moments_of_a_melody_give_its_kind_away() -> None:
    splits = []
    for split, num in (("train", 250), ("test", 150)):
        source = ProceduralSpeech(0, split, num)
        clips = [torch.from_numpy(source[number].content) for number in range(num)]
        waveforms_BT = to_float(fit_length(clips, FSDD.num_points, last_B=torch.zeros(num, dtype=torch.bool)))
        splits.append((log_mel(power_mel(waveforms_BT, FSDD), FSDD), source.labels["base"].label_N))
    (train_BMN, train_labels), (test_BMN, test_labels) = splits
    for axis in (1, 2):
        probe = make_pipeline(StandardScaler(), LogisticRegression(max_iter=500)).fit(
            train_BMN.mean(dim=axis), train_labels
        )
        assert probe.score(test_BMN.mean(dim=axis), test_labels) < 0.3  # 0.1 is chance


@pytest.mark.parametrize(("sample_rate", "lengths"), [(48_000, [1_449_721, 1_440_001, 1_449_720])])
def test_the_published_backgrounds(sample_rate: int, lengths: list[int]) -> None:
    sounds = read_sounds(archive("noise"), sample_rate=sample_rate, num_points=50_000)
    assert [len(sound) for sound in sounds] == lengths
    for sound in sounds:
        assert sound.dtype == torch.float32
        assert 0.01 < sound.abs().max() < 1.1


def test_a_resampled_background_has_the_points_of_the_published_one(tmp_path: Path) -> None:
    """Thirty seconds, the length of the traffic, get a point too many, because 48,000 / 44,100 is rounded up."""
    lengths = {"cafe.wav": (1_323_000, 1_440_001), "traffic.wav": (44_107, 48_008), "machinery.wav": (441, 481)}
    for name, (num, _) in lengths.items():
        points = np.full(num, 9_999, dtype=np.int16)
        (tmp_path / name).write_bytes(encode_wav(points, sample_rate=44_100))
    sounds = read_sounds(tmp_path, sample_rate=48_000, num_points=400)
    for sound, (_, num) in zip(sounds, lengths.values(), strict=True):
        assert len(sound) == num
        assert (sound[: num - 1] > 0.1).all()
        assert sound[-1] == 0


def test_wrong_backgrounds_are_named(tmp_path: Path) -> None:
    for name in FILE_NAMES[:2]:
        write_points(tmp_path / name, num=4_800)
    with pytest.raises(UserError, match=r"lacks machinery\.wav"):
        read_sounds(tmp_path, sample_rate=8_000, num_points=800)
    write_points(tmp_path / "machinery.wav", num=4_799)
    assert [len(sound) for sound in read_sounds(tmp_path, sample_rate=8_000, num_points=800)] == [800] * 3
    write_points(tmp_path / "machinery.wav", num=4_794)
    with pytest.raises(UserError, match=r"machinery\.wav gives 799 points at 8000 a second, but 800 are needed"):
        read_sounds(tmp_path, sample_rate=8_000, num_points=800)
    for part, points in (("first", [0] * 4_800 + [999] * 99), ("last", [999] * 99 + [0] * 4_800), ("first", [0] * 900)):
        (tmp_path / "traffic.wav").write_bytes(encode_wav(np.array(points, dtype=np.int16), sample_rate=8_000))
        with pytest.raises(UserError, match=rf"the {part} 0\.10 s of .*traffic\.wav are silent"):
            read_sounds(tmp_path, sample_rate=8_000, num_points=800)


def test_made_backgrounds_differ_in_spectrum_and_repeat() -> None:
    sounds = procedural_sounds(0, sample_rate=8_000, num_points=8_333)
    for sound, again in zip(sounds, procedural_sounds(0, sample_rate=8_000, num_points=8_333), strict=True):
        assert sound.shape == (240_000,)
        assert torch.equal(sound, again)
        assert sound.abs().max().item() == pytest.approx(0.9)
    assert not torch.equal(sounds[0], procedural_sounds(1, sample_rate=8_000, num_points=8_333)[0])
    crops_NT = torch.stack([0.05 * sound.unfold(0, 8_333, 8_333) for sound in sounds])
    spectra = torch.stack([log_mel(power_mel(crops, FSDD), FSDD).mean(dim=2) for crops in crops_NT])  # (3, crops, M)
    within = (spectra - spectra.mean(dim=1, keepdim=True)).square().sum(dim=2).mean()
    between = torch.pdist(spectra.mean(dim=1)).square().min()
    assert between > 4 * within
    assert [len(sound) for sound in procedural_sounds(0, sample_rate=8_000, num_points=200_000)] == [400_000] * 3
