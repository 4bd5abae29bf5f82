"""Which label rises first, from the online probes of several seeds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.reports.test_report import Page, make_run, report
from trainer.reports.as_markdown import as_markdown
from trainer.reports.rises import rise_grid
from trainer.reports.runs import arms_of, read_runs
from trainer.run_dir import RunDir


def log(run: Path, accuracies: dict[str, list[float]]) -> None:
    """Write metrics in which each name has its values at the steps 10, 20, ..."""
    lines = [
        {"step": 10 * (place + 1)} | {name: values[place] for name, values in accuracies.items()}
        for place in range(len(next(iter(accuracies.values()))))
    ]
    RunDir(run).metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))


def make(directory: Path, accuracies: dict[str, list[float]], **settings: Any) -> Path:
    run = make_run(directory, trained={"base": [0.9]}, global_batch_size=100, **settings)
    log(run, accuracies)
    return run


def test_the_label_that_rises_first_stands_first_and_seeds_are_averaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = {"probe/base/knn": [0.1, 0.2, 0.3, 0.7], "probe/base/ridge": [0.2, 0.2, 0.2, 0.2]}
    one = make(tmp_path / "one", slow | {"probe/overlay/knn": [0.2, 0.8, 0.9, 0.9]}, name="run", seed=0)
    two = make(tmp_path / "two", slow | {"probe/overlay/knn": [0.2, 0.3, 0.9, 0.8]}, name="run", seed=1)
    arms = arms_of(read_runs([one, two]))
    rows = rise_grid(arms).rows
    assert rows == [
        ["run", "overlay label", "20.0 to 85.0 %", "25 ± 7 steps (2,500 samples)", None, None],
        [
            "run",
            "base label",
            "10.0 to 70.0 %",
            "40 ± 0 steps (4,000 samples)",
            "20.0 to 20.0 %",
            "not told from chance",
        ],
    ]
    html = report(monkeypatch, tmp_path / "r.html", one, two)
    assert "<h3>Which label rises first</h3>" in html
    assert any("25 ± 7 steps (2,500 samples)" in " ".join(row) for row in Page(html).rows)
    assert "## Which label rises first" in as_markdown(arms)


def test_a_label_at_chance_does_not_stand_before_one_that_rises(tmp_path: Path) -> None:
    """Half of the way between two draws of noise is reached early as often as late."""
    noise = {"probe/base/knn": [0.102, 0.106, 0.098, 0.107], "probe/base/ridge": [0.5, 0.4, 0.3, 0.2]}
    run = make(tmp_path / "run", noise | {"probe/overlay/knn": [0.1, 0.3, 0.62, 0.9]}, name="run")
    assert rise_grid(arms_of(read_runs([run]))).rows == [
        ["run", "overlay label", "10.0 to 90.0 %", "30 steps (3,000 samples)", None, None],
        ["run", "base label", "10.2 to 10.7 %", "not told from chance", "50.0 to 20.0 %", "no gain"],
    ]


def test_without_online_probes_there_is_no_such_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "run", trained={"base": [0.9]})
    assert not rise_grid(arms_of(read_runs([run]))).rows
    assert "rises first" not in report(monkeypatch, tmp_path / "r.html", run)
