"""Parse one JSON or YAML document to plain values. Reading either runs no code."""

from __future__ import annotations

import json
from typing import Any

import yaml


def parse_yaml(text: str) -> Any:
    """Return the value of one YAML document. Raises `ValueError` with one line if the text is no YAML."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None


def parse_json(text: str) -> Any:
    """Return the value of one JSON document. Raises `ValueError` with one line if the text is no JSON."""
    return json.loads(text)
