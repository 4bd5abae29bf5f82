"""Tell the watchdog what the steps of a run do, and how long some of it may take."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import torch
from torch import nn

from data_pipeline.loading.stream import Stream
from trainer.fault_tolerance import liveness
from trainer.fault_tolerance.watchdog import Watchdog
from trainer.modules import TrainedModules
from trainer.objectives import Objective

# What a slow disk, a large probe and a slow server may take.
_CHECKPOINT_SECONDS, _PROBE_SECONDS, _CLOSING_SECONDS = 600.0, 600.0, 60.0


class RunWatch:
    """Announces the parts of a training step to a watchdog.

    Args:
        fetch_seconds: that reading a shard may take, because it has a time limit and an error of its own.
        recompile_step: the step at which the encoder is compiled again; None if there is none.
        compile_seconds: that this may take.
    """

    def __init__(
        self,
        watchdog: Watchdog,
        *,
        stream: Stream,
        device: torch.device,
        fetch_seconds: float,
        recompile_step: int | None,
        compile_seconds: float,
    ) -> None:
        self._watchdog, self._stream, self._device = watchdog, stream, device
        self._fetch_seconds = fetch_seconds
        self._recompile_step, self._compile_seconds = recompile_step, compile_seconds

    def reading(self, step: int) -> None:
        """Announce that the batch of `step` is read now."""
        shards = self._stream.shards_of(step)
        self._watchdog.beat(step, doing="reading", shards=shards, may_take_seconds=self._fetch_seconds)

    def training(self, step: int) -> AbstractContextManager[None]:
        """Announce that the batch of `step` is there; what trains on it goes inside."""
        self._watchdog.beat(step, doing="training")
        return time_to_compile_again(
            self._watchdog, step, recompile_step=self._recompile_step, seconds=self._compile_seconds
        )

    def waiting_for_device(self) -> AbstractContextManager[None]:
        """Report that the host waits for its GPU, which computes long after the host has asked it to."""
        return (
            liveness.inside("waiting for GPU", waits=True) if self._device.type == "cuda" else contextlib.nullcontext()
        )

    def probing(self) -> AbstractContextManager[None]:
        """Give the probe inside more time than a step has."""
        return self._watchdog.patience(_PROBE_SECONDS, "probing")

    def saving(self) -> AbstractContextManager[None]:
        """Give the checkpoint inside more time than a step has."""
        return self._watchdog.patience(_CHECKPOINT_SECONDS, "writing a checkpoint")

    def closing_log(self) -> AbstractContextManager[None]:
        """Give the servers of the log time to take what is left."""
        return self._watchdog.patience(_CLOSING_SECONDS, "closing the log")


def follow_networks(modules: TrainedModules, objective: Objective) -> None:
    """Let all networks give signs of life, except an encoder that is compiled: it runs as a single operation."""
    networks: list[nn.Module] = [objective, *modules.trained_modules.values()]
    for network in networks:
        if not (modules.config.compile and network is modules.encoder):
            liveness.follow(network)


def time_to_compile_again(
    watchdog: Watchdog, step: int, *, recompile_step: int | None, seconds: float
) -> AbstractContextManager[None]:
    """Give the step at which the encoder is compiled again the time for that; the others none."""
    return watchdog.patience(seconds, "compiling") if step == recompile_step else contextlib.nullcontext()
