"""Measure training on a GPU against its peers: samples a second, kernels, share of the matrix rate, memory, data wait.

Each peer is measured alone, so that its memory is its own; the machine is not shared, so peers need not take turns.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch

from benchmarks.gpu_stages.checks import RECIPES, captured_against_eager
from benchmarks.gpu_stages.data import pictures_without_overlay
from benchmarks.gpu_stages.kernel_trace import trace_steps
from benchmarks.gpu_stages.peers import (
    GAME,
    LIGHTLY,
    OURS,
    TWO_PASSES,
    CompileSetting,
    Form,
    Peer,
    config_of,
    count_flops,
    lightlys,
    matrix_rate,
    measure,
    ours,
    void,
)
from benchmarks.gpu_stages.session import Outcome, Setting, Stage, Task
from benchmarks.record import rounded
from benchmarks.viewmaker_step import StepAsWritten
from data_pipeline.loading.placement import resident_bytes
from data_pipeline.storage.manifest import load_manifest
from trainer.data import open_stream
from trainer.modules import build_modules
from trainer.planning.plan import plan
from trainer.profiling import Clock
from trainer.recorded_step import RecordedStep

AS_WRITTEN: Final = "the original's two passes"
HOW: Final[Mapping[str, CompileSetting]] = {
    "eager": False,
    "recorded": "step",
    "compiled": True,
    "compiled and recorded": "both",
}
_NUM_WARM_UP, _NUM_ROUNDS, _NUM_WORKERS = 10, 5, 16
_SECONDS_OF_A_ROUND = 0.6  # a GPU is steady: the rounds show how far
_TINY_MATRIX = 64  # rows and columns
_TINY_ENCODER = (
    *("encoder.kind=resnet10", "encoder.width=16"),
    *("encoder.mean=[0.5, 0.5, 0.5]", "encoder.std=[0.25, 0.25, 0.25]"),
)


def tasks(setting: Setting, *, batch_size: int) -> Mapping[str, Task]:
    """Return the measurements at a batch size."""
    found: dict[str, Task] = {}
    for how in ("eager", "recorded"):
        for peer in (OURS, GAME, TWO_PASSES):
            found[f"{peer}, {how}"] = Task(partial(measure_ours, setting, batch_size, peer, how), needs_seconds=30)
    for precision in ("float32", "bfloat16"):
        run = partial(measure_as_written, setting, batch_size, precision)
        found[f"{AS_WRITTEN}, {precision}"] = Task(run, needs_seconds=30)
    found[LIGHTLY] = Task(partial(measure_lightly, setting, batch_size), needs_seconds=40)
    if setting.is_tiny and batch_size > 256:  # where all batches have the same few samples
        return {OURS: found[f"{OURS}, eager"]}
    return found


def compiled_tasks(setting: Setting) -> Mapping[str, Task]:
    """Return the measurements that wait for a compiler, and a check of the steps that are compiled and recorded."""
    found: dict[str, Task] = {}
    for batch_size in (256,) if setting.is_tiny else (256, 1024):  # all tiny batches have the same few samples
        for how in ("compiled and recorded", "compiled"):
            for peer in (OURS, GAME):
                run = partial(measure_ours, setting, batch_size, peer, how)
                found[f"{peer}, {how}, batch {batch_size}"] = Task(run, needs_seconds=100)
            for recipe in RECIPES if batch_size == 256 and how == "compiled and recorded" else ():
                check = partial(captured_against_eager, setting, recipe, eager="true", captured="both")
                found[f"recorded against compiled, {recipe}"] = Task(check, needs_seconds=60)
    return found


def machine_tasks(setting: Setting) -> Mapping[str, Task]:
    """Return the measurement of the machine itself, and the making of what others read."""
    return {
        "matrix rate": Task(partial(measure_matrix_rates, setting), needs_seconds=10),
        "pictures": Task(partial(build_pictures, setting), needs_seconds=60),
    }


def build_pictures(setting: Setting) -> Outcome:
    """Build the pictures of the measurements of throughput, so that none of them has to wait for that."""
    return Outcome({"num_pictures": load_manifest(pictures_without_overlay(setting)).num_samples})


def measure_matrix_rates(setting: Setting) -> Outcome:
    """Return the floating-point operations a second of large products of matrices, by precision."""
    if setting.is_tiny:
        return Outcome({"float32": rounded(matrix_rate(setting.device, "float32", size=_TINY_MATRIX))})
    return Outcome({name: rounded(matrix_rate(setting.device, name)) for name in ("bfloat16", "float32")})


def measure_ours(setting: Setting, batch_size: int, peer: str, how: str) -> Outcome:
    """Measure training of ours, from the shards."""
    form = _form(setting, batch_size, HOW[how])
    eager = _form(setting, batch_size, False)
    config = config_of(peer, form)
    built = ours(peer, form, setting.device)
    # The counter would undo compilation.
    counted = ours(peer, eager, setting.device) if config.compiles_networks else built
    built.flops = count_flops(counted)
    counted = built  # frees the other one
    values = _measure(setting, form, built)
    if config.records_step and setting.device.type == "cuda":
        step = built.training_step
        values["is_recorded"] = isinstance(step, RecordedStep) and step.is_recorded
    values["planned_bytes"] = _planned_bytes(peer, eager)
    values["data_bytes"] = resident_bytes(load_manifest(form.train_dir))  # in the GPU's memory, but not in a plan
    if values["peak_bytes"] and not config.compiles_networks:  # compiled networks keep less
        values["peak_over_plan"] = rounded(values["peak_bytes"] / (values["planned_bytes"] + values["data_bytes"]))
    return Outcome(values, holds=values.get("is_recorded"))


@functools.cache
def _planned_bytes(peer: str, form: Form) -> int:
    """Return the peak of the memory in a plan, which is that of plain steps."""
    config = config_of(peer, form)
    return plan(config, world_size=1, train=None, device_gigabytes=None).peak_bytes


def measure_lightly(setting: Setting, batch_size: int) -> Outcome:
    """Measure lightly's SimCLR with its own loader."""
    form = _form(setting, batch_size, False)
    peer = lightlys(form, setting.device)
    peer.flops = count_flops(peer)
    return Outcome(_measure(setting, form, peer))


