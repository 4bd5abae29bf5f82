"""The command for a GPU that is lent for a short time: every stage in tiny sizes, and how a session ends."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks import gpu
from benchmarks.gpu_stages import all_stages, checks, science, throughput
from benchmarks.gpu_stages.kernel_trace import Kernel, Trace, busy_microseconds, summary
from benchmarks.gpu_stages.pieces import PIECE_BYTES, pack, unpack
from benchmarks.gpu_stages.session import (
    Measurement,
    Setting,
    add_measurement,
    read_record,
)
from benchmarks.training_throughput import Form, Peer
from data_pipeline.core.errors import UserError
from tests.tiny_data import write_tiny_dataset, write_tiny_pair
from trainer.run_dir import RunDir

CPU = torch.device("cpu")


def setting_at(directory: Path, *, seconds: float = 600) -> Setting:
    return Setting(
        device=CPU,
        out=directory / "out",
        data=directory / "data",
        runs=directory / "runs",
        is_tiny=True,
        ends_at=time.time() + seconds,
    )


def tiny_datasets(setting: Setting) -> None:
    """Write the datasets that a dry run would build."""
    write_tiny_dataset(setting.data / "procedural_digits_stored" / "train", num_samples=32)
    for overlay in ("digits", "shapes"):
        write_tiny_pair(setting.data / f"procedural_{overlay}_online", num_train=32, num_test=16, overlay="online")


@pytest.mark.slow
@pytest.mark.process
def test_a_dry_run_goes_through_every_stage(tmp_path: Path) -> None:
    pytest.importorskip("lightly")
    setting = setting_at(tmp_path)
    tiny_datasets(setting)
    torch.compiler.set_stance("force_eager")  # to compile takes minutes
    try:
        all_stages.run_session(all_stages.STAGES, setting, commit="abc", is_isolated=False)
    finally:
        torch.compiler.set_stance("default")
    record = read_record(setting.record)
    assert list(record.stages) == [stage.name for stage in all_stages.STAGES]
    for stage in all_stages.STAGES:
        found = record.stages[stage.name]
        assert list(found) == list(stage.tasks(setting))
        assert {name: measured.failed for name, measured in found.items() if not measured.is_done} == {}
        assert [name for name, measured in found.items() if measured.holds is False] == []
    assert record.sessions[0]["device"] == "cpu"
    assert record.sessions[0]["git_commit"]
    runs = [measured.values for stage in science.STAGES for measured in record.stages[stage.name].values()]
    assert [run["step"] for run in runs] == [run["num_steps"] for run in runs] == [4] * 6
    assert all({probe["label"] for probe in run["probes"]} >= {"base", "overlay"} for run in runs)
    assert all(len(run["online_probe"]["probe/base/knn"]) == 3 for run in runs)
    assert all(len(trace.values["slowest"]) == 20 for trace in record.stages["trace"].values())
    assert setting.record.stat().st_size < 200_000


@pytest.mark.process
def test_a_run_goes_on_from_its_pieces_on_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(science, "_TINY", (*science._TINY, "num_epochs=40", "checkpoint_every_steps=2"))
    first = setting_at(tmp_path / "first", seconds=1)
    (tmp_path / "first").mkdir()
    tiny_datasets(first)
    outcome = science.train_and_probe(first, "simclr:digits")
    done = outcome.values["step"]
    assert 0 < done < outcome.values["num_steps"] == 80
    assert not outcome.is_finished
    assert all(path.stat().st_size < 16_000_000 for path in first.out.iterdir())
    second = dataclasses.replace(first, runs=tmp_path / "second", ends_at=time.time() + 600)
    outcome = science.train_and_probe(second, "simclr:digits")
    assert outcome.is_finished
    assert outcome.values["step"] == 80
    steps = [entry["step"] for entry in RunDir(tmp_path / "second" / "simclr-digits").read_metrics()]
    assert steps == sorted(set(steps))
    assert set(range(80)) <= {step - min(steps) for step in steps}
    names = {path.name.partition(".tar")[0] for path in first.out.glob("*.tar.*")}
    assert names == {"simclr-digits_00000080"}  # those of the first session are gone


def test_a_directory_comes_out_of_its_pieces_as_it_was(tmp_path: Path) -> None:
    content = os.urandom(2 * PIECE_BYTES + 1000)
    (tmp_path / "run" / "deep").mkdir(parents=True)
    (tmp_path / "run" / "deep" / "weights").write_bytes(content)
    files = [tmp_path / "run" / "deep" / "weights"]
    out = tmp_path / "out"
    for step in (1, 2):
        pack(tmp_path / "run", files, out, name="run", step=step)
    pieces = sorted(out.glob("*.tar.*"))
    assert [path.name for path in pieces] == [f"run_00000002.tar.{number:03}" for number in range(3)]
    assert unpack("run", out, tmp_path / "again")
    assert (tmp_path / "again" / "deep" / "weights").read_bytes() == content
    assert not unpack("other", out, tmp_path / "other")
    pieces[1].write_bytes(b"damaged")
    with pytest.raises(UserError, match=r"run_00000002\.tar\.001 is damaged: .* bring run\.json and all its pieces"):
        unpack("run", out, tmp_path / "third")
    pieces[1].unlink()
    with pytest.raises(UserError, match=r"run_00000002\.tar\.001 is missing"):
        unpack("run", out, tmp_path / "third")
    assert not (tmp_path / "third").exists()


def test_a_machine_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=r"torch \S+ sees no GPU; check nvidia-smi, or try the stages on the CPU"):
        all_stages.choose_gpu()


def test_a_machine_without_packages_is_told_how_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "missing_packages", lambda: ["simplejpeg>=1.8", "braceexpand"])
    with pytest.raises(
        UserError, match=r"^2 package\(s\) of setup\.py .* download -d wheels 'simplejpeg>=1\.8' braceexp"
    ):
        gpu.check_packages()


@pytest.mark.process
def test_missing_packages_are_named_before_they_are_imported() -> None:
    program = """
