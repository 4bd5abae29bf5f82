"""Several runs probed at the same time have the results of one process, and do one another no harm."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.nursery import PythonProcess, run_python
from tests.processes import kill_tree
from tests.tiny_data import write_tiny_pair
from tests.trainer.probed_runs.test_probe_command import call, make_run
from trainer.config import read_run_config
from trainer.data import read_manifests
from trainer.probes.result import read_result
from trainer.run_dir import RunDir, write_json

ROOT = Path(__file__).parents[3]
ENVIRON = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
SEEDS = (0, 1, 2)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_pair(tmp_path_factory.mktemp("data"), num_train=48, num_test=16)


def make_study(home: Path, data: Path) -> list[RunDir]:
    probe = {"num_epochs": 2, "views": "none"}
    return [make_run(home / f"run{seed}", data, name=f"run{seed}", seed=seed, probe=probe) for seed in SEEDS]


def probe(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return run_python([sys.executable, "-m", "trainer.probe", *words], cwd=ROOT, env=ENVIRON)


def files_of(run_dir: RunDir) -> dict[str, object]:
    """Return the files of the probes by name: bytes of heads, and results without the seconds that they took."""
    found: dict[str, object] = {}
    for path in sorted(run_dir.all_probes.rglob("*.*")):
        name = str(path.relative_to(run_dir.all_probes))
        found[name] = json.loads(path.read_text()) if path.suffix == ".json" else path.read_bytes()
        if isinstance(value := found[name], dict):
            value.pop("seconds", None)
    return found


@pytest.mark.process
def test_runs_probed_at_the_same_time_have_the_results_of_one_process(data: Path, tmp_path: Path) -> None:
    options = ["--untrained", "--pixels"]
    for way in ("alone", "together"):
        make_study(tmp_path / way, data)
    alone = probe(tmp_path / "alone", *options)
    together = probe(tmp_path / "together", *options, "--at-a-time", "2")
    assert alone.returncode == together.returncode == 0, together.stderr
    for seed in SEEDS:
        in_one, in_several = (RunDir(tmp_path / way / f"run{seed}") for way in ("alone", "together"))
        assert files_of(in_one) == files_of(in_several)
        assert len(files_of(in_one)) == 10
    lines = [sorted(done.stdout.replace("/alone/", "/together/").splitlines()) for done in (alone, together)]
    assert lines[0] == lines[1]
    (shown,) = [line for line in together.stderr.splitlines() if "probed runs: 3/3" in line]
    assert shown.split(", ")[-1] in {"run0", "run1", "run2"}
    assert "probe of step" not in together.stderr


@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_process_outlives_the_command(number: signal.Signals, data: Path, tmp_path: Path) -> None:
    study = make_study(tmp_path / "study", data)
    words = [sys.executable, "-m", "trainer.probe", str(tmp_path / "study"), "--epochs", "100000", "--at-a-time", "2"]
    process = PythonProcess(words, cwd=ROOT, env=ENVIRON, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 120
        while len(found := workers_of(process.pid)) < 2:
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.1)
        process.send_signal(number)
        process.wait(timeout=60)
        if number == signal.SIGINT:
            assert process.returncode == 130
        while any(Path(f"/proc/{pid}").exists() for pid in found):
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        kill_tree(process)
    assert not any(run_dir.probe_steps() for run_dir in study)


def workers_of(pid: int) -> list[int]:
    """Return the processes that the server of a command's processes has forked."""

    def children(of: int) -> list[int]:
        path = Path(f"/proc/{of}/task/{of}/children")
        return [int(word) for word in path.read_text().split()] if path.exists() else []

    return [worker for server in children(pid) for worker in children(server)]