def measure_as_written(setting: Setting, batch_size: int, precision: str) -> Outcome:
    """Measure the viewmaker's game in the original's order, written from torch's layers, on batches of our stream."""
    form = _form(setting, batch_size, False)
    run_config = config_of(GAME, replace(form, overrides=())).model_copy(
        update={"precision": precision, "channels_last": precision == "bfloat16"}
    )
    modules = build_modules(run_config).to(setting.device, torch.float32)
    written = StepAsWritten(run_config, modules)
    stream = open_stream(
        run_config.data, global_batch_size=form.batch_size, seed=0, end_step=1 << 20, device=setting.device
    )
    clock = Clock(device=setting.device)
    batches = clock.timed(stream)
    peer = Peer(lambda: void(written.train(next(batches))), clock)
    peer.flops = count_flops(peer)
    return Outcome(_measure(setting, form, peer) | {"precision": precision})


def _form(setting: Setting, batch_size: int, compile_setting: CompileSetting) -> Form:
    train_dir = pictures_without_overlay(setting)
    if setting.is_tiny:
        return Form(train_dir, 2, "float32", compile_setting, 0, _TINY_ENCODER)
    return Form(train_dir, batch_size, "bfloat16", compile_setting, _NUM_WORKERS)


def _measure(setting: Setting, form: Form, peer: Peer) -> dict[str, Any]:
    """Measure rounds of steps after some to warm up, and then count the kernels of a step."""
    setting.free_memory()
    for _ in range(0 if setting.is_tiny else _NUM_WARM_UP):
        peer.step()
    most_bytes = setting.peak_bytes  # a recorded step allocates its memory now, and nothing in a replay
    num_steps = 1 if setting.is_tiny else _steps_in(_SECONDS_OF_A_ROUND, peer.step, setting)
    for _ in range(1 if setting.is_tiny else _NUM_ROUNDS):
        measure(peer, num_steps=num_steps, batch_size=form.batch_size, device=setting.device)
    most_bytes = max(most_bytes, peer.peak_bytes)
    rate = statistics.median(peer.rates)
    peak_rate = matrix_rate(setting.device, form.precision, size=_TINY_MATRIX if setting.is_tiny else None)
    trace = trace_steps(setting, peer.step, num_steps=1)
    return {
        "batch_size": form.batch_size,
        "samples_per_second": rounded(rate),
        "milliseconds_a_step": rounded(1e3 * form.batch_size / rate),
        "rounds": [rounded(each) for each in peer.rates],
        "flops_per_sample": peer.flops / form.batch_size,
        "share_of_matrix_rate": rounded(peer.flops / form.batch_size * rate / peak_rate),
        "matrix_flops_per_second": rounded(peak_rate),
        "kernels_a_step": len(trace.kernels) or None,  # None if the profiler may not see the GPU
        "launches_a_step": len(trace.launches) or None,
        "peak_bytes": most_bytes or None,
        "data_wait_fraction": peer.data_wait_fraction,
    }


def _steps_in(seconds: float, step: Callable[[], None], setting: Setting) -> int:
    """Return about how many steps take so many seconds."""
    setting.wait()
    start = time.perf_counter()
    for _ in range(5):
        step()
    setting.wait()
    return max(5, round(seconds / (time.perf_counter() - start) * 5))


STAGES = (
    Stage("machine", machine_tasks),
    *(Stage(f"throughput-{size}", partial(tasks, batch_size=size)) for size in (256, 1024, 4096)),
    Stage("compiled", compiled_tasks),
)
