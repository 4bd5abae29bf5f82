"""Probe results of several protocols in one report, the titles of the labels, and which difference is marked."""

from __future__ import annotations

import json
import re
import sys
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from configs import debug
from data_pipeline.core.errors import UserError
from tests.tiny_data import write_tiny_pair
from tests.trainer.probed_runs.test_probe_command import make_run as make_probed_run
from tests.trainer.reports.test_report import Page, make_run, probe_result, report
from tests.trainer.reports.test_report_study import study_run
from trainer.probe import main as probe_main
from trainer.probes.linear import ProbeConfig
from trainer.report import main
from trainer.reports import overview
from trainer.reports.as_markdown import as_markdown
from trainer.reports.findings import winner
from trainer.reports.protocols import by_protocol, describe_protocol
from trainer.reports.published import study
from trainer.reports.runs import arms_of, read_runs
from trainer.reports.study_sheet import fill, summary
from trainer.run_dir import RunDir, write_json

TITLES = {"base": "picture", "overlay": "digit"}


def add_probe(
    run: Path, suffix: str, accuracy: float, config: ProbeConfig, *, space: Any = "base", step: int = 11
) -> None:
    result = probe_result(space, step, [accuracy], 1000, config=config)
    write_json(RunDir(run).probes(step) / f"{space}{suffix}.json", result)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "change"),
    [
        (["--views", "none"], {"views": "none"}),
        (["--epochs", "2"], {"num_epochs": 2}),
        (["--batch-norm", "train"], {"batch_norm": "train"}),
    ],
)
def test_a_report_shows_what_was_just_probed(
    options: list[str],
    change: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    data = write_tiny_pair(tmp_path / "data", num_train=40, num_test=20)
    run = make_probed_run(tmp_path / "run", data).path
    monkeypatch.setattr(sys, "argv", ["probe", str(run), "--label", "base", *options])
    probe_main()
    shown = re.search(r"label_base +(\d+\.\d)", capsys.readouterr().out)
    assert shown is not None
    html = report(monkeypatch, tmp_path / "r.html", run)
    assert "No trained encoder has been probed yet" not in html
    assert Page(html).row("debug-image (step 10 of a run that has not ended)")[1].split()[0] == shown[1]
    probed = debug.image().probe.model_copy(update=change)
    assert f"<h3>Probe of {describe_protocol(probed)}</h3>" in unescape(html)
    assert f"python -m trainer.probe {run} --step 0 {' '.join(options)}" in html


def test_two_protocols_are_in_tables_charts_and_sentences_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = debug.image().probe
    fast = own.model_copy(update={"views": "none"})
    one = make_run(tmp_path / "one", name="one", num_epochs=3, trained={"base": [0.9]})
    two = make_run(tmp_path / "two", name="two", trained={"base": [0.5]})
    add_probe(one, "-views_none", 0.8, fast)
    html = report(monkeypatch, tmp_path / "r.html", one, two)
    page = Page(html)
    assert page.row("one")[1] == "90.0 best 90.0, epoch 1"
    assert page.row("one", number=1)[1] == "80.0 best 80.0, epoch 1"
    assert page.row("two", number=1)[1] == "not measured"
    assert "The runs were probed in 2 ways; accuracies are compared only within each of them." in html
    text = unescape(html).replace("\u00a0", " ")
    assert f"Probe of {describe_protocol(own)}: On the base label, one is ahead of two by 40.0 points" in text
    assert f"Probe of {describe_protocol(fast)}: Not probed, and so not compared: two." in text
    assert "by 30.0 points" not in text
    for protocol in (own, fast):
        title = f"Linear probe of the base label, test accuracy in %; probe of {describe_protocol(protocol)}"
        assert text.count(f"<figcaption>{title}</figcaption>") == 1


def test_a_report_of_many_names_what_was_probed_with_another_protocol(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = debug.image().probe
    fast = own.model_copy(update={"views": "none"})
    one = make_run(tmp_path / "one", name="one", trained={"base": [0.5]})
    two = make_run(tmp_path / "two", name="two", trained={"base": [0.4]}, num_epochs=3)
    three = make_run(tmp_path / "three", name="three", num_epochs=5)
    add_probe(three, "-views_none", 0.9, fast)
    arms = arms_of(read_runs([one, two, three]))
    (table,) = overview.tables(arms)
    column = table.grid.head.index("base label, linear")
    assert {row[0]: row[column] for row in table.grid.rows} == {"one": "50.0", "two": "40.0", "three": "another probe"}
    left_out = f"Not in this table: the accuracies of a probe of {describe_protocol(fast)}, of three."
    assert table.notes[-2] == f"Accuracies are of a probe of {describe_protocol(own)}."
    assert table.notes[-1].startswith(left_out)
    said = overview.sentences(arms)
    assert said[0] == "The runs were probed in 2 ways; accuracies are compared only within each of them."
    assert f"Probe of {describe_protocol(own)}: On the base label, the best of 2 configurations is one" in said[1]
    assert said[2] == f"Probe of {describe_protocol(fast)}: On the base label, three has 90.0 %."
    monkeypatch.setattr(overview, "MOST_IN_FULL", 2)
    text = as_markdown(arms)
    assert "The best of many is optimistic" in text
    assert left_out in text


def test_a_report_of_many_says_of_how_many_runs_a_mean_is(tmp_path: Path) -> None:
    of_seeds: list[dict[str, list[float]]] = [{"base": [0.5], "overlay": [0.8]}, {"base": [0.4]}, {}]
    runs = [make_run(tmp_path / f"{seed}", seed=seed, trained=trained) for seed, trained in enumerate(of_seeds)]
    (table,) = overview.tables(arms_of(read_runs(runs)))
    (row,) = table.grid.rows
    cells = dict(zip(table.grid.head, row, strict=True))
    assert cells["base label, linear"] == "45.0 ± 7.1 (2 of 3 runs)"
    assert cells["overlay label, linear"] == "80.0 (1 of 3 runs)"


def test_the_embedding_is_a_protocol_and_the_pixels_are_its_floor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = debug.image().probe
    embedding, pixels = (own.model_copy(update={"reads": reads}) for reads in ("embedding", "pixels"))
    run = make_run(tmp_path / "run", name="run", trained={"base": [0.9]})
    add_probe(run, "-reads_embedding", 0.6, embedding)
    add_probe(run, "-reads_pixels", 0.3, pixels, step=0)
    add_probe(run, "-views_none-reads_pixels", 0.2, pixels.model_copy(update={"views": "none"}), step=0)
    page = Page(html := report(monkeypatch, tmp_path / "r.html", run))
    assert [page.row("run", number=number)[1].split()[0] for number in (0, 1)] == ["90.0", "60.0"]
    for number in (0, 1):
        assert page.row("raw pixels", number=number) == ["raw pixels", "30.0", "29.0"]
    shown = " ".join(unescape(html).replace("\u00a0", " ").split())
    assert shown.count("softmax regression on the embedding of the frozen encoder") == 1
    assert [shown.count(f"by the cosine of {what}.") for what in ("the embedding", "pooled features")] == [1, 1]
    assert f"Probe of {describe_protocol(own)}" in shown
    assert f"Probe of {describe_protocol(embedding)}" in shown
    assert f"Probe of {describe_protocol(pixels)}" not in shown
    alone = make_run(tmp_path / "alone")
    add_probe(alone, "-reads_pixels", 0.3, pixels, step=0)
    (group,) = by_protocol(arms_of(read_runs([alone])))
    assert group.protocol.reads == "pixels"


def test_what_a_file_holds_is_its_protocol_and_not_its_name(tmp_path: Path) -> None:
    """Two runs whose configs probe in different ways both call their file base.json."""
    fast = ProbeConfig(views="none", num_epochs=7)
    one = make_run(tmp_path / "one", name="one", trained={"base": [0.9]})
    two = make_run(tmp_path / "two", name="two", trained={"base": [0.5]}, probe=fast, num_epochs=3)
    found = by_protocol(arms_of(read_runs([one, two])))
    assert [[len(arm.trained("base")) for arm in group.arms] for group in found] == [[1, 0], [0, 1]]


def test_the_seed_of_a_probe_is_no_protocol(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / str(seed), seed=seed, trained={"base": [0.5]}, probe=ProbeConfig(num_epochs=5, seed=seed))
        for seed in (0, 1)
    ]
    (group,) = by_protocol(arms_of(read_runs(runs)))
    assert len(group.arms[0].trained("base")) == 2


def test_every_setting_of_a_protocol_is_in_its_words() -> None:
    others: dict[str, Any] = {
        "num_epochs": 7,
        "batch_size": 7,
        "learning_rate": 0.7,
        "momentum": 0.7,
        "milestones": (0.7,),
        "views": "none",
        "batch_norm": "train",
        "reads": "embedding",
        "precision": "bfloat16",
    }
    assert set(others) == ProbeConfig().fit_settings.keys() - {"seed"}
    told = [describe_protocol(ProbeConfig(**{name: value})) for name, value in others.items()]
    assert len({*told, describe_protocol(ProbeConfig())}) == len(others) + 1


def test_a_result_in_the_place_of_another_is_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", trained={"base": [0.5]})
    write_json(RunDir(run).probes(7) / "base.json", probe_result("base", 11, [0.5], 1000))
    with pytest.raises(
        UserError, match=r"is a result of label_base at step 11, but its place is for label_base at step 7"
    ):
        read_runs([run])


def test_labels_are_called_what_the_manifest_called_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accuracies = {"base": [0.5], "overlay": [0.8]}
    run = make_run(tmp_path / "run", trained=accuracies, untrained=accuracies, titles=TITLES)
    out = tmp_path / "r.html"
    monkeypatch.setattr(sys, "argv", ["report", str(run), "--out", str(out), "--markdown"])
    main()
    html = out.read_text()
    head = next(row for row in Page(html).rows if len(row) == 3 and not row[0].strip())
    assert [cell.strip() for cell in head[1:]] == ["picture", "digit"]
    assert "On the digit" in html
    assert "picture of 10 classes" in html
    assert "label_base" not in html.replace("<code>label_base</code>", "")
    assert "| encoder | seeds | picture, linear | picture, kNN | digit, linear |" in out.with_suffix(".md").read_text()


@pytest.mark.parametrize(
    "titles", [None, {"base": "digit", "overlay": "digit"}, {"base": "base", "overlay": "overlay"}]
)
def test_labels_without_titles_of_their_own_are_base_label_and_overlay_label(
    titles: dict[str, str] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run", trained={"base": [0.5], "overlay": [0.8]}, titles=titles)
    head = next(row for row in Page(report(monkeypatch, tmp_path / "r.html", run)).rows if len(row) == 3)
    assert [cell.strip() for cell in head[1:]] == ["base label", "overlay label"]


def test_a_title_is_text_in_every_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hostile = '"><img src=x onerror=alert(1)>{base}\\1'
    run = make_run(
        tmp_path / "run", trained={"base": [0.5], "overlay": [0.5]}, titles={"base": hostile, "overlay": "</svg>"}
    )
    html = report(monkeypatch, tmp_path / "r.html", run)
    assert "<img src=x" not in html
    assert html.count("</svg>") == html.count("<svg")
    assert "&lt;img src=x onerror=alert(1)&gt;{base}\\1" in html


@pytest.mark.parametrize(("second", "is_bold"), [(0.47, False), (0.40, True)])
def test_bold_is_only_what_is_ahead_by_two_standard_errors(
    second: float, is_bold: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1,000 test pictures and one seed each: two standard errors of a difference near 50 % are 4.5 points."""
    runs = [
        make_run(tmp_path / "a", name="a", trained={"base": [0.50]}),
        make_run(tmp_path / "b", name="b", num_epochs=3, trained={"base": [second]}),
        make_run(tmp_path / "c", name="c", num_epochs=4, trained={"base": [0.2]}),
    ]
    html = report(monkeypatch, tmp_path / "r.html", *runs)
    assert ("<strong>50.0</strong>" in html) == is_bold
    assert ("cannot be told apart" in html) != is_bold
    arms = arms_of(read_runs(runs))
    assert winner(arms, "base") == (arms[0] if is_bold else None)
    assert winner(arms[:1], "base") is None  # there is no other arm


def in_train_mode(run: Path, accuracy: float) -> None:
    add_probe(run, "-batch_norm_train", accuracy, ProbeConfig(num_epochs=100, batch_norm="train"))
    path = RunDir(run).probes(11) / "base-batch_norm_train.json"
    write_json(path, json.loads(path.read_text()) | {"num_train": 50_000})


def paper_scale(directory: Path, *, seed: int = 0) -> Path:
    return study_run(
        directory, "table1", "simclr-cifar10_digits", seed=seed, num_train=50_000, trained={"base": [0.58]}
    )


def test_a_study_says_how_the_published_levels_were_probed_and_the_command_for_it(tmp_path: Path) -> None:
    run = paper_scale(tmp_path)
    told = " ".join(summary(fill(study("table1"), read_runs([run]))))
    assert "The published levels were measured with batch norm in train mode" in told
    assert "here it was in eval mode" in told
    assert f"python -m trainer.probe {run} --batch-norm train" in told


def test_a_study_sets_both_modes_of_batch_norm_beside_the_paper(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, out = paper_scale(tmp_path), tmp_path / "r.html"
    in_train_mode(run, 0.66)
    monkeypatch.setattr(sys, "argv", ["report", "--study", "table1", str(run), "--out", str(out), "--markdown"])
    main()
    html = out.read_text()
    assert Page(html).row("C+Digits")[1] == "58.0 train mode 66.0 paper 58.8 −0.8 train mode +7.2"
    assert "58.0; train mode 66.0; paper 58.8; −0.8; train mode +7.2" in out.with_suffix(".md").read_text()
    assert "--batch-norm train" not in html
    (cell,) = [one for one in fill(study("table1"), read_runs([run])).cells.values() if one.score]
    assert cell.difference == pytest.approx(-0.8)
    assert cell.difference_in_train_mode == pytest.approx(7.2)


def test_a_study_that_was_probed_as_published_alone_is_labelled_so(tmp_path: Path) -> None:
    run = paper_scale(tmp_path)
    in_train_mode(run, 0.66)
    (RunDir(run).probes(11) / "base.json").unlink()
    sheet = fill(study("table1"), read_runs([run]))
    assert "in train mode while the probe was fitted; so are these." in " ".join(summary(sheet))
    (cell,) = [one for one in sheet.cells.values() if one.score]
    assert (str(cell.score), cell.in_train_mode) == ("66.0", None)
