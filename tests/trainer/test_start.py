"""A run begins with the weights of others: on all ranks, once, with their normalisation, and with no others later."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

from configs import debug, resolve_recipe
from data_pipeline.core.errors import UserError
from tests.gloo import run_ranks
from tests.old_versions import needs_fsdp
from tests.tiny_data import on_data, write_tiny_pair
from trainer import load_encoder, save_encoder
from trainer.config import RunConfig, read_run_config
from trainer.models import build_encoder
from trainer.preflight import check_data
from trainer.pretrained import load_modules
from trainer.reports.config_identity import config_identity
from trainer.run_dir import RunDir
from trainer.train import train

MEAN, STD = (0.1, 0.2, 0.3), (0.4, 0.5, 0.6)
PICTURES = torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(1))
STANDING_STILL = "optimizer.learning_rate=1e-30"  # so that the trunk keeps the weights with which it began


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_tiny_pair(tmp_path / "data", num_train=16, num_test=8)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """The export of an encoder with weights and statistics that no seed of a run draws."""
    torch.manual_seed(77)
    encoder = build_encoder(debug.image().encoder.model_copy(update={"mean": MEAN, "std": STD}))
    with torch.no_grad():
        encoder.train()(PICTURES)
        for parameter in encoder.parameters():
            parameter.add_(torch.rand_like(parameter), alpha=0.1)  # no zero, which the least step would change
    save_encoder(encoder, tmp_path / "given.safetensors")
    return tmp_path / "given.safetensors"


def configure(data: Path, *settings: str) -> RunConfig:
    small = ["global_batch_size=8", "num_epochs=2", "watchdog.enabled=false"]
    return resolve_recipe("debug:image", on_data(data, *small, *settings))


def start(run_dir: RunDir, config: RunConfig) -> None:
    train(config, run_dir, device=torch.device("cpu"), command="train")


def trunk_of(run_dir: RunDir) -> dict[str, Tensor]:
    return dict(load_modules(run_dir).encoder.trunk.as_published.named_parameters())


def started_with(directory: Path, config: RunConfig) -> dict[str, Tensor]:
    start(RunDir(directory), config)
    return trunk_of(RunDir(directory))


def test_an_export_starts_another_run_with_the_same_features(data: Path, weights: Path, tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    config = configure(data, STANDING_STILL, f"encoder.weights={weights}", "encoder.frozen_stages=1")
    trunk = started_with(run_dir.path, config)
    given = load_encoder(weights)
    for name, parameter in given.trunk.as_published.named_parameters():
        assert torch.equal(trunk[name], parameter)
    begun = load_modules(run_dir, step=0).encoder
    with torch.no_grad():
        assert torch.equal(begun.features(PICTURES), given.features(PICTURES))
    recorded = read_run_config(run_dir).encoder
    assert recorded.normalization == given.normalization
    assert run_dir.read_provenance()["config"]["encoder"]["weights_sha256"] == recorded.weights_sha256 is not None
    # The run, and a checkpoint of it, start others, also as a directory of the Hub.
    for source in (run_dir.path, run_dir.checkpoint(4)):
        again = started_with(
            tmp_path / f"from-{source.name}", configure(data, STANDING_STILL, f"encoder.weights={source}")
        )
        assert all(torch.equal(again[name], trunk[name]) for name in trunk)
    save_encoder(run_dir, tmp_path / "exported.safetensors")
    exported = load_encoder(tmp_path / "exported.safetensors")
    assert exported.config is not None  # without the path, which is of this machine
    assert (exported.config.weights, exported.config.weights_sha256) == (weights.name, recorded.weights_sha256)
    for encoder in (exported, load_encoder(run_dir.path)):  # for use elsewhere, where all of it may be trained
        assert all(parameter.requires_grad for parameter in encoder.parameters())


@pytest.mark.ranks
@pytest.mark.parametrize(
    "engine",
    [pytest.param(["engine.kind=fsdp"], marks=needs_fsdp), ["engine.kind=deepspeed"], ["objective.kind=moco"]],
)
def test_all_ranks_begin_alike_under_every_engine(
    engine: Sequence[str], data: Path, weights: Path, tmp_path: Path
) -> None:
    config = configure(data, STANDING_STILL, f"encoder.weights={weights}", *engine)
    run_ranks(start, 2, RunDir(tmp_path / "run"), config)
    trunks = [trunk_of(RunDir(tmp_path / "run"))]
    if "objective.kind=moco" in engine:  # whose key encoder is a copy
        state = safetensors.torch.load_file(RunDir(tmp_path / "run").checkpoint(4) / "objective.safetensors")
        trunks.append({name.removeprefix("key_encoder.module.trunk."): value for name, value in state.items()})
    for name, parameter in load_encoder(weights).trunk.as_published.named_parameters():
        assert all(torch.equal(trunk[name], parameter) for trunk in trunks), name


def test_a_run_goes_on_without_its_weights_but_not_with_others(data: Path, weights: Path, tmp_path: Path) -> None:
    run_dir, config = RunDir(tmp_path / "run"), configure(data, f"encoder.weights={weights}")
    start(run_dir, config)
    provenance = run_dir.provenance.read_bytes()
    kept = weights.rename(tmp_path / "elsewhere.safetensors")
    start(run_dir, config)  # the file is gone
    elsewhere = configure(data, f"encoder.weights={kept}")
    torch.manual_seed(78)
    save_encoder(build_encoder(debug.image().encoder.model_copy(update={"mean": MEAN, "std": STD})), weights)
    with pytest.raises(UserError, match=r"it differs in encoder\.weights_sha256"):
        start(run_dir, config)
    assert run_dir.provenance.read_bytes() == provenance
    with pytest.raises(UserError, match="holds other weights"):
        load_modules(run_dir, step=0)
    start(run_dir, elsewhere)
    identity = config_identity(read_run_config(run_dir))
    start(RunDir(tmp_path / "other"), elsewhere)
    assert config_identity(read_run_config(RunDir(tmp_path / "other"))) == identity
    assert config_identity(configure(data)) != identity


def test_weights_that_do_not_fit_or_say_no_normalisation_leave_no_run(
    data: Path, weights: Path, tmp_path: Path
) -> None:
    plain = tmp_path / "plain.pt"
    torch.save(load_encoder(weights).trunk.state_dict(), plain)
    for settings, message in (
        (
            [f"encoder.weights={plain}"],
            r"does not say by which mean and std .* ImageNet, \[0\.485,.* this train set are mean=\(0\.4",
        ),
        ([f"encoder.weights={weights}", "encoder.width=8"], "does not fit the encoder: of another shape: conv1.weight"),
    ):
        config = configure(data, *settings)
        with pytest.raises(UserError, match=message):
            start(RunDir(tmp_path / "run"), config)
        with pytest.raises(UserError, match=message):
            check_data(config)
        assert not (tmp_path / "run" / "config.json").exists()
    config = configure(data, f"encoder.weights={plain}", "encoder.weights_normalization=config")
    start(RunDir(tmp_path / "run"), config)
    assert read_run_config(RunDir(tmp_path / "run")).encoder.normalization == config.encoder.normalization
