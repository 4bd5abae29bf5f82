"""Send the metrics of a run directory to Weights & Biases, whose failures do not harm training.

A run directory has one W&B run for all ranks (rank 0 has it) and all restarts (RUN_DIR/wandb_run_id keeps its id). The
process of W&B writes in blocks, and the signals that end a job kill it. The next start sends the lost steps from
metrics.jsonl. Guarantees: W&B gets each step exactly once.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import shlex
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import wandb
from wandb.util import get_core_path

from data_pipeline.core.system import signals_blocked, unset_empty_variables, variable
from trainer.fault_tolerance.preemption import WARNINGS
from trainer.observability.tracking import StepPictures, TrackingConfig
from trainer.run_dir import RunDir, write_atomically

logger = logging.getLogger(__name__)

INIT_SECONDS = 30.0  # the time limit for the first answer of W&B's server
FINISH_SECONDS = 20.0  # the time limit for sending the rest at the end; W&B itself has none
_READ_SECONDS = 60
_HEAD_CHARACTERS = 80  # the beginning of a line from W&B's reader, which contains its type


class WandbRun:
    """The W&B run of a training. No method raises: the first failure is logged and ends W&B for this process."""

    def __init__(self, run_dir: RunDir, config: TrackingConfig, settings: Mapping[str, Any]) -> None:
        """Start the W&B run or resume it, and send the steps of metrics.jsonl that it lacks."""
        _prepare()
        self._run_dir, self._config, self._settings = run_dir, config, dict(settings)
        self._run: wandb.Run | None = None
        self._has_failed = False
        self._last_step = -1  # the last step that W&B has; step 0 is the untrained network
        if not run_dir.wandb_run_id.is_file():
            write_atomically(run_dir.wandb_run_id, secrets.token_hex(4) + "\n")
        if not (_mode(config) == "online" and self._start_online()):
            self._guard(lambda: self._start("offline"))
        for entry in run_dir.read_metrics():
            self.log(entry["step"], {name: value for name, value in entry.items() if name != "step"})

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send metrics. Do nothing if W&B has this step already, because the run went back to a checkpoint."""
        if self._run is not None and not self._has_failed and step > self._last_step:
            run, self._last_step = self._run, step
            self._guard(lambda: run.log(dict(metrics), step=step))

    def log_pictures(self, step: int, pictures: StepPictures) -> None:
        """Send pictures. Call it after `log` of the same step."""
        if self._run is not None and not self._has_failed and step >= self._last_step:
            run = self._run
            self._guard(lambda: run.log(_media(pictures), step=step))

    def close(self, *, failed: bool = False) -> None:
        """End the run, which W&B shows as failed if `failed`.

        Steps that the server has not received after `FINISH_SECONDS` stay in RUN_DIR/wandb.
        """
        if self._run is not None:
            run, self._run = self._run, None
            exit_code = 1 if failed else 0
            going_on = "the missing steps are in RUN_DIR/wandb, for `wandb sync`"
            self._guard(lambda: run.finish(exit_code=exit_code), going_on=going_on)

    def _start(self, mode: Literal["online", "offline"]) -> None:
        if mode == "offline":
            self._last_step = _last_offline_step(self._run_dir)
        # The process of W&B inherits the blocked signals, so a warning to all processes of a job does not end it.
        with signals_blocked(WARNINGS):
            self._run = _open(
                self._run_dir,
                self._config,
                mode=mode,
                name=self._run_dir.path.name,
                group=self._config.group or self._settings["name"],
                job_type="train",
                tags=self._config.tags,
                config=self._settings,
            )
        if mode == "online":  # after a resume, the server knows the last step
            self._last_step = self._run.starting_step - 1
        else:
            self._log_sync_command()

    def _log_sync_command(self) -> None:
        """Log the place of the files of this run, and the command that sends them to the server."""
        folder = self._run_dir.path.absolute() / "wandb"
        found = sorted(folder.glob("offline-run-*"))
        where = shlex.quote(str(found[0])) if len(found) == 1 else f"{shlex.quote(str(folder))}/offline-run-*"
        said = "Weights & Biases is offline and writes to %s; on a machine that reaches the server, run: wandb sync %s"
        logger.info(said, folder, where)

    def _start_online(self) -> bool:
        try:
            self._start("online")
        except Exception as error:
            logger.warning("Weights & Biases does not answer (%s); going on offline", " ".join(str(error).split()))
            if wandb.setup().most_recent_active_run is None:  # teardown would end the run of a notebook
                wandb.teardown()  # otherwise its process blocks the run's id for the next start
            return False
        return True

    def _guard(self, call: Callable[[], None], *, going_on: str = "going on with metrics.jsonl alone") -> None:
        """Call W&B. Log the first failure, after which the run gets nothing more and is only closed."""
        try:
            call()
        except Exception as error:
            if not self._has_failed:
                logger.warning("Weights & Biases failed (%s); %s", error, going_on)
            self._has_failed = True


