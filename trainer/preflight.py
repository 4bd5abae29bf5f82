"""What is settled before step 0: the data fit the config, the run directory is this config's, and the log says so."""

from __future__ import annotations

import errno
import logging
import math
import secrets
from collections.abc import Callable, Collection, Mapping
from math import gcd
from typing import TextIO, TypeVar

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from data_pipeline.core.errors import UserError
from data_pipeline.core.schema import difference
from data_pipeline.loading.resident import NodeShare, shared_memory_identity
from data_pipeline.loading.stream import check_batch_size, num_steps_per_epoch
from data_pipeline.storage.manifest import Manifest
from trainer.build import Training
from trainer.checkpoint.restore import Restored, newest_state, restore
from trainer.checkpoint.run_state import check_same_data
from trainer.checkpoint.save import refuse_link
from trainer.config import RunConfig, read_config
from trainer.data import Manifests, read_manifests
from trainer.distributed.collectives import all_gather_object, barrier, broadcast_object, rank, world_size
from trainer.models.batch_norm import check_splits
from trainer.models.encoder import check_input_size, check_norm_groups
from trainer.modules import TrainedModules
from trainer.normalization import normalization_of
from trainer.optim.learning_rates import scaled_learning_rate
from trainer.probes.shared import check_shared, find_shared
from trainer.run_dir import LOCK_NAME, RunDir, hold, write_json
from trainer.views.policy import check_image_size

logger = logging.getLogger(__name__)

# How far a config's normalisation may be from the data's without a warning: ImageNet's on CIFAR-10 is not too far.
_FAR_MEAN, _FAR_LOG_STD = 0.25, math.log(1.25)

T = TypeVar("T")


def check_data(config: RunConfig) -> Manifests:
    """Return the manifests of both datasets.

    Raises `UserError` unless both are there, belong together, share few enough sources and are what the config asks
    for, and the ranks divide the global batch.
    """
    manifests = read_manifests(config.data)
    train, test = manifests.train, manifests.test
    train_dir, test_dir = config.data.train_dir, config.data.test_dir
    for name in ("medium", "input_shape", "sample_rate", "label_names"):
        in_train, in_test = getattr(train, name), getattr(test, name)
        if in_train != in_test:
            raise UserError(
                f"{train_dir} and {test_dir} differ in {name.replace('_', ' ')} ({in_train} and {in_test}); "
                "build both from the same source and dataset"
            )
    height, width = _check_medium(config, train)
    check_input_shape(config, height=height, width=width, where=train_dir)
    if config.views.kind == "viewmaker" and config.views.mask != "none" and train.overlay is None:
        raise UserError(
            f"views.mask={config.views.mask} protects what is drawn on a picture, and nothing is drawn on those of "
            f"{train_dir}; set views.mask=none, or build a dataset with an overlay"
        )
    asked = "baked" if config.data.overlay == "baked" else "online"
    if train.overlay is not None and train.overlay.drawn != asked:
        raise UserError(
            f"the overlay of {train_dir} is {train.overlay.drawn} but data.overlay is {config.data.overlay}; "
            f"build it with `--overlay {asked}`, or set data.overlay={train.overlay.drawn}"
        )
    if config.data.overlay == "online_per_view" and train.overlay is None:
        raise UserError(
            f"nothing is drawn on the samples of {train_dir}, so its views cannot have one of their own each; set "
            "data.overlay=online, or build a dataset with an overlay"
        )
    check_batch_size(train.num_samples, global_batch_size=config.global_batch_size, world_size=world_size())
    if config.encoder.batch_norm == "split":
        check_splits(
            config.encoder.batch_norm_splits,
            global_batch_size=config.global_batch_size // config.memory.micro_batches,
            num_ranks=world_size(),
            forwards=2 if config.view_forwards == "two" else 1,
        )
    local_batch_size = config.global_batch_size // world_size()
    if local_batch_size % config.memory.micro_batches:
        raise UserError(
            f"memory.micro_batches {config.memory.micro_batches} does not divide the {local_batch_size} samples that "
            f"each of {world_size()} ranks has of a batch; use {gcd(local_batch_size, config.memory.micro_batches)}"
        )
    check_batch_norm(config, height=height, width=width, num_ranks=world_size())
    shared = find_shared(config.data, train=train, test=test)
    if (said := check_shared(shared, config.data, allowed=config.probe.allow_shared)) is not None:
        logger.warning("%s", said)
    return manifests


def check_input_shape(config: RunConfig, *, height: int, width: int, where: str) -> None:
    """Raise `UserError` unless views and encoder take pictures or spectrograms of that size, which `where` holds."""
    try:
        check_image_size(config.views, height=height, width=width)
        check_input_size(config.encoder, height=height, width=width)
    except ValueError as error:
        option = f"encoder.options.img_size={height}, or " if config.encoder.kind == "timm" else ""
        mend = f"; set {option}another encoder.kind" if isinstance(error, UserError) else ""
        raise UserError(f"{where}: {error}{mend}") from None


