"""What differs between Linux and macOS, as both of them answer it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from data_pipeline.core import system
from data_pipeline.core.system import command_of, free_host_bytes, num_cores, peak_memory_bytes, reserve_room


def test_without_an_affinity_all_cores_may_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert num_cores() == len(os.sched_getaffinity(0))
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 11)
    assert num_cores() == 11


def test_half_of_the_memory_is_free_if_the_system_does_not_say(tmp_path: Path) -> None:
    assert free_host_bytes(tmp_path) == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def test_the_peak_of_memory_is_in_the_units_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 10**7 < peak_memory_bytes() < 10**12
    on_linux = peak_memory_bytes()
    monkeypatch.setattr(sys, "platform", "darwin")
    assert peak_memory_bytes() == pytest.approx(on_linux / 1024, rel=0.2)


@pytest.mark.parametrize("is_macos", [False, True])
def test_room_is_reserved_or_refused(is_macos: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if is_macos:
        monkeypatch.delattr(os, "posix_fallocate")
    with (tmp_path / "file").open("wb") as file:
        with pytest.raises(OSError):
            reserve_room(file.fileno(), 2**60)
        reserve_room(file.fileno(), 5_000)
    assert (tmp_path / "file").stat().st_size == 5_000


@pytest.mark.parametrize("is_macos", [False, True])
def test_the_command_of_a_process_is_known_while_it_runs(
    is_macos: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_macos:
        monkeypatch.setattr(system, "PROC", tmp_path / "nowhere")
    words = ["x" * 300, "submitit"]
    command, pipe = ["sh", "-c", "echo begun; read line", *words], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"  # the system knows the words a moment after the start
        assert "submitit" in command_of(str(process.pid))
        process.kill()
    assert command_of(str(process.pid)) == ""
