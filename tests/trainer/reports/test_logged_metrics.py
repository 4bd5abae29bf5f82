"""The logged metrics of a run in a report: small in memory, with every number of metrics.jsonl."""

from __future__ import annotations

import tracemalloc

from trainer.reports.logged_metrics import LoggedMetrics


def test_every_number_is_kept_at_its_step() -> None:
    entries = [{"step": 1, "train/loss": 0.5}, {"step": 10, "train/loss": 0.25, "probe/base/knn": 0.125}]

    logged = LoggedMetrics.of(entries)

    assert logged.names == ("step", "train/loss", "probe/base/knn")
    assert logged.by_step("train/loss") == {1: 0.5, 10: 0.25}
    assert logged.by_step("probe/base/knn") == {10: 0.125}
    assert logged.by_step("train/accuracy") == {}
    assert logged.last_step == 10


def test_a_run_without_a_log_has_no_last_step() -> None:
    assert LoggedMetrics.of([]) == LoggedMetrics({}, None)


def test_a_line_of_35_metrics_takes_less_than_a_kilobyte() -> None:
    # A report holds the logs of all its runs at once: 48 runs of 39,000 lines took 10 GB as dicts.
    names = [f"train/{number}" for number in range(35)]
    tracemalloc.start()
    try:
        logged = LoggedMetrics.of([{"step": step, **dict.fromkeys(names, step + 0.5)} for step in range(1000)])
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(logged.names) == 36
    assert kept < 1000 * 1000
