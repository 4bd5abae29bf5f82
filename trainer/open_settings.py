"""Find the mean and std with which an encoder normalises pictures: from its config, or else from the train set.

The numbers of the train set are recorded in provenance.json, so that an encoder can be loaded without its data.
"""

from __future__ import annotations

from typing import Final

from data_pipeline.core.errors import UserError
from data_pipeline.storage.manifest import Manifest
from trainer.config import RunConfig
from trainer.models.encoder import Normalization
from trainer.run_dir import RunDir

RECORDED_NORMALIZATION: Final = "normalization"  # the key in provenance.json


def normalization_of(manifest: Manifest) -> Normalization | None:
    """Return the mean and std of a dataset's pictures; None for sounds.

    A channel with the same value everywhere gets a std of 1.
    """
    if manifest.medium == "sound":
        return None
    return Normalization(mean=manifest.mean, std=tuple(std or 1.0 for std in manifest.std))


def recorded_normalization(run_dir: RunDir, config: RunConfig) -> Normalization | None:
    """Return the mean and std in provenance.json for the encoder of a run.

    Returns None if the config has them, or if the samples are sounds. Raises `UserError` if they are needed but not
    recorded.
    """
    if config.encoder.normalization is not None or config.data.mel is not None:
        return None
    value = run_dir.read_provenance().get(RECORDED_NORMALIZATION)
    if not isinstance(value, dict):
        raise UserError(
            f'{run_dir.provenance} does not hold "{RECORDED_NORMALIZATION}", the mean and std by which the encoder '
            "normalises its input; restore that file, or set encoder.mean and encoder.std in "
            f"{run_dir.config} to the values in the manifest.json of the train set"
        )
    return Normalization.parse(value, where=f'"{RECORDED_NORMALIZATION}" in {run_dir.provenance}')
