"""Progress in a log: plain lines, not too many, and nothing from the ranks that are not the first."""

from __future__ import annotations

import pytest

from data_pipeline.core.progress import Progress


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that the progress reads, as a list of one number."""
    now = [0.0]
    monkeypatch.setattr("data_pipeline.core.progress.time.monotonic", lambda: now[0])
    return now


def test_a_slow_job_says_how_long_it_will_take(capsys: pytest.CaptureFixture[str], clock: list[float]) -> None:
    with Progress("build", total=100, start=50) as progress:
        for _ in range(20):
            clock[0] += 1.0
            progress.advance()
    assert capsys.readouterr().err.splitlines() == ["build: 61/100, 39 s left", "build: 70/100 in 20 s"]


def test_other_ranks_are_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("train", total=1, enabled=False) as progress:
        progress.advance(note="loss 1.0")
    assert capsys.readouterr().err == ""
