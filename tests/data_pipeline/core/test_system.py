"""What Linux says of processes."""

from __future__ import annotations

import subprocess

from data_pipeline.core.system import command_of, peak_memory_bytes


def test_the_peak_of_memory_is_in_bytes() -> None:
    assert 10**7 < peak_memory_bytes() < 10**12


def test_the_command_of_a_process_is_known_while_it_runs() -> None:
    words = ["x" * 300, "submitit"]
    command, pipe = ["sh", "-c", "echo begun; read line", *words], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"  # the system knows the words a moment after the start
        assert "submitit" in command_of(str(process.pid))
        process.kill()
    assert command_of(str(process.pid)) == ""
