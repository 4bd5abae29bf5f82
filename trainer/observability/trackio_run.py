"""Write the metrics of a run to Trackio, a tracker without a server, whose failures do not harm training.

Trackio keeps its metrics in a SQLite file of the user (TRACKIO_DIR), and `trackio show` draws them. A run directory has
one Trackio run for all ranks and all restarts; RUN_DIR/trackio_run keeps its name. Guarantees: Trackio gets each step
once. The steps that a killed process had not written come from metrics.jsonl with the next start.
"""

from __future__ import annotations

import contextlib
import contextvars
import importlib
import io
import logging
import secrets
from collections.abc import Callable, Mapping
from typing import Any

from trainer.observability.tracking import TrackingConfig
from trainer.run_dir import RunDir, write_atomically

logger = logging.getLogger(__name__)


class TrackioRun:
    """The Trackio run of a training. No method raises: the first failure is logged, and ends Trackio here."""

    def __init__(self, run_dir: RunDir, config: TrackingConfig, *, name: str, settings: Mapping[str, Any]) -> None:
        """Start the run or resume it, and send the steps of metrics.jsonl that it lacks."""
        self._run: Any = None
        self._has_failed = False
        self._last_step = -1
        self._context = contextvars.copy_context()  # so that Trackio's present run of a notebook stays as it is
        self._guard(lambda: self._start(run_dir, config, name, dict(settings)))
        for entry in run_dir.read_metrics():
            self.log(entry["step"], {key: value for key, value in entry.items() if key != "step"})

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send metrics. Do nothing if Trackio has this step already, because the run went back to a checkpoint."""
        if self._run is not None and not self._has_failed and step > self._last_step:
            run, self._last_step = self._run, step
            self._guard(lambda: run.log(dict(metrics), step=step))

    def close(self) -> None:
        if self._run is not None:
            self._run = None
            self._guard(lambda: importlib.import_module("trackio").finish())  # that of the run prints at the exit

    def _start(self, run_dir: RunDir, config: TrackingConfig, name: str, settings: dict[str, Any]) -> None:
        trackio = importlib.import_module("trackio")
        storage = importlib.import_module("trackio.sqlite_storage").SQLiteStorage
        kept = run_dir.path / "trackio_run"
        if not kept.is_file():  # directories of one name must not share a run
            write_atomically(kept, f"{run_dir.path.name}-{secrets.token_hex(3)}\n")
        run_name = kept.read_text(encoding="utf-8").strip()
        found = storage.get_max_step_for_run(config.wandb_project, run_name)
        self._last_step = -1 if found is None else found
        self._run = trackio.init(
            project=config.wandb_project,
            name=run_name,
            group=config.group or name,
            config=settings,
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def _guard(self, call: Callable[[], None]) -> None:
        """Call Trackio without its messages. Log the first failure, after which the run is only closed."""
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                self._context.run(call)
        except ModuleNotFoundError:
            logger.warning(
                "tracking.trackio needs Trackio, which is not installed; going on without it "
                "(`pip install -e '.[trackio]'`)"
            )
        except Exception as error:
            if not self._has_failed:
                logger.warning("Trackio failed (%s); going on with metrics.jsonl", " ".join(str(error).split()))
            self._has_failed = True
