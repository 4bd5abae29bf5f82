"""Install tests/second_package, the package of somebody else, as pip would, without a network or a build."""

from __future__ import annotations

import shutil
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from data_pipeline.core import imports, kinds
from data_pipeline.overlays.registry import NAMES as OVERLAYS
from data_pipeline.sources.registry import NAMES as SOURCES
from tests.real_data import REPOSITORY
from trainer.distributed.engines import BaseEngineConfig
from trainer.models.encoder import BaseEncoderConfig
from trainer.objectives import BaseObjectiveConfig
from trainer.views import BaseViewsConfig

SECOND_PACKAGE = Path(__file__).parent / "second_package"
ROOMS = (BaseObjectiveConfig, BaseViewsConfig, BaseEncoderConfig, BaseEngineConfig)


def install(site: Path, *, name: str = "seaside", entry_points: dict[str, dict[str, str]] | None = None) -> Path:
    """Copy the package into `site` with the metadata that its pyproject.toml gives it, and return `site`.

    `name` is that of the distribution. `entry_points`, by group, replace those of the file.
    """
    project = tomllib.loads((SECOND_PACKAGE / "pyproject.toml").read_text())["project"]
    shutil.copytree(SECOND_PACKAGE / "seaside", site / "seaside", ignore=shutil.ignore_patterns("__pycache__"))
    add_distribution(site, name, project["version"], entry_points or project["entry-points"])
    return site


def add_distribution(site: Path, name: str, version: str, entry_points: dict[str, dict[str, str]]) -> None:
    """Write the metadata of a distribution, which says what it has installed."""
    folder = site / f"{name}-{version}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (folder / "RECORD").write_text("seaside/__init__.py,,\nseaside/losses.py,,\n")
    groups = (
        f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in points.items())
        for group, points in entry_points.items()
    )
    (folder / "entry_points.txt").write_text("\n".join(groups))


@contextmanager
def on_path(*directories: Path) -> Iterator[None]:
    """Put directories on the path. At the end, forget what was imported from there, with its kinds.

    The working directory counts as one of them, unless it is this repository.
    """
    path, modules, given = list(sys.path), set(sys.modules), list(imports._given)
    own = {each.resolve() for each in (*directories, Path.cwd())} - {REPOSITORY}
    _forget_kinds()
    sys.path[:0] = map(str, directories)
    try:
        yield
    finally:
        sys.path[:] = path
        for name in set(sys.modules) - modules:
            file = getattr(sys.modules[name], "__file__", None)
            if file is not None and any(Path(file).resolve().is_relative_to(each) for each in own):
                del sys.modules[name]
        imports._given[:] = given
        _forget_kinds()


def _forget_kinds() -> None:
    kinds._entry_points.cache_clear()
    for names in (*(room.kinds for room in ROOMS), OVERLAYS, SOURCES):
        for name, found in list(names._registered.items()):
            if found.__module__ not in sys.modules:
                del names._registered[name]
