"""Accuracies over checkpoints, with the last and the best of them: RUN_DIR/probes/curves.json."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from data_pipeline.core.schema import Schema, is_label_name
from trainer.probes.features import LabelSpace, label_order
from trainer.probes.result import labels_in, read_result
from trainer.run_dir import RunDir

Method = Literal["linear", "knn", "online_knn", "online_ridge"]


_ONLINE: Mapping[Method, str] = {"online_knn": "knn", "online_ridge": "ridge"}  # the names in metrics, probe/LABEL/NAME


class Point(Schema):
    """Test accuracy in [0, 1] after `step` steps of training, which are `epoch` epochs."""

    step: int
    epoch: float
    accuracy: float


class ProbeCurve(Schema):
    """Accuracies of one label by one method over the checkpoints of a run.

    last: the one to report.
    best: the first of the highest after a step. It was chosen on the test set, as in Huang et al. 2023, so it is
        optimistic.
    half_gain: the first point that has at least half of the gain of the last one over the first one; None if there is
        no gain. The label whose curve has it first is the one that the encoder learns first.

    The `online_` methods are measured on some of the samples during training, first before its first step.
    """

    label: LabelSpace
    method: Method
    points: tuple[Point, ...]
    last: Point
    best: Point
    half_gain: Point | None = None
    best_chosen_on: Literal["test"] = "test"


class Curves(Schema):
    curves: tuple[ProbeCurve, ...]


def curve_of(label: LabelSpace, method: Method, points: Sequence[Point]) -> ProbeCurve:
    """Return the curve through one point or more, given in any order."""
    in_order = sorted(points, key=lambda point: point.step)
    best = max(in_order, key=lambda point: (point.step > 0, point.accuracy))
    last = in_order[-1]
    half_gain = half_of_change(in_order) if last.accuracy > in_order[0].accuracy else None
    return ProbeCurve(label=label, method=method, points=tuple(in_order), last=last, best=best, half_gain=half_gain)


def half_of_change(in_order: Sequence[Point]) -> Point:
    """Return the first point that has at least half of the change of the last one from the first one.

    Examples:
        >>> points = [Point(step=step, epoch=0, accuracy=y) for step, y in ((0, 0.9), (10, 0.6), (20, 0.4), (30, 0.3))]
        >>> half_of_change(points).step
        10
    """
    first, last = in_order[0].accuracy, in_order[-1].accuracy
    half, sign = (first + last) / 2, 1 if last >= first else -1
    return next(point for point in in_order if sign * (point.accuracy - half) >= 0)


def read_curves(run_dir: RunDir, *, steps_per_epoch: int, suffix: str = "") -> Curves:
    """Return the curves of a run, from its metrics and from the probe results whose file names end with `suffix`.

    A curve of checkpoints begins with the untrained encoder (step 0), if that was probed too. Leaves out results on
    other data than those of the last step. Raises `UserError` for a damaged file.
    """
    points: dict[tuple[LabelSpace, Method], list[Point]] = {}

    def add(label: LabelSpace, method: Method, step: int, accuracy: float) -> None:
        point = Point(step=step, epoch=step / steps_per_epoch, accuracy=accuracy)
        points.setdefault((label, method), []).append(point)

    results = [
        read_result(run_dir.probes(step) / f"{space}{suffix}.json")
        for step in run_dir.probe_steps()
        for space in labels_in(run_dir.probes(step), suffix=suffix)
    ]
    last = max(results, key=lambda result: result.checkpoint_step, default=None)
    trained = {result.label for result in results if result.checkpoint_step > 0}
    for result in results:
        if last is not None and result.data == last.data and result.label in trained:
            add(result.label, "linear", result.checkpoint_step, result.linear.accuracy)
            add(result.label, "knn", result.checkpoint_step, result.knn.accuracy)
    for reading in online_readings(run_dir.read_metrics()):
        add(*reading)
    return Curves(curves=tuple(curve_of(*key, of_key) for key, of_key in points.items()))


def online_readings(metrics: Iterable[Mapping[str, Any]]) -> Iterator[tuple[LabelSpace, Method, int, float]]:
    """Yield the label, the method, the step and the accuracy of each online probe in the entries of metrics.jsonl."""
    for entry in metrics:
        for space in online_labels(entry):
            for method, name in _ONLINE.items():
                if (accuracy := _number(entry, f"probe/{space}/{name}")) is not None:
                    yield space, method, entry["step"], accuracy


def online_labels(metrics: Iterable[str]) -> list[LabelSpace]:
    """Return the labels of which the online probe wrote some metrics, from the names of metrics.

    Examples:
        >>> online_labels(["loss", "probe/site/knn", "probe/base/knn", "probe/seconds"])
        ['base', 'site']
    """
    parts = (name.split("/") for name in metrics)
    return label_order(part[1] for part in parts if len(part) == 3 and part[0] == "probe" and is_label_name(part[1]))


def _number(entry: Mapping[str, Any], name: str) -> float | None:
    value = entry.get(name)
    return float(value) if isinstance(value, int | float) else None
