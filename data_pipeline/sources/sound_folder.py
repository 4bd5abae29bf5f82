"""Read sounds of any format, rate and length from a folder or a zip, whose layout `find_layout` finds.

All sounds of a dataset get one rate, by default the commonest, and one length in a batch, by default as long as 95 % of
them. Both are found from sounds of all splits, so that the builds of train and test set agree.
"""

from __future__ import annotations

import math
from collections import Counter
from functools import partial
from typing import ClassVar, Final

import numpy as np
from pydantic import Field

from data_pipeline.audio.log_mel import mel_config
from data_pipeline.audio.sound_file import SoundFacts, read_sound, sound_facts
from data_pipeline.core.errors import UserError
from data_pipeline.core.sample import Record
from data_pipeline.core.schema import Schema
from data_pipeline.sources import SourceInputs
from data_pipeline.sources.layout import Layout
from data_pipeline.sources.splits import SplitFiles, SplitOptions, open_split

_NUM_SEEN: Final = 2_000  # sounds, evenly spread, by which rate and length are chosen
_COVERED: Final = 0.95  # of the sounds are no longer than a sample in a batch
_LEAST_SECONDS, _MOST_SECONDS = 0.5, 5.0  # of a sample, if the user chooses none


class SoundFiles(SplitFiles):
    """The sounds of one split, each decoded to 16 bits and one channel when its record is read, and their labels.

    Args:
        found: the records of the split.
        description: the kind of source, for the manifest.
        sample_rate: the points a second to which each sound is resampled.
        num_points: the length of a sound in a batch; a record keeps its own.

    Reading a record raises `UserError` with the name of the file if `read_sound` cannot read it.
    """

    def __init__(self, found: Layout, description: str, *, sample_rate: int, num_points: int) -> None:
        super().__init__(found, description)
        self.sample_rate, self.num_points = sample_rate, num_points

    def __getitem__(self, number: int) -> Record:
        name = self._names[number]
        points, facts = self.files.decoded(name, partial(read_sound, sample_rate=self.sample_rate))
        remarks = facts.remarks
        if len(points) > self.num_points:
            remarks += (f"is longer than the {self.num_points / self.sample_rate:.3g} s of a sample",)
        return Record(points, name, remarks)


class SoundFolderOptions(SplitOptions):
    """The options of the source sound_folder, which stand in the description of the source.

    sample_rate: the points a second to which all sounds are resampled; by default the commonest rate of the folder.
    seconds: the length of a sound in a batch; by default as long as 95 % of the sounds, from 0.5 to 5 s.
    """

    sample_rate: int | None = Field(None, ge=2_000, le=1_000_000, exclude=True)
    seconds: float | None = Field(None, gt=0, le=3_600, exclude=True)


class SoundFolder:
    """The source sound_folder: the sounds of a folder or a zip with their labels."""

    options_schema: ClassVar[type[Schema]] = SoundFolderOptions

    @classmethod
    def open(cls, given: SourceInputs) -> SoundFiles:
        """Return the sounds of one split. Raises `UserError` if there are none, or as `open_split` does."""
        options = given.read(SoundFolderOptions)
        layout, found = open_split(given, "sound", options)
        sample_rate, num_points = _rate_and_length(layout, options)
        mel_config(sample_rate, num_points)  # raises if there is no spectrogram of such sounds
        described = f"{found.kind} of sounds, {num_points} points at {sample_rate} a second{found.drawn}"
        return SoundFiles(found, described, sample_rate=sample_rate, num_points=num_points)


def _rate_and_length(layout: Layout, options: SoundFolderOptions) -> tuple[int, int]:
    """Return the rate of all sounds and the number of points of one in a batch, as the user or most sounds have it."""
    sample_rate, seconds, files, names = options.sample_rate, options.seconds, layout.files, layout.names
    if sample_rate is not None and seconds is not None:
        return sample_rate, round(seconds * sample_rate)
    facts, reason = list[SoundFacts](), ""
    num = len(names)
    for number in sorted({num * step // min(num, _NUM_SEEN) for step in range(min(num, _NUM_SEEN))}):
        try:
            with files.open(names[number]) as file:
                facts.append(sound_facts(file))
        except (OSError, ValueError) as error:  # the build names the file when it reads it
            reason = f"{names[number]} ({error})"
    if not facts:
        raise UserError(f"no sound of {files.root} can be read, such as {reason}; mend or remove them")
    rates = Counter(each.sample_rate for each in facts)
    if sample_rate is None:
        sample_rate = max(rates, key=lambda rate: (rates[rate], rate))
    if seconds is None:
        covering = float(np.quantile([each.seconds for each in facts], _COVERED, method="higher"))
        seconds = min(max(math.ceil(10 * covering - 1e-6) / 10, _LEAST_SECONDS), _MOST_SECONDS)
    return sample_rate, round(seconds * sample_rate)
