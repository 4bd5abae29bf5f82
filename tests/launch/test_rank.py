"""Errors of a rank that a user can mend are one sentence."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from configs import debug
from data_pipeline.core.errors import UserError
from launch import rank


class DyingRows(Dataset[int]):
    """Rows whose reading kills the worker that reads them."""

    def __init__(self, number: signal.Signals) -> None:
        self._number = number

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        os.kill(os.getpid(), self._number)
        return index


@pytest.mark.parametrize(
    ("number", "cause"), [(signal.SIGBUS, "a shard was cut short"), (signal.SIGKILL, "the machine had no memory left")]
)
def test_a_data_worker_that_was_killed_is_one_sentence_with_the_likely_cause(
    number: signal.Signals, cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(*_: object, **__: object) -> None:
        next(iter(DataLoader(DyingRows(number), num_workers=1)))

    monkeypatch.setattr(rank, "train", train)
    with pytest.raises(UserError, match=cause):
        rank.train_on(torch.device("cpu"), debug.image(), tmp_path, command="")


def test_another_error_of_a_worker_keeps_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def train(*_: object, **__: object) -> None:
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Segmentation fault. ")

    monkeypatch.setattr(rank, "train", train)
    with pytest.raises(RuntimeError, match="Segmentation fault"):
        rank.train_on(torch.device("cpu"), debug.image(), tmp_path, command="")


def test_each_run_of_a_process_counts_its_own_memory_of_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: events.append(f"reset {device}"))
    monkeypatch.setattr(rank, "train", lambda *_, **__: events.append("trained"))
    for device in (torch.device("cuda", 1), torch.device("cpu")):
        rank.train_on(device, debug.image(), tmp_path, command="")
    assert events == ["reset cuda:1", "trained", "trained"]
