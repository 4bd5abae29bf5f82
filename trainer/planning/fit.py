"""Plan a training: check its config, measure a step, and find the micro batches that fit a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from data_pipeline.core.errors import UserError
from data_pipeline.loading.placement import resident_bytes
from trainer.config import RunConfig
from trainer.distributed.engines.engine import Backend
from trainer.mixture import MixtureManifest, TrainManifest
from trainer.models.encoder import decide_form
from trainer.open_settings import input_size
from trainer.original_crops import original_crops
from trainer.planning.measure import Fit, TrainingPlan, measure
from trainer.preflight import check_batch, check_batch_norm, check_input_shape

MARGIN = 0.15  # the share of a device's memory that is left for what a plan does not count
_MUCH_DATA = 0.02  # the share of a device's memory from which on it helps to keep the data elsewhere
_ASSUMED_SIZE = 32  # height and width of pictures if there is no manifest


def plan(
    config: RunConfig,
    *,
    world_size: int,
    num_samples: int | None,
    num_classes: Mapping[str, int] | None = None,
    device_gigabytes: float | None,
    input_shape: tuple[int, ...] | None = None,
    data_bytes: int = 0,
    backend: Backend = "nccl",
) -> TrainingPlan:
    """Return the memory and messages of the run of `config` on `world_size` ranks.

    Leaves no process group, and must not be called inside one.

    Args:
        num_samples: the number of samples in the train set; None if it is not built yet.
        num_classes: the number of classes of each label of the train set; None if it is not built yet.
        device_gigabytes: the memory of a device in 10^9 bytes, for which to find micro batches; None finds none.
        input_shape: the shape of a sample, as in the manifest; None assumes pictures of 32 x 32. Not used for sounds.
        data_bytes: the result of `bytes_of_data` for the device.
        backend: the backend of the collectives, which changes their names but not their bytes.

    Raises:
        UserError: ranks or micro batches do not divide the batch, the objective needs the unknown number of samples or
            labels, or views or encoder do not accept inputs of this size.
    """
    _check(config, world_size=world_size, num_samples=num_samples, num_classes=num_classes)
    shape = input_shape
    if shape is None:
        mel, channels = config.data.mel, config.encoder.in_channels
        shape = (channels, _ASSUMED_SIZE, _ASSUMED_SIZE) if mel is None else (mel.num_points,)
    height, width = input_size(config, shape)
    _check_input(config, height, width, world_size=world_size, is_known=input_shape is not None)
    encoder = decide_form(config.encoder, height=height, width=width)
    if encoder.normalization is None:  # of the data, which a plan does not need
        ones = (1.0,) * encoder.in_channels
        encoder = encoder.model_copy(update={"mean": ones, "std": ones})

    def at(micro_batches: int) -> TrainingPlan:
        memory = config.memory.model_copy(update={"micro_batches": micro_batches})
        measured = measure(
            config.model_copy(update={"memory": memory, "encoder": encoder}),
            world_size,
            num_samples=num_samples,
            num_classes=num_classes or {},
            shape=shape,
            backend=backend,
        )
        return replace(measured, data_bytes=data_bytes)

    found = at(config.memory.micro_batches)
    found = replace(found, input_shape_is_known=input_shape is not None or config.data.mel is not None)
    if device_gigabytes is None:
        return found
    device_bytes = int(device_gigabytes * 1e9)
    return replace(found, device_bytes=device_bytes, fit=_find_fit(found, config, at, room=room_on(device_bytes)))


def bytes_of_data(config: RunConfig, train: TrainManifest, *, device_bytes: int) -> int:
    """Return the bytes of the train set that a GPU with so much memory keeps there, by `data.placement`.

    As `place_data` decides when all memory is free.
    """
    if config.data.placement in {"stream", "host"} or original_crops(config, train) is not None:
        return 0
    room, kept = config.data.resident_gigabytes * 1e9, 0
    for manifest in train.sources.values() if isinstance(train, MixtureManifest) else [train]:
        num_bytes = resident_bytes(manifest)
        if config.data.placement == "device" or (num_bytes <= room and 2 * num_bytes <= device_bytes - kept):
            room -= num_bytes
            kept += num_bytes
    return kept


def what_fits(
    config: RunConfig,
    *,
    device_bytes: int,
    num_samples: int | None = None,
    input_shape: tuple[int, ...] | None = None,
    data_bytes: int = 0,
) -> str:
    """Return advice for a run on one rank whose memory was full: the micro batches that fit, by its plan.

    The arguments and errors are those of `plan`.
    """
    gigabytes = device_bytes / 1e9
    planned = plan(
        config,
        world_size=1,
        num_samples=num_samples,
        device_gigabytes=gigabytes,
        input_shape=input_shape,
        data_bytes=data_bytes,
    )
    advice = _advice(planned.fit, config, gigabytes=gigabytes)
    if data_bytes < _MUCH_DATA * device_bytes:
        return advice
    return f"{advice}, or set data.placement=host, which frees the {data_bytes / 1e9:.1f} GB of the data"


def _advice(fit: Fit | None, config: RunConfig, *, gigabytes: float) -> str:
    """Return the micro batches of a fit in words, beside those of the config."""
    if fit is None or fit.micro_batches is None or fit.peak_bytes is None:
        return (
            f"no number of micro batches fits its {gigabytes:.1f} GB; use more ranks or, in another --run-dir, a "
            "smaller global_batch_size"
        )
    needs = f"{fit.peak_bytes / 1e9:.1f} of its {gigabytes:.1f} GB"
    if fit.micro_batches <= config.memory.micro_batches:
        return (
            f"its plan says {needs}, so see in nvidia-smi what else uses the GPU, or raise memory.micro_batches in "
            "another --run-dir"
        )
    return f"set memory.micro_batches={fit.micro_batches} in another --run-dir, with which it needs {needs}"


def room_on(device_bytes: int) -> int:
    """Return the bytes of a device that a plan may use for tensors."""
    return int((1 - MARGIN) * device_bytes)


def _check(
    config: RunConfig, *, world_size: int, num_samples: int | None, num_classes: Mapping[str, int] | None
) -> None:
    # The sizes of the sources of a mixture are not known here.
    sizes = () if num_samples is None or config.data.mixture is not None else (num_samples,)
    check_batch(config, num_samples=sizes, num_ranks=world_size)
    if config.objective.needs_num_samples and num_samples is None:
        raise UserError(
            f"objective.kind={config.objective.kind} keeps a row for each sample, but their number is not known; build "
            f"{config.data.train_name} first"
        )
    if num_classes is not None:
        config.objective.check_labels(num_classes)
    elif config.objective.needs_labels:
        raise UserError(
            f"objective.kind={config.objective.kind} reads labels, but those of {config.data.train_name} are not "
            "known; build it first"
        )


def _check_input(config: RunConfig, height: int, width: int, *, world_size: int, is_known: bool) -> None:
    is_known = is_known or config.data.mel is not None
    where = config.data.train_name if is_known else f"{config.data.train_name}, which is not built yet"
    check_input_shape(config, height=height, width=width, where=where)
    check_batch_norm(config, height=height, width=width, num_ranks=world_size)


def _find_fit(planned: TrainingPlan, config: RunConfig, at: Callable[[int], TrainingPlan], *, room: int) -> Fit:
    """Return the fewest micro batches with a peak within `room`, after measuring that the next fewer do not fit."""
    choices = [
        number
        for number in range(1, planned.rank_batch_size + 1)
        if planned.rank_batch_size % number == 0 and _can_be_cut(config, planned.rank_batch_size, number)
    ]
    peaks = {planned.micro_batches: planned.peak_bytes}

    def fits(number: int) -> bool:
        if number not in peaks:
            peaks[number] = at(number).peak_bytes
        return peaks[number] <= room

    if planned.resident_bytes + planned.loss_bytes > room:  # micro batches reduce neither
        return Fit(None, None)
    # Starts from a guess, because measuring many parts takes long: activations are proportional to the size of a part.
    step_bytes = planned.step_bytes * planned.micro_batches
    guesses = (place for place, number in enumerate(choices) if planned.resident_bytes + step_bytes / number <= room)
    place = next(guesses, len(choices) - 1)
    while place > 0 and fits(choices[place - 1]):
        place -= 1
    while place < len(choices) and not fits(choices[place]):
        place += 1
    return Fit(choices[place], peaks[choices[place]]) if place < len(choices) else Fit(None, None)


def _can_be_cut(config: RunConfig, rank_batch_size: int, micro_batches: int) -> bool:
    """Return whether batch norm allows these parts: at least two samples, and whole, equal groups if it is split."""
    size, left = divmod(rank_batch_size, micro_batches)
    if config.encoder.batch_norm == "split":
        num_ranks = config.global_batch_size // rank_batch_size
        left += size * (2 if config.view_forwards == "one" else 1) % (config.encoder.batch_norm_splits // num_ranks)
    return left == 0 and (size > 1 or micro_batches == 1)
