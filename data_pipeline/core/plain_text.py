"""Parse one JSON or YAML document to plain values: null, bool, int, float, str, lists, and mappings with text as keys.

Guarantees: no text becomes a date or a number of base 60, and no key is there twice.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

import yaml


class _Loader(yaml.SafeLoader):
    """Reads the core schema of YAML 1.2: PyYAML's own would read `on` as true, `12:30` as 750, and `1e-3` as text."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        return _mapping(
            (self.construct_object(key, deep=True), self.construct_object(value, deep)) for key, value in node.value
        )


for _kind, _pattern in {
    "null": r"|~|null|Null|NULL",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?[0-9]+",
    "float": r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
}.items():
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(rf"^({_pattern})$"), None)
_Loader.add_constructor("tag:yaml.org,2002:int", lambda _, node: int(node.value))  # not octal after a 0


def parse_yaml(text: str) -> Any:
    """Return the value of one YAML document: the core schema of YAML 1.2.

    Raises `ValueError` with one line if the text is anything else.

    Examples:
        >>> parse_yaml("{rate: 1e-3, when: 12:30, name: on}")
        {'rate': 0.001, 'when': '12:30', 'name': 'on'}
    """
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506  a safe loader
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None


def parse_json(text: str) -> Any:
    """Return the value of one JSON document. Raises `ValueError` with one line if the text is anything else."""
    return json.loads(text, object_pairs_hook=_mapping)


def _mapping(pairs: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    mapping: dict[str, Any] = {}
    for key, value in pairs:
        if not isinstance(key, str):
            raise ValueError(f"the key {key!r} is not text")
        if key in mapping:
            raise ValueError(f"the key {json.dumps(key)} is there twice")
        mapping[key] = value
    return mapping
