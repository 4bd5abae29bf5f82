"""Find the labels that a train set and a test set have in common."""

from __future__ import annotations

from collections.abc import Sequence

from data_pipeline.core.errors import UserError
from data_pipeline.storage.manifest import Manifest
from trainer.probes.features import LABEL_SPACES, LabelSpace, Pictures
from trainer.probes.linear import Target


def readable_labels(
    train: Manifest, test: Manifest, *, wanted: Sequence[LabelSpace] | None = None
) -> dict[LabelSpace, tuple[str, ...]]:
    """Return the class names of each label: `base`, and `overlay` if something was drawn (default: all; or `wanted`).

    Raises `UserError` if train and test set have different classes or inputs, have no labels, or lack a wanted label.
    """
    if (train.medium, train.input_shape) != (test.medium, test.input_shape):
        raise UserError(
            f"the train set holds {train.medium}s of shape {train.input_shape} but the test set {test.medium}s of "
            f"{test.input_shape}; build both from the same dataset"
        )
    found: dict[LabelSpace, tuple[str, ...]] = {}
    for space in LABEL_SPACES:
        names, test_names = (getattr(manifest.label_names, space) for manifest in (train, test))
        if names != test_names:
            raise UserError(
                f"label_{space} has classes {', '.join(names) or 'none'} in the train set but "
                f"{', '.join(test_names) or 'none'} in the test set; build both from the same dataset"
            )
        if names:
            found[space] = names
    if not found:
        raise UserError(
            "the samples have no labels, which a probe predicts; if the tars hold some, index them again with --label"
        )
    for space in wanted or ():
        if space not in found:
            raise UserError(
                f"the samples have no label_{space}, only {', '.join(f'label_{name}' for name in found)}; probe that, "
                "or build a dataset with an overlay"
            )
    return {space: names for space, names in found.items() if wanted is None or space in wanted}


def label_targets(
    train: Pictures, test: Pictures, *, wanted: Sequence[LabelSpace] | None = None
) -> dict[LabelSpace, Target]:
    """Return the labels to predict. Raises the errors of `readable_labels`."""
    return {
        space: Target(train.labels(space), test.labels(space), num_classes=len(names))
        for space, names in readable_labels(train.manifest, test.manifest, wanted=wanted).items()
    }
