"""The page of a report: the picture, the sentence, what it holds, and the command that writes it."""

from __future__ import annotations

import base64
import csv
import json
import re
import shutil
import sys
from collections.abc import Iterator
from html import unescape
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.metrics import balanced_accuracy_score, confusion_matrix

from configs import debug
from configs.sweep import resolve_sweep
from data_pipeline.core.errors import UserError
from tests.trainer.observability.stand_in_wandb import StandIn, stand_in_server
from tests.trainer.reports.made_runs import PROVENANCE, Page, make_run, report, samples
from trainer.report import main
from trainer.run_dir import RunDir, write_json

TITLES = {"base": "picture", "overlay": "digit"}
HOSTILE = '"><img src=x onerror=alert(1)>|`*_[a](javascript:1)'


@pytest.fixture
def two_encoders(tmp_path: Path) -> list[Path]:
    """Return the runs of two encoders with two seeds; the viewmaker reads the digit better, and not the picture."""
    return [
        make_run(
            tmp_path / f"{recipe.__name__}{seed}",
            recipe=recipe,
            seed=seed,
            titles=TITLES,
            right={
                "base": samples(0.45, num_test=1000, seed=seed),
                "overlay": samples(digit, num_test=1000, seed=10 + seed),
            },
            untrained={"base": [0.215], "overlay": [0.33]},
        )
        for recipe, digit in ((debug.image, 0.57), (debug.viewmaker, 0.71))
        for seed in (0, 1)
    ]


def text_of(html: str) -> str:
    """Return the words of a page."""
    return " ".join(unescape(re.sub(r"<style>.*?</style>|<[^>]*>", " ", html, flags=re.DOTALL)).split())


