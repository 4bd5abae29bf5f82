"""Decide the settings of an encoder that its config leaves to the data: its mean and std, and its form by the size.

Decisions that need the train set are recorded in provenance.json, so that an encoder can be loaded without its data.
The config of the run keeps them open.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from data_pipeline.core.errors import UserError
from trainer.config import RunConfig
from trainer.mixture import TrainManifest
from trainer.models.encoder import Normalization
from trainer.run_dir import RunDir

RECORDED_NORMALIZATION: Final = "normalization"  # keys in provenance.json
RECORDED_INPUT_SIZE: Final = "encoder_input_size"


def normalization_of(manifest: TrainManifest) -> Normalization | None:
    """Return the mean and std of the pictures of a dataset or of a mixture; None for sounds.

    A channel with the same value everywhere gets a std of 1.
    """
    if manifest.medium == "sound":
        return None
    return Normalization(mean=manifest.batch_mean, std=tuple(std or 1.0 for std in manifest.batch_std))


def input_size(config: RunConfig, batch_shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the height and width of the encoder's input, for inputs of a batch of that shape."""
    mel = config.data.mel
    if mel is not None:
        return mel.num_mels, mel.num_frames
    _, height, width = batch_shape
    return height, width


def decide(config: RunConfig, train: TrainManifest) -> RunConfig:
    """Return the config with no setting of its encoder left open: the train set decides them.

    `encoder.mean` and `encoder.std` become those of its pictures, if they are null. A kind such as resnet18_by_size
    becomes the one that suits the size of its pictures or spectrograms.
    """
    return _decided(config, normalization_of(train), input_size(config, train.batch_shape))


def decisions_to_record(config: RunConfig, train: TrainManifest) -> dict[str, Any]:
    """Return the entries of provenance.json from which `decide_as_recorded` decides as `decide` does.

    The size of the inputs is one of them in every run, because an export names it.
    """
    facts: dict[str, Any] = {RECORDED_INPUT_SIZE: list(input_size(config, train.batch_shape))}
    if config.encoder.normalization is None and (derived := normalization_of(train)) is not None:
        facts[RECORDED_NORMALIZATION] = derived.model_dump(mode="json")
    return facts


def recorded_input_size(provenance: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the height and width of the encoder's input in provenance.json; None if they are not recorded."""
    match provenance.get(RECORDED_INPUT_SIZE):
        case [int(height), int(width)]:
            return height, width
    return None


def decide_as_recorded(config: RunConfig, run_dir: RunDir) -> RunConfig:
    """Return the config of a run with the settings of its encoder that provenance.json records.

    Raises `UserError` if one is open and not recorded.
    """
    normalization = size = None
    if config.encoder.normalization is None and config.data.mel is None:
        numbers = _recorded(run_dir, RECORDED_NORMALIZATION)
        normalization = Normalization.parse(numbers, where=f'"{RECORDED_NORMALIZATION}" in {run_dir.provenance}')
    if config.encoder.form_is_open:
        height, width = _recorded(run_dir, RECORDED_INPUT_SIZE)
        size = height, width
    return _decided(config, normalization, size)


def _recorded(run_dir: RunDir, name: str) -> Any:
    """Return a decision in provenance.json. Raises `UserError` if it is not there."""
    facts = run_dir.read_provenance()
    if not facts and run_dir.latest_step() is None:
        raise UserError(f"{run_dir.path} has not begun to train yet; `python launch/status.py {run_dir.path}` says why")
    if name not in facts:
        raise UserError(f'{run_dir.provenance} does not hold "{name}", which the encoder needs; restore that file')
    return facts[name]


def _decided(config: RunConfig, normalization: Normalization | None, size: tuple[int, int] | None) -> RunConfig:
    encoder = config.encoder
    if size is not None:
        encoder = encoder.with_form(height=size[0], width=size[1])
    if normalization is not None and encoder.normalization is None:
        encoder = encoder.model_copy(update={"mean": normalization.mean, "std": normalization.std})
    return config.model_copy(update={"encoder": encoder})
