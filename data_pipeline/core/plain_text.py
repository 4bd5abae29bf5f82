"""Parse one JSON or YAML document to plain values: null, bool, int, float, str, lists, and mappings with text as keys.

Guarantees: no text becomes a date or a number of base 60, no key is there twice, and the parsed value is never much
larger than its text.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

import yaml
from yaml.composer import ComposerError

_MAX_DEPTH: Final = 50
_MAX_DIGITS: Final = 400  # of a whole number; Python refuses to read more than 4,300
_INTEGER = re.compile(rf"[-+]?[0-9]{{1,{_MAX_DIGITS}}}")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_WORDS: Final = {"": None, "~": None, "null": None, "true": True, "false": False}
_LIMITS: Final = {".inf": float("inf"), "+.inf": float("inf"), "-.inf": float("-inf"), ".nan": float("nan")}
_CONSTANTS: Final = {
    spelling: value for word, value in (_WORDS | _LIMITS).items() for spelling in (word, word.title(), word.upper())
}


def parse_yaml(text: str) -> Any:
    """Return the value of one YAML document: the core schema of YAML 1.2, without anchors, aliases and tags.

    Raises `ValueError` with one line if the text is anything else.

    Examples:
        >>> parse_yaml("{rate: 1e-3, when: 12:30, name: on}")
        {'rate': 0.001, 'when': '12:30', 'name': 'on'}
    """
    try:
        node = yaml.compose(text, Loader=_PlainLoader)
        return None if node is None else _value(node)
    except yaml.MarkedYAMLError as error:
        raise ValueError(error.problem or error.context or str(error)) from None
    except yaml.reader.ReaderError as error:
        raise ValueError(f"it holds the character {chr(error.character)!r}") from None
    except (ValueError, OverflowError) as error:  # PyYAML does not catch them for an escape such as "\UFFFFFFFF"
        raise ValueError(str(error)) from None


def parse_json(text: str) -> Any:
    """Return the value of one JSON document. Raises `ValueError` with one line if the text is anything else."""
    try:
        return json.loads(text, object_pairs_hook=_mapping)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


class _PlainLoader(yaml.SafeLoader):
    """A loader that refuses anchors, aliases, tags and deep nesting."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            raise ComposerError(None, None, "anchors and aliases (& and *) are not allowed", event.start_mark)
        if event.tag is not None:
            raise ComposerError(None, None, "tags (!) are not allowed", event.start_mark)
        if self._depth == _MAX_DEPTH:
            raise ComposerError(None, None, "it is nested too deeply", event.start_mark)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


def _value(node: yaml.Node) -> Any:
    if isinstance(node, yaml.ScalarNode):
        return _plain(node.value) if node.style is None else node.value
    if isinstance(node, yaml.SequenceNode):
        return [_value(item) for item in node.value]
    return _mapping([(_value(key), _value(value)) for key, value in node.value])


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
        if not isinstance(key, str):
            raise ValueError(f"the key {key!r} is not text")
        if key in mapping:
            raise ValueError(f"the key {json.dumps(key)} is there twice")
        mapping[key] = value
    return mapping
