"""Compute what DDP and DeepSpeed's ZeRO keep and send: the only part of a plan that is formulas."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from data_pipeline.core.schema import Schema
from trainer.config import RunConfig
from trainer.distributed.engines import DeepSpeedConfig, Engine
from trainer.distributed.engines.deepspeed_engine import deepspeed_dictionary

Backend = Literal["gloo", "nccl"]


@dataclass(frozen=True)
class KeptBytes:
    """The bytes that a rank keeps for its engines, including the gradients."""

    engine_bytes: int
    optimizer_bytes: int
    host_bytes: int
    gradient_bytes: int


def zero_stage_of(config: RunConfig) -> int:
    """Return the stage of DeepSpeed's ZeRO; -1 for DDP."""
    engine: Schema = config.engine
    return engine.zero_stage if isinstance(engine, DeepSpeedConfig) else -1


def kept_by_engines(config: RunConfig, gradient_bytes: int, optimizer_bytes: int, *, world_size: int) -> KeptBytes:
    """Return the bytes that the engines keep.

    DDP and ZeRO 0 hold the gradients a second time, in buckets. ZeRO 1 to 3 cut the optimizer's state into pieces; each
    rank has a copy of its piece of the parameters, and a bucket. ZeRO 1 keeps all gradients and a piece of them, ZeRO 2
    and 3 only the piece. ZeRO 3 also keeps a piece of the parameters.
    """
    engine: Schema = config.engine
    stage = zero_stage_of(config)
    if not isinstance(engine, DeepSpeedConfig) or stage == 0:
        buckets = gradient_bytes if world_size > 1 else 0
        return KeptBytes(buckets, optimizer_bytes, host_bytes=0, gradient_bytes=gradient_bytes)
    piece = -(-gradient_bytes // world_size)
    settings = deepspeed_dictionary(engine, global_batch_size=config.global_batch_size, num_ranks=world_size)
    bucket: int = settings["zero_optimization"]["reduce_bucket_size"] * config.parameter_dtype.itemsize
    state = -(-optimizer_bytes // world_size)
    return KeptBytes(
        engine_bytes=bucket + (0 if engine.offload_optimizer else piece) + (0 if stage == 2 else piece),
        optimizer_bytes=0 if engine.offload_optimizer else state,
        host_bytes=state + piece if engine.offload_optimizer else 0,
        gradient_bytes=gradient_bytes if stage == 1 else piece,
    )


def sent_by_engines(
    config: RunConfig, gradients: Mapping[str, int], *, world_size: int, backend: Backend
) -> Counter[str]:
    """Return the bytes that the engines send: the gradients, and with ZeRO the parameters and a number for the norm."""
    sent: Counter[str] = Counter()
    if world_size == 1:
        return sent
    stage, adversary = zero_stage_of(config), config.adversary
    for name, size in gradients.items():
        alternates = name == "viewmaker" and adversary is not None and adversary.update == "alternating"
        num_times = adversary.viewmaker_steps if alternates and adversary is not None else 1
        summed = "allgather" if backend == "gloo" else "allreduce"
        by_stage = {-1: summed, 0: "allreduce", 1: "reduce", 2: "reduce", 3: "reduce_scatter"}
        sent[by_stage[stage]] += num_times * size
        if stage > 0:
            sent["allgather"] += num_times * -(-size // world_size)
            sent[summed] += num_times * 4
    return sent


@contextmanager
def cut_gradients(engines: Mapping[str, Engine], world_size: int) -> Iterator[None]:
    """Inside the block, keep only a rank's piece of each finished gradient, like ZeRO 2 and 3."""
    pieces: dict[nn.Parameter, Tensor] = {}

    def keep_piece(parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        parameter.grad = None
        if parameter not in pieces:
            pieces[parameter] = parameter.new_empty(-(-parameter.numel() // world_size))

    parameters = [parameter for engine in engines.values() for parameter in engine.module.parameters()]
    parameters = [parameter for parameter in parameters if parameter.requires_grad]
    handles = [
        parameter.register_post_accumulate_grad_hook(keep_piece)  # type: ignore[no-untyped-call]
        for parameter in parameters
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
