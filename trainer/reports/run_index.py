"""Keep the checked metrics of runs in the user's cache directory, so that the next report need not check them again.

Every number of every line of a metrics.jsonl is checked, which takes most of the time of a report on hundreds of runs.

Invariant: the index saves time and changes nothing. An entry counts only as long as its file has the size, the time of
change and the inode from which the entry was made. Anything else, such as a damaged entry or a directory that cannot be
written, means that the run's own file is read. The whole directory may be removed at any time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from data_pipeline.core.environment import home_directory, variable
from trainer.records import Metrics, read_metrics

_PLACE: Final = "feature-dropout/report"
_VERSION: Final = 1  # of the entries, and of the checks that made them
_SETTLED_SECONDS: Final = 2.0  # a file that was changed so recently may change again without another time of change
_KEPT_SECONDS: Final = 30 * 24 * 3600.0
_FEWEST_BYTES: Final = 10_000  # of a metrics.jsonl; a smaller one is read as fast as its entry


def default_directory() -> Path | None:
    """Return the directory of the index: feature-dropout/report in the user's cache directory; None without a home."""
    if cache := variable("XDG_CACHE_HOME"):
        return Path(cache) / _PLACE
    home = home_directory()
    return None if home is None else home / ".cache" / _PLACE


@dataclass(frozen=True)
class RunIndex:
    """The index in `directory`; None means to read every file."""

    directory: Path | None

    def read_metrics(self, path: Path) -> Metrics:
        """Return what `trainer.records.read_metrics` returns for this file."""
        stamp = _stamp(path)
        if self.directory is None or stamp is None or stamp[0] < _FEWEST_BYTES:
            return read_metrics(path)
        entry = self.directory / f"{hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:40]}.json"
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            return _metrics_of(json.loads(entry.read_bytes()), stamp)
        metrics = read_metrics(path)
        is_settled = time.time() - stamp[1] / 1e9 > _SETTLED_SECONDS
        if is_settled and not metrics.problems and _stamp(path) == stamp:
            with contextlib.suppress(OSError):
                _write(entry, {"version": _VERSION, "stamp": stamp, **_columns_of(metrics)})
        return metrics

    def remove_old(self) -> None:
        """Remove the entries that were made a month ago or earlier."""
        if self.directory is not None:
            for entry in self.directory.glob("*.json"):
                with contextlib.suppress(OSError):
                    if time.time() - entry.stat().st_mtime > _KEPT_SECONDS:
                        entry.unlink()


def _stamp(path: Path) -> list[int] | None:
    """Return size, time of change (ns) and inode of a file; None if there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return [status.st_size, status.st_mtime_ns, status.st_ino]


def _columns_of(metrics: Metrics) -> dict[str, Any]:
    """Return the entries by metric, which takes a third of the space: a list with None for each step without it."""
    names = dict.fromkeys(name for entry in metrics.entries for name in entry)
    return {"columns": {name: [entry.get(name) for entry in metrics.entries] for name in names}}


def _metrics_of(value: dict[str, Any], stamp: list[int]) -> Metrics:
    """Return the metrics of an entry. Raises `ValueError` if it was made from another state of the file."""
    if value["version"] != _VERSION or value["stamp"] != stamp:
        raise ValueError("the file has changed")
    names = list(value["columns"])
    rows = zip(*value["columns"].values(), strict=True)
    return Metrics([{name: one for name, one in zip(names, row, strict=True) if one is not None} for row in rows], ())


def _write(entry: Path, value: dict[str, Any]) -> None:
    """Write an entry. After a power cut it may be damaged, and is then made again."""
    entry.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    partial = entry.with_suffix(f".{os.getpid()}.partial")
    try:
        partial.write_text(json.dumps(value, separators=(",", ":")), encoding="utf-8")
        partial.replace(entry)
    finally:
        partial.unlink(missing_ok=True)
