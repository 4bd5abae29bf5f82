"""Run directories as training, probe and analysis leave them, with chosen numbers, and what a report makes of them."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from configs import debug
from trainer.analyses.views import ViewsResult
from trainer.probes.knn import KNNResult
from trainer.probes.linear import LinearResult, ProbeConfig
from trainer.probes.result import ProbeResult, pack_right
from trainer.report import main
from trainer.run_dir import RunDir, write_json

Accuracies = Mapping[str, Sequence[float]]  # label -> linear accuracy by epoch; kNN is 0.01 below the last

PROVENANCE = {
    "command": "python launch/train.py --config debug:image",
    "git_commit": "0123456789abcdef0123456789abcdef01234567",
    "started_at": "2026-01-02T03:04:05+00:00",
    "cpu": "A Processor",
    "num_cpus": 2,
    "gpu": None,
    "world_size": 2,
    "versions": {"python": "3.11.9", "torch": "2.11.0"},
    "train_manifest_sha256": "a" * 64,
    "test_manifest_sha256": "b" * 64,
    "seed": 0,
    "total_wall_seconds": 3725.0,
    "finished_step": 11,
    "num_train_samples": 5000,
}


def make_run(
    directory: Path,
    *,
    recipe: Any = debug.image,
    trained: Accuracies | None = None,
    untrained: Accuracies | None = None,
    right: Mapping[str, NDArray[np.bool_]] | None = None,
    untrained_right: Mapping[str, NDArray[np.bool_]] | None = None,
    num_test: int = 1000,
    provenance: Mapping[str, Any] | None = None,
    probe: ProbeConfig | None = None,
    titles: Mapping[str, str] | None = None,
    **settings: Any,
) -> Path:
    """Make a run directory.

    trained, untrained: accuracies by epoch of the probe.
    right, untrained_right: in their place, which samples the probe gets right.
    """
    probe = recipe().probe if probe is None else probe
    config = recipe().model_dump() | settings
    config["data"] |= {"train_dir": "no/such/train", "test_dir": "no/such/test"}
    run_dir = RunDir(directory)
    directory.mkdir(parents=True)
    write_json(run_dir.config, config)
    write_json(run_dir.provenance, PROVENANCE if provenance is None else provenance)
    lines = [
        {"step": step, "train/loss": 4 / step, "perf/samples_per_second": 100.0 + step, "perf/data_wait_fraction": 0.01}
        for step in range(1, 12)
    ]
    run_dir.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 12, "train/lo')
    title = (titles or {}).get
    for step, accuracies, samples in ((0, untrained, untrained_right), (11, trained, right)):
        for label, curve in (accuracies or {}).items():
            result = probe_result(label, step, curve, num_test, config=probe, title=title(label))
            write_json(run_dir.probes(step) / f"{label}.json", result)
        for label, right_N in (samples or {}).items():
            result = probe_result(label, step, [float(right_N.mean())], len(right_N), config=probe, title=title(label))
            bits = pack_right(torch.from_numpy(right_N))
            write_json(run_dir.probes(step) / f"{label}.json", result | {"right_samples": {"linear": bits}})
    run_dir.analysis.mkdir()
    (run_dir.analysis / "views.png").write_bytes(png())
    views = ViewsResult(
        checkpoint_step=11,
        views=config["views"]["kind"],
        num_pictures=64,
        change=0.0481,
        change_in_box=0.05,
        change_in_object=0.06,
        selectivity_box=1.0395,
        selectivity_object=1.2474,
        difference_gain=5,
        shown=(1, 2),
        test_manifest_sha256="b" * 64,
    )
    write_json(run_dir.analysis / "views.json", views.model_dump(mode="json"))
    return directory


def png() -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (4, 4), (1, 2, 3)).save(buffer, "PNG")
    return buffer.getvalue()


def probe_result(
    label: Any,
    step: int,
    curve: Sequence[float],
    num_test: int,
    *,
    config: ProbeConfig | None = None,
    title: str | None = None,
) -> dict[str, Any]:
    return ProbeResult(
        label=label,
        checkpoint_step=step,
        linear=LinearResult(
            accuracy=curve[-1],
            accuracy_by_epoch=tuple(curve),
            train_accuracy_by_epoch=tuple(curve),
        ),
        knn=KNNResult(accuracy=curve[-1] - 0.01, num_neighbors=200, temperature=0.1),
        chance=0.1,
        majority_share=0.113,
        class_names=tuple("0123456789"),
        num_train=5000,
        num_test=num_test,
        probe_config=debug.image().probe if config is None else config,
        train_manifest_sha256="a" * 64,
        test_manifest_sha256="b" * 64,
        seconds=1.0,
        title=title,
    ).model_dump(mode="json")


def samples(accuracy: float, *, num_test: int, seed: int) -> NDArray[np.bool_]:
    """Return which samples are right, (num_test,): the easiest ones of one fixed order, with some noise of the seed."""
    ease_N = np.random.default_rng(7).random(num_test)
    noise_N = np.random.default_rng([11, seed]).normal(0, 0.1, num_test)
    right_N = np.zeros(num_test, dtype=bool)
    right_N[np.argsort(ease_N + noise_N)[: round(accuracy * num_test)]] = True
    return right_N


class Page(HTMLParser):
    """A parser of the page: text of the table rows, references that a browser would follow, and tags."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.references: list[str] = []
        self.tags: list[str] = []
        self._in_cell = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.references += [value or "" for name, value in attrs if name in {"src", "href", "xlink:href", "srcset"}]
        if tag == "tr":
            self.rows.append([])
        elif tag in {"td", "th"} and self.rows:
            self.rows[-1].append("")
            self._in_cell = True

    def handle_endtag(self, tag: str) -> None:
        if tag in {"td", "th"}:
            self._in_cell = False

    def handle_data(self, data: str) -> None:
        if self._in_cell:
            self.rows[-1][-1] += f"{data} "

    def row(self, start: str, *, number: int = 0) -> list[str]:
        """Return the first row (or the row of that number) whose title begins with this text."""
        rows = [[" ".join(cell.split()) for cell in row] for row in self.rows]
        return [row for row in rows if row and row[0].startswith(start)][number]


def report(monkeypatch: pytest.MonkeyPatch, out: Path, *arguments: Path | str) -> str:
    """Run `python -m trainer.report`, and return the page."""
    monkeypatch.setattr(sys, "argv", ["report", *map(str, arguments), "--out", str(out)])
    main()
    return out.read_text()