def test_first_comes_a_picture_with_every_accuracy_and_then_one_sentence(
    two_encoders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    html = report(monkeypatch, tmp_path / "r.html", *two_encoders)
    row = Page(html).row("debug-viewmaker")
    assert re.fullmatch(r"71\.0 ± \d\.\d sd 0\.0", row[5])
    assert re.fullmatch(r"70\.0 ± \d\.\d sd 0\.0", row[7])
    assert [row[6][:6], row[8][:6], *row[-2:]] == ["33.0 ±", "32.0 ±", "0, 1", "11"]
    first = html[: html.index("<h2>")]
    panels = re.findall(r'<figure class="panel">.*?</figure>', first, flags=re.DOTALL)
    assert [re.findall(r"<b>([\d.]+)</b>", panel) for panel in panels] == [
        ["45.0", "45.0"],
        ["44.0", "44.0"],
        ["57.0", "71.0"],
        ["56.0", "70.0"],
    ]
    for panel, untrained in zip(panels, ("21.50%", "20.50%", "33.00%", "32.00%"), strict=True):
        assert panel.count(f'class="dot ring" style="left:{untrained}"') == 2
        assert panel.count('class="chance" style="left:10.00%"') == 2
        assert panel.count('class="interval"') == 4
    (sentence,) = re.findall(r'<p class="verdict">(.*?)</p>', first, flags=re.DOTALL)
    assert text_of(sentence).count(".") - len(re.findall(r"\d\.\d", sentence)) == 1
    lead = r"debug-viewmaker is ahead of debug-image by 14\.0 ± \d\.\d points"
    digit = rf"on the digit, by linear probe {lead} and by kNN \(k = 200\) {lead}\."
    untold = r"On the picture, by linear probe debug-image \(45\.0 ± \d\.\d %\) is not told apart from debug-viewmaker"
    assert re.search(untold, text_of(sentence))
    assert re.search(digit, text_of(sentence))


def test_what_training_has_suppressed_is_said_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By kNN a digit falls below the untrained encoder, while the linear probe still reads it."""
    accuracies = {"base": [0.4], "overlay": [0.57]}
    run = make_run(tmp_path / "run", trained=accuracies, untrained={"base": [0.2], "overlay": [0.5]}, titles=TITLES)
    for step, accuracy in ((0, 0.33), (11, 0.167)):
        path = RunDir(run).probes(step) / "overlay.json"
        result = json.loads(path.read_text())
        write_json(path, result | {"knn": result["knn"] | {"accuracy": accuracy, "num_neighbors": 62}})
    html = report(monkeypatch, tmp_path / "r.html", run)
    first = text_of(html[: html.index("<h2>")])
    assert re.search(r"on the digit, debug-image reads 57\.0 ± \d\.\d % by linear probe \(untrained 50\.0 %", first)
    assert re.search(r"and 16\.7 ± \d\.\d % by kNN \(k = 62\) \(untrained 33\.0 %, chance 10\.0 %\)", first)
    (said,) = re.findall(r"Below its untrained encoder: ([^;]*?points)\.", first)
    assert re.fullmatch(r"debug-image on the digit by kNN \(k = 62\), by 16\.3 ± \d\.\d points", said)


def test_one_file_that_needs_nothing_else_and_is_the_same_again(
    two_encoders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {path: path.read_bytes() for run in two_encoders for path in run.rglob("*") if path.is_file()}
    html = report(monkeypatch, tmp_path / "first.html", *two_encoders)
    page = Page(html)
    assert page.references
    assert all(reference.startswith(("data:image/png;base64,", "#")) for reference in page.references)
    assert not {"script", "link", "iframe", "object", "embed", "base"} & set(page.tags)
    assert "@import" not in html
    assert set(re.findall(r"url\(([^)]?)", html)) <= {"#"}
    assert page.tags.count("img") == 2  # the views of each encoder
    assert page.tags.count("svg") == 1  # the loss
    assert report(monkeypatch, tmp_path / "second.html", *two_encoders) == html
    assert {path: path.read_bytes() for run in two_encoders for path in run.rglob("*") if path.is_file()} == before


def test_settings_and_commits_that_differ_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = make_run(tmp_path / "a", trained={"base": [0.4]}, name="a", num_epochs=2, global_batch_size=8)
    start = {
        "git_commit": "fedcba9876543210",
        "git_diff_sha256": "1" * 64,
        "world_size": 4,
        "command": "go on",
        "start_step": 1,
    }
    provenance = PROVENANCE | {"starts": [{"command": "begin", "world_size": 2, "start_step": 0}, start]}
    second = make_run(
        tmp_path / "b", trained={"base": [0.5]}, name="b", num_epochs=7, global_batch_size=4, provenance=provenance
    )
    page = Page(report(monkeypatch, tmp_path / "r.html", first, second))
    assert page.row("num_epochs")[1:] == ["2", "7"]
    assert not [row for row in page.rows if row and row[0].strip() == "objective.temperature"]
    rows = [[" ".join(cell.split()) for cell in row] for row in page.rows]
    head = next(row for row in rows if "commit" in row)
    of_second = dict(zip(head, next(row for row in rows if row[0] == "b" and len(row) == len(head)), strict=True))
    assert of_second["commit"] == "0123456789ab, then fedcba987654 with uncommitted changes"
    assert (of_second["ranks"], of_second["command"]) == ("2, then 4", "begin, then go on")
    assert page.row("processor")[1] == "A Processor, 2 CPUs"
    assert page.row("wall time")[1] == "1 h 2 min"
    assert page.row("samples a second")[1] == "106"
    assert page.row("train manifest")[1] == "a" * 12


def add_confusion(run: Path, right_N: NDArray[np.int64], read_N: NDArray[np.int64]) -> None:
    """Add to the result of the label base which class is read in how many samples of which class, by a loop."""
    path = RunDir(run).probes(11) / "base.json"
    counts: dict[tuple[int, int], int] = {}
    for pair in zip(right_N.tolist(), read_N.tolist(), strict=True):
        counts[pair] = counts.get(pair, 0) + 1
    result = json.loads(path.read_text())
    write_json(path, result | {"confusion": {"linear": [[*pair, num] for pair, num in counts.items()]}})
    by_another = result["probe_config"] | {"batch_norm": "train"}
    write_json(path.with_stem("base-batch_norm_train"), result | {"probe_config": by_another})


@pytest.mark.parametrize("uneven", [False, True])
def test_confusions_are_those_of_all_seeds_and_balanced_accuracies_of_uneven_classes(
    uneven: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = np.random.default_rng(0)
    right_N = np.repeat(np.arange(10), [300, *[60] * 8, 20] if uneven else 100)
    runs, of_seeds = [], []
    for seed in (0, 1):
        read_N = np.where(draw.random(len(right_N)) < 0.5, right_N, draw.integers(0, 10, len(right_N)))
        run = make_run(tmp_path / f"seed{seed}", seed=seed, trained={"base": [float((read_N == right_N).mean())]})
        add_confusion(run, right_N, read_N)
        runs.append(run)
        of_seeds.append(read_N)
    page = Page(report(monkeypatch, tmp_path / "r.html", *runs, "--csv", str(tmp_path / "t.csv")))
    expected_KK = 100 * confusion_matrix(np.tile(right_N, 2), np.concatenate(of_seeds), normalize="true")
    for number, expected_K in enumerate(expected_KK):
        [row] = [row[1:] for row in page.rows if row[0].strip() == str(number)]
        shown = [float(cell.strip() or 0) for cell in row]
        np.testing.assert_allclose(shown, expected_K, atol=0.5)
    balanced = [balanced_accuracy_score(right_N, read_N) for read_N in of_seeds]
    rows = [row for row in csv.DictReader((tmp_path / "t.csv").open()) if row["readout"] == "linear, balanced"]
    assert [float(row["value"]) for row in rows] == (pytest.approx(balanced) if uneven else [])
    found = [row[-1].strip() for row in page.rows if row[:2] == ["debug-image ", "base label "]]
    assert found == ([f"{100 * np.mean(balanced):.1f}"] if uneven else [])
    monkeypatch.setattr("trainer.reports.page._MOST_CLASSES", 9)
    assert "Confusions" not in report(monkeypatch, tmp_path / "r.html", *runs)


def test_a_run_without_a_probe_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probed, bare = (
        make_run(tmp_path / "a", trained={"base": [0.4]}, name="a"),
        make_run(tmp_path / "b", name="b", num_epochs=9),
    )
    assert "Without a probe of a trained encoder: b;" in text_of(report(monkeypatch, tmp_path / "r.html", probed, bare))
    html = report(monkeypatch, tmp_path / "b.html", bare)
    assert "No run has been probed yet" in text_of(html)


def test_names_are_text_not_markup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = PROVENANCE | {"command": "train <i>x</i>"}
    titles = {"base": HOSTILE}
    run = make_run(tmp_path / "<b>run</b>", provenance=command, trained={"base": [0.4]}, titles=titles)
    html = report(monkeypatch, tmp_path / "r.html", run)
    assert "<i>x" not in html
    assert "<b>run" not in html
    assert "<img src=x" not in html
    assert "&lt;i&gt;x" in html


def test_views_and_analyses_of_another_test_set_are_left_out_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = RunDir(make_run(tmp_path / "run", trained={"base": [0.452]}))
    (run_dir.analysis / "filters.png").write_bytes((run_dir.analysis / "views.png").read_bytes())
    write_json(run_dir.analysis / "filters.json", {"silhouette": 0.25, "test_manifest_sha256": "b" * 64})
    html = report(monkeypatch, tmp_path / "before.html", run_dir.path)
    assert html.count("<img") == 2
    png = base64.b64decode(re.findall(r'base64,([^"]*)"', html)[0])
    assert png == (run_dir.analysis / "views.png").read_bytes()
    for path in run_dir.all_probes.rglob("*.json"):
        write_json(path, json.loads(path.read_text()) | {"test_manifest_sha256": "d" * 64})
    html = report(monkeypatch, tmp_path / "out.html", run_dir.path)
    assert "<img" not in html
    for name in ("views", "filters"):
        assert f"{run_dir.analysis / name}.json is of another test set" in text_of(html)


def test_a_sweep_is_drawn_over_its_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, runs = resolve_sweep("debug:image", ["objective.temperature=0.05,0.1"])
    paths = []
    for number, config in enumerate(runs):
        accuracy = 0.3 + 0.02 * number
        paths.append(
            make_run(tmp_path / f"run{number}", recipe=lambda config=config: config, trained={"base": [accuracy]})
        )
    html = report(monkeypatch, tmp_path / "r.html", *paths)
    assert "Over the settings of the sweep" in html
    assert "by temperature</figcaption>" in html
    for path in paths:
        shutil.rmtree(RunDir(path).all_probes)
        RunDir(path).metrics.write_text('{"step": 5, "probe/base/knn": 0.5}\n')
    assert "kNN of the base label, %, by temperature" in report(monkeypatch, tmp_path / "online.html", *paths)


def test_a_damaged_result_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, out = make_run(tmp_path / "run", trained={"base": [0.4]}), tmp_path / "out.html"
    (run / "probes" / "step_00000011" / "base.json").write_text("[]")
    with pytest.raises(UserError, match=r"base\.json"):
        report(monkeypatch, out, run)
    assert not out.exists()


def test_the_command_writes_beside_one_run_and_reads_a_study_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "study" / "run", trained={"base": [0.4]})
    monkeypatch.setattr(sys, "argv", ["report", str(run), str(tmp_path / "study"), "--csv", str(tmp_path / "t.csv")])
    main()
    assert (run / "report.html").is_file()
    assert len((tmp_path / "t.csv").read_text().splitlines()) == 3
    make_run(tmp_path / "study" / "inner" / "run")
    main()
    assert "left out" in capsys.readouterr().err


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    with stand_in_server(monkeypatch) as stand_in:
        yield stand_in


@pytest.mark.slow
def test_the_report_at_wandb_is_made_once_and_then_renewed(
    server: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    internal = pytest.importorskip("wandb_workspaces.reports.v2.internal")
    runs = [
        make_run(tmp_path / f"seed{seed}", seed=seed, trained={"base": [0.4]}, tracking={"wandb_project": "mine"})
        for seed in (0, 1)
    ]
    for run in runs:
        RunDir(run).wandb_run_id.write_text(f"id-{run.name}\n")
    page = tmp_path / "r.html"
    monkeypatch.setattr(sys, "argv", ["report", *map(str, runs), "--out", str(page), "--wandb"])
    main()
    address = capsys.readouterr().out.splitlines()[-1]
    assert address.startswith(f"{server.url}/someone/mine/reports/")
    assert json.loads((tmp_path / "r.html.wandb.json").read_text())["url"] == address
    main()
    ((_, view),) = server.views.items()
    spec = internal.Spec.model_validate_json(view["spec"])
    texts = [block.content for block in spec.blocks if isinstance(block, internal.MarkdownBlock)]
    assert re.search(
        r"^\| debug-image \| 40\.0 ± \d\.\d \| +\| 39\.0 ± \d\.\d \| +\| 0, 1 \| 11 \|$", texts[0], flags=re.MULTILINE
    )
    (sent_page,) = [block for block in spec.blocks if isinstance(block, internal.PanelGrid)]
    ((report_id, report_run),) = server.runs.items()
    assert report_run.job_type == "report"
    assert sent_page.metadata.run_sets[0].filters["filters"][0]["value"] == [report_id]
    sent = [name for name in report_run.files if name.startswith("media/html/report_")]
    assert report_run.files[sent[-1]] == page.read_bytes()


@pytest.mark.parametrize("lacks", ["library", "login"])
def test_without_library_or_login_the_page_is_there_and_one_sentence(
    lacks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if lacks == "library":
        monkeypatch.setitem(sys.modules, "wandb_workspaces", None)
    monkeypatch.setattr("wandb.login", lambda prompt: False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    run, page = make_run(tmp_path / "run", trained={"base": [0.4]}), tmp_path / "r.html"
    monkeypatch.setattr(sys, "argv", ["report", str(run), "--out", str(page), "--wandb"])
    with pytest.raises(UserError, match=r"reports\]'" if lacks == "library" else "login"):
        main()
    assert page.is_file()


@pytest.mark.slow
def test_wandb_offline_keeps_the_very_page_for_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, out = make_run(tmp_path / "run", trained={"base": [0.4]}), tmp_path / "out" / "report.html"
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(sys, "argv", ["report", str(run), "--out", str(out), "--wandb"])
    main()
    [logged] = (out.parent / "wandb").glob("offline-run-*/files/media/html/*.html")
    assert logged.read_bytes() == out.read_bytes()
