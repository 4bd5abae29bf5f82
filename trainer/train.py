"""The training loop.

    stream -> batch -> views -> encoder -> objective -> engine -> checkpoint, metrics

Reads a RunConfig; writes checkpoints and metrics into a run directory. A run that was killed goes on from its newest
checkpoint with the same batches and the same random draws.

Guarantees: a run directory has one config, and results do not depend on the number of ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from functools import partial

import torch

from data_pipeline.core.progress import Progress
from data_pipeline.loading.reading_order import ReadingOrder
from trainer.build import Training, build_counters, build_training
from trainer.checkpoint.save import CheckpointWriter
from trainer.config import RunConfig
from trainer.data import Manifests, open_stream, read_agreed_manifests
from trainer.distributed.collectives import on_first_rank, rank, world_size
from trainer.distributed.environment import local_rank_restored
from trainer.fault_tolerance import liveness
from trainer.fault_tolerance.preemption import StoppedError, StopRequests
from trainer.fault_tolerance.run_counters import RunCounters
from trainer.fault_tolerance.watchdog import Watchdog
from trainer.mixture import num_classes
from trainer.models.batch_norm import average_running_statistics
from trainer.neighbours import in_memory, neighbour_order
from trainer.open_settings import decide
from trainer.original_crops import leave_out_crops, original_crops
from trainer.preflight import begin, check_channels_last, resume
from trainer.provenance import add_to_provenance, write_provenance
from trainer.run_dir import RunDir
from trainer.training_log import TrainingLog, log_start


def train(
    config: RunConfig, run_dir: RunDir, *, device: torch.device, command: str, accepted_data: Collection[str] = ()
) -> None:
    """Train to the end of the config, or go on from the newest checkpoint in `run_dir`.

    Every rank must call this after the process group is made. `accepted_data` has the meaning of `begin`.

    Raises:
        UserError: if training is not possible with this input.
        StoppedError: if a signal to some rank asked all ranks to save and stop; see
            `trainer.fault_tolerance.preemption`.
    """
    manifests = read_agreed_manifests(config.data)
    take = partial(begin, run_dir, config, manifests, accepted_data=accepted_data)
    with (
        local_rank_restored(),
        on_first_rank(take) or contextlib.nullcontext(),
        StopRequests() as stop_requests,
        Watchdog(run_dir, config.watchdog, rank=rank(), fetch_seconds=config.data.fetch_seconds) as watchdog,
    ):
        stopped_after = _train(
            config,
            run_dir,
            manifests,
            stop_requests,
            watchdog,
            device=device,
            command=command,
            accepted_data=accepted_data,
        )
    if stopped_after is not None:
        raise StoppedError(stopped_after, stop_requests.reason)


def _train(
    config: RunConfig,
    run_dir: RunDir,
    manifests: Manifests,
    stop_requests: StopRequests,
    watchdog: Watchdog,
    *,
    device: torch.device,
    command: str,
    accepted_data: Collection[str],
) -> int | None:
    """Return the step from which the run goes on if training was asked to stop; None if it came to its end."""
    num_samples = manifests.train.num_samples
    num_steps = config.num_epochs * config.data.num_steps_per_epoch(num_samples, config.global_batch_size)
    decided = leave_out_crops(decide(config, manifests.train), manifests.train)
    training = build_training(decided, num_samples=num_samples, num_classes=num_classes(manifests.train), device=device)
    check_channels_last(decided, training.modules.encoder, manifests.probed, device=device)
    liveness.follow(training.objective)
    if not decided.compiles_networks:  # a compiled network runs as a single operation
        for network in training.modules.trained_modules.values():
            liveness.follow(network)
    restored = resume(run_dir, config, manifests, training, accepted_data=accepted_data)
    start = restored.step
    log_start(config, training.modules, manifests.train, device=device, start_step=start, num_steps=num_steps)
    if start == num_steps:
        if rank() == 0 and "finished_step" not in run_dir.read_provenance():  # killed after the last checkpoint
            add_to_provenance(run_dir, finished_step=num_steps)
        return None
    data = config.data if config.neighbours is None else in_memory(config.data, device)
    stream = open_stream(
        data,
        global_batch_size=config.global_batch_size,
        seed=config.seed,
        start_step=start,
        end_step=num_steps,
        device=device,
        manifest=manifests.train,
        crops=original_crops(config, manifests.train),
    )
    order: ReadingOrder = stream.order
    if config.neighbours is not None:
        order = neighbour_order(
            config.neighbours,
            run_dir.path,
            stream,
            training.modules.encoder,
            mel=config.data.mel,
            is_new=restored.has_other_train_set(manifests.identity),
            patience=partial(watchdog.patience, "finding neighbours"),
        )
    may_compile = partial(config.may_compile_again, steps_per_epoch=stream.num_steps_per_epoch)
    counters = build_counters(run_dir, training, manifests, restored, device=device, command=command)
    if rank() == 0:
        write_provenance(run_dir, config, manifests, command=command, world_size=world_size(), restored=restored)
        if ratios := stream.shard_pair_ratios():
            add_to_provenance(run_dir, shard_pair_ratios=ratios)
    log = TrainingLog(
        config,
        run_dir,
        training,
        counters,
        watchdog,
        start_step=start,
        num_steps=num_steps,
        device=device,
        source_metrics=stream.source_metrics,
    )
    with (
        log,
        CheckpointWriter(run_dir, keep=config.keep_checkpoints) as checkpoints,
        Progress(f"train {config.name}", total=num_steps, start=start, enabled=rank() == 0) as progress,
    ):
        log.before(start)
        watchdog.beat(start, doing="reading", shards=stream.shards_of(start))
        for batch in log.timed(stream.batches(range(start, num_steps), order=order)):
            # Not before the first batch, which may fork data workers: this starts a thread.
            progress.show_while_waiting(watchdog.describe_step)
            rates, num_done = training.learning_rates(batch.step, num_steps=num_steps), batch.step + 1
            watchdog.beat(batch.step, doing="training")
            with watchdog.patience("compiling") if may_compile(batch.step) else contextlib.nullcontext():
                output = training.step(batch, learning_rates=rates)
            with liveness.inside("waiting for GPU"):
                counters.add(batch, output, rates)
            note = log.add(batch, output, rates)
            stops = stop_requests.agreed() and num_done < num_steps
            if num_done % config.checkpoint_every_steps == 0 or num_done == num_steps or stops:
                _save(training, counters, checkpoints, watchdog, num_done, num_steps=num_steps)
            progress.advance(note=note)
            if stops:
                break
            if num_done < num_steps:
                watchdog.beat(num_done, doing="reading", shards=stream.shards_of(num_done))
        with watchdog.patience("writing a checkpoint"):
            checkpoints.close()
        if num_done == num_steps and rank() == 0:
            # Before the log is closed, which may take long: a kill meanwhile would leave a finished run unmarked.
            add_to_provenance(run_dir, finished_step=num_steps, total_wall_seconds=counters.wall_seconds)
    # Not by an exception: it would keep DDP alive until its process group is destroyed, which would then hang.
    return None if num_done == num_steps else counters.saved_step


def _save(
    training: Training,
    counters: RunCounters,
    checkpoints: CheckpointWriter,
    watchdog: Watchdog,
    num_done: int,
    *,
    num_steps: int,
) -> None:
    """Save the state after `num_done` steps, unless nothing was learned since the last checkpoint."""
    run = counters.state_to_save(num_done, num_steps=num_steps)
    if run is None:
        return
    average_running_statistics(training.modules.encoder)
    with watchdog.patience("writing a checkpoint"):
        checkpoints.save(
            num_done,
            engines=training.engines,
            objective_state=training.objective.saved_state(),
            extra=training.step.loss_scale.state(),
            run=run,
        )
