from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, islice
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torchvision.io import ImageReadMode, decode_png

from data_pipeline.errors import UserError
from data_pipeline.sample import Batch, Sample
from data_pipeline.shards import SampleStore
from data_pipeline.stream import Stream, batch_indices, epoch_order, num_steps_per_epoch, read_all
from tests.data_pipeline.random_shards import random_shard_sizes, write_dataset

SHARDS = (3, 5, 17)
GLOBAL_BATCH_SIZE = 8


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[Path, list[Sample]]]:
    """A dataset for each number of shards, of random sizes."""
    root = tmp_path_factory.mktemp("datasets")
    return {num: (root / str(num), write_dataset(root / str(num), random_shard_sizes(num))) for num in SHARDS}


def stream(
    directory: Path,
    *,
    end_step: int,
    start_step: int = 0,
    rank: int = 0,
    world_size: int = 1,
    num_workers: int = 0,
    global_batch_size: int = GLOBAL_BATCH_SIZE,
) -> Stream:
    return Stream(
        directory,
        global_batch_size=global_batch_size,
        seed=7,
        rank=rank,
        world_size=world_size,
        num_workers=num_workers,
        start_step=start_step,
        end_step=end_step,
    )


def keys(batches: Stream) -> list[list[str]]:
    return [batch.keys for batch in batches]


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """A test for hangs must not hang."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"nothing happened for {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("num_shards", SHARDS)
def test_every_key_once_an_epoch(
    datasets: dict[int, tuple[Path, list[Sample]]], num_shards: int, world_size: int, num_workers: int
) -> None:
    directory, samples = datasets[num_shards]
    num_steps = len(samples) // GLOBAL_BATCH_SIZE
    by_rank = [
        list(stream(directory, end_step=2 * num_steps, rank=rank, world_size=world_size, num_workers=num_workers))
        for rank in range(world_size)
    ]
    for batches in by_rank:
        assert [batch.step for batch in batches] == list(range(2 * num_steps))
        assert {len(batch) for batch in batches} == {GLOBAL_BATCH_SIZE // world_size}
    for epoch in range(2):
        seen = [key for batches in by_rank for batch in batches if batch.epoch == epoch for key in batch.keys]
        assert len(seen) == len(set(seen)) == len(samples) - len(samples) % GLOBAL_BATCH_SIZE
        assert set(seen) <= {sample.key for sample in samples}


@pytest.mark.parametrize("num_shards", SHARDS)
def test_an_epoch_without_a_rest_holds_every_key(
    datasets: dict[int, tuple[Path, list[Sample]]], num_shards: int
) -> None:
    directory, samples = datasets[num_shards]
    batches = stream(directory, end_step=len(samples), global_batch_size=1)
    assert batches.num_dropped_per_epoch == 0
    assert sorted(key for batch in keys(batches) for key in batch) == [sample.key for sample in samples]


def test_no_sample_is_left_over_for_ever(datasets: dict[int, tuple[Path, list[Sample]]]) -> None:
    directory, samples = datasets[5]
    size = len(samples) // 2 + 1  # nearly half is dropped
    seen = {key for batch in keys(stream(directory, end_step=20, global_batch_size=size)) for key in batch}
    assert seen == {sample.key for sample in samples}


def test_batches_hold_what_was_stored(datasets: dict[int, tuple[Path, list[Sample]]]) -> None:
    directory, samples = datasets[5]
    for batch in stream(directory, end_step=5, num_workers=1):
        for row, index in enumerate(batch.index_B.tolist()):
            sample = samples[index]
            assert batch.keys[row] == sample.key
            assert batch.label_base_B[row] == sample.label_base
            assert batch.label_overlay_B[row] == sample.label_overlay
            np.testing.assert_array_equal(batch.images_BCHW[row].permute(1, 2, 0).numpy(), sample.image)
            np.testing.assert_array_equal(batch.masks_BHW[row].numpy(), sample.mask)


def test_global_batch_does_not_depend_on_ranks_workers_or_shards(tmp_path: Path) -> None:
    write_dataset(tmp_path / "one", [50])
    write_dataset(tmp_path / "many", [1, 2, 30, 17])
    whole = keys(stream(tmp_path / "one", end_step=12))
    for world_size, num_workers in ((1, 2), (2, 0), (4, 1), (8, 0)):
        parts = [
            keys(stream(tmp_path / "many", end_step=12, rank=rank, world_size=world_size, num_workers=num_workers))
            for rank in range(world_size)
        ]
        assert [list(chain.from_iterable(step)) for step in zip(*parts, strict=True)] == whole


def test_order_is_shuffled_anew_by_epoch_and_seed() -> None:
    stored = np.arange(5000)
    orders = [epoch_order(5000, seed=seed, epoch=epoch) for seed in (0, 1) for epoch in (0, 1)]
    for number, order in enumerate(orders):
        assert abs(rank_correlation(stored, order)) < 0.1
        for other in orders[:number]:
            assert abs(rank_correlation(order, other)) < 0.1
    np.testing.assert_array_equal(orders[0], epoch_order(5000, seed=0, epoch=0))
    with pytest.raises(ValueError, match="read-only"):
        orders[0][0] = 1


def rank_correlation(order_a: NDArray[np.int64], order_b: NDArray[np.int64]) -> float:
    """Spearman's: the correlation of the ranks, which permutations of 0..N-1 are themselves."""
    return float(np.corrcoef(order_a, order_b)[0, 1])


