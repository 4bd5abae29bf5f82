"""The page in a real browser, on a phone, a desk and on paper: nothing is cut off, and there are no errors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from configs import demo
from tests.browser import Tab, browser, needs_chromium
from tests.trainer.reports.test_report import make_run
from tests.trainer.reports.test_report_labels import add_groups
from tests.trainer.reports.test_report_study import study_run
from trainer.reports.page import page
from trainer.reports.published import study
from trainer.reports.runs import arms_of, read_runs
from trainer.reports.study_sheet import fill

pytestmark = needs_chromium()

PHONE, DESK, PAPER = 390, 1280, 673  # CSS pixels; A4 less the page's margins has 673
TITLES = {"base": "picture", "overlay": "digit"}

# Every element whose right edge is beyond the window, unless it is in a box that scrolls by itself.
CUT = """
[...document.querySelectorAll("body *")].filter(element => {
  if (element.closest("pre") || element.closest("svg") || !element.getClientRects().length) return false;
  const box = element.closest(".scroll");
  if (box && box !== element && getComputedStyle(box).overflowX !== "visible") return false;
  return element.getBoundingClientRect().right > document.documentElement.clientWidth + 1;
}).map(element => `${element.tagName}.${element.className}: ${element.textContent.slice(0, 60)}`)
"""
# Boxes that scroll, because their content is wider.
SCROLLING = """
[...document.querySelectorAll(".scroll, pre")].filter(box => box.scrollWidth > box.clientWidth + 1).map(box =>
  `${box.className}: ${getComputedStyle(box).backgroundImage.slice(0, 20)}`)
"""
# Text that a box with hidden overflow would cut.
HIDDEN = """
[...document.querySelectorAll("body *")].filter(element =>
  getComputedStyle(element).overflowX === "hidden" && element.scrollWidth > element.clientWidth + 1
).map(element => element.textContent.slice(0, 60))
"""
# Numbers that are on another line than their unit.
BROKEN = """
[...document.querySelectorAll("p, li")].flatMap(element => {
  const found = [], walker = document.createTreeWalker(element, NodeFilter.SHOW_TEXT);
  for (let node; node = walker.nextNode();) {
    for (const match of node.data.matchAll(/\\d[\\s\\u00a0](%|±[\\s\\u00a0]\\d)/g)) {
      const range = document.createRange();
      range.setStart(node, match.index);
      range.setEnd(node, match.index + match[0].length);
      if (new Set([...range.getClientRects()].map(box => Math.round(box.top))).size > 1) found.push(match[0]);
    }
  }
  return found;
})
"""


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with browser(tmp_path_factory.mktemp("profile")) as running:
        yield running.tab()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the pages of two runs, of one run and of a study, with content as wide as it can be."""
    directory = tmp_path_factory.mktemp("pages")
    accuracies = {"base": [0.2, 0.318], "overlay": [0.7, 0.804]}
    runs = [
        make_run(directory / f"run{number}", recipe=recipe, titles=TITLES, trained=accuracies, untrained=accuracies)
        for number, recipe in enumerate((demo.expert, demo.viewmaker))
    ]
    (directory / "study").mkdir()
    of_study = [
        study_run(
            directory / "study",
            "table1",
            f"{player}-{data}",
            seed=seed,
            trained={name: [value[-1] + seed / 50] for name, value in accuracies.items()},
            untrained=accuracies,
            titles=TITLES,
            provenance={"command": "python launch/train.py " + "x" * 300, "cpu": "A Processor" * 9},
        )
        for player in ("simclr", "viewmaker")
        for data in ("cifar10_shapes", "cifar10_digits", "cifar10_letters")
        for seed in (0, 1, 2)
    ]
    titles, three = TITLES | {"site": "hospital"}, accuracies | {"site": [0.5, 0.612]}
    many = make_run(directory / "many", titles=titles, trained=three, untrained=three)
    for other in ("overlay", "site"):
        add_groups(many, "base", ("base", other), 0.125, worst="the long name of a class " * 3, num_small=3)
    for name, chosen in (("two", runs), ("one", runs[:1]), ("study", of_study), ("many", [many])):
        found = read_runs(chosen)
        sheet = fill(study("table1"), found) if name == "study" else None
        (directory / f"{name}.html").write_text(page(arms_of(found), sheet))
    return {name: directory / f"{name}.html" for name in ("one", "two", "study", "many")}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["one", "two", "study", "many"])
