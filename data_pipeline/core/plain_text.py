"""Parse one JSON or YAML document to plain values: null, bool, int, float, str, lists, and mappings with text as keys.

Guarantees: no text becomes a date or a number of base 60, and no key is there twice.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

import yaml

_INTEGER = re.compile(r"[-+]?[0-9]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_WORDS: Final = {"": None, "~": None, "null": None, "true": True, "false": False}
_LIMITS: Final = {".inf": float("inf"), "+.inf": float("inf"), "-.inf": float("-inf"), ".nan": float("nan")}
_CONSTANTS: Final = {
    spelling: value for word, value in (_WORDS | _LIMITS).items() for spelling in (word, word.title(), word.upper())
}


def parse_yaml(text: str) -> Any:
    """Return the value of one YAML document: the core schema of YAML 1.2. Tags are ignored.

    Raises `ValueError` with one line if the text is anything else.

    Examples:
        >>> parse_yaml("{rate: 1e-3, when: 12:30, name: on}")
        {'rate': 0.001, 'when': '12:30', 'name': 'on'}
    """
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        return None if node is None else _value(node)
    except yaml.MarkedYAMLError as error:
        where = "" if error.problem_mark is None else f" in line {error.problem_mark.line + 1}"
        raise ValueError(f"{error.problem or error.context or error}{where}") from None
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None


def parse_json(text: str) -> Any:
    """Return the value of one JSON document. Raises `ValueError` with one line if the text is anything else."""
    return json.loads(text, object_pairs_hook=_mapping)


def _value(node: yaml.Node) -> Any:
    if isinstance(node, yaml.ScalarNode):
        return _plain(node.value) if node.style is None else node.value
    if isinstance(node, yaml.SequenceNode):
        return [_value(item) for item in node.value]
    mapping: dict[str, Any] = {}
    for key, value in node.value:
        try:
            _add(mapping, _value(key), _value(value))
        except ValueError as error:
            raise yaml.MarkedYAMLError(problem=str(error), problem_mark=key.start_mark) from None
    return mapping


def _plain(text: str) -> bool | int | float | str | None:
    """Return the value of a scalar without quotes."""
    if _INTEGER.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    return _CONSTANTS.get(text, text)


def _mapping(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
    mapping: dict[str, Any] = {}
    for key, value in pairs:
        _add(mapping, key, value)
    return mapping


def _add(mapping: dict[str, Any], key: Any, value: Any) -> None:
    if not isinstance(key, str):
        raise ValueError(f"the key {key!r} is not text")
    if key in mapping:
        raise ValueError(f"the key {json.dumps(key)} is there twice")
    mapping[key] = value
