"""The training loop.

    stream -> batch -> views -> encoder -> objective -> engine -> checkpoint, metrics

Comes in: a RunConfig and a run directory. Goes out: checkpoints and metrics in that directory. A run that was killed
goes on from its newest checkpoint with the same batches and the same draws. What may never happen: two configs in one
run directory, or a result that depends on the number of ranks.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Collection
from functools import partial

import torch

from data_pipeline.core.progress import Progress
from data_pipeline.loading.stream import Stream, num_steps_per_epoch
from trainer.build import build_training
from trainer.checkpoint.save import CheckpointWriter
from trainer.config import RunConfig
from trainer.data import read_agreed_manifests
from trainer.distributed.collectives import all_reduce_mean_scalars, rank, world_size
from trainer.fault_tolerance.preemption import StoppedError, StopRequests
from trainer.fault_tolerance.run_counters import RunCounters
from trainer.fault_tolerance.run_watch import RunWatch, follow_networks
from trainer.fault_tolerance.watchdog import Watchdog, start_watchdog
from trainer.models.batch_norm import settle_running_statistics
from trainer.normalization import normalization_of
from trainer.observability.alarms import Alarms
from trainer.observability.step_pictures import step_pictures
from trainer.observability.tracking import Tracker, memory_in_use
from trainer.optim.learning_rates import learning_rates_at
from trainer.preflight import claim, log_start, node_share, on_first_rank, resume
from trainer.probes.online import online_probe
from trainer.profiling import Clock, slowest
from trainer.provenance import add_to_provenance, write_provenance
from trainer.run_dir import RunDir

logger = logging.getLogger(__name__)

# What a slow disk, a large probe and a slow server may take.
CHECKPOINT_SECONDS, PROBE_SECONDS, CLOSING_SECONDS = 600.0, 600.0, 60.0


def train(
    config: RunConfig, run_dir: RunDir, *, device: torch.device, command: str, accepted_data: Collection[str] = ()
) -> None:
    """Train to the end of the config, or go on from the newest checkpoint in `run_dir`; `accepted_data` as in `claim`.

    Every rank calls this after the process group is there. Raises `UserError` for input that cannot be trained on, and
    `StoppedError` where a signal to some rank asked all of them to save and stop: `trainer.fault_tolerance.preemption`.
    """
    with (
        on_first_rank(lambda: claim(run_dir, config, accepted_data=accepted_data)) or contextlib.nullcontext(),
        StopRequests() as stop_requests,
        start_watchdog(run_dir, config.watchdog) as watchdog,
    ):
        stopped_after = _train(
            config, run_dir, stop_requests, watchdog, device=device, command=command, accepted_data=accepted_data
        )
    if stopped_after is not None:
        raise StoppedError(stopped_after, stop_requests.reason)


def _train(
    config: RunConfig,
    run_dir: RunDir,
    stop_requests: StopRequests,
    watchdog: Watchdog,
    *,
    device: torch.device,
    command: str,
    accepted_data: Collection[str],
) -> int | None:
    """Return the step from which the run goes on if training was asked to stop; None if it came to its end."""
    manifests = read_agreed_manifests(config.data)
    steps_per_epoch = num_steps_per_epoch(manifests.train.num_samples, config.global_batch_size)
    num_steps = config.num_epochs * steps_per_epoch

    training = build_training(
        config,
        num_samples=manifests.train.num_samples,
        device=device,
        normalization=normalization_of(manifests.train),
    )
    modules, objective, engines = training.modules, training.objective, training.engines
    follow_networks(config, modules, objective)
    loss_scale = training.step.loss_scale.state
    restored = resume(run_dir, config, manifests, engines, objective, extra=loss_scale(), accepted_data=accepted_data)
    start_step = restored.step
    log_start(config, modules, manifests.train, device=device, start_step=start_step, num_steps=num_steps)
    if start_step == num_steps:
        return None
    stream = Stream(
        config.data.train_dir,
        read=config.data,
        global_batch_size=config.global_batch_size,
        seed=config.seed,
        rank=rank(),
        world_size=world_size(),
        start_step=start_step,
        end_step=num_steps,
        device=device,
        overlay_draw=config.data.overlay_draw,
        share=node_share(),
    )
    counters = RunCounters(
        run_dir, config, manifests, restored, device=device, engines=engines, objective=objective, command=command
    )
    first = rank() == 0
    if first:
        write_provenance(run_dir, config, manifests, command=command, world_size=world_size(), start_step=start_step)
    tracker = Tracker(run_dir, config=config, start_step=start_step) if first else None
    pictures = step_pictures(config, modules.view_policy, device=device) if first else None
    optimizers = {name: config.engine_optimizers[name] for name in engines}
    rates_at = partial(learning_rates_at, optimizers, num_steps=num_steps, global_batch_size=config.global_batch_size)
    probe, probe_every = online_probe(config, modules.encoder, device=device), config.probe.online_every_steps or 1
    alarms = Alarms(config.alarms)

    def is_logged(num_done: int) -> bool:
        return num_done % config.log_every_steps == 0 or num_done in {1, num_steps}

    watch = RunWatch(config, watchdog, stream=stream, device=device)
    clock = Clock(device=device, start_step=start_step, is_read=is_logged)
    with (
        CheckpointWriter(run_dir, keep=config.keep_checkpoints) as checkpoints,
        Progress(f"train {config.name}", total=num_steps, start=start_step, enabled=first) as progress,
    ):
        watch.reading(start_step)
        for batch in clock.timed(stream):
            progress.tell_meanwhile(watchdog.step_at_hand)  # not before: the first batch may have forked data workers
            rates = rates_at(batch.step)
            with watch.training(batch.step):
                output = training.step(batch, learning_rates=rates)
            with watch.waiting_for_device():
                counters.add(batch, output, rates)
            completed, note = batch.step + 1, ""
            metrics: dict[str, float] = {}
            if is_logged(completed):
                with watch.waiting_for_device():
                    values = all_reduce_mean_scalars(output.read())
                metrics = {name: value for name, value in values.items() if math.isfinite(value)}
                for alarm in alarms.check(metrics, completed) if first else ():
                    logger.warning("%s", alarm)
                metrics |= counters.metrics()
                speed = clock.read(num_samples=config.global_batch_size)
                metrics |= all_reduce_mean_scalars(speed | memory_in_use(device))
                metrics |= {f"optim/{name}_learning_rate": rate for name, rate in rates.items()}
                note = f"loss {metrics.get('train/loss', math.nan):.4f}, slowest {slowest(metrics)}"
            if probe is not None and completed % probe_every == 0:
                with watchdog.patience(PROBE_SECONDS, "probing"):
                    metrics |= probe()
            if tracker is not None and metrics:
                tracker.log(completed, {"epoch": batch.epoch} | metrics)
            if tracker is not None and pictures is not None and (shown := pictures(completed)) is not None:
                tracker.log_pictures(completed, shown)
            stops = stop_requests.agreed() and completed < num_steps
            is_due = completed % config.checkpoint_every_steps == 0 or completed == num_steps or stops
            if is_due and (state := counters.state_to_save(completed, num_steps=num_steps)) is not None:
                settle_running_statistics(modules.encoder)
                with watchdog.patience(CHECKPOINT_SECONDS, "writing a checkpoint"):
                    checkpoints.save(
                        completed,
                        engines=engines,
                        objective_state=objective.saved_state(),
                        extra=loss_scale(),
                        run=state,
                    )
            progress.advance(note=note)
            if stops:
                break
            if completed < num_steps:
                watch.reading(completed)
        with watchdog.patience(CHECKPOINT_SECONDS, "writing a checkpoint"):
            checkpoints.close()
    if tracker is not None:
        with watchdog.patience(CLOSING_SECONDS, "closing the log"):
            tracker.close()
    if completed < num_steps:
        # Not by an exception, which would keep DDP alive until after its process group: taking that down would hang.
        return counters.saved_step
    if first:
        add_to_provenance(run_dir, finished_step=num_steps, wall_seconds=round(clock.total_seconds, 1))
    return None
