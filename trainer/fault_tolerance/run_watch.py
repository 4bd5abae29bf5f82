"""Tell the watchdog what the steps of a run do, and how long some of it may take."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import torch
from torch import nn

from data_pipeline.loading.stream import Stream
from data_pipeline.remote.cache import is_remote
from trainer.config import RunConfig
from trainer.fault_tolerance import liveness
from trainer.fault_tolerance.watchdog import Watchdog
from trainer.modules import TrainedModules
from trainer.objectives import Objective


class RunWatch:
    """Announces the parts of a training step to a watchdog, by the run's config."""

    def __init__(self, config: RunConfig, watchdog: Watchdog, *, stream: Stream, device: torch.device) -> None:
        self._config, self._watchdog, self._stream, self._device = config, watchdog, stream, device
        # A location that is fetched from has a time limit of its own, and a sentence for it.
        self._fetch_seconds = config.data.remote.file_seconds if is_remote(config.data.train_dir) else 0.0

    def reading(self, step: int) -> None:
        """Announce that the batch of `step` is read now."""
        shards = self._stream.shards_of(step)
        self._watchdog.beat(step, doing="reading", shards=shards, may_take_seconds=self._fetch_seconds)

    def training(self, step: int) -> AbstractContextManager[None]:
        """Announce that the batch of `step` is there; what trains on it goes inside."""
        self._watchdog.beat(step, doing="training")
        return time_to_compile_again(self._config, step, self._watchdog)

    def waiting_for_device(self) -> AbstractContextManager[None]:
        """Report that the host waits for its GPU, which computes long after the host has asked it to."""
        return (
            liveness.inside("waiting for GPU", waits=True) if self._device.type == "cuda" else contextlib.nullcontext()
        )


def follow_networks(config: RunConfig, modules: TrainedModules, objective: Objective) -> None:
    """Let all networks give signs of life, except an encoder that is compiled: it runs as a single operation."""
    networks: list[nn.Module] = [objective, *modules.trained_modules.values()]
    for network in networks:
        if not (config.compile and network is modules.encoder):
            liveness.follow(network)


def time_to_compile_again(config: RunConfig, step: int, watchdog: Watchdog) -> AbstractContextManager[None]:
    """When the viewmaker freezes, the encoder's input needs no gradient any more, for which it is compiled anew."""
    if config.compile and config.adversary is not None and step == config.adversary.freeze_step:
        return watchdog.patience(config.watchdog.startup_seconds, "compiling")
    return contextlib.nullcontext()
