"""Batches of near neighbours: the search, the order, the loss, and runs over ranks and over interruptions."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from configs.resolve import resolve_recipe
from data_pipeline.core.errors import UserError
from data_pipeline.loading.order import BatchOrder, EpochOrders
from data_pipeline.loading.stream import ReadConfig, Stream
from tests.gloo import run_ranks
from tests.small_encoder import CONVNET
from tests.tiny_data import damage, write_tiny_dataset, write_tiny_pair
from tests.trainer.test_mixture import stop_after
from trainer.config import RunConfig
from trainer.data import read_manifests
from trainer.modules import build_modules
from trainer.neighbours import (
    NeighbourOrder,
    NeighboursConfig,
    NeighbourSearch,
    nearest_neighbours,
    neighbour_order,
    read_groups,
)
from trainer.objectives import PureObjective, symmetric_info_nce_loss
from trainer.objectives.objective import ViewPair
from trainer.run_dir import RunDir
from trainer.train import train

NUM_SAMPLES, BATCH_SIZE, GROUP_SIZE = 83, 16, 4


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_pair(tmp_path_factory.mktemp("data"), num_train=NUM_SAMPLES, num_test=16)


def configure(data: Path, *overrides: str) -> RunConfig:
    every = [
        f"data.train_dir={data}/train",
        f"data.test_dir={data}/test",
        f"global_batch_size={BATCH_SIZE}",
        CONVNET,
        "objective={kind: symmetric_info_nce}",
        f"neighbours={{from_epoch: 1, group_size: {GROUP_SIZE}}}",
        "num_epochs=3",
        "precision=float64",
        "log_every_steps=1",
        "tracking.wandb=disabled",
    ]
    return resolve_recipe("debug:image", [*every, *overrides])


def train_on_rank(config: RunConfig, run_dir: Path) -> None:
    train(config, RunDir(run_dir), device=torch.device("cpu"), command="test")


def losses(run_dir: Path) -> list[float]:
    return [entry["train/loss"] for entry in RunDir(run_dir).read_metrics()]


def test_neighbours_are_those_of_a_loop_and_unknown_samples_are_none() -> None:
    features = torch.randn(40, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    known = torch.ones(40, dtype=torch.bool)
    known[[0, 7, 39]] = False
    found = nearest_neighbours(features, known, group_size=5)
    mean = torch.stack([features[i] for i in range(40) if known[i]]).mean(0)
    for sample in range(40):
        if known[sample]:
            others = [other for other in range(40) if known[other] and other != sample]
            others.sort(key=lambda j: -float(F.cosine_similarity(features[sample] - mean, features[j] - mean, dim=0)))
            assert found[sample].tolist() == [sample, *others[:4]]
    np.testing.assert_array_equal(found[[7, 39]], found[[6, 38]])
    np.testing.assert_array_equal(found[0], found[1])
    with pytest.raises(UserError, match="only 4 samples can be read"):
        nearest_neighbours(features[:4], torch.ones(4, dtype=torch.bool), group_size=5)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_batch_consists_of_whole_groups_of_other_samples_in_each_epoch(world_size: int) -> None:
    groups = np.random.default_rng(0).integers(NUM_SAMPLES, size=(NUM_SAMPLES, GROUP_SIZE))
    groups[:, 0] = np.arange(NUM_SAMPLES)
    orders = [
        NeighbourOrder(EpochOrders(NUM_SAMPLES, 3), BATCH_SIZE, rank, world_size, groups=lambda _: groups)
        for rank in range(world_size)
    ]
    whole = NeighbourOrder(EpochOrders(NUM_SAMPLES, 3), BATCH_SIZE, groups=lambda _: groups)
    first_of_epochs = []
    for epoch in range(2):
        first: list[int] = []
        for step in range(epoch * whole.num_steps_per_epoch, (epoch + 1) * whole.num_steps_per_epoch):
            rows = [order.rows(0, step, bad={}) for order in orders]
            batch = np.concatenate([part.indices_R for part in rows])
            np.testing.assert_array_equal(batch, whole.rows(0, step, bad={}).indices_R)
            assert {part.key_epoch for part in rows} == {epoch}
            for group in batch.reshape(-1, GROUP_SIZE):
                np.testing.assert_array_equal(group, groups[group[0]])
                first.append(int(group[0]))
        assert len(set(first)) == len(first) == whole.num_steps_per_epoch * BATCH_SIZE // GROUP_SIZE
        first_of_epochs.append(first)
    assert set(first_of_epochs[0]) != set(first_of_epochs[1])


@pytest.mark.parametrize("placement", ["stream", "host"])
def test_a_sample_that_went_bad_since_its_group_was_found_is_named(placement: Any, tmp_path: Path) -> None:
    directory = write_tiny_dataset(tmp_path / "data", num_samples=16)
    damage(directory, [5])
    groups_NG = np.stack([np.arange(16), np.arange(1, 17) % 16], axis=1)
    groups_NG[:, 1] = 5
    read = ReadConfig(placement=placement, num_workers=0, max_bad_share=0.1)
    stream = Stream(directory, read=read, global_batch_size=12, seed=0)
    assert isinstance(stream.order, BatchOrder)
    with pytest.raises(UserError, match=r"sample 00000005 cannot be read, but it is in a group of neighbours"):
        list(stream.batches(range(1), order=NeighbourOrder(**vars(stream.order), groups=lambda _: groups_NG)))


def test_the_loss_is_the_mean_of_the_losses_of_the_groups() -> None:
    z_a, z_b = torch.randn(2, 12, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    z_a.requires_grad_(), z_b.requires_grad_()
    pair = ViewPair(z_a, z_b, torch.arange(12), 0, group_size=GROUP_SIZE)
    loss = PureObjective(symmetric_info_nce_loss, temperature=0.2)(z_a, z_b, pair).loss
    expected = torch.stack(
        [symmetric_info_nce_loss(z_a[k : k + 4], z_b[k : k + 4], temperature=0.2).loss for k in (0, 4, 8)]
    ).mean()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    gradients = [torch.autograd.grad(each, (z_a, z_b)) for each in (loss, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-14)


@pytest.mark.ranks
def test_ranks_follow_one_process_and_a_run_goes_on_within_an_epoch(data: Path, tmp_path: Path) -> None:
    """Groups are found at steps 5 and 10; a run that was stopped after 6 or 12 steps ends as one that was not.

    After 12 steps, less than an epoch is left, of which other runs stream the samples.
    """
    config = configure(data, "checkpoint_every_steps=2", "keep_checkpoints=9")
    for num_ranks in (1, 2):
        run_ranks(train_on_rank, num_ranks, config, tmp_path / str(num_ranks))
    whole, together = losses(tmp_path / "1"), losses(tmp_path / "2")
    assert len(whole) == 15
    np.testing.assert_allclose(together, whole, rtol=1e-9)
    for epoch in (1, 2):
        found = [read_groups(tmp_path / name, epoch) for name in ("1", "2")]
        np.testing.assert_array_equal(found[0], found[1])
        assert (found[0][:, 0] == np.arange(NUM_SAMPLES)).sum() >= 80  # the others are not in a batch of the epoch

    for stopped_after, num_ranks in ((6, 2), (12, 1)):
        run = RunDir(shutil.copytree(tmp_path / "1", tmp_path / f"{stopped_after} {num_ranks}"))
        stop_after(run, stopped_after)
        run_ranks(train_on_rank, num_ranks, config, run.path)
        if num_ranks == 1:
            assert losses(run.path) == whole
        np.testing.assert_allclose(losses(run.path), whole, rtol=1e-9)


@pytest.mark.parametrize(
    ("every", "found_in"),
    [(1, [None, None, 2, 3, 4, 5, 6]), (3, [None, None, 2, 2, 2, 5, 5]), (None, [None] * 2 + [2] * 5)],
)
def test_groups_stay_until_the_next_search(every: int | None, found_in: list[int | None]) -> None:
    config = NeighboursConfig(from_epoch=2, find_every_epochs=every)
    assert [config.found_in(epoch) for epoch in range(7)] == found_in


@pytest.mark.process
def test_a_run_that_keeps_its_groups_goes_on_with_them(data: Path, tmp_path: Path) -> None:
    """It is stopped at step 12, within the third epoch, which has the groups that were found in the second."""
    words = ["neighbours.find_every_epochs=2", "checkpoint_every_steps=12", "keep_checkpoints=9"]
    config = configure(data, "num_epochs=4", *words)
    train_on_rank(config, tmp_path)
    whole = losses(tmp_path)
    found = sorted(path.name for path in (tmp_path / "neighbours").iterdir())
    assert found == ["epoch_00001.npy", "epoch_00003.npy"]

    stop_after(RunDir(tmp_path), 12)
    train_on_rank(config, tmp_path)
    assert losses(tmp_path) == whole
    renewed = configure(data, "num_epochs=4")
    train_on_rank(renewed, tmp_path / "renewed")
    assert losses(tmp_path / "renewed")[:10] == whole[:10]
    assert losses(tmp_path / "renewed")[10:15] != whole[10:15]


@pytest.mark.process
def test_a_run_that_goes_on_with_replaced_data_finds_their_groups(tmp_path: Path) -> None:
    """The run stops within an epoch whose groups stay. The groups of the old samples mean nothing for the new ones."""
    data, run = write_tiny_pair(tmp_path / "data", num_train=NUM_SAMPLES, num_test=16), RunDir(tmp_path / "run")
    words = ["neighbours.find_every_epochs=null", "checkpoint_every_steps=7", "keep_checkpoints=9"]
    config = configure(data, *words)
    train_on_rank(config, run.path)
    before = read_groups(run.path, 1)
    stop_after(run, 7)
    shutil.rmtree(data / "train")
    write_tiny_dataset(data / "train", num_samples=NUM_SAMPLES, seed=5)
    new = read_manifests(config.data).identity.name
    train(config, run, device=torch.device("cpu"), command="test", accepted_data=[new])
    after = read_groups(run.path, 1)
    known = [(found[:, 0] == np.arange(NUM_SAMPLES)).sum() for found in (before, after)]
    assert min(known) >= 80
    assert (before == after).all(1).mean() < 0.2

    stop_after(run, 14)  # which the new data have trained
    train_on_rank(config, run.path)
    np.testing.assert_array_equal(read_groups(run.path, 1), after)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["objective={kind: nt_xent}"], "objective.kind=nt_xent does not compare samples in groups"),
        (["neighbours={group_size: 3}"], "neighbours.group_size 3 does not divide global_batch_size 16"),
        (["engine={kind: fsdp}"], "neighbours needs a whole encoder on each rank; set engine.kind=ddp"),
    ],
)
def test_a_config_that_cannot_have_groups_is_refused(overrides: list[str], sentence: str, data: Path) -> None:
    with pytest.raises(UserError, match=sentence):
        configure(data, *overrides)


def test_an_order_of_groups_leaves_other_iterators_of_the_stream_alone(data: Path) -> None:
    """As when the features of an epoch are read between two batches of training."""
    groups_NG = np.stack([np.arange(NUM_SAMPLES), np.arange(1, NUM_SAMPLES + 1) % NUM_SAMPLES], axis=1)
    stream = Stream(data / "train", global_batch_size=16, seed=0)
    assert isinstance(stream.order, BatchOrder)
    order = NeighbourOrder(**vars(stream.order), groups=lambda step: None if step == 0 else groups_NG)
    plain = [batch.keys for batch in stream.batches(range(2))]
    grouped = [batch.keys for batch in stream.batches(range(2), order=order)]
    assert plain[0] == grouped[0]
    assert plain[1] != grouped[1]
    pairs = zip(stream.batches(range(2)), stream.batches(range(2), order=order), strict=True)
    assert [(a.keys, b.keys, b.group_size) for a, b in pairs] == [
        (plain[0], grouped[0], None),
        (plain[1], grouped[1], 2),
    ]


def test_a_stream_that_cannot_have_groups_is_refused(data: Path) -> None:
    streamed = configure(data, "data.placement=stream", "data.num_workers=0").data

    def grouped(stream: Stream) -> None:
        encoder = build_modules(configure(data)).encoder
        neighbour_order(
            NeighbourSearch(NeighboursConfig(group_size=4), data, stream, encoder, None, False, nullcontext)
        )

    with pytest.raises(UserError, match="in memory"):
        grouped(Stream(data / "train", read=streamed, global_batch_size=16, seed=0))
    with pytest.raises(UserError, match="does not divide"):
        grouped(Stream(data / "train", global_batch_size=12, seed=0, world_size=2))
