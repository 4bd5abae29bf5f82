"""Log a training: first its settings, then metrics, alarms, probe results and pictures.

Guarantees: every rank calls the same collectives at the same steps. Only the first rank writes.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Self

import torch

from data_pipeline.core.batch import Batch
from trainer.build import Training
from trainer.checkpoint.restore import Restored
from trainer.config import RunConfig
from trainer.data import Manifests
from trainer.distributed.collectives import all_reduce_mean_scalars, rank, world_size
from trainer.fault_tolerance.watchdog import Watchdog
from trainer.liveness import stage
from trainer.modules import TrainedModules
from trainer.observability.alarms import Alarms
from trainer.observability.step_pictures import step_pictures
from trainer.observability.tracker import Tracker
from trainer.observability.tracking import StepPictures
from trainer.open_settings import input_size
from trainer.probes.online import online_probe
from trainer.profiling import Clock, memory_in_use, slowest, slowest_rank
from trainer.run_counters import RunCounters
from trainer.run_dir import RunDir
from trainer.step import StepOutput
from trainer.utilization import Utilization, headspace
from trainer.views import BaseViewsConfig

logger = logging.getLogger(__name__)


class TrainingLog:
    """The log of a training, which is closed at the end of its `with` block. Its clock starts when it is made.

    `steps` are those that are left. `source_metrics` returns what was drawn from each source of a mixture in a number
    of steps. `utilization` has the arithmetic of the run, if its share of the devices' rate is logged.

    Raises `UserError` if the samples of the probe or of the pictures cannot be read.
    """

    def __init__(
        self,
        config: RunConfig,
        run_dir: RunDir,
        training: Training,
        counters: RunCounters,
        watchdog: Watchdog,
        *,
        steps: range,
        device: torch.device,
        source_metrics: Callable[[int], dict[str, float]],
        utilization: Utilization | None = None,
    ) -> None:
        self._config, self._counters, self._watchdog, self._device = config, counters, watchdog, device
        self._source_metrics, self._utilization = source_metrics, utilization
        self._alarms = Alarms(config.alarms)
        self._pictures: Callable[[int], StepPictures | None] | None = None
        if rank() == 0 and config.precision != "float64":  # which is for comparisons of trajectories
            policy = training.modules.view_policy
            self._pictures = step_pictures(config.tracking, policy, data=config.data, seed=config.seed, device=device)
        self._probe = online_probe(
            config.probe, training.modules.encoder, data=config.data, precision=config.precision, device=device
        )
        # The last part that may raise, so that no tracker is left open.
        self._tracker = open_tracker(run_dir, config, start_step=steps.start) if rank() == 0 else None
        self._steps = steps
        self._clock = Clock(device=device, start_step=steps.start, is_read=self._is_logged)

    def _is_logged(self, num_done: int) -> bool:
        return num_done % self._config.log_every_steps == 0 or num_done in {1, self._steps.stop}

    def _is_probed(self, num_done: int) -> bool:
        return num_done % (self._config.probe.online_every_steps or 1) == 0 or num_done == self._steps.stop

    def before(self) -> None:
        """Log the online probe of the untrained encoder, from which each label rises, if training starts at step 0."""
        if self._probe is None or self._steps.start > 0:
            return
        with self._watchdog.patience("probing"), self._clock.paused():
            metrics = self._probe()
        if self._tracker is not None:
            self._tracker.log(0, {"epoch": 0} | metrics)

    def timed(self, stream: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches of a stream, timed by the clock."""
        return self._clock.timed(stream)

    def add(self, batch: Batch, output: StepOutput, learning_rates: Mapping[str, float]) -> str:
        """Log the step on a batch. Return a note for the line of progress, empty if the step is not logged.

        Raises `UserError` if too many samples could not be read.
        """
        num_done, note = batch.step + 1, ""
        metrics: dict[str, float] = {}
        if self._is_logged(num_done):
            if "viewmaker" in learning_rates and not self._config.viewmaker_learns(step=batch.step, epoch=batch.epoch):
                learning_rates = {**learning_rates, "viewmaker": 0.0}
            metrics = self._metrics(output, learning_rates, num_done, epoch=batch.epoch)
            note = f"loss {metrics.get('train/loss', math.nan):.4f}, slowest {slowest(metrics)}"
        if self._probe is not None and self._is_probed(num_done):
            with self._watchdog.patience("probing"), self._clock.paused():
                metrics |= self._probe()
        if self._tracker is not None and metrics:
            self._tracker.log(num_done, {"epoch": batch.epoch} | metrics)
        if self._tracker is not None and self._pictures is not None and (shown := self._pictures(num_done)) is not None:
            self._tracker.log_pictures(num_done, shown)
        return note

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self._tracker is None:
            return
        try:
            with self._watchdog.patience("closing the log"):
                self._tracker.close(failed=kind is not None)
        except Exception as closing_error:
            if kind is None:
                raise
            logger.warning("the log of the run could not be closed: %s", closing_error)  # the error of training is kept

    def _metrics(
        self, output: StepOutput, learning_rates: Mapping[str, float], num_done: int, *, epoch: int
    ) -> dict[str, float]:
        with stage("waiting for GPU"):
            values = all_reduce_mean_scalars(output.read())
        metrics = {name: value for name, value in values.items() if math.isfinite(value)}
        if self._tracker is not None:
            for alarm in self._alarms.check(metrics_of_alarms(metrics, self._config.views, epoch=epoch), num_done):
                logger.warning("%s", alarm)
        metrics |= self._counters.metrics() | self._source_metrics(num_done)
        speed = self._clock.read(num_samples=self._config.global_batch_size)
        metrics |= all_reduce_mean_scalars(speed | memory_in_use(self._device)) | slowest_rank(speed)
        metrics["perf/headspace"] = headspace(metrics["perf/data_wait_fraction"])
        if self._utilization is not None:
            metrics["perf/mfu"] = self._utilization.mfu(metrics["perf/samples_per_second"])
        return metrics | {f"optim/{name}_learning_rate": rate for name, rate in learning_rates.items()}


