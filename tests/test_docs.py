"""README.md and docs/ say what is so: links lead to files, commands, settings and files exist, and examples run.

No command of the docs is run here, except the example of a new overlay: the others are compared with the `--help` of
their programs.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import re
import runpy
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from pydantic import BaseModel

from configs.resolve import recipes, studies
from data_pipeline.building.datasets import DATASETS
from data_pipeline.overlays.registry import OVERLAYS
from docs import gallery
from tests.config_models import models_in
from tests.nursery import run_python
from tests.real_data import REPOSITORY
from trainer.analyze import ANALYSES
from trainer.config import RunConfig
from trainer.views.policy import VIEWS

PAGES = [REPOSITORY / "README.md", REPOSITORY / "CHANGELOG.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
OF_OTHERS = "own-code.md"
TOPS = ("configs", "data_pipeline", "trainer", "launch", "benchmarks", "tests", "docs", ".ci")

# What docs/contributing.md says: the class in a file of its own, and a line in the registry.
WITH_STRIPES = """
import sys
from data_pipeline.overlays import registry
registry.NAMES.built_in = {**registry.NAMES.built_in, "stripes": "stripes:Stripes"}
from data_pipeline.__main__ import main
main()
"""


@dataclass(frozen=True)
class Command:
    """A call of a program in a page, such as "trainer.probe" or "launch/train.py", with the words after it."""

    page: str
    program: str
    words: tuple[str, ...]

    @property
    def flags(self) -> set[str]:
        return {match for word in self.words for match in re.findall(r"(?<![\w-])--[a-z][\w-]*", word)}

    def values(self, flag: str) -> list[str]:
        return [value for before, value in zip(self.words, self.words[1:], strict=False) if before.strip("[(") == flag]


def code_blocks(text: str) -> list[str]:
    """Fenced and indented blocks, without the spaces of a list item before them."""
    fenced = re.findall(r"^ *```\w*\n(.*?)^ *```", text, flags=re.DOTALL | re.MULTILINE)
    rest = re.sub(r"^ *```\w*\n.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)
    return fenced + [match.group() for match in re.finditer(r"(?:^    .*\n)+", rest, flags=re.MULTILINE)]


def code_spans(text: str) -> list[str]:
    without_fenced = re.sub(r"^ *```\w*\n.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)
    without_blocks = re.sub(r"^    .*$", "", without_fenced, flags=re.MULTILINE)
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", without_blocks)]


def shell_lines(text: str) -> Iterator[str]:
    for block in code_blocks(text):
        for line in re.sub(r" *\\\n *", " ", block).splitlines():
            yield re.sub(r"(^|\s)#.*", "", line)
    yield from code_spans(text)


@cache
def commands() -> list[Command]:
    found = []
    pattern = re.compile(
        r"(?:python -m (?P<module>[\w.]+)|(?:python|torchrun [^;`]*?) (?P<path>\w[\w/]*\.py))(?P<rest>[^;]*)"
    )
    for page in PAGES:
        for line in shell_lines(page.read_text()):
            for match in pattern.finditer(line):
                words = tuple(match["rest"].replace("[", " ").replace("]", " ").split())
                found.append(Command(page.name, match["module"] or match["path"], words))
    return found


@cache
def help_of(program: str, *words: str) -> str:
    """What the program prints for `--help`. It runs in this process, because importing torch anew takes seconds."""
    printed, before = io.StringIO(), sys.argv
    sys.argv = [program, *words, "--help"]
    try:
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            if program.endswith(".py"):
                runpy.run_path(str(REPOSITORY / program), run_name="__main__")
            else:
                runpy.run_module(program, run_name="__main__")
    finally:
        sys.argv = before
    assert printed.getvalue().startswith("usage:")
    return printed.getvalue()


@cache
def settings() -> frozenset[str]:
    """The dotted path of every setting and section that a RunConfig may have."""

    def walk(model: type[BaseModel], prefix: str) -> Iterator[str]:
        for name, field in model.model_fields.items():
            yield prefix + name
            for section in models_in(field.annotation):
                yield from walk(section, f"{prefix}{name}.")

    return frozenset(walk(RunConfig, ""))


def test_the_readme_is_short() -> None:
    assert len((REPOSITORY / "README.md").read_text().splitlines()) <= 130


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if link.startswith(("https://", "http://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_file(), link
        if anchor:
            headings = re.findall(r"^#+ (.*)$", target.read_text(), flags=re.MULTILINE)
            assert anchor in {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}, link


def test_the_readme_leads_to_every_page() -> None:
    """To those of docs/theory by way of docs/theory.md."""
    linked = set(re.findall(r"\]\(docs/(\w[\w-]*\.md)", (REPOSITORY / "README.md").read_text()))
    assert linked == {page.name for page in (REPOSITORY / "docs").glob("*.md")}


def test_every_option_of_every_command_is_in_its_help() -> None:
    assert len(commands()) > 60
    for command in commands():
        if command.program.startswith(("benchmarks.", "tests.")):
            text = (REPOSITORY / f"{command.program.replace('.', '/')}.py").read_text()
        elif command.program.startswith("tests/"):
            text = (REPOSITORY / command.program).read_text()
        elif command.program == "data_pipeline":
            text = help_of(command.program, command.words[0])
        else:
            assert command.program.startswith(TOPS), command
            text = help_of(command.program)
        known = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", text))
        assert command.flags <= known | {"--help"}, command


def test_every_recipe_study_dataset_analysis_and_setting_of_a_command_is_there() -> None:
    for command in commands():
        if command.page == OF_OTHERS:  # a test of its own runs these
            continue
        for recipe in command.values("--config"):
            assert recipe in {*recipes(), "RECIPE"} or "$" in recipe, command
        for study in command.values("--study"):
            name = study.removeprefix("studies:")
            assert f"studies:{name}" in studies() or study.strip("NAME") == "" or "$" in study, command
        for setting in command.values("--set") if command.program in ("launch/train.py", "launch/slurm.py") else ():
            assert setting.partition("=")[0] in {*settings(), "a.b", "NAME"}, command
        if command.program == "trainer.analyze" and command.words:
            assert command.words[0] in {*ANALYSES, "NAME"}, command
        if command.program == "data_pipeline" and command.words[:1] == ("build",) and len(command.words) > 1:
            names = {*DATASETS, "DATASET", "procedural_stripes"}
            assert command.words[1] in names or command.words[1].startswith(("-", "$")), command


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_setting_and_file_that_is_named_is_there(page: Path) -> None:
    for span in code_spans(page.read_text()):
        section = span.partition(".")[0]
        if section in RunConfig.model_fields and re.fullmatch(r"\w+(\.\w+)+(=\S+)?", span):
            assert span.partition("=")[0] in settings(), span
        path = span.partition("::")[0]
        if path.startswith(tuple(f"{top}/" for top in TOPS)) and re.fullmatch(r"[\w./-]+", path):
            below_tests = page.name == "reliability.md"
            assert (REPOSITORY / path).exists() or (below_tests and (REPOSITORY / "tests" / path).exists()), span
        for target in re.findall(r"^make (\w+)", span):
            assert re.search(rf"^{target}:", (REPOSITORY / "Makefile").read_text(), flags=re.MULTILINE), span
        for extras in re.findall(r"pip install -e '\.\[(\S+)\]'", span):
            for extra in extras.split(","):
                assert f'"{extra}": [' in (REPOSITORY / "setup.py").read_text(), span


def test_the_tree_of_the_architecture_page_is_that_of_the_code() -> None:
    text = (REPOSITORY / "docs" / "architecture.md").read_text()
    (tree,) = [block for block in code_blocks(text) if "data_pipeline/" in block and "trainer/" in block]
    top, seen = "", set()
    for line in tree.splitlines():
        depth = len(line) - len(line.lstrip()) - 4
        names = re.findall(r"^\s*(\S+/)|(?<=\s)(\w+\.py)(?=\s)", line)
        for name in (first or second for first, second in names):
            top = name if depth == 0 else top
            path = name if depth == 0 else top + name
            assert (REPOSITORY / path).exists(), path
            seen.add(path)
    rooms = {f"{init.parent.relative_to(REPOSITORY)}/" for init in (REPOSITORY / "trainer").glob("*/__init__.py")}
    rooms |= {
        f"{init.parent.relative_to(REPOSITORY)}/" for init in (REPOSITORY / "data_pipeline").glob("*/__init__.py")
    }
    assert rooms <= seen


def test_the_gallery_shows_every_overlay_and_every_view_policy() -> None:
    """But for policies by epoch, which take the others in turn."""
    datasets = ["spoken_noise", *(dataset for _, dataset, *_ in gallery.DATASETS)]
    assert {name for name in OVERLAYS if any(dataset.endswith(f"_{name}") for dataset in datasets)} == set(OVERLAYS)
    kinds = re.findall(r"'kind': '(\w+)'", str([gallery.VIEWS, gallery.SOUND_VIEWS]))
    assert {*kinds, "by_epoch"} >= set(VIEWS)


@pytest.mark.slow
def test_the_gallery_can_be_drawn_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one or two rows of each picture."""
    monkeypatch.setattr(gallery, "GALLERY", tmp_path)
    monkeypatch.setattr(gallery, "DATASETS", gallery.DATASETS[:1])
    monkeypatch.setattr(gallery, "VIEWS", {"crop": gallery.CROP})
    monkeypatch.setattr(gallery, "SOUND_VIEWS", {"waveform": {"kind": "waveform"}})
    monkeypatch.setattr(sys, "argv", ["gallery.py"])
    gallery.main()
    for name in ("datasets", "views", "sounds"):
        drawn, shown = (Image.open(folder / f"{name}.webp") for folder in (tmp_path, REPOSITORY / "docs/gallery"))
        assert drawn.width == shown.width
        assert np.asarray(drawn).std() > 20


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_examples_in_python_import_is_there(page: Path) -> None:
    for block in re.findall(r"^ *```python\n(.*?)^ *```", page.read_text(), flags=re.DOTALL | re.MULTILINE):
        for node in ast.walk(ast.parse(inspect.cleandoc(block))):
            if isinstance(node, ast.ImportFrom) and node.module != "spread":
                names: dict[str, object] = {}
                exec(ast.unparse(node), names)
                assert names.keys() >= {alias.asname or alias.name for alias in node.names}


