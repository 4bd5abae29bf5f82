"""Plain values: what YAML and JSON are read as, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from data_pipeline.core.plain_text import parse_json, parse_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", None),
        ("~", None),
        ("Null", None),
        ("TRUE", True),
        ("false", False),
        ("-3", -3),
        ("007", 7),
        ("1e-3", 0.001),
        ("+.5E2", 50.0),
        ("5.", 5.0),
        ("-.INF", -math.inf),
        ("0x10", "0x10"),
        ("1_000", "1_000"),
        ("on", "on"),
        ("tRUE", "tRUE"),
        ("12:30", "12:30"),
        ("2026-01-01", "2026-01-01"),
        ("<<", "<<"),
        ("'7'", "7"),
        ("'null'", "null"),
        ("file:x {name}", "file:x {name}"),
        ("{a: [1, x], b: {}}", {"a": [1, "x"], "b": {}}),
    ],
)
def test_yaml_is_read_by_its_core_schema(text: str, value: Any) -> None:
    read = parse_yaml(text)
    assert (type(read), read) == (type(value), value)


@pytest.mark.parametrize(
    ("parse", "text", "reason"),
    [
        (parse_yaml, "a:\n  b: 1\n  b: 2", 'the key "b" is there twice'),
        (parse_json, '{"a": 1, "a": 2}', 'the key "a" is there twice'),
        (parse_yaml, "{1: 2}", "the key 1 is not text"),
        (parse_yaml, "? [1]\n: 2", "is not text"),
        (parse_yaml, "--- a\n--- b", "another document"),
        (parse_yaml, "x: 1\na: b: c", "mapping values are not allowed here in"),
        (parse_json, "{", "Expecting property name"),
    ],
)
def test_everything_else_is_refused_in_one_line(parse: Callable[[str], Any], text: str, reason: str) -> None:
    with pytest.raises(ValueError) as raised:
        parse(text)
    assert reason in str(raised.value)
    assert str(raised.value)
    assert "\n" not in str(raised.value)
