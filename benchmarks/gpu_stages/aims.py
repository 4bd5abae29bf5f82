"""Compare the measurements of a GPU with what the project aims at."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.gpu_stages.session import Record
from benchmarks.gpu_stages.throughput import AS_WRITTEN
from benchmarks.record import rounded
from benchmarks.training_throughput import GAME, LIGHTLY, OURS

_PUBLISHED_BATCH: Final = 256
_RUNS: Final = ("digits", "shapes", "cifar10")


@dataclass(frozen=True)
class Aim:
    """An aim and the figure that was measured. It is met if the figure is from `least` to `most`."""

    title: str
    figure: float
    least: float = 0.0
    most: float = float("inf")

    @property
    def is_met(self) -> bool:
        return self.least <= self.figure <= self.most

    def __str__(self) -> str:
        bounds = [f"at least {self.least:g}"] * (self.least > 0) + [f"at most {self.most:g}"] * (
            self.most < float("inf")
        )
        return f"{self.title}: {self.figure:g} ({', '.join(bounds)}): {'met' if self.is_met else 'NOT MET'}"


def aims(record: Record) -> Iterator[Aim]:
    """Yield the aims for which a record has the measurements."""
    at_batch = _values(record, f"throughput-{_PUBLISHED_BATCH}") | {
        name: values
        for name, values in _values(record, "compiled").items()
        if values.get("batch_size") == _PUBLISHED_BATCH
    }
    rates = {name: values["samples_per_second"] for name, values in at_batch.items()}
    game, simclr = (
        max((rate for name, rate in rates.items() if name.startswith(f"{peer}, ")), default=None)
        for peer in (GAME, OURS)
    )
    if game is not None and (other := rates.get(f"{AS_WRITTEN}, float32")):
        yield Aim(f"viewmaker, batch {_PUBLISHED_BATCH}, over {AS_WRITTEN} in float32", rounded(game / other), least=8)
    if simclr is not None and (other := rates.get(LIGHTLY)):
        yield Aim(
            f"SimCLR, batch {_PUBLISHED_BATCH}, over lightly's with its own loader", rounded(simclr / other), least=5
        )
    ours = [
        values
        for stage in record.stages
        for name, values in _values(record, stage).items()
        if name.startswith((f"{OURS}, ", f"{GAME}, "))
    ]
    if waits := _numbers(ours, "data_wait_fraction"):
        yield Aim("share of a step that waits for data, largest", max(waits), most=0.01)
    if peaks := _numbers(ours, "peak_over_plan"):
        yield Aim("peak of the memory over --plan, lowest", min(peaks), least=0.9)
        yield Aim("peak of the memory over --plan, highest", max(peaks), most=1.1)
    if shares := _numbers(ours, "share_of_matrix_rate"):
        yield Aim("share of the matrix rate, best", max(shares), least=0.4)
    runs = [values for stage in _RUNS for values in _values(record, stage).values() if values["probes"]]
    if seconds := [values["seconds_in_this_session"]["probe"] for values in runs]:
        yield Aim("seconds of the probes of a run, longest", max(seconds), most=60)


def _values(record: Record, stage: str) -> dict[str, dict[str, Any]]:
    """Return the values of the measurements of a stage that ended, by name."""
    found = record.stages.get(stage, {})
    return {name: measured.values for name, measured in found.items() if measured.failed is None}


def _numbers(measured: Iterable[dict[str, Any]], name: str) -> list[float]:
    """Return a figure of each measurement that has it."""
    return [values[name] for values in measured if values.get(name) is not None]
