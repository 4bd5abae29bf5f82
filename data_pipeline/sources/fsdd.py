"""The Free Spoken Digit Dataset (Jackson et al. 2018): six speakers say the ten digits, 3,000 WAV files of 8 kHz."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, Final, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from data_pipeline.audio.sound_file import read_sound_file
from data_pipeline.core.errors import UserError, nearest
from data_pipeline.core.sample import Record
from data_pipeline.core.schema import Schema
from data_pipeline.sources import SourceInputs
from data_pipeline.sources.wav_folder import recordings_in, warn_of_ignored

DEFAULT_TEST_SPEAKER: Final = "yweweler"
_NAME: Final = r"([0-9])_([A-Za-z]+)_(0|[1-9][0-9]*)\.wav"


class FsddOptions(Schema):
    """The options of the source fsdd: `test_speaker`, the speaker of the test split, who stands in the description."""

    test_speaker: str = Field(DEFAULT_TEST_SPEAKER, exclude=True)


class Fsdd:
    """The spoken digits of one split, sorted by speaker, digit and index.

    Reads the published layout, `ROOT[/recordings]/DIGIT_SPEAKER_INDEX.wav`. The test split is one speaker, the train
    split all others. A file is opened when its record is read.

    Raises `UserError` with the name of the folder or file if there are no recordings, if a WAV file has another name,
    if the test speaker is unknown, or if no speaker is left for training. Reading a record raises it if the file is not
    a mono WAV of 8 kHz.
    """

    class_names = tuple("0123456789")
    title = "spoken digit"
    sample_rate: ClassVar[int] = 8_000
    num_records_of: ClassVar[Mapping[str, int]] = MappingProxyType({"train": 2_500, "test": 500})
    needs_root: ClassVar[bool] = True
    options_schema: ClassVar[type[Schema]] = FsddOptions

    @classmethod
    def open(cls, given: SourceInputs) -> Self:
        return cls(given.required_root(), split=given.split, test_speaker=given.read(FsddOptions).test_speaker)

    def __init__(self, root: Path, *, split: str, test_speaker: str = DEFAULT_TEST_SPEAKER) -> None:
        self.root = root / "recordings" if (root / "recordings").is_dir() else root
        if not self.root.is_dir():
            raise UserError(f"{self.root} is not a folder; give --root the folder of the Free Spoken Digit Dataset")
        others: list[Path] = []
        found = recordings_in(self.root, _NAME, form="DIGIT_SPEAKER_INDEX.wav", others=others)
        warn_of_ignored(self.root, others)
        recordings = [(match[2], int(match[1]), int(match[3]), match.string) for match in found]
        speakers = {speaker for speaker, *_ in recordings}
        if test_speaker not in speakers:
            raise UserError(f'{self.root} has no speaker "{test_speaker}"{nearest(test_speaker, speakers)}')
        if len(speakers) == 1:
            raise UserError(f"{self.root} holds only one speaker, {test_speaker}; add the recordings of others")
        self.description = f"fsdd, test speaker {test_speaker}"
        chosen = sorted(entry for entry in recordings if (entry[0] == test_speaker) == (split == "test"))
        self._names = tuple(name for *_, name in chosen)
        self.labels: NDArray[np.int64] = np.array([digit for _, digit, *_ in chosen], dtype=np.int64)

    def __getitem__(self, number: int) -> Record:
        name = self._names[number]
        recording = read_sound_file(self.root / name, sample_rate=self.sample_rate)
        return Record(recording.points, int(self.labels[number]), name)