@pytest.mark.process
def test_the_new_overlay_builds_and_verifies(tmp_path: Path) -> None:
    assert "stripes" not in OVERLAYS
    page = (REPOSITORY / "docs" / "contributing.md").read_text()
    (block,) = re.findall(r"^ *```python\n(.*?)^ *```", page, flags=re.DOTALL | re.MULTILINE)
    code = inspect.cleandoc(block)
    assert len(code.splitlines()) <= 20
    (tmp_path / "stripes.py").write_text(code)

    def run(*arguments: str) -> str:
        command = [sys.executable, "-c", WITH_STRIPES, *arguments]
        done = run_python(command, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run("build", "procedural_stripes", "--out", "data", "--limit", "40", "--overlay", "online", "--workers", "1")
    assert "40 samples" in run("verify", "data")
    run("preview", "data", "--out", "grid.png")
    assert (tmp_path / "grid.png").stat().st_size > 10_000


TROUBLESHOOTING, CLUSTER = "troubleshooting.md", "cluster.md"
OF_SLURM = re.compile(r"PENDING|\(|srun:|oom-kill|Node failure|Connection ")


def errors_quoted_by(page: str) -> list[str]:
    text = (REPOSITORY / "docs" / page).read_text()
    if page == TROUBLESHOOTING:
        return re.findall(r'"([^"]+)"', text)
    cells = re.findall(r"^\| (`.*?) \| ", text.partition("## What an error means")[2], flags=re.MULTILINE)
    return [quote for cell in cells for quote in re.findall(r"`([^`]+)`", cell) if not OF_SLURM.match(quote)]


@pytest.mark.parametrize("page", [TROUBLESHOOTING, CLUSTER])
def test_each_error_of_ours_that_a_page_quotes_is_one_of_the_code(page: str) -> None:
    """A quote may leave out values, by `...` or in capitals."""
    files = [path for top in TOPS[:4] for path in (REPOSITORY / top).rglob("*") if path.suffix in {".py", ".sh"}]
    sources = "\n".join(path.read_text() for path in files)
    code = " ".join(re.sub(r'"\s*\n\s*f?"', "", sources).split())
    quotes = errors_quoted_by(page)
    assert len(quotes) > 4
    values = r"\.\.\.|\b(?:[A-Z]|HOST|PORT|RUN_DIR|RUNNING|SIG\w+ asked|/tmp)\b|/tmp"
    fragments = [part.strip(" ,:()") for quote in quotes for part in re.split(values, quote)]
    assert not [fragment for fragment in fragments if fragment not in code]
