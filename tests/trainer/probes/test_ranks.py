"""Probes of one, two and three ranks give the same numbers to the last digit."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from data_pipeline.core.errors import UserError
from tests.gloo import run_ranks
from tests.tiny_data import write_tiny_pair
from tests.trainer.probes.toy import read_out
from trainer.probes import linear
from trainer.probes.features import read_pictures, shared_rows

pytestmark = pytest.mark.ranks

SIZES = [(103, 16), (103, 128), (1, 16), (48, 16), (17, 16), (103, 1)]  # samples, and how many go at once


def rows_of_all() -> list[list[int]]:
    return [
        shared_rows(lambda part: [part[:, None]], torch.arange(num), chunk_size=chunk_size)[0].flatten().tolist()
        for num, chunk_size in SIZES
    ]


def test_each_sample_comes_once_and_in_its_place() -> None:
    assert run_ranks(rows_of_all, 3) == [[list(range(num)) for num, _ in SIZES]] * 3


def read_out_both(directory: Path) -> Any:
    """Return results and heads of a real encoder. 3 ranks divide neither the 53 test samples nor the steps."""
    train, test = read_pictures(directory / "train"), read_pictures(directory / "test")
    found = []
    for views, num_steps in (("policy", 3), ("none", 1)):
        with mock.patch.object(linear, "_steps_at_once", return_value=num_steps):
            found.append(read_out(train, test, views=views, batch_size=8))
    return found


def test_probes_do_not_depend_on_the_ranks(tmp_path: Path) -> None:
    """There are 7 steps."""
    data = write_tiny_pair(tmp_path, num_train=60, num_test=53, overlay="online")
    assert run_ranks(read_out_both, 3, data) == [read_out_both(data)] * 3


def test_the_published_quirk_of_batch_norm_is_for_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "world_size", lambda: 2)
    with pytest.raises(UserError, match=r"batch_norm train moves the running statistics .* start it as one process"):
        linear.check_ranks(linear.ProbeConfig(batch_norm="train"))
