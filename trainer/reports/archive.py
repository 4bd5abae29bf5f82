"""Pack what was measured in runs into one small file, without checkpoints.

The file is a tar of the configs, the provenance, the logs and the results. `mkdir -p runs && tar -xf FILE -C runs`
makes run directories of it on any machine. Reports read them, `launch/slurm.py --study` counts the finished ones as
done, and `trainer.probe --missing` counts the probed ones.

Guarantees: the same runs give the same bytes. No file of code, weights or pictures is packed.
"""

from __future__ import annotations

import io
import json
import lzma
import tarfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from data_pipeline.core.errors import UserError
from trainer.run_dir import RunDir, open_run, write_atomically

ARCHIVE_SUFFIX: Final = ".tar.xz"
_PACKED: Final = ("config.json", "provenance.json", "probes/*.json", "probes/step_*/*.json", "analysis/*.json")
_LOG: Final = "metrics.jsonl"  # most of the bytes; curves over the training need it
_ONLINE: Final = "probe/"  # begins the names of what the online probe logs


def write_archive(paths: Sequence[Path], out: Path, *, with_logs: bool = True) -> int:
    """Pack the results of finished runs, and return their number. Replaces an existing file.

    paths: run directories. Each is packed as STUDY/RUN, by the last two parts of its path.
    with_logs: whether to pack all of metrics.jsonl. If not, only its online probes are packed, and a report has no
        losses and no speed.

    Raises `UserError` if no run is finished, if two runs would have one name, or if `out` does not end in .tar.xz.
    """
    if not out.name.endswith(ARCHIVE_SUFFIX) or out.is_dir():
        raise UserError(f"cannot pack results into {out}: pass the name of a file that ends in {ARCHIVE_SUFFIX}")
    finished = [run for run in map(open_run, paths) if "finished_step" in run.read_provenance()]
    if not finished:
        raise UserError(f"none of the {len(paths)} run(s) is finished, so there are no results to pack")
    names = {run.path: "/".join(run.path.resolve().parts[-2:]) for run in finished}
    name, count = Counter(names.values()).most_common(1)[0]
    if count > 1:
        raise UserError(f"{count} of the runs would be called {name}; pack them into files of their own")
    patterns = (*_PACKED, _LOG) if with_logs else _PACKED
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for run in sorted(finished, key=lambda run: names[run.path]):
            for path in _files(run, patterns):
                _add(tar, f"{names[run.path]}/{path.relative_to(run.path)}", path.read_bytes())
            if not with_logs and (online := _online_probes(run)):
                _add(tar, f"{names[run.path]}/{_LOG}", online)
    write_atomically(out, lzma.compress(content.getvalue(), preset=6))
    return len(finished)


def _files(run: RunDir, patterns: Sequence[str]) -> list[Path]:
    return sorted(path for pattern in patterns for path in run.path.glob(pattern) if path.is_file())


def _online_probes(run: RunDir) -> bytes:
    """Return the lines of metrics.jsonl with online probes, without all else; nothing if there are none."""
    lines = []
    for entry in run.read_metrics():
        probes = {name: value for name, value in entry.items() if name.startswith(_ONLINE)}
        if probes:
            lines.append(json.dumps({"step": entry["step"], **probes}) + "\n")
    return "".join(lines).encode()


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    """Add a file without its times and its owner, so that equal results give equal bytes."""
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))
