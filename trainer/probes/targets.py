"""Find the labels that a train set and a test set have in common."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Final, Protocol

from torch import Tensor

from data_pipeline.building.tar_scan import LABEL_FIELDS
from data_pipeline.core.errors import UserError
from data_pipeline.core.sample import BASE
from data_pipeline.storage.manifest import OVERLAY_NAME, LabelEntry, Manifest
from trainer.probes.features import LabelSpace
from trainer.probes.linear import Target, num_labelled

logger = logging.getLogger(__name__)

# Options that may differ from split to split: a correlation holds in the train split, splits have other digits, and the
# test split hears other parts of background sounds.
_OF_A_SPLIT: Final = frozenset({"correlation", "correlated", "kind", "noise_crop", "unique"})


class Labelled(Protocol):
    """Samples with their labels (N,) int64 by name, and the manifest of their dataset."""

    @property
    def manifest(self) -> Manifest | None: ...
    @property
    def by_label(self) -> Mapping[LabelSpace, Tensor]: ...


def readable_labels(
    train: Manifest,
    test: Manifest,
    *,
    wanted: Sequence[LabelSpace] | None = None,
    where: tuple[str, str] = ("the train set", "the test set"),
) -> dict[LabelSpace, tuple[str, ...]]:
    """Return the class names of each label that a probe can predict (default: all; or `wanted`).

    A label of a single class or of numbers is left out, and so is one that only one of both sets has. Raises
    `UserError` if train and test set have different classes or inputs, have no such label, or lack a wanted label.
    `where` names them then.
    """
    if (train.medium, train.batch_shape) != (test.medium, test.batch_shape):
        raise UserError(
            f"the train set holds {train.medium}s of shape {train.batch_shape} but the test set {test.medium}s of "
            f"{test.batch_shape}; build both from the same dataset"
        )
    check_same_classes(train, test)
    found = {space: label.classes for space, label in _shared_labels(train, test).items()}
    if not found:
        in_train, in_test = (f"has {_named(each.labels) if each.labels else 'no label'}" for each in (train, test))
        raise UserError(
            f"there is nothing for a probe to predict: {where[0]} {in_train} and {where[1]} {in_test}, but both need "
            "the same label, of two or more classes; build them with it (from class folders, or with --source-option "
            "labels=TABLE), or index the tars again with --label"
        )
    for space in wanted or ():
        if space not in found:
            raise UserError(
                f"the samples have no label_{space} of two or more classes, only {_named(found)}; probe that"
            )
    return {space: names for space, names in found.items() if wanted is None or space in wanted}


def _shared_labels(train: Manifest, test: Manifest) -> dict[LabelSpace, LabelEntry]:
    """Return the labels of two or more classes, which are no numbers, that samples of both sets have."""
    found = {}
    for space, label in train.labels.items():
        counts = [each.labels[space].counts if space in each.labels else (0,) for each in (train, test)]
        if len(label.classes) > 1 and not label.is_number and all(not each or any(each) for each in counts):
            found[space] = label
    return found


def _named(labels: Iterable[LabelSpace]) -> str:
    return ", ".join(f"label_{name}" for name in labels)


def check_same_classes(train: Manifest, test: Manifest) -> None:
    """Raise `UserError` if a label of two datasets does not have the same classes, with the first that differs.

    The test set may have other numbers than the train set, if the label is a number.
    """
    for space in train.labels.keys() & test.labels.keys():
        of_train, of_test = train.labels[space], test.labels[space]
        if of_train.is_number and of_test.is_number:
            continue
        for number, (name, test_name) in enumerate(zip_longest(of_train.classes, of_test.classes, fillvalue="missing")):
            if name != test_name:
                raise UserError(
                    f"class {number} of label_{space} is {name} in the train set but {test_name} in the test set; "
                    "build both from the same source and dataset (of a folder, with one table of labels), or "
                    "index the test set with the train set as --classes-of"
                )


def option_difference(train: Manifest, test: Manifest) -> str | None:
    """Say in which option of the overlay or the source two datasets differ, which a probe would measure too.

    The field of a label is an option of tars. None if they do not differ, or only in options that belong to a split.
    """
    in_train, in_test = (
        {
            **{f"the overlay's {name}": value for name, value in (overlay.options if overlay else {}).items()},
            **{f"the source's {name}": value for name, value in each.how_made.source_options.items()},
        }
        for each, overlay in ((train, train.overlay), (test, test.overlay))
    )
    for option, value in in_train.items():
        if in_test.get(option, value) != value and option.split()[-1] not in _OF_A_SPLIT:
            return f"{option} is {value} in the train set but {in_test[option]} in the test set"
    digests = {each.files.get(OVERLAY_NAME) for each in (train, test)} - {None}
    unique = "the overlay's unique"
    if unique in in_train and in_train[unique] == in_test.get(unique) and len(digests) > 1:
        return f"the {in_train[unique]} digits of the test set are not those of the train set"
    if train.tars.numbered or test.tars.numbered:
        return None
    # Without --label, an index takes the first of LABEL_FIELDS that a sample has.
    fields, test_fields = (each.tars.fields.labels or {BASE: LABEL_FIELDS[0]} for each in (train, test))
    for name in sorted(fields.keys() & test_fields.keys() & train.labels.keys()):
        if fields[name] != test_fields[name]:
            return f"label_{name} is the field {fields[name]} in the train set but {test_fields[name]} in the test set"
    return None


def label_targets(
    train: Labelled, test: Labelled, *, wanted: Sequence[LabelSpace] | None = None
) -> dict[LabelSpace, Target]:
    """Return the labels to predict. Logs a warning of those that only one of both sets has.

    Raises the errors of `readable_labels` and `check_labelled`.
    """
    assert train.manifest is not None
    assert test.manifest is not None
    shared = _shared_labels(train.manifest, test.manifest)
    if lone := (train.manifest.labels | test.manifest.labels).keys() - shared:
        logger.warning(
            "not probed, because only one of both sets has samples with it, all have one class, or it is a number: %s",
            _named(lone),
        )
    targets = {
        space: Target(train.by_label[space], test.by_label[space], len(names))
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
