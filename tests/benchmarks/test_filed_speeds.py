"""The figures of docs/performance.md are those of the files in benchmarks/results."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
BOTH = ("data_throughput_cpu", "data_throughput_cpu_xeon")
SOUNDS = ("sounds_cpu",)  # the newest alone
AT_ITS_BEST = "librosa, prepared, float32"


def lines(begin: str, names: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """The measurements of that name in each file."""
    for name in names:
        filed = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
        found = [line for line in filed.get("lines", filed.get("results")) if line["line"].startswith(begin)]
        assert found, (name, begin)
        yield from found


def ratios(begin: str, *names: str, ending: str = "", inverse: bool = False) -> list[float]:
    found = [float(line["ratio"]) for line in lines(begin, names) if line["line"].endswith(ending)]
    return [1 / ratio for ratio in found] if inverse else found


def rounds(begin: str, *names: str) -> list[float]:
    return [value for line in lines(begin, names) for value in line["spread"]]


def medians(begin: str, who: str, *names: str) -> list[float]:
    return [line["medians"][who] for line in lines(begin, names)]


def over(begin: str, peer: str, *names: str) -> list[float]:
    """Our speed over that of a peer: the median of the rounds."""
    return [median(each["ours"] / each[peer] for each in line["rounds"]) for line in lines(begin, names)]


def over_apart(who: str) -> list[float]:
    return [line["over_apart"][who] for line in lines("two processes", ("scaling_cpu", "scaling_cpu_xeon"))]


def span(values: list[float], digits: str) -> str:
    """The least and the greatest value, as the page writes them."""
    least, greatest = format(min(values), digits), format(max(values), digits)
    return least if least == greatest else f"{least} to {greatest}"


BATCHES, HTTP = "batches of 256, one core", "batches of 250 by http"
OPENING, RESUMING, SCALING = "opening to the first batch", "resuming at 90 %", "two processes of 128 samples"
XEON, LOCAL = "data_throughput_cpu_xeon", "data_throughput_local_cpu_xeon"
ROWS: dict[str, Callable[[], list[str]]] = {
    "stored bytes in shuffled order": lambda: [
        f"{span(ratios('stored bytes, one core', XEON), '.0f')} times",
        f"{span(ratios('stored bytes, one core', LOCAL), '.2g')} times",
    ],
    "decoded batches with masks": lambda: [f"{span(ratios(BATCHES, *BOTH, ending='baked)'), '.1f')} times"],
    "decoded batches, digits drawn online": lambda: [f"{span(ratios(BATCHES, *BOTH, ending='online)'), '.1f')} times"],
    "one epoch through http": lambda: [f"{span(ratios(HTTP, *BOTH), '.1f')} times"],
    "first batch out of 1,000 shards": lambda: [
        f"{span(medians(OPENING, 'ours', *BOTH), '.2f')} s",
        f"{span(medians(RESUMING, 'ours, at 90 %', *BOTH), '.2f')} s",
        f"{span(medians(RESUMING, 'webdataset, skipping stored bytes', *BOTH), '.1f')} s",
    ],
    "two expert views of a picture": lambda: [f"{span(ratios('two expert views', *BOTH), '.0f')} times"],
    "mixing and log-mel": lambda: [
        f"{span(ratios('mixing', *SOUNDS), '.1f')} times (single rounds {span(rounds('mixing', *SOUNDS), '.1f')})",
        f"{span(over('mixing', AT_ITS_BEST, *SOUNDS), '.1f')} times",
    ],
    "views of sounds: spectral; waveform": lambda: [
        f"{span(ratios(kind, 'sound_views_cpu'), '.1f')} (single rounds {span(rounds(kind, 'sound_views_cpu'), '.1f')})"
        for kind in ("spectral", "waveform")
    ],
    "NT-Xent, batch 8,192": lambda: [
        f"{span(ratios('time of', 'loss_cpu', inverse=True), '.1f')} times",
        f"{span(ratios('memory of', 'loss_cpu', inverse=True), '.0f')} times less memory",
    ],
    "two processes with a core each": lambda: [
        f"{span(over_apart('ours'), '.2f')} of the samples a second ",
        f"({span(rounds(SCALING, 'scaling_cpu', 'scaling_cpu_xeon'), '.2f')} over the rounds",
    ],
    "the same with local batch norm": lambda: [
        f"{span(over_apart('batch norm local'), '.2f')}; {span(over_apart('in step'), '.2f')}"
    ],
}


@pytest.mark.parametrize("row", ROWS)
def test_a_row_of_the_page_has_the_figures_of_the_files(row: str) -> None:
    page = (ROOT / "docs" / "performance.md").read_text().splitlines()
    (text,) = [line for line in page if line.startswith(f"| {row}")]
    for figure in ROWS[row]():
        assert figure in text
