"""A report of hundreds of runs: one page within seconds, with tables to filter, sort and hide, and an index."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from configs import debug
from tests.browser import Tab, browser, needs_chromium
from tests.trainer.reports.many_runs import multiply, train_one
from tests.trainer.reports.test_report import Page, make_run
from trainer.report import main
from trainer.reports import overview
from trainer.reports.as_markdown import as_markdown
from trainer.reports.run_index import RunIndex
from trainer.reports.runs import arms_of, read_runs
from trainer.run_dir import RunDir

SWEEPS = ["objective.temperature=0.05,0.1,0.2,0.5,1", "optimizer.learning_rate=0.003,0.01,0.03,0.1,0.3", "seed=0,1"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return train_one(tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module")
def fifty(run: RunDir, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return 50 runs: 25 configurations with two seeds each."""
    return multiply(run, tmp_path_factory.mktemp("fifty") / "sweep", SWEEPS, num_lines=150)


@pytest.fixture(scope="module")
def page_of_fifty(fifty: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the page of the 50 runs."""
    directory = tmp_path_factory.mktemp("page")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("XDG_CACHE_HOME", str(directory / "cache"))
        report(monkeypatch, directory / "out.html", *fifty)
    return directory / "out.html"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put the index of reports into a directory of the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "feature-dropout" / "report"


def report(monkeypatch: pytest.MonkeyPatch, out: Path, *words: str | Path) -> str:
    monkeypatch.setattr(sys, "argv", ["report", *map(str, words), "--out", str(out)])
    main()
    return out.read_text()


@pytest.mark.slow
def test_the_page_of_many_has_one_script_which_its_policy_names_and_asks_for_nothing(page_of_fifty: Path) -> None:
    html = page_of_fifty.read_text()
    page = Page(html)
    assert page.tags.count("script") == 1
    assert all(reference.startswith(("data:image/png;base64,", "#")) for reference in page.references)
    (script,) = re.findall(r"<script>(.*?)</script>", html, flags=re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'" in html
    assert not {"link", "iframe", "object", "embed", "base"} & set(page.tags)


def test_a_row_is_a_configuration_with_its_settings_and_accuracies(fifty: list[Path]) -> None:
    (table,) = overview.tables(arms_of(read_runs(fifty)))
    assert table.settings == ("objective.temperature", "optimizer.learning_rate")
    assert table.measures[:4] == ("picture, linear", "picture, kNN", "object, linear", "object, kNN")
    assert len(table.rows) == 25
    best = table.rows[0]
    assert [cell.text for cell in best.cells[:2]] == ["0.2", "0.03"]
    assert best.cells[-1].text == "2"
    linear = [row.cells[2].key for row in table.rows]
    assert linear == sorted(linear, key=lambda key: -overview._number(key))
    assert "±" in str(best.cells[2].text)


def test_the_sentences_name_the_best_and_how_many_cannot_be_told_from_it(fifty: list[Path]) -> None:
    picture, second, optimistic = overview.sentences(arms_of(read_runs(fifty)))
    assert re.match(
        r"On the picture, the best of 25 configurations is \S+temperature=0\.2\S* with \S+ ± \S+ %; "
        r"\d+ cannot be told apart from it, and \d+ of 25 are above their untrained encoder\.",
        picture,
    )
    assert second.startswith("On the object, ")
    assert optimistic.startswith("The best of many is optimistic")


def test_the_sentences_say_of_how_many_the_untrained_encoder_is_known(tmp_path: Path) -> None:
    wide = debug.image().encoder.model_dump() | {"embedding_size": 48}
    paths = [
        make_run(tmp_path / "a", name="a", trained={"base": [0.6]}, untrained={"base": [0.2]}),
        make_run(tmp_path / "b", name="b", global_batch_size=16, trained={"base": [0.5]}),
        make_run(tmp_path / "c", name="c", encoder=wide, trained={"base": [0.5]}),
    ]
    every, *_ = overview.sentences(arms_of(read_runs(paths[:2])))
    assert every.endswith(", and 2 of 2 are above their untrained encoder.")
    some, *_ = overview.sentences(arms_of(read_runs(paths)))
    assert some.endswith(", and 2 of the 2 with a probed untrained encoder are above it.")


def test_markdown_of_many_has_a_row_for_each_configuration(fifty: list[Path]) -> None:
    text = as_markdown(arms_of(read_runs(fifty)))
    head = next(line for line in text.splitlines() if line.startswith("| configuration"))
    assert "objective.temperature" in head
    assert sum(line.startswith("| debug-image-") for line in text.splitlines()) >= 25


def test_the_index_gives_what_the_files_give_and_notices_every_change(fifty: list[Path], cache: Path) -> None:
    index = RunIndex(cache)
    metrics = [path / "metrics.jsonl" for path in fifty[:3]]
    for path in metrics:
        os.utime(path, (1e9, 1e9))  # long ago
    plain = [RunIndex(None).read_metrics(path) for path in metrics]
    assert [index.read_metrics(path) for path in metrics] == plain
    entries = sorted(cache.glob("*.json"))
    assert len(entries) == 3
    assert [index.read_metrics(path) for path in metrics] == plain

    value = json.loads(entries[0].read_text())
    value["columns"]["train/loss"] = [0.0] * len(value["columns"]["train/loss"])
    entries[0].write_text(json.dumps(value))
    assert [index.read_metrics(path) for path in metrics] != plain, "it is read from the index"
    for damaged in ("", "{", "[]", '{"version": 1}', '{"version": 1, "stamp": 3, "columns": {"a": 3}}', "[" * 10**5):
        for entry in entries:
            entry.write_text(damaged)
        assert [index.read_metrics(path) for path in metrics] == plain

    with metrics[0].open("a") as file:
        file.write('{"step": 100000, "train/loss": 1.0}\n')
    changed = index.read_metrics(metrics[0])
    assert changed == RunIndex(None).read_metrics(metrics[0]) != plain[0]
    with metrics[0].open("a") as file:
        file.write("damaged\n")
    for _ in range(2):
        assert len(index.read_metrics(metrics[0]).problems) == 1


@pytest.mark.slow
def test_a_cache_that_cannot_be_written_costs_nothing_but_time(
    fifty: list[Path], tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = fifty[10:25]
    with_index = report(monkeypatch, tmp_path / "a.html", *runs)
    shutil.rmtree(cache, ignore_errors=True)
    cache.parent.mkdir(parents=True, exist_ok=True)
    cache.write_text("a file in its place")
    assert report(monkeypatch, tmp_path / "b.html", *runs) == with_index
    cache.unlink()
    assert report(monkeypatch, tmp_path / "c.html", "--no-index", *runs) == with_index
    assert not cache.exists()


def test_old_entries_are_removed(fifty: list[Path], cache: Path) -> None:
    index = RunIndex(cache)
    path = fifty[5] / "metrics.jsonl"
    os.utime(path, (1e9, 1e9))
    index.read_metrics(path)
    index.remove_old()
    (entry,) = cache.glob("*.json")
    os.utime(entry, (1e9, 1e9))
    index.remove_old()
    assert not entry.exists()


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with browser(tmp_path_factory.mktemp("profile")) as running:
        yield running.tab()


SHOWN = "[...document.querySelectorAll('.runs tbody tr')].filter(row => !row.hidden)"


@needs_chromium()
@pytest.mark.process
def test_the_table_filters_sorts_and_hides_in_a_browser(page_of_fifty: Path, tab: Tab) -> None:
    tab.complaints.clear()
    tab.open(page_of_fifty, width=1280)
    assert tab.evaluate(f"{SHOWN}.length") == 25
    assert tab.evaluate("document.querySelector('.count').textContent") == "25 of 25"

    def enter(text: str) -> int:
        tab.evaluate(
            f"(() => {{ const box = document.querySelector('input[type=search]'); box.value = {json.dumps(text)};"
            " box.dispatchEvent(new Event('input')); })()"
        )
        return int(tab.evaluate(f"{SHOWN}.length"))

    assert enter("temperature=0.1") == 5
    assert enter("temperature<0.2 learning_rate>0.02") == 6
    assert enter("nothing-like-it") == 0
    assert enter("IMAGE-temperature=0.5-learn") == 5, "a word without a column of this name is any text"
    assert enter("temperature=0.1") == 5
    visible = "[...document.querySelectorAll('figure svg g[class^=arm]')].filter(line => line.style.display !== 'none')"
    assert tab.evaluate(f"new Set({visible}.map(line => line.getAttribute('class'))).size") == 5
    tab.evaluate(f"{SHOWN}[0].querySelector('input').click()")
    assert tab.evaluate(f"new Set({visible}.map(line => line.getAttribute('class'))).size") == 4
    assert enter("") == 25
    tab.evaluate("document.querySelector('.all').click()")
    assert tab.evaluate(f"{visible}.length") == 0
    tab.evaluate("document.querySelector('.all').click()")
    assert tab.evaluate(f"new Set({visible}.map(line => line.getAttribute('class'))).size") == 25

    def sort(title: str) -> list[str]:
        tab.evaluate(
            "[...document.querySelectorAll('.runs th button')]"
            f".find(button => button.textContent === {json.dumps(title)}).click()"
        )
        return list(tab.evaluate(f"{SHOWN}.map(row => row.cells[2].textContent.trim())"))

    assert sort("temperature") == [text for text in ("1", "0.5", "0.2", "0.1", "0.05") for _ in range(5)]
    assert sort("temperature") == [text for text in ("0.05", "0.1", "0.2", "0.5", "1") for _ in range(5)]
    names = "[...document.querySelectorAll('.runs tbody th')].map(cell => cell.textContent.trim())"
    sort("configuration")
    down = tab.evaluate(names)
    assert down == sorted(down, reverse=True)
    assert tab.complaints == []


@needs_chromium()
@pytest.mark.process
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_of_many_fits_a_phone_and_a_desk(width: int, page_of_fifty: Path, tab: Tab) -> None:
    from tests.trainer.reports.test_report_in_a_browser import BROKEN, CUT, HIDDEN

    tab.complaints.clear()
    tab.open(page_of_fifty, width=width)
    assert tab.evaluate("document.documentElement.scrollWidth") == width
    assert tab.evaluate(CUT) == []
    assert tab.evaluate(HIDDEN) == []
    assert tab.evaluate(BROKEN) == []
    assert tab.complaints == []
