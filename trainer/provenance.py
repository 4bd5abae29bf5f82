"""Record the origin of the numbers of a run: code, command, machine, versions, data."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import platform
import subprocess
import sys
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from data_pipeline.core.arguments import SCRIPT_PREFIX
from data_pipeline.core.kinds import OF_THIS_PROJECT
from data_pipeline.core.system import PROC, num_cores, variable
from trainer.checkpoint.restore import Restored
from trainer.config import RunConfig
from trainer.data import Manifests
from trainer.distributed.collectives import world_size
from trainer.open_settings import decisions_to_record
from trainer.own_code import RECORDED_CODE, hash_of_files, hashes_of_code
from trainer.run_dir import RunDir, write_json

logger = logging.getLogger(__name__)

REPOSITORY = Path(__file__).resolve().parent.parent
RECORDED_CONFIG = "config"
RECORDED_NUM_SAMPLES = "num_train_samples"
RECORDED_NUM_TEST_SAMPLES = "num_test_samples"
RECORDED_LABELS = "labels"  # that a probe can read: those of both sets
SNAPSHOT_FILE = "snapshot.json"  # beside the packages in a snapshot of the code
PACKAGES = ("torch", "torchvision", "numpy", "pillow", "webdataset", "wandb", "submitit", "pydantic")


@dataclass(frozen=True)
class Code:
    """The running code: its commit, the uncommitted changes (both None without git), and the hash of a snapshot.

    The changes begin with a line for each file of the packages that git does not track: its name and a hash.
    """

    git_commit: str | None = None
    git_diff: str | None = None
    snapshot_sha256: str | None = None


def this_code() -> Code:
    """Return the running code. A snapshot records its origin, because the repository may have changed since.

    Logs a warning if git does not read the repository. A wheel has none, also if it is installed inside another one.
    """
    snapshot = REPOSITORY / SNAPSHOT_FILE
    if snapshot.is_file():
        return Code(**json.loads(snapshot.read_text(encoding="utf-8")))
    if (REPOSITORY / ".git").exists():
        try:
            diff = _git("diff", "--no-ext-diff", "--no-textconv", "--no-color", "HEAD")
            names = _git("ls-files", "-z", "--others", "--exclude-standard", *sorted(OF_THIS_PROJECT)).split("\0")[:-1]
            untracked = (f"untracked {name} {hash_of_files({name: REPOSITORY / name})}\n" for name in names)
            return Code(git_commit=_git("rev-parse", "HEAD").strip(), git_diff="".join(untracked) + diff)
        except (OSError, subprocess.CalledProcessError) as error:
            said = " ".join(str(getattr(error, "stderr", error)).split())
            logger.warning("the commit of the code is not recorded: git cannot read %s (%s)", REPOSITORY, said)
    return Code()


def write_provenance(
    run_dir: RunDir,
    config: RunConfig,
    manifests: Manifests,
    *,
    command: str,
    restored: Restored,
) -> None:
    """Write provenance.json; a restart keeps the facts of the first start and adds itself to `starts`.

    A run gets a random id once. If provenance.json was lost, the run keeps the id of the checkpoint `restored`.

    Each start has the hashes of its manifests. The hashes at the top level, the config and the numbers of samples
    belong to the newest start.
    """
    earlier = run_dir.read_provenance()
    for name in ("finished_step", "total_wall_seconds"):
        earlier.pop(name, None)  # a finished run goes on if new data make it longer
    code = this_code()
    start = {
        **_facts_of_start(code, command),
        "start_step": restored.step,
        "world_size": world_size(),
        "slurm_job_id": variable("SLURM_JOB_ID"),
        "slurm_restart_count": int(variable("SLURM_RESTART_COUNT") or 0) if variable("SLURM_JOB_ID") else None,
        **manifests.identity.model_dump(),
        **({RECORDED_CODE: own} if (own := hashes_of_code(config, manifests.datasets)) else {}),
    }
    if code.git_diff:
        run_dir.path.joinpath("uncommitted.diff").write_text(code.git_diff, encoding="utf-8")
    first = earlier or {
        **{name: start[name] for name in ("git_commit", "started_at", "host")},
        **_facts_of_machine(),
    }
    steps_per_epoch = config.data.num_steps_per_epoch(manifests.train.num_samples, config.global_batch_size)
    now = manifests.identity.model_dump() | {
        "run_id": earlier.get("run_id") or uuid.uuid4().hex,
        RECORDED_CONFIG: config.model_dump(mode="json"),
        RECORDED_NUM_SAMPLES: manifests.train.num_samples,
        RECORDED_NUM_TEST_SAMPLES: manifests.test.num_samples,
        RECORDED_LABELS: [name for name in manifests.probed.labels if name in manifests.test.labels],
        "num_steps": config.num_epochs * steps_per_epoch,
        "starts": [*earlier.get("starts", []), start],
    }
    write_json(run_dir.provenance, first | now | decisions_to_record(config, manifests.train))


def origin_of_numbers() -> dict[str, Any]:
    """Return command, time, code, machine and versions of this process, as a provenance.json holds them."""
    return _facts_of_start(this_code(), command_line()) | _facts_of_machine()


def _facts_of_start(code: Code, command: str) -> dict[str, Any]:
    return {
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "host": platform.node(),
        "git_commit": code.git_commit,
        "snapshot_sha256": code.snapshot_sha256,
        "git_diff_sha256": hashlib.sha256(code.git_diff.encode()).hexdigest() if code.git_diff else None,
    }


def _facts_of_machine() -> dict[str, Any]:
    return {
        "cpu": cpu_name(),
        "num_cpus": num_cores(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "versions": {"python": platform.python_version(), **{name: metadata.version(name) for name in PACKAGES}},
    }


def facts_of_starts(provenance: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the facts of each start of a run: command, code, number of ranks, and what holds for all starts."""
    return [{**provenance, **start} for start in provenance.get("starts", ())] or [provenance]


