"""Plain values: what is no YAML or JSON is one line, and no document runs code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from data_pipeline.core.plain_text import parse_json, parse_yaml


def test_plain_values() -> None:
    assert parse_yaml("{a: [1, x, 0.5, null], b: {}, c: true}") == {"a": [1, "x", 0.5, None], "b": {}, "c": True}
    assert parse_json('{"a": [1, "x"]}') == {"a": [1, "x"]}


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (parse_yaml, "!!python/object/apply:os.system [ls]"),
        (parse_yaml, "a\x1b"),
        (parse_yaml, "--- a\n--- b"),
        (parse_yaml, "a: b: c"),
        (parse_json, "{"),
    ],
)
def test_everything_else_is_refused_in_one_line(parse: Callable[[str], Any], text: str) -> None:
    with pytest.raises(ValueError) as raised:
        parse(text)
    assert str(raised.value)
    assert "\n" not in str(raised.value)
