"""Tell the watchdog what the steps of a run do, and how long some parts may take."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from data_pipeline.loading.stream import Stream
from trainer.fault_tolerance import liveness
from trainer.fault_tolerance.watchdog import Watchdog
from trainer.modules import TrainedModules
from trainer.objectives import Objective

# Enough for a slow disk, a large probe and a slow server.
_CHECKPOINT_SECONDS, _PROBE_SECONDS, _CLOSING_SECONDS = 600.0, 600.0, 60.0


class RunWatch:
    """An announcer of the parts of a training step to a watchdog.

    Args:
        fetch_seconds: the time that reading a shard may take; a fetch has its own time limit and error.
        may_compile: returns whether networks may be compiled in a step.
        compile_seconds: the time that compiling may take.
    """

    def __init__(
        self,
        watchdog: Watchdog,
        *,
        stream: Stream,
        device: torch.device,
        fetch_seconds: float,
        may_compile: Callable[[int], bool],
        compile_seconds: float,
    ) -> None:
        self._watchdog, self._stream, self._device = watchdog, stream, device
        self._fetch_seconds = fetch_seconds
        self._may_compile, self._compile_seconds = may_compile, compile_seconds

    def reading(self, step: int) -> None:
        """Announce that the batch of `step` is read now."""
        shards = self._stream.shards_of(step)
        self._watchdog.beat(step, doing="reading", shards=shards, may_take_seconds=self._fetch_seconds)

    def training(self, step: int) -> AbstractContextManager[None]:
        """Announce that the batch of `step` was read; train on it inside the block."""
        self._watchdog.beat(step, doing="training")
        if self._may_compile(step):
            return self._watchdog.patience(self._compile_seconds, "compiling")
        return contextlib.nullcontext()

    def waiting_for_device(self) -> AbstractContextManager[None]:
        """Report that the host waits inside the block for its GPU, which computes asynchronously."""
        return (
            liveness.inside("waiting for GPU", waits=True) if self._device.type == "cuda" else contextlib.nullcontext()
        )

    def probing(self) -> AbstractContextManager[None]:
        """Give the probe inside the block more time than a step."""
        return self._watchdog.patience(_PROBE_SECONDS, "probing")

    def finding_neighbours(self) -> AbstractContextManager[None]:
        """Give the search for the groups of an epoch inside the block more time than a step."""
        return self._watchdog.patience(_PROBE_SECONDS, "finding neighbours")

    def saving(self) -> AbstractContextManager[None]:
        """Give the checkpoint inside the block more time than a step."""
        return self._watchdog.patience(_CHECKPOINT_SECONDS, "writing a checkpoint")

    def closing_log(self) -> AbstractContextManager[None]:
        """Give the servers of the log time to receive the last metrics."""
        return self._watchdog.patience(_CLOSING_SECONDS, "closing the log")


def follow_networks(modules: TrainedModules, objective: Objective) -> None:
    """Let all networks give signs of life, except compiled ones, which run as a single operation."""
    liveness.follow(objective)
    if not modules.config.compiles_networks:
        for network in modules.trained_modules.values():
            liveness.follow(network)
