"""Log a training while it runs: metrics, alarms, probe results and pictures.

Guarantees: every rank makes the same collectives at the same steps. Only the first rank writes.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch

from data_pipeline.core.sample import Batch
from trainer.build import Training
from trainer.config import RunConfig
from trainer.distributed.collectives import all_reduce_mean_scalars, rank
from trainer.fault_tolerance.run_counters import RunCounters
from trainer.fault_tolerance.run_watch import RunWatch
from trainer.observability.alarms import Alarms
from trainer.observability.step_pictures import step_pictures
from trainer.observability.tracker import Tracker
from trainer.observability.tracking import StepPictures
from trainer.probes.online import online_probe
from trainer.profiling import Clock, memory_in_use, slowest
from trainer.run_dir import RunDir
from trainer.step import StepOutput

logger = logging.getLogger(__name__)


class TrainingLog:
    """The log of one training; its clock starts when it is made.

    Raises `UserError` if the samples of the probe or of the pictures cannot be read.
    """

    def __init__(
        self,
        config: RunConfig,
        run_dir: RunDir,
        training: Training,
        counters: RunCounters,
        watch: RunWatch,
        *,
        start_step: int,
        num_steps: int,
        device: torch.device,
    ) -> None:
        self._config, self._counters, self._watch, self._device = config, counters, watch, device
        self._alarms = Alarms(config.alarms)
        self._tracker = _open_tracker(config, run_dir, start_step) if rank() == 0 else None
        self._pictures = _pictures(config, training, device) if rank() == 0 else None
        self._probe = online_probe(
            config.probe, training.modules.encoder, data=config.data, precision=config.precision, device=device
        )

        def is_logged(num_done: int) -> bool:
            return num_done % config.log_every_steps == 0 or num_done in {1, num_steps}

        self._is_logged = is_logged
        self._clock = Clock(device=device, start_step=start_step, is_read=is_logged)

    def timed(self, stream: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches of a stream, timed by the clock."""
        return self._clock.timed(stream)

    def add(self, batch: Batch, output: StepOutput, learning_rates: Mapping[str, float]) -> str:
        """Log the step on a batch, and return a note for the progress bar; it is empty if the step is not logged.

        Raises `UserError` if too many samples could not be read.
        """
        num_done, note = batch.step + 1, ""
        metrics: dict[str, float] = {}
        if self._is_logged(num_done):
            metrics = self._metrics(output, learning_rates, num_done)
            note = f"loss {metrics.get('train/loss', math.nan):.4f}, slowest {slowest(metrics)}"
        if self._probe is not None and num_done % (self._config.probe.online_every_steps or 1) == 0:
            with self._watch.probing():
                metrics |= self._probe()
        if self._tracker is not None and metrics:
            self._tracker.log(num_done, {"epoch": batch.epoch} | metrics)
        if self._tracker is not None and self._pictures is not None and (shown := self._pictures(num_done)) is not None:
            self._tracker.log_pictures(num_done, shown)
        return note

    @property
    def total_seconds(self) -> float:
        """Seconds since the clock was started."""
        return self._clock.total_seconds

    def close(self) -> None:
        """Close what the first rank writes to."""
        if self._tracker is not None:
            with self._watch.closing_log():
                self._tracker.close()

    def _metrics(self, output: StepOutput, learning_rates: Mapping[str, float], num_done: int) -> dict[str, float]:
        with self._watch.waiting_for_device():
            values = all_reduce_mean_scalars(output.read())
        metrics = {name: value for name, value in values.items() if math.isfinite(value)}
        if self._tracker is not None:
            for alarm in self._alarms.check(metrics, num_done):
                logger.warning("%s", alarm)
        metrics |= self._counters.metrics()
        speed = self._clock.read(num_samples=self._config.global_batch_size)
        metrics |= all_reduce_mean_scalars(speed | memory_in_use(self._device))
        return metrics | {f"optim/{name}_learning_rate": rate for name, rate in learning_rates.items()}


def _open_tracker(config: RunConfig, run_dir: RunDir, start_step: int) -> Tracker:
    settings = config.model_dump(mode="json")
    return Tracker(run_dir, config.tracking, name=config.name, settings=settings, start_step=start_step)


def _pictures(
    config: RunConfig, training: Training, device: torch.device
) -> Callable[[int], StepPictures | None] | None:
    """Return None in float64, which is for comparing trajectories."""
    if config.precision == "float64":
        return None
    policy, seed = training.modules.view_policy, config.seed
    return step_pictures(config.tracking, policy, data=config.data, seed=seed, device=device)
