"""The command for a GPU that is lent for a short time: every stage in tiny sizes."""

from __future__ import annotations

import dataclasses
import pickle
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks import gpu
from benchmarks.gpu_stages import gpu_tests, runs, session
from benchmarks.gpu_stages.kernel_trace import Kernel, busy_microseconds, summary
from benchmarks.gpu_stages.session import ROOT, Setting, read_record, run_stage
from data_pipeline.core.errors import UserError
from tests.nursery import PythonProcess, run_python
from trainer.run_dir import RunDir

# The runs of each stage that have code or data of their own. All other runs differ in settings only.
ONE_OF_EACH_KIND = {
    "kernels": ("matrix rates", "test_batch_norm.py"),
    "throughput-256": ("simclr-cifar10_digits-256-step-seed0",),
    "digits": ("viewmaker-cifar10_digits-seed2",),
    "ours": ("split-t0.2-200epochs-seed0",),
    "table2": ("audio-viewmaker-seed1337", "audio-spectral-noise-seed1337", "audio-waveform-spoken-seed1337"),
    "shapes": ("simclr-cifar10_shapes-seed0",),
    "digits-masked": (),
    "cifar10": (),
    "letters": ("viewmaker-cifar10_letters-masked-seed2",),
    "pairs": (),
    "firing": ("simclr-huang-cifar10-supervised-seed0",),
    "seeds": ("simclr-cifar10-seed1",),
    "tests": ("checkpoint/test_checkpoint",),
    "trace": ("simclr:digits, plain",),
    "throughput-1024": ("viewmaker-cifar10_digits-1024-both-seed2",),
    "throughput-4096": (),
    "peers": ("lightly's SimCLR", "the viewmaker in the original's order"),
}


def setting_at(directory: Path, seconds: float = 1200.0) -> Setting:
    cpu = torch.device("cpu")
    return Setting(cpu, directory / "out", directory / "data", is_tiny=True, ends_at=time.time() + seconds)


@pytest.fixture
def _commands_are_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "Popen", PythonProcess)


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.usefixtures("_commands_are_forked")
def test_a_dry_run_goes_through_every_stage(tmp_path: Path) -> None:
    pytest.importorskip("lightly")
    setting = dataclasses.replace(setting_at(tmp_path), only=sum(ONE_OF_EACH_KIND.values(), ()))
    gpu.run_session(gpu.STAGES, setting, commit="abc", is_isolated=False)
    record = read_record(setting.record)
    assert {name: one.failed for of in record.stages.values() for name, one in of.items() if not one.is_done} == {}
    assert [stage.name for stage in gpu.STAGES] == list(ONE_OF_EACH_KIND)
    assert list(record.stages) == [name for name, parts in ONE_OF_EACH_KIND.items() if parts]
    for name, parts in ONE_OF_EACH_KIND.items():
        assert all(any(part in found for found in record.stages[name]) for part in parts), name
    assert (record.sessions[0]["device"], record.sessions[0]["git_commit"]) == ("cpu", "abc")
    speed = record.stages["throughput-256"]["simclr-cifar10_digits-256-step-seed0: train"].values
    assert speed["speed"]["perf/samples_per_second"] > 0 < speed["planned_bytes"]
    assert len(record.stages["ours"]["split-t0.2-200epochs-seed0: train"].values["online_probe"]["probe/base/knn"]) > 1
    probe = record.stages["digits"]["viewmaker-cifar10_digits-seed2: probe with batch norm in train mode"].values
    assert {label: 0 <= result["linear"]["accuracy"] <= 1 for label, result in probe.items()} == {
        "base-batch_norm_train": True,
        "overlay-batch_norm_train": True,
    }
    assert len(record.stages["trace"]["simclr:digits, plain"].values["slowest"]) == 20


class StoppedAtACheckpoint(PythonProcess[bytes]):
    """A command whose time is over as soon as a file is there; later ones have all time."""

    file: Path | None = None

    def wait(self, timeout: float | None = None) -> int:
        if (file := StoppedAtACheckpoint.file) is None or "launch/train.py" not in str(self.args):
            return super().wait(timeout)
        while not file.exists() and self.poll() is None:
            time.sleep(0.01)
        StoppedAtACheckpoint.file = None
        raise subprocess.TimeoutExpired(self.args, 0)


