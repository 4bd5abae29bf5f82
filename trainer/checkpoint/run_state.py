"""The state of a run besides its tensors: the datasets that it is trained on, and its counters. Checkpoints hold it."""

from __future__ import annotations

import hashlib

from pydantic import Field, NonNegativeFloat, NonNegativeInt

from data_pipeline.core.sample import BadSample
from data_pipeline.core.schema import Schema

NAME_DIGITS = 12  # of a hash that is shown


class DataIdentity(Schema):
    """The train set and the test set of a run, by the SHA-256 of their manifests.

    `train_sources` holds that of each source of a mixture by name; `train_manifest_sha256` is then a hash of all.
    """

    train_manifest_sha256: str
    test_manifest_sha256: str
    train_sources: dict[str, str] = Field(default_factory=dict)

    @property
    def name(self) -> str:
        """Return a short name of both together, for `--accept-data`."""
        both = f"{self.train_manifest_sha256} {self.test_manifest_sha256}"
        return hashlib.sha256(both.encode()).hexdigest()[:NAME_DIGITS]


class SkipCounts(Schema):
    """The number of skipped steps of a run in total, and in a row up to the last step."""

    total: NonNegativeInt = 0
    in_a_row: NonNegativeInt = 0


class RunState(Schema):
    """The part of a checkpoint besides tensors.

    bad_samples: all bad samples up to the step of the checkpoint, sorted by index.
    wall_seconds: the seconds of training up to this checkpoint in all starts of the run. The time of steps that a start
        has lost does not count, but the time in which they are repeated does.
    """

    data: DataIdentity
    skipped: SkipCounts = SkipCounts()
    bad_samples: tuple[BadSample, ...] = ()
    wall_seconds: NonNegativeFloat
