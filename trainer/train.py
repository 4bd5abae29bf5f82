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

import torch
from torch import Tensor

from data_pipeline.progress import Progress
from data_pipeline.stream import Stream, num_steps_per_epoch
from trainer.alarms import Alarms
from trainer.bad_samples import BadSamples
from trainer.checkpoint import restore, save_checkpoint
from trainer.config import RunConfig
from trainer.distributed.collectives import all_reduce_mean_scalars, barrier, rank, world_size
from trainer.distributed.ddp_engine import DDPEngine
from trainer.optim import learning_rate_at
from trainer.players import build_players, build_run_objective
from trainer.preflight import claim, log_start, node_share, on_first_rank, read_manifests
from trainer.provenance import add_to_provenance, write_provenance
from trainer.rundir import RunDir
from trainer.step import TrainingStep
from trainer.timing import Clock
from trainer.tracking import Tracker

logger = logging.getLogger(__name__)


def train(config: RunConfig, run_dir: RunDir, *, device: torch.device, command: str) -> None:
    """Train to the end of the config, or go on from the newest checkpoint in `run_dir`.

    Every rank calls this after the process group is there. Raises `UserError` for input that cannot be trained on.
    """
    with on_first_rank(lambda: claim(run_dir, config)) or contextlib.nullcontext():
        _train(config, run_dir, device=device, command=command)


def _train(config: RunConfig, run_dir: RunDir, *, device: torch.device, command: str) -> None:
    manifests = read_manifests(config.data)
    steps_per_epoch = num_steps_per_epoch(manifests.train.num_samples, config.global_batch_size)
    num_steps = config.num_epochs * steps_per_epoch

    players = build_players(config)
    memory_format = torch.channels_last if config.channels_last else torch.contiguous_format
    for module in (players.encoder, players.view_policy):
        module.to(device, config.parameter_dtype).to(memory_format=memory_format).train()  # type: ignore[call-overload]
    engines = {
        name: DDPEngine(module, optimizer=config.player_optimizers[name])
        for name, module in players.trained_modules.items()
    }
    objective = build_run_objective(config, players.encoder, num_samples=manifests.train.num_samples, device=device)
    if any(parameter.requires_grad for parameter in objective.parameters()):
        engines["objective"] = DDPEngine(objective, optimizer=config.optimizer)
    training_step = TrainingStep(config, engines=engines, view_policy=players.view_policy, objective=objective)
    start_step = restore(run_dir, engines, objective)
    log_start(config, players, manifests.train, device=device, start_step=start_step, num_steps=num_steps)
    if start_step == num_steps:
        return
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
    bad_samples = BadSamples(
        run_dir,
        num_samples=manifests.train.num_samples,
        max_share=config.data.max_bad_share,
        where=config.data.train_dir,
    )
    first = rank() == 0
    if first:
        write_provenance(run_dir, config, manifests, command=command, world_size=world_size(), start_step=start_step)
    tracker = Tracker(run_dir, config=config, start_step=start_step) if first else None
    alarms = Alarms(config.alarms)
    clock = Clock()
    with Progress(f"train {config.name}", total=num_steps, start=start_step, enabled=first) as progress:
        for batch in clock.timed(stream):
            rates = {
                name: learning_rate_at(optimizer, step=batch.step, num_steps=num_steps)
                for name, optimizer in config.player_optimizers.items()
            }
            output = training_step(batch, learning_rates=rates)
            bad_samples.add(batch.bad)
            completed, note = batch.step + 1, ""
            if completed % config.log_every_steps == 0 or completed in {1, num_steps}:
                metrics = _mean_over_ranks(output.read(), step=completed)
                for alarm in alarms.check(metrics, completed) if first else ():
                    logger.warning("%s", alarm)
                metrics["data/bad_samples"] = bad_samples.settle()
                metrics |= clock.read(num_samples=config.global_batch_size)
                metrics |= {f"optim/{name}_learning_rate": rate for name, rate in rates.items()}
                note = f"loss {metrics['train/loss']:.4f}"
                if tracker is not None:
                    tracker.log(completed, {"epoch": batch.epoch} | metrics)
            if completed % config.checkpoint_every_steps == 0 or completed == num_steps:
                state = objective.saved_state()
                if first:
                    save_checkpoint(
                        run_dir, step=completed, engines=engines, objective_state=state, keep=config.keep_checkpoints
                    )
                barrier()
            progress.advance(note=note)
    if tracker is not None:
        tracker.close()
        add_to_provenance(run_dir, finished_step=num_steps, wall_seconds=round(clock.total_seconds, 1))


def _mean_over_ranks(metrics: dict[str, Tensor], *, step: int) -> dict[str, float]:
    means = all_reduce_mean_scalars(metrics)
    if not math.isfinite(means["train/loss"]):
        raise FloatingPointError(
            f"the loss is {means['train/loss']} at step {step}; lower the learning rate or use precision float32"
        )
    return means