def _prepare() -> None:
    """Call this before any other call of W&B. Otherwise its library tells its server about itself, also offline."""
    unset_empty_variables("WANDB_")
    with contextlib.suppress(ImportError):  # a later version may have it elsewhere
        from wandb.analytics.opentelemetry.opentelemetry_proxy import disable

        disable()


def _open(
    run_dir: RunDir,
    tracking: TrackingConfig,
    *,
    mode: Literal["online", "offline"],
    measures_machine: bool = True,
    **facts: Any,
) -> wandb.Run:
    """Open the W&B run of a run directory in a new process of W&B, or resume it. `facts` are those to show with it.

    The W&B process of a parent, such as a notebook or a test, would outlive a run that is killed, and block the run's
    id for the next start.
    """
    os.environ.pop("WANDB_SERVICE", None)
    settings = wandb.Settings(
        silent=True,
        init_timeout=INIT_SECONDS,
        finish_timeout=FINISH_SECONDS,
        finish_timeout_raises=True,
        reinit="create_new",  # otherwise `wandb.init` returns or ends an open run, such as that of a notebook
        x_disable_stats=not measures_machine,
    )
    return wandb.init(
        dir=run_dir.path,
        project=tracking.wandb_project,
        id=_run_id(run_dir),
        mode=mode,
        resume="allow",
        settings=settings,
        **facts,
    )


def _run_id(run_dir: RunDir) -> str:
    return run_dir.wandb_run_id.read_text(encoding="utf-8").strip()


def _media(pictures: StepPictures) -> dict[str, object]:
    images = {name: wandb.Image(array_HWC) for name, array_HWC in pictures.images.items()}
    return images | {name: wandb.Histogram(values.tolist()) for name, values in pictures.histograms.items()}


def _mode(config: TrackingConfig) -> Literal["online", "offline"]:
    if variable("WANDB_MODE") == "offline" or config.wandb == "offline":
        return "offline"
    if config.wandb == "online":
        return "online"
    try:
        return "online" if wandb.login(prompt=False) else "offline"
    except Exception as error:  # W&B raises many kinds of errors if no server answers
        logger.warning("Weights & Biases does not accept the login (%s); going on offline", error)
        return "offline"


def _last_offline_step(run_dir: RunDir) -> int:
    """Return the last step in W&B's files; -1 if there is none. The newest file may have no step yet."""
    files = run_dir.path.glob(f"wandb/*run-*/run-{_run_id(run_dir)}.wandb")  # online starts too
    for path in sorted(files, key=lambda path: path.stat().st_mtime, reverse=True):
        if steps := offline_steps(path):
            return steps[-1]
    return -1


def summarize(run_dir: RunDir, config: TrackingConfig, numbers: Mapping[str, float]) -> None:
    """Write numbers from after training, such as probe accuracies, into the summary of the W&B run.

    Call it if `uses_wandb`. Does nothing if there is no W&B run. A failure is only logged.
    """
    if not run_dir.wandb_run_id.is_file():
        return
    _prepare()
    try:
        with _open(run_dir, config, mode=_mode(config), measures_machine=False) as run:
            run.summary.update(dict(numbers))
    except Exception as error:
        logger.warning("Weights & Biases did not accept the summary (%s)", error)


def offline_steps(path: Path) -> list[int]:
    """Return the steps in a file of RUN_DIR/wandb, which may be incomplete."""
    command = [get_core_path(), "leet", "inspect", "-no-observability", "-json", "-run-file", str(path)]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", check=True, timeout=_READ_SECONDS)
    lines = (line for line in done.stdout.splitlines() if '"type":"history"' in line[:_HEAD_CHARACTERS])
    return [int(json.loads(line)["history"]["item"]["_step"]) for line in lines]
