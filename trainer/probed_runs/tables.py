"""Write the tables that `python -m trainer.probe` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trainer.probes.curve import ProbeCurve
from trainer.probes.features import LabelSpace
from trainer.probes.groups import describe_groups
from trainer.probes.result import ProbeResult


def table(results: Mapping[LabelSpace, ProbeResult]) -> str:
    """Return a table of test accuracies in per cent, by label; several draws of the overlays add a line."""
    width = max([18, *(len(f"label_{space} ") for space in results)])
    lines = [f"{'test accuracy, %':{width}}{'linear':>8}{'(best, epoch)':>16}{'kNN':>8}{'majority':>10}{'chance':>8}"]
    for space, result in results.items():
        best = f"({100 * result.linear.best_accuracy:.1f}, {result.linear.best_epoch})"
        lines.append(
            f"{'label_' + space:{width}}{100 * result.linear.accuracy:8.1f}{best:>16}{100 * result.knn.accuracy:8.1f}"
            f"{100 * result.majority_share:10.1f}{100 * result.chance:8.1f}"
        )
        if result.linear.draws is not None and result.knn.draws is not None:
            linear, knn = (
                f"{100 * draws.mean:.1f} ± {100 * draws.deviation:.1f}"
                for draws in (result.linear.draws, result.knn.draws)
            )
            lines.append(f"  {len(result.linear.draws.accuracies)} draws of the test overlays: {linear}, kNN {knn}")
        lines += [f"  {describe_groups(groups)}" for groups in result.groups]
    return "\n".join(lines)


def curve_table(curves: Sequence[ProbeCurve]) -> str:
    """Return a table with the last and the best checkpoint of each curve, and the one with half of its gain, in %."""
    names = [f"label_{curve.label}, {curve.method}" for curve in curves]
    width = max([26, *map(len, names)])
    head = f"{'over checkpoints, %':{width}}{'last (step)':>18}{'best on the test set (step)':>30}"
    lines = [f"{head}{'half of the gain (step)':>26}"]
    for name, curve in zip(names, curves, strict=True):
        last, best, half = (
            "–" if point is None else f"{100 * point.accuracy:.1f} ({point.step})"
            for point in (curve.last, curve.best, curve.half_gain)
        )
        lines.append(f"{name:{width}}{last:>18}{best:>30}{half:>26}")
    return "\n".join(lines)
