"""Runs in the published tables, runs of several datasets, Markdown, and the W&B report."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from configs.resolve import resolve_study
from data_pipeline.core.errors import UserError
from tests.trainer.observability.stand_in_wandb import StandIn, stand_in_server
from tests.trainer.reports.test_report import PROVENANCE, Page, make_run, probe_result, report
from trainer.report import main
from trainer.reports.findings import Score
from trainer.reports.published import PAIRS, study
from trainer.reports.runs import arms_of, datasets_of, read_runs
from trainer.reports.study_sheet import FilledCell, fill, missing_commands, summary
from trainer.run_dir import RunDir, write_json

HOSTILE = '"><img src=x onerror=alert(1)>|`*_[a](javascript:1)'


def study_run(directory: Path, name: str, run: str, *, seed: int = 0, num_train: int = 5000, **numbers: Any) -> Path:
    """Make a run of a study in its own directory, with chosen accuracies."""
    config = next(one for one in resolve_study(f"studies:{name}") if one.name == run)
    path = make_run(directory / f"{run}-seed{seed}", recipe=lambda: config, seed=seed, **numbers)
    for result in path.rglob("probes/*/*.json"):
        value = json.loads(result.read_text())
        value["num_train"] = num_train
        value["probe_config"]["num_epochs"] = 100
        write_json(result, value)
    return path


def test_at_paper_scale_a_cell_has_ours_the_papers_and_the_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accuracies = {0: 0.58, 1: 0.60}
    (tmp_path / "runs").mkdir()
    for seed, accuracy in accuracies.items():
        study_run(
            tmp_path / "runs",
            "table1",
            "simclr-cifar10_digits",
            seed=seed,
            num_train=50_000,
            trained={"base": [accuracy], "overlay": [0.8]},
        )
    monkeypatch.setattr(
        sys,
        "argv",
        ["report", "--study", "table1", str(tmp_path / "runs"), "--out", str(tmp_path / "r.html"), "--markdown"],
    )
    main()
    row = Page((tmp_path / "r.html").read_text()).row("C+Digits")
    assert row[1] == "59.0 ± 1.4 paper 58.8 +0.2"
    assert row[2] == "not measured: no run paper 69.3"
    assert row[3] == "80.0 ± 0.0 paper 86.7 −6.7"
    markdown = (tmp_path / "r.md").read_text()
    assert "59.0 ± 1.4; paper 58.8; +0.2" in markdown
    assert "2 of the 14 cells are measured." in markdown
    assert "python launch/slurm.py --study studies:table1" in markdown


def test_at_another_scale_no_level_is_compared_but_directions_are(tmp_path: Path) -> None:
    directory = tmp_path / "runs"
    directory.mkdir()
    paths = [
        study_run(directory, "table1_small", f"{player}-cifar10_digits-small", seed=seed, trained=trained)
        for player, trained in (
            ("simclr", {"base": [0.5], "overlay": [0.2]}),
            ("viewmaker", {"base": [0.4], "overlay": [0.7]}),
        )
        for seed in (0, 1, 2)
    ]
    sheet = fill(study("table1_small"), read_runs(paths))
    cell = sheet.cells["C+Digits", 1]
    assert str(cell.score) == "40.0 ± 0.0"
    assert cell.difference is None
    assert "resnet10 instead of resnet18_small" in cell.unlike
    assert "5,000 instead of 50,000 train samples" in cell.unlike
    told = " ".join(summary(sheet))
    assert "4 of the 14 cells are measured" in told
    assert "levels are not comparable and no difference from a published number is shown" in told
    directions = {one.name: one for one in sheet.compared}
    photo, drawn = (directions[f"C+Digits, {group}: viewmaker − expert views"] for group in ("CIFAR-10", "object"))
    assert (photo.contrast.points, photo.direction) == (10.5, "opposite")
    assert photo.points == pytest.approx(-10)
    assert (drawn.contrast.points, drawn.direction) == (7.6, "same")
    assert drawn.points == pytest.approx(50)
    assert directions["C+Letters, object: viewmaker − expert views"].direction == "not measured"
    assert "1 same, 1 opposite, 10 not measured" in told


def test_a_full_size_name_does_not_make_a_small_run_comparable(tmp_path: Path) -> None:
    path = study_run(tmp_path, "table1", "simclr-cifar10", num_train=50_000, trained={"base": [0.5]})
    config = json.loads((path / "config.json").read_text())
    write_json(path / "config.json", config | {"num_epochs": 3})
    (cell,) = [one for one in fill(study("table1"), read_runs([path])).cells.values() if one.runs]
    assert cell.unlike == ("3 instead of 200 epochs",)
    assert cell.difference is None


@pytest.mark.parametrize(
    ("changed", "unlike"),
    [
        ({"objective": {"temperature": 0.5}}, ("objective.temperature 0.5 instead of 0.07",)),
        ({"data": {"overlay": "baked"}}, ("data.overlay baked instead of online",)),
        (
            {"optimizer": {"learning_rate": 1.0, "momentum": 0.5, "weight_decay": 0.0}, "views": {"budget": 0.4}},
            (
                "views.budget 0.4 instead of 0.05",
                "optimizer.learning_rate 1 instead of 0.03",
                "optimizer.momentum 0.5 instead of 0.9",
                "optimizer.weight_decay 0 instead of 0.0001",
            ),
        ),
        ({"precision": "bfloat16", "memory": {"encoder_checkpointing": 1}, "data": {"num_workers": 3}}, ()),
    ],
)
def test_a_run_with_other_settings_than_its_recipe_is_not_compared_with_the_papers_level(
    changed: dict[str, Any], unlike: tuple[str, ...], tmp_path: Path
) -> None:
    path = study_run(tmp_path, "table1", "viewmaker-cifar10_digits", num_train=50_000, trained={"base": [0.5]})
    config = json.loads((path / "config.json").read_text())
    merged = {key: {**config[key], **value} if isinstance(value, dict) else value for key, value in changed.items()}
    write_json(path / "config.json", config | merged)
    cell, _ = [one for one in fill(study("table1"), read_runs([path])).cells.values() if one.runs]
    assert cell.unlike == unlike
    assert (cell.difference is None) == bool(unlike)


def test_a_probe_with_other_settings_than_the_recipes_is_not_compared_with_the_papers_level(tmp_path: Path) -> None:
    path = study_run(tmp_path, "table1", "simclr-cifar10", num_train=50_000, trained={"base": [0.5]})
    for result in path.rglob("probes/*/*.json"):
        value = json.loads(result.read_text())
        write_json(
            result, value | {"probe_config": value["probe_config"] | {"learning_rate": 1.0, "batch_norm": "train"}}
        )
    (cell,) = [one for one in fill(study("table1"), read_runs([path])).cells.values() if one.runs]
    assert cell.unlike == ("probe.learning_rate 1 instead of 0.01",)


def test_where_the_recipes_are_not_the_published_code_a_sentence_says_so(tmp_path: Path) -> None:
    drawn = study_run(tmp_path, "table1", "viewmaker-cifar10", num_train=50_000, trained={"base": [0.5]})
    expert = study_run(tmp_path, "table1", "simclr-cifar10", num_train=50_000, trained={"base": [0.5]})
    said = "Unlike the published code, the runs with a viewmaker clamp the views and train both players in one pass"
    assert said in " ".join(summary(fill(study("table1"), read_runs([drawn, expert]))))
    assert "published code, the runs" not in " ".join(summary(fill(study("table1"), read_runs([expert]))))
    config = json.loads((drawn / "config.json").read_text())
    alternating = {"adversary": config["adversary"] | {"update": "alternating"}}
    write_json(drawn / "config.json", config | alternating | {"views": config["views"] | {"clamp": False}})
    assert "published code, the runs" not in " ".join(summary(fill(study("table1"), read_runs([drawn]))))


@pytest.mark.parametrize(("finished", "what"), [(99, "step 11 of 99"), (None, "step 11 of a run that has not ended")])
def test_a_run_that_was_probed_before_its_end_is_not_compared_with_the_papers_level(
    finished: int | None, what: str, tmp_path: Path
) -> None:
    path = study_run(tmp_path, "table1", "simclr-cifar10", num_train=50_000, trained={"base": [0.5]})
    facts = {name: value for name, value in PROVENANCE.items() if name != "finished_step"}
    write_json(path / "provenance.json", facts | ({} if finished is None else {"finished_step": finished}))
    (cell,) = [one for one in fill(study("table1"), read_runs([path])).cells.values() if one.runs]
    assert cell.unlike == (f"probed at {what}",)
    assert cell.difference is None


def test_knn_tables_take_the_best_checkpoint_as_the_paper_does(tmp_path: Path) -> None:
    path = study_run(tmp_path, "richness", "moco-cifar10-abcde", num_train=50_000, trained={"base": [0.5]})
    for step, accuracy in ((5, 0.9), (8, 0.7)):
        write_json(RunDir(path).probes(step) / "base.json", probe_result("base", step, [accuracy], 1000))
    (cell,) = [one for one in fill(study("richness"), read_runs([path])).cells.values() if one.runs]
    assert cell.num_checkpoints == 3
    assert cell.score is not None
    assert cell.score.mean == pytest.approx(0.89)  # its kNN is 0.01 below


def test_votes_during_the_training_count_on_the_samples_that_the_run_records(tmp_path: Path) -> None:
    """The settings are only the most samples: the error is that of the test set, and a small train set is named."""
    probe = {"online_every_steps": 4, "online_num_train": 50_000, "online_num_test": 10_000}
    path = study_run(tmp_path, "richness", "moco-cifar10-abcde")
    run_dir = RunDir(path)
    config = json.loads(run_dir.config.read_text())
    write_json(run_dir.config, config | {"probe": config["probe"] | probe})
    votes = {0: 0.9, 4: 0.5, 8: 0.6}
    lines = (json.dumps({"step": step, "probe/base/knn": vote}) for step, vote in votes.items())
    run_dir.metrics.write_text("\n".join(lines) + "\n")

    def measured() -> FilledCell:
        (cell,) = [one for one in fill(study("richness"), read_runs([path])).cells.values() if one.runs]
        return cell

    facts = {name: value for name, value in run_dir.read_provenance().items() if not name.startswith("num_")}
    write_json(run_dir.provenance, facts)
    assert measured().missing == "not measured: no probe"
    for num_train, unlike in ((50_000, ()), (256, ("256 instead of 50,000 train samples",))):
        write_json(run_dir.provenance, facts | {"num_train_samples": num_train, "num_test_samples": 128})
        cell = measured()
        assert cell.score == Score((0.6,), 128)
        assert cell.num_checkpoints == 2
        assert tuple(text for text in cell.unlike if "samples" in text) == unlike
    write_json(run_dir.provenance, facts | {"num_train_samples": 50_001, "num_test_samples": 128})
    assert measured().score is None  # not all train samples took part


def test_votes_of_the_embedding_do_not_count_for_those_of_the_features(tmp_path: Path) -> None:
    path = study_run(tmp_path, "richness", "moco-cifar10-abcde", num_train=50_000, trained={"base": [0.5]})
    other = probe_result("base", 8, [0.9], 1000)
    write_json(
        RunDir(path).probes(8) / "base-reads_embedding.json",
        other | {"probe_config": other["probe_config"] | {"reads": "embedding"}},
    )
    (cell,) = [one for one in fill(study("richness"), read_runs([path])).cells.values() if one.runs]
    assert cell.score is not None
    assert cell.score.mean == pytest.approx(0.49)


@pytest.mark.parametrize(("sign", "told"), [(1, " 1.00 at δ = 9 (p < 0.001)"), (-1, "−1.00 at δ = 9 (p < 0.001)")])
def test_errors_of_pairs_are_set_beside_their_concentration(sign: int, told: str, tmp_path: Path) -> None:
    errors = {pair: 0.3 + 0.02 * number for number, pair in enumerate(reversed(PAIRS))}
    directory = tmp_path / "runs"
    directory.mkdir()
    for pair, error in errors.items():
        study_run(directory, "pairs", f"simclr-huang-cifar10-{pair}-200epochs", trained={"base": [1 - error]})

    def sentence() -> str:
        (found,) = (
            one for one in summary(fill(study("pairs"), read_runs(sorted(directory.iterdir())))) if "1 − σ" in one
        )
        return found

    assert "python -m trainer.analyze concentration" in sentence()
    run = sorted(directory.iterdir())[0]
    bounds = {"delta": 9.0, "clique_worst": 1.0, "cover": 1.0, "cover_worst": 1.0, "at_least": 0.0}
    result = {
        "config": {"deltas": [9.0]},
        "seed": 0,
        "num_classes": 10,
        "num_pictures": 500,
        "pairs": {pair: [bounds | {"clique": 0.5 + sign * error / 2}] for pair, error in errors.items()},
        "order": [],
        "ad_is_lowest": [],
        "test_manifest_sha256": read_runs([run])[0].data_key[1],
    }
    write_json(RunDir(run).analysis / "concentration.json", result)
    assert told in sentence()
    alike = {pair: [bounds | {"clique": 0.5}] for pair in PAIRS}
    write_json(RunDir(run).analysis / "concentration.json", result | {"pairs": alike})
    assert "none at δ = 9, because all pairs have the same value" in sentence()
    write_json(RunDir(run).analysis / "concentration.json", result | {"test_manifest_sha256": "other"})
    assert "was made from other test data" in sentence()


@pytest.mark.parametrize(
    ("pairs", "title"),
    [
        (PAIRS[:2], "simclr-huang-cifar10-ab-200epochs, simclr-huang-cifar10-ac-200epochs ·"),
        (PAIRS, "10 configurations, 10 runs ·"),
    ],
)
def test_under_the_title_are_the_names_or_how_many(
    pairs: tuple[str, ...], title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [
        study_run(tmp_path, "pairs", f"simclr-huang-cifar10-{pair}-200epochs", trained={"base": [0.5]})
        for pair in pairs
    ]
    assert f'<p class="subtitle">{title}' in report(monkeypatch, tmp_path / "r.html", *runs)


def test_what_could_fill_a_cell_in_two_ways_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first = study_run(tmp_path / "a", "table1", "simclr-cifar10", trained={"base": [0.5]})
    second = study_run(tmp_path / "b", "table1", "simclr-cifar10", trained={"base": [0.6]})
    with pytest.raises(UserError, match=r"are the same run, with seed 0; leave one out"):
        fill(study("table1"), read_runs([first, second]))
    config = json.loads((second / "config.json").read_text())
    write_json(second / "config.json", config | {"keep_checkpoints": 9})
    with pytest.raises(UserError, match=r"are the same run, with seed 0; leave one out"):
        fill(study("table1"), read_runs([first, second]))
    write_json(second / "config.json", config | {"num_epochs": 3})
    with pytest.raises(UserError, match=r"both called simclr-cifar10 but differ in num_epochs; leave one out"):
        fill(study("table1"), read_runs([first, second]))


def test_a_run_without_probe_and_one_of_no_cell_are_named(tmp_path: Path) -> None:
    bare = study_run(tmp_path, "table1", "simclr-cifar10")
    other = make_run(tmp_path / "other", trained={"base": [0.5]})
    sheet = fill(study("studies:table1"), read_runs([bare, other]))
    assert sheet.cells["CIFAR-10", 0].missing == "not measured: no probe"
    assert f"python -m trainer.probe {bare}" in missing_commands(sheet)
    assert "The table has no cell for debug-image." in summary(sheet)
    with pytest.raises(UserError, match='there is no study "tabel1"; did you mean "table1"'):
        study("tabel1")


def test_runs_of_different_datasets_are_in_tables_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = make_run(tmp_path / "one", name="one", num_epochs=3, trained={"base": [0.9]}, untrained={"base": [0.1]})
    two = make_run(tmp_path / "two", name="two", trained={"base": [0.5]})
    for path in two.rglob("probes/*/*.json"):
        write_json(path, json.loads(path.read_text()) | {"train_manifest_sha256": "c" * 64})
    arms = arms_of(read_runs([one, two]))
    assert [[arm.name for arm in dataset.arms] for dataset in datasets_of(arms)] == [["one"], ["two"]]
    html = report(monkeypatch, tmp_path / "r.html", one, two)
    assert "The runs are of 2 datasets" in html
    assert "is ahead of" not in html
    page = Page(html)
    assert page.row("one")[1] == "90.0 +80.0 best 90.0, epoch 1"
    assert page.row("two")[1] == "50.0 best 50.0, epoch 1"  # the other's untrained encoder saw other data
    assert [row[0].strip() for row in page.rows].count("chance") == 2


def test_equal_data_at_other_places_are_one_dataset(tmp_path: Path) -> None:
    paths = [make_run(tmp_path / f"seed{seed}", seed=seed, trained={"base": [0.5]}) for seed in (0, 1)]
    config = json.loads((paths[1] / "config.json").read_text())
    config["data"]["train_dir"] = "/elsewhere/train"
    write_json(paths[1] / "config.json", config)
    (arm,) = arms_of(read_runs(paths))
    assert len(arm.runs) == 2


def test_pictures_of_analyses_are_shown_once_with_their_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [
        make_run(tmp_path / name, name=name, trained={"base": [0.5]}, num_epochs=n) for n, name in enumerate("ab", 2)
    ]
    for run in runs:
        (run / "analysis" / "feature_dropout.png").write_bytes((run / "analysis" / "views.png").read_bytes() + b"end")
        write_json(run / "analysis" / "feature_dropout.json", {"runs": [{"accuracy": 0.123456}], "config": {"bins": 7}})
    html = report(monkeypatch, tmp_path / "r.html", *runs)
    assert html.count("<h3>feature dropout: a, b</h3>") == 1
    assert Page(html).row("runs.1.accuracy")[1] == "0.1235"
    assert "config.bins" not in html


def test_many_runs_first_say_what_is_the_same_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [
        make_run(
            tmp_path / f"run{n}", seed=n, provenance=PROVENANCE | {"wall_seconds": 60.0 * n}, trained={"base": [0.5]}
        )
        for n in range(1, 6)
    ]
    page = Page(report(monkeypatch, tmp_path / "r.html", *runs))
    assert page.row("processor") == ["processor", "A Processor, 2 CPUs"]
    own = page.row("debug-image, seed 3")
    assert "3 min 0 s" in own


def test_markdown_of_hostile_names_stays_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    titles = {"base": HOSTILE, "overlay": "digit"}
    run = make_run(tmp_path / "run", titles=titles, trained={"base": [0.4]})
    monkeypatch.setattr(sys, "argv", ["report", str(run), "--out", str(tmp_path / "r.html"), "--markdown"])
    main()
    html, markdown = (tmp_path / "r.html").read_text(), (tmp_path / "r.md").read_text()
    assert "<img src=x" not in html
    assert "<img" not in markdown.replace("\\<img", "")
    (line,) = [line for line in markdown.splitlines() if "| 40.0 |" in line]
    assert len([cell for cell in line.replace("\\|", "").split("|") if cell]) == 4
    main()
    assert (tmp_path / "r.md").read_text() == markdown


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
    titles = [block.children[0].text for block in spec.blocks if isinstance(block, internal.Heading)]
    assert titles[:4] == ["What was found", "Results", "Curves", "Views and analyses"]
    texts = [block.content for block in spec.blocks if isinstance(block, internal.MarkdownBlock)]
    assert any("| debug-image | 0, 1 | 40.0 ± 0.0 |" in text for text in texts)
    curves, media = [block for block in spec.blocks if isinstance(block, internal.PanelGrid)]
    (runset,) = curves.metadata.run_sets
    assert runset.project.name == "mine"
    assert runset.filters["filters"][0]["value"] == ["id-seed0", "id-seed1"]
    metrics = [panel.config.metrics for panel in curves.metadata.panel_bank_section_config.panels]
    assert metrics == [["train/loss"], ["perf/samples_per_second"]]
    ((report_id, report_run),) = server.runs.items()
    assert report_run.job_type == "report"
    assert media.metadata.run_sets[0].filters["filters"][0]["value"] == [report_id]
    sent = [name for name in report_run.files if name.startswith("media/html/report_")]
    assert report_run.files[sent[-1]] == page.read_bytes()


def test_without_the_library_the_page_is_there_and_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb_workspaces.reports.v2", None)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    run, page = make_run(tmp_path / "run", trained={"base": [0.4]}), tmp_path / "r.html"
    monkeypatch.setattr(sys, "argv", ["report", str(run), "--out", str(page), "--wandb"])
    with pytest.raises(UserError, match=r"pip install -e '\.\[reports\]'.*the report itself is written"):
        main()
    assert page.is_file()


def test_a_run_that_has_not_begun_is_of_the_dataset_of_the_others(tmp_path: Path) -> None:
    begun = [make_run(tmp_path / name, seed=seed, trained={"base": [0.5]}) for name, seed in (("a", 0), ("b", 1))]
    waiting = make_run(tmp_path / "waiting", seed=2, provenance={})
    (dataset,) = datasets_of(arms_of(read_runs([*begun, waiting])))
    assert len(dataset.arms[0].runs) == 3
    for number, path in enumerate(begun):  # now the directories stand for two datasets
        for result in path.rglob("probes/*/*.json"):
            value = json.loads(result.read_text())
            write_json(result, value | {"train_manifest_sha256": str(number) * 64})
    names = [dataset.name for dataset in datasets_of(arms_of(read_runs([*begun, waiting])))]
    trained_on = "trained on aaaaaaaaaaaa"
    assert names == [f"such (000000000000, {trained_on})", f"such (111111111111, {trained_on})", "such (no/such/train)"]
