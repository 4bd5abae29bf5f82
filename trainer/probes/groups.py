"""Accuracies in groups: a group is a pair of classes of two labels, such as a waterbird on land (Sagawa et al. 2020).

A probe that reads one label through another has a high accuracy on the whole, and a low one in the groups in which the
two disagree. The number to report is the accuracy in the worst group of `LEAST_GROUP` samples or more: of a smaller one
it is low by chance alone.

Shapes: N test samples, K classes of the first label, L classes of the second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from data_pipeline.core.errors import UserError, nearest
from data_pipeline.core.sample import NO_LABEL
from data_pipeline.core.schema import LabelName, Schema
from trainer.probes.features import LabelSpace

MAX_GROUPS: Final = 100_000  # of one pair of labels
LEAST_GROUP: Final = 50  # test samples of a group that can be the worst one


@dataclass(frozen=True)
class WorstGroup:
    """The group of the lowest accuracy, the first of several: the classes of both labels, and its test samples."""

    classes: tuple[int, int]
    num_right: int
    num_test: int

    @property
    def accuracy(self) -> float:
        return self.num_right / self.num_test


class Groups(Schema):
    """The test accuracies of one label in the groups of a pair of labels, of which it is one.

    Attributes:
        labels: the pair. The first numbers the rows of the tables, the second the columns.
        num_test: (K, L), the number of test samples of each group.
        right: for each method, "linear" and "knn": (K, L), how many of them it gets right.
        num_unlabelled: the test samples that lack one of the two labels, and so are in no group.
    """

    labels: tuple[LabelName, LabelName]
    num_test: tuple[tuple[int, ...], ...]
    right: dict[str, tuple[tuple[int, ...], ...]]
    num_unlabelled: int

    def worst(self, method: str) -> WorstGroup | None:
        """Return the worst group of "linear" or "knn"; None if every group has fewer than `LEAST_GROUP` samples."""
        num_KL = np.array(self.num_test)
        share_KL = np.where(num_KL >= LEAST_GROUP, np.array(self.right[method]) / np.maximum(num_KL, 1), np.inf)
        row, column = map(int, np.unravel_index(share_KL.argmin(), share_KL.shape))
        if not np.isfinite(share_KL[row, column]):
            return None
        return WorstGroup((row, column), self.right[method][row][column], self.num_test[row][column])

    def name(self, group: WorstGroup, class_names: Mapping[LabelSpace, Sequence[str]]) -> str:
        """Return the classes of a group in words, such as "wren · site 3" if `class_names` lacks the label site."""
        return " · ".join(
            class_names[label][number] if label in class_names else f"{label} {number}"
            for label, number in zip(self.labels, group.classes, strict=True)
        )


def pairs_of(
    labels: Mapping[LabelSpace, Sequence[str]], wanted: Sequence[tuple[LabelSpace, LabelSpace]] | None
) -> list[tuple[LabelSpace, LabelSpace]]:
    """Return the pairs of labels whose groups are measured: `wanted`, or by default every pair of `labels`.

    `labels` holds the class names of each label of the data. By default, leaves out pairs of more than `MAX_GROUPS`
    groups. Raises `UserError` if a wanted label is unknown.
    """
    if wanted is None:
        every = combinations(labels, 2)
        return [(one, other) for one, other in every if len(labels[one]) * len(labels[other]) <= MAX_GROUPS]
    for pair in wanted:
        for space in pair:
            if space not in labels:
                raise UserError(
                    f"probe.groups names label_{space}, which the samples do not have{nearest(space, labels)}"
                )
    return list(wanted)


def measure_groups(
    space: LabelSpace,
    predicted: Mapping[str, Tensor],
    *,
    pair: tuple[LabelSpace, LabelSpace],
    labels: Mapping[LabelSpace, Tensor],
    num_classes: tuple[int, int],
    num_left_out: int = 0,
) -> Groups:
    """Count the test samples of each group of `pair`, and how many of them each method gets right.

    `predicted` holds the classes that each method gives to the label `space`, (N,) int64; `labels` the true classes of
    both labels of the pair, one of which is `space`. `num_left_out` more test samples have no label at all.
    """
    first_N, second_N = (labels[label].cpu().numpy() for label in pair)
    in_group_N = (first_N != NO_LABEL) & (second_N != NO_LABEL)
    group_N = (first_N * num_classes[1] + second_N)[in_group_N]
    true_N = labels[space].cpu().numpy()[in_group_N]

    def count(groups: NDArray[np.int64]) -> tuple[tuple[int, ...], ...]:
        table_KL = np.bincount(groups, minlength=num_classes[0] * num_classes[1]).reshape(num_classes)
        return tuple(tuple(row) for row in table_KL.tolist())

    return Groups(
        labels=pair,
        num_test=count(group_N),
        right={
            name: count(group_N[class_N.cpu().numpy()[in_group_N] == true_N]) for name, class_N in predicted.items()
        },
        num_unlabelled=int((~in_group_N).sum()) + num_left_out,
    )
