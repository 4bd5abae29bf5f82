"""The result of `python -m trainer.probe` for one label: RUN_DIR/probes/step_00010000/LABEL.json, such as base.json.

It holds a bit for each test sample: whether a probe gets it right. Accuracies of two encoders on the same samples share
the luck of the draw, because a sample that is hard for one is often hard for the other. Differences of single samples
leave that out, and so tell smaller differences from chance.
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from data_pipeline.core.schema import Line, Schema, is_label_name
from trainer.probes.features import LabelSpace, label_order
from trainer.probes.groups import Groups
from trainer.probes.knn import KNNResult
from trainer.probes.linear import LinearResult, ProbeConfig
from trainer.run_dir import read_object

_UNEVEN = 1.5  # classes are, if the largest has more than so many times the test samples of the smallest


class ScoredEncoder(Schema):
    """What was scored, and on what, if it is not a run on its own data.

    name: the encoder, as reports name it.
    seed: of the run; 0 of an encoder of others.
    origin: the command, code and machine, as in a provenance.json.
    sha256: of the file of the encoder; None if it is no file.
    features: the SHA-256 of its features of some samples, by which a later call knows it again; "" of a run.
    factors: its place in the suppression benchmark, as `tracking.factors` of a run; empty of other data.
    """

    name: Line
    seed: int
    train_dir: Line
    test_dir: Line
    origin: dict[str, Any]
    sha256: str | None = None
    features: str = ""
    factors: dict[str, str] = Field(default_factory=dict)


class ProbeResult(Schema):
    """Accuracies of one label at one checkpoint, and the accuracies to compare them with.

    checkpoint_step: 0 is the untrained encoder; 1 stands for any encoder of others.
    chance: one over the number of classes that the samples have.
    majority_share: the test accuracy of always answering the commonest class of the train set.
    seconds: the time of the probe, for all labels together.
    title: the manifest's name of the label for readers, such as "digit"; None if it has none.
    num_shared: the number of test samples whose source is in the train set too; None if the datasets record no sources.
    num_train, num_test: the samples with this label; `num_unlabelled` test samples lack it.
    groups: accuracies in the groups of this label and each other one; none in results from before there were groups.
    own_code: the SHA-256 of the source of each package of the user's own that the run uses; it lacks those that were
        not imported, and is empty in old results.
    right_samples: for each method, "linear" and "knn", a bit for each test sample, see `unpack_right`. It lacks
        methods of old results.
    confusion: for each method, how many test samples of a right class get a class: (right, class, samples), without
        pairs that no sample has; none in old results.
    scored: the encoder, if it is not that of a run on its own data.
    run: the run whose encoder it is, see `trainer.reports.config_identity.run_identity`; None in old results, and if
        the run records no start.
    """

    label: LabelSpace
    checkpoint_step: int
    linear: LinearResult
    knn: KNNResult
    chance: float
    majority_share: float
    class_names: tuple[str, ...]
    num_train: int
    num_test: int
    probe_config: ProbeConfig
    train_manifest_sha256: str
    test_manifest_sha256: str
    seconds: float
    title: str | None = None
    num_shared: int | None = None
    num_unlabelled: int = 0
    groups: tuple[Groups, ...] = ()
    own_code: dict[str, str] = Field(default_factory=dict)
    right_samples: dict[str, str] = Field(default_factory=dict)
    confusion: dict[str, tuple[tuple[int, int, int], ...]] = Field(default_factory=dict)
    scored: ScoredEncoder | None = None
    run: str | None = None

    @property
    def data(self) -> tuple[str, str]:
        """Return the hashes of the train set and the test set on which it was measured."""
        return self.train_manifest_sha256, self.test_manifest_sha256

    def balanced_accuracy(self, method: str) -> float | None:
        """Return the mean of the accuracies of the classes; None if the classes are about even, or if not recorded."""
        num_of: dict[int, int] = {}
        right_of: dict[int, int] = {}
        for right, given, num in self.confusion.get(method, ()):
            num_of[right] = num_of.get(right, 0) + num
            right_of[right] = right_of.get(right, 0) + num * (right == given)
        if not num_of or max(num_of.values()) <= _UNEVEN * min(num_of.values()):
            return None
        return sum(right_of[each] / num_of[each] for each in num_of) / len(num_of)

    def is_of_other_run(self, run: str | None) -> bool:
        """Return whether it is known to be of another run than the one with this identity."""
        return None not in (self.run, run) and self.run != run


def results_in(directory: Path) -> list[ProbeResult]:
    """Return the results in a directory of one checkpoint by `label_order`; of a label, the shortest name first.

    That is the result with the run's own probe. Raises `UserError` if a file is damaged.
    """
    paths: dict[LabelSpace, list[Path]] = {}
    for path in sorted(directory.glob("*.json"), key=lambda path: (len(path.name), path)):
        if is_label_name(label := path.stem.partition("-")[0]):
            paths.setdefault(label, []).append(path)
    return [read_result(path) for label in label_order(paths) for path in paths[label]]


def read_result(path: Path) -> ProbeResult:
    """Read one result. Raises `UserError` if the file is not one."""
    return ProbeResult.parse(
        read_object(path, mend="remove it, or run `python -m trainer.probe` again"), where=str(path)
    )


def pack_right(right_N: Tensor) -> str:
    """Return which of the labelled test samples are right, (N,) bool in the order of the dataset, as base64."""
    return base64.b64encode(np.packbits(right_N.cpu().numpy()).tobytes()).decode()


def unpack_right(text: str, *, num_test: int) -> NDArray[np.bool_] | None:
    """Return which of the `num_test` labelled test samples are right, (num_test,) bool; None if the text is damaged.

    Examples:
        >>> unpack_right("oA==", num_test=3).tolist()  # bits 1010 0000
        [True, False, True]
    """
    try:
        packed = np.frombuffer(base64.b64decode(text, validate=True), dtype=np.uint8)
    except ValueError:
        return None
    return np.unpackbits(packed)[:num_test].astype(bool) if len(packed) == -(-num_test // 8) else None
