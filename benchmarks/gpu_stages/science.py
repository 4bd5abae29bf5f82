"""Train the recipes of the papers' Table 1 at their published size, over as many sessions as that takes, and probe.

A run trains until the session ends, saves a checkpoint, is probed, and leaves the machine in pieces. The next session
puts the pieces together and goes on. It takes the same steps as a run that was never stopped.
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks.gpu_stages.data import PLAIN, published
from benchmarks.gpu_stages.pieces import pack, unpack
from benchmarks.gpu_stages.session import Interrupted, Outcome, Setting, Stage, Task, read_record
from benchmarks.record import rounded
from configs import resolve_recipe
from launch.rank import train_on
from trainer.config import RunConfig, read_run_config
from trainer.data import read_manifests
from trainer.exports.encoder import export
from trainer.fault_tolerance.preemption import StoppedError
from trainer.memory import keep_freed_memory
from trainer.probed_runs.options import ProbeOptions
from trainer.probed_runs.probing import probe_run
from trainer.probes.result import labels_in, read_result
from trainer.provenance import command_line
from trainer.run_dir import LOCK_NAME, RunDir

_SECONDS_OF_A_PROBE: Final = 150  # 130 with a viewmaker on an H200
_SECONDS_OF_PACKING: Final = 15
_NUM_POINTS: Final = 40  # of the curve of the loss in the record
_TINY: Final = (
    *("encoder.kind=resnet10", "encoder.width=16", "global_batch_size=16", "num_epochs=2", "data.num_workers=0"),
    *("probe.num_epochs=1", "precision=float32", "log_every_steps=1", "probe.online_every_steps=2"),
)


def tasks(setting: Setting, *, overlay: str) -> Mapping[str, Task]:
    """Return the runs with an overlay: expert views, then a viewmaker."""
    needs = 0 if setting.is_tiny else 60 + _SECONDS_OF_A_PROBE + _SECONDS_OF_PACKING
    recipes = [f"{family}:{overlay}" for family in ("simclr", "viewmaker")]
    shares = range(len(recipes), 0, -1)  # the first gets half of the time, the second what is left
    suffix = f", {setting.num_epochs} epochs" if setting.num_epochs is not None else ""
    return {
        f"{recipe}{suffix}": Task(partial(train_and_probe, setting, recipe, share=share), needs, None)
        for recipe, share in zip(recipes, shares, strict=True)
    }


def train_and_probe(setting: Setting, recipe: str, *, share: int = 1) -> Outcome:
    """Train a recipe until it ends, or one of `share` equal parts of the session; pack it, probe it, pack it again."""
    if not setting.only:  # else the other one may not run in this session
        setting = replace(setting, ends_at=time.time() + setting.seconds_left / share)
    name = recipe.replace(":", "-") + (f"-{setting.num_epochs}" if setting.num_epochs is not None else "")
    run_dir = RunDir(setting.runs / name)
    if not run_dir.config.is_file():
        unpack(name, setting.out, run_dir.path)
    config = config_of(setting, recipe, run_dir)
    seconds = {"training": 0.0, "probe": 0.0}
    start = time.monotonic()
    stopped_by = _train(setting, config, run_dir)
    seconds["training"] = rounded(time.monotonic() - start)
    progress = _progress(config, run_dir)
    _pack(setting, run_dir, name, is_finished=False)  # now, because a probe may be interrupted
    if stopped_by != "signal" and setting.seconds_left > (0 if setting.is_tiny else _SECONDS_OF_PACKING + 30):
        start = time.monotonic()
        try:
            with _signal_after(setting.seconds_left - _SECONDS_OF_PACKING, then=_end_probe):
                probe_run(run_dir, ProbeOptions(), device=setting.device)
        except _NoTimeToProbeError:
            print(f"{recipe}: no time left for the probe of step {progress['step']}", flush=True)
        except KeyboardInterrupt:
            stopped_by = "signal"
        seconds["probe"] = rounded(time.monotonic() - start)
    probes = _probes(run_dir)
    is_finished = progress["step"] == progress["num_steps"] and progress["step"] in run_dir.probe_steps()
    _pack(setting, run_dir, name, is_finished=is_finished)
    values = {**progress, "compile": str(config.compile), "seconds_in_this_session": seconds, "probes": probes}
    outcome = Outcome(values, is_finished=is_finished)
    if stopped_by == "signal":
        raise Interrupted(outcome)
    return outcome


def config_of(setting: Setting, recipe: str, run_dir: RunDir) -> RunConfig:
    """Return the config of the run, or of a new one: the recipe in bfloat16, its step recorded unless a check failed.

    A viewmaker is compiled as well if a check has shown that this changes nothing: it saves more than it costs. Raises
    `UserError` if a dataset is missing.
    """
    overlay = recipe.partition(":")[2]
    train, test = published(setting, overlay)
    if run_dir.config.is_file():
        return read_run_config(run_dir)
    records = [read_record(path) for path in (setting.record, *setting.known)]
    checks = [record.measurement("checks", f"captured against eager, {recipe}") for record in records]
    is_wrong = any(check is not None and (check.failed or check.holds is False) for check in checks)
    compiled = [record.measurement("compiled", f"recorded against compiled, {recipe}") for record in records]
    is_compiled = recipe.startswith("viewmaker") and any(check is not None and check.is_done for check in compiled)
    is_compiled &= not setting.is_tiny  # on a CPU, to compile takes longer than all the rest of a dry run
    settings = [
        f"data.train_dir={train}",
        f"data.test_dir={test}",
        "tracking.wandb=disabled",
        "precision=bfloat16",
        "channels_last=true",
        f"compile={'false' if is_wrong else 'both' if is_compiled else 'step'}",
        "keep_checkpoints=1",
        "probe.online_every_steps=975",  # 5 epochs of 50,000 samples
        *(_TINY if setting.is_tiny else ()),
        *([] if setting.num_epochs is None else [f"num_epochs={setting.num_epochs}"]),
        *(["views.base_width=4"] if setting.is_tiny and recipe.startswith("viewmaker") else []),
    ]
    return resolve_recipe(recipe, settings)


def _train(setting: Setting, config: RunConfig, run_dir: RunDir) -> str | None:
    """Train until the end of the run. Return what stopped it earlier: "session", "signal", or None."""
    reserve = 0 if setting.is_tiny else _SECONDS_OF_A_PROBE + _SECONDS_OF_PACKING
    keep_freed_memory()
    with _signal_after(setting.seconds_left - reserve, then=_ignore) as is_over:
        try:
            train_on(setting.device, config, run_dir.path, command=command_line())
        except StoppedError:
            return "session" if is_over.is_set() else "signal"
    return None


class _NoTimeToProbeError(Exception):
    """The session ended before the probe."""


def _end_probe(*_: object) -> None:
    raise _NoTimeToProbeError


def _ignore(*_: object) -> None:
    """Do nothing: training notes the signal by itself, and may have ended just before."""


@contextlib.contextmanager
def _signal_after(seconds: float, *, then: Callable[..., None]) -> Iterator[threading.Event]:
    """Send SIGUSR1, which `then` handles, to this process after some seconds; the event tells that it was sent."""
    is_over = threading.Event()

    def send() -> None:
        is_over.set()
        os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, then)
    timer = threading.Timer(min(max(seconds, 1.0), threading.TIMEOUT_MAX), send)
    timer.daemon = True
    timer.start()
    try:
        yield is_over
    finally:
        timer.cancel()
        signal.signal(signal.SIGUSR1, before)


def _progress(config: RunConfig, run_dir: RunDir) -> dict[str, Any]:
    """Return how far a run is, its speed, and the curves of its loss and of its online probe.

    The last is here too because a probe of the checkpoint, which writes all curves, may be interrupted.
    """
    manifest = read_manifests(config.data).train
    steps_per_epoch = config.data.num_steps_per_epoch(manifest.num_samples, config.global_batch_size)
    entries = [entry for entry in run_dir.read_metrics() if "train/loss" in entry]
    step = run_dir.latest_step() or 0
    every = max(1, len(entries) // _NUM_POINTS)

    def median(name: str) -> float | None:
        found = [entry[name] for entry in entries if name in entry]
        return rounded(statistics.median(found)) if found else None

    return {
        "step": step,
        "num_steps": config.num_epochs * steps_per_epoch,
        "epochs": rounded(step / steps_per_epoch),
        "loss": [[entry["step"], rounded(entry["train/loss"])] for entry in entries[::every]],
        "online_probe": _online_curves(run_dir),
        "samples_per_second": median("perf/samples_per_second"),
        "data_wait_fraction": median("perf/data_wait_fraction"),
        "gpu_gigabytes": median("memory/gpu_gigabytes"),
    }


def _online_curves(run_dir: RunDir) -> dict[str, list[list[float]]]:
    """Return pairs of step and accuracy by the names of the online probe in the log."""
    curves: dict[str, list[list[float]]] = {}
    for entry in run_dir.read_metrics():
        for name, value in entry.items():
            if name.startswith("probe/") and name != "probe/seconds":
                curves.setdefault(name, []).append([entry["step"], rounded(value)])
    return curves


def _probes(run_dir: RunDir) -> list[dict[str, Any]]:
    """Return the accuracies of all probed checkpoints, by label and method."""
    found: dict[tuple[str, str], list[list[float]]] = {}
    for step in run_dir.probe_steps():
        for label in labels_in(run_dir.probes(step)):
            result = read_result(run_dir.probes(step) / f"{label}.json")
            for method, accuracy in (("linear", result.linear.accuracy), ("knn", result.knn.accuracy)):
                found.setdefault((label, method), []).append([step, accuracy])
    return [{"label": label, "method": method, "points": points} for (label, method), points in found.items()]


def _pack(setting: Setting, run_dir: RunDir, name: str, *, is_finished: bool) -> None:
    """Pack a run with its newest checkpoint, or with the exported encoder in place of it if the run has ended."""
    step = run_dir.latest_step() or 0
    if is_finished:
        export(run_dir, run_dir.path / "encoder.safetensors")

    def belongs(path: Path) -> bool:
        if path.is_relative_to(run_dir.checkpoints):
            return not is_finished and path.is_relative_to(run_dir.checkpoint(step))
        return path.relative_to(run_dir.path).parts[0] not in {"wandb", LOCK_NAME}

    files = [path for path in run_dir.path.rglob("*") if path.is_file() and belongs(path)]
    pack(run_dir.path, files, setting.out, name=name, step=step)


STAGES = tuple(
    Stage(overlay, partial(tasks, overlay=overlay), is_of_the_gpu=False) for overlay in ("digits", "shapes", PLAIN)
)
