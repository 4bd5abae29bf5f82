"""Hold the logged metrics of a run as one array for each metric, so that a report of many long runs fits in memory.

A line of metrics.jsonl takes about 5 kB as a dict, and 0.3 kB as numbers in arrays.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class LoggedMetrics:
    """The metrics of a run by name. Each has the steps at which it was logged, ascending, and its values there."""

    columns: Mapping[str, tuple[array[int], array[float]]]
    last_step: int | None  # None if nothing was logged

    @classmethod
    def of(cls, entries: Sequence[Mapping[str, Any]]) -> LoggedMetrics:
        """Return the numbers of the entries of `trainer.records.read_metrics`."""
        steps = array("q", [entry["step"] for entry in entries])
        steps_of: dict[str, array[int]] = {}
        values_of: dict[str, array[float]] = {}
        for step, entry in zip(steps, entries, strict=True):
            for name, value in entry.items():
                if name not in values_of:
                    steps_of[name], values_of[name] = array("q"), array("d")
                steps_of[name].append(step)
                values_of[name].append(value)
        # Most metrics are in every entry, and share one array of steps.
        columns = {
            name: (steps if len(values) == len(steps) else steps_of[name], values) for name, values in values_of.items()
        }
        return cls(columns, steps[-1] if entries else None)

    @property
    def first_step(self) -> int | None:
        return self.columns["step"][0][0] if self.columns else None

    @property
    def names(self) -> Sequence[str]:
        """Return the names of the metrics that were logged at least once."""
        return tuple(self.columns)

    def by_step(self, name: str) -> dict[int, float]:
        """Return the values of a metric by step; empty if it was never logged."""
        if name not in self.columns:
            return {}
        steps, values = self.columns[name]
        return dict(zip(steps, values, strict=True))
