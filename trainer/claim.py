"""Take a run directory for a training, if its checkpoints are of this run, its config, its data and its code.

Invariant: a run goes on with the same datasets, or with new ones that the user has accepted.
"""

from __future__ import annotations

from collections.abc import Collection

from data_pipeline.core.errors import UserError
from data_pipeline.core.imports import without_garbage_collection
from trainer.checkpoint.restore import Restored, newest_state
from trainer.checkpoint.run_state import NAME_DIGITS, DataIdentity
from trainer.config import RunConfig, read_run_config
from trainer.config_changes import edited_config, refuse_other_config
from trainer.data import DataConfig, Manifests
from trainer.own_code import check_same_code
from trainer.preflight import check_manifests, check_start
from trainer.run_dir import LOCK_NAME, Hold, RunDir, hold, write_json


@without_garbage_collection()  # the first trial of an encoder imports much of torch
def claim(run_dir: RunDir, config: RunConfig, manifests: Manifests, *, accepted_data: Collection[str] = ()) -> Hold:
    """Check the data, take the run directory for a start with this config, and forget how an earlier start ended.

    `accepted_data` are names of new datasets (`DataIdentity.name`), and of new code (`check_same_code`), with which the
    run may go on.

    Raises `UserError` if the data do not fit or were replaced, if code of the user's own has changed, if the directory
    holds another config, an edited config or other files, or if another process trains in it.
    """
    check_manifests(config, manifests)
    is_new = not run_dir.config.is_file()
    if is_new and run_dir.path.exists() and any(path.name != LOCK_NAME for path in run_dir.path.iterdir()):
        raise UserError(f"{run_dir.path} is not empty and is not a run directory; pass another --run-dir")
    held = hold(run_dir)
    try:
        if run_dir.config.is_file():
            refuse_other_config(run_dir, config)
        found = newest_state(run_dir)
        if found.step == 0:
            check_start(config, manifests)
        _check_same_data(run_dir, config, manifests, found, accepted_data=accepted_data)
        if found.step > 0:
            if (edited := edited_config(run_dir, config)) is not None:
                raise UserError(
                    f"{edited}; put the values back that {run_dir.provenance} shows, or pass another --run-dir"
                )
            check_same_code(run_dir, config, manifests.datasets, step=found.step, accepted=accepted_data)
        if not run_dir.config.is_file() or read_run_config(run_dir) != config:
            write_json(run_dir.config, config.model_dump(mode="json"))
        run_dir.ended.unlink(missing_ok=True)
    except BaseException:
        held.close()
        raise
    return held


def _check_same_data(
    run_dir: RunDir, config: RunConfig, manifests: Manifests, found: Restored, *, accepted_data: Collection[str]
) -> None:
    """Raise `UserError` if a run cannot go on from the checkpoint `found` with the present data.

    The position of a run is its step. With new data, the run therefore goes on with the epoch, the order and the
    learning rate of the new data at this step. The new data must be accepted, and a run on them must not have ended
    before this step.
    """
    before, now = found.trained_on, manifests.identity
    if before is not None and before != now and now.name not in accepted_data:
        where, manifest, earlier = _first_change(before, now, config.data)
        raise UserError(
            f"{where} holds another dataset (manifest {manifest[:NAME_DIGITS]}) than the one with which {run_dir.path} "
            f"came to step {found.step} (manifest {earlier[:NAME_DIGITS]}); put that one back, pass another --run-dir, "
            f"or go on with the new data by --accept-data {now.name}"
        )
    num_samples = manifests.train.num_samples
    num_steps = config.num_epochs * config.data.num_steps_per_epoch(num_samples, config.global_batch_size)
    if found.step > num_steps:
        raise UserError(
            f"{run_dir.path} is at step {found.step}, but with the {num_samples} samples of {config.data.train_name} "
            f"its {config.num_epochs} epochs end at step {num_steps}; put the old data back, or pass another --run-dir"
        )


def _first_change(before: DataIdentity, now: DataIdentity, data: DataConfig) -> tuple[str, str, str]:
    """Return the location of a dataset that has changed, and the hashes of its manifest now and before."""
    for name, sha256 in now.train_sources.items():
        if (earlier := before.train_sources.get(name, sha256)) != sha256:
            return f"{data.train_locations[name]}, the source {name} of the mixture,", sha256, earlier
    if now.train_manifest_sha256 != before.train_manifest_sha256:
        return data.train_name, now.train_manifest_sha256, before.train_manifest_sha256
    return data.test_dir, now.test_manifest_sha256, before.test_manifest_sha256
