"""One rule says which values are no label, and which classes the others stand for."""

from __future__ import annotations

import pytest

from data_pipeline.core.label_words import as_word, choose_classes
from data_pipeline.core.sample import NO_LABEL


@pytest.mark.parametrize("text", ["", " ", "nan", "NaN", "NA", "N/A", "<NA>", "null", "NULL"])
def test_a_gap_is_no_label(text: str) -> None:
    assert as_word(text) == as_word(None) == as_word(float("nan")) == ""


@pytest.mark.parametrize(
    ("words", "names", "without"),
    [
        ({"wren", "None", "Owl"}, ("None", "Owl", "wren"), ()),
        ({"0", "2"}, ("0", "1", "2"), ()),
        ({"7", "100000"}, ("7", "100000"), ()),
        ({"1.0", "3.00", "2"}, ("0", "1", "2", "3"), ()),
        ({"1.0", "2.5", "10"}, ("1.0", "2.5", "10"), ()),
        ({"1.0", "v2"}, ("1.0", "v2"), ()),
        ({"0.0", "1.0", "-1.0"}, ("0", "1"), ("-1.0",)),
        ({"-1"}, (), ("-1",)),
        ({"-1", "cat"}, ("-1", "cat"), ()),
        ({"-1", "0.5"}, ("-1", "0.5"), ()),
        ({"-1", "-2", "0"}, ("-2", "-1", "0"), ()),
        ({"-0.5", "-4", "-3.5", "-1e-3"}, ("-4", "-3.5", "-0.5", "-1e-3"), ()),
        ({"003", "010"}, ("003", "010"), ()),
        (set(), (), ()),
    ],
)
def test_classes_of_a_column(words: set[str], names: tuple[str, ...], without: tuple[str, ...]) -> None:
    classes = choose_classes(words | {""})
    assert classes.names == names
    assert {word for word, number in classes.number_of.items() if number == NO_LABEL} == {"", *without}
    assert {names[classes.number_of[word]] for word in words - set(without)} <= set(names)


@pytest.mark.parametrize(
    ("words", "known", "numbers"),
    [
        ({"2.0", "-1"}, ("0", "1", "2"), {"2.0": 2, "-1": NO_LABEL}),
        ({"-1", "0"}, ("-1", "0"), {"-1": 0, "0": 1}),
        ({"2.0"}, ("2.0", "2.5"), {"2.0": 0}),
        ({"3", "owl"}, ("owl",), {"owl": 0}),
    ],
)
def test_a_test_set_has_the_classes_of_its_train_set(
    words: set[str], known: tuple[str, ...], numbers: dict[str, int]
) -> None:
    classes = choose_classes(words, known=known)
    assert classes.names == known
    assert classes.number_of == {"": NO_LABEL, **numbers}
