"""AudioMNIST (Becker et al. 2018): 60 speakers say the ten digits 50 times each, 30,000 WAV files of 48 kHz."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, Final, Self

import numpy as np
from numpy.typing import NDArray

from data_pipeline.audio.sound_file import read_sound_file
from data_pipeline.core.errors import UserError
from data_pipeline.core.sample import Record
from data_pipeline.sources import SourceInputs
from data_pipeline.sources.wav_folder import recordings_in, warn_of_ignored

NUM_SPEAKERS: Final = 60
# The published split. Tamkin et al. 2022 train on its training and validation speakers.
TEST_SPEAKERS: Final = (5, 13, 18, 22, 26, 32, 33, 42, 45, 51, 52, 60)


class AudioMnist:
    """The spoken digits of one split, sorted by speaker, digit and take.

    Reads the published layout, `ROOT[/data]/SPEAKER/DIGIT_SPEAKER_TAKE.wav` with speakers 01 to 60. The train split has
    24,000 records of 48 speakers, the test split 6,000 of 12. A file is opened when its record is read.

    Raises `UserError` if the folder of a speaker is missing or empty, or if a WAV file has another name. Reading a
    record raises it if the file is not a mono WAV of 48 kHz.
    """

    description = "audiomnist"
    class_names = tuple("0123456789")
    title = "spoken digit"
    sample_rate: ClassVar[int] = 48_000
    num_records_of: ClassVar[Mapping[str, int]] = MappingProxyType({"train": 24_000, "test": 6_000})
    needs_root: ClassVar[bool] = True

    @classmethod
    def open(cls, given: SourceInputs) -> Self:
        return cls(given.required_root(), split=given.split)

    def __init__(self, root: Path, *, split: str) -> None:
        self.root = root / "data" if (root / "data").is_dir() else root
        if not self.root.is_dir():
            raise UserError(f"{self.root} is not a folder; give --root the folder of AudioMNIST's data/01 to data/60")
        speakers = [
            speaker for speaker in range(1, NUM_SPEAKERS + 1) if (speaker in TEST_SPEAKERS) == (split == "test")
        ]
        if missing := [speaker for speaker in speakers if not (self.root / f"{speaker:02d}").is_dir()]:
            names = ", ".join(f"{speaker:02d}" for speaker in missing)
            raise UserError(
                f"{self.root} lacks {len(missing)} of the {split} split's {len(speakers)} speaker folders ({names}); "
                "copy them from AudioMNIST's data folder"
            )
        others: list[Path] = []
        takes = []
        for speaker in speakers:
            folder = self.root / f"{speaker:02d}"
            names, form = rf"([0-9])_{folder.name}_(0|[1-9][0-9]*)\.wav", f"DIGIT_{folder.name}_TAKE.wav"
            found = recordings_in(folder, names, form=form, others=others)
            takes += sorted((speaker, int(match[1]), int(match[2]), f"{folder.name}/{match.string}") for match in found)
        warn_of_ignored(self.root, others)
        self._name_N = np.array([name for *_, name in takes], dtype=np.bytes_)  # not 30,000 strings in every worker
        self.labels: NDArray[np.int64] = np.array([digit for _, digit, *_ in takes], dtype=np.int64)

    def __getitem__(self, number: int) -> Record:
        name = self._name_N[number].decode()
        recording = read_sound_file(self.root / name, sample_rate=self.sample_rate)
        return Record(recording.points, int(self.labels[number]), name)
