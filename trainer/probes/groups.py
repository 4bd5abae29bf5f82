"""Accuracies in groups: a group is a pair of classes of two labels, such as a waterbird on land (Sagawa et al. 2020).

A probe that reads one label through another has a high accuracy on the whole, and a low one in the groups in which the
two disagree. The number to report is the accuracy in the worst group. Of many small groups, one is far below the others
by chance alone, so it is compared with the worst of groups that are equally hard.

Shapes: N test samples, K classes of the first label, L classes of the second.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from data_pipeline.core.errors import UserError, nearest
from data_pipeline.core.sample import NO_LABEL
from data_pipeline.core.schema import LabelName, Schema
from data_pipeline.storage.manifest import Manifest
from trainer.probes.features import LabelSpace

MAX_GROUPS: Final = 100_000  # of one pair of labels


class WorstGroup(Schema):
    """The group of the lowest accuracy, the first of several: its two classes, accuracy and number of test samples."""

    classes: tuple[str, str]
    accuracy: float
    num_test: int

    @property
    def name(self) -> str:
        return " · ".join(self.classes)


class Groups(Schema):
    """The test accuracies of one label in the groups of a pair of labels, of which it is one.

    Attributes:
        labels: the pair. The first numbers the rows of the tables, the second the columns.
        num_test: (K, L), the number of test samples of each group.
        right: for each method, "linear" and "knn": (K, L), how many of them it gets right.
        min_size: a group of fewer test samples is not taken as the worst.
        worst: for each method; empty if all groups are too small.
        num_empty, num_small: the groups without test samples, and the others below `min_size`.
        num_unlabelled: the test samples that lack one of the two labels, and so are in no group.
    """

    labels: tuple[LabelName, LabelName]
    num_test: tuple[tuple[int, ...], ...]
    right: dict[str, tuple[tuple[int, ...], ...]]
    min_size: int
    worst: dict[str, WorstGroup]
    num_empty: int
    num_small: int
    num_unlabelled: int

    @property
    def not_counted(self) -> str:
        """Return the numbers of groups and of samples that cannot be the worst group; an empty text if all count."""
        return ", ".join(
            f"{num} {what}"
            for num, what in (
                (self.num_empty, "empty"),
                (self.num_small, f"of fewer than {self.min_size} samples"),
                (self.num_unlabelled, "samples without a label"),
            )
            if num
        )


def pairs_of(
    labels: Mapping[LabelSpace, Sequence[str]], wanted: Sequence[tuple[LabelSpace, LabelSpace]] | None
) -> list[tuple[LabelSpace, LabelSpace]]:
    """Return the pairs of labels whose groups are measured: `wanted`, or by default every pair of `labels`.

    `labels` holds the class names of each label of the data. By default, leaves out pairs of more than `MAX_GROUPS`
    groups. Raises `UserError` if a wanted label is unknown, or if a wanted pair has more groups.
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
        if (num := len(labels[pair[0]]) * len(labels[pair[1]])) > MAX_GROUPS:
            raise UserError(
                f"probe.groups pairs {pair[0]} with {pair[1]}, which gives {num} groups; name labels of at most "
                f"{MAX_GROUPS} groups"
            )
    return list(wanted)


