"""Count samples that could not be read over all ranks, list them in the run directory, and end a run with too many.

Input: `Batch.bad` of every batch on every rank. Output: a metric, one line for each sample in
RUN_DIR/bad_samples.jsonl, and a `UserError` if their share of the dataset is above `data.max_bad_share`. Invariant: all
ranks raise it at the same step; no rank stops alone.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable

from data_pipeline.core.sample import BadSample
from data_pipeline.loading.sources import check_bad_share
from trainer.distributed.collectives import all_gather_json, any_rank, rank
from trainer.run_dir import RunDir

logger = logging.getLogger(__name__)


class BadSamples:
    """The bad samples that the ranks of a run have met, each once; `before` holds the samples in the checkpoint."""

    def __init__(
        self, run_dir: RunDir, *, num_samples: int, max_share: float, where: str, before: Iterable[BadSample] = ()
    ) -> None:
        self._path = run_dir.bad_samples
        self._num_samples, self._max_share, self._where = num_samples, max_share, where
        self._found = {sample.index: sample for sample in before}
        self._new: list[BadSample] = []

    @property
    def found(self) -> tuple[BadSample, ...]:
        """Return the bad samples of all ranks up to the last `flush`, sorted by index."""
        return tuple(self._found[index] for index in sorted(self._found))

    def add(self, bad: Iterable[BadSample]) -> None:
        """Add bad samples that this rank has met."""
        self._new += [sample for sample in bad if sample.index not in self._found]

    def flush(self) -> int:
        """Gather the bad samples of all ranks, list the new ones, and return their number.

        Every rank must call this at the same step. Raises `UserError` on every rank if their share is above the limit.
        """
        if any_rank(bool(self._new)):
            together = {sample.index: sample for part in all_gather_json(self._new, list[BadSample]) for sample in part}
            fresh = [sample for index, sample in sorted(together.items()) if index not in self._found]
            self._found |= {sample.index: sample for sample in fresh}
            self._new = []
            if rank() == 0 and fresh:
                self._write(fresh)
            check_bad_share(
                self._found.values(), num_samples=self._num_samples, max_share=self._max_share, where=self._where
            )
        return len(self._found)

    def _write(self, fresh: list[BadSample]) -> None:
        listed = set(self._path.read_text(encoding="utf-8").splitlines()) if self._path.exists() else set()
        with self._path.open("a", encoding="utf-8") as file:
            for sample in fresh:
                logger.warning(
                    "%s: sample %s is bad (%s); another replaces it", sample.shard, sample.key, sample.reason
                )
                line = json.dumps({"key": sample.key, "shard": sample.shard, "reason": sample.reason})
                if line not in listed:  # by an earlier start
                    file.write(line + "\n")
