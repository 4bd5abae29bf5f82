"""Packed results: they unpack into runs that reports, launcher and probes take for the runs that they were."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest

import trainer.export
from data_pipeline.core.errors import UserError
from data_pipeline.storage.files import unpack_tar
from launch.states import run_status
from tests.commands import Done, call
from tests.trainer.reports.suppression_runs import STEP, make_run, samples
from tests.trainer.reports.test_report_suppression import factors, make_study, report
from trainer.reports.archive import write_archive
from trainer.run_dir import RunDir, runs_of


def unpacked(archive: Path, directory: Path) -> Path:
    with tarfile.open(archive) as tar:
        unpack_tar(tar, directory)
    return directory


def export(*arguments: str | Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Done:
    return call(trainer.export.main, *arguments, monkeypatch=monkeypatch, capsys=capsys)


def test_the_page_of_unpacked_results_is_that_of_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_study(tmp_path / "here/runs/study")
    (tmp_path / "there").mkdir()
    archive = tmp_path / "results.tar.xz"
    done = export(tmp_path / "here/runs/study", "--results", archive, monkeypatch=monkeypatch, capsys=capsys)
    assert (done.status, done.stderr) == (0, "")
    assert "24 of 24" in done.stdout
    unpacked(archive, tmp_path / "there/runs")
    for place in ("here", "there"):
        monkeypatch.chdir(tmp_path / place)
        report("--study", "suppression_small", "runs/study", "--out", "page.md")
    for name in ("page.md", "page/randbit.png"):
        assert (tmp_path / "here" / name).read_bytes() == (tmp_path / "there" / name).read_bytes()


def test_equal_runs_give_equal_bytes_whatever_lies_beside_the_results(tmp_path: Path) -> None:
    archives = []
    for name in ("first", "second"):
        runs = make_study(tmp_path / name / "study", seeds=(0,))
        archives.append(tmp_path / f"{name}.tar.xz")
        run = RunDir(runs_of([runs])[0])
        if name == "second":
            for path in (run.checkpoint(STEP) / "encoder.safetensors", run.probes(STEP) / "heads.safetensors"):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(b"weights")
            (run.path / "job.json").write_text("{}")
            (run.path / "code").mkdir()
        write_archive(runs_of([runs]), archives[-1])
    assert archives[0].read_bytes() == archives[1].read_bytes()


def test_without_the_log_of_a_run_its_online_probes_are_packed(tmp_path: Path) -> None:
    path = make_run(tmp_path / "study", factors("plain"))
    lines = [{"step": 0, "epoch": 0, "probe/base/ridge": 0.1}, {"step": 1, "train/loss": 1.0}]
    lines += [{"step": STEP, "train/loss": 0.5, "probe/base/ridge": 0.3}]
    RunDir(path).metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    write_archive([path], tmp_path / "results.tar.xz", with_logs=False)
    run = RunDir(unpacked(tmp_path / "results.tar.xz", tmp_path / "unpacked") / "study" / path.name)
    assert run.read_metrics() == [{"step": 0, "probe/base/ridge": 0.1}, {"step": STEP, "probe/base/ridge": 0.3}]


def test_the_log_of_a_run_can_be_left_out(tmp_path: Path) -> None:
    path = make_run(tmp_path / "study", factors("plain"), right={"base": samples(0.5, num_test=100, seed=0)})
    RunDir(path).metrics.write_text('{"step": 40, "train/loss": 1.0}\n')
    for with_logs in (True, False):
        write_archive([path], tmp_path / "results.tar.xz", with_logs=with_logs)
        run = RunDir(unpacked(tmp_path / "results.tar.xz", tmp_path / str(with_logs)) / "study" / path.name)
        assert run.metrics.exists() is with_logs
        assert run_status(run, {}).state == "finished"
        assert run_status(run, {}).step == STEP


def test_only_finished_runs_are_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "study"
    finished = make_run(home, factors("plain"))
    make_run(home, factors("IFM"), is_finished=False)
    done = export(home, "--results", tmp_path / "results.tar.xz", monkeypatch=monkeypatch, capsys=capsys)
    assert "1 of 2" in done.stdout
    assert runs_of([unpacked(tmp_path / "results.tar.xz", tmp_path) / "study"]) != []
    with tarfile.open(tmp_path / "results.tar.xz") as tar:
        assert {name.split("/")[1] for name in tar.getnames()} == {finished.name}


def test_what_cannot_be_packed_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    unfinished = make_run(tmp_path / "study", factors("IFM"), is_finished=False)
    with pytest.raises(UserError, match="none of the 1 run"):
        write_archive([unfinished], tmp_path / "results.tar.xz")
    first, second = (make_run(tmp_path / place / "study", factors("plain")) for place in ("a", "b"))
    with pytest.raises(UserError, match="2 of the runs would be called study/"):
        write_archive([first, second], tmp_path / "results.tar.xz")
    with pytest.raises(UserError, match=r"ends in \.tar\.xz"):
        write_archive([first], tmp_path / "results.zip")
    out = ("--out", tmp_path / "encoder.safetensors")
    for arguments, said in (
        ((first, "--results", tmp_path / "results.tar.xz", "--step", "0"), "--step is for an encoder"),
        ((first, *out, "--without-logs"), "--without-logs is for --results"),
        ((first, second, *out), "2 are given"),
    ):
        done = export(*arguments, monkeypatch=monkeypatch, capsys=capsys)
        assert done.status == 2
        assert said in done.stderr