@pytest.mark.process
def test_a_training_goes_on_in_the_next_session_and_only_then_is_read_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On another machine, which does not have the run, it is trained again to be read out."""
    steps = ("num_epochs=20", "checkpoint_every_steps=4", "probe.online_every_steps=null")
    monkeypatch.setattr(runs, "_TINY", (*runs._TINY, *steps))
    monkeypatch.setattr(session, "Popen", StoppedAtACheckpoint)
    (stage,) = (stage for stage in gpu.STAGES if stage.name == "cifar10")
    run, found = "simclr-cifar10-seed0", []
    setting = dataclasses.replace(setting_at(tmp_path), only=(run,))
    run_dir = RunDir(setting.out / "runs" / run)
    monkeypatch.setattr(StoppedAtACheckpoint, "file", run_dir.latest)
    for _ in range(2):
        found.append(run_stage(stage, setting, session=session.begin_session(setting, {}), is_isolated=True))
    assert found[0]["left for another session"] == [f"{run}: probe"]
    (stopped,) = found[0]["FAILED"]
    assert "stopped after step" in stopped
    assert found[1]["measured"] == [f"{run}: train", f"{run}: probe"]
    first, second = run_dir.read_provenance()["starts"]
    assert (first["start_step"], second["start_step"] > 0) == (0, True)
    record = read_record(setting.record)
    elsewhere = dataclasses.replace(setting, out=tmp_path / "elsewhere")
    of_stage = {f"{run}: train": record.stages["cifar10"][f"{run}: train"]}
    session.write_record(elsewhere.record, record.model_copy(update={"stages": {"cifar10": of_stage}}))
    again = run_stage(stage, elsewhere, session=session.begin_session(elsewhere, {}), is_isolated=True)
    assert (again["measured"], again["from an earlier session"]) == ([f"{run}: probe"], [f"{run}: train"])


def test_every_run_has_settings_that_its_config_takes_and_a_name_of_its_own(tmp_path: Path) -> None:
    setting = dataclasses.replace(setting_at(tmp_path), is_tiny=False)
    rows = [row for of_stage in (*runs.SPEEDS.values(), *runs.PAPERS.values()) for row in of_stage]
    made = [
        runs.Run(setting, "", row, one) for row in rows for is_other in (False, True) for one in row.configs(is_other)
    ]
    assert all(row.configs(False) for row in rows)
    assert len({run.name for run in made}) == len(made)
    for run in made:
        config = run.config()
        assert (config.precision, Path(config.data.probed_dir)) == ("bfloat16", setting.data / run.dataset / "train")


@pytest.mark.parametrize(
    ("status", "summary", "holds"),
    [
        (0, "2 passed in 1s", True),
        (1, "1 failed, 2 passed", False),
        (5, "no tests ran", False),
        (0, "3 skipped", False),
    ],
)
def test_tests_hold_if_one_ran_and_none_failed(
    status: int, summary: str, holds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = subprocess.CompletedProcess((), status, f"..\nnorm: 2.1 TB/s\nFAILED a::b - no\n{summary}\n", "")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    outcome = gpu_tests.run_tests(setting_at(Path()), "tests/test_house.py")
    assert outcome.holds is holds
    assert outcome.values == {"summary": summary, "failures": ["FAILED a::b - no"], "printed": ["norm: 2.1 TB/s"]}


@pytest.mark.process
def test_a_session_and_its_tests_need_no_package_beyond_setup_py() -> None:
    """Without lightly, its own measurement fails and costs no other. timm comes with pictures of torch on a GPU."""
    program = """
import importlib, sys
others = ["lightly", "open_clip", "deepspeed", "librosa", "moto", "s3fs", "onnx", "optuna", "tensorboard"]
sys.modules |= dict.fromkeys(others)  # as if they were not there
from benchmarks import gpu
from benchmarks.gpu_stages.gpu_tests import files_with_gpu_tests
for file in files_with_gpu_tests():
    importlib.import_module(file.removesuffix(".py").replace("/", "."))
"""
    done = run_python([sys.executable, "-c", program], cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")


def test_stages_can_be_sent_to_a_spawned_process() -> None:
    sent = pickle.loads(pickle.dumps((gpu.STAGES, setting_at(Path()))))
    assert [stage.name for stage in sent[0]] == [stage.name for stage in gpu.STAGES]


def test_stages_are_chosen_by_name_and_run_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [stage.name for stage in gpu.chosen("trace,tests")] == ["tests", "trace"]
    with pytest.raises(UserError, match='did you mean "tests"'):
        gpu.chosen("tetss")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="sees no GPU"):
        gpu.choose_gpu()


def test_a_trace_tells_the_slowest_kernels_and_the_idle_share() -> None:
    kernels = [Kernel("gemm", 0, 6), Kernel("add", 6, 7), Kernel("gemm", 9, 10)]
    found = summary(kernels, num_launches=3, num_steps=1)
    assert found["idle_share"] == 0.2
    assert busy_microseconds(kernels) == 8
    assert found["slowest"][0] == {"kernel": "gemm", "share": 0.875, "calls_a_step": 2, "microseconds_a_step": 7}
