from __future__ import annotations

import base64
import io
import json
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from configs import debug
from data_pipeline.core.errors import UserError
from trainer.analyses.views import ViewsResult
from trainer.probes.curve import read_curves
from trainer.probes.knn import KNNResult
from trainer.probes.linear import LinearResult, ProbeConfig
from trainer.probes.result import ProbeResult
from trainer.report import main
from trainer.reports import overview
from trainer.reports import runs as runs_module
from trainer.reports.as_markdown import as_markdown
from trainer.reports.curves import MAX_POINTS, Chart, Line, line_chart, lines_of, thin
from trainer.reports.findings import Score, least_difference, limits, outcome, resolution, verdict
from trainer.reports.page import page, what_probes_read
from trainer.reports.runs import Views, arms_of, config_differences, read_runs
from trainer.reports.tables import commands_for_missing_probes, speed_grid
from trainer.run_dir import RunDir, write_json

Accuracies = Mapping[str, Sequence[float]]  # label -> linear accuracy by epoch; kNN is 0.01 below the last

PROVENANCE = {
    "command": "python launch/train.py --config debug:image",
    "git_commit": "0123456789abcdef0123456789abcdef01234567",
    "git_dirty": False,
    "started_at": "2026-01-02T03:04:05+00:00",
    "cpu": "A Processor",
    "num_cpus": 2,
    "gpu": None,
    "world_size": 2,
    "versions": {"python": "3.11.9", "torch": "2.11.0"},
    "train_manifest_sha256": "a" * 64,
    "test_manifest_sha256": "b" * 64,
    "seed": 0,
    "wall_seconds": 3725.0,
    "finished_step": 11,
    "num_train_samples": 5000,
}


def make_run(
    directory: Path,
    *,
    recipe: Any = debug.image,
    trained: Accuracies | None = None,
    untrained: Accuracies | None = None,
    num_test: int = 1000,
    provenance: Mapping[str, Any] | None = None,
    probe: ProbeConfig | None = None,
    titles: Mapping[str, str] | None = None,
    **settings: Any,
) -> Path:
    """Make a run directory as training, probe and analysis leave it, with chosen numbers."""
    probe = recipe().probe if probe is None else probe
    config = recipe().model_dump() | settings
    config["data"] |= {"train_dir": "no/such/train", "test_dir": "no/such/test"}
    run_dir = RunDir(directory)
    directory.mkdir()
    write_json(run_dir.config, config)
    write_json(run_dir.provenance, PROVENANCE if provenance is None else provenance)
    lines = [
        {"step": step, "train/loss": 4 / step, "perf/samples_per_second": 100.0 + step, "perf/data_wait_fraction": 0.01}
        for step in range(1, 12)
    ]
    run_dir.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 12, "train/lo')
    for step, accuracies in ((0, untrained), (11, trained)):
        for space, curve in (accuracies or {}).items():
            title = None if titles is None else titles[space]
            result = probe_result(space, step, curve, num_test, config=probe, title=title)
            write_json(run_dir.probes(step) / f"{space}.json", result)
    run_dir.analysis.mkdir()
    buffer = io.BytesIO()
    Image.new("RGB", (4, 4), (1, 2, 3)).save(buffer, "PNG")
    (run_dir.analysis / "views.png").write_bytes(buffer.getvalue())
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


