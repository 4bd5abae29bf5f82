"""The page in a real browser, on a phone, a desk and on paper: nothing is cut off, and there are no errors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest

from configs import debug
from tests.browser import Tab, browser, needs_chromium
from tests.trainer.reports.made_runs import make_run
from trainer.reports.page import page
from trainer.reports.runs import read_runs
from trainer.reports.table import measure

pytestmark = needs_chromium()

PHONE, DESK, PAPER = 390, 1280, 673  # CSS pixels; A4 less the page's margins has 673

# Every element whose right edge is beyond the window, unless it is in a box that scrolls by itself.
CUT = """
[...document.querySelectorAll("body *")].filter(element => {
  if (element.closest("pre") || element.closest("svg") || !element.getClientRects().length) return false;
  const box = element.closest(".scroll");
  if (box && box !== element && getComputedStyle(box).overflowX !== "visible") return false;
  return element.getBoundingClientRect().right > document.documentElement.clientWidth + 1;
}).map(element => `${element.tagName}.${element.className}: ${element.textContent.slice(0, 60)}`)
"""
# Text that a box with hidden overflow would cut.
HIDDEN = """
[...document.querySelectorAll("body *")].filter(element =>
  getComputedStyle(element).overflowX === "hidden" && element.scrollWidth > element.clientWidth + 1
).map(element => element.textContent.slice(0, 60))
"""


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with browser(tmp_path_factory.mktemp("profile")) as running:
        yield running.tab()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the pages of two runs, and of nine with three labels, long names and a long command."""
    directory = tmp_path_factory.mktemp("pages")
    titles, accuracies = {"base": "picture", "overlay": "digit"}, {"base": [0.2, 0.318], "overlay": [0.7, 0.804]}
    two = [
        make_run(directory / f"run{number}", recipe=recipe, titles=titles, trained=accuracies, untrained=accuracies)
        for number, recipe in enumerate((debug.image, debug.viewmaker))
    ]
    three = accuracies | {"site": [0.5, 0.612]}
    many = [
        make_run(
            directory / f"many{number}",
            name=f"a-configuration-with-a-long-name.temperature={number}",
            num_epochs=number + 1,
            titles=titles | {"site": "hospital"},
            trained=three,
            untrained=three,
            provenance={"command": "python launch/train.py " + "x" * 300, "cpu": "A Processor" * 9},
        )
        for number in range(9)
    ]
    for name, chosen in (("two", two), ("many", many)):
        runs = read_runs(chosen)
        (directory / f"{name}.html").write_text(page(runs, measure(runs)))
    return {name: directory / f"{name}.html" for name in ("two", "many")}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["two", "many"])
@pytest.mark.parametrize(("width", "media"), [(PHONE, "screen"), (DESK, "screen"), (PAPER, "print")])
def test_nothing_is_cut_off(
    name: str, width: int, media: Literal["screen", "print"], pages: dict[str, Path], tab: Tab
) -> None:
    tab.complaints.clear()
    tab.open(pages[name], width=width, media=media)
    assert tab.evaluate("document.documentElement.scrollWidth") == width
    assert tab.evaluate(CUT) == []
    assert tab.evaluate(HIDDEN) == []
    assert tab.complaints == []
    if media == "print":
        assert tab.evaluate("getComputedStyle(document.body).color") == "rgb(0, 0, 0)"
    elif name == "two":  # the picture and the sentence are on the first screen of a phone
        assert tab.evaluate('document.querySelector(".verdict").getBoundingClientRect().bottom') < 844


def test_the_browser_would_notice_a_page_that_is_cut_or_complains(tmp_path: Path, tab: Tab) -> None:
    """The checks above must be able to fail."""
    path = tmp_path / "bad.html"
    path.write_text(
        '<meta name="viewport" content="width=device-width"><body><div style="width:900px">wide</div>'
        '<div style="width:9px;overflow:hidden;white-space:nowrap">hidden text</div>'
        "<script>console.error('no')</script><img src='http://127.0.0.1:9/x.png'>"
    )
    tab.complaints.clear()
    tab.open(path, width=PHONE)
    assert tab.evaluate(CUT)
    assert tab.evaluate(HIDDEN) == ["hidden text"]
    assert any("no" in complaint for complaint in tab.complaints)
    assert any("127.0.0.1" in complaint for complaint in tab.complaints)
