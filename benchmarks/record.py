"""Peers in turns: what a benchmark compares, how it is measured, and the record that it files.

Peers of a line are measured in rounds, one after the other, so that a machine that slows down does so for all; the
figure of a line is the median over the rounds of what is judged within each.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from trainer.memory import keep_freed_memory
from trainer.provenance import command_line, cpu_name, this_code

Measured = Mapping[str, float]  # of one round, by peer
Peers = Mapping[str, Callable[[], float]]  # one measurement each
WARM_UP_SECONDS = 0.3  # not counted: files are mapped and kernels are chosen


@dataclass(frozen=True)
class Line:
    """One comparison.

    Attributes:
        title: what is compared.
        unit: of what the peers return.
        peers: by name.
        judge: the figure of one round, from its measurements.
        figure_is: what the figure is, `ratio` or `seconds`.
        target: the least that the figure has to be, with `at_most` the greatest; None where nothing was promised.
    """

    title: str
    unit: str
    peers: Peers
    judge: Callable[[Measured], float]
    figure_is: str
    target: float | None = None
    at_most: bool = False


def rate(counts: Iterator[int], *, seconds: float, clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the samples a second over `seconds`, and over at least one count, after a short warm-up."""
    begin = start = clock()
    num_samples = 0
    for count in counts:
        assert count > 0
        now = clock()
        if now < begin + WARM_UP_SECONDS or not start > begin:
            start = now  # the first count always belongs to the warm-up, because it includes the opening
            continue
        num_samples += count
        if now >= start + seconds:
            break
    return num_samples / (now - start)


def ratio_line(title: str, peers: Peers, *, against: str, target: float | None = None) -> Line:
    """A line of rates, of which the figure is ours over that of the peer `against`."""
    return Line(title, "samples/s", peers, lambda measured: measured["ours"] / measured[against], "ratio", target)


def benchmark_parser(description: str | None, *, rounds: int) -> argparse.ArgumentParser:
    """Return a parser with the number of rounds, by default `rounds`, and the file to write."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=rounds, metavar="R", help="measurements of each peer")
    parser.add_argument("--out", type=Path, metavar="JSON", help="where to file what was measured")
    return parser


def on_one_core(*, packages: Sequence[str]) -> dict[str, Any]:
    """Compute on one thread, and keep freed memory as a training process does; return the `circumstances`."""
    torch.set_num_threads(1)
    keep_freed_memory()  # it serves the peers as well
    return circumstances(packages=packages)


def replayed(values: Sequence[float]) -> Callable[[], float]:
    """Return a measurement that gives what was measured before, one after the other."""
    return partial(next, iter(values))


def measure(line: Line, *, num_rounds: int) -> dict[str, Any]:
    """A line's part of the record: medians, figure, target, whether it is met, and every round."""
    rounds = [{name: peer() for name, peer in line.peers.items()} for _ in range(num_rounds)]
    figures = [line.judge(measured) for measured in rounds]
    figure = statistics.median(figures)
    target = met = None
    if line.target is not None:
        target = {"at_most" if line.at_most else "at_least": line.target}
        met = figure <= line.target if line.at_most else figure >= line.target
    return {
        "line": line.title,
        line.figure_is: rounded(figure),
        "target": target,
        "met": met,
        "unit": line.unit,
        "medians": {name: rounded(statistics.median(measured[name] for measured in rounds)) for name in line.peers},
        "spread": [rounded(min(figures)), rounded(max(figures))],
        "rounds": [{name: rounded(value) for name, value in measured.items()} for measured in rounds],
    }


def measure_each(lines: Iterable[Line], *, num_rounds: int) -> list[dict[str, Any]]:
    """Return each line's part of the record, and print it as soon as it is measured."""
    results = []
    for line in lines:
        results.append(measure(line, num_rounds=num_rounds))
        print(table(results[-1]), flush=True)
    return results


def save(path: Path | None, contents: Mapping[str, Any]) -> None:
    """Write what was measured as JSON, and make the directory of the file; None writes nothing."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(contents, indent=1) + "\n", encoding="utf-8")


def cpu_seconds(call: Callable[[], object]) -> float:
    """Return the processor time of one call."""
    start = time.process_time()
    call()
    return time.process_time() - start


def rounded(value: float) -> float:
    """To four digits: more would be noise."""
    return float(f"{value:.4g}")


def table(result: Mapping[str, Any]) -> str:
    """A line's part of the record, to be read by a person."""
    kind = "ratio" if "ratio" in result else "seconds"
    verdict = ""
    if result["target"] is not None:
        ((bound, value),) = result["target"].items()
        verdict = f", target {bound.replace('_', ' ')} {value}: {'met' if result['met'] else 'NOT MET'}"
    lowest, highest = result["spread"]
    lines = [result["line"], f"  {kind} {result[kind]:g} ({lowest:g} to {highest:g}){verdict}"]
    lines += [f"    {name:<52}{median:>12,.6g} {result['unit']}" for name, median in result["medians"].items()]
    return "\n".join(lines)


def circumstances(*, packages: Sequence[str]) -> dict[str, Any]:
    """What a figure depends on besides the code: command, commit, machine, versions.

    The version of a package that is not installed, and the commit of code without its repository, are None.
    """
    code = this_code()
    return {
        "command": command_line(),
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "git_commit": code.git_commit,
        "is_changed": None if code.git_diff is None else bool(code.git_diff),
        "cpu": cpu_name(),
        "num_cpus": len(os.sched_getaffinity(0)),
        "memory_gigabytes": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9, 1),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "torch_threads": torch.get_num_threads(),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in packages}},
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
