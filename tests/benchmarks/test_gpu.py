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
from benchmarks.gpu_stages import checks, throughput
from benchmarks.gpu_stages.kernel_trace import Kernel, Trace, busy_microseconds, summary
from benchmarks.gpu_stages.peers import Form, Peer
from benchmarks.gpu_stages.session import Setting, read_record
from data_pipeline.core.errors import UserError
from tests.nursery import run_python
from tests.tiny_data import write_tiny_dataset, write_tiny_pair

# One measurement of each kind: of two recipes, three peers and three ways to compile, one goes through the same code.
ONE_OF_EACH_KIND = (
    *("matrix rate", "pictures", "captured against eager, simclr", "views of the GPU", "float64, simclr"),
    *("float32, simclr", "a run, again", "the original's two passes, float32", "lightly's SimCLR"),
    *("SimCLR, compiled and recorded", "simclr:digits, eager"),
    "64 x 8",
)


def setting_at(directory: Path) -> Setting:
    return Setting(torch.device("cpu"), directory / "out", directory / "data", is_tiny=True, ends_at=time.time() + 600)


@pytest.mark.slow
@pytest.mark.process
def test_a_dry_run_goes_through_every_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lightly")
    setting = dataclasses.replace(setting_at(tmp_path), only=ONE_OF_EACH_KIND)
    write_tiny_dataset(setting.data / "procedural_digits_stored" / "train", num_samples=32)
    write_tiny_pair(setting.data / "procedural_digits_online", num_train=32, num_test=16, overlay="online")
    monkeypatch.setattr(throughput, "trace_steps", lambda *_, **__: Trace([], []))  # the stage trace takes one
    monkeypatch.setattr(throughput, "_planned_bytes", lambda *_: 1)  # plans have tests of their own
    torch.compiler.set_stance("force_eager")  # to compile takes minutes
    try:
        gpu.run_session(gpu.STAGES, setting, commit="abc", is_isolated=False)
    finally:
        torch.compiler.set_stance("default")
    record = read_record(setting.record)
    by_stage = {stage.name: list(record.stages.get(stage.name, {})) for stage in gpu.STAGES}
    assert all(by_stage[stage.name] for stage in gpu.STAGES[:6]), by_stage
    measured = {name: one for of_stage in record.stages.values() for name, one in of_stage.items()}
    assert {name: one.failed for name, one in measured.items() if not one.is_done} == {}
    assert all(any(part in name for name in measured) for part in ONE_OF_EACH_KIND)
    assert record.sessions[0]["device"] == "cpu"
    assert record.sessions[0]["git_commit"]
    assert len(measured["simclr:digits, eager"].values["slowest"]) == 20


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
    done = subprocess.CompletedProcess((), status, f"..\nFAILED a::b - no\n{summary}\n", "")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    outcome = checks.run_tests(setting_at(Path()), "tests/test_house.py")
    assert outcome.holds is holds
    assert outcome.values == {"summary": summary, "failures": ["FAILED a::b - no"]}


def test_every_test_that_needs_a_gpu_is_run_by_the_checks() -> None:
    """By its file; the names of such tests say `gpu`."""
    tests = checks.ROOT / "tests"
    needing = {path for path in tests.rglob("test_*.py") if 'reason="needs a GPU"' in path.read_text()} - {
        Path(__file__)
    }
    assert {str(path.relative_to(checks.ROOT)) for path in needing} <= set(checks._TEST_FILES)


@pytest.mark.process
def test_a_session_and_its_tests_need_no_package_beyond_setup_py() -> None:
    """Without lightly, its own measurement fails and costs no other. timm comes with pictures of torch on a GPU."""
    program = """
import importlib, sys
others = ["lightly", "open_clip", "deepspeed", "librosa", "moto", "s3fs", "onnx", "optuna", "tensorboard"]
sys.modules |= dict.fromkeys(others)  # as if they were not there
from benchmarks import gpu
from benchmarks.gpu_stages import checks
for file in checks._TEST_FILES:
    importlib.import_module(file.removesuffix(".py").replace("/", "."))
"""
    done = run_python([sys.executable, "-c", program], cwd=checks.ROOT)
    assert (done.returncode, done.stderr) == (0, "")


def test_stages_can_be_sent_to_a_spawned_process() -> None:
    sent = pickle.loads(pickle.dumps((gpu.STAGES, setting_at(Path()))))
    assert [stage.name for stage in sent[0]] == [stage.name for stage in gpu.STAGES]


def test_stages_are_chosen_by_name_and_run_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [stage.name for stage in gpu.chosen("trace,checks")] == ["checks", "trace"]
    with pytest.raises(UserError, match='did you mean "checks"'):
        gpu.chosen("chekcs")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="sees no GPU"):
        gpu.choose_gpu()


def test_a_trace_tells_the_slowest_kernels_and_the_idle_share() -> None:
    kernels = [Kernel("gemm", 0, 6), Kernel("add", 6, 7), Kernel("gemm", 9, 10)]
    found = summary(Trace(kernels, ["cudaLaunchKernel"] * 3), num_steps=1)
    assert found["idle_share"] == 0.2
    assert busy_microseconds(kernels) == 8
    assert found["slowest"][0] == {"kernel": "gemm", "share": 0.875, "calls_a_step": 2, "microseconds_a_step": 7}


def test_a_gpu_that_may_not_be_profiled_costs_the_trace_but_no_throughput(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unseen = Trace([], [])
    with pytest.raises(RuntimeError, match="may profile the GPU"):
        summary(unseen, num_steps=1)
    monkeypatch.setattr(throughput, "trace_steps", lambda *_, **__: unseen)
    values = throughput._measure(setting_at(tmp_path), Form(tmp_path, 2, "float32", False, 0), Peer(lambda: None, None))
    assert values["samples_per_second"] > 0
    assert values["kernels_a_step"] is values["launches_a_step"] is None
