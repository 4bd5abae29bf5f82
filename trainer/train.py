"""The training loop.

    stream -> batch -> views -> encoder -> objective -> engine -> checkpoint, metrics

Reads a RunConfig; writes checkpoints and metrics into a run directory. A run that was killed goes on from its newest
checkpoint with the same batches and the same random draws.

Guarantees: a run directory has one config, and results do not depend on the number of ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial

import torch

from data_pipeline.core.batch import Batch
from data_pipeline.core.imports import without_garbage_collection
from data_pipeline.core.progress import Progress
from data_pipeline.loading.stream import Stream
from trainer.build import Training, build_training
from trainer.checkpoint.restore import newest_state, restore
from trainer.checkpoint.save import CheckpointWriter
from trainer.claim import claim
from trainer.config import RunConfig
from trainer.data import Manifests, open_stream, read_agreed_manifests
from trainer.distributed.collectives import from_first_rank, on_first_rank, rank
from trainer.fault_tolerance.preemption import StoppedError, StopRequests
from trainer.fault_tolerance.watchdog import Watchdog
from trainer.first_step import check_first_step
from trainer.liveness import follow, stage
from trainer.mixture import num_classes
from trainer.models.batch_norm import share_running_statistics
from trainer.open_settings import decide
from trainer.original_crops import original_crops
from trainer.pretrained import pinned
from trainer.provenance import add_to_provenance, write_provenance
from trainer.run_counters import RunCounters
from trainer.run_dir import Hold, RunDir
from trainer.step import StepOutput
from trainer.training_log import TrainingLog, log_start
from trainer.utilization import Utilization


def train(
    config: RunConfig,
    run_dir: RunDir,
    *,
    device: torch.device,
    command: str,
    accepted_data: Collection[str] = (),
    utilization: Utilization | None = None,
) -> None:
    """Train to the end of the config, or go on from the newest checkpoint in `run_dir`.

    Every rank must call this after the process group is made. `accepted_data` has the meaning of `claim`. The first
    rank logs the share of the devices' rate if it has a `utilization`.

    Raises:
        UserError: if training is not possible with this input.
        StoppedError: if a signal to some rank asked all ranks to save and stop; see
            `trainer.fault_tolerance.preemption`.
    """
    torch.backends.cudnn.benchmark = config.cudnn_benchmark
    manifests = read_agreed_manifests(config.data)
    if config.encoder.weights is not None:
        config = from_first_rank(partial(pinned, config, run_dir), RunConfig)
    take = partial(claim, run_dir, config, manifests, accepted_data=accepted_data)
    with (
        on_first_rank(take) or contextlib.nullcontext() as held,
        StopRequests() as stop_requests,
        Watchdog(run_dir, config.watchdog, rank=rank(), fetch_seconds=config.data.fetch_seconds) as watchdog,
    ):
        loop = open_loop(
            config,
            run_dir,
            manifests,
            watchdog,
            stop_requests,
            held,
            device=device,
            command=command,
            utilization=utilization,
        )
        stopped_after = None if loop is None else loop.run(stop_requests)
        del loop  # an exception would keep DDP alive until its process group is destroyed, which would then hang
    if stopped_after is not None:
        raise StoppedError(stopped_after, stop_requests.reason)


@dataclass(frozen=True)
class TrainingLoop:
    """A training on this rank, with all that it needs: run it once.

    Attributes:
        training: modules, objective, engines and step.
        stream: where batches come from.
        steps: the steps that are left.
        counters: skipped steps, bad samples and time, over all starts.
        log, checkpoints: what is written into the run directory.
    """

    config: RunConfig
    run_dir: RunDir
    training: Training
    stream: Stream
    steps: range
    counters: RunCounters
    log: TrainingLog
    checkpoints: CheckpointWriter
    watchdog: Watchdog

    def run(self, stop_requests: StopRequests) -> int | None:
        """Train to the last step, or until a stop is asked for: return the step from which the run then goes on."""
        start, num_steps = self.steps.start, self.steps.stop
        show = Progress(f"train {self.config.name}", total=num_steps, start=start, enabled=rank() == 0)
        with self.log, self.checkpoints, show as progress:
            self.log.before()
            self._announce(start)
            for batch in self.log.timed(self.stream.batches(self.steps)):
                output, rates = self._take_step(batch)
                note, num_done = self.log.add(batch, output, rates), batch.step + 1
                stops = stop_requests.agreed() and num_done < num_steps
                if stops or num_done == num_steps or num_done % self.config.checkpoint_every_steps == 0:
                    self._save(num_done)
                progress.advance(note=note)
                if stops:
                    break
                self._announce(num_done)
            self._finish(num_done)
        return None if num_done == num_steps else self.counters.saved_step

    def _announce(self, step: int) -> None:
        """Tell the watchdog that the batch of `step` is read now, if there is one."""
        if step < self.steps.stop:
            self.watchdog.beat(step, doing="reading", shards=self.stream.shards_of(step))

    def _take_step(self, batch: Batch) -> tuple[StepOutput, dict[str, float]]:
        """Train on a batch and count it. Return the output and the learning rates."""
        rates = self.training.learning_rates(batch.step, num_steps=self.steps.stop)
        self.watchdog.beat(batch.step, doing="training")
        may_compile = self.config.may_compile_again(batch.step, steps_per_epoch=self.stream.num_steps_per_epoch)
        with self.watchdog.patience("compiling") if may_compile else contextlib.nullcontext():
            output = self.training.step(batch, learning_rates=rates)
        with stage("waiting for GPU"):
            self.counters.add(batch, output)
        return output, rates

    def _save(self, num_done: int) -> None:
        """Save the state after `num_done` steps, unless nothing was learned since the last checkpoint."""
        run = self.counters.state_to_save(num_done, num_steps=self.steps.stop)
        if run is None:
            return
        with stage("checkpoint"):
            for module in self.training.modules.trained_modules.values():
                share_running_statistics(module)
            self.checkpoints.save(
                num_done,
                engines=self.training.engines,
                objective_state=self.training.objective.saved_state(),
                run=run,
            )

    def _finish(self, num_done: int) -> None:
        """Wait for the newest checkpoint, and mark a finished run."""
        with stage("checkpoint"):
            self.checkpoints.wait()
        if num_done == self.steps.stop and rank() == 0:
            # Before the log is closed, which may take long: a kill meanwhile would leave a finished run unmarked.
            add_to_provenance(self.run_dir, finished_step=num_done, total_wall_seconds=self.counters.wall_seconds)


@without_garbage_collection()  # the first optimizer of a process imports much of torch
def open_loop(
    config: RunConfig,
    run_dir: RunDir,
    manifests: Manifests,
    watchdog: Watchdog,
    stop_requests: StopRequests,
    held: Hold | None,
    *,
    device: torch.device,
    command: str,
    utilization: Utilization | None,
) -> TrainingLoop | None:
    """Build a training, restore it from the newest checkpoint, and return its loop; None if no step is left."""
    train_set = manifests.train
    num_steps = config.num_epochs * config.data.num_steps_per_epoch(train_set.num_samples, config.global_batch_size)
    decided, crops = decide(config, train_set), original_crops(config, train_set)
    if crops is not None:
        decided = decided.model_copy(update={"views": decided.views.without_crop()})
    is_new = config.encoder.weights is None or from_first_rank(lambda: newest_state(run_dir).step == 0, bool)
    training = build_training(
        decided, num_samples=train_set.num_samples, num_classes=num_classes(train_set), device=device, is_new=is_new
    )
    follow_networks(training)
    check_first_step(training.modules, training.objective, device=device)
    restored = restore(
        run_dir,
        training.engines,
        training.objective,
        remembers=manifests.identity if config.objective.needs_num_samples else None,
    )
    steps = range(restored.step, num_steps)
    log_start(config, training.modules, manifests, restored, device=device, num_steps=num_steps)
    if not steps:
        if rank() == 0 and "finished_step" not in run_dir.read_provenance():  # killed after the last checkpoint
            add_to_provenance(run_dir, finished_step=num_steps)
        return None
    stream = open_stream(
        config.data,
        global_batch_size=config.global_batch_size,
        seed=config.seed,
        start_step=steps.start,
        end_step=num_steps,
        device=device,
        manifest=train_set,
        crops=crops,
    )
    counters = RunCounters(run_dir, training, manifests, restored, device=device)
    if rank() == 0:
        write_provenance(run_dir, config, manifests, command=command, restored=restored)
    checkpoints = CheckpointWriter(
        run_dir,
        keep=config.keep_checkpoints,
        limit_seconds=config.watchdog.startup_seconds,
        is_stopping=stop_requests.is_noted,
        held=held,
    )
    log = TrainingLog(
        config,
        run_dir,
        training,
        counters,
        watchdog,
        steps=steps,
        device=device,
        source_metrics=stream.source_metrics,
        utilization=utilization,
    )
    return TrainingLoop(config, run_dir, training, stream, steps, counters, log, checkpoints, watchdog)


def follow_networks(training: Training) -> None:
    """Let all networks give signs of life, except compiled ones, which run as a single operation."""
    follow(training.objective)
    if not training.modules.config.compiles_networks:
        for network in training.modules.trained_modules.values():
            follow(network)
