"""Apply settings from a command line, one "a.b=c" for each --set, to the values of a config.

Does not validate the new values. Guarantees: no setting is lost because of another one before or after it.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from data_pipeline.core.errors import UserError
from data_pipeline.core.plain_text import parse_yaml
from data_pipeline.core.validation import KIND

SET_HELP: Final = (
    "Override one setting; the value is YAML. May be repeated, in any order. A mapping replaces its whole section. A "
    "new kind starts its section from the defaults of that kind, before its other settings are applied."
)

Path = tuple[str, ...]


def parse_setting(text: str) -> tuple[Path, Any]:
    """Return the path and the value of "a.b=c". Raises `UserError` without "=" or if the value is not YAML."""
    name, separator, value = text.partition("=")
    if not separator:
        raise UserError(f'--set {text} has no "="; write --set NAME=VALUE')
    try:
        return tuple(part.strip() for part in name.split(".")), parse_yaml(value)
    except ValueError as error:
        raise UserError(f'--set {text}: the value is not YAML ({error}); write e.g. --set {name}="[1, 2]"') from None


def set_paths(overrides: Sequence[str]) -> set[Path]:
    """Return the paths that `overrides` set, also inside mappings. Raises `UserError` like `parse_setting`."""
    return {path for text in overrides for path in by_path(*parse_setting(text))}


def by_path(path: Path, value: Any) -> dict[Path, Any]:
    """Return the value at `path`, and all values inside it if it is a mapping, by their paths."""
    found = {path: value}
    if isinstance(value, dict):
        for key, inner in value.items():
            found |= by_path((*path, key), inner)
    return found


def merge(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `values` of a config with nested `changes`, which hold only what differs.

    Unlike in an override, a mapping changes only what it names. A new `kind` starts its section from the defaults of
    that kind.
    """
    merged = dict(values) if changes.get(KIND, values.get(KIND)) == values.get(KIND) else {}
    for name, change in changes.items():
        inner = merged.get(name)
        if isinstance(inner, dict) and isinstance(change, dict) and change:
            change = merge(inner, change)
        merged[name] = change
    return merged


def apply_settings(values: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return the `values` of a config with `overrides` applied, outer settings first.

    Raises `UserError` like `parse_setting`, and if a setting is inside a value that is not a section.
    """
    settings = dict(map(parse_setting, overrides))  # the last value of each
    result = copy.deepcopy(dict(values))
    for path in sorted(settings, key=lambda path: (len(path), path[-1] != KIND)):
        *outer, last = path
        value, section = settings[path], result
        for depth, part in enumerate(outer, start=1):
            section = section.setdefault(part, {})
            if not isinstance(section, dict):
                where = ".".join(outer[:depth])
                mend = f"{where}={{}} for its defaults" if section is None else f"{where}=VALUE"
                said = f"{where} is {json.dumps(section)}, which has no settings"
                raise UserError(f"--set {'.'.join(path)}: {said}; write --set {mend}")
        if last == KIND and section.get(KIND, value) != value:
            section.clear()
        section[last] = value
    return result
