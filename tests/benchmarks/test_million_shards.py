"""The benchmark of many shards works with few of them, and says how few are too few."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.billion_samples import SHARES, WINDOW, first_batch
from benchmarks.million_shards import check_size, make_dataset, open_store
from data_pipeline.core.errors import UserError


def test_as_few_shards_as_fill_a_batch_are_enough(tmp_path: Path) -> None:
    check_size(410)
    dataset = make_dataset(tmp_path, num_shards=410)
    open_store(dataset)
    for share in SHARES:
        first_batch(dataset, share=share, shuffle_shards=WINDOW)  # asserts that the batch is full and no sample is bad


def test_too_few_shards_are_refused() -> None:
    with pytest.raises(UserError, match=r"--shards 409 gives 4,090 samples, .* pass --shards 410 or more"):
        check_size(409)
