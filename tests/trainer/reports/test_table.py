"""The tidy table: its rows, what is left out of it, and the CSV."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from configs import debug
from data_pipeline.core.errors import UserError
from tests.trainer.reports.made_runs import PROVENANCE, make_run, probe_result, samples
from trainer.probes.groups import Groups
from trainer.probes.linear import ProbeConfig
from trainer.reports.comparison import compare
from trainer.reports.paired import mean_of
from trainer.reports.runs import read_runs
from trainer.reports.table import Measurement, describe_protocol, measure, read_csv, without_copies, write_csv
from trainer.run_dir import RunDir, write_json


def rows_of(*paths: Path) -> list[Measurement]:
    return measure(read_runs(paths))


def values(rows: list[Measurement], **wanted: Any) -> list[float]:
    return [row.value for row in rows if all(getattr(row, name) == value for name, value in wanted.items())]


def test_a_row_for_each_accuracy_comes_back_from_csv(tmp_path: Path) -> None:
    right = {"base": samples(0.452, num_test=1000, seed=0), "overlay": samples(0.569, num_test=1000, seed=1)}
    expert = make_run(tmp_path / "expert", right=right, untrained={"base": [0.2, 0.215]}, titles={"base": "picture"})
    viewmaker = make_run(tmp_path / "viewmaker", recipe=debug.viewmaker, trained={"base": [0.3, 0.402]})
    rows = rows_of(expert, viewmaker)
    assert values(rows, label="base", readout="linear", encoder="debug-image") == [0.215, 0.452]
    assert values(rows, label="base", readout="knn", step=11) == pytest.approx([0.442, 0.392])
    first = next(row for row in rows if row.label == "base" and row.step == 11)
    assert (first.run, first.seed, first.num_right, first.num_samples) == ("debug-image", 0, 452, 1000)
    assert (first.title, first.num_steps, first.chance, first.majority) == ("picture", 11, 0.1, 0.113)
    assert (first.commit, first.hardware, first.data) == ("0123456789ab", "A Processor", f"{'a' * 12} {'b' * 12}")
    assert first.factors["views.kind"] == "expert_image"
    assert "views.area" not in first.factors, "a kind stands for its settings"
    assert {(row.readout, row.num_neighbors) for row in rows} == {("linear", None), ("knn", 200)}
    (tmp_path / "t.csv").write_text(write_csv(rows))
    again = read_csv(tmp_path / "t.csv")
    assert again == rows
    assert again[0].reading.accuracy == rows[0].reading.accuracy
    assert write_csv(again) == write_csv(rows)
    (tmp_path / "t.csv.gz").write_bytes(gzip.compress(write_csv(rows).encode()))
    assert read_csv(tmp_path / "t.csv.gz") == rows


def test_the_numbers_and_intervals_of_encoders_are_those_of_the_golden_ones(tmp_path: Path) -> None:
    """The interval: crossed variances of seeds and samples, Agresti's four samples, Satterthwaite's degrees."""
    for seed in (0, 1, 2):
        right = {"base": samples(0.3 + 0.01 * seed, num_test=500, seed=seed)}
        make_run(tmp_path / f"seed{seed}", right=right, seed=seed)
    rows = [row for row in rows_of(*sorted(tmp_path.iterdir())) if row.readout == "linear"]
    assert [row.value for row in rows] == [0.3, 0.31, 0.32]
    of_three, of_one = mean_of([row.reading for row in rows]), mean_of([rows[0].reading])
    assert (of_three.mean, of_one.mean) == pytest.approx((0.31, 0.3))
    assert of_three.half_width == pytest.approx(0.037461, abs=1e-6)
    assert of_one.half_width == pytest.approx(0.040205, abs=1e-6)
    without_samples = mean_of([type(row.reading)(row.value, 500) for row in rows])
    assert without_samples.half_width == pytest.approx(0.042208, abs=1e-6)


def test_samples_that_do_not_agree_with_the_accuracy_do_not_count(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", right={"base": samples(0.4, num_test=100, seed=0)})
    path = RunDir(run).probes(11) / "base.json"
    value = json.loads(path.read_text())
    value["linear"]["accuracy"] = 0.9
    write_json(path, value)
    assert rows_of(run)[0].reading.right_N is None


def test_protocols_and_what_they_read_are_columns(tmp_path: Path) -> None:
    run = RunDir(make_run(tmp_path / "run", trained={"base": [0.4]}))
    own = debug.image().probe
    for name, changed in (("views_none", {"views": "none"}), ("reads_pixels", {"reads": "pixels"})):
        step = 0 if "reads" in changed else 11
        result = probe_result("base", step, [0.3], 1000, config=own.model_copy(update=changed))
        write_json(run.probes(step) / f"base-{name}.json", result)
    rows = rows_of(run.path)
    assert values(rows, readout="linear", protocol=describe_protocol(own), reads="features") == [0.4]
    main, other = compare(rows)
    assert main.encoders[0].trained["base", "linear"].estimate.mean == 0.4
    assert main.columns[0].pixels is not None
    assert main.columns[0].pixels.estimate.mean == 0.3
    assert other.encoders[0].trained["base", "linear"].estimate.mean == 0.3


def test_every_setting_of_a_protocol_is_in_its_words() -> None:
    """Otherwise two protocols would share a table."""
    words = {describe_protocol(ProbeConfig())}
    changes: dict[str, Any] = {
        "num_epochs": 7,
        "batch_size": 7,
        "learning_rate": 0.7,
        "momentum": 0.7,
        "milestones": (0.5,),
        "views": "none",
        "batch_norm": "train",
        "num_neighbors": 7,
    }
    assert {*changes} | {"seed", "reads"} == set(ProbeConfig().fit_settings)
    for name, value in changes.items():
        words.add(describe_protocol(ProbeConfig(**{name: value})))
    assert len(words) == len(changes) + 1
    assert describe_protocol(ProbeConfig(seed=3)) == describe_protocol(ProbeConfig())


def test_a_seed_counts_once_and_the_copy_is_named(tmp_path: Path) -> None:
    first = make_run(tmp_path / "first", trained={"base": [0.4]}, untrained={"base": [0.2]})
    copy = make_run(tmp_path / "copy", trained={"base": [0.4]})
    runs, (problem,) = without_copies(read_runs([first, copy]))
    assert values(measure(runs), readout="linear") == [0.2, 0.4]
    assert str(copy) in problem


def test_data_that_were_replaced_are_left_out_or_kept_apart(tmp_path: Path) -> None:
    """Otherwise an encoder is compared on other pictures than its untrained one, or than other encoders."""
    run = RunDir(make_run(tmp_path / "run", trained={"base": [0.45]}))
    for step in (0, 5):
        other = probe_result("base", step, [0.333], 1000) | {"test_manifest_sha256": "c" * 64}
        write_json(run.probes(step) / "base.json", other)
    (read,) = read_runs([run.path])
    assert [result.checkpoint_step for result in read.results] == [11]
    assert all("on other data" in problem for problem in read.problems)
    assert len(read.problems) == 2

    before = PROVENANCE | {"train_manifest_sha256": "c" * 64}
    old = make_run(tmp_path / "old", trained={"base": [0.8]}, seed=1, provenance=before)
    runs = read_runs([run.path, old])
    assert len(compare(measure(runs))) == 2
    assert any("another train set (manifest cccccccccccc)" in problem for problem in runs[1].problems)


def test_results_of_another_run_are_left_out_and_named(tmp_path: Path) -> None:
    run = RunDir(make_run(tmp_path / "run", provenance=PROVENANCE | {"host": "a"}))
    write_json(run.probes(11) / "base.json", probe_result("base", 11, [0.4], 1000) | {"run": "somebody else's"})
    (read,) = read_runs([run.path])
    assert not read.results
    assert any("of another run" in problem for problem in read.problems)


def test_a_config_that_was_edited_and_samples_that_were_left_out_are_named(tmp_path: Path) -> None:
    run = RunDir(make_run(tmp_path / "run"))
    write_json(run.provenance, PROVENANCE | {"config": json.loads(run.config.read_text()) | {"num_epochs": 3}})
    run.metrics.write_text('{"step": 1, "data/bad_samples": 7.0}\n')
    (read,) = read_runs([run.path])
    assert any("num_epochs" in problem for problem in read.problems)
    assert any("7 bad samples" in problem for problem in read.problems)


def test_the_worst_group_is_one_of_fifty_samples_or_more(tmp_path: Path) -> None:
    run = RunDir(make_run(tmp_path / "run", trained={"base": [0.4]}))
    groups = Groups(
        labels=("base", "overlay"),
        num_test=((49, 50), (60, 0)),
        right={"linear": ((0, 20), (30, 0))},
        num_unlabelled=0,
    )
    path = RunDir(run.path).probes(11) / "base.json"
    write_json(path, json.loads(path.read_text()) | {"groups": [groups.model_dump(mode="json")]})
    (worst,) = [row for row in rows_of(run.path) if row.readout == "linear, worst group"]
    assert (worst.num_right, worst.num_samples, worst.value) == (20, 50, 0.4)
    assert worst.group == "0 · overlay 1"
    (found,) = compare(rows_of(run.path))
    assert 0.1 < found.encoders[0].worst["base"].estimate.half_width < 0.2


def test_online_probes_count_the_samples_that_they_read(tmp_path: Path) -> None:
    facts = PROVENANCE | {"num_test_samples": 4000}
    run = RunDir(make_run(tmp_path / "run", trained={"base": [0.4]}, num_test=2000, provenance=facts))
    run.metrics.write_text('{"step": 0, "probe/base/knn": 0.25}\n{"step": 8, "probe/base/ridge": 0.5}\n')
    online = [row for row in rows_of(run.path) if row.protocol == "online"]
    num = round(debug.image().probe.online_num_test / 2)  # half of the samples have the label
    assert [(row.readout, row.step, row.num_samples) for row in online] == [
        ("online_knn", 0, num),
        ("online_ridge", 8, num),
    ]


def test_an_untrained_encoder_is_shared_by_those_that_start_alike(tmp_path: Path) -> None:
    own = make_run(tmp_path / "own", trained={"base": [0.4]}, untrained={"base": [0.2]}, num_epochs=7)
    alike = make_run(tmp_path / "alike", trained={"base": [0.5]})
    other = make_run(tmp_path / "other", recipe=debug.viewmaker, trained={"base": [0.6]})
    (found,) = compare(rows_of(own, alike, other))
    untrained = {encoder.name: encoder.untrained for encoder in found.encoders}
    assert sorted(len(one) for one in untrained.values()) == [0, 2, 2], "views of another policy are another probe"


def test_the_last_checkpoint_counts_and_says_whether_it_is_the_end(tmp_path: Path) -> None:
    run = RunDir(make_run(tmp_path / "run", trained={"base": [0.4]}, provenance=PROVENANCE | {"finished_step": 20}))
    write_json(run.probes(5) / "base.json", probe_result("base", 5, [0.3], 1000))
    (found,) = compare(rows_of(run.path))
    score = found.encoders[0].trained["base", "linear"]
    assert (score.estimate.mean, score.steps, score.is_final) == (0.4, (11,), False)


def test_labels_of_one_title_are_called_by_their_names(tmp_path: Path) -> None:
    accuracies = {"base": [0.4], "overlay": [0.5], "site": [0.6]}
    titles = {"base": "digit", "overlay": "digit", "site": "hospital"}
    (found,) = compare(rows_of(make_run(tmp_path / "run", trained=accuracies, titles=titles)))
    assert [columns[0].title for columns in found.labels] == ["base label", "overlay label", "hospital"]


def test_a_file_that_is_no_table_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(UserError, match="--csv"):
        read_csv(tmp_path / "other.csv")
