from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from configs import debug
from data_pipeline.core.errors import UserError
from data_pipeline.loading.stream import ReadConfig
from data_pipeline.remote.fetch import RemoteConfig
from tests.gloo import run_ranks
from tests.tiny_data import write_tiny_dataset, write_tiny_pair, write_tiny_sound_pair
from tests.trainer.probes.toy import toy_pictures
from trainer.config import RunConfig
from trainer.distributed.collectives import rank
from trainer.models import Encoder
from trainer.modules import build_modules
from trainer.probes.features import encode, frozen, read_pictures, read_some
from trainer.probes.knn import knn_classes, neighbors_of
from trainer.probes.linear import ProbeConfig, accuracy
from trainer.probes.online import OnlineProbe, online_probe
from trainer.probes.targets import label_targets
from trainer.run_dir import RunDir
from trainer.train import train

CPU = torch.device("cpu")
TRAIN, TEST = toy_pictures(303, seed=0), toy_pictures(103, seed=1, num_wrong=13)


def recipe(batch_norm: str, **probe: Any) -> RunConfig:
    config = debug.image().model_dump()
    config["encoder"] |= {"batch_norm": batch_norm, "batch_norm_splits": 4}
    config["probe"] |= probe
    return RunConfig.model_validate(config)


def train_some_steps(batch_norm: str, probes: bool) -> dict[str, Any]:
    """Train on this rank's pictures. Return all that a probe must not change, and the results of the probes."""
    encoder = build_modules(recipe(batch_norm)).encoder.train()
    encoder.trunk.eval()  # some parts do not train: they must come back as they were
    encoder.trunk.layer4.train()  # type: ignore[union-attr]
    for parameter in list(encoder.parameters())[:3]:
        parameter.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in encoder.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
    online = OnlineProbe(encoder, train=TRAIN, test=TEST, device=CPU, dtype=torch.float32)
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(rank())
    metrics, gradients = {}, []
    for _ in range(2):
        optimizer.zero_grad()
        torch.autograd.backward(encoder(torch.rand(8, 3, 8, 8)).square().mean())
        gradients.append({name: p.grad.clone() for name, p in encoder.named_parameters() if p.grad is not None})
        if probes:
            metrics = online()  # gradients and graph of the step are still there
        optimizer.step()
    return {
        "metrics": metrics,
        "gradients": gradients,
        "state": encoder.state_dict(),
        "momentum": optimizer.state_dict()["state"],
        "random": (torch.get_rng_state(), np.random.get_state()[1], random.getstate()),  # type: ignore[index]  # noqa: NPY002
        "training": [module.training for module in encoder.modules()],
        "requires_grad": [parameter.requires_grad for parameter in encoder.parameters()],
    }


def train_with_and_without(batch_norm: str) -> tuple[dict[str, Any], dict[str, Any]]:
    return train_some_steps(batch_norm, True), train_some_steps(batch_norm, False)


@pytest.mark.ranks
@pytest.mark.parametrize(("batch_norm", "world_size"), [("synchronized", 2), ("split", 1)])
def test_training_has_the_same_bits_with_and_without_probes(batch_norm: str, world_size: int) -> None:
    for one, other in run_ranks(train_with_and_without, world_size, batch_norm):
        assert {"probe/base/knn", "probe/base/ridge", "probe/overlay/knn"} < set(one.pop("metrics"))
        other.pop("metrics")
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def metrics_of_ranks(batch_norm: str) -> dict[str, float]:
    encoder = build_modules(recipe(batch_norm)).encoder.train()
    metrics = OnlineProbe(encoder, train=TRAIN, test=TEST, device=CPU, dtype=torch.float32)()
    assert metrics.pop("probe/seconds") > 0
    return metrics


@pytest.mark.ranks
def test_the_numbers_do_not_depend_on_the_ranks() -> None:
    alone = metrics_of_ranks("synchronized")
    assert len(alone) == 4
    assert run_ranks(metrics_of_ranks, 3, "synchronized") == [alone] * 3


def accuracies_with_other_statistics_on_each_rank(seen: int) -> dict[str, float]:
    """Let each rank see other pictures, as if it were rank `seen` + its own rank, and return what the probe says."""
    encoder = build_modules(recipe("local")).encoder.train()
    generator = torch.Generator().manual_seed(seen + rank())
    encoder(torch.rand(8, 3, 8, 8, generator=generator) * (1 + seen + rank()))
    metrics = OnlineProbe(encoder, train=TRAIN, test=TEST, device=CPU, dtype=torch.float32)()
    return {name: value for name, value in metrics.items() if name != "probe/seconds"}


@pytest.mark.ranks
def test_with_local_batch_norm_it_probes_the_encoder_of_the_first_rank_which_a_checkpoint_holds() -> None:
    first, second = map(accuracies_with_other_statistics_on_each_rank, (0, 1))
    assert first != second
    assert run_ranks(accuracies_with_other_statistics_on_each_rank, 2, 0) == [first] * 2