def check_batch_norm(config: RunConfig, *, height: int, width: int, num_ranks: int) -> None:
    """Raise `UserError` if a batch norm would see one value a channel, for inputs of that size on that many ranks."""
    together = config.global_batch_size // config.memory.micro_batches * (2 if config.view_forwards == "one" else 1)
    trunk_rows, head_rows = {
        "synchronized": (together, together),
        "local": (together // num_ranks, together // num_ranks),
        "split": (together // config.encoder.batch_norm_splits, together),
    }[config.encoder.batch_norm]
    check_norm_groups(config.encoder, height=height, width=width, trunk_rows=trunk_rows, head_rows=head_rows)


def _check_medium(config: RunConfig, train: Manifest) -> tuple[int, int]:
    """The height and width of what the encoder sees; raises `UserError` where the samples are not what config says."""
    where, mel, rate = config.data.train_dir, config.data.mel, config.data.sample_rate
    if train.sample_rate != rate:
        if train.sample_rate is None:
            raise UserError(f"{where} holds pictures, but data.sample_rate={rate} says sounds; set it to null")
        if rate is None:
            raise UserError(
                f"{where} holds sounds, but this config is of pictures; take a recipe of sounds, with "
                f"data.sample_rate={train.sample_rate}"
            )
        raise UserError(
            f"{where} holds sounds of {train.sample_rate} points a second but data.sample_rate is {rate}; "
            f"set data.sample_rate={train.sample_rate}"
        )
    if mel is not None:
        if train.input_shape != (mel.num_points,):
            raise UserError(
                f"{where} holds sounds of {train.input_shape[0]} points but the spectrogram takes {mel.num_points}; "
                "build them again"
            )
        return mel.num_mels, mel.num_frames
    num_channels, height, width = train.input_shape
    if num_channels != config.encoder.in_channels:
        raise UserError(
            f"{where} holds pictures of {num_channels} channels but encoder.in_channels is "
            f"{config.encoder.in_channels}; set encoder.in_channels={num_channels}"
        )
    return height, width


def node_share() -> NodeShare | None:
    """How the ranks of one machine hold resident data together; None for a process by itself.

    Ranks are on one machine if they see the same /dev/shm, whatever the launcher calls a node.
    """
    if world_size() == 1:
        return None
    machines = all_gather_object(shared_memory_identity())
    token = broadcast_object(f"feature-dropout-{secrets.token_hex(8)}")
    return NodeShare(local_rank=machines[: rank()].count(machines[rank()]), barrier=barrier, token=token)


def claim(run_dir: RunDir, config: RunConfig, *, accepted_data: Collection[str] = ()) -> TextIO:
    """Make `run_dir` this config's, once its data are known to be there; hold it until the returned file is closed.

    `accepted_data` are names of new datasets (`DataIdentity.name`) that the run may go on with. Raises `UserError` for
    data that do not fit or were replaced, for a directory with another config, other files or another trainer, and for
    one that cannot be made or written.
    """
    manifests = check_data(config)
    try:
        held = _claim(run_dir, config)
    except OSError as error:
        if error.errno == errno.ENOSPC:  # which has a sentence of its own
            raise
        raise UserError(
            f"{error.filename or run_dir.path} cannot be written ({error.strerror}); pass another --run-dir"
        ) from error
    try:
        check_resumed(run_dir, config, manifests, newest_state(run_dir), accepted_data=accepted_data)
    except UserError:
        held.close()
        raise
    return held


def check_resumed(
    run_dir: RunDir, config: RunConfig, manifests: Manifests, found: Restored, *, accepted_data: Collection[str]
) -> bool:
    """Return whether a run goes on from the checkpoint `found` with new data, which the user has accepted.

    Its state is a number of steps, so with another number of samples the epoch, the order and the learning rate are
    those which this step has with the new data. Raises `UserError` for new data that were not accepted, and for those
    with which the run would have ended before this step.
    """
    is_new = check_same_data(
        run_dir,
        step=found.step,
        trained_on=found.trained_on(run_dir),
        now=manifests.identity,
        train_dir=config.data.train_dir,
        test_dir=config.data.test_dir,
        accepted=accepted_data,
    )
    num_samples = manifests.train.num_samples
    num_steps = config.num_epochs * num_steps_per_epoch(num_samples, config.global_batch_size)
    if found.step > num_steps:
        raise UserError(
            f"{run_dir.path} is at step {found.step}, but with the {num_samples} samples of {config.data.train_dir} "
            f"its {config.num_epochs} epochs end at step {num_steps}; put back the dataset that it was trained with, "
            "or pass another --run-dir"
        )
    return is_new


def resume(
    run_dir: RunDir,
    config: RunConfig,
    manifests: Manifests,
    training: Training,
    *,
    accepted_data: Collection[str],
) -> Restored:
    """Load the newest whole checkpoint, as `restore` does, and check that it goes with the data. Every rank calls this.

    `claim` has checked the newest one; this may be an older one, if that is damaged. Raises as `restore` and
    `check_resumed` do.
    """
    restored = restore(run_dir, training.engines, training.objective, extra=training.step.loss_scale.state())
    if on_first_rank(lambda: check_resumed(run_dir, config, manifests, restored, accepted_data=accepted_data)):
        logger.warning(
            "the data were replaced after step %d and are accepted: going on with those of now", restored.step
        )
    return restored


def _claim(run_dir: RunDir, config: RunConfig) -> TextIO:
    if run_dir.config.is_file():
        keys = [key for key in difference(read_config(run_dir.config), config) if not key.startswith("watchdog.")]
        if keys:
            raise UserError(
                f"{run_dir.path} holds a run with another config (it differs in {', '.join(keys)}); "
                "pass another --run-dir, or remove that one"
            )
    elif run_dir.path.exists() and any(path.name != LOCK_NAME for path in run_dir.path.iterdir()):
        raise UserError(f"{run_dir.path} is not empty and is not a run directory; pass another --run-dir")
    refuse_link(run_dir)
    if run_dir.checkpoints.exists() and not run_dir.checkpoints.is_dir():
        raise UserError(f"{run_dir.checkpoints} is not a directory, so no checkpoint can be written there; remove it")
    held = hold(run_dir)
    # How long a rank may be silent changes no result, and the watchdog's own message asks for another value.
    if not run_dir.config.is_file() or read_config(run_dir.config) != config:
        write_json(run_dir.config, config.model_dump(mode="json"))
    return held


def on_first_rank(action: Callable[[], T]) -> T | None:
    """Run `action` on the first rank, and return its result there; elsewhere None.

    An error in it ends every rank, and only the first one speaks.
    """
    error: Exception | None = None
    result: T | None = None
    if rank() == 0:
        try:
            result = action()
        except Exception as raised:
            error = raised
    if broadcast_object(error is not None):
        raise error if error is not None else SystemExit(2)
    return result


def log_start(
    config: RunConfig,
    modules: TrainedModules,
    manifest: Manifest,
    *,
    device: torch.device,
    start_step: int,
    num_steps: int,
) -> None:
    if rank() > 0:
        return
    sizes = ", ".join(
        f"{name} {sum(p.numel() for p in module.parameters()):,} parameters"
        for name, module in modules.trained_modules.items()
    )
    steps_per_epoch = num_steps // config.num_epochs
    logger.info("%s: %s; %s on %s", config.name, sizes, config.precision, device)
    micro_batches = config.memory.micro_batches
    logger.info(
        "global batch %d = %d ranks x %d micro batches x %d, batch norm %s; %d epochs of %d steps from %d samples",
        config.global_batch_size,
        world_size(),
        micro_batches,
        config.global_batch_size // world_size() // micro_batches,
        config.encoder.batch_norm,
        config.num_epochs,
        steps_per_epoch,
        manifest.num_samples,
    )
    logger.info(
        "engine %s; learning rates %s",
        config.engine.kind,
        ", ".join(
            f"{name} {scaled_learning_rate(optimizer, global_batch_size=config.global_batch_size):.4g}"
            for name, optimizer in config.player_optimizers.items()
        ),
    )
    if (note := config.objective.note(global_batch_size=config.global_batch_size)) is not None:
        logger.info("%s", note)
    if config.precision == "bfloat16" and device.type == "cpu" and _lacks_bfloat16(torch.cpu.get_capabilities()):
        logger.warning(
            "this processor has no instructions for bfloat16, so a step may take longer than with precision=float32"
        )
    _warn_of_foreign_normalization(config, manifest)
    if micro_batches > 1 and any(isinstance(module, _BatchNorm) for module in modules.encoder.modules()):
        logger.info(
            "batch norm sees micro batches of %d: its statistics, and so the run, depend on memory.micro_batches",
            config.global_batch_size // micro_batches,
        )
    if start_step == num_steps:
        logger.info("already at its last step %d; nothing to do", num_steps)
    elif start_step:
        logger.info("going on from step %d of %d", start_step, num_steps)


def _warn_of_foreign_normalization(config: RunConfig, train: Manifest) -> None:
    """Log a warning if the config normalises pictures by numbers that are far from those of the train set."""
    named, own = config.encoder.normalization, normalization_of(train)
    if named is None or own is None:
        return
    is_far = any(
        abs(mean - own_mean) > _FAR_MEAN * own_std or abs(math.log(std / own_std)) > _FAR_LOG_STD
        for mean, std, own_mean, own_std in zip(named.mean, named.std, own.mean, own.std, strict=True)
    )
    if is_far:
        logger.warning(
            "encoder.mean=%s and encoder.std=%s are not those of %s (%s and %s); set both to null to take those",
            *(", ".join(f"{number:.3f}" for number in numbers) for numbers in (named.mean, named.std)),
            config.data.train_dir,
            *(", ".join(f"{number:.3f}" for number in numbers) for numbers in (own.mean, own.std)),
        )


def _lacks_bfloat16(capabilities: Mapping[str, bool | int | str]) -> bool:
    """Whether a processor emulates the products of bfloat16; of others than x86 it is not known, and so not said."""
    instructions = ("avx512_bf16", "amx_bf16")
    return capabilities.get("architecture") == "x86_64" and not any(capabilities.get(name) for name in instructions)