def measure_groups(
    space: LabelSpace,
    predicted: Mapping[str, Tensor],
    *,
    pair: tuple[LabelSpace, LabelSpace],
    labels: Mapping[LabelSpace, Tensor],
    manifest: Manifest,
    min_size: int,
    num_left_out: int = 0,
) -> Groups:
    """Count the test samples of each group of `pair`, and how many of them each method gets right.

    `predicted` holds the classes that each method gives to the label `space`, (N,) int64; `labels` the true classes of
    both labels of the pair, one of which is `space`. `num_left_out` more test samples have no label at all.
    """
    names = [manifest.labels[label].classes for label in pair]
    first_N, second_N = (labels[label].cpu().numpy() for label in pair)
    in_group_N = (first_N != NO_LABEL) & (second_N != NO_LABEL)
    shape = (len(names[0]), len(names[1]))
    group_N = (first_N * shape[1] + second_N)[in_group_N]
    true_N = labels[space].cpu().numpy()[in_group_N]
    num_KL = np.bincount(group_N, minlength=shape[0] * shape[1]).reshape(shape)
    right: dict[str, tuple[tuple[int, ...], ...]] = {}
    worst: dict[str, WorstGroup] = {}
    for method, class_N in predicted.items():
        is_right_N = class_N.cpu().numpy()[in_group_N] == true_N
        right_KL = np.bincount(group_N[is_right_N], minlength=num_KL.size).reshape(shape)
        right[method] = _rows(right_KL)
        share_KL = np.where(num_KL >= min_size, right_KL / np.maximum(num_KL, 1), np.inf)
        row, column = np.unravel_index(share_KL.argmin(), shape)
        if np.isfinite(share_KL[row, column]):
            worst[method] = WorstGroup(
                classes=(names[0][row], names[1][column]),
                accuracy=float(share_KL[row, column]),
                num_test=int(num_KL[row, column]),
            )
    return Groups(
        labels=pair,
        num_test=_rows(num_KL),
        right=right,
        min_size=min_size,
        worst=worst,
        num_empty=int((num_KL == 0).sum()),
        num_small=int(((num_KL > 0) & (num_KL < min_size)).sum()),
        num_unlabelled=int((~in_group_N).sum()) + num_left_out,
    )


def worst_of_equal(groups: Sequence[Groups], method: str) -> float | None:
    """Return the accuracy of the worst group that would be expected if all groups were equally hard.

    None if a single group counts, which is both the worst and the best.

    It is the median of the least of binomial shares, with the sizes of all counted groups of `groups`, as if they were
    independent, and with the accuracy over all of them. Raises `ValueError` if no group counts.
    """
    from scipy import special  # here, because a rank of a training imports this module

    num_G = np.concatenate([np.ravel(one.num_test)[np.ravel(one.num_test) >= one.min_size] for one in groups])
    right_G = np.concatenate([np.ravel(one.right[method])[np.ravel(one.num_test) >= one.min_size] for one in groups])
    if not num_G.size:
        raise ValueError("every group is too small to be the worst")
    if num_G.size == 1:
        return None
    accuracy = right_G.sum() / num_G.sum()
    size_S, count_S = np.unique(num_G, return_counts=True)

    def is_reached(share: float) -> bool:
        """Return whether the worst group is at most at a share in half of the draws or more."""
        above_S = special.bdtrc(np.floor(share * size_S + 1e-9), size_S, accuracy)
        return float(np.prod(above_S**count_S)) <= 0.5

    shares = np.unique(np.concatenate([np.arange(size + 1) / size for size in size_S]))
    return float(shares[bisect.bisect_left(shares, True, key=is_reached)])


def _rows(table_KL: NDArray[np.int64]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(row) for row in table_KL.tolist())


def _expected(groups: Groups, method: str) -> str:
    expected = worst_of_equal([groups], method)
    return "no other group counts" if expected is None else f"{100 * expected:.1f} if all were equally hard"


def describe_groups(groups: Groups) -> str:
    """Return a line about the worst group of each method, and about the groups and samples that do not count."""
    one, other = groups.labels
    parts = [
        f"{name} {100 * worst.accuracy:.1f} ({worst.name}, {worst.num_test} samples; {_expected(groups, method)})"
        for method, name in (("linear", "linear"), ("knn", "kNN"))
        if (worst := groups.worst.get(method)) is not None
    ]
    line = f"worst group of {one} x {other}: {', '.join(parts) or f'none has {groups.min_size} test samples'}"
    return f"{line}; not counted: {groups.not_counted}" if groups.not_counted else line
