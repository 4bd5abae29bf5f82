"""Cores that other programs keep busy are counted, and named if training would wait for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.observability.busy_cores import busy_cores, busy_hint

STAT = "cpu  9 9 9 9 9\ncpu0 {busy} 0 0 {idle} 0 0 0 0\ncpu1 100 0 0 {idle} 5 0 0 0\nintr 7\n"


def test_busy_cores_are_counted_while_this_process_sleeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stat = tmp_path / "stat"
    stat.write_text(STAT.format(busy=100, idle=50))
    # In between, core 0 is busy for 3 of 4 ticks, and core 1 does nothing.
    monkeypatch.setattr("time.sleep", lambda _: stat.write_text(STAT.format(busy=103, idle=51)))
    assert busy_cores(stat) == pytest.approx(0.75)
    assert busy_cores(tmp_path / "nothing") == 0


def test_only_threads_without_a_core_are_named() -> None:
    assert busy_hint(2, cpus=2, num_busy=0.4) == ""
    assert busy_hint(1, cpus=2, num_busy=2.0) == ""
    assert "OMP_NUM_THREADS=1 in front of the command" in busy_hint(2, cpus=2, num_busy=1.2)
    assert "OMP_NUM_THREADS=3 " in busy_hint(8, cpus=8, num_busy=5.1)
