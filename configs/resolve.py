"""Find a recipe or a study by name, apply overrides, and explain where each value comes from."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from configs.base import NAME_OF_DATA
from data_pipeline.core.errors import UserError, nearest, printable
from data_pipeline.core.overrides import set_paths
from data_pipeline.core.schema import flatten
from data_pipeline.remote.cache import is_command, refuse_untyped_command
from data_pipeline.storage.manifest import INDEX_NAME, is_tars
from trainer.config import RunConfig, read_config

CONFIG_SUFFIXES = {".json", ".yaml", ".yml"}
STUDIES = "studies"
_MAX_DATA_CHARACTERS = 60


def resolve_recipe(name: str, overrides: Sequence[str] = (), *, allow_pipe: bool = False) -> RunConfig:
    """Return the RunConfig of a recipe with overrides such as "a.b=c"; the value is YAML.

    name: `module:function` in configs/, such as "viewmaker:digits", or the path of a .json or .yaml file with the
        fields of a RunConfig.
    allow_pipe: whether a file may name a `pipe:` location, which runs a command. A recipe may always name one.

    `NAME_OF_DATA` in the name of a recipe becomes the name of the train set, unless an override gives another name.

    Raises `UserError`; for an unknown name or key, it names the nearest valid one.
    """
    if Path(name).suffix not in CONFIG_SUFFIXES:
        recipe = _recipe(name)()
        config = recipe.override(overrides, where=f"config {name}")
        own_name = recipe.name.replace(NAME_OF_DATA, _name_of(config.data.train_dir))
        return config if config.name != recipe.name else config.model_copy(update={"name": own_name})
    from_file = read_config(Path(name), allow_pipe=allow_pipe)
    config = from_file.override(overrides, where=f"config {name}")
    for location in {from_file.data.train_dir, from_file.data.test_dir} & {config.data.train_dir, config.data.test_dir}:
        refuse_untyped_command(location, from_file.data.remote)
    return config


def _name_of(location: str) -> str:
    """Return a name for the data at a location: its last folder but `train`, in the characters of a run's name.

    For tars, a list of tars or an index, the name is that of the folder that holds them.

    Examples:
        >>> _name_of("data/My photos/train"), _name_of("https://host/birds/train/"), _name_of("pipe:cat {name}")
        ('My-photos', 'birds', 'data')
        >>> _name_of("imagenet/train-{0000..0009}.tar"), _name_of("imagenet/train/.tar_index")
        ('imagenet', 'imagenet')
    """
    parts = [] if is_command(location) else location.split("/")
    folders = [part for part in parts if part not in ("", "train", "..", INDEX_NAME) and not is_tars(part)]
    letters = re.sub(r"[^A-Za-z0-9._+=-]+", "-", folders[-1]).strip("-.") if folders else ""
    return letters[:_MAX_DATA_CHARACTERS] or "data"


def resolve_study(name: str, overrides: Sequence[str] = ()) -> list[RunConfig]:
    """Return the runs of a study such as "studies:table1", with overrides such as "a.b=c" applied to each.

    Raises `UserError` if two runs have the same name and seed; for an unknown name or key, it names the nearest valid
    one.
    """
    known = studies()
    if name not in known:
        raise UserError(f'unknown study "{name}"{nearest(name, known)}')
    members: list[RunConfig] = _function(name)()
    resolved = [
        member.override(overrides, where=f"config {name} ({member.name}, seed {member.seed})") for member in members
    ]
    seen: set[tuple[str, int]] = set()
    for member in resolved:
        if (member.name, member.seed) in seen:
            raise UserError(
                f"{name} has two runs called {member.name} with seed {member.seed}; give them different names or seeds"
            )
        seen.add((member.name, member.seed))
    return resolved


def explain(name: str, overrides: Sequence[str] = ()) -> str:
    """Return one line for each setting: its name, its value, and its origin (--set, the recipe, or the default).

    If --set gives a section another kind, the other values of that section are defaults.
    """
    config = resolve_recipe(name, overrides, allow_pipe=True)  # no data are read
    recipe = flatten(resolve_recipe(name, allow_pipe=True))
    by_hand = {".".join(path) for path in set_paths(overrides)}
    given = _given(config)
    lines = []
    for path, value in flatten(config).items():
        from_recipe = path in given and (recipe.get(path) == value or path == "name")
        origin = "--set" if path in by_hand else name if from_recipe else "default"
        lines.append((path, printable(f"{value}"), origin))
    width = max(len(path) for path, _, _ in lines)
    value_width = max(len(value) for _, value, _ in lines)
    return "\n".join(f"{path:{width}}  {value:{value_width}}  {origin}" for path, value, origin in lines)


def describe_recipes() -> str:
    """Return one line for every recipe and every study: its name, and the first paragraph of its docstring."""
    groups = {"recipes, for --config": recipes(), "studies, for --study of launch/slurm.py": studies()}
    width = max(len(name) for names in groups.values() for name in names)
    lines = []
    for title, names in groups.items():
        lines += [f"{title}:", *(f"  {name:{width}}  {_summary(_function(name))}" for name in names)]
    return "\n".join(lines)


def recipes() -> list[str]:
    """Return the names of all recipes, as module:function."""
    return [name for module in _modules() if module != STUDIES for name in _names(module)]


def studies() -> list[str]:
    """Return the names of all studies, as studies:function."""
    return _names(STUDIES)


def _recipe(name: str) -> Callable[[], RunConfig]:
    known = recipes()
    if name not in known:
        raise UserError(f'unknown recipe "{name}"{nearest(name, known)}')
    recipe: Callable[[], RunConfig] = _function(name)
    return recipe


def _modules() -> list[str]:
    """Return the names of the modules in configs/ that hold recipes or studies."""
    return [
        info.name for info in pkgutil.iter_modules([str(Path(__file__).parent)]) if info.name not in {"resolve", "base"}
    ]


def _names(module_name: str) -> list[str]:
    """Return the public functions of a module in configs/, as module:function."""
    module = importlib.import_module(f"configs.{module_name}")
    return [
        f"{module_name}:{name}"
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if function.__module__ == module.__name__ and not name.startswith("_")
    ]


def _function(name: str) -> Callable[[], Any]:
    """Return the function named `name`, such as module:function."""
    module_name, _, function_name = name.partition(":")
    function: Callable[[], Any] = getattr(importlib.import_module(f"configs.{module_name}"), function_name)
    return function


def _summary(function: Callable[[], Any]) -> str:
    """Return the first paragraph of a docstring on one line."""
    return " ".join((inspect.getdoc(function) or "").partition("\n\n")[0].split())


def _given(config: RunConfig) -> set[str]:
    """Return the dotted paths whose value is not the default of the field."""

    def walk(model: Any, path: str) -> set[str]:
        found: set[str] = set()
        for field_name, field in type(model).model_fields.items():
            value, default = getattr(model, field_name), field.get_default(call_default_factory=True)
            here = f"{path}{field_name}"
            if hasattr(type(value), "model_fields"):
                found |= walk(value, f"{here}.")
                if type(value) is not type(default):  # the recipe sets the kind
                    found.add(f"{here}.kind")
            elif value != default:
                found.add(here)
        return found

    return walk(config, "")
