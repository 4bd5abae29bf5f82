"""Which label rises first, from the online probes of several seeds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.reports.test_report import PROVENANCE, Page, make_run, probe_result, report
from trainer.probes.linear import ProbeConfig
from trainer.probes.result import ProbeResult
from trainer.reports.as_markdown import as_markdown
from trainer.reports.rises import online_num_test, rise_grid, rise_notes
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


def set_probe(run: Path, **settings: int) -> None:
    config = json.loads(RunDir(run).config.read_text())
    config["probe"] |= settings
    RunDir(run).config.write_text(json.dumps(config))


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


def test_noise_on_a_small_test_set_is_no_gain_before_and_after_a_probe(tmp_path: Path) -> None:
    """The online probe has at most the test samples that there are, of which only some may have the label."""
    noise = {"probe/overlay/knn": [0.125, 0.15, 0.195]}
    recorded = {"num_test_samples": 200}
    runs = [make(tmp_path / f"{number}", noise, name="run", provenance=recorded, seed=number) for number in range(3)]
    (row,) = rise_grid(arms_of(read_runs(runs))).rows
    assert row[3] == "not told from chance"
    large = [
        make(tmp_path / f"large{seed}", noise, name="run", provenance={"num_test_samples": 5000}, seed=seed)
        for seed in range(3)
    ]
    (row,) = rise_grid(arms_of(read_runs(large))).rows
    assert row[3] == "30 ± 0 steps (3,000 samples)"


@pytest.mark.parametrize(
    ("num_test", "labelled", "expected"),
    [(200, None, 200), (5000, None, 1024), (None, None, 1024), (200, 120, 120), (5000, 3000, 614), (None, 300, 300)],
)
def test_the_online_probe_counts_the_samples_that_it_reads(
    num_test: int | None, labelled: int | None, expected: int
) -> None:
    result = None if labelled is None else ProbeResult.model_validate(probe_result("base", 5, [0.5], labelled))
    config = ProbeConfig(online_num_test=1024)
    assert online_num_test(config, num_test=num_test, result=result) == expected


def test_the_page_says_which_curves_end_early_and_which_probes_differ_in_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise their means pass for those of equal readings of finished runs."""
    curves, facts = {"probe/base/knn": [0.1, 0.5, 0.9]}, PROVENANCE | {"num_test_samples": 200}
    runs = [make(tmp_path / f"{seed}", curves, name="run", seed=seed, provenance=facts) for seed in range(3)]
    set_probe(runs[1], online_num_test=5000)
    assert rise_notes(arms_of(read_runs(runs))) == [], "there are only 200 test samples"
    set_probe(runs[2], online_num_train=20)
    log(runs[2], {"probe/base/knn": [0.1]})
    RunDir(runs[2]).provenance.write_text('{"num_test_samples": 200}')
    sentences = [
        "Not all curves go to the end of a training: run, seed 2 at step 10 of a run that has not ended.",
        "The online probes of run differ in size, and the means mix them: 4,096 train and 200 test samples (seeds "
        "0 and 1); 20 train and 200 test samples (seed 2).",
    ]
    arms = arms_of(read_runs(runs))
    assert rise_notes(arms) == sentences
    html = report(monkeypatch, tmp_path / "r.html", *runs)
    assert all(sentence in html and sentence in as_markdown(arms) for sentence in sentences)


def test_a_label_that_only_ridge_regression_sees_rising_stands_before_those_that_do_not_rise(tmp_path: Path) -> None:
    flat = {
        "probe/base/knn": [0.5, 0.5, 0.5],
        "probe/base/ridge": [0.5, 0.5, 0.5],
        "probe/overlay/knn": [0.5, 0.5, 0.5],
    }
    run = make(tmp_path / "run", flat | {"probe/overlay/ridge": [0.1, 0.6, 0.9]}, name="run")
    assert [row[1] for row in rise_grid(arms_of(read_runs([run]))).rows] == ["overlay label", "base label"]


def test_without_online_probes_there_is_no_such_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "run", trained={"base": [0.9]})
    assert not rise_grid(arms_of(read_runs([run]))).rows
    assert "rises first" not in report(monkeypatch, tmp_path / "r.html", run)
