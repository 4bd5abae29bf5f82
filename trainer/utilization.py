"""Compare the arithmetic of a training with the rate at which its devices multiply matrices."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Final

import torch

from data_pipeline.core.errors import UserError
from trainer.config import RunConfig
from trainer.data import read_manifests
from trainer.planning.plan import plan

logger = logging.getLogger(__name__)

_DTYPES: Final = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_NUM_ROUNDS, _NUM_PRODUCTS = 5, 4


@dataclass(frozen=True)
class Utilization:
    """The arithmetic of a run, and what its devices are capable of.

    Attributes:
        flops_per_sample: the floating-point operations of a step over the samples of its batch, forward and backward,
            also those that gradient checkpointing repeats.
        flops_per_second: those of large products of matrices on all devices together.
    """

    flops_per_sample: float
    flops_per_second: float

    def mfu(self, samples_per_second: float) -> float:
        """Return the share of the devices' rate that a training of this speed reaches."""
        return self.flops_per_sample * samples_per_second / self.flops_per_second


def headspace(data_wait_fraction: float) -> float:
    """Return how many times as fast a training would be if it never waited for data; 1,000 stands for more."""
    return 1 / max(1 - data_wait_fraction, 1e-3)


def measure_utilization(config: RunConfig, device: torch.device, *, num_ranks: int) -> Utilization | None:
    """Count the arithmetic of a step on tensors without data, and measure the device. Both take some seconds.

    Must not be called inside a process group. Returns None, after a line in the log, if one of them is not possible.
    """
    try:
        planned = plan(config, world_size=1, train=read_manifests(config.data).train, device_gigabytes=None)
        rate = matrix_rate(device, config.precision)
    except Exception as error:  # training itself says what is wrong, if it cannot start
        logger.info("perf/mfu is not logged: %s", error if isinstance(error, UserError) else repr(error))
        return None
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    return Utilization(planned.step_flops / config.global_batch_size, num_ranks * rate)


def matrix_rate(device: torch.device, precision: str, *, size: int | None = None) -> float:
    """Return the floating-point operations a second of a product of matrices, which takes less than a second.

    precision: as the setting of a run; float32 uses TF32 if torch may.
    size: the rows and columns of the matrices; by default, as many as keep the device busy.
    """
    dtype = _DTYPES.get(precision, torch.float64)
    size = size or (1024 if device.type == "cpu" else 8192 if dtype.itemsize == 2 else 4096)
    draws = torch.Generator(device).manual_seed(0)  # zeros would take less power, and be faster than real numbers
    matrix = torch.rand(size, size, generator=draws, device=device, dtype=dtype)
    product = matrix @ matrix
    seconds = []
    for _ in range(_NUM_ROUNDS):
        _wait_for(device)
        start = time.perf_counter()
        for _ in range(_NUM_PRODUCTS):
            torch.mm(matrix, matrix, out=product)
        _wait_for(device)
        seconds.append(time.perf_counter() - start)
    return _NUM_PRODUCTS * 2 * size**3 / min(seconds)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
