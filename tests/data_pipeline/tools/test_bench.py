from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from data_pipeline.__main__ import main
from data_pipeline.core.errors import UserError
from data_pipeline.overlays.noise import Noise
from data_pipeline.sources.background import procedural_sounds
from data_pipeline.storage.store import SampleStore, StoredSamples
from data_pipeline.tools import bench
from data_pipeline.tools.bench import encoded_counts, rate, rows
from tests.tiny_data import NUM_POINTS, SAMPLE_RATE, write_tiny_dataset, write_tiny_sounds

CPU = torch.device("cpu")


class Clock:
    """Time that passes only where a reader takes some."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_rate_counts_what_was_delivered_after_the_warm_up() -> None:
    clock = Clock()

    def deliveries() -> Iterator[int]:
        clock.now += 60  # the opening
        yield 7
        while True:
            clock.now += 0.25
            yield 50

    assert rate(deliveries(), seconds=10, clock=clock) == pytest.approx(200)


def test_stored_bytes_are_of_every_sample_once_an_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = SampleStore(write_tiny_dataset(tmp_path / "built", num_samples=250, num_samples_per_shard=100))
    read: list[int] = []
    stored = store.read

    def recording(indices: NDArray[np.int64]) -> StoredSamples:
        read.extend(indices.tolist())
        return stored(indices)

    monkeypatch.setattr(store, "read", recording)
    counts = list(islice(encoded_counts(store), 6))
    assert sum(counts) == len(read) == 500
    assert sorted(read[:250]) == sorted(read[250:]) == list(range(250))
    assert read[:250] != read[250:]


def what(directory: Path, *, max_workers: int) -> list[tuple[str, int | None]]:
    measured = rows(SampleStore(directory), batch_size=8, max_workers=max_workers, device=CPU)
    return [(row.what, row.num_workers) for row in measured]


def test_a_dataset_is_measured_in_all_that_happens_to_it(tmp_path: Path) -> None:
    sounds = procedural_sounds(0, sample_rate=SAMPLE_RATE, num_points=NUM_POINTS)
    noise = Noise.of(sounds, num_points=NUM_POINTS, volume=0.05, crop="first")
    reading = [("stored bytes", 0), ("decoded samples", 0), ("batches, streamed", 0)]
    resident = [("batches, resident", None)]
    baked = write_tiny_dataset(tmp_path / "baked", num_samples=20)
    assert what(baked, max_workers=3) == [*reading, *(("batches, streamed", num) for num in (1, 2, 3)), *resident]
    online = write_tiny_dataset(tmp_path / "online", num_samples=20, overlay="online")
    assert what(online, max_workers=0) == [*reading, *resident, ("overlay alone", None)]
    spoken = write_tiny_sounds(tmp_path / "spoken", num_samples=20, overlay=noise)
    assert what(spoken, max_workers=0) == [*reading, *resident, ("overlay alone", None)]


def run_bench(*words: str) -> None:
    main(["bench", *words])


def test_the_command_prints_a_rate_for_every_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "WARM_UP_SECONDS", 0.01)
    directory = write_tiny_sounds(tmp_path / "built", num_samples=40, overlay="none")
    run_bench(str(directory), "--batch-size", "8", "--max-workers", "1", "--seconds", "0.05", "--device", "cpu")
    title, *lines = capsys.readouterr().out.splitlines()
    assert title.split() == ["what", "workers", "samples/s"]
    assert len(lines) == 5
    assert all(float(line.split()[-1].replace(",", "")) > 0 for line in lines)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--shuffle-shards", "0"], "argument --shuffle-shards: '0' is not a positive"),
        ([], "global_batch_size 256 does not fit a dataset of 20 samples"),
        (["--device", "abacus"], "--device abacus cannot be used now"),
    ],
)
def test_what_cannot_be_measured_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], problem: str
) -> None:
    directory = write_tiny_dataset(tmp_path / "built", num_samples=20)
    with pytest.raises(UserError, match=problem):
        run_bench(str(directory), "--seconds", "0.05", *words)
    assert capsys.readouterr().out == ""
