"""Trifeature: the law of the labels, that simple rules read the labels from the pictures, and what is refused."""

from __future__ import annotations

import hashlib
import pickle
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from data_pipeline.building.build import build_dataset
from data_pipeline.core.randomness import generator
from data_pipeline.sources.trifeature import COLOURS, SHAPES, TEXTURES, Trifeature, TrifeatureOptions, draw
from data_pipeline.storage.store import SampleStore
from tests.data_pipeline.stored_samples import decode_sample, find_problems

NUM = 4_000
BACKGROUND = 128


def source(seed: int = 0, split: str = "train", num_records: int = NUM, **options: object) -> Trifeature:
    return Trifeature(seed, split, num_records, TrifeatureOptions.model_validate({"image_size": 48, **options}))


@cache
def plain() -> Trifeature:
    return source()


def labels(given: Trifeature) -> dict[str, np.ndarray]:
    return {name: column.label_N for name, column in given.labels.items()}


def test_every_thousand_pictures_hold_every_combination_once() -> None:
    found = labels(plain())
    assert list(found) == ["base", "texture", "colour"]
    combination = found["base"] * 100 + found["texture"] * 10 + found["colour"]
    for block in combination.reshape(-1, 1_000):
        assert (np.sort(block) == np.arange(1_000)).all()
    few = labels(source(num_records=100))
    assert all(len(np.unique(few[name])) == 10 for name in few)  # also a few pictures have all classes


@pytest.mark.parametrize(
    ("correlation", "correlated"),
    [(0.0, "texture"), (0.3, "texture,colour"), (0.9, "texture"), (1.0, "colour")],
)
def test_correlated_labels_agree_with_the_shape_as_often_as_asked(correlation: float, correlated: str) -> None:
    found = labels(source(correlation=correlation, correlated=correlated))
    for name in ("texture", "colour"):
        share = correlation + (1 - correlation) / 10 if name in correlated else 0.1
        agree = found[name] == found["base"]
        assert abs(agree.mean() - share) <= 4 * (share * (1 - share) / NUM) ** 0.5
        counts = np.bincount(found[name], minlength=10)
        assert ((counts - NUM / 10) ** 2 / (NUM / 10)).sum() < 33.7  # uniform draws exceed it once in 10,000 times
    if correlated == "texture,colour":  # given the shape, the two are independent
        both = ((found["texture"] == found["base"]) & (found["colour"] == found["base"])).mean()
        assert abs(both - 0.37**2) < 4 * (0.37**2 * (1 - 0.37**2) / NUM) ** 0.5


def test_a_picture_depends_on_seed_split_and_number_alone() -> None:
    again = pickle.loads(pickle.dumps(source(num_records=2_000)))
    for number in (1_500, 3, 3):
        assert (again[number].content == plain()[number].content).all()
    assert (labels(again)["colour"] == labels(plain())["colour"][:2_000]).all()
    for other in (source(seed=1), source(split="test")):
        assert any((other[number].content != plain()[number].content).any() for number in range(3))
        assert (labels(other)["texture"] != labels(plain())["texture"]).any()


def test_the_drawing_has_not_changed() -> None:
    digest = hashlib.sha256(b"".join(source(image_size=64)[number].content.tobytes() for number in range(20)))
    assert digest.hexdigest()[:16] == "380c36f4aef02319"


def test_the_colour_furthest_from_grey_tells_the_colour() -> None:
    colours = 255 * np.array(list(COLOURS.values()))
    for number in range(300):
        pixels = plain()[number].content.reshape(-1, 3).astype(float)
        furthest = pixels[np.abs(pixels - BACKGROUND).sum(1).argmax()]
        assert np.abs(colours - furthest).sum(1).argmin() == labels(plain())["colour"][number]


@pytest.mark.parametrize("size", [48, 64, 224])
def test_a_shape_has_its_size_and_lies_in_the_picture(size: int) -> None:
    for number in range(5):
        rng = generator(2, "test", number)
        picture = draw(SHAPES["square"], TEXTURES["solid"], (1.0, 1.0, 1.0), size=size, rng=rng)
        area = ((picture[:, :, 0].astype(float) - BACKGROUND) / (255 - BACKGROUND)).sum()
        assert abs(area**0.5 - 128 * size / 224) < 0.3
        edge = np.concatenate([picture[0], picture[-1], picture[:, 0], picture[:, -1]])
        assert (edge == BACKGROUND).mean() > 0.9


def test_trifeature_is_a_dataset_of_three_labels(tmp_path: Path) -> None:
    options = {"correlation": "1", "correlated": "colour"}
    manifest = build_dataset("trifeature", tmp_path / "one", limit=60, source_options=options)
    assert manifest.how_made.source_options == {"correlation": 1.0, "correlated": "colour"}
    assert {name: len(label.classes) for name, label in manifest.labels.items()} == {
        "base": 10,
        "texture": 10,
        "colour": 10,
    }
    assert manifest.input_shape == (3, 64, 64)
    assert build_dataset("trifeature", tmp_path / "two", limit=60, source_options=options).sha256 == manifest.sha256
    store = SampleStore(tmp_path / "one")
    for number in range(60):
        found = decode_sample(store, number).labels
        assert found["colour"] == found["base"]
    assert find_problems(tmp_path / "one") == []
