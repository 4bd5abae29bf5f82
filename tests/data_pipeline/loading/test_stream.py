from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import tarfile
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from data_pipeline.audio.waveform import crop_last
from data_pipeline.core.counter_rng import DrawKeys
from data_pipeline.core.errors import UserError
from data_pipeline.core.sample import Sample
from data_pipeline.loading.decode import decode
from data_pipeline.loading.order import BatchOrder, EpochOrders, ShardWindows
from data_pipeline.loading.stream import ReadConfig, Stream
from data_pipeline.loading.whole import read_all
from data_pipeline.overlays import evaluation_keys
from data_pipeline.overlays.shapes import Shapes
from data_pipeline.remote.fetch import RemoteConfig
from data_pipeline.storage.store import SampleStore
from tests.data_pipeline.loading.batches import noise, whole_batches
from tests.data_pipeline.random_shards import random_shard_sizes, write_dataset
from tests.data_pipeline.stored_samples import decode_sample
from tests.tiny_data import NUM_POINTS, damage, write_tiny_dataset, write_tiny_sounds

GLOBAL_BATCH_SIZE = 8
Dataset = tuple[Path, Sequence[Sample]]
SHARD_SIZES = st.lists(st.integers(1, 20), min_size=4, max_size=9)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """A dataset of 17 shards of random sizes."""
    directory = tmp_path_factory.mktemp("dataset")
    return directory, write_dataset(directory, random_shard_sizes(17))


