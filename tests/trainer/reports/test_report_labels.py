"""Reports of runs with any labels: their tables, titles and worst groups."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.trainer.reports.test_report import Page, make_run, probe_result
from trainer.probes.result import read_result
from trainer.reports.as_markdown import as_markdown
from trainer.reports.page import page
from trainer.reports.protocols import label_titles
from trainer.reports.runs import Arm, arms_of, labels_of, read_runs
from trainer.reports.tables import group_grid, results
from trainer.run_dir import RunDir, write_json

HOSTILE = "<script>x</script>"


def arms_at(*paths: Path) -> list[Arm]:
    return arms_of(read_runs(paths))


def add_groups(
    run: Path, space: str, pair: tuple[str, str], accuracy: float, *, worst: str, num_small: int = 0
) -> None:
    """Add groups to the result of a label at step 11."""
    path = RunDir(run).probes(11) / f"{space}.json"
    value: dict[str, Any] = json.loads(path.read_text())
    group = {"classes": [worst, "x"], "accuracy": accuracy, "num_test": 40}
    value["groups"] = [
        *value["groups"],
        {
            "labels": pair,
            "num_test": [[40, 3]],
            "right": {"linear": [[20, 1]], "knn": [[10, 1]]},
            "min_size": 10,
            "worst": {"linear": group},
            "num_empty": 0,
            "num_small": num_small,
            "num_unlabelled": 7,
        },
    ]
    write_json(path, value)


def test_runs_with_different_labels_are_on_one_page(tmp_path: Path) -> None:
    two = make_run(tmp_path / "two", name="two", trained={"base": [0.5], "overlay": [0.4]})
    more = make_run(
        tmp_path / "more",
        name="more",
        num_epochs=3,
        trained={"base": [0.6], "site": [0.7], "age": [0.3]},
        titles={"base": "picture", "site": "hospital", "age": "age"},
    )
    arms = arms_at(two, more)
    assert labels_of(run for arm in arms for run in arm.runs) == ["base", "overlay", "age", "site"]
    [protocol] = results(arms)
    [table] = protocol.tables
    assert table.labels == ["picture", "overlay label", "age", "hospital"]
    by_title = {row.title: [cell.accuracy for cell in row.cells[::2]] for row in table.rows if row.kind == "arm"}
    assert by_title == {"two": ["50.0", "40.0", None, None], "more": ["60.0", None, "30.0", "70.0"]}
    floors = {row.title: [cell.accuracy for cell in row.cells[::2]] for row in table.rows if row.kind == "floor"}
    assert floors["chance"] == ["10.0"] * 4
    html = page(arms)
    assert "<code>label_site</code>" in html
    assert "more ahead" not in html
    assert any("hospital" in sentence for row in Page(html).rows for sentence in row)
    assert "hospital, linear" in as_markdown(arms)


def test_labels_of_one_title_are_called_by_their_names(tmp_path: Path) -> None:
    run = make_run(
        tmp_path / "run",
        trained={"first": [0.5], "second": [0.5], "place": [0.5]},
        titles={"first": "digit", "second": "digit", "place": "place"},
    )
    titles = label_titles(arms_at(run))
    assert titles == {
        "base": "base label",
        "overlay": "overlay label",
        "first": "first label",
        "second": "second label",
        "place": "place",
    }


def test_a_label_whose_name_begins_with_that_of_another_is_another(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", trained={"base": [0.5], "base_2": [0.25]})
    [arm] = arms_at(run)
    assert [probe.linear.accuracy for probe in arm.trained("base")] == [0.5]
    assert [probe.linear.accuracy for probe in arm.trained("base_2")] == [0.25]


def test_the_worst_groups_are_means_over_seeds_in_a_table_of_their_own(tmp_path: Path) -> None:
    runs = []
    for seed, accuracy in enumerate((0.2, 0.4)):
        run = make_run(tmp_path / str(seed), seed=seed, trained={"base": [0.9], "site": [0.9]})
        add_groups(run, "base", ("base", "site"), accuracy, worst=HOSTILE, num_small=1)
        add_groups(run, "site", ("base", "site"), accuracy, worst=f"w{seed}")
        runs.append(run)
    arms = arms_at(*runs)
    base, site = group_grid(arms).rows
    assert base[1:] == [
        "base label",
        "base label × site label",
        "30.0 ± 14.1",
        f"{HOSTILE} · x (40)",
        None,
        "",
        "1 of fewer than 10 samples, 7 samples without a label",
    ]
    assert site[3:5] == ["30.0 ± 14.1", "differs between seeds"]
    html = page(arms)
    assert "Worst groups" in html
    assert HOSTILE not in html
    assert "Test accuracy in % in the worst group" in as_markdown(arms)


def test_results_from_before_there_were_groups_are_read(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", trained={"base": [0.5], "overlay": [0.4]})
    for path in RunDir(run).probes(11).glob("*.json"):
        value = json.loads(path.read_text())
        for name in ("groups", "num_unlabelled"):
            del value[name]
        for name in ("labels", "groups", "min_group_size"):
            del value["probe_config"][name]
        path.write_text(json.dumps(value))
        assert read_result(path).groups == ()
    config = json.loads(RunDir(run).config.read_text())
    for name in ("labels", "groups", "min_group_size"):
        del config["probe"][name]
    RunDir(run).config.write_text(json.dumps(config))
    arms = arms_at(run)
    assert group_grid(arms).rows == []
    html = page(arms)
    assert "Worst groups" not in html
    assert "There are more labels" not in html
    assert probe_result("base", 11, [0.5], 10)["groups"] == []