@pytest.mark.slow
def test_on_all_samples_it_is_the_knn_of_the_probe_command() -> None:
    encoder = build_modules(recipe("synchronized")).encoder
    metrics = OnlineProbe(encoder, train=TRAIN, test=TEST, device=CPU, dtype=torch.float32)()
    targets = label_targets(TRAIN, TEST)
    with frozen(encoder):
        bank_NC, queries_MC = (encode(encoder.features_and_pooled, each, device=CPU)[1] for each in (TRAIN, TEST))
    neighbors = neighbors_of(targets, ProbeConfig().num_neighbors)
    for space, target in targets.items():
        class_M = knn_classes(bank_NC, queries_MC, target, num_neighbors=neighbors[space])
        assert metrics[f"probe/{space}/knn"] == accuracy(class_M, target.test_N)
    assert 0.5 < metrics["probe/base/ridge"] <= 90 / 103


@pytest.mark.slow
@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_features_without_information_end_nothing(value: float) -> None:
    """Training goes on with a collapsed encoder, at or below chance, and with a diverged one, without accuracies."""
    encoder = build_modules(recipe("synchronized")).encoder
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.fill_(value)
    metrics = OnlineProbe(encoder, train=TRAIN, test=TEST, device=CPU, dtype=torch.float32)()
    if not math.isfinite(value):
        assert metrics.keys() == {"probe/seconds"}
        return
    assert all(0 <= metrics[f"probe/base/{method}"] < 0.65 for method in ("knn", "ridge"))


@pytest.mark.parametrize("overlay", ["baked", "online", "none", "sound"])
def test_the_samples_are_some_of_those_that_the_probe_command_reads(overlay: Any, tmp_path: Path) -> None:
    if overlay == "sound":
        write_tiny_sound_pair(tmp_path, num_train=40, num_test=20)
    else:
        write_tiny_pair(tmp_path, num_train=40, num_test=20, overlay=overlay)
    whole, some = read_pictures(tmp_path / "train"), read_some(tmp_path / "train", num=17)
    rows = some.samples.index_B
    assert len(rows) == 17
    assert rows.tolist() == sorted(set(rows.tolist())) != list(range(17))
    found, expected = some.inputs(torch.arange(17)), whole.inputs(rows)
    torch.testing.assert_close(found.inputs_a, expected.inputs_a, rtol=1e-5, atol=1e-5)
    assert list(some.by_label) == list(whole.by_label) == ["base", "overlay"][: 1 if overlay == "none" else 2]
    for space, label_N in whole.by_label.items():
        assert torch.equal(some.by_label[space], label_N[rows])
    if overlay != "sound":
        assert found.masks_BHW is not None
        assert expected.masks_BHW is not None
        assert torch.equal(found.masks_BHW, expected.masks_BHW)
    assert len(read_some(tmp_path / "train", num=1000)) == 40
    assert torch.equal(read_some(tmp_path / "train", num=17).samples.index_B, rows)


def test_of_a_remote_dataset_a_few_shards_are_fetched(tmp_path: Path) -> None:
    """There are 40 shards of two samples. The fetched ones are in the cache."""
    directory = write_tiny_dataset(tmp_path / "train", num_samples=80, num_samples_per_shard=2)
    read = ReadConfig(remote=RemoteConfig(cache_dir=str(tmp_path / "cache")))
    some = read_some(f"file://{directory}", num=10, read=read)
    assert len(some) == 10
    assert len(set((some.samples.index_B // 2).tolist())) <= 8
    assert torch.equal(some.images(torch.arange(10)), read_pictures(directory).images(some.samples.index_B))
    assert 0 < len(list((tmp_path / "cache").rglob("tar-*.tar"))) <= 8


def probe_of(config: RunConfig, encoder: Encoder) -> OnlineProbe | None:
    return online_probe(config.probe, encoder, data=config.data, precision=config.precision, device=CPU)


def test_off_it_reads_nothing_and_on_it_says_what_is_missing() -> None:
    off = recipe("synchronized")
    assert off.probe.online_every_steps is None
    encoder = build_modules(off).encoder
    assert probe_of(off, encoder) is None
    with pytest.raises(UserError, match="data/debug/train does not exist; build it"):
        probe_of(recipe("synchronized", online_every_steps=1), encoder)


def train_on_tiny_data(data: Path, directory: Path) -> None:
    changes = {"data": {"train_dir": f"{data}/train", "test_dir": f"{data}/test", "num_workers": 0}}
    changes |= {"probe": {"online_every_steps": 2}, "encoder": {"width": 1}, "tracking": {"wandb": "disabled"}}
    config = debug.image().model_dump()
    for section, values in changes.items():
        config[section] |= values
    config |= {"global_batch_size": 8, "num_epochs": 1, "log_every_steps": 4, "checkpoint_every_steps": 100}
    train(RunConfig.model_validate(config), RunDir(directory), device=CPU, command="test")


@pytest.mark.ranks
def test_the_training_loop_probes_at_its_steps(tmp_path: Path) -> None:
    """Two ranks probe, take five steps, and probe after every second and the last. A logged one has one line."""
    data = write_tiny_pair(tmp_path / "data", num_train=43, num_test=20)
    run_ranks(train_on_tiny_data, 2, data, tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 4, 5]
    probed = [line["step"] for line in lines if "probe/base/knn" in line and "probe/overlay/ridge" in line]
    assert probed == [0, 2, 4, 5]
