"""The order of a mixture: counts by weights, epochs of the sources, batches without a sample twice; and the stream."""

from __future__ import annotations

import random
from collections import Counter
from fractions import Fraction
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import webdataset
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from data_pipeline.core.errors import UserError
from data_pipeline.core.sample import NO_LABEL, BadSample
from data_pipeline.loading.mixture import Mixture, MixtureOrder, Shares, SourceEpochs
from data_pipeline.loading.stream import ReadConfig, Stream
from data_pipeline.remote.fetch import RemoteConfig
from data_pipeline.storage.store import SampleStore
from tests.data_pipeline.loading.batches import assert_same
from tests.tars import indexed, simple
from tests.tiny_data import damage, tiny_noise, write_tiny_dataset, write_tiny_sounds

EXAMPLES = settings(deadline=None, database=None, max_examples=25)
WEIGHTS = st.lists(
    st.one_of(st.just(0.0), st.floats(1e-3, 1e3), st.integers(1, 9).map(float)), min_size=1, max_size=8
).filter(any)


# How many samples come from each source


@EXAMPLES
@given(weights=WEIGHTS, size=st.integers(1, 300), start=st.integers(0, 10**6), num_steps=st.integers(1, 30))
def test_counts_add_up_never_fall_and_stay_near_their_share(
    weights: list[float], size: int, start: int, num_steps: int
) -> None:
    shares = Shares(weights)
    total = sum(Fraction(repr(weight)) for weight in weights)
    limit = {1: 0.0, 2: 0.5, 3: 1.0}.get(len(weights), 1.68)
    most, before = shares.most(size), shares.counts(start * size)
    for step in range(start, start + num_steps):
        after = shares.counts((step + 1) * size)
        assert sum(after) == (step + 1) * size
        for number, weight in enumerate(weights):
            assert 0 <= after[number] - before[number] <= most[number]
            assert abs(after[number] - (step + 1) * size * Fraction(repr(weight)) / total) <= limit
        before = after


# The epochs of one source


