"""The way of docs/getting-started.md on macOS, as far as Linux can stand in for it (`tests.emulated_mac`).

Commands start in new interpreters, because a nursery imports its modules before anything is taken away.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.emulated_mac import LACKS, ROOT, environment
from tests.tiny_data import write_tiny_pair
from trainer.run_dir import RunDir

TRAIN = ["launch/train.py", "--config", "debug:image"]
SETTINGS = ["data.placement=stream", "data.num_workers=2", "tracking.wandb=disabled", "global_batch_size=32"]
EPOCHS = 8
_COMMANDS = """
import json, runpy, sys

for sys.argv in json.loads(sys.argv[1]):
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def run(environ: Mapping[str, str], *words: str | Path) -> str:
    """Return what a command prints, or fail with it."""
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=ROOT,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        timeout=300,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def run_all(environ: Mapping[str, str], *commands: Sequence[str | Path]) -> str:
    """Return what several commands print, which run after each other in one interpreter."""
    return run(environ, "-c", _COMMANDS, json.dumps([list(map(str, command)) for command in commands]))


def numbers(run_dir: Path) -> list[dict[str, Any]]:
    """Return the metrics of each step that do not depend on the machine; a step that was taken twice counts once."""
    steps = {}
    for entry in map(json.loads, RunDir(run_dir).metrics.read_text().splitlines()):
        steps[entry["step"]] = {
            name: value for name, value in entry.items() if not name.startswith(("time_", "perf/", "memory/"))
        }
    return list(steps.values())


def stop_at_the_first_checkpoint(environ: Mapping[str, str], *words: str | Path) -> str:
    """Press Ctrl-C in the terminal of a training, and return what it prints."""
    command = [sys.executable, *map(str, words)]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        start_new_session=True,
    ) as training:
        assert training.stdout is not None
        text = ""
        for line in training.stdout:
            text += line
            if line.startswith("checkpoint of step 4"):
                os.killpg(training.pid, signal.SIGINT)
    return text


def test_the_emulation_takes_away_what_linux_has_now(tmp_path: Path) -> None:
    lacks = {module.__name__: names for module, names in LACKS.items()}
    code = (
        "import importlib, json, multiprocessing, os, pathlib, sys\n"
        "lacks = json.loads(sys.argv[1])\n"
        "found = {module: dir(importlib.import_module(module)) for module in lacks}\n"
        "print([name for module, names in found.items() for name in names if name.startswith(tuple(lacks[module]))])\n"
        "print(sys.platform, multiprocessing.get_start_method())\n"
        "print(any(pathlib.Path(path).exists() for path in ('/proc/stat', '/sys', '/dev/shm')))\n"
    )
    said = run(environment(tmp_path / "site"), "-c", code, json.dumps(lacks))
    assert said.splitlines() == ["[]", "darwin spawn", "False"]


def read_out(run_dir: Path) -> list[Any]:
    """Return what the probe has found: both labels, of the first encoder and of the trained one."""
    found = [json.loads(path.read_text()) for path in sorted(run_dir.glob("probes/step_*/*.json"))]
    return [(each["label"], each["checkpoint_step"], each["linear"], each["knn"]) for each in found]


@pytest.mark.slow
def test_a_mac_builds_trains_stops_goes_on_and_reads_out_as_linux_does(tmp_path: Path) -> None:
    linux, mac = {**os.environ, "PYTHONPATH": str(ROOT)}, environment(tmp_path / "site")
    on_linux, on_mac, data, built = (tmp_path / name for name in ("on_linux", "on_mac", "data", "built_on_linux"))
    build = ["data_pipeline", "build", "procedural_digits", "--samples-per-shard", "64", "--workers", "2"]
    run(mac, "-m", *build, "--limit", "128", "--out", data / "train")
    run_all(
        mac,
        [*build, "--limit", "64", "--split", "test", "--out", data / "test"],
        ["data_pipeline", "verify", data / "train"],
        ["data_pipeline", "preview", data / "train", "--out", tmp_path / "grid.png"],
    )

    settings = [f"data.train_dir={data / 'train'}", f"data.test_dir={data / 'test'}", *SETTINGS, f"num_epochs={EPOCHS}"]
    train = [*TRAIN, *(word for setting in settings for word in ("--set", setting))]
    stopped = stop_at_the_first_checkpoint(mac, *train, "--run-dir", on_mac)
    assert "as Ctrl-C asked; start it again and it goes on from there" in stopped
    assert "Traceback" not in stopped
    run(mac, *train, "--run-dir", on_mac)
    said = run_all(
        mac,
        ["trainer.probe", on_mac, "--untrained"],
        ["trainer.analyze", "views", on_mac],
        ["trainer.export", on_mac, "--out", tmp_path / "encoder.safetensors"],
        ["trainer.report", on_mac],
        ["launch.status", on_mac],
    )
    assert str(on_mac / "report.html") in said
    assert "finished" in said

    run_all(
        linux,
        [*build, "--limit", "128", "--out", built],
        ["launch.train", *train[1:], "--run-dir", on_linux],
        ["trainer.probe", on_linux, "--untrained"],
    )
    files = [{path.name: path.read_bytes() for path in folder.iterdir()} for folder in (data / "train", built)]
    assert len(files[0]) > 4
    assert files[0] == files[1]
    assert len(numbers(on_mac)) == 4 * EPOCHS
    assert numbers(on_mac) == numbers(on_linux)
    assert len(read_out(on_mac)) == 4
    assert read_out(on_mac) == read_out(on_linux)


@pytest.mark.ranks
@pytest.mark.slow
def test_ranks_of_a_mac_read_the_data_each_for_itself(tmp_path: Path) -> None:
    data = write_tiny_pair(tmp_path / "data", num_train=64, num_test=16)
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *TRAIN]
    for setting in (
        f"data.train_dir={data / 'train'}",
        f"data.test_dir={data / 'test'}",
        *SETTINGS[2:4],
        "num_epochs=1",
    ):
        words += ["--set", setting]
    said = run(environment(tmp_path / "site"), *words, "--run-dir", str(tmp_path / "run"))
    assert "placement host (" in said
    assert "read once for all ranks" not in said
