"""The plan of `make demo`."""

from __future__ import annotations

import pytest
import torch

from launch.demo import stages


@pytest.mark.parametrize(("num_gpus", "num_processes"), [(0, "2"), (1, "1"), (4, "2")])
def test_the_processes_of_the_demo_never_share_a_gpu(
    num_gpus: int, num_processes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    training = [command for title, command in stages() if title.startswith("train")]
    assert len(training) == 2
    for command in training:
        assert command[command.index("--nproc-per-node") + 1] == num_processes
