"""Find a recipe or a study by name, apply overrides, and explain where each value comes from."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import pkgutil
import re
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from pydantic import ValidationError

from configs.base import NAME_OF_DATA, overridden
from data_pipeline.core.errors import UserError, nearest, printable
from data_pipeline.core.imports import (
    PYTHON_SUFFIX,
    find_in_working_directory,
    import_code,
    import_module,
    import_object,
)
from data_pipeline.core.kinds import GROUP_PREFIX
from data_pipeline.core.overrides import merge, set_paths
from data_pipeline.core.schema import flatten, given_settings
from data_pipeline.core.validation import describe
from data_pipeline.storage.locations import INDEX_NAME, is_tars
from trainer.config import RunConfig, read_settings
from trainer.config_rules import check_classes, check_sections
from trainer.data import DataConfig

CONFIG_SUFFIXES = {".json", ".yaml", ".yml"}
STUDIES = "studies"
BASE: Final = "base"  # the key of a config file that holds only what differs
RECIPE_GROUP: Final = f"{GROUP_PREFIX}recipes"  # of entry points: modules with recipes
_MAX_DATA_CHARACTERS = 60


def resolve_recipe(name: str, overrides: Sequence[str] = ()) -> RunConfig:
    """Return the RunConfig of a recipe with overrides such as "a.b=c"; the value is YAML.

    name: `module:function` in configs/, such as "viewmaker:digits"; the import path of a function that returns a
        RunConfig, such as "my_package.recipes:mine"; a function in a file, such as "./mine.py:big"; or the path of a
        .json or .yaml file with the fields of a RunConfig. With a line `base: NAME`, such a file holds only what
        differs from the recipe or the file NAME; a relative path is relative to the file.

    `NAME_OF_DATA` in the name of a recipe becomes the name of the train set, unless an override gives another name.
    Relative paths of data are of this directory, and become absolute.

    Raises `UserError`; for an unknown name or key, it names the nearest valid one.
    """
    where = f"config {name}"
    recipe = RunConfig.parse(_settings(name), where=name)
    config = _with_absolute_paths(recipe.override(overrides, where=where))
    if config.name == recipe.name:
        own_name = recipe.name.replace(NAME_OF_DATA, _name_of_data(config.data))
        config = config.model_copy(update={"name": own_name})
    given = "".join(f" --set {override}" for override in overrides)
    check_sections(config, where=f"{where} with{given}" if given else where)
    return config


def _with_absolute_paths(config: RunConfig) -> RunConfig:
    return config.model_copy(update={"data": config.data.absolute(), "encoder": config.encoder.absolute()})


def _settings(name: str) -> dict[str, Any]:
    """Return the settings of a recipe or of a file. The settings of a file replace those of its base, if it has one.

    Raises `UserError` if the base is a recipe that is not of this project, because a config imports nothing.
    """
    path = Path(name)
    if path.suffix not in CONFIG_SUFFIXES:
        return _recipe(name).model_dump(mode="json")
    values = read_settings(path)
    if BASE not in values:
        return values
    base = str(values.pop(BASE))
    if Path(base).suffix in CONFIG_SUFFIXES:
        base = str(path.parent / base)
    elif base not in recipes():
        raise UserError(f"{path}: {BASE} is {base}, which is not a recipe of this project{nearest(base, recipes())}")
    return merge(_settings(base), values)


def _name_of_data(data: DataConfig) -> str:
    """Return a name for the train set of a run: its last folder but `train`, or the names of the parts of a mixture.

    Tars, lists of tars and indexes have the name of their folder.
    """
    location = data.train_dir or "+".join(data.train_locations)
    no_name = {"", "train", "..", INDEX_NAME}
    folders = [part for part in location.split("/") if part not in no_name and not is_tars(part)]
    letters = re.sub(r"[^A-Za-z0-9._+=-]+", "-", folders[-1]).strip("-.") if folders else ""
    return letters[:_MAX_DATA_CHARACTERS] or "data"


def resolve_study(name: str, overrides: Sequence[str] = ()) -> list[RunConfig]:
    """Return the runs of a study such as "studies:table1", with each override such as "a.b=c" where `a.b` exists.

    The name of the study is their tag and group, by which W&B finds them.

    Raises `UserError` if two runs have the same name and seed; for an unknown name or key, it names the nearest valid
    one.
    """
    members: list[RunConfig] = _function_anywhere(name, known=studies(), what="study")()
    if not (members and isinstance(members, Sequence) and all(isinstance(each, RunConfig) for each in members)):
        raise UserError(f"the study {name} must return a list of RunConfigs, at least one")
    study = name.rpartition(":")[2]
    for member in members:
        check_classes(member)
    members = [
        member.model_copy(update={"tracking": member.tracking.model_copy(update={"tags": (study,), "group": study})})
        for member in members
    ]
    resolved = [_with_absolute_paths(run) for run in overridden(members, overrides, where=f"config {name}")]
    refuse_namesakes(resolved, where=name)
    for member in resolved:
        check_sections(member, where=f"{name} ({member.name}, seed {member.seed})")
    return resolved


def refuse_namesakes(runs: Sequence[RunConfig], *, where: str) -> None:
    """Raise `UserError` if two runs have the same name and seed, and so the same directory."""
    ((name, seed), count), *_ = Counter((run.name, run.seed) for run in runs).most_common(1)
    if count > 1:
        raise UserError(f"{where} has {count} runs called {name} with seed {seed}; give them other names or seeds")


def explain(name: str, overrides: Sequence[str] = ()) -> str:
    """Return one line for each setting: its name, its value, and its origin: --set, `name`, or the default.

    If a section has another kind than in `name`, its other values are defaults. Raises `UserError` like
    `resolve_recipe`.
    """
    config = resolve_recipe(name, overrides)
    recipe = flatten(resolve_recipe(name))
    by_hand = {".".join(path) for path in set_paths(overrides)}
    given = given_settings(config)
    lines = []
    for path, value in flatten(config).items():
        is_given = any(f"{path}.".startswith(f"{given_path}.") for given_path in given)  # a mapping is given as a whole
        from_recipe = is_given and (recipe.get(path) == value or path == "name")
        origin = "--set" if path in by_hand else name if from_recipe else "default"
        lines.append((path, printable(f"{value}"), origin))
    width = max(len(path) for path, _, _ in lines)
    value_width = max(len(value) for _, value, _ in lines)
    return "\n".join(f"{path:{width}}  {value:{value_width}}  {origin}" for path, value, origin in lines)


def describe_recipes() -> str:
    """Return one line for every recipe and every study: its name, and the first paragraph of its docstring.

    The recipes of other packages are those of the modules that they name by entry points in `RECIPE_GROUP`.
    """
    functions = dict(_known())
    groups = {"recipes, for --config": recipes(), "studies, for --study of launch/slurm.py": studies()}
    for entry_point in entry_points(group=RECIPE_GROUP):
        module = import_module(entry_point.value, wanted=f"the entry point {entry_point.name}")
        of_others = _functions(module, prefix=entry_point.value)
        groups[f"recipes of {entry_point.value}"] = list(of_others)
        functions |= of_others
    width = max(map(len, functions))
    lines = []
    for title, names in groups.items():
        lines += [f"{title}:", *(f"  {name:{width}}  {_summary(functions[name])}" for name in names)]
    return "\n".join(lines)


def recipes() -> list[str]:
    """Return the names of all recipes, as module:function."""
    return [name for name in _known() if name.partition(":")[0] != STUDIES]


def studies() -> list[str]:
    """Return the names of all studies, as studies:function."""
    return [name for name in _known() if name.partition(":")[0] == STUDIES]


def _recipe(name: str) -> RunConfig:
    """Return what a recipe returns, which is named as in `resolve_recipe`. Raises `UserError` if there is none."""
    try:
        config = _function_anywhere(name, known=recipes(), what="recipe")()
    except ValidationError as error:
        raise UserError(f"the recipe {name}: {describe(error)}") from error
    if not isinstance(config, RunConfig):
        raise UserError(f"the recipe {name} returns {type(config).__name__}; it must return a RunConfig")
    check_classes(config)
    return config


def _function_anywhere(name: str, *, known: Sequence[str], what: str) -> Callable[[], Any]:
    """Return a function of configs/, of a file or of another package. Raises `UserError` if there is none."""
    module_name, separator, function_name = name.rpartition(":")
    if name in known:
        return _known()[name]
    if not separator or not _is_of_others(module_name):
        raise UserError(f'unknown {what} "{name}"{nearest(name, known)}')
    (module_name,) = import_code([module_name])
    found: Callable[[], Any] = import_object(f"{module_name}:{function_name}")
    return found


def _is_of_others(module_name: str) -> bool:
    """Return whether a name is that of a file, or of a module of another package. Finds those in this directory too."""
    if module_name.endswith(PYTHON_SUFFIX):
        return True
    is_ours = any(name.startswith(f"{module_name}:") for name in _known())
    if is_ours or not all(part.isidentifier() for part in module_name.split(".")):
        return False
    find_in_working_directory()
    return "." in module_name or importlib.util.find_spec(module_name) is not None


@functools.cache
def _known() -> dict[str, Callable[[], Any]]:
    """Return the recipes and studies of configs/ by name, as module:function."""
    known: dict[str, Callable[[], Any]] = {}
    for info in pkgutil.iter_modules([str(Path(__file__).parent)]):
        if info.name not in {"resolve", "base", "sweep", "suppression"}:
            known |= _functions(importlib.import_module(f"configs.{info.name}"), prefix=info.name)
    return known


def _functions(module: ModuleType, *, prefix: str) -> dict[str, Callable[[], Any]]:
    """Return the public functions that a module defines, by PREFIX:NAME."""
    return {
        f"{prefix}:{name}": function
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if function.__module__ == module.__name__ and not name.startswith("_")
    }


def _summary(function: Callable[[], Any]) -> str:
    """Return the first paragraph of a docstring on one line."""
    return " ".join((inspect.getdoc(function) or "").partition("\n\n")[0].split())
