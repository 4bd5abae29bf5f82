"""Configs that nobody would write: each is refused in one sentence, or is taken and survives its own file."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from configs.resolve import explain, resolve_recipe
from data_pipeline.core.errors import UserError, printable
from data_pipeline.core.schema import flatten
from trainer.config import RunConfig, read_config

RECIPES = ("debug:image", "debug:viewmaker", "debug:audio_viewmaker", "audio:waveform", "moco:cifar10")
BASES = {name: resolve_recipe(name).model_dump(mode="json") for name in RECIPES}
PATHS = sorted({path for name in RECIPES for path in flatten(resolve_recipe(name))})
SECTIONS = sorted({path.rpartition(".")[0] for path in PATHS} - {""})
KINDS = sorted({value for name in RECIPES for path, value in flatten(resolve_recipe(name)).items() if "kind" in path})
WORDS = [
    *KINDS,
    "adam",
    "cosine",
    "timm",
    "split",
    "info_nce",
    "bfloat16",
    "whole",
    "none",
    "kind",
    "",
    "../x",
    "\x1b[2J",
]

FUZZ = settings(max_examples=200, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))

numbers = st.one_of(
    st.integers(-3, 300),
    st.integers(-(2**80), 2**80),
    st.floats(),
    st.sampled_from([1e-300, 1e30, 1e38, 2**63, 2**63 - 1, 10**400, -0.0, 0.5]),
)
leaves = st.one_of(st.none(), st.booleans(), numbers, st.sampled_from(WORDS), st.text(max_size=8))
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from([*WORDS, "temperature", "width"]) | st.text(max_size=4), inner, max_size=4)
    ),
    max_leaves=6,
)
texts = st.one_of(
    values.map(lambda value: json.dumps(value)),
    st.sampled_from(WORDS),
    st.text(alphabet="[]{}:,&*!|>'\"-#%@`\\0123456789.eE+aUx \n\t", max_size=24),
    st.text(max_size=12),
)
names = st.one_of(
    st.sampled_from(PATHS),
    st.sampled_from(SECTIONS),
    st.sampled_from(PATHS).map(lambda path: f"{path.rpartition('.')[0]}.kind"),
    st.lists(st.sampled_from([*{part for path in PATHS for part in path.split(".")}, "", "0"]), max_size=4).map(
        ".".join
    ),
    st.text(max_size=8),
)


@st.composite
def edits(draw: st.DrawFn) -> dict[str, Any]:
    """A valid config with some values replaced, added, removed or exchanged."""
    config = copy.deepcopy(BASES[draw(st.sampled_from(RECIPES))])
    for _ in range(draw(st.integers(1, 4))):
        section = config
        for part in draw(st.sampled_from(PATHS)).split("."):
            if isinstance(section.get(part), dict) and draw(st.booleans()):
                section = section[part]
        key = draw(st.sampled_from(sorted(section)) | st.sampled_from(WORDS)) if section else "kind"
        if draw(st.integers(0, 4)):
            section[key] = draw(values)
        else:
            section.pop(key, None)
    return config


def check_taken(config: RunConfig) -> None:
    """Check that a config survives a dump and a parse, in memory and as JSON text."""
    dumped = config.model_dump(mode="json")
    assert RunConfig.parse(dumped, where="again") == config
    again = RunConfig.parse(json.loads(json.dumps(dumped)), where="again")
    assert again == config
    assert again.model_dump(mode="json") == dumped
    assert all(printable(value) == value for value in flatten(config).values() if isinstance(value, str))


def check_refusal(error: UserError) -> None:
    said = printable(str(error))
    assert said.isprintable()
    assert 0 < len(said) < 20_000
    assert "Input should" not in said
    assert "of another kind (" not in said


@FUZZ
@given(edits())
def test_an_edited_config_is_refused_in_a_sentence_or_survives_its_file(edited: dict[str, Any]) -> None:
    try:
        config = RunConfig.parse(edited, where="edited")
    except UserError as error:
        check_refusal(error)
    else:
        check_taken(config)


@FUZZ
@given(st.sampled_from(RECIPES), st.lists(st.tuples(names, texts), min_size=1, max_size=4))
def test_any_settings_are_refused_in_a_sentence_or_taken_in_any_order(
    recipe: str, given_settings: list[tuple[str, str]]
) -> None:
    overrides = [f"{name}={text}" for name, text in given_settings]
    try:
        config = resolve_recipe(recipe, overrides)
    except UserError as error:
        check_refusal(error)
        with pytest.raises(UserError):
            resolve_recipe(recipe, overrides[::-1])
    else:
        check_taken(config)
        assert resolve_recipe(recipe, overrides[::-1]) == config


@settings(FUZZ, max_examples=50)
@given(st.sampled_from(RECIPES), st.lists(st.tuples(st.sampled_from(PATHS), leaves), min_size=1, max_size=2))
def test_what_is_taken_is_explained_a_line_a_setting(recipe: str, changes: list[tuple[str, Any]]) -> None:
    overrides = [f"{path}={json.dumps(value)}" for path, value in changes]
    try:
        config = resolve_recipe(recipe, overrides)
    except UserError as error:
        check_refusal(error)
        return
    lines = explain(recipe, overrides).splitlines()
    assert [line.split()[0] for line in lines] == list(flatten(config))
    assert all(line.isprintable() for line in lines)


@FUZZ
@given(
    st.sampled_from([".json", ".yaml"]),
    st.one_of(st.binary(max_size=60), texts.map(lambda text: text.encode("utf-8", "replace"))),
)
def test_any_file_is_refused_in_a_sentence_or_read(
    tmp_path_factory: pytest.TempPathFactory, suffix: str, content: bytes
) -> None:
    path = Path(tmp_path_factory.getbasetemp(), f"fuzz{suffix}")
    path.write_bytes(content)
    with pytest.raises(UserError) as raised:  # no short file holds a whole config
        read_config(path)
    check_refusal(raised.value)
