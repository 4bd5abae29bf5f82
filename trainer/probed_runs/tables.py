"""Write the tables that `python -m trainer.probe` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from trainer.config import read_run_config
from trainer.probes.curve import ProbeCurve
from trainer.probes.features import LabelSpace
from trainer.probes.groups import describe_groups
from trainer.probes.linear import spread
from trainer.probes.result import ProbeResult
from trainer.provenance import train_sets
from trainer.reports.config_identity import config_identity
from trainer.run_dir import RunDir


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


def runs_table(paths: Sequence[Path], of_runs: Sequence[Mapping[LabelSpace, ProbeResult]]) -> str:
    """Return the mean and deviation (divisor n - 1) over the runs of each configuration, in per cent, by label.

    Names the runs that have the seed of another one, such as copies, and leaves them out, and says at which steps the
    runs were probed if these differ.
    """
    arms: dict[tuple[object, ...], dict[int, tuple[Path, Mapping[LabelSpace, ProbeResult]]]] = {}
    lines = []
    for path, results in zip(paths, of_runs, strict=True):
        one = next(iter(results.values()))
        config = read_run_config(RunDir(path))
        trained_on = train_sets(config, RunDir(path).read_provenance())
        of_arm = arms.setdefault((config_identity(config), trained_on, *one.data), {})
        first, _ = of_arm.setdefault(config.seed, (path, results))
        if first.resolve() != path.resolve():
            lines.append(f"{path} is left out: {first} has the same configuration, data and seed {config.seed}")
    for of_arm in arms.values():
        if len(of_arm) == 1:
            continue
        lines.append(f"mean over {', '.join(str(path) for path, _ in of_arm.values())}:")
        by_step = {path: next(iter(results.values())).checkpoint_step for path, results in of_arm.values()}
        if len(set(by_step.values())) > 1:
            steps = ", ".join(f"{path} at step {step}" for path, step in by_step.items())
            lines.append(f"warning: the runs were probed at different steps, so ± is not of seeds alone: {steps}")
        for space in dict.fromkeys(space for _, results in of_arm.values() for space in results):
            of_space = [results[space] for _, results in of_arm.values() if space in results]
            if len(of_space) == 1:
                continue
            linear, knn = (
                spread([getattr(result, method).accuracy for result in of_space]) for method in ("linear", "knn")
            )
            assert linear is not None
            assert knn is not None
            lines.append(
                f"label_{space}, {len(of_space)} runs: linear {100 * linear.mean:.1f} ± {100 * linear.deviation:.1f}, "
                f"kNN {100 * knn.mean:.1f} ± {100 * knn.deviation:.1f}"
            )
    return "\n".join(lines) or "no two runs have the same configuration and dataset, so there is no mean over runs"


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
