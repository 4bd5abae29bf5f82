"""Decide the settings that a config leaves to the data: mean, std and form of an encoder, rate and length of sounds.

The decided settings are recorded in provenance.json, so that an encoder can be loaded without its data. The config of
the run keeps them open.
"""

from __future__ import annotations

from typing import Any, Final

from data_pipeline.core.errors import UserError
from trainer.config import RunConfig
from trainer.mixture import TrainManifest
from trainer.models.encoder import Normalization
from trainer.run_dir import RunDir

RECORDED_ENCODER: Final = "encoder"  # keys in provenance.json
RECORDED_INPUT_SIZE: Final = "encoder_input_size"
_RECORDED_SOUNDS: Final = "sounds"


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
    """Return the config with no setting of its encoder or its sounds left open: the train set decides them.

    `encoder.mean` and `encoder.std` become those of its pictures, if they are null. A kind such as resnet18_by_size
    becomes the one that suits the size of its pictures or spectrograms.
    """
    config = config.model_copy(update={"data": config.data.with_sounds_of(train)})
    height, width = input_size(config, train.batch_shape)
    encoder = config.encoder.with_form(height=height, width=width)
    if encoder.normalization is None and (found := normalization_of(train)) is not None:
        encoder = encoder.model_copy(update=dict(found))
    return config.model_copy(update={"encoder": encoder})


def decisions_to_record(config: RunConfig, train: TrainManifest) -> dict[str, Any]:
    """Return the entries of provenance.json for `decide_as_recorded`, and the input size, which an export names."""
    decided = decide(config, train)
    sounds = {"sample_rate": decided.data.sample_rate, "num_points": decided.data.num_points}
    return {
        **({} if config.data == decided.data else {_RECORDED_SOUNDS: sounds}),
        RECORDED_ENCODER: decided.encoder.model_dump(mode="json"),
        RECORDED_INPUT_SIZE: input_size(config, train.batch_shape),
    }


def decide_as_recorded(config: RunConfig, run_dir: RunDir) -> RunConfig:
    """Return the config of a run with encoder and sounds as provenance.json records them, if it leaves a setting open.

    Raises `UserError` if none is recorded.
    """
    needs_normalization = config.encoder.normalization is None and config.data.mel is None
    has_open_sounds = config.data.sample_rate == "of_data"
    if not needs_normalization and not config.encoder.form_is_open and not has_open_sounds:
        return config
    facts = run_dir.read_provenance()
    if not facts and run_dir.latest_step() is None:
        raise UserError(f"{run_dir.path} has not begun to train yet; `python launch/status.py {run_dir.path}` says why")
    for name in (RECORDED_ENCODER, _RECORDED_SOUNDS) if has_open_sounds else (RECORDED_ENCODER,):
        if name not in facts:
            raise UserError(
                f'there is no "{name}" in {run_dir.provenance}, which says how the encoder was built; restore that file'
            )
    encoder = type(config.encoder).parse(facts[RECORDED_ENCODER], where=f'"{RECORDED_ENCODER}" in {run_dir.provenance}')
    data = config.data.model_copy(update=facts[_RECORDED_SOUNDS]) if has_open_sounds else config.data
    return config.model_copy(update={"encoder": encoder, "data": data})
