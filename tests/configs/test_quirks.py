"""docs/quirks.md names settings and tests that there are."""

from __future__ import annotations

import re

import pytest

from configs.resolve import recipes, resolve_recipe
from data_pipeline.core.schema import flatten
from tests.real_data import REPOSITORY

PAGE = (REPOSITORY / "docs" / "quirks.md").read_text()


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`(tests/[\w/]+\.py)`", PAGE))))
def test_every_test_of_the_page_is_there(path: str) -> None:
    assert (REPOSITORY / path).is_file()


def test_every_setting_of_the_page_is_one_of_a_recipe() -> None:
    settings = {path for name in recipes() for path in flatten(resolve_recipe(name))}
    named = {name.partition("=")[0] for name in re.findall(r"`((?:\w+\.)+\w+(?:=[\w.]+)?|global_batch_size)`", PAGE)}
    assert len(named) > 15
    assert named <= settings


def test_every_recipe_of_the_page_is_there() -> None:
    named = set(re.findall(r"`(\w+:\w+)`", PAGE))
    assert named
    assert named <= set(recipes())