@pytest.mark.process
def test_a_process_that_dies_and_a_run_that_cannot_be_probed_are_named_and_cost_only_their_own_run(
    data: Path, tmp_path: Path
) -> None:
    study = make_study(tmp_path / "study", data)
    shutil.rmtree(study[1].checkpoints)
    words = [sys.executable, "-m", "trainer.probe", str(tmp_path / "study"), "--epochs", "100", "--at-a-time", "1"]
    pipe = subprocess.PIPE
    process = PythonProcess(words, cwd=ROOT, env=ENVIRON, stdout=pipe, stderr=pipe, text=True)
    try:
        deadline = time.monotonic() + 120
        while not (found := workers_of(process.pid)):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        os.kill(found[0], signal.SIGKILL)
        _, stderr = process.communicate(timeout=120)
    finally:
        kill_tree(process)
    assert process.returncode == 1
    named = [line for line in stderr.splitlines() if ": not probed: " in line]
    assert len(named) == 2
    assert named[0] == f"{study[0].path}: not probed: its process has ended with status -9"
    assert named[1].startswith(f"{study[1].path}: not probed: ")
    assert stderr.splitlines()[-1] == "error: 2 of 3 run(s) were not probed"
    assert [run_dir.probe_steps() for run_dir in study] == [[], [], [10]]


@pytest.mark.slow
def test_what_is_missing_is_probed_and_nothing_else(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    study = make_study(tmp_path / "study", data)
    call(monkeypatch, study[0].path, "--untrained")
    call(monkeypatch, study[1].path)
    capsys.readouterr()

    def probed(*options: str) -> set[str]:
        """Probe what is missing, and return the names of the runs that got results."""
        before = {path: path.stat().st_mtime_ns for path in (tmp_path / "study").rglob("probes/step_00000010/*.json")}
        call(monkeypatch, tmp_path / "study", "--missing", *options)
        after = {path: path.stat().st_mtime_ns for path in (tmp_path / "study").rglob("probes/step_00000010/*.json")}
        return {path.parts[-4] for path, at in after.items() if before.get(path) != at}

    assert probed() == {"run2"}
    assert "2 of 3 run(s) are probed already" in capsys.readouterr().out
    assert probed() == set()
    assert probed("--untrained") == {"run1", "run2"}
    (study[0].probes(10) / "base.json").write_text("{")
    assert probed("--untrained") == {"run0"}
    assert read_result(study[0].probes(10) / "base.json").checkpoint_step == 10
    study[2].latest.unlink()  # what is left of an unpacked run
    shutil.rmtree(study[2].checkpoints)
    write_json(study[2].provenance, {"finished_step": 10})
    assert probed("--all-steps") == set()
    os.utime(study[1].checkpoint(10), (time.time() + 60, time.time() + 60))  # trained again
    assert probed() == {"run1"}


def test_runs_that_are_probed_are_counted_without_their_data(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = shutil.copytree(data, tmp_path / "data")
    probed, one_label, unprobed, replaced, damaged = study = [
        make_run(tmp_path / "study" / name, home, name=name, probe={"num_epochs": 1, "views": "none"})
        for name in ("probed", "one_label", "unprobed", "replaced", "damaged")
    ]
    for run_dir in (probed, replaced, damaged):
        call(monkeypatch, run_dir.path)
    call(monkeypatch, one_label.path, "--label", "base")
    manifests = read_manifests(read_run_config(probed).data)
    for run_dir in study:
        write_json(run_dir.provenance, manifests.identity.model_dump() | {"finished_step": 10})
    write_json(replaced.provenance, {"train_manifest_sha256": "0" * 64, "finished_step": 10})
    (damaged.probes(10) / "overlay.json").write_text("{")
    shutil.rmtree(home)
    capsys.readouterr()
    with pytest.raises(SystemExit):
        call(monkeypatch, tmp_path / "study", "--missing")
    out, err = capsys.readouterr()
    assert "1 of 5 run(s) are probed already" in out
    named = {Path(line.partition(": not probed: ")[0]).name for line in err.splitlines() if ": not probed: " in line}
    assert named == {run_dir.path.name for run_dir in (one_label, unprobed, replaced, damaged)}
    call(monkeypatch, probed.path, one_label.path, "--missing", "--label", "base")
    assert "2 of 2 run(s) are probed already" in capsys.readouterr().out


def test_several_processes_are_not_started_under_torchrun(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    (run_dir, *_) = make_study(tmp_path, data)
    with pytest.raises(ValueError, match="--at-a-time starts processes itself, but torchrun has started several"):
        call(monkeypatch, run_dir.path, "--at-a-time", "2")