def stream(
    location: str | Path,
    *,
    end_step: int,
    start_step: int = 0,
    rank: int = 0,
    world_size: int = 1,
    num_workers: int = 0,
    global_batch_size: int = GLOBAL_BATCH_SIZE,
    overlay_draw: Literal["per_item", "per_view"] = "per_item",
    **read: Any,
) -> Stream:
    return Stream(
        location,
        read=ReadConfig(num_workers=num_workers, **{"placement": "stream", **read}),
        global_batch_size=global_batch_size,
        seed=7,
        rank=rank,
        world_size=world_size,
        start_step=start_step,
        end_step=end_step,
        overlay_draw=overlay_draw,
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


# Through the shards (test_order.py has the rest of the order)


@settings(deadline=None, database=None, max_examples=10)
@given(sizes=SHARD_SIZES, world_size=st.integers(1, 4), shuffled_by_windows=st.booleans())
def test_all_ranks_get_equally_many_equal_batches_from_any_shards(
    sizes: list[int], world_size: int, shuffled_by_windows: bool
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        check_exactness(Path(directory), sizes, world_size, num_workers=0, shuffled_by_windows=shuffled_by_windows)


@pytest.mark.slow
def test_workers_change_nothing(tmp_path: Path) -> None:
    with time_limit(60):
        check_exactness(tmp_path, random_shard_sizes(5), 1, num_workers=2, shuffled_by_windows=True)


def check_exactness(
    directory: Path, sizes: list[int], world_size: int, *, num_workers: int, shuffled_by_windows: bool
) -> None:
    samples = write_dataset(directory, sizes)
    size = max(len(samples) // 3 // world_size, 1) * world_size
    shuffle_shards = (len(sizes) + 1) // 2 if shuffled_by_windows else None
    options: dict[str, Any] = {"global_batch_size": size, "shuffle_shards": shuffle_shards}
    num_steps = len(samples) // size
    by_rank = [
        list(
            stream(
                directory,
                end_step=2 * num_steps,
                rank=rank,
                world_size=world_size,
                num_workers=num_workers,
                **options,
            )
        )
        for rank in range(world_size)
    ]
    for batches in by_rank:
        assert [batch.step for batch in batches] == list(range(2 * num_steps))
        assert {len(batch) for batch in batches} == {size // world_size}
    alone = keys(stream(directory, end_step=2 * num_steps, **options))
    assert whole_batches([[batch.keys for batch in batches] for batches in by_rank]) == alone
    for epoch in range(2):
        seen = [key for batches in by_rank for batch in batches if batch.epoch == epoch for key in batch.keys]
        assert len(seen) == len(set(seen)) == num_steps * size
        assert set(seen) <= {sample.key for sample in samples}


@pytest.mark.parametrize("global_batch_size", [0, 10, 64])
def test_batches_that_ranks_cannot_share_equally_are_refused(tmp_path: Path, global_batch_size: int) -> None:
    write_dataset(tmp_path, [40])
    with pytest.raises(UserError, match=f"global_batch_size {global_batch_size}"):
        stream(tmp_path, end_step=1, world_size=4, global_batch_size=global_batch_size)


def test_batches_hold_what_was_stored(dataset: Dataset) -> None:
    directory, samples = dataset
    for batch in stream(directory, end_step=5, num_workers=1):
        assert batch.inputs_b is batch.inputs_a
        assert batch.masks_BHW is not None
        for row, index in enumerate(batch.index_B.tolist()):
            sample = samples[index]
            assert batch.keys[row] == sample.key
            assert batch.labels["base"][row] == sample.labels["base"]
            assert batch.labels["overlay"][row] == sample.labels["overlay"]
            np.testing.assert_array_equal(batch.inputs_a[row].permute(1, 2, 0).numpy(), sample.content)
            np.testing.assert_array_equal(batch.masks_BHW[row].numpy(), sample.mask)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_resumed_at_any_step_equals_the_uninterrupted_tail(dataset: Dataset, num_workers: int) -> None:
    directory, samples = dataset
    end_step = 2 * (len(samples) // GLOBAL_BATCH_SIZE) - 1
    whole = keys(stream(directory, end_step=end_step))
    for start_step in range(0, end_step + 1, 5) if num_workers == 0 else (end_step // 2 + 2,):
        resumed = stream(directory, start_step=start_step, end_step=end_step, num_workers=num_workers)
        assert keys(resumed) == whole[start_step:]


def test_resuming_decodes_nothing_that_it_skips(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, samples = dataset
    asked_for: list[int] = []
    read_stored = SampleStore.read

    def counting(store: SampleStore, indices: NDArray[np.int64]) -> Any:
        asked_for.extend(indices.tolist())
        return read_stored(store, indices)

    monkeypatch.setattr(SampleStore, "read", counting)
    num_steps = len(samples) // GLOBAL_BATCH_SIZE
    batch = next(iter(stream(directory, start_step=num_steps * 9 // 10, end_step=num_steps)))
    assert asked_for == batch.index_B.tolist()


@pytest.mark.parametrize("shuffle_shards", [None, 2])
def test_the_shards_of_a_step_are_those_that_hold_its_samples(dataset: Dataset, shuffle_shards: int | None) -> None:
    location, samples = dataset
    shard_of: dict[str, str] = {}
    for shard in sorted(location.glob("*.tar")):
        with tarfile.open(shard) as tar:
            shard_of |= {member.name.partition(".")[0]: shard.name for member in tar}
    assert len(shard_of) == len(samples)
    end_step = 2 * len(samples) // GLOBAL_BATCH_SIZE
    part = stream(location, rank=1, world_size=2, end_step=end_step, shuffle_shards=shuffle_shards)
    for batch in part:
        assert part.shards_of(batch.step) == sorted({shard_of[key] for key in batch.keys})


@pytest.mark.parametrize("placement", ["stream", "host"])
def test_iterators_of_one_stream_do_not_disturb_each_other(placement: str, dataset: Dataset) -> None:
    path, _ = dataset
    both = stream(path, end_step=6, placement=placement)
    alone = keys(both)
    last = both.batches(range(3, 6))
    pairs = [(one.keys, next(last).keys) for one, _ in zip(both, range(3), strict=False)]
    assert [one for one, _ in pairs] == alone[:3]
    assert [other for _, other in pairs] == alone[3:]


def test_the_callers_random_state_is_untouched(dataset: Dataset) -> None:
    directory, _ = dataset
    before = torch.get_rng_state()
    list(stream(directory, end_step=3, num_workers=1))
    assert torch.equal(torch.get_rng_state(), before)


# What is drawn


def test_online_pictures_are_drawn_by_seed_epoch_index_and_view(tmp_path: Path) -> None:
    directory = write_tiny_dataset(tmp_path / "online", num_samples=24, overlay="online")
    clean_NCHW = decode(SampleStore(directory), np.arange(24)).pictures_BCHW
    assert clean_NCHW is not None
    shared = list(stream(directory, end_step=6))
    apart = list(stream(directory, end_step=6, overlay_draw="per_view"))
    overlay = Shapes()
    for item, view in zip(shared, apart, strict=True):
        clean_BCHW = clean_NCHW[item.index_B]
        a, b = (overlay(clean_BCHW, DrawKeys(7, item.epoch, item.index_B, view=number)) for number in (0, 1))
        assert item.inputs_a is item.inputs_b
        for batch in (item, view):
            assert torch.equal(batch.inputs_a, a.inputs)
            assert torch.equal(batch.labels["overlay"], a.label_B)
            assert batch.masks_BHW is not None
            assert torch.equal(batch.masks_BHW, a.masks_BHW)
        assert torch.equal(view.inputs_b, b.inputs)
        assert not torch.equal(view.inputs_b, view.inputs_a)
    by_epoch = [
        {
            int(i): int(label)
            for batch in shared[part]
            for i, label in zip(batch.index_B, batch.labels["overlay"], strict=True)
        }
        for part in (slice(0, 3), slice(3, 6))
    ]
    assert by_epoch[0].keys() == by_epoch[1].keys()
    assert by_epoch[0] != by_epoch[1]


@pytest.mark.parametrize(("split", "num_workers"), [("train", 1), ("test", 0)])
def test_sounds_are_cut_and_mixed_for_each_view(
    tmp_path: Path, split: Literal["train", "test"], num_workers: int
) -> None:
    directory = write_tiny_sounds(tmp_path / split, num_samples=24, overlay=noise(), split=split)
    store = SampleStore(directory)
    assert store.overlay is not None
    differ = 0
    for batch in stream(directory, end_step=6, num_workers=num_workers, overlay_draw="per_view"):
        for view, inputs_BT in enumerate((batch.inputs_a, batch.inputs_b)):
            draw = DrawKeys(7, batch.epoch, batch.index_B, view=view)
            last_B = crop_last(draw) if split == "train" else torch.zeros(8, dtype=torch.bool)
            expected_BT = torch.zeros(8, NUM_POINTS)
            for row, index in enumerate(batch.index_B.tolist()):
                points = decode_sample(store, index).content / np.float32(32_768)
                part = points[-NUM_POINTS:] if last_B[row] else points[:NUM_POINTS]
                expected_BT[row, : len(part)] = torch.from_numpy(part)
            mixed = store.overlay(expected_BT, draw)
            assert torch.equal(inputs_BT, mixed.inputs)
            if view == 0:
                assert torch.equal(batch.labels["overlay"], mixed.label_B)
            else:
                differ += int((batch.labels["overlay"] != mixed.label_B).sum())
        assert batch.masks_BHW is None
    assert differ > 0


def test_one_draw_for_each_view_needs_an_online_overlay(tmp_path: Path) -> None:
    directory = write_tiny_dataset(tmp_path / "data", num_samples=8, overlay="baked")
    with pytest.raises(UserError, match=r"built without `--overlay online`, which per-view overlays need"):
        stream(directory, end_step=1, overlay_draw="per_view")


# Bad samples


@pytest.mark.parametrize(("num_workers", "world_size"), [(0, 2), (2, 1)])
def test_training_goes_on_past_bad_samples(tmp_path: Path, num_workers: int, world_size: int) -> None:
    samples = write_dataset(tmp_path, [16, 16, 8])
    damage(tmp_path, [3, 20, 39])
    bad = {3, 20, 39}
    by_rank = [
        list(
            stream(
                tmp_path,
                end_step=10,
                rank=rank,
                world_size=world_size,
                num_workers=num_workers,
                max_bad_share=0.1,
            )
        )
        for rank in range(world_size)
    ]
    order = BatchOrder(EpochOrders(40, 7), 8)
    clean = [order.rows(0, step, bad={}).indices_R.tolist() for step in range(10)]
    seen = whole_batches([[batch.index_B.tolist() for batch in batches] for batches in by_rank])
    passed = whole_batches([[batch.bad for batch in batches] for batches in by_rank])
    for was, now, told in zip(clean, seen, passed, strict=True):
        assert len(set(now)) == 8
        assert not set(now) & bad
        assert sum(a != b for a, b in zip(was, now, strict=True)) == len(bad & set(was))
        assert bad & set(was) <= {sample.index for sample in told}
    assert {sample.index: sample.shard for batch in passed for sample in batch} == {
        3: "shard-00000.tar",
        20: "shard-00001.tar",
        39: "shard-00002.tar",
    }
    for batch in by_rank[0]:
        for row, index in enumerate(batch.index_B.tolist()):
            np.testing.assert_array_equal(batch.inputs_a[row].permute(1, 2, 0).numpy(), samples[index].content)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_where_nothing_can_stand_in_one_sentence_says_so(tmp_path: Path, num_workers: int) -> None:
    write_dataset(tmp_path, [8, 8])
    damage(tmp_path, [15])
    before = set(multiprocessing.active_children())
    with (
        time_limit(30),
        pytest.raises(UserError, match=r"^sample 00000015 cannot be read") as caught,
    ):
        list(stream(tmp_path, end_step=2, num_workers=num_workers, global_batch_size=16, max_bad_share=0.1))
    assert_ended(before)  # though `caught` holds the frames of the stream
    assert "\n" not in str(caught.value)


def test_too_many_bad_samples_end_it_before_the_first_step(tmp_path: Path) -> None:
    write_dataset(tmp_path, [20, 20])
    damage(tmp_path, range(7))
    with pytest.raises(UserError, match="max_bad_share"):
        stream(tmp_path, end_step=1, placement="host", max_bad_share=0.1)
    assert keys(stream(tmp_path, end_step=1, placement="host", max_bad_share=1.0))


# Workers


def test_a_killed_worker_ends_in_an_error(dataset: Dataset) -> None:
    directory, _ = dataset
    before = set(multiprocessing.active_children())
    batches = iter(stream(directory, end_step=10**9, num_workers=2))
    next(batches)
    victim, _ = set(multiprocessing.active_children()) - before
    assert victim.pid is not None
    os.kill(victim.pid, signal.SIGKILL)
    with time_limit(30), pytest.raises(RuntimeError, match=r"DataLoader worker .*(killed|exited)"):
        list(batches)
    assert_ended(before)


@pytest.mark.parametrize(
    ("of", "name", "reason"),
    [
        (torch.UntypedStorage, "_share_fd_cpu_", "No space left on device"),
        (multiprocessing.connection, "Listener", "AF_UNIX path too long"),
    ],
)
def test_a_worker_that_cannot_hand_over_a_batch_ends_in_a_sentence_and_not_in_a_wait(
    of: object, name: str, reason: str, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(reason) if of is multiprocessing.connection else RuntimeError(reason)

    monkeypatch.setattr(of, name, refuse)  # inherited by the worker, which is forked
    directory, _ = dataset
    with time_limit(10), pytest.raises(UserError, match=rf"hand over a batch \({reason}\): it needs room in /dev/shm"):
        list(stream(directory, end_step=3, num_workers=1))


def test_a_worker_ends_with_a_sigterm_of_the_training_process_and_of_no_other(dataset: Dataset) -> None:
    """When a process ends, it sends SIGTERM to the workers of a stream that it holds, and waits without a limit."""
    directory, _ = dataset
    before = set(multiprocessing.active_children())
    with threads_in_forks():
        batches = iter(stream(directory, end_step=10**9, num_workers=1))
        next(batches)
    (worker,) = set(multiprocessing.active_children()) - before
    for name in ("TERM", "INT", "TERM"):
        subprocess.run(["sh", "-c", f"kill -{name} {worker.pid}"], check=True)
    worker.join(timeout=0.2)
    assert worker.is_alive()
    next(batches)
    worker.terminate()
    worker.join(timeout=10)
    assert worker.exitcode == 0
    del batches


@contextmanager
def threads_in_forks() -> Iterator[None]:
    """Let every process that is forked inside start a thread at once, as W&B does."""
    is_inside = [True]

    def start() -> None:
        if is_inside:
            threading.Thread(target=time.sleep, args=(60,), daemon=True).start()

    os.register_at_fork(after_in_child=start)  # it cannot be taken back
    yield
    is_inside.clear()


def assert_ended(before: set[BaseProcess]) -> None:
    """No child processes but those there were `before`: torch gives each worker five seconds to end by itself."""
    with time_limit(30):
        while set(multiprocessing.active_children()) - before:
            time.sleep(0.05)


# Remote


def remote_dataset(tmp_path: Path, *, num_cached: int) -> tuple[Path, str, RemoteConfig]:
    """A dataset of ten shards, where it can be piped from, and a cache that holds `num_cached` of them."""
    directory = tmp_path / "dataset"
    write_dataset(directory, [6] * 10)
    largest = SampleStore(directory).shard_bytes.max() + 2048
    config = RemoteConfig(cache_dir=str(tmp_path / "cache"), cache_gigabytes=(num_cached + 0.5) * largest / 1e9)
    return directory, f"file://{directory}", config


def test_shards_are_fetched_ahead_window_by_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked_for: list[list[int]] = []
    monkeypatch.setattr(SampleStore, "prefetch", lambda _, shards: asked_for.append(list(shards)))
    _, location, config = remote_dataset(tmp_path, num_cached=4)
    shards_of = [
        sorted({index // 6 for index in batch.index_B.tolist()})
        for batch in stream(location, end_step=16, global_batch_size=4, shuffle_shards=2, remote=config)
    ]
    now, after = (ShardWindows(np.arange(6, 61, 6), 2, seed=7, epoch=epoch) for epoch in (0, 1))  # of 15 steps
    windows = [sorted(now.window(number).tolist()) for number in range(5)]
    windows += [sorted(after.window(number).tolist()) for number in range(2)]
    assert [sorted(shards[:2]) for shards in asked_for] == windows[:-1]
    assert [sorted(shards[2:]) for shards in asked_for] == windows[1:]
    for shards in shards_of:
        assert any(set(shards) <= set(two) for two in asked_for)


def test_a_cache_that_is_too_small_for_the_order_is_refused(tmp_path: Path) -> None:
    _, location, config = remote_dataset(tmp_path, num_cached=4)
    message = (
        r"the shuffling needs 0\.\d+ GB .* raise data.remote.cache_gigabytes to that, or lower data.shuffle_shards"
    )
    with pytest.raises(UserError, match=message):
        stream(location, end_step=1, remote=config)
    with pytest.raises(UserError, match=message):
        stream(location, end_step=1, remote=config, shuffle_shards=3)
    assert keys(stream(location, end_step=1, remote=config, placement="host"))  # reads each shard once


def test_a_run_that_was_begun_in_memory_can_be_resumed_in_its_last_epoch(tmp_path: Path) -> None:
    """Less than an epoch is left, so streaming would be enough, but the cache is too small for it."""
    _, location, config = remote_dataset(tmp_path, num_cached=4)
    begun = stream(location, end_step=20, remote=config, placement="auto")
    resumed = stream(location, start_step=19, end_step=20, remote=config, placement="auto")
    assert (begun.placement, resumed.placement) == ("host", "host")
    assert keys(resumed) == keys(begun)[19:]
    by_windows = stream(location, end_step=1, remote=config, placement="auto", shuffle_shards=2)
    assert by_windows.placement_reason == "less than an epoch is left to read"


# All of it


def test_read_all_gives_every_sample_in_stored_order(dataset: Dataset) -> None:
    directory, samples = dataset
    batches = list(read_all(directory, batch_size=16))
    assert [len(batch) for batch in batches[:-1]] == [16] * (len(samples) // 16)
    assert [key for batch in batches for key in batch.keys] == [sample.key for sample in samples]
    pictures_NCHW = torch.cat([batch.inputs_a for batch in batches])
    expected = np.stack([sample.content for sample in samples])
    np.testing.assert_array_equal(pictures_NCHW.permute(0, 2, 3, 1).numpy(), expected)


def test_read_all_draws_the_same_in_batches_of_any_size(tmp_path: Path) -> None:
    directory = write_tiny_dataset(tmp_path / "online", num_samples=30, overlay="online", split="test")
    clean_NCHW = decode(SampleStore(directory), np.arange(30)).pictures_BCHW
    for draw in (0, 3):
        expected = Shapes()(clean_NCHW, evaluation_keys(torch.arange(30), draw=draw))
        for batch_size in (7, 30):
            batches = list(read_all(directory, batch_size=batch_size, draw=draw))
            assert torch.equal(torch.cat([batch.inputs_a for batch in batches]), expected.inputs)
            assert torch.equal(torch.cat([batch.labels["overlay"] for batch in batches]), expected.label_B)
    assert clean_NCHW is not None
    (clean,) = read_all(directory, batch_size=30, draw=None)
    assert torch.equal(clean.inputs_a, clean_NCHW)


def test_read_all_leaves_out_what_cannot_be_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = write_tiny_sounds(tmp_path / "sounds", num_samples=20)
    damage(directory, [4, 8, 9])
    batches = list(read_all(directory, batch_size=2, max_bad_share=0.2))
    seen = [index for batch in batches for index in batch.index_B.tolist()]
    assert seen == [index for index in range(20) if index not in (4, 8, 9)]
    assert [sample.index for batch in batches for sample in batch.bad] == [4]  # no batch is left of 8 and 9
    assert sum("is left out" in record.getMessage() for record in caplog.records) == 3
    with pytest.raises(UserError, match=r"3 of 20 samples \(15.00%\) cannot be read"):
        list(read_all(directory, batch_size=2, max_bad_share=0.1))
