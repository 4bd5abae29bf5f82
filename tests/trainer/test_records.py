"""Restart, report and status name any damage in metrics.jsonl, provenance.json and stray files, and go on."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from configs import debug, resolve_recipe
from data_pipeline.core.errors import UserError
from launch.states import run_status
from tests.tiny_data import write_tiny_pair
from tests.trainer.observability.tracked import open_tracker
from tests.trainer.reports.made_runs import Page, make_run, probe_result, report
from trainer import records
from trainer.checkpoint.files import all_steps
from trainer.checkpoint.restore import Restored
from trainer.data import read_manifests
from trainer.probed_runs.probing import checkpoint_steps
from trainer.provenance import add_to_provenance, write_provenance
from trainer.records import read_last_metrics, read_metrics, read_provenance
from trainer.reports.page import page
from trainer.reports.runs import read_runs
from trainer.reports.table import measure
from trainer.run_dir import RunDir, write_atomically, write_json

GOOD = {"step": 3, "epoch": 0, "train/loss": 1.5}
DAMAGED = {
    b"\xff\xfe": "is not UTF-8",
    b"null": "holds no object of metrics",
    b"5": "holds no object of metrics",
    b'{"epoch": 1}': "has no step",
    b'{"step": "a"}': "has the step 'a', which is not a whole number from 0 to 2^53",
    b'{"step": -1}': "has the step -1, which is not a whole number",
    b'{"step": true}': "has the step True, which is not a whole number",
    b'{"step": 1e3}': "has the step 1000.0, which is not a whole number",
    b'{"step": 1' + b"0" * 30 + b"}": "has the step 1000000000000000000000000000000, which",
    b'{"step": 1' + b"0" * 5000 + b"}": "is not JSON",
    b"[" * 100_000: "is nested too deeply",
    b'{"step": 4, "train/lo': "is not JSON",
    b'{"step": 4, "train/loss": "low"}': "has 'train/loss': 'low', which is not a number",
    b'{"step": 4, "train/loss": [1]}': "has 'train/loss': [1], which is not a number",
}


def good(step: int) -> bytes:
    return json.dumps(GOOD | {"step": step}).encode()


def write_metrics(run_dir: RunDir, *lines: bytes, end: bytes = b"\n") -> None:
    run_dir.path.mkdir(exist_ok=True)
    run_dir.metrics.write_bytes(b"\n".join(lines) + end)


@pytest.mark.parametrize("line", DAMAGED, ids=lambda line: ascii(line[:20]))
def test_a_damaged_line_is_named_and_left_out(line: bytes, tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    write_metrics(run_dir, good(1), line, good(5))
    found = read_metrics(run_dir.metrics)
    assert [entry for entry in found.entries if entry["step"] != 4] == [GOOD | {"step": 1}, GOOD | {"step": 5}]
    (problem,) = found.problems
    assert problem.startswith(f"{run_dir.metrics}: line 2 {DAMAGED[line]}")
    assert problem.isascii()


def test_what_is_not_finite_is_no_damage_and_no_number(tmp_path: Path) -> None:
    write_metrics(
        RunDir(tmp_path),
        b'{"step": 1, "a": NaN, "b": -Infinity, "c": 1e400, "d": null, "e": 2, "f": 1' + b"0" * 300 + b"}",
    )
    found = read_metrics(tmp_path / "metrics.jsonl")
    assert (found.entries, found.problems) == ([{"step": 1, "e": 2}], ())


def test_a_line_that_a_kill_cut_short_is_no_damage(tmp_path: Path) -> None:
    write_metrics(RunDir(tmp_path), good(1), b'{"step": 2, "train/lo', end=b"")
    found = read_metrics(tmp_path / "metrics.jsonl")
    assert (found.entries, found.problems) == ([GOOD | {"step": 1}], ())


def test_of_many_damaged_lines_some_are_named_and_the_others_counted(tmp_path: Path) -> None:
    write_metrics(RunDir(tmp_path), *[b"null"] * 1000)
    (problem,) = read_metrics(tmp_path / "metrics.jsonl").problems
    assert "line 5 holds" in problem
    assert "line 6" not in problem
    assert problem.endswith("and 995 more; going on without it")


def last(entries: list[dict[str, Any]]) -> tuple[int | None, float | None]:
    """Return the last step, and the last loss."""
    losses = [entry["train/loss"] for entry in entries if "train/loss" in entry]
    return (entries[-1]["step"] if entries else None, losses[-1] if losses else None)


@pytest.mark.parametrize(
    ("after", "end"),
    [
        ([], b"\n"),
        ([], b'\n{"step": 9999, "train/lo'),  # cut short by a kill
        ([], b'\n{"step": 9999, "train/loss": 0.25}'),  # the end of the line is not written yet
        ([b'{"step": 9999, "probe/base/knn": 0.5}'], b"\n"),
        ([b'{"step": 9999, "train/loss": NaN}'] * 9000, b"\n"),
        ([b'{"step": 9999, "train/loss": 0.5}', b'{"step": 9999, "note": 1}'], b"\n"),
        ([b'{"step": 9999, "train/loss": 0.5' + b" " * 10**6 + b"}"], b"\n"),
        ([b"", b" " * 10**5], b"\n\n"),
        ([b"null"], b"\n"),
        ([b'{"step": 9999, "train/loss": "low"}'], b"\n"),
    ],
)
def test_the_end_of_a_file_has_the_last_values_of_the_whole(after: list[bytes], end: bytes, tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    write_metrics(run_dir, *(good(step) for step in range(1, 2001)), *after, end=end)
    whole, found = read_metrics(run_dir.metrics), read_last_metrics(run_dir.metrics, "train/loss")
    assert run_dir.metrics.stat().st_size > 2**16
    assert last(found.entries) == last(whole.entries)
    assert found.problems == whole.problems, "a damaged line is called by its number in the file"


@pytest.mark.parametrize("num_steps", [0, 1, 2000])
def test_the_whole_of_a_file_is_read_if_no_entry_has_the_metric(num_steps: int, tmp_path: Path) -> None:
    write_metrics(RunDir(tmp_path), *(good(step) for step in range(num_steps)))
    path = tmp_path / "metrics.jsonl"
    assert read_last_metrics(path, "never logged") == read_metrics(path)
    assert read_last_metrics(tmp_path / "none.jsonl", "train/loss") == read_metrics(tmp_path / "none.jsonl")


def test_the_status_of_a_run_reads_only_the_end_of_a_long_log(tmp_path: Path) -> None:
    run_dir = RunDir(make_run(tmp_path / "run"))
    write_metrics(run_dir, *(good(step) for step in range(1, 20_001)))
    with mock.patch.object(records, "_parse", wraps=records._parse) as parse:
        status = run_status(run_dir, {})
    assert (status.step, status.loss) == (20_000, 1.5)
    assert parse.call_count < 2000


def restart(run_dir: RunDir) -> None:
    config = resolve_recipe("debug:image", ["tracking.wandb=disabled"])
    tracker = open_tracker(run_dir, config, start_step=4)
    tracker.log(5, {"epoch": 1, "train/loss": 0.5})
    tracker.close()


def test_restart_report_and_status_name_the_line_and_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = make_run(tmp_path / "run", trained={"base": [0.5]})
    write_metrics(RunDir(run), good(3), b"null", good(4), good(9))
    facts = RunDir(run).read_provenance()
    write_json(RunDir(run).provenance, {name: fact for name, fact in facts.items() if name != "finished_step"})
    said = "metrics.jsonl: line 2 holds no object of metrics; going on without it"
    html = report(monkeypatch, tmp_path / "r.html", run)
    assert said in html
    assert said in caplog.text
    caplog.clear()
    assert run_status(RunDir(run), {}).step == 9
    assert said in caplog.text
    caplog.clear()
    restart(RunDir(run))
    assert said in caplog.text
    assert [entry["step"] for entry in read_metrics(RunDir(run).metrics).entries] == [3, 4, 5]
    assert read_metrics(RunDir(run).metrics).problems == ()  # which are gone with the steps that were repeated


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{", "is not JSON"),
        (b"\xff", "is not UTF-8"),
        (b"[]", "holds no object of facts"),
        (b"[" * 100_000, "is nested too deeply"),
        (b'{"wall_seconds": "long", "command": "python"}', "has wall_seconds: 'long', which is not valid"),
        (b'{"starts": [5, {"started_at": "noon"}], "command": "python"}', "has no facts in start 1"),
        (b'{"starts": "none", "command": "python"}', "has starts: 'none', which is not valid"),
        (b'{"wall_seconds": 1e400, "command": "python"}', "has wall_seconds: inf, which is not valid"),
    ],
)
def test_a_damaged_provenance_is_named_and_what_is_whole_of_it_is_used(
    content: bytes, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    data = write_tiny_pair(tmp_path / "data", num_train=40, num_test=20)
    run = make_run(tmp_path / "run", trained={"base": [0.5]})
    run_dir = RunDir(run)
    run_dir.provenance.write_bytes(content)
    page_now = Page(report(monkeypatch, tmp_path / "r.html", run))
    assert said in caplog.text
    assert said in unescape((tmp_path / "r.html").read_text())
    assert page_now.row("command")[1] == ("python" if b"python" in content else "not measured")
    run_status(run_dir, {})
    config = debug.image().model_copy(
        update={
            "data": debug.image().data.model_copy(
                update={"train_dir": str(data / "train"), "test_dir": str(data / "test")}
            )
        }
    )
    write_provenance(
        run_dir, config, read_manifests(config.data), command="again", world_size=1, restored=Restored(3, None)
    )
    add_to_provenance(run_dir, finished_step=9)
    facts = read_provenance(run_dir.provenance)
    assert facts.problems == ()
    assert facts.facts["finished_step"] == 9
    assert facts.facts["starts"][-1]["command"] == "again"


HOSTILE = st.sampled_from(
    [
        "<script>alert(1)</script>",
        '"><img src=x onerror=alert(1)>',
        "</style><svg onload=alert(1)>",
        "'",
        "\x1b[31m",
        "�",
        "a\nb",
        "{base}",
        "\\1",
        "</main>",
        "%",
        "javascript:1",
    ]
)
NAMES = st.one_of(HOSTILE, st.text(max_size=8), st.sampled_from(["step", "epoch", "train/loss", "probe/base/knn"]))
NUMBERS = st.one_of(
    st.integers(),
    st.floats(),
    st.sampled_from([1e308, -1e308, 1e99, 10**400, 2**53, 2**63, 5e-324, float("nan"), float("inf")]),
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, HOSTILE, st.text(max_size=8)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(NAMES, inner, max_size=3)),
    max_leaves=6,
)
ENTRIES = st.dictionaries(
    st.one_of(NAMES, st.sampled_from(["perf/samples_per_second", "perf/x_fraction", "perf/<b>_fraction"])), VALUES
)
STEPS = st.one_of(st.integers(0, 20), NUMBERS, VALUES)
LINES = st.one_of(
    st.builds(lambda entry, step: json.dumps(entry | {"step": step}).encode(), ENTRIES, STEPS),
    st.builds(lambda value: json.dumps(value).encode(), VALUES),
    st.binary(max_size=12),
    st.sampled_from(list(DAMAGED)),
)
FACTS = [
    "command",
    "git_commit",
    "git_dirty",
    "started_at",
    "cpu",
    "num_cpus",
    "gpu",
    "world_size",
    "versions",
    "starts",
    "total_wall_seconds",
    "wall_seconds",
    "seed",
    "finished_step",
    "train_manifest_sha256",
    "test_manifest_sha256",
]
STARTS = st.lists(st.dictionaries(st.sampled_from(["started_at", "start_step", "git_commit"]), VALUES), max_size=2)
PROVENANCES = st.one_of(
    st.builds(
        lambda facts, starts: json.dumps(facts | {"starts": starts}).encode(),
        st.dictionaries(st.sampled_from(FACTS), VALUES),
        STARTS,
    ),
    st.builds(lambda value: json.dumps(value).encode(), VALUES),
    st.binary(max_size=12),
)
TAGS = (
    {
        "html",
        "head",
        "meta",
        "title",
        "style",
        "body",
        "main",
        "section",
        "h1",
        "h2",
        "h3",
        "p",
        "div",
        "span",
        "ul",
        "li",
        "table",
        "thead",
        "tbody",
        "tr",
        "th",
        "td",
    }
    | {
        "code",
        "pre",
        "details",
        "summary",
        "b",
        "i",
        "strong",
        "small",
        "figure",
        "figcaption",
        "svg",
        "defs",
        "g",
        "path",
        "use",
        "rect",
        "text",
    }
    | {"clippath", "br", "img"}
)


class Tags(Page):
    """Return all tags with the names of their attributes."""

    def __init__(self, html: str) -> None:
        self.attributes: set[str] = set()
        super().__init__(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes |= {name for name, _ in attrs}
        super().handle_starttag(tag, attrs)


def check_page(html: str) -> None:
    """Check that the page has only tags of its own, and none that runs or loads anything."""
    found = Tags(html)
    assert set(found.tags) <= TAGS, set(found.tags) - TAGS
    assert not [name for name in found.attributes if name.startswith("on")]
    assert all(reference.startswith(("data:image/png;base64,", "#")) for reference in found.references)


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("fuzz") / "run")


@pytest.mark.slow
@settings(
    max_examples=200, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@example(lines=[b'{"probe/base/knn": -1.0, "step": 0}'], provenance=b"", ended=False)
@given(lines=st.lists(LINES, max_size=6), provenance=PROVENANCES, ended=st.booleans())
def test_no_record_of_a_run_stops_a_command_or_gets_into_the_page(
    lines: list[bytes], provenance: bytes, ended: bool, fuzzed: Path
) -> None:
    run_dir = RunDir(fuzzed)
    write_metrics(run_dir, *lines, end=b"\n" if ended else b"")
    run_dir.provenance.write_bytes(provenance)
    runs = read_runs([fuzzed])
    html = page(runs, measure(runs))
    write_atomically(fuzzed / "r.html", html)
    check_page((fuzzed / "r.html").read_text())
    restart(run_dir)
    add_to_provenance(run_dir, finished_step=9)
    assert read_metrics(run_dir.metrics).problems == ()
    assert read_provenance(run_dir.provenance).facts["finished_step"] == 9


@settings(max_examples=10, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.one_of(HOSTILE, st.text(min_size=1, max_size=9)), titles=st.tuples(HOSTILE, HOSTILE), value=VALUES)
def test_no_name_gets_into_the_page_as_markup(name: str, titles: tuple[str, str], value: Any, fuzzed: Path) -> None:
    """The names are of runs, labels and their titles, classes, an analysis and its numbers."""
    run_dir = RunDir(fuzzed)
    config = json.loads(run_dir.config.read_text()) | {"name": name}
    write_json(run_dir.config, config)
    for space, title in zip(("base", "overlay"), titles, strict=True):
        result = probe_result(space, 11, [0.5], 100, title=title) | {"class_names": [name, *titles]}
        write_json(run_dir.probes(11) / f"{space}.json", result)
    (run_dir.analysis / "sides.png").write_bytes((run_dir.analysis / "views.png").read_bytes())
    write_json(run_dir.analysis / "sides.json", {name: value, titles[0]: titles[1]})
    try:
        runs = read_runs([fuzzed])
    except UserError:  # a name that no config may have
        write_json(run_dir.config, config | {"name": "fine"})
        return
    write_atomically(fuzzed / "r.html", page(runs, measure(runs)))
    check_page((fuzzed / "r.html").read_text())


def write_file(path: Path) -> None:
    path.write_text("stray")


@pytest.mark.slow
@pytest.mark.parametrize("make", [Path.mkdir, write_file])
@pytest.mark.parametrize("name", ["step_x", "step_", "step_5", "step_0000001１", "step_-0000001", "step_00000007.json"])
def test_what_is_no_step_is_named_and_passed_over(
    name: str,
    make: Callable[[Path], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = make_run(tmp_path / "run", trained={"base": [0.5]})
    run_dir = RunDir(run)
    run_dir.checkpoint(11).mkdir(parents=True)
    for directory in (run / "probes", run / "checkpoints"):
        make(directory / name)
    assert "50.0" in report(monkeypatch, tmp_path / "r.html", run)
    assert f"{run}/probes/{name} is not the directory of a step" in caplog.text
    caplog.clear()
    assert checkpoint_steps(run_dir) == [11]
    assert all_steps(run_dir) == [11]
    assert f"{run}/checkpoints/{name} is not the directory of a step" in caplog.text


def test_a_file_in_the_place_of_a_step_is_named_and_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "probes").mkdir()
    (tmp_path / "probes" / "step_00000005").write_text("stray")
    assert RunDir(tmp_path).probe_steps() == []
    assert "step_00000005 is not the directory of a step" in caplog.text


def test_strays_among_the_analyses_are_named_and_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = make_run(tmp_path / "run", trained={"base": [0.5]})
    analysis = RunDir(run).analysis
    png = (analysis / "views.png").read_bytes()
    (analysis / "folder.png").mkdir()
    (analysis / "text.png").write_text("no picture")
    (analysis / "damaged.png").write_bytes(png)
    (analysis / "damaged.json").write_text("{")
    (analysis / "deep.png").write_bytes(png)
    (analysis / "deep.json").write_text('{"a":' * 700 + "1" + "}" * 700)
    (analysis / "inner.png").write_bytes(png)
    (analysis / "inner.json").mkdir()
    html = report(monkeypatch, tmp_path / "r.html", run)
    for name in ("folder.png", "text.png", "damaged.json", "inner.json"):
        assert re.search(rf"{name} is (no|not a|not valid) \w+", html), name
        assert re.search(rf"{name} is (no|not a|not valid) \w+", caplog.text), name
    assert "<h3>deep:" in html


@pytest.mark.parametrize("content", [b"step_x", b"\xff", b"", b"step_" + b"9" * 5000])
def test_a_damaged_latest_is_no_step(content: bytes, tmp_path: Path) -> None:
    run = RunDir(make_run(tmp_path / "run"))
    run.latest.write_bytes(content)
    assert run.latest_step() is None
    assert run_status(run, {}).step == 11
