"""Write the table that `python -m trainer.probe` prints."""

from __future__ import annotations

from collections.abc import Mapping

from trainer.probes.features import LabelSpace
from trainer.probes.groups import Groups
from trainer.probes.result import ProbeResult


def table(results: Mapping[LabelSpace, ProbeResult]) -> str:
    """Return a table of test accuracies in per cent, by label."""
    width = max([18, *(len(f"label_{space} ") for space in results)])
    lines = [f"{'test accuracy, %':{width}}{'linear':>8}{'(best, epoch)':>16}{'kNN':>8}{'majority':>10}{'chance':>8}"]
    for space, result in results.items():
        best = f"({100 * result.linear.best_accuracy:.1f}, {result.linear.best_epoch})"
        lines.append(
            f"{'label_' + space:{width}}{100 * result.linear.accuracy:8.1f}{best:>16}{100 * result.knn.accuracy:8.1f}"
            f"{100 * result.majority_share:10.1f}{100 * result.chance:8.1f}"
        )
        lines += [line for groups in result.groups for line in _worst(groups, results)]
    return "\n".join(lines)


def _worst(groups: Groups, results: Mapping[LabelSpace, ProbeResult]) -> list[str]:
    """Return a line about the worst group of the linear probe, if a group is large enough."""
    if (worst := groups.worst("linear")) is None:
        return []
    name = groups.name(worst, {label: result.class_names for label, result in results.items()})
    which = f"{name}, {worst.num_test} samples"
    return [f"  worst group of {' x '.join(groups.labels)}: linear {100 * worst.accuracy:.1f} ({which})"]
