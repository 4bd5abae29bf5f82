"""The result of `python -m trainer.probe` for one label: RUN_DIR/probes/step_00010000/{base,overlay}.json."""

from __future__ import annotations

from pathlib import Path

from data_pipeline.core.schema import Schema
from trainer.probes.features import LabelSpace
from trainer.probes.knn import KNNResult
from trainer.probes.linear import LinearResult, ProbeConfig
from trainer.run_dir import read_object


class ProbeResult(Schema):
    """Accuracies of one label at one checkpoint, and the accuracies to compare them with.

    checkpoint_step: 0 is the untrained encoder.
    chance: one over the number of classes.
    majority_share: the test accuracy of always answering the commonest class of the train set.
    seconds: the time of the probe, for all labels together.
    title: the manifest's name of the label for readers, such as "digit"; None if it has none.
    num_shared: the number of test samples whose source is in the train set too; None if the datasets record no sources.
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


def read_result(path: Path) -> ProbeResult:
    """Read one result. Raises `UserError` if the file is not one."""
    return ProbeResult.parse(
        read_object(path, mend="remove it, or run `python -m trainer.probe` again"), where=str(path)
    )