import sys
sys.modules |= dict.fromkeys(["torch", "pydantic", "webdataset", "numpy"])  # as if they were not there
import benchmarks.gpu
print(benchmarks.gpu.missing_packages())
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=checks.ROOT, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")


@pytest.mark.process
def test_a_session_and_its_tests_need_no_package_beyond_setup_py() -> None:
    """Without lightly, its own measurement fails and costs no other. timm comes with pictures of torch on a GPU."""
    program = """
import importlib, sys
others = ["lightly", "open_clip", "deepspeed", "librosa", "moto", "s3fs", "onnx", "optuna", "tensorboard"]
sys.modules |= dict.fromkeys(others)  # as if they were not there
from benchmarks.gpu_stages import all_stages, checks
for file in checks._TEST_FILES:
    importlib.import_module(file.removesuffix(".py").replace("/", "."))
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=checks.ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_this_machine_has_all_packages() -> None:
    assert gpu.missing_packages() == []


def test_stages_are_chosen_by_name_and_run_in_their_order() -> None:
    assert [stage.name for stage in all_stages.chosen("trace,checks")] == ["checks", "trace"]
    with pytest.raises(UserError, match='--stages names "chekcs", which is no stage; did you mean "checks"'):
        all_stages.chosen("chekcs")


def test_both_recipes_of_a_stage_get_a_part_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class BegunError(Exception):
        """Training would begin now."""

    seconds = []

    def begin(setting: Setting, *_: object) -> None:
        seconds.append(setting.seconds_left)
        raise BegunError

    monkeypatch.setattr(science, "config_of", lambda *_: None)
    monkeypatch.setattr(science, "_train", begin)
    for each in science.tasks(setting_at(tmp_path, seconds=600), overlay="digits").values():
        with pytest.raises(BegunError):
            each.run()
    assert seconds == pytest.approx([300, 600], abs=30)


@pytest.mark.process
def test_pictures_that_are_missing_fail_the_run_and_say_so(tmp_path: Path) -> None:
    setting = dataclasses.replace(setting_at(tmp_path), is_tiny=False, known=())
    with pytest.raises(UserError, match=r"cifar10_digits_online/train is not built, .* pass --root DIR"):
        science.train_and_probe(setting, "simclr:digits")


@pytest.mark.parametrize(
    ("check", "compile_setting"),
    [
        (None, "step"),
        (Measurement(session=0, seconds=1, holds=True), "step"),
        (Measurement(session=0, seconds=1, holds=False), False),
        (Measurement(session=0, seconds=1, failed="x"), False),
    ],
)
def test_a_run_records_its_step_unless_that_check_failed(
    check: Measurement | None, compile_setting: object, tmp_path: Path
) -> None:
    setting = setting_at(tmp_path)
    tiny_datasets(setting)
    if check is not None:
        add_measurement(setting, "checks", "captured against eager, simclr:digits", check)
    config = science.config_of(setting, "simclr:digits", RunDir(tmp_path / "none"))
    assert config.compile == compile_setting


def test_tests_are_counted_from_their_report() -> None:
    report = """<testsuites><testsuite>
        <testcase name="a"/><testcase name="b"><skipped/></testcase>
        <testcase name="c"><failure message="not equal"/></testcase>
    </testsuite></testsuites>"""
    outcome = checks.counted(report)
    assert outcome.values == {"passed": 1, "failed": 1, "skipped": 1, "failures": {"c": "not equal"}}
    assert outcome.holds is False
    assert checks.counted("<testsuites/>").holds is False
    assert checks.counted('<testsuites><testcase name="a"/></testsuites>').holds is True


def test_a_trace_tells_the_slowest_kernels_and_the_idle_share() -> None:
    kernels = [Kernel("gemm", 0, 6), Kernel("add", 6, 7), Kernel("gemm", 9, 10)]
    found = summary(Trace(kernels, ["cudaLaunchKernel"] * 3), num_steps=1)
    assert found["idle_share"] == 0.2
    assert busy_microseconds(kernels) == 8
    assert [row["kernel"] for row in found["slowest"]] == ["gemm", "add"]
    assert found["slowest"][0] == {"kernel": "gemm", "share": 0.875, "calls_a_step": 2, "microseconds_a_step": 7}


def test_a_gpu_that_may_not_be_profiled_costs_the_trace_but_no_throughput(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unseen = Trace([], [])
    with pytest.raises(RuntimeError, match="check that this user may profile the GPU"):
        summary(unseen, num_steps=1)
    monkeypatch.setattr(throughput, "trace_steps", lambda *_, **__: unseen)
    setting = Setting(torch.device("cpu"), tmp_path, tmp_path, tmp_path, is_tiny=True)
    values = throughput._measure(setting, Form(tmp_path, 2, "float32", False, 0), Peer(lambda: None, None))
    assert values["samples_per_second"] > 0
    assert values["kernels_a_step"] is values["launches_a_step"] is None


def test_every_test_that_needs_a_gpu_is_run_by_the_checks() -> None:
    """By its file; the names of such tests say `gpu`."""
    tests = checks.ROOT / "tests"
    needing = {path for path in tests.rglob("test_*.py") if 'reason="needs a GPU"' in path.read_text()} - {
        Path(__file__)
    }
    assert {str(path.relative_to(checks.ROOT)) for path in needing} <= set(checks._TEST_FILES)


def measured(**values: object) -> Measurement:
    return Measurement(session=0, seconds=1, values=values)


@pytest.mark.slow
def test_the_alarm_of_a_session_that_is_over_hurts_no_later_code() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with science._signal_after(0, then=science._ignore) as is_over:
        assert is_over.wait(10)
    with pytest.raises(science._NoTimeToProbeError), science._signal_after(0, then=science._end_probe):
        time.sleep(10)
    assert signal.getsignal(signal.SIGUSR1) is before