def train_sets(config: RunConfig, provenance: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the hashes of the train sets on which a run took its steps, oldest first; empty if none is recorded.

    Of a mixture, those of the source that probes read. A start counts if a later one did not take up an earlier step.
    """
    newest_first = [_train_set(config, provenance)]
    end_step = math.inf  # from which later starts took the steps
    for start in reversed(provenance.get("starts", ())):
        if start["start_step"] < end_step:
            newest_first.append(_train_set(config, start))
            end_step = start["start_step"]
    known = [recorded for recorded in reversed(newest_first) if recorded is not None]
    return tuple(recorded for recorded, _ in groupby(known))


def _train_set(config: RunConfig, facts: Mapping[str, Any]) -> str | None:
    sha256: str | None = facts.get("train_manifest_sha256")
    if config.data.mixture is not None:
        sha256 = facts.get("train_sources", {}).get(config.data.probed_name)
    return sha256


def add_to_provenance(run_dir: RunDir, **facts: Any) -> None:
    """Write more facts into provenance.json."""
    write_json(run_dir.provenance, run_dir.read_provenance() | facts)


def command_line() -> str:
    """Return the command of this process as a user would type it."""
    script = Path(sys.argv[0]).name
    if script.startswith(SCRIPT_PREFIX):
        return " ".join([script, *sys.argv[1:]])
    return " ".join(["python", *sys.orig_argv[1:]])


def cpu_name() -> str:
    """Return the processor's model name, or its architecture if the system has no name."""
    lines = (PROC / "cpuinfo").read_text(encoding="utf-8").splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _git(*arguments: str) -> str:
    """Return the output of a git command in the repository of this code.

    No variable of git counts, and the repository may belong to another user, whose code runs here anyway.
    """
    return subprocess.run(
        ["git", "-c", f"safe.directory={REPOSITORY}", *arguments],
        cwd=REPOSITORY,
        env={name: value for name, value in os.environ.items() if not name.startswith("GIT_")},
        capture_output=True,
        check=True,
        encoding="utf-8",
        errors="replace",
    ).stdout