def metrics_of_alarms(metrics: Mapping[str, float], views: BaseViewsConfig, *, epoch: int) -> dict[str, float]:
    """Return the metrics that the alarms read: all, but none of views in an epoch in which no viewmaker makes them.

    They say nothing of the viewmaker, and would put its alarm off from epoch to epoch.
    """
    by_others = views.is_learned and not views.learns_in(epoch)
    return {name: value for name, value in metrics.items() if not (by_others and name.startswith("views/"))}


def open_tracker(run_dir: RunDir, config: RunConfig, *, start_step: int = 0) -> Tracker:
    """Open the tracker of a run that goes on from `start_step`."""
    return Tracker(run_dir, config.tracking, config.model_dump(mode="json"), start_step=start_step)


def log_start(
    config: RunConfig,
    modules: TrainedModules,
    manifests: Manifests,
    restored: Restored,
    *,
    device: torch.device,
    num_steps: int,
) -> None:
    """Log the settings of the run. Only rank 0 logs."""
    if rank() > 0:
        return
    sizes = ", ".join(
        f"{name} {sum(p.numel() for p in module.parameters()):,} parameters"
        for name, module in modules.trained_modules.items()
    )
    steps_per_epoch = num_steps // config.num_epochs
    if modules.config.encoder.kind != config.encoder.kind:
        size = "x".join(map(str, input_size(config, manifests.train.batch_shape)))
        logger.info("encoder.kind=%s is %s for inputs of %s", config.encoder.kind, modules.config.encoder.kind, size)
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
        manifests.train.num_samples,
    )
    if config.objective.note is not None:
        logger.info("%s", config.objective.note)
    if restored.step == num_steps:
        logger.info("already at its last step %d; nothing to do", num_steps)
    elif restored.step:
        logger.info("going on from step %d of %d", restored.step, num_steps)
    if restored.trained_on not in {None, manifests.identity}:
        logger.warning(
            "the data were replaced after step %d: going on with the new data, which you accepted", restored.step
        )
    if config.compiles_networks and restored.step < num_steps:
        logger.info("compile=%s: the first step compiles the networks, which takes a minute or more", config.compile)