def probe_result(
    space: Any,
    step: int,
    curve: Sequence[float],
    num_test: int,
    *,
    config: ProbeConfig | None = None,
    title: str | None = None,
) -> dict[str, Any]:
    best = max(curve)
    return ProbeResult(
        label=space,
        checkpoint_step=step,
        linear=LinearResult(
            accuracy=curve[-1],
            best_accuracy=best,
            best_epoch=list(curve).index(best) + 1,
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


def report(monkeypatch: pytest.MonkeyPatch, out: Path, *run_dirs: Path) -> str:
    monkeypatch.setattr(sys, "argv", ["report", *map(str, run_dirs), "--out", str(out)])
    main()
    return out.read_text()


@pytest.fixture
def two_runs(tmp_path: Path) -> tuple[Path, Path]:
    expert = make_run(
        tmp_path / "expert",
        trained={"base": [0.30, 0.47, 0.452], "overlay": [0.5, 0.55, 0.569]},
        untrained={"base": [0.2, 0.215], "overlay": [0.3, 0.37]},
    )
    viewmaker = make_run(
        tmp_path / "viewmaker",
        recipe=debug.viewmaker,
        trained={"base": [0.3, 0.4, 0.402], "overlay": [0.6, 0.7, 0.711]},
        untrained={"base": [0.2, 0.215], "overlay": [0.3, 0.37]},
    )
    return expert, viewmaker


def test_table_holds_the_measured_numbers(
    two_runs: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = Page(report(monkeypatch, tmp_path / "out.html", *two_runs))
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "out.html")
    assert page.row("debug-image")[1:] == [
        "45.2 +23.7 best 47.0, epoch 2",
        "44.2",
        "56.9 +19.9 best 56.9, epoch 3",
        "55.9",
    ]
    assert page.row("debug-viewmaker")[1:] == [
        "40.2 +18.7 best 40.2, epoch 3",
        "39.2",
        "71.1 +34.1 best 71.1, epoch 3",
        "70.1",
    ]
    assert page.row("chance")[1:] == ["10.0", "", "10.0", ""]
    assert page.row("commonest class")[1:] == ["11.3", "", "11.3", ""]
    untrained = [[" ".join(cell.split()) for cell in row] for row in page.rows if row[0].strip() == "untrained encoder"]
    assert untrained == [["untrained encoder", "21.5", "20.5", "37.0", "36.0"]] * 2


def test_views_of_an_earlier_checkpoint_are_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a page of a run that went on shows the views of its first report for ever."""
    run_dir = RunDir(make_run(tmp_path / "run", trained={"base": [0.4]}))
    old = (run_dir.analysis / "views.png").read_bytes()
    before = ViewsResult.parse(json.loads((run_dir.analysis / "views.json").read_text()), where="")
    newer = before.model_copy(update={"checkpoint_step": 20})
    made = {"same": (newer, old + b"new"), "other": (newer.model_copy(update={"test_manifest_sha256": "c" * 64}), old)}
    which = "same"

    def refuse(*_: Any, **__: Any) -> None:
        raise UserError("there is no such checkpoint")

    monkeypatch.setattr(runs_module, "measure_views", lambda *_, **__: made[which])
    run_dir.latest.write_text("step_00000011")
    assert read_runs([run_dir.path])[0].views.result == before, "it is of the newest checkpoint"
    run_dir.latest.write_text("step_00000020")
    assert read_runs([run_dir.path], make_views=False)[0].views.result == before
    which = "other"
    assert read_runs([run_dir.path])[0].views == Views(old, before), "the test set was replaced"
    which = "same"
    assert read_runs([run_dir.path])[0].views == Views(old + b"new", newer)
    assert (run_dir.analysis / "views.png").read_bytes() == old + b"new"
    run_dir.latest.write_text("step_00000030")
    os.utime(run_dir.latest, (0, 0))
    made["same"] = (newer.model_copy(update={"checkpoint_step": 30}), old)
    assert read_runs([run_dir.path])[0].views == Views(old + b"new", newer), "`analyze views --step 20` made them"
    run_dir.latest.write_text("step_00000030")
    monkeypatch.setattr(runs_module, "measure_views", refuse)
    assert read_runs([run_dir.path])[0].views.result == newer, "the checkpoint or the data are not there"


def test_probes_on_data_that_were_replaced_are_left_out_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise an encoder is compared with its untrained one on other pictures, and curves go over both."""
    run_dir = RunDir(make_run(tmp_path / "run", trained={"base": [0.452]}, untrained={"base": [0.215]}))
    before = probe_result("base", 5, [0.333], 1000)
    for step, result in ((0, probe_result("base", 0, [0.215], 1000)), (5, before)):
        write_json(run_dir.probes(step) / "base.json", result | {"test_manifest_sha256": "c" * 64})
    html = report(monkeypatch, tmp_path / "out.html", run_dir.path)
    said = "at step 0, 5 were made on other data than that of step 11; repeat them."
    assert said in " ".join(html.split())
    assert "21.5" not in html
    assert Page(html).row("debug-image")[1].startswith("45.2")
    (curve, _) = read_curves(run_dir, steps_per_epoch=1).curves
    assert [point.accuracy for point in curve.points] == [0.452]


def test_views_and_analyses_of_a_test_set_that_was_replaced_are_left_out_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = RunDir(make_run(tmp_path / "run", trained={"base": [0.452]}))
    (run_dir.analysis / "embedding.png").write_bytes((run_dir.analysis / "views.png").read_bytes())
    write_json(run_dir.analysis / "embedding.json", {"silhouette": 0.25, "test_manifest_sha256": "b" * 64})
    assert report(monkeypatch, tmp_path / "before.html", run_dir.path).count("<img") == 2
    for path in run_dir.all_probes.rglob("*.json"):
        write_json(path, json.loads(path.read_text()) | {"test_manifest_sha256": "d" * 64})
    html = report(monkeypatch, tmp_path / "out.html", run_dir.path)
    assert "<img" not in html
    for name in ("views", "embedding"):
        said = (
            f"{run_dir.analysis / name}.json is of another test set (manifest {'b' * 12}) than the probes ({'d' * 12})"
        )
        assert said in html
        assert f"`python -m trainer.analyze {name} {run_dir.path}`" in html


def test_a_run_on_a_train_set_that_was_replaced_before_its_probe_is_compared_with_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both runs are probed on the present train set; the second was trained on the one that was there before."""
    before = PROVENANCE | {"train_manifest_sha256": "c" * 64}
    make_run(tmp_path / "new", trained={"base": [0.4]})
    make_run(tmp_path / "old", trained={"base": [0.8]}, seed=1, provenance=before)
    html = report(monkeypatch, tmp_path / "out.html", tmp_path / "new", tmp_path / "old")
    page, text = Page(html), " ".join(unescape(html).split())
    assert [page.row("debug-image, seed", number=number)[1].split()[0] for number in (0, 1)] == ["40.0", "80.0"]
    assert f"{tmp_path / 'old'} was trained on another train set (manifest cccccccccccc) than its probes read" in text
    assert text.count("was trained on another train set") == 1
    assert "accuracies are compared only within each of them" in text
    assert "(aaaaaaaaaaaa, trained on cccccccccccc)" in text


def test_of_probes_of_the_last_step_on_two_data_those_of_the_own_protocol_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another protocol was read first, at step 0, and was not repeated after the data were replaced."""
    run_dir = RunDir(make_run(tmp_path / "run", trained={"base": [0.452]}))
    other = debug.image().probe.model_copy(update={"views": "none"})
    for step, accuracy in ((0, 0.215), (11, 0.333)):
        result = probe_result("base", step, [accuracy], 1000, config=other)
        write_json(run_dir.probes(step) / "base-views_none.json", result | {"test_manifest_sha256": "c" * 64})
    html = report(monkeypatch, tmp_path / "out.html", run_dir.path)
    assert "at step 0, 11 were made on other data than others of step 11; repeat them." in " ".join(html.split())
    assert Page(html).row("debug-image")[1].startswith("45.2")
    assert "33.3" not in html


def test_one_file_that_needs_nothing_else(
    two_runs: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    html = report(monkeypatch, tmp_path / "out.html", *two_runs)
    page = Page(html)
    assert page.references
    assert all(reference.startswith(("data:image/png;base64,", "#")) for reference in page.references)
    assert not {"script", "link", "iframe", "object", "embed", "base"} & set(page.tags)
    assert "@import" not in html
    assert set(re.findall(r"url\(([^)]?)", html)) <= {"#"}
    assert page.tags.count("img") == 2
    assert page.tags.count("svg") == 3  # loss, and the probe of each label
    inlined = [reference for reference in page.references if reference.startswith("data:")]
    png = base64.b64decode(inlined[0].partition(",")[2])
    assert png == (two_runs[0] / "analysis" / "views.png").read_bytes()


def test_doing_it_again_changes_no_byte(
    two_runs: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = report(monkeypatch, tmp_path / "first.html", *two_runs)
    before = {path: path.read_bytes() for run in two_runs for path in run.rglob("*") if path.is_file()}
    assert report(monkeypatch, tmp_path / "second.html", *two_runs) == first
    assert {path: path.read_bytes() for run in two_runs for path in run.rglob("*") if path.is_file()} == before


def test_verdict_says_what_the_numbers_say(two_runs: tuple[Path, Path]) -> None:
    assert verdict(arms_of(read_runs(two_runs))) == [
        "Both trained encoders beat the untrained one on the base label: "
        "debug-image 45.2 % against 21.5 % and debug-viewmaker 40.2 % against 21.5 %.",
        "Both trained encoders beat the untrained one on the overlay label: "
        "debug-image 56.9 % against 37.0 % and debug-viewmaker 71.1 % against 37.0 %.",
        "On the base label, debug-image is ahead of debug-viewmaker by 5.0 points: 45.2 % against 40.2 %.",
        "On the overlay label, debug-viewmaker is ahead of debug-image by 14.2 points: 71.1 % against 56.9 %.",
    ]


def test_verdict_does_not_claim_what_the_test_set_cannot_resolve(tmp_path: Path) -> None:
    """100 test pictures: two standard errors of a difference near 45 % are 14 points."""
    runs = [
        make_run(tmp_path / "a", trained={"base": [0.45]}, untrained={"base": [0.40]}, num_test=100),
        make_run(
            tmp_path / "b", trained={"base": [0.20]}, untrained={"base": [0.40]}, num_test=100, name="b", num_epochs=9
        ),
        make_run(tmp_path / "c", trained={"base": [0.50]}, num_test=100, name="c", global_batch_size=16),
    ]
    sentences = verdict(arms_of(read_runs(runs)))
    assert sentences == [
        "On the base label, debug-image cannot be told apart from the untrained encoder (45.0 % against 40.0 %), "
        "b is below the untrained encoder (20.0 % against 40.0 %) and "
        "c cannot be told apart from the untrained encoder (50.0 % against 40.0 %).",
        "On the base label, c and debug-image cannot be told apart: 50.0 % against 45.0 %, and differences below "
        "14.1 points are not resolved.",
    ]


def test_runs_that_differ_by_seed_alone_are_one_row_with_mean_and_deviation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accuracies = [0.40, 0.44, 0.51]
    paths = [
        make_run(
            tmp_path / f"seed{seed}", seed=seed, trained={"base": [accuracy]}, untrained={"base": [0.2 + seed / 100]}
        )
        for seed, accuracy in enumerate(accuracies)
    ]
    other = make_run(tmp_path / "other", name="other", num_epochs=7, trained={"base": [0.3]})
    page = Page(report(monkeypatch, tmp_path / "out.html", *paths, other))
    mean, deviation = 100 * np.mean(accuracies), 100 * np.std(accuracies, ddof=1)
    assert (
        page.row("debug-image (step 11; 3 runs, seeds 0, 1, 2)")[1] == f"{mean:.1f} ± {deviation:.1f} +{mean - 21:.1f}"
    )
    assert page.row("other (step 11)")[1] == "30.0 +9.0 best 30.0, epoch 1"  # against the same encoder's baseline


def test_a_row_names_the_seeds_of_its_numbers_and_the_page_the_commands_for_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three runs, two were probed, one of them with `--label base`; one untrained encoder was probed."""
    whole = {"base": [0.4], "overlay": [0.6]}
    make_run(tmp_path / "seed0", seed=0, trained=whole, untrained={"base": [0.2], "overlay": [0.2]})
    make_run(tmp_path / "seed1", seed=1, trained={"base": [0.5]})
    make_run(tmp_path / "seed2", seed=2)
    paths = [tmp_path / f"seed{seed}" for seed in range(3)]
    html = report(monkeypatch, tmp_path / "out.html", *paths)
    row = Page(html).row("debug-image (step 11; 3 runs, results of seeds 0, 1 (base label), 0 (overlay label))")
    assert row[1].startswith("45.0 ± 7.1 +25.0")
    assert Page(html).row("untrained encoder (seeds 0)")[1] == "20.0"
    arms = arms_of(read_runs(paths))
    assert "| debug-image, untrained | 0 | 20.0 |" in as_markdown(arms)
    assert commands_for_missing_probes(arms) == [
        f"python -m trainer.probe {paths[1]} --label overlay",
        f"python -m trainer.probe {paths[1]} --step 0",
        f"python -m trainer.probe {paths[2]}",
        f"python -m trainer.probe {paths[2]} --step 0",
    ]
    notes = " ".join(limits(arms))
    assert "One seed of debug-image on the overlay label:" in notes
    assert "2 seeds:" in notes
    assert "3 seeds:" not in notes


def test_probes_before_the_end_of_a_training_are_named(tmp_path: Path) -> None:
    """Otherwise an encoder in the middle of its training is compared with one at the end as if it were final."""
    running = {name: value for name, value in PROVENANCE.items() if name != "finished_step"}
    one = make_run(tmp_path / "one", trained={"base": [0.4]}, provenance=PROVENANCE | {"finished_step": 99})
    two = make_run(tmp_path / "two", trained={"base": [0.5]}, seed=1, provenance=running)
    three = make_run(tmp_path / "three", trained={"base": [0.6]}, num_epochs=3)
    arms = arms_of(read_runs([one, two, three]))
    assert arms[0].probed_at == "step 11 of 99 and step 11 of a run that has not ended"
    said = f"Not all probes are of the end of a training: {arms[0].name} at {arms[0].probed_at}."
    assert verdict(arms)[-1] == said
    assert overview.sentences(arms)[-2] == said
    assert said in as_markdown(arms)
    (table,) = overview.tables(arms)
    assert [row[table.grid.head.index("probed at")] for row in table.grid.rows] == ["step 11", arms[0].probed_at]
    assert verdict(arms_of(read_runs([three]))) == [
        "The untrained encoder was not probed on the base label, so whether training helped is not measured."
    ]


def test_finished_runs_of_different_lengths_have_their_steps_named(tmp_path: Path) -> None:
    one = make_run(tmp_path / "one", name="one", trained={"base": [0.4]})
    two = make_run(tmp_path / "two", name="two", num_epochs=3, trained={"base": [0.4]})
    shorter = RunDir(two)
    write_json(shorter.provenance, PROVENANCE | {"finished_step": 5})
    shorter.probes(11).rename(shorter.probes(5))
    write_json(shorter.probes(5) / "base.json", probe_result("base", 5, [0.4], 1000))
    assert (
        verdict(arms_of(read_runs([one, two])))[-1]
        == "The probes are of different steps: one at step 11 and two at step 5."
    )


@pytest.mark.parametrize(("views", "is_shared"), [("policy", False), ("none", True)])
def test_the_untrained_encoder_of_an_arm_with_other_views_counts_only_for_a_probe_without_views(
    views: str, is_shared: bool, tmp_path: Path
) -> None:
    probe = debug.image().probe.model_copy(update={"views": views})
    expert = make_run(tmp_path / "a", trained={"base": [0.5]}, untrained={"base": [0.2]}, probe=probe, name="expert")
    learned = make_run(tmp_path / "b", recipe=debug.viewmaker, trained={"base": [0.5]}, probe=probe, name="learned")
    arms = arms_of(read_runs([expert, learned]))
    said = " ".join(verdict(arms))
    assert ("learned 50.0 % against 20.0 %" in said) == is_shared
    assert any(f"{learned} --step 0" in command for command in commands_for_missing_probes(arms)) != is_shared
    of_both, of_one = (
        "2 of 2 are above their untrained encoder",
        "1 of the 1 with a probed untrained encoder are above it",
    )
    assert overview.sentences(arms)[-2].endswith(f"and {of_both if is_shared else of_one}.")


def test_arms_of_one_name_are_told_apart_by_their_directories(tmp_path: Path) -> None:
    paths = [make_run(tmp_path / f"epochs{num}", num_epochs=num) for num in (3, 4)]
    assert [arm.name for arm in arms_of(read_runs(paths))] == ["epochs3", "epochs4"]


def test_standard_error_is_the_larger_of_test_pictures_and_seeds() -> None:
    one, spread = Score((0.5,), num_test=100), Score((0.3, 0.7), num_test=100)
    deviation = np.std([0.3, 0.7], ddof=1)
    assert one.error_beside(one) == pytest.approx((0.05, np.inf))
    assert spread.error_beside(one) == pytest.approx((deviation / np.sqrt(2), 1))
    assert resolution(one, one) == pytest.approx(2 * np.sqrt(2) * 0.05)
    assert one.error_beside(spread) == pytest.approx((deviation, 1)), "one seed scatters as the others do"
    assert spread.error_beside(Score((0.1, 0.9), num_test=100)) == spread.error_beside(one)


def test_few_seeds_have_to_differ_by_more_than_two_standard_errors() -> None:
    """With two standard errors, 17 % of the pairs of equal encoders with two seeds each would be told apart."""
    of_seeds, of_pictures = Score((0.50, 0.56), num_test=2000), Score((0.50,), num_test=2000)
    assert least_difference(of_pictures, of_pictures) == resolution(of_pictures, of_pictures)
    error = np.sqrt(2) * 0.03
    assert least_difference(of_seeds, of_seeds) == pytest.approx(4.303 * error, rel=1e-3)  # t of 2 degrees of freedom
    assert outcome(Score((0.64, 0.70), num_test=2000), of_seeds) == "unresolved"
    assert outcome(Score((0.74, 0.80), num_test=2000), of_seeds) == "above"
    assert least_difference(Score((1.0, 1.0), num_test=9), Score((1.0,), num_test=9)) == 0


def test_fewer_seeds_of_one_side_never_tell_more_apart() -> None:
    trained, untrained = Score((0.18, 0.25, 0.31), num_test=200), Score((0.11, 0.13, 0.16), num_test=200)
    assert outcome(trained, untrained) == "unresolved"
    for value in untrained.values:
        assert outcome(trained, Score((value,), num_test=200)) == "unresolved"


def test_a_seed_that_goes_on_after_the_shortest_has_a_line_of_its_own_from_there() -> None:
    long, short = {1: 1.0, 2: 2.0, 3: 3.0, 4: 5.0}, {1: 2.0, 2: 2.0, 3: 2.0}
    mean, rest = lines_of([short, long], "red")
    assert (mean.x, mean.y) == ([1, 2, 3], [1.5, 2.0, 2.5])
    assert (rest.x, rest.y, rest.deviation) == ([3, 4], [3.0, 5.0], None)
    assert len(lines_of([short, short], "red")) == 1


def test_a_report_without_limits_has_no_heading_for_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [make_run(tmp_path / f"{seed}", seed=seed) for seed in range(2)]
    for run in runs:
        (run / "metrics.jsonl").write_text("")
    arms = arms_of(read_runs(runs))
    for most in (overview.MOST_IN_FULL, 1):
        monkeypatch.setattr(overview, "MOST_IN_FULL", most)
        assert limits(arms) == []
        assert "too small to show" not in as_markdown(arms) + page(arms)


def test_limits_follow_from_the_sizes(two_runs: tuple[Path, Path], tmp_path: Path) -> None:
    notes = " ".join(limits(arms_of(read_runs(two_runs))))
    assert "One seed of every configuration" in notes
    assert "1,000 test pictures: an accuracy near 50 % is known to ± 3.2 points" in notes
    assert "5,000 train pictures for 2 epochs are 0.1 % of what the published runs on pictures saw" in notes
    assert "not committed" not in notes
    dirty = make_run(tmp_path / "dirty", seed=1, trained={"base": [0.4]}, provenance=PROVENANCE | {"git_dirty": True})
    notes = " ".join(limits(arms_of(read_runs([*two_runs, dirty]))))
    assert "One seed of debug-image on the overlay label and debug-viewmaker:" in notes
    assert "2 seeds:" in notes
    assert "not committed" in notes


def test_limits_of_sounds_speak_of_sounds(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", recipe=debug.audio, trained={"base": [0.4]})
    notes = " ".join(limits(arms_of(read_runs([run]))))
    assert "so a difference that the test sounds resolve may still be chance" in notes
    assert "test pictures" not in notes


def test_the_size_of_a_training_is_not_the_number_of_labelled_samples(tmp_path: Path) -> None:
    finished = PROVENANCE | {"num_train_samples": 9000, "finished_step": 11}
    known = make_run(tmp_path / "known", trained={"base": [0.4]}, provenance=finished)
    assert "9,000 train pictures for 2 epochs" in " ".join(limits(arms_of(read_runs([known]))))
    older = make_run(tmp_path / "older", trained={"base": [0.4]}, provenance={"finished_step": 11})
    assert "5,000 labelled train pictures for 2 epochs" in " ".join(limits(arms_of(read_runs([older]))))


def test_a_training_that_has_stopped_counts_up_to_its_last_step(tmp_path: Path) -> None:
    unfinished = {name: value for name, value in PROVENANCE.items() if name != "finished_step"}
    unfinished["num_train_samples"] = 9000
    run = make_run(
        tmp_path / "run", provenance=unfinished, num_epochs=1000, global_batch_size=90, trained={"base": [0.4]}
    )
    notes = " ".join(limits(arms_of(read_runs([run]))))
    assert "9,000 train pictures for 0.11 epochs are 0.0099 % of what the published runs" in notes


def test_one_seed_of_an_untrained_encoder_is_said(tmp_path: Path) -> None:
    seeds = [
        make_run(
            tmp_path / str(seed), seed=seed, trained={"base": [0.4]}, untrained={"base": [0.1]} if seed == 0 else None
        )
        for seed in range(3)
    ]
    notes = " ".join(limits(arms_of(read_runs(seeds))))
    assert "One seed of the untrained encoder of " in notes
    assert "One seed of the untrained encoder" not in " ".join(limits(arms_of(read_runs(seeds[:1]))))


def test_a_label_that_was_probed_at_an_earlier_step_only_is_named(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", trained={"base": [0.4]})
    write_json(RunDir(run).probes(5) / "overlay.json", probe_result("overlay", 5, [0.5], 100))
    write_json(RunDir(run).probes(5) / "base.json", probe_result("base", 5, [0.5], 100))
    notes = " ".join(limits(arms_of(read_runs([run]))))
    assert f"Not shown: {run} was probed on label_overlay at step 5, and last on other labels at step 11" in notes
    assert "label_base" not in notes


def test_markdown_has_the_floors_of_the_page(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", trained={"base": [0.4]}, untrained={"base": [0.2]})
    text = as_markdown(arms_of(read_runs([run])))
    assert re.search(r"^\| commonest class \| +\| \d", text, re.MULTILINE)
    assert re.search(r"^\| chance \| +\| \d", text, re.MULTILINE)


def test_config_differences_name_the_settings_that_differ_and_no_other(
    two_runs: tuple[Path, Path], tmp_path: Path
) -> None:
    longer = make_run(tmp_path / "longer", num_epochs=9, seed=5)
    [epochs, seed] = config_differences(arms_of(read_runs([two_runs[0], longer])))[::-1]
    assert (seed.key, seed.values) == ("seed", ({"": [0]}, {"": [5]}))
    assert (epochs.key, epochs.values) == ("num_epochs", ({"": [2]}, {"": [9]}))

    differences = {row.key: row.values for row in config_differences(arms_of(read_runs(two_runs)))}
    assert list(differences) == ["name", "views", "adversary"]
    expert, viewmaker = differences["views"]
    assert (expert["kind"], viewmaker["kind"]) == (["expert_image"], ["viewmaker"])
    assert viewmaker["budget"] == [0.05]
    assert "budget" not in expert


def test_what_was_not_measured_is_said_and_how_to_measure_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = make_run(tmp_path / "bare", provenance={})
    (bare / "metrics.jsonl").unlink()
    (bare / "provenance.json").unlink()
    (bare / "analysis" / "views.json").unlink()
    html = report(monkeypatch, tmp_path / "out.html", bare)
    assert "No trained encoder has been probed yet" in html
    assert f"python -m trainer.probe {bare}\npython -m trainer.probe {bare} --step 0" in html
    assert "has no checkpoint yet" in html  # the reason for the missing grid
    page = Page(html)
    for title in ("command", "commit", "processor", "GPU", "wall time", "samples a second", "versions"):
        assert page.row(title)[1] == "not measured", title


def test_provenance_is_shown_as_it_was_recorded(
    two_runs: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = Page(report(monkeypatch, tmp_path / "out.html", *two_runs))
    expected = {
        "directory": str(two_runs[0]),
        "command": PROVENANCE["command"],
        "commit": "0123456789ab",
        "seed": "0",
        "processor": "A Processor, 2 CPUs",
        "GPU": "none",
        "ranks": "2",
        "wall time": "1 h 2 min",
        "samples a second": "106",
        "waiting for data": "1.0% of the time",
        "test manifest": "b" * 12,
        "versions": "python 3.11.9, torch 2.11.0",
    }
    assert {title: page.row(title)[1] for title in expected} == expected


@pytest.mark.parametrize(
    ("facts", "shown"),
    [
        ({"starts": [{"start_step": 0}]}, "1 h 2 min"),
        ({"starts": [{"start_step": 0}, {"start_step": 0}]}, "1 h 2 min"),
        ({"starts": [{"start_step": 0}, {"start_step": 4}]}, None),
        ({"starts": [{"start_step": 0}, {"start_step": 4}], "total_wall_seconds": 7325.0}, "2 h 2 min"),
    ],
)
def test_a_wall_time_that_is_only_that_of_the_last_start_is_left_out(
    facts: dict[str, Any], shown: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run", provenance=PROVENANCE | facts, trained={"base": [0.5]})
    html = report(monkeypatch, tmp_path / "out.html", run)
    assert ("1 h 2 min" in html, "2 h 2 min" in html) == (shown == "1 h 2 min", shown == "2 h 2 min")


def test_names_are_text_not_markup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    provenance = PROVENANCE | {"cpu": "<script>alert(1)</script>&"}
    run = make_run(tmp_path / "run", provenance=provenance, trained={"base": [0.4]})
    html = report(monkeypatch, tmp_path / "out.html", run)
    assert "<script>" not in html
    assert "&lt;script&gt;alert(1)&lt;/script&gt;&amp;" in html


def test_a_directory_named_like_markup_is_shown_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "a<b>&amp;'"
    runs = [
        make_run(tmp_path / name, trained={"base": [0.4]}),
        make_run(tmp_path / "other", num_epochs=3, trained={"base": [0.4]}),
    ]
    html = report(monkeypatch, tmp_path / "out.html", *runs)
    assert name not in html
    page = Page(html)
    assert page.row(name)[0] == f"{name} (step 11)"
    assert page.row("directory")[1] == str(runs[0])


def test_a_loss_that_is_negative_by_design_is_explained_beside_its_curve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = make_run(tmp_path / "plain", trained={"base": [0.4]})
    published = make_run(tmp_path / "published", objective={"kind": "nt_xent_published"}, trained={"base": [0.4]})
    told = "The loss: the published NT-Xent is negative by design"
    assert told not in report(monkeypatch, tmp_path / "plain.html", plain)
    assert told in report(monkeypatch, tmp_path / "published.html", published)


def test_a_study_beside_the_runs_of_a_directory_is_named_as_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "runs" / "study").mkdir(parents=True)
    make_run(tmp_path / "runs" / "alone", trained={"base": [0.4]})
    inner = make_run(tmp_path / "runs" / "study" / "inner", trained={"base": [0.5]}, seed=1)
    assert str(inner) not in report(monkeypatch, tmp_path / "r.html", tmp_path / "runs")
    assert f"left out, because they hold runs of their own: {inner.parent};" in capsys.readouterr().err
    assert str(inner) in report(monkeypatch, tmp_path / "r.html", tmp_path / "runs", inner.parent)
    assert "left out" not in capsys.readouterr().err


def test_one_run_is_reported_in_its_own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "run", trained={"base": [0.4]})
    monkeypatch.setattr(sys, "argv", ["report", str(run)])
    main()
    assert (run / "report.html").is_file()


def test_a_run_that_is_named_twice_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "study", trained={"base": [0.4]})
    assert [one.path for one in read_runs([run, run, tmp_path / "x" / ".." / "study"])] == [run]


def test_a_seed_counts_once(tmp_path: Path) -> None:
    """A copy, or a second training with the seed, is no further seed: the deviation would be too small."""
    first = make_run(tmp_path / "first", trained=None)
    second = make_run(tmp_path / "second", trained={"base": [0.4]}, name="again")
    other = make_run(tmp_path / "other", trained={"base": [0.5]}, seed=1)
    (arm,) = arms_of(read_runs([first, second, other]))
    assert [run.path for run in arm.runs] == [second, other]
    said = f"Left out: {first} has the configuration, the data and the seed 0 of {second}, and a seed counts once."
    assert said in limits([arm])


def test_wrong_input_is_said_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "run", trained={"base": [0.4]})
    out = tmp_path / "out.html"
    with pytest.raises(UserError, match="is not a run directory"):
        report(monkeypatch, out, run, tmp_path / "nothing")
    whole = (run / "config.json").read_text()
    (run / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json is not valid JSON"):
        report(monkeypatch, out, run)
    (run / "config.json").write_text(whole)
    (run / "probes" / "step_00000011" / "base.json").write_text("[]")
    with pytest.raises(UserError, match=r"base\.json does not hold a JSON object; remove it, or run `python"):
        report(monkeypatch, out, run)
    assert not out.exists()


def test_wandb_needs_a_login_and_keeps_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, out = make_run(tmp_path / "run", trained={"base": [0.4]}), tmp_path / "out" / "report.html"
    monkeypatch.setattr("wandb.login", lambda prompt: False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setattr(sys, "argv", ["report", str(run), "--out", str(out), "--wandb"])
    with pytest.raises(UserError, match="--wandb needs a login"):
        main()
    assert out.is_file()


@pytest.mark.slow
def test_wandb_offline_keeps_the_very_page_for_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, out = make_run(tmp_path / "run", trained={"base": [0.4]}), tmp_path / "out" / "report.html"
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(sys, "argv", ["report", str(run), "--out", str(out), "--wandb"])
    main()
    [logged] = (out.parent / "wandb").glob("offline-run-*/files/media/html/*.html")
    assert logged.read_bytes() == out.read_bytes()


def test_thinned_curves_keep_level_and_order() -> None:
    x = list(range(10_000))
    thin_x, thin_y = thin(x, [2.0 * value for value in x])
    assert len(thin_x) == len(thin_y) == MAX_POINTS
    np.testing.assert_allclose(thin_y, 2 * np.array(thin_x))
    assert thin_x == sorted(thin_x)
    assert np.mean(thin_x) == pytest.approx(np.mean(x), rel=1e-2)
    assert thin([1, 2], [3, 4]) == ([1, 2], [3, 4])


def test_a_page_says_that_its_curves_are_means_of_many_logged_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, sentence = make_run(tmp_path / "run"), "a point is the mean of up to 4 of them"
    assert "a point is the mean of" not in report(monkeypatch, tmp_path / "short.html", run)
    lines = [json.dumps({"step": step, "train/loss": 1.0}) for step in range(3 * MAX_POINTS + 1)]
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert sentence in " ".join(report(monkeypatch, tmp_path / "long.html", run).split())


def long_chart(values: Iterable[float]) -> Chart:
    y = [float(value) for value in values]
    return line_chart("loss", [Line(range(len(y)), y, "#3b82d6")], x_label="step")


def bands(chart: Chart) -> list[list[tuple[float, float]]]:
    """Return the corners of each band of extreme values in a chart, in points; y grows downwards."""
    paths = re.findall(r' d="([^"]*)"[^>]*stroke-opacity: 0\.2;', chart.svg)
    return [_corners(path) for path in paths]


def _corners(path: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"[ML](\S+) (-?[\d.]+)", path)]


@pytest.mark.parametrize("size", [1.5, 1000.0])
def test_the_peak_of_one_step_is_seen_in_a_long_curve_and_does_not_flatten_it(size: float) -> None:
    steps = np.arange(1000 * MAX_POINTS)
    smooth = np.linspace(5, 4, len(steps))
    peak = np.where(steps == len(steps) // 2, 4.5 + size, smooth)
    assert not bands(long_chart(smooth)), "the values of a point cannot be told apart"
    (corners,) = bands(long_chart(peak))
    assert len(corners) < 20, "only where it is seen"
    heights = [y for _, y in corners]
    assert max(heights) - min(heights) > 70, "the curve alone is 130 points high"
    drawn = re.findall(r' d="([^"]*)"[^>]*stroke-opacity: 0\.9', long_chart(peak).svg)
    of_line = [y for _, y in _corners(drawn[0])]
    assert max(of_line) - min(of_line) > 60, "the peak takes at most half of the chart"


def test_a_curve_of_noise_has_no_band_that_fills_the_chart_and_a_chart_with_a_band_is_small() -> None:
    noise = np.random.default_rng(0).normal(size=100 * MAX_POINTS)
    assert not bands(long_chart(noise))
    chart = long_chart(noise + np.linspace(0, 50, len(noise)))
    assert len(bands(chart)) == 1
    assert len(chart.svg) < 1.5 * 18_000  # its size with the line alone, in numbers of six decimals
    assert chart.has_extremes
    assert not long_chart(noise[:MAX_POINTS]).has_extremes


def test_the_machine_of_a_run_with_several_starts_is_that_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = [{"start_step": 0, "host": "a"}, {"start_step": 4, "host": "b"}]
    run = make_run(tmp_path / "run", provenance=PROVENANCE | {"gpu": "NVIDIA H200", "starts": starts})
    page = Page(report(monkeypatch, tmp_path / "out.html", run))
    assert page.row("GPU")[1] == "NVIDIA H200, at the first start"
    assert page.row("processor")[1] == "A Processor, 2 CPUs, at the first start"
    assert page.row("versions")[1] == "python 3.11.9, torch 2.11.0, at the first start"


@pytest.mark.parametrize(
    ("second_start", "speed", "memory", "which"),
    [(8, "900", "40.00 GB on the GPU", "at the first start"), (0, "30", "2.00 GB", "after the first start")],
)
def test_speed_and_memory_of_a_run_that_went_on_elsewhere_are_of_one_machine(
    second_start: int, speed: str, memory: str, which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run on a GPU goes on without one, where it logs most of its steps, from step 8 or from the beginning."""
    starts = [{"start_step": 0}, {"start_step": second_start}]
    run = make_run(tmp_path / "run", provenance=PROVENANCE | {"gpu": "NVIDIA H200", "starts": starts})
    on_gpu = {"perf/samples_per_second": 900.0, "memory/gpu_gigabytes": 40.0, "memory/resident_gigabytes": 5.0}
    on_cpu = {"perf/samples_per_second": 30.0, "memory/resident_gigabytes": 2.0}
    steps = range(1, 41)
    lines = [json.dumps({"step": step, **(on_gpu if step <= second_start else on_cpu)}) for step in steps]
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    html = report(monkeypatch, tmp_path / "out.html", run)
    assert Page(html).row("samples a second")[1] == f"{speed}, {which}"
    (arm,) = arms_of(read_runs([run]))
    (row,) = speed_grid([arm]).rows
    assert (row[1], row[5]) == (speed, memory)
    said = "speed and memory are those of its first start"
    assert said in html
    assert said in as_markdown([arm])
    assert said in overview.tables([arm])[0].notes[-1]
    assert said not in report(monkeypatch, tmp_path / "other.html", make_run(tmp_path / "other"))


def test_the_caption_says_which_features_the_linear_probes_read(tmp_path: Path) -> None:
    encoder = debug.image().encoder.model_dump() | {"probe_reads": "pooled"}
    paths = [make_run(tmp_path / "map"), make_run(tmp_path / "pooled", name="small-vit", encoder=encoder)]
    both = read_runs(paths)
    assert what_probes_read(both[:1]) == "the flattened map before pooling"
    assert what_probes_read(both[1:]) == "the pooled features"
    assert what_probes_read(both) == "the flattened map before pooling (of small-vit: the pooled features)"


@pytest.mark.parametrize("views", ["policy", "none"])
def test_the_caption_speaks_of_an_untrained_policy_only_if_the_probes_are_fitted_on_views(
    views: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run", trained={"base": [0.4]}, probe=ProbeConfig.model_validate({"views": views}))
    page = report(monkeypatch, tmp_path / "out.html", run)
    assert ("(for the untrained encoder, with the untrained policy)" in page) == (views == "policy")


def test_code_and_ranks_of_all_starts_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    second = {"start_step": 4, "git_commit": PROVENANCE["git_commit"], "git_diff_sha256": "d" * 64, "world_size": 1}
    starts = [{"start_step": 0, "git_commit": PROVENANCE["git_commit"], "git_diff_sha256": None}, second, second]
    run = make_run(tmp_path / "run", provenance=PROVENANCE | {"starts": starts}, trained={"base": [0.5]})
    html = report(monkeypatch, tmp_path / "out.html", run)
    page = Page(html)
    assert page.row("commit")[1] == "0123456789ab, then 0123456789ab with uncommitted changes"
    assert page.row("ranks")[1] == "2, then 1"
    assert page.row("command")[1] == PROVENANCE["command"]
    assert "Some of the code was not committed when it ran" in html


def test_a_config_that_was_edited_after_the_training_is_named(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", trained={"base": [0.5]})
    config = json.loads((path / "config.json").read_text())
    write_json(path / "provenance.json", PROVENANCE | {"config": config})
    (run,) = read_runs([path])
    assert not any("edited" in problem for problem in run.problems)
    write_json(path / "config.json", config | {"objective": config["objective"] | {"temperature": 0.9}})
    (run,) = read_runs([path])
    assert run.problems[-1] == (
        f"{path / 'config.json'} was edited after the run began (it differs in objective.temperature); this page "
        "believes config.json."
    )


def test_a_label_that_another_protocol_probed_at_an_earlier_step_is_named(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", trained={"base": [0.5]})
    other = ProbeConfig(views="none", num_epochs=7)
    for space, step in (("base", 8), ("overlay", 8), ("overlay", 11)):
        write_json(
            RunDir(path).probes(step) / f"{space}-more.json", probe_result(space, step, [0.5], 1000, config=other)
        )
    (run,) = read_runs([path])
    (problem,) = [one for one in run.problems if one.startswith("Not shown")]
    assert "was probed on label_base at step 8, and last on other labels at step 11" in problem


def test_bad_samples_and_skipped_steps_are_named(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", trained={"base": [0.5]})
    lines = [{"step": step, "data/bad_samples": step - 1, "train/skipped_steps": 2 * step} for step in (1, 5)]
    RunDir(path).metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run,) = read_runs([path])
    assert run.problems == (f"The training of {path} left out 4 bad samples and 10 steps.",)
    RunDir(path).metrics.write_text(json.dumps(lines[0] | {"train/skipped_steps": 0}) + "\n")
    (run,) = read_runs([path])
    assert run.problems == ()


def test_of_copies_the_one_with_most_results_counts(tmp_path: Path) -> None:
    few = make_run(tmp_path / "few", trained={"base": [0.5]})
    more = make_run(tmp_path / "more", trained={"base": [0.5], "overlay": [0.5]}, untrained={"base": [0.1]})
    for order in ([few, more], [more, few]):
        (arm,) = arms_of(read_runs(order))
        assert [run.path for run in arm.runs] == [more]
