"""The structure of the repository: which room may import which, and what may not be there at all."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("data_pipeline", "trainer", "configs", "launch")  # each may import those before it, and itself
VISIBLE = {"docs", "setup.py", "README.md", "Makefile", "benchmarks", "tests", "CHANGELOG.md", "CITATION.cff", *ROOMS}


@cache
def tracked_files() -> tuple[Path, ...]:
    """Every file that git tracks, relative to the root of the repository."""
    command = ["git", "-c", "safe.directory=*", "ls-files", "-z"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return tuple(path for name in listing.split("\0") if name and (ROOT / (path := Path(name))).is_file())


def python_files(*tops: str) -> list[Path]:
    return [path for path in tracked_files() if path.suffix == ".py" and path.parts[0] in tops]


@cache
def imports_of(path: Path) -> tuple[str, ...]:
    """Return the dotted name of everything that a module imports: at the top, inside functions or for type checking."""
    found = []
    for node in statements(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = path.parts[:-1]
            above = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*above, *([node.module] if node.module else [])])
            found += [f"{module}.{alias.name}" for alias in node.names]
    return tuple(found)


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements of a module, also those inside others."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield node
            yield from statements(node)


@pytest.mark.parametrize("room", ROOMS)
def test_imports_point_one_way(room: str) -> None:
    forbidden = {*ROOMS[ROOMS.index(room) + 1 :], "tests", "benchmarks"}
    files = python_files(room)
    assert files
    wrong = [f"{path}: {name}" for path in files for name in imports_of(path) if name.split(".")[0] in forbidden]
    assert not wrong


@cache
def import_graph() -> dict[str, set[str]]:
    """Return, for each of our modules, those that it imports."""
    files = {".".join(path.with_suffix("").parts).removesuffix(".__init__"): path for path in python_files(*ROOMS)}
    return {
        module: {name if name in files else name.rpartition(".")[0] for name in imports_of(path)} & files.keys()
        for module, path in files.items()
    }


def modules_of(room: str) -> set[str]:
    return {module for module in import_graph() if f"{module}.".startswith(f"{room}.")}


def reached_from(modules: set[str]) -> set[str]:
    """All that these modules import, and what those import, and so on."""
    reached, waiting = set(modules), list(modules)
    while waiting:
        module = waiting.pop()
        new = set(import_graph()[module]) - reached
        reached |= new
        waiting += new
    return reached


def test_no_imports_go_round_in_a_circle() -> None:
    try:
        TopologicalSorter(import_graph()).prepare()
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


def test_rooms_of_the_trainer_stand_one_above_the_other() -> None:
    """A folder counts as one, so that all of it can be read after what it imports."""
    rooms: dict[str, set[str]] = {}
    for module in modules_of("trainer") - {"trainer"}:
        reached = {name for name in import_graph()[module] if name.startswith("trainer.")}
        rooms.setdefault(room_of(module), set()).update(room_of(name) for name in reached)
    assert len(rooms) > 30
    try:
        TopologicalSorter({room: below - {room} for room, below in rooms.items()}).prepare()
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


def room_of(module: str) -> str:
    """Return the folder or file at the top of a package, such as "trainer.views"."""
    return ".".join(module.split(".")[:2])


@pytest.mark.parametrize(
    ("room", "never"),
    [
        ("trainer.objectives", ("trainer.distributed.engines", "trainer.checkpoint")),
        ("trainer.models", ("trainer.distributed.engines", "trainer.checkpoint")),
        ("trainer.distributed", ("trainer.objectives",)),
        ("trainer.train", ("trainer.analyses", "trainer.reports", "trainer.theory")),
        ("launch.states", ("trainer.config", "trainer.data", "trainer.distributed")),  # without torch, so in a second
    ],
)
def test_a_room_knows_nothing_of(room: str, never: tuple[str, ...]) -> None:
    """Not by way of another room either."""
    reached = reached_from(modules_of(room))
    assert len(reached) > 5
    assert not [module for other in never for module in reached & modules_of(other)]


PARTS = ("trainer.objectives", "trainer.views", "trainer.models", "trainer.probes", "data_pipeline.loading")
FOR_FEW = {
    "aiohttp",
    "deepspeed",
    "matplotlib",
    "pandas",
    "scipy",
    "sklearn",
    "soundfile",
    "timm",
    "wandb",
}


@pytest.mark.process
@pytest.mark.parametrize(
    ("imports", "heavy"),
    [
        (["import launch.rank, launch.train", *(f"from {part} import *" for part in PARTS)], FOR_FEW),
        (["import data_pipeline.__main__, data_pipeline.tools.look"], {*FOR_FEW, "torch"}),
    ],
    ids=["a rank and the parts of the library", "look"],
)
def test_what_starts_often_imports_nothing_that_it_seldom_needs(imports: list[str], heavy: set[str]) -> None:
    """Each takes a rank half a second to start, and hundreds of files that all ranks of a cluster open at once."""
    said = subprocess.run(
        [sys.executable, "-c", "\n".join([*imports, "import sys", "print(*sys.modules)"])],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert heavy & set(said.stdout.split()) == set()


def test_the_visible_root() -> None:
    assert {path.parts[0] for path in tracked_files() if not path.parts[0].startswith(".")} == VISIBLE


def test_no_file_is_a_drawer() -> None:
    assert not [path for path in tracked_files() if path.stem in {"utils", "util", "common", "misc", "helpers"}]


def test_nothing_names_what_is_not_in_the_repository() -> None:
    """No machine's paths, no notes that a reader does not have; where the real data may lie is known to one file."""
    notes = "|".join(("design", "facts", "methods", "requirements", "style"))
    pattern = re.compile(rf"\.\./shared|/(work|root|home)/|\b({notes})\.md\b|\bmethods [A-H]\.?\d")
    wrong = []
    for path in tracked_files():
        if path in {Path("tests/real_data.py"), Path("tests/test_house.py")}:
            continue
        text = (ROOT / path).read_bytes().decode(errors="replace")
        wrong += [f"{path}:{text[: m.start()].count(chr(10)) + 1}: {m.group()}" for m in pattern.finditer(text)]
    assert not wrong


def test_the_training_loop_can_be_read_aloud() -> None:
    tree = ast.parse((ROOT / "trainer" / "train.py").read_text())
    (loop,) = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "run")
    assert loop.end_lineno is not None
    assert loop.end_lineno - loop.lineno < 25


def test_each_promise_of_the_docs_names_a_test_that_exists() -> None:
    """In docs/reliability.md the last cell of a promise names files of tests/, or folders of them."""
    text = (ROOT / "docs" / "reliability.md").read_text().partition("## Exact")[2]
    rows = [line.rstrip(" |").rpartition("|")[2] for line in text.splitlines() if line.startswith("| ")]
    cells = [row for row in rows if row.strip() != "test"]
    assert len(cells) > 25
    for cell in cells:
        named = re.findall(r"`([\w/]+(?:\.py)?)`", cell)
        assert named, cell
        for name in named:
            path = ROOT / "tests" / name
            assert path.is_file() or any(path.rglob("test_*.py")), name
