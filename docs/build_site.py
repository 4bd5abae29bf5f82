"""Add to the site what docs/ does not hold as a page: README, changelog, notebooks, API reference, table of rooms.

mkdocs calls the functions `on_...` while it builds (`.mkdocs.yml`). The API reference has a page for each package, with
every public module and class. It is written from the files that are there, so no page names a module that was moved.
"""

from __future__ import annotations

import ast
import base64
import json
import re
from dataclasses import dataclass
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
PACKAGES = ("data_pipeline", "trainer", "configs", "launch")
NOTEBOOKS = tuple(sorted((ROOT / "docs").glob("*.ipynb")))
ROOMS_MARKER = re.compile(r"<!-- rooms:.*?-->")


@dataclass(frozen=True)
class Room:
    """A package: its dotted name, the first sentence of its docstring, its public modules, and its lines of code.

    `reexports`: its `__init__.py` offers what its modules define.
    """

    name: str
    summary: str
    modules: tuple[str, ...]
    num_lines: int
    reexports: bool


def rooms() -> list[Room]:
    """Return every package of the project that has modules, in the order of the imports."""
    found = []
    for package in PACKAGES:
        for init in sorted((ROOT / package).rglob("__init__.py")):
            files = sorted(path for path in init.parent.glob("*.py") if path != init)
            name = ".".join(init.parent.relative_to(ROOT).parts)
            modules = tuple(f"{name}.{path.stem}" for path in files if not path.stem.startswith("_"))
            num_lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in [init, *files])
            code = init.read_text(encoding="utf-8")
            reexports = "__all__" in code and not re.search("^class ", code, re.MULTILINE)
            found.append(Room(name, _first_sentence(init), modules, num_lines, reexports))
    return found


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Append the API reference to the navigation."""
    pages = [{room.name: _page_of(room)} for room in rooms()]
    (config.nav or []).append({"API": ["api/index.md", *pages]})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not files in docs/."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    readme = readme.replace("](docs/", "](").replace("](CHANGELOG.md", "](changelog.md")
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").replace("](docs/", "](")
    generated: dict[str, str | bytes] = {"index.md": readme, "changelog.md": changelog}
    for path in NOTEBOOKS:
        generated |= _notebook(path)
    generated["api/index.md"] = "# API reference\n\n" + _table_of_rooms(link=True)
    for room in rooms():
        members = "    options: {members: false}\n" if room.reexports else ""  # they stand where they are defined
        parts = [f"::: {room.name}\n{members}", *(f"::: {name}\n" for name in room.modules)]
        generated[_page_of(room)] = f"# {room.name}\n\n" + "\n".join(parts)
    for name, content in generated.items():
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links to the README at the home page, and put the table of rooms where a page asks for it."""
    markdown = markdown.replace("](../README.md", "](index.md").replace("](../CHANGELOG.md", "](changelog.md")
    for path in NOTEBOOKS:
        markdown = markdown.replace(f"]({path.name}", f"]({path.stem}.md")
    return ROOMS_MARKER.sub(lambda _: _table_of_rooms(link=False), markdown)


def _notebook(path: Path) -> dict[str, str | bytes]:
    """Return the page of a notebook with the outputs that it holds, and its pictures, by file name."""
    parts: list[str] = []
    pictures: dict[str, str | bytes] = {}
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {"text/plain": output.get("text", "")})
            if "image/png" in data:
                name = f"{path.stem}-{len(pictures) + 1}.png"
                pictures[name] = base64.b64decode("".join(data["image/png"]))
                parts.append(f"![output of the cell above]({name})")
            elif text := "".join(data["text/plain"]).rstrip():
                parts.append(f"```text\n{text}\n```")
    return {f"{path.stem}.md": "\n\n".join(parts) + "\n", **pictures}


def _table_of_rooms(*, link: bool) -> str:
    lines = ["| room | what it does | modules | lines |", "|---|---|---|---|"]
    for room in rooms():
        page = Path(_page_of(room)).name if link else _page_of(room)
        lines.append(f"| [{room.name}]({page}) | {room.summary} | {len(room.modules)} | {room.num_lines:,} |")
    return "\n".join(lines)


def _page_of(room: Room) -> str:
    return f"api/{room.name}.md"


def _first_sentence(init: Path) -> str:
    text = " ".join((ast.get_docstring(ast.parse(init.read_text(encoding="utf-8"))) or "").split("\n\n")[0].split())
    return re.split(r"(?<=\.)\s", text, maxsplit=1)[0]
