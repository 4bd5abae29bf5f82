"""The Free Spoken Digit Dataset (Jackson et al. 2018): six speakers say the ten digits, 3,000 WAV files of 8 kHz."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Final, Self

import numpy as np
from pydantic import Field

from data_pipeline.audio.log_mel import FSDD
from data_pipeline.core.errors import UserError, nearest
from data_pipeline.core.sample import BASE
from data_pipeline.core.schema import Schema
from data_pipeline.sources import LabelColumn, SourceInputs
from data_pipeline.sources.known_layouts import FSDD_TEST_SPEAKER
from data_pipeline.sources.sound_folder import SPOKEN_DIGITS, SoundFiles, published_recordings

_WHERE: Final = "https://github.com/Jakobovski/free-spoken-digit-dataset"


class FsddOptions(Schema):
    """The options of the source fsdd: `test_speaker`, the speaker of the test split, who stands in the description."""

    test_speaker: str = Field(FSDD_TEST_SPEAKER, exclude=True)


class Fsdd(SoundFiles):
    """The spoken digits of one split, sorted by speaker, digit and index.

    Reads the published layout, `ROOT[/recordings]/DIGIT_SPEAKER_INDEX.wav`. The test split is one speaker, the train
    split all others.

    Raises `UserError` with the name of the folder or file if there are no recordings, if a WAV file has another name,
    if the test speaker is unknown, or if no speaker is left for training.
    """

    needs_root: ClassVar[bool] = True
    options_schema: ClassVar[type[Schema]] = FsddOptions

    @classmethod
    def open(cls, given: SourceInputs) -> Self:
        return cls(given.required_root(), split=given.split, test_speaker=given.read(FsddOptions).test_speaker)

    def __init__(self, root: Path, *, split: str, test_speaker: str = FSDD_TEST_SPEAKER) -> None:
        files, found = published_recordings(
            root,
            "recordings",
            r"(.*/)?(?P<digit>[0-9])_(?P<speaker>[A-Za-z]+)_(?P<index>0|[1-9][0-9]*)\.wav",
            form="DIGIT_SPEAKER_INDEX.wav",
            where=_WHERE,
        )
        recordings = sorted(
            (match["speaker"], int(match["digit"]), int(match["index"]), match.string) for match in found
        )
        speakers = {speaker for speaker, *_ in recordings}
        if test_speaker not in speakers:
            raise UserError(f'{files.root} has no speaker "{test_speaker}"{nearest(test_speaker, speakers)}')
        if len(speakers) == 1:
            raise UserError(f"{files.root} holds only one speaker, {test_speaker}; add the recordings of others")
        chosen = [entry for entry in recordings if (entry[0] == test_speaker) == (split == "test")]
        digits = LabelColumn(*SPOKEN_DIGITS, np.array([digit for _, digit, *_ in chosen], dtype=np.int64))
        super().__init__(
            files,
            [name for *_, name in chosen],
            {BASE: digits},
            sample_rate=FSDD.sample_rate,
            num_points=FSDD.num_points,
            description=f"fsdd, test speaker {test_speaker}",
        )
