"""Spoken digits: AudioMNIST (Becker et al. 2018) and the Free Spoken Digit Dataset (Jackson et al. 2018).

AudioMNIST has 60 speakers who say the ten digits 50 times each, 30,000 WAV files of 48 kHz in a folder a speaker. FSDD
has six speakers and 3,000 files of 8 kHz in the folder `recordings`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Final, Self

import numpy as np
from pydantic import Field

from data_pipeline.audio.log_mel import AUDIOMNIST, FSDD, MelConfig
from data_pipeline.core.errors import UserError, nearest
from data_pipeline.core.sample import BASE
from data_pipeline.core.schema import Schema
from data_pipeline.sources import LabelColumn, SourceInputs
from data_pipeline.sources.known_layouts import FSDD_TEST_SPEAKER, SPOKEN_DIGIT, TEST_SPEAKERS
from data_pipeline.sources.layout import find_layout
from data_pipeline.sources.places import open_files
from data_pipeline.sources.sound_folder import SoundFiles

NUM_SPEAKERS: Final = 60


class SpokenDigits(SoundFiles):
    """The spoken digits of one split, sorted by speaker, digit and number; the test split are the `test_speakers`.

    Reads every `DIGIT_SPEAKER_NUMBER.wav` below `root/folder`, or below `root` if that is not there. Raises `UserError`
    if there are no sounds, or if one has another name; it says `where` the recordings are to be had.
    """

    folder: ClassVar[str]
    mel: ClassVar[MelConfig]
    where: ClassVar[str]

    def __init__(self, root: Path, *, test_speakers: Collection[str], split: str, description: str) -> None:
        there = root / self.folder if (root / self.folder).is_dir() else root
        try:
            layout = find_layout(open_files(there), "sound")
        except UserError as error:
            raise UserError(f"{error}; the recordings are at {self.where}") from None
        layout.log_notes()
        takes = []
        for name in layout.names:
            if (match := SPOKEN_DIGIT.fullmatch(name)) is None:
                raise UserError(f"{there / name} is not named DIGIT_SPEAKER_NUMBER.wav; rename or remove it")
            takes.append((match[2], int(match[1]), int(match[3]), name))
        self.speakers = {speaker for speaker, *_ in takes}
        chosen = sorted(take for take in takes if (take[0] in test_speakers) == (split == "test"))
        digit_N = np.array([digit for _, digit, *_ in chosen], dtype=np.int64)
        labels = {BASE: LabelColumn("spoken digit", tuple("0123456789"), digit_N)}
        super().__init__(
            replace(layout, names=[name for *_, name in chosen], labels=labels),
            description,
            sample_rate=self.mel.sample_rate,
            num_points=self.mel.num_points,
        )


class AudioMnist(SpokenDigits):
    """AudioMNIST in its published split: 24,000 records of 48 speakers to train, 6,000 of 12 to test.

    Raises `UserError` if a speaker of the split is missing.
    """

    folder, mel, where = "data", AUDIOMNIST, "https://github.com/soerenab/AudioMNIST"

    @classmethod
    def open(cls, given: SourceInputs) -> Self:
        return cls(given.required_root(), split=given.split)

    def __init__(self, root: Path, *, split: str) -> None:
        super().__init__(root, test_speakers=TEST_SPEAKERS, split=split, description="audiomnist")
        named = [f"{number:02d}" for number in range(1, NUM_SPEAKERS + 1)]
        needed = [speaker for speaker in named if (speaker in TEST_SPEAKERS) == (split == "test")]
        if missing := [speaker for speaker in needed if speaker not in self.speakers]:
            raise UserError(
                f"{root} lacks the recordings of {len(missing)} of the {split} split's {len(needed)} speakers "
                f"({', '.join(missing)}), which are at {self.where}; copy them there"
            )


class FsddOptions(Schema):
    """The options of the source fsdd: `test_speaker`, the speaker of the test split, who stands in the description."""

    test_speaker: str = Field(FSDD_TEST_SPEAKER, exclude=True)


class Fsdd(SpokenDigits):
    """The Free Spoken Digit Dataset: one speaker is the test split, all others are the train split.

    Raises `UserError` if the test speaker is unknown, or if no speaker is left for training.
    """

    folder, mel, where = "recordings", FSDD, "https://github.com/Jakobovski/free-spoken-digit-dataset"
    options_schema: ClassVar[type[Schema]] = FsddOptions

    @classmethod
    def open(cls, given: SourceInputs) -> Self:
        return cls(given.required_root(), split=given.split, test_speaker=given.read(FsddOptions).test_speaker)

    def __init__(self, root: Path, *, split: str, test_speaker: str = FSDD_TEST_SPEAKER) -> None:
        described = f"fsdd, test speaker {test_speaker}"
        super().__init__(root, test_speakers=(test_speaker,), split=split, description=described)
        if test_speaker not in self.speakers:
            raise UserError(f'{root} has no speaker "{test_speaker}"{nearest(test_speaker, self.speakers)}')
        if len(self.speakers) == 1:
            raise UserError(f"{root} holds only one speaker, {test_speaker}; add the recordings of others")
