"""The figures of a sweep: the axes, the lines, the panels, and what is left out."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from configs import debug
from configs.sweep import read_space, resolve_sweep
from tests.trainer.reports.test_report import Page, make_run, report
from trainer.reports import sweeps as sweeps_module
from trainer.reports.curves import Chart
from trainer.reports.runs import arms_of, read_runs
from trainer.reports.sweeps import MAX_PANELS, Axis, Panel, Point, axes_of, panels_of, sweep_sections
from trainer.run_dir import RunDir

TEMPERATURE = Axis("objective.temperature", (0.05, 0.1, 1.0))
RATE = Axis("optimizer.learning_rate", (0.01, 0.03))
KIND = Axis("optimizer.kind", ("sgd", "adam"))


def make_sweep(
    directory: Path,
    *sweeps: str,
    accuracy: Any = lambda config: 0.5,
    probed: bool = True,
    group: str = "my-sweep",
    **settings: Any,
) -> list[Path]:
    """Make the runs of a sweep, with the accuracy of each from its config."""
    sweep = resolve_sweep("debug:image", read_space(sweeps, None, overrides=[]), group=group)
    paths = []
    directory.mkdir(exist_ok=True)
    for config in sweep.runs:
        changed: Mapping[str, Any] = config.model_dump() | settings
        trained = {"base": [accuracy(config)]} if probed else None
        name = f"{config.name}-seed{config.seed}"
        paths.append(make_run(directory / name, trained=trained, **changed))
    return paths


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Panel]:
    """Return the panels of all figures that the test makes, in their order."""
    panels: list[Panel] = []
    draw = sweeps_module._draw

    def noted(panel: Panel, metric: str) -> Chart:
        panels.append(panel)
        return draw(panel, metric)

    monkeypatch.setattr(sweeps_module, "_draw", noted)
    return panels


def test_the_axes_are_those_of_the_configs_and_not_of_the_names(tmp_path: Path) -> None:
    paths = make_sweep(tmp_path, "objective.temperature=1,0.1", "seed=0,1", "num_epochs=2", "compile=false,true")
    axes = axes_of(read_runs(paths))
    assert axes == [Axis("objective.temperature", (0.1, 1.0)), Axis("compile", ("false", "true"))]
    plain = make_run(tmp_path / "debug-image-temperature=0.1-seed7", trained={"base": [0.5]})
    assert sweep_sections(arms_of(read_runs([plain]))) == []


def test_axes_that_end_alike_have_titles_of_their_own(tmp_path: Path) -> None:
    norms = ["encoder.batch_norm=local,synchronized", "encoder.head.batch_norm=false,true"]
    paths = make_sweep(tmp_path, *norms, "encoder.head.hidden_sizes=[8]", "compile=false,true")
    titles = [axis.title for axis in axes_of(read_runs(paths))]
    assert titles == ["encoder.batch_norm", "encoder.head.batch_norm", "compile"]


def test_values_that_span_a_factor_of_ten_or_more_have_a_logarithmic_axis() -> None:
    assert TEMPERATURE.is_logarithmic
    assert not RATE.is_logarithmic
    assert not KIND.is_logarithmic
    assert not Axis("x", (0.0, 1.0, 100.0)).is_logarithmic
    assert not Axis("x", (-1.0, 100.0)).is_logarithmic


def points(axes: Sequence[Axis], seeds: int = 1) -> list[Point]:
    from itertools import product

    return [
        Point(dict(zip((axis.key for axis in axes), values, strict=True)), 10.0 * seed + len(values))
        for values in product(*(axis.values for axis in axes))
        for seed in range(seeds)
    ]


def test_one_axis_is_one_line_over_its_values_with_all_seeds() -> None:
    (panel,) = panels_of(points([TEMPERATURE], seeds=3), TEMPERATURE, [])
    assert panel.lines == (("", {value: [1.0, 11.0, 21.0] for value in TEMPERATURE.values}),)
    assert panel.limits[0] < 1 < 21 < panel.limits[1]


def test_a_second_axis_is_a_line_for_each_value_and_a_third_a_panel_for_each() -> None:
    (panel,) = panels_of(points([TEMPERATURE, RATE]), TEMPERATURE, [RATE])
    assert (panel.legend, [name for name, _ in panel.lines]) == ("learning_rate", ["0.01", "0.03"])
    found = panels_of(points([TEMPERATURE, RATE, KIND]), RATE, [TEMPERATURE, KIND])
    assert [(panel.title, panel.legend) for panel in found] == [
        ("temperature=0.05", "optimizer"),
        ("temperature=0.1", "optimizer"),
        ("temperature=1", "optimizer"),
    ]
    assert len({panel.limits for panel in found}) == 1


def test_the_points_of_a_random_search_are_not_joined() -> None:
    random = Axis("optimizer.learning_rate", tuple(0.01 * number for number in range(1, 20)))
    (panel,) = panels_of(points([TEMPERATURE, random]), TEMPERATURE, [random])
    assert not panel.is_joined
    assert len(panel.lines) == 3 * 19
    assert all(len(at) == 1 for _, at in panel.lines)


def test_the_page_shows_a_figure_of_each_label_over_each_axis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = make_sweep(
        tmp_path,
        *("objective.temperature=0.05,0.1,1", "optimizer.learning_rate=0.01,0.03", "seed=0,1"),
        accuracy=lambda config: 0.3 + config.objective.temperature / 10 + config.seed / 50,
    )
    html = report(monkeypatch, tmp_path / "out.html", *paths)
    assert html.count("<h2>Over the settings of the sweep</h2>") == 1
    assert "Linear probe of the base label, test accuracy in\u00a0%, by temperature</figcaption>" in html
    assert "Linear probe of the base label, test accuracy in\u00a0%, by learning_rate</figcaption>" in html
    assert ">objective.temperature<" in html  # the label of the axis
    assert Page(html).tags.count("script") == 0
    assert report(monkeypatch, tmp_path / "again.html", *paths) == html


def test_without_probes_the_last_logged_values_are_drawn(tmp_path: Path) -> None:
    paths = make_sweep(tmp_path, "objective.temperature=0.1,1", probed=False)
    (section,) = sweep_sections(arms_of(read_runs(paths)))
    assert section.title == "my-sweep"
    assert [chart.title for chart in section.charts] == ["Encoder loss, at the last logged step, by temperature"]


def test_what_has_no_value_is_counted_and_too_many_panels_are_left_out(tmp_path: Path) -> None:
    paths = make_sweep(tmp_path, "objective.temperature=0.1,0.2,0.5", accuracy=lambda config: 0.4)
    for path in (paths[0] / "probes").glob("step_00000011/*.json"):
        path.unlink()
    (section,) = sweep_sections(arms_of(read_runs(paths)))
    assert section.notes == (
        "Linear probe of the base label, test accuracy in %: 1 of 3 runs have no value, and are left out.",
    )
    axes = [TEMPERATURE, *(Axis(f"x{number}", (1.0, 2.0, 3.0)) for number in range(4))]
    assert len(panels_of(points(axes), TEMPERATURE, axes[1:])) == 27 > MAX_PANELS


def test_two_datasets_are_never_in_one_figure(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first = make_sweep(tmp_path / "a", "objective.temperature=0.1,1")
    second = make_sweep(tmp_path / "b", "objective.temperature=0.1,1")
    for path in second:
        for result in path.rglob("probes/*/*.json"):
            result.write_text(result.read_text().replace("a" * 64, "c" * 64))
    found = sweep_sections(arms_of(read_runs([*first, *second])))
    assert len(found) == 2
    assert all("my-sweep · " in section.title for section in found)


def test_two_recipes_that_were_swept_over_one_grid_are_no_seeds_of_each_other(tmp_path: Path) -> None:
    """Otherwise their mean is one point, with a band that is called a deviation over seeds."""
    short = make_sweep(tmp_path / "short", "optimizer.learning_rate=0.01,0.1", "seed=0,1")
    long = make_sweep(tmp_path / "long", "optimizer.learning_rate=0.01,0.1", "seed=0,1", num_epochs=7)
    noise = make_sweep(tmp_path / "noise", "optimizer.learning_rate=0.01,0.1", "seed=0", views={"kind": "random_mask"})
    found = sweep_sections(arms_of(read_runs([*short, *long])))
    assert [section.title for section in found] == ["my-sweep · num_epochs=2", "my-sweep · num_epochs=7"]
    found = sweep_sections(arms_of(read_runs([*short, *noise])))
    assert [section.title for section in found] == ["my-sweep · views=expert_image", "my-sweep · views=random_mask"]
    assert not any(section.notes for section in found)


def test_a_sweep_keeps_its_points_that_are_also_of_another_sweep(tmp_path: Path, drawn: list[Panel]) -> None:
    """The tables count a seed once; the second figure lost a line and an axis by that."""
    temperatures, seeds = "objective.temperature=0.1,0.5", "seed=0,1"
    first = make_sweep(tmp_path / "a", temperatures, seeds)
    rate = debug.image().optimizer.learning_rate
    second = make_sweep(tmp_path / "b", temperatures, f"optimizer.learning_rate={rate},0.5", seeds, group="other")
    copy = tmp_path / "copy"
    shutil.copytree(second[0], copy)
    arms = arms_of(read_runs([*first, *second, copy]))
    assert sum(len(arm.runs) for arm in arms) == len(second)
    assert [section.title for section in sweep_sections(arms)] == ["my-sweep", "other"]
    values = [{at: len(ys) for at, ys in points.items()} for panel in drawn for _, points in panel.lines]
    assert values[:3] == [{0.1: 2, 0.5: 2}] * 3
    assert [panel.legend for panel in drawn] == ["", "learning_rate", "temperature"]


def test_seeds_that_were_added_with_set_are_points_of_the_same_figure(tmp_path: Path, drawn: list[Panel]) -> None:
    first = make_sweep(tmp_path / "a", "objective.temperature=0.1,0.5", "seed=0,1")
    added = make_sweep(tmp_path / "b", "objective.temperature=0.1,0.5", seed=2)
    (section,) = sweep_sections(arms_of(read_runs([*first, *added])))
    assert not section.notes
    assert [len(ys) for panel in drawn for _, points in panel.lines for ys in points.values()] == [3, 3]
    only_seeds = make_sweep(tmp_path / "c", "seed=0,1")
    assert sweep_sections(arms_of(read_runs(only_seeds))) == []


def test_a_run_in_the_place_of_another_with_other_settings_of_its_kind_is_left_out_and_named(tmp_path: Path) -> None:
    first = make_sweep(tmp_path / "one", "objective.kind=nt_xent,simsiam", "seed=0,1")
    (again, *_) = make_sweep(
        tmp_path / "two",
        "objective.kind=nt_xent",
        "seed=0",
        name="again",
        objective={"kind": "nt_xent", "temperature": 0.3},
    )
    (section,) = sweep_sections(arms_of(read_runs([*first, again])))
    assert section.notes == ("Left out, because other runs have their place with other settings: again.",)


def test_probes_before_the_end_of_a_training_are_named_below_the_figures(tmp_path: Path) -> None:
    first, *others = make_sweep(tmp_path, "objective.temperature=0.1,0.2")
    RunDir(first).provenance.write_text("{}")
    (section,) = sweep_sections(arms_of(read_runs([first, *others])))
    (note,) = section.notes
    assert note.endswith("of a training: debug-image-temperature=0.1 at step 11 of a run that has not ended.")


def test_runs_that_have_not_ended_are_named_below_figures_of_logged_values(tmp_path: Path) -> None:
    first, *others = make_sweep(tmp_path, "objective.temperature=0.1,0.2", probed=False)
    provenance = RunDir(first).provenance
    provenance.write_text(provenance.read_text().replace('"finished_step"', '"another_fact"'))
    (section,) = sweep_sections(arms_of(read_runs([first, *others])))
    (note,) = section.notes
    assert note.startswith("Not all values are of the end of a training: debug-image-temperature=0.1 at step 11 of")


def test_the_command_takes_the_directory_of_a_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trainer.report import main

    (tmp_path / "study").mkdir()
    make_sweep(tmp_path / "study", "objective.temperature=0.1,1", "seed=0,1")
    monkeypatch.setattr(sys, "argv", ["report", str(tmp_path / "study"), "--out", str(tmp_path / "r.html")])
    main()
    assert "Over the settings of the sweep" in (tmp_path / "r.html").read_text()