def test_one_batch_spans_the_dataset(datasets: dict[int, tuple[Path, list[Sample]]]) -> None:
    """The shuffle is over the whole dataset, not within a shard or a buffer."""
    _, samples = datasets[17]
    _, indices = batch_indices(len(samples), seed=0, step=0, global_batch_size=32)
    assert indices.max() - indices.min() > len(samples) * 0.8


@pytest.mark.parametrize("num_workers", [0, 2])
def test_resumed_at_any_step_equals_the_uninterrupted_tail(
    datasets: dict[int, tuple[Path, list[Sample]]], num_workers: int
) -> None:
    directory, samples = datasets[3]
    end_step = 3 * (len(samples) // GLOBAL_BATCH_SIZE) - 1
    whole = keys(stream(directory, end_step=end_step))
    for start_step in range(0, end_step + 1, 1 if num_workers == 0 else 5):
        resumed = stream(directory, start_step=start_step, end_step=end_step, num_workers=num_workers)
        assert keys(resumed) == whole[start_step:]


def test_resumed_with_other_ranks_sees_the_rest_of_the_epoch(datasets: dict[int, tuple[Path, list[Sample]]]) -> None:
    directory, samples = datasets[17]
    num_steps = len(samples) // GLOBAL_BATCH_SIZE
    before = [
        key
        for rank in range(4)
        for batch in keys(stream(directory, end_step=9, rank=rank, world_size=4))
        for key in batch
    ]
    after = [
        key
        for rank in range(2)
        for batch in keys(stream(directory, start_step=9, end_step=num_steps, rank=rank, world_size=2))
        for key in batch
    ]
    assert len(before + after) == len(set(before + after)) == num_steps * GLOBAL_BATCH_SIZE


def test_resuming_decodes_nothing_that_it_skips(
    datasets: dict[int, tuple[Path, list[Sample]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, samples = datasets[17]
    decoded = 0

    def counting(data: torch.Tensor, mode: ImageReadMode) -> torch.Tensor:
        nonlocal decoded
        decoded += 1
        pixels: torch.Tensor = decode_png(data, mode)
        return pixels

    monkeypatch.setattr("data_pipeline.shards.decode_png", counting)
    num_steps = len(samples) // GLOBAL_BATCH_SIZE
    next(iter(stream(directory, start_step=num_steps * 9 // 10, end_step=num_steps)))
    assert decoded == 2 * GLOBAL_BATCH_SIZE  # picture and mask


def test_iterating_twice_gives_the_same_batches(datasets: dict[int, tuple[Path, list[Sample]]]) -> None:
    directory, _ = datasets[3]
    batches = stream(directory, start_step=1, end_step=4)
    assert len(batches) == 3
    assert keys(batches) == keys(batches)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_callers_random_state_is_untouched(
    datasets: dict[int, tuple[Path, list[Sample]]], num_workers: int
) -> None:
    directory, _ = datasets[3]
    before = torch.get_rng_state()
    list(stream(directory, end_step=3, num_workers=num_workers))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("num_samples", "global_batch_size", "world_size", "message"),
    [
        (40, 10, 4, "global_batch_size 10 cannot be divided by 4 ranks; use 8 or 12"),
        (40, 3, 4, "global_batch_size 3 cannot be divided by 4 ranks; use 4"),
        (41, 41, 2, "global_batch_size 41 cannot be divided by 2 ranks; use 40"),
        (41, 64, 4, "global_batch_size 64 does not fit a dataset of 41 samples; use 40"),
        (41, 0, 4, "global_batch_size 0 does not fit a dataset of 41 samples; use 4"),
        (3, 4, 4, "3 samples are too few for 4 ranks; build a larger dataset"),
        (0, 4, 1, "0 samples are too few for 1 ranks; build a larger dataset"),
    ],
)
def test_what_cannot_be_shared_is_refused_with_the_mend(
    tmp_path: Path, num_samples: int, global_batch_size: int, world_size: int, message: str
) -> None:
    write_dataset(tmp_path, [num_samples] if num_samples else [])
    for rank in range(world_size):
        with pytest.raises(UserError) as caught:
            stream(tmp_path, end_step=1, rank=rank, world_size=world_size, global_batch_size=global_batch_size)
        assert str(caught.value) == message
    if "use" in message:
        for size in message.partition("use ")[2].split(" or "):
            stream(tmp_path, end_step=1, world_size=world_size, global_batch_size=int(size))


def test_steps_of_an_epoch_are_never_zero() -> None:
    assert num_steps_per_epoch(10, 3) == 3
    with pytest.raises(UserError, match="global_batch_size 11 does not fit a dataset of 10 samples; use 1 to 10"):
        num_steps_per_epoch(10, 11)


def test_the_rest_is_counted_and_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_dataset(tmp_path, [20, 7])
    with caplog.at_level(logging.INFO, logger="data_pipeline.stream"):
        streams = [stream(tmp_path, end_step=6, rank=rank, world_size=2) for rank in range(2)]
        for batches in streams:
            list(batches)
    assert [batches.num_dropped_per_epoch for batches in streams] == [3, 3]
    assert [batches.num_steps_per_epoch for batches in streams] == [3, 3]
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 1
    assert "27 samples, 3 steps an epoch; 3 samples do not fill a global batch of 8" in messages[0]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_sample_that_does_not_decode_is_named_in_one_sentence(tmp_path: Path, num_workers: int) -> None:
    write_dataset(tmp_path, [8, 8])
    path = tmp_path / "shard-00001.tar"
    data = bytearray(path.read_bytes())
    at = data.rindex(b"IHDR")
    data[at : at + 4] = b"XXXX"
    path.write_bytes(data)
    with time_limit(30), pytest.raises(UserError) as caught:
        list(stream(tmp_path, end_step=2, num_workers=num_workers))
    message = str(caught.value)
    assert message.startswith(f"{path}: sample 00000015 does not decode (")
    assert "Traceback" not in message
    assert "\n" not in message


def test_a_killed_worker_ends_in_an_error(datasets: dict[int, tuple[Path, list[Sample]]]) -> None:
    directory, _ = datasets[17]
    before = set(multiprocessing.active_children())
    batches = iter(stream(directory, end_step=10**9, num_workers=2))
    next(batches)
    victim, _ = set(multiprocessing.active_children()) - before
    assert victim.pid is not None
    os.kill(victim.pid, signal.SIGKILL)
    with time_limit(30), pytest.raises(RuntimeError, match=r"DataLoader worker .*(killed|exited)"):
        list(batches)
    assert_ended(before)


@pytest.mark.parametrize("error", [ConnectionResetError(), EOFError(), FileNotFoundError()])
def test_a_worker_killed_while_it_hands_over_a_batch_is_told_alike(
    datasets: dict[int, tuple[Path, list[Sample]]], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """What is raised where the worker's end of the socket is gone; a kill hits that moment by chance only."""
    directory, _ = datasets[3]

    def hand_over(_: int) -> Batch:
        raise error

    monkeypatch.setattr("data_pipeline.stream.DataLoader", lambda *_, **__: map(hand_over, [0]))
    monkeypatch.setattr(time, "sleep", lambda _: None)
    with pytest.raises(RuntimeError, match="DataLoader worker exited"):
        list(stream(directory, end_step=1))


def test_workers_end_with_an_abandoned_stream(datasets: dict[int, tuple[Path, list[Sample]]]) -> None:
    directory, _ = datasets[17]
    before = set(multiprocessing.active_children())
    batches = iter(stream(directory, end_step=10**9, num_workers=2))
    next(batches)
    assert len(set(multiprocessing.active_children()) - before) == 2
    del batches
    assert_ended(before)


def assert_ended(before: set[BaseProcess]) -> None:
    """No child processes but those there were `before`, within ten seconds."""
    with time_limit(10):
        while set(multiprocessing.active_children()) - before:
            time.sleep(0.05)


def test_memory_and_descriptors_stay_flat_over_epochs(datasets: dict[int, tuple[Path, list[Sample]]]) -> None:
    directory, samples = datasets[17]
    num_steps = len(samples) // GLOBAL_BATCH_SIZE
    batches = iter(stream(directory, end_step=30 * num_steps, num_workers=1))
    early = usage_after(islice(batches, 2 * num_steps))
    late = usage_after(islice(batches, 18 * num_steps))
    assert early.keys() == late.keys()
    for pid, (num_files, resident) in late.items():
        # Two batches may be on their way, with a descriptor for each of their five tensors; a leak would be hundreds.
        assert abs(num_files - early[pid][0]) <= 12
        assert resident <= 1.05 * early[pid][1]


def usage_after(batches: Iterator[Batch]) -> dict[int, tuple[int, int]]:
    """Open descriptors and resident pages of this process and its workers, once `batches` were read."""
    for _ in batches:
        pass
    pids = [os.getpid(), *(child.pid or 0 for child in multiprocessing.active_children())]
    return {
        pid: (
            len(list(Path(f"/proc/{pid}/fd").iterdir())),
            int(Path(f"/proc/{pid}/statm").read_text().split()[1]),
        )
        for pid in pids
    }


def test_read_all_gives_every_sample_in_stored_order(datasets: dict[int, tuple[Path, list[Sample]]]) -> None:
    directory, samples = datasets[5]
    batches = list(read_all(directory, batch_size=16))
    assert [len(batch) for batch in batches[:-1]] == [16] * (len(samples) // 16)
    assert [key for batch in batches for key in batch.keys] == [sample.key for sample in samples]
    images = torch.cat([batch.images_BCHW for batch in batches]).permute(0, 2, 3, 1).numpy()
    np.testing.assert_array_equal(images, np.stack([sample.image for sample in samples]))


def test_workers_share_the_index_of_a_store(datasets: dict[int, tuple[Path, list[Sample]]]) -> None:
    """Opening is done before the workers start: an index that vanishes afterwards is not missed."""
    directory, samples = datasets[5]
    assert len(SampleStore(directory)) == len(samples)
    batches = stream(directory, end_step=2, num_workers=2)
    for path in directory.glob("*.index.npz"):
        path.unlink()
    assert len(keys(batches)) == 2
    assert not list(directory.glob("*.index.npz"))
