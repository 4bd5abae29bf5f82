"""Find the labels that a train set and a test set have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Final

from data_pipeline.building.tar_scan import LABEL_FIELDS
from data_pipeline.core.errors import UserError
from data_pipeline.core.sample import BASE, OVERLAY
from data_pipeline.storage.manifest import OVERLAY_NAME, Manifest
from trainer.probes.features import LabelSpace, Pictures
from trainer.probes.linear import Target, num_labelled

_NUM_SHOWN: Final = 12  # class names in a message
# Options that may differ from split to split: a correlation holds in the train split, splits have other digits, and the
# test split hears other parts of background sounds.
_OF_A_SPLIT: Final = frozenset({"correlation", "correlated", "kind", "noise_crop", "unique"})


def readable_labels(
    train: Manifest, test: Manifest, *, wanted: Sequence[LabelSpace] | None = None
) -> dict[LabelSpace, tuple[str, ...]]:
    """Return the class names of each label that a probe can predict (default: all; or `wanted`).

    A label of a single class is left out. Raises `UserError` if train and test set have different classes or inputs,
    have no labels, or lack a wanted label.
    """
    if (train.medium, train.batch_shape) != (test.medium, test.batch_shape):
        raise UserError(
            f"the train set holds {train.medium}s of shape {train.batch_shape} but the test set {test.medium}s of "
            f"{test.batch_shape}; build both from the same dataset"
        )
    if (difference := label_difference(train, test)) is not None:
        raise UserError(f"{difference}; {label_mend(train, test)}")
    found = {space: label.classes for space, label in train.labels.items() if len(label.classes) > 1}
    if not found and train.labels:
        names = " and ".join(f"label_{space}" for space in train.labels)
        raise UserError(
            f"the samples have only {names}, of a single class, so there is nothing to predict; add a class"
        )
    if not found:
        raise UserError(
            "the samples have no labels, which a probe predicts; if the tars hold some, index them again with --label"
        )
    for space in wanted or ():
        if space not in found:
            mend = "build a dataset with an overlay" if space == OVERLAY else "build the dataset with that label"
            if space in train.labels:
                mend = f"take another, because label_{space} has a single class"
            raise UserError(
                f"the samples have no label_{space}, only {', '.join(f'label_{name}' for name in found)}; probe that, "
                f"or {mend}"
            )
    return {space: names for space, names in found.items() if wanted is None or space in wanted}


def label_difference(train: Manifest, test: Manifest) -> str | None:
    """Say in which label two datasets differ, and in which class; None if they have the same labels and classes."""
    in_train, in_test = train.labels, test.labels
    for space in {**in_train, **in_test}:
        names, test_names = (labels[space].classes if space in labels else () for labels in (in_train, in_test))
        if names == test_names:
            continue
        first = ""
        if names and test_names:
            pairs = enumerate(zip_longest(names, test_names, fillvalue="none"))
            number, name, test_name = next((number, *pair) for number, pair in pairs if pair[0] != pair[1])
            first = f" (the first that differs is class {number}: {name} and {test_name})"
        of_each = f"{_shown(names)} in the train set but {_shown(test_names)} in the test set"
        return f"label_{space} has classes {of_each}{first}"
    return None


def label_mend(train: Manifest, test: Manifest) -> str:
    """Return what makes the labels of two datasets equal, of which `label_difference` has said the difference."""
    in_train, in_test = train.labels, test.labels
    lacks_classes = in_train.keys() == in_test.keys() and all(
        set(in_test[name].classes) <= set(label.classes) for name, label in in_train.items()
    )
    if not lacks_classes:
        return "build both from the same source and dataset"
    table = "of a folder, put the labels of both splits into one table for `build folder --labels`"
    if train.tars.numbered or test.tars.numbered:
        return f"{table}, or add samples of each class to the test set"
    return f"index the tars of the test set again with the train set as --classes-of; {table}"


def option_difference(train: Manifest, test: Manifest) -> str | None:
    """Say in which option of the overlay or the source two datasets differ, which a probe would measure too.

    The field of a label is an option of tars. None if they do not differ, or only in options that belong to a split.
    """
    overlays = [each.overlay for each in (train, test)]
    in_train, in_test = (
        {
            **{f"the overlay's {name}": value for name, value in (overlay.options if overlay else {}).items()},
            **{f"the source's {name}": value for name, value in each.how_made.source_options.items()},
        }
        for each, overlay in zip((train, test), overlays, strict=True)
    )
    for option, value in in_train.items():
        if in_test.get(option, value) != value and option.split()[-1] not in _OF_A_SPLIT:
            return f"{option} is {value} in the train set but {in_test[option]} in the test set"
    digests = {each.files.get(OVERLAY_NAME) for each in (train, test)} - {None}
    unique = "the overlay's unique"
    if unique in in_train and in_train[unique] == in_test.get(unique) and len(digests) > 1:
        return f"the {in_train[unique]} digits of the test set are not those of the train set"
    return _field_difference(train, test)


def _field_difference(train: Manifest, test: Manifest) -> str | None:
    """Say which label two indexes of tars take from different fields; None if none, or for other datasets."""
    if train.tars.numbered or test.tars.numbered:
        return None
    in_train, in_test = (_label_fields(each) for each in (train, test))
    for name in sorted(in_train.keys() & in_test.keys() & train.labels.keys()):
        field, test_field = in_train[name], in_test[name]
        # Without --label, an index takes the first of LABEL_FIELDS that a sample has, which may be the same field.
        may_agree = None in (field, test_field) and {field, test_field} <= {None, *LABEL_FIELDS}
        if field != test_field and not may_agree:
            return f"label_{name} is {_field(field)} in the train set but {_field(test_field)} in the test set"
    return None


def _label_fields(manifest: Manifest) -> Mapping[str, str | None]:
    return manifest.tars.fields.labels or {BASE: None}


def _field(field: str | None) -> str:
    return f"the first of {', '.join(LABEL_FIELDS)}" if field is None else f"the field {field}"


def _shown(names: Sequence[str]) -> str:
    more = ", ..." if len(names) > _NUM_SHOWN else ""
    return f"{', '.join(names[:_NUM_SHOWN])}{more}" if names else "none"


def label_targets(
    train: Pictures, test: Pictures, *, wanted: Sequence[LabelSpace] | None = None
) -> dict[LabelSpace, Target]:
    """Return the labels to predict.

    Raises the errors of `readable_labels`, and `UserError` if no sample of the train set or of the test set has one.
    """
    targets = {
        space: Target(train.labels(space), test.labels(space), num_classes=len(names))
        for space, names in readable_labels(train.manifest, test.manifest, wanted=wanted).items()
    }
    check_labelled(targets)
    return targets


def check_labelled(targets: Mapping[LabelSpace, Target]) -> None:
    """Raise `UserError` if no sample of the train set or of the test set has one of the labels."""
    for space, target in targets.items():
        for which, label_N in (("train", target.train_N), ("test", target.test_N)):
            if not num_labelled(label_N):
                raise UserError(
                    f"none of the {which} samples has label_{space}; leave it out of the labels, or take more samples"
                )
