"""Probes of one, two and three ranks give the same numbers to the last digit."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from configs import debug
from tests.gloo import RankError, run_ranks
from tests.tiny_data import write_tiny_pair
from tests.trainer.probes.toy import toy_pictures
from trainer.modules import build_modules
from trainer.probed_runs.readout import probe
from trainer.probes import linear
from trainer.probes.features import extract, frozen, read_pictures, shared_rows
from trainer.probes.knn import knn_accuracies
from trainer.probes.linear import Target

pytestmark = pytest.mark.ranks

CPU = torch.device("cpu")


SIZES = [(103, 16), (103, 128), (1, 16), (48, 16), (17, 16), (103, 1)]  # samples, and how many go at once


def rows_of_all() -> list[list[int]]:
    return [
        shared_rows(lambda part: [part[:, None]], torch.arange(num), chunk_size=chunk_size)[0].flatten().tolist()
        for num, chunk_size in SIZES
    ]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_each_sample_comes_once_and_in_its_place(world_size: int) -> None:
    for of_rank in run_ranks(rows_of_all, world_size):
        assert of_rank == [list(range(num)) for num, _ in SIZES]


def read_out(directory: Path, views: str, num_steps: int) -> Any:
    """Return results and heads of a real encoder. 2 and 3 ranks divide neither the 53 test samples nor the steps.

    `num_steps` are encoded at once.
    """
    recipe = debug.image()
    modules = build_modules(recipe)
    config = recipe.probe.model_copy(update={"num_epochs": 2, "batch_size": 16, "views": views, "learning_rate": 0.1})
    train, test = read_pictures(directory / "train"), read_pictures(directory / "test")
    with mock.patch.object(linear, "_steps_at_once", return_value=num_steps):
        found = probe(modules, train=train, test=test, device=CPU, config=config)
    results = {space: result.model_dump(exclude={"seconds"}) for space, result in found.results.items()}
    heads = {space: (head.weight_KF.tolist(), head.bias_K.tolist()) for space, head in found.heads.by_label.items()}
    return results, heads


@pytest.mark.parametrize(("views", "num_steps"), [("policy", 3), ("none", 1)])
def test_probes_do_not_depend_on_the_ranks(views: str, num_steps: int, tmp_path: Path) -> None:
    """There are 7 steps."""
    data = write_tiny_pair(tmp_path, num_train=119, num_test=53, overlay="online")
    [alone] = run_ranks(read_out, 1, data, views, num_steps)
    for world_size in (2, 3):
        for of_rank in run_ranks(read_out, world_size, data, views, num_steps):
            assert of_rank == alone


def encode_and_vote(chunk_size: int) -> Any:
    train, test = toy_pictures(103, seed=0), toy_pictures(103, seed=1)
    encoder = build_modules(debug.image()).encoder.eval()
    with frozen(encoder):
        bank_NC, queries_MC = (
            extract(encoder.pooled, pictures.images_NCHW, device=CPU, batch_size=chunk_size)
            for pictures in (train, test)
        )
    targets = {"overlay": Target(train.by_label["overlay"], test.by_label["overlay"], num_classes=3)}
    return bank_NC.tolist(), knn_accuracies(bank_NC, queries_MC, targets, chunk_size=chunk_size)


def test_features_and_votes_have_the_same_bits_when_ranks_share_them() -> None:
    [alone] = run_ranks(encode_and_vote, 1, 16)
    for world_size in (2, 3):
        for of_rank in run_ranks(encode_and_vote, world_size, 16):
            assert of_rank == alone


def test_the_published_quirk_of_batch_norm_is_for_one_process(tmp_path: Path) -> None:
    data = write_tiny_pair(tmp_path, num_train=40, num_test=20)
    with pytest.raises(RankError, match=r"batch_norm train moves the running statistics .* start it as one process"):
        run_ranks(functools.partial(with_batch_statistics, data), 2)


def with_batch_statistics(directory: Path) -> None:
    recipe = debug.image()
    config = recipe.probe.model_copy(update={"batch_norm": "train"})
    train, test = read_pictures(directory / "train"), read_pictures(directory / "test")
    probe(build_modules(recipe), train=train, test=test, device=CPU, config=config)