@EXAMPLES
@given(num_samples=st.integers(1, 200), seed=st.integers(0, 99), data=st.data())
def test_an_epoch_of_a_source_holds_each_sample_once_and_no_run_of_draws_holds_one_twice(
    num_samples: int, seed: int, data: st.DataObject
) -> None:
    reach = data.draw(st.integers(0, num_samples // 3))
    windows: dict[str, Any] = {}
    if data.draw(st.booleans()):
        sizes = [num_samples // 5] * 5 + [num_samples % 5]
        windows = {"shard_ends": np.cumsum([size for size in sizes if size]), "shuffle_shards": 2}
    epochs = SourceEpochs(num_samples, seed=seed, reach=reach, **windows)
    found, samples = epochs.at(np.arange(4 * num_samples))
    assert found.tolist() == np.repeat(np.arange(4), num_samples).tolist()
    for epoch in range(4):
        assert sorted(samples[epoch * num_samples : (epoch + 1) * num_samples].tolist()) == list(range(num_samples))
    for start in range(len(samples) - reach):
        assert len(set(samples[start : start + reach + 1].tolist())) == reach + 1
    some = data.draw(st.lists(st.integers(0, 4 * num_samples - 1), max_size=20))
    afresh = SourceEpochs(num_samples, seed=seed, reach=reach, **windows)
    assert afresh.at(np.array(some, dtype=np.int64))[1].tolist() == samples[some].tolist()


# The batches of a mixture


@st.composite
def mixtures(draw: st.DrawFn) -> tuple[list[int], tuple[float, ...], int, int]:
    """Sizes of sources, their weights, a global batch size, and the ranks that divide it."""
    num_sources = draw(st.integers(1, 5))
    world_size = draw(st.integers(1, 4))
    size = world_size * draw(st.integers(1, 24 // world_size))
    lists = st.lists(st.floats(0.05, 5), min_size=num_sources, max_size=num_sources)
    weights = tuple(draw(lists))
    sizes = [max(1, 3 * (part - 1)) + draw(st.integers(0, 40)) for part in Shares(weights).most(size)]
    return sizes, weights, size, world_size


def order_of(
    mixture: tuple[list[int], tuple[float, ...], int, int], rank: int = 0, world_size: int = 1, **options: Any
) -> MixtureOrder:
    sizes, weights, size, _ = mixture
    names = [f"source{number}" for number in range(len(sizes))]
    return MixtureOrder(
        sizes,
        weights,
        names=names,
        global_batch_size=size,
        rank=rank,
        world_size=world_size,
        **{"seed": 3, **options},
    )


def rows_of(order: MixtureOrder, step: int, bad: list[dict[int, BadSample]] | None = None) -> list[tuple[int, int]]:
    """The source and the sample of each row of a rank, in the order of its part of the batch."""
    rows: list[tuple[int, int]] = []
    for source in range(len(order.sizes)):
        part = order.rows(source, step, bad={} if bad is None else bad[source])
        rows += [(source, index) for index in part.indices_R.tolist()]
    return [rows[place] for place in order.row_order(step).tolist()]


def whole_batch(
    mixture: tuple[list[int], tuple[float, ...], int, int],
    step: int,
    world_size: int,
    bad: list[dict[int, BadSample]] | None = None,
) -> list[tuple[int, int]]:
    orders = [order_of(mixture, rank, world_size) for rank in range(world_size)]
    return list(chain.from_iterable(rows_of(order, step, bad) for order in orders))


@EXAMPLES
@given(mixture=mixtures(), start=st.integers(0, 60))
def test_batches_of_a_mixture_are_the_same_for_any_ranks_and_hold_no_sample_twice(
    mixture: tuple[list[int], tuple[float, ...], int, int], start: int
) -> None:
    sizes, _, size, world_size = mixture
    alone = order_of(mixture)
    for step in range(start, start + 3):
        batch = whole_batch(mixture, step, 1)
        assert len(set(batch)) == len(batch) == size
        assert whole_batch(mixture, step, world_size) == batch
        counts = Counter(source for source, _ in batch)
        drawn = np.subtract(alone.draws_before(step + 1), alone.draws_before(step)).tolist()
        assert [counts[source] for source in range(len(sizes))] == drawn


@EXAMPLES
@given(mixture=mixtures())
def test_a_step_is_computed_as_a_loop_over_all_steps_before_it_finds_it(
    mixture: tuple[list[int], tuple[float, ...], int, int],
) -> None:
    """The draws before a step, and every sample of a source once in each of its epochs."""
    sizes, _, _, _ = mixture
    order, drawn = order_of(mixture), [0] * len(sizes)
    seen: list[list[int]] = [[] for _ in sizes]
    for step in range(20):
        assert order.draws_before(step) == drawn
        batch = rows_of(order_of(mixture), step)
        in_order = [sorted(index for source, index in batch if source == number) for number in range(len(sizes))]
        for number, indices in enumerate(in_order):
            drawn[number] += len(indices)
            seen[number] += indices
    for number, size in enumerate(sizes):
        times = Counter(seen[number])
        assert sum(times.values()) == drawn[number]
        fewest, left = divmod(drawn[number], size)
        assert all(fewest <= times[index] <= fewest + 1 for index in range(size))
        assert sum(times[index] - fewest for index in range(size)) == left


@EXAMPLES
@given(mixture=mixtures(), step=st.integers(0, 40), data=st.data())
def test_bad_samples_are_replaced_within_their_source_alike_on_any_ranks(
    mixture: tuple[list[int], tuple[float, ...], int, int], step: int, data: st.DataObject
) -> None:
    sizes, _, _, world_size = mixture
    chosen = [data.draw(st.sets(st.integers(0, size - 1), max_size=size // 2)) for size in sizes]
    bad = [{index: BadSample(index, "shard", "torn") for index in indices} for indices in chosen]
    clean = whole_batch(mixture, step, 1)
    try:
        batch = whole_batch(mixture, step, 1, bad)
    except UserError:  # each possible replacement is bad too
        assert any(chosen)
        return
    assert whole_batch(mixture, step, world_size, bad) == batch
    assert len(set(batch)) == len(batch)
    for (source, index), (source_before, before) in zip(batch, clean, strict=True):
        assert source == source_before
        assert index not in chosen[source]
        assert index == before or before in chosen[source]


def test_shares_are_those_of_a_random_mix_of_the_same_weights_without_its_chance(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """500 batches of 64: our counts are off by less than two, those of webdataset's RandomMix by more than ten."""
    monkeypatch.setattr("random.random", random.Random(1).random)
    num_steps, size, weights = 500, 64, (8.0, 2.0, 0.0)
    mixture = ([900] * len(weights), weights, size, 1)
    expected = num_steps * size * np.array(weights) / sum(weights)
    drawn = webdataset.RandomMix([repeat(number) for number in range(len(weights))], probs=weights)
    counts = {
        "ours": np.array(order_of(mixture).draws_before(num_steps)),
        "random": np.bincount(list(islice(drawn, num_steps * size)), minlength=len(weights)),
    }
    is_used = expected > 0
    for of_each in counts.values():
        assert of_each.sum() == num_steps * size
        assert not of_each[~is_used].any()
        assert chisquare(of_each[is_used], expected[is_used]).pvalue > 1e-3
    assert np.abs(counts["ours"] - expected).max() < 2
    assert chisquare(counts["ours"][is_used], expected[is_used]).pvalue > 1 - 1e-3
    assert np.abs(counts["random"] - expected).max() > 10


def test_a_source_that_is_smaller_than_its_part_of_a_batch_is_refused() -> None:
    with pytest.raises(UserError, match="take up to 8 of a global batch of 16 from source0, which holds 9 samples"):
        order_of(([9, 99], (1.0, 1.0), 16, 1))


# The stream of a mixture

SIZES = {"few": 31, "many": 83}
WEIGHTS_OF_STREAM = (1.0, 2.0)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two datasets of pictures of 32 x 32: one with an overlay that is drawn online, one with none."""
    root = tmp_path_factory.mktemp("sources")
    write_tiny_dataset(root / "few", num_samples=SIZES["few"], overlay="online")
    write_tiny_dataset(root / "many", num_samples=SIZES["many"], seed=5, overlay="online")
    return root


def stream(
    root: Path,
    *,
    start_step: int = 0,
    end_step: int = 20,
    rank: int = 0,
    world_size: int = 1,
    names: tuple[str, ...] = ("few", "many"),
    num_workers: int = 0,
    **read: Any,
) -> Stream:
    config = ReadConfig(num_workers=num_workers, **{"placement": "stream", **read})
    where = f"file://{root}" if config.remote.cache_dir else root
    stores = {name: SampleStore(f"{where}/{name}", remote=config.remote) for name in names}
    return Stream(
        Mixture(stores, WEIGHTS_OF_STREAM),
        read=config,
        global_batch_size=12,
        seed=7,
        rank=rank,
        world_size=world_size,
        start_step=start_step,
        end_step=end_step,
    )


def test_a_mixture_in_memory_partly_or_wholly_gives_the_batches_of_streaming(sources: Path) -> None:
    streamed = list(stream(sources))
    assert len(streamed) == 20
    whole = stream(sources, placement="host")
    assert whole.placement == "host"
    partly = stream(sources, placement="auto", resident_gigabytes=0.00015)  # 31 pictures of 3 kB with masks, not 83
    assert [source.placed.kind for source in partly._sources] == ["host", "stream"]
    for others in (whole, partly, stream(sources, num_workers=2)):
        assert_same(streamed, others)
    assert streamed[0].inputs_a is streamed[0].inputs_b


def test_a_mixture_is_resumed_at_any_step_on_other_ranks(sources: Path) -> None:
    whole = list(stream(sources, end_step=11))
    for start, world_size in ((0, 2), (7, 3), (8, 4)):
        parts = [
            list(stream(sources, start_step=start, end_step=11, rank=rank, world_size=world_size))
            for rank in range(world_size)
        ]
        for expected, found in zip(whole[start:], zip(*parts, strict=True), strict=True):
            assert list(chain.from_iterable(part.keys for part in found)) == expected.keys
            assert torch.equal(torch.cat([part.inputs_a for part in found]), expected.inputs_a)


def test_a_second_visit_has_another_overlay_and_the_log_counts_the_sources(sources: Path) -> None:
    batches = stream(sources)
    looks: dict[int, set[bytes]] = {}
    visits: Counter[int] = Counter()
    for batch in batches:
        for index, picture in zip(batch.index_B.tolist(), batch.inputs_a, strict=True):
            looks.setdefault(index, set()).add(picture.numpy().tobytes())
            visits[index] += 1
    assert max(visits.values()) >= 3
    assert all(len(looks[index]) > 1 for index in visits if visits[index] >= 3)
    metrics = batches.source_metrics(20)
    assert metrics["mixture/few/samples"] == sum(visits[index] for index in visits if index < 31)
    assert metrics["mixture/few/samples"] + metrics["mixture/many/samples"] == 20 * 12
    assert metrics["mixture/few/epochs"] == metrics["mixture/few/samples"] / 31
    assert [batches.source_metrics(step)["mixture/few/batch"] for step in (7, 8)] == [4, 4]
    assert batches.num_steps_per_epoch == (31 + 83) // 12
    assert [batch.epoch for batch in batches] == [step // 9 for step in range(20)]


def test_sounds_mix_too(tmp_path: Path) -> None:
    write_tiny_sounds(tmp_path / "noisy", num_samples=31, overlay=tiny_noise())
    write_tiny_sounds(tmp_path / "quiet", num_samples=83, seed=5)
    streamed, held = (list(stream(tmp_path, names=("noisy", "quiet"), placement=way)) for way in ("stream", "host"))
    assert streamed[0].inputs_a.dtype == torch.float32
    assert_same(streamed, held)


def test_sources_may_differ_in_overlay_and_every_batch_has_the_labels_of_all(tmp_path: Path) -> None:
    """Also a batch without a row of the only source that has a label, of which no sample then has it."""
    write_tiny_dataset(tmp_path / "few", num_samples=31, overlay="baked")
    write_tiny_dataset(tmp_path / "many", num_samples=83, seed=5, overlay="none")
    has_row = set()
    for rank in range(4):
        for batch in stream(tmp_path, rank=rank, world_size=4):
            assert list(batch.labels) == ["base", "overlay"]
            assert batch.masks_BHW is not None
            is_few = batch.index_B < 31
            assert torch.equal(batch.labels["overlay"] != NO_LABEL, is_few)
            assert torch.equal(batch.masks_BHW.flatten(1).any(1), is_few)
            has_row.add(bool(is_few.any()))
    assert has_row == {True, False}


def test_a_mixture_of_pictures_that_are_resized_in_two_ways_warns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_tiny_dataset(tmp_path / "few", num_samples=31, overlay="none")
    indexed(simple(tmp_path / "tars", [83]), tmp_path / "many", size=16)
    stream(tmp_path, end_step=1)
    assert "may tell sources apart" in caplog.text


@pytest.mark.parametrize("placement", ["stream", "host"])
def test_a_bad_sample_of_a_source_is_named_and_replaced(sources: Path, tmp_path: Path, placement: str) -> None:
    write_tiny_dataset(tmp_path / "few", num_samples=31, overlay="online")
    write_tiny_dataset(tmp_path / "many", num_samples=83, seed=5, overlay="online")
    damage(tmp_path / "many", [17])
    found: set[BadSample] = set()
    for was, now in zip(stream(sources), stream(tmp_path, placement=placement, max_bad_share=0.05), strict=True):
        assert 31 + 17 not in now.index_B.tolist()
        assert len(set(now.keys)) == len(now.keys)
        for before, after in zip(was.index_B.tolist(), now.index_B.tolist(), strict=True):
            assert before == after or (before == 31 + 17 and after >= 31)
        found |= set(now.bad)
    (bad,) = found
    assert (bad.index, bad.key, bad.shard) == (48, "00000017", "many/shard-00001.tar")
    with pytest.raises(UserError, match="the mixture of few and many: 1 of 114 samples"):
        list(stream(tmp_path, placement="host", max_bad_share=0.001))


def test_remote_sources_in_windows_give_the_batches_of_local_ones(sources: Path, tmp_path: Path) -> None:
    """Two windows of each source fit into the cache; a cache that is too small for both together is refused."""
    largest = max(int(SampleStore(sources / name).shard_bytes.max()) for name in SIZES) / 1e9

    def remote(gigabytes: float) -> Stream:
        config = RemoteConfig(cache_dir=str(tmp_path / "cache"), cache_gigabytes=gigabytes)
        return stream(sources, num_workers=1, shuffle_shards=1, remote=config)

    assert_same(stream(sources, shuffle_shards=1), remote(5 * largest + 0.02))
    with pytest.raises(UserError, match=r"few and .*many: the shuffling needs .* GB.*data.remote.cache_gigabytes"):
        remote(3 * largest)
