"""AudioMNIST (Becker et al. 2018): 60 speakers say the ten digits 50 times each, 30,000 WAV files of 48 kHz."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Final, Self

import numpy as np

from data_pipeline.audio.log_mel import AUDIOMNIST
from data_pipeline.core.errors import UserError
from data_pipeline.core.sample import BASE
from data_pipeline.sources import LabelColumn, SourceInputs
from data_pipeline.sources.known_layouts import TEST_SPEAKERS
from data_pipeline.sources.sound_folder import SPOKEN_DIGITS, SoundFiles, published_recordings

NUM_SPEAKERS: Final = 60
_WHERE: Final = "https://github.com/soerenab/AudioMNIST"


class AudioMnist(SoundFiles):
    """The spoken digits of one split, sorted by speaker, digit and take.

    Reads the published layout, `ROOT[/data]/SPEAKER/DIGIT_SPEAKER_TAKE.wav` with speakers 01 to 60. The train split has
    24,000 records of 48 speakers, the test split 6,000 of 12.

    Raises `UserError` if the recordings of a speaker are missing, or if a WAV file has another name.
    """

    needs_root: ClassVar[bool] = True

    @classmethod
    def open(cls, given: SourceInputs) -> Self:
        return cls(given.required_root(), split=given.split)

    def __init__(self, root: Path, *, split: str) -> None:
        files, found = published_recordings(
            root,
            "data",
            r"(.*/)?(?P<speaker>[0-9]{2})/(?P<digit>[0-9])_(?P=speaker)_(?P<take>0|[1-9][0-9]*)\.wav",
            form="SPEAKER/DIGIT_SPEAKER_TAKE.wav",
            where=_WHERE,
        )
        takes = sorted(
            (int(match["speaker"]), int(match["digit"]), int(match["take"]), match.string) for match in found
        )
        speakers = [
            each for each in range(1, NUM_SPEAKERS + 1) if (f"{each:02d}" in TEST_SPEAKERS) == (split == "test")
        ]
        if missing := sorted(set(speakers) - {speaker for speaker, *_ in takes}):
            names = ", ".join(f"{speaker:02d}" for speaker in missing)
            raise UserError(
                f"{files.root} lacks the recordings of {len(missing)} of the {split} split's {len(speakers)} speakers "
                f"({names}), which are at {_WHERE}; copy them there"
            )
        chosen = [take for take in takes if take[0] in speakers]
        digits = LabelColumn(*SPOKEN_DIGITS, np.array([digit for _, digit, *_ in chosen], dtype=np.int64))
        super().__init__(
            files,
            [name for *_, name in chosen],
            {BASE: digits},
            sample_rate=AUDIOMNIST.sample_rate,
            num_points=AUDIOMNIST.num_points,
            description="audiomnist",
        )