@pytest.mark.parametrize("width", [PHONE, DESK])
def test_nothing_is_cut_off_on_a_screen(name: str, width: int, pages: dict[str, Path], tab: Tab) -> None:
    tab.complaints.clear()
    tab.open(pages[name], width=width)
    assert tab.evaluate("document.documentElement.scrollWidth") == width
    assert tab.evaluate(CUT) == []
    assert tab.evaluate(HIDDEN) == []
    assert tab.evaluate(BROKEN) == []
    assert tab.complaints == []
    boxes = tab.evaluate(SCROLLING)
    if width == PHONE:  # there every table becomes a list; only commands may scroll
        assert [box for box in boxes if box.startswith("scroll")] == []
    assert all("linear-gradient" in box for box in boxes if box.startswith("scroll"))  # the hint


@pytest.mark.parametrize("name", ["one", "two", "study", "many"])
def test_nothing_is_cut_off_in_print(name: str, pages: dict[str, Path], tab: Tab) -> None:
    tab.complaints.clear()
    tab.open(pages[name], width=PAPER, media="print")
    assert tab.evaluate("document.documentElement.scrollWidth") == PAPER
    assert tab.evaluate(CUT) == []
    assert tab.evaluate(HIDDEN) == []
    assert tab.evaluate(SCROLLING) == []
    assert tab.evaluate("getComputedStyle(document.body).color") == "rgb(0, 0, 0)"
    assert tab.pdf().startswith(b"%PDF")
    assert tab.complaints == []


def test_columns_of_both_labels_can_be_seen_on_a_phone(pages: dict[str, Path], tab: Tab) -> None:
    tab.open(pages["two"], width=PHONE)
    cells = tab.evaluate(
        """[...document.querySelectorAll(".results tr.arm")].map(row => [...row.querySelectorAll("td")].map(cell => {
          const box = cell.getBoundingClientRect();
          return [cell.firstChild.textContent, box.left >= 0 && box.right <= innerWidth && box.width > 40];
        }))"""
    )
    assert cells == [[["31.8", True], ["30.8", True], ["80.4", True], ["79.4", True]]] * 2
    heads = tab.evaluate(
        """[...document.querySelectorAll(".results .group")].map(head => [head.textContent,
          head.getBoundingClientRect().right <= innerWidth])"""
    )
    assert heads == [["picture", True], ["digit", True]]


def test_the_browser_would_notice_a_page_that_is_cut_or_complains(tmp_path: Path, tab: Tab) -> None:
    """The checks above must be able to fail."""
    path = tmp_path / "bad.html"
    path.write_text(
        '<meta name="viewport" content="width=device-width"><body><div style="width:900px">wide</div>'
        '<p style="width:1px">18.7 %</p><div style="width:9px;overflow:hidden;white-space:nowrap">hidden text</div>'
        "<script>console.error('no')</script><img src='http://127.0.0.1:9/x.png'>"
    )
    tab.complaints.clear()
    tab.open(path, width=PHONE)
    assert tab.evaluate(CUT)
    assert tab.evaluate(HIDDEN) == ["hidden text"]
    assert tab.evaluate(BROKEN) == ["18.7 %"] or tab.evaluate(BROKEN) == ["7 %"]
    assert any("no" in complaint for complaint in tab.complaints)
    assert any("127.0.0.1" in complaint for complaint in tab.complaints)
