"""Progress in a log: plain lines, not too many, and nothing from the ranks that are not the first."""

from __future__ import annotations

import errno
import io
import time

import pytest

from data_pipeline.core import progress
from data_pipeline.core.progress import Progress


def test_a_log_gets_the_last_line_with_the_last_note(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("train", total=3) as bar:
        for note in ("loss 3.0", "", "loss 1.0"):
            bar.advance(note=note)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("train: 3/3 in ")
    assert lines[0].endswith("loss 1.0")


def test_a_slow_job_says_how_long_it_will_take(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr("data_pipeline.core.progress.time.monotonic", lambda: now)
    with Progress("build", total=100, start=50) as bar:
        for _ in range(20):
            now += 1.0
            bar.advance()
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["build: 61/100, 39 s left"]


def test_a_slow_beginning_does_not_count_for_the_time_that_is_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step of a compiled network takes a minute, and the others a hundredth of a second."""
    now = 0.0
    monkeypatch.setattr("data_pipeline.core.progress.time.monotonic", lambda: now)
    with Progress("train", total=1_000) as bar:
        bar.show_while_waiting(lambda: "compiling")
        bar._last_line = 60.0  # what was printed while it compiled
        now = 67.0
        bar.advance()
        for _ in range(40):
            now += 1.0
            bar.advance(10)
        for _ in range(20):  # now half as fast
            now += 1.0
            bar.advance(5)
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["train: 41/1000, 96 s left", "train: 151/1000, 85 s left"]
    assert lines[-1] == "train: 496/1000, 71 s left"  # 235 in the last 33 s


def test_other_ranks_are_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("train", total=1, enabled=False) as bar:
        bar.advance(note="loss 1.0")
    assert capsys.readouterr().err == ""


def test_between_two_lines_the_log_says_what_is_going_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.01)
    said = ""
    with Progress("train", total=2) as bar:
        bar.show_while_waiting(lambda: "first step: forward, 120 s")
        deadline = time.monotonic() + 20
        while not said and time.monotonic() < deadline:
            time.sleep(0.02)
            said = capsys.readouterr().err
    assert said.startswith("train: 0/2, first step: forward, 120 s\n")


def test_what_other_ranks_do_meanwhile_is_not_said() -> None:
    with Progress("train", total=2, enabled=False) as bar:
        bar.show_while_waiting(lambda: pytest.fail("asked"))
        assert bar._reporter is None


def test_a_progress_within_another_is_a_line_below_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with Progress("probe", total=2) as outer:
        with Progress("encode", total=3) as inner:
            inner.advance(3)
            assert outer._bar is not None
            assert [task.description for task in outer._bar.tasks] == ["probe", "encode"]
        assert [task.description for task in outer._bar.tasks] == ["probe"]
        outer.advance(2)
    with Progress("report", total=1) as after:
        after.advance()
        assert after._bar is not outer._bar


class ClosedTerminal(io.StringIO):
    """A terminal whose window is gone: the kernel refuses each write."""

    def isatty(self) -> bool:
        return True

    def write(self, text: str, /) -> int:
        raise OSError(errno.EIO, "Input/output error")

    def flush(self) -> None:
        raise OSError(errno.EIO, "Input/output error")


def test_a_terminal_that_has_closed_ends_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", ClosedTerminal())
    monkeypatch.setattr("sys.stderr", ClosedTerminal())
    with Progress("train", total=2) as outer, Progress("encode", total=1) as inner:
        inner.advance()
        outer.advance(2)
    assert outer._bar is not None
    assert outer._done == 2


def test_a_bar_and_the_output_of_a_command_do_not_mix(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)  # as in `python -m trainer.probe RUN > FILE`
    with Progress("probe", total=1) as progress:
        progress.advance()
        print("the output")
    captured = capsys.readouterr()
    assert captured.out == "the output\n"
    assert "probe" in captured.err
