"""A run on a mixture of datasets: settings, checks, exact resuming on other ranks, counts, replaced sources."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from configs import resolve_recipe
from configs.resolve import explain
from data_pipeline.building.index_tars import make_index
from data_pipeline.core.errors import UserError
from data_pipeline.storage.manifest import Fields, load_manifest
from launch.rank import print_plan
from tests.commands import Call
from tests.gloo import run_ranks
from tests.killed_runs import kill_after
from tests.small_encoder import CONVNET
from tests.tiny_data import write_tiny_dataset
from tests.trainer.test_tars import write_tars
from trainer import probe
from trainer.config import RunConfig
from trainer.data import open_stream, read_manifests
from trainer.mixture import MixtureManifest, num_classes
from trainer.open_settings import decide
from trainer.original_crops import original_crops
from trainer.preflight import check_data
from trainer.run_dir import RunDir
from trainer.train import train


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data")
    write_tiny_dataset(root / "birds", num_samples=30)
    write_tiny_dataset(root / "photos", num_samples=53, seed=2)
    write_tiny_dataset(root / "test", num_samples=20, seed=1, split="test")
    return root


def sources_of(data: Path, **weights: float) -> str:
    weights = weights or {"birds": 0.5, "photos": 0.5}
    return ", ".join(f"{name}: {{train_dir: {data / name}, weight: {weight}}}" for name, weight in weights.items())


def configure(data: Path, *more: str, sources: str | None = None) -> RunConfig:
    """Return the config of 10 steps: two epochs of (30 + 53) // 16 steps."""
    return resolve_recipe(
        "debug:image",
        [
            "data.train_dir=null",
            f"data.mixture={{{sources or sources_of(data)}}}",
            f"data.test_dir={data / 'test'}",
            "data.num_workers=0",
            CONVNET,
            "global_batch_size=16",
            "num_epochs=2",
            "log_every_steps=1",
            "checkpoint_every_steps=2",
            "keep_checkpoints=9",
            "precision=float64",
            "watchdog.enabled=false",
            "tracking.wandb=disabled",
            *more,
        ],
    )


def run(config: RunConfig, run_dir: Path, *accepted: str) -> None:
    train(config, RunDir(run_dir), device=torch.device("cpu"), command="test", accepted_data=accepted)


def final_state(run_dir: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(RunDir(run_dir).checkpoint(10) / "encoder.safetensors")


@pytest.fixture(scope="module")
def finished(data: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    run_dir = tmp_path_factory.mktemp("runs") / "run"
    run(configure(data), run_dir)
    return RunDir(run_dir)


@pytest.mark.ranks
def test_a_run_on_a_mixture_goes_on_exactly_on_any_ranks(data: Path, finished: RunDir, tmp_path: Path) -> None:
    """Stopped at step 4, before the weights change at 5: one rank ends in the same bits, two in the same numbers."""
    expected = final_state(finished.path)
    for num_ranks in (1, 2):
        copy = tmp_path / str(num_ranks)
        shutil.copytree(finished.path, copy)
        kill_after(RunDir(copy), 4)
        run_ranks(run, num_ranks, configure(data), copy)
        for name, tensor in final_state(copy).items():
            if num_ranks == 1:
                assert torch.equal(tensor, expected[name]), name
            else:
                torch.testing.assert_close(tensor, expected[name], rtol=1e-7, atol=1e-9)
        assert [line["train/loss"] for line in RunDir(copy).read_metrics()] == pytest.approx(
            [line["train/loss"] for line in finished.read_metrics()], rel=1e-8
        )


def test_the_log_counts_the_samples_of_each_source_and_provenance_names_them(data: Path, finished: RunDir) -> None:
    lines = finished.read_metrics()
    assert [line["mixture/birds/batch"] for line in lines] == [8] * 10
    assert [line["mixture/photos/samples"] for line in lines] == [8 * step for step in range(1, 11)]
    assert lines[-1]["mixture/birds/epochs"] == 80 / 30
    assert [line["epoch"] for line in lines] == [0] * 5 + [1] * 5
    facts = finished.read_provenance()
    assert facts["train_sources"] == {name: load_manifest(data / name).sha256 for name in ("birds", "photos")}


def test_a_replaced_source_is_named(data: Path, finished: RunDir, tmp_path: Path) -> None:
    moved = tmp_path / "data"
    shutil.copytree(data, moved)
    run_dir = RunDir(tmp_path / "run")
    run(configure(moved), run_dir.path)
    kill_after(run_dir, 4)
    shutil.rmtree(moved / "photos")
    write_tiny_dataset(moved / "photos", num_samples=53, seed=9)
    with pytest.raises(UserError, match=r"photos, the source photos of the mixture, holds another dataset") as refused:
        run(configure(moved), run_dir.path)
    name = str(refused.value).split("--accept-data ")[1]
    run(configure(moved), run_dir.path, name)
    assert len(run_dir.read_metrics()) == 10


def test_the_order_of_the_names_has_no_effect_and_a_restart_from_the_file_neither(data: Path) -> None:
    first, second = configure(data), configure(data, sources=sources_of(data, photos=0.5, birds=0.5))
    assert list(second.data.mixture or ()) == ["birds", "photos"]
    assert first.model_dump_json() == second.model_dump_json()
    again = RunConfig.parse(json.loads(first.model_dump_json()), where="x")
    batches = [list(open_stream(each.data, global_batch_size=16, seed=0, end_step=3)) for each in (second, again)]
    assert [batch.keys for batch in batches[0]] == [batch.keys for batch in batches[1]]


def test_one_weight_of_a_file_can_be_set_and_is_explained(data: Path, tmp_path: Path) -> None:
    path = tmp_path / "mixture.json"
    path.write_text(configure(data).model_dump_json())
    more = ["data.mixture.photos.weight=2"]
    config = resolve_recipe(str(path), more)
    assert config.data.mixture is not None
    assert [config.data.mixture[name].weight for name in ("birds", "photos")] == [0.5, 2]
    lines = [line.split() for line in explain(str(path), more).splitlines() if line.startswith("data.mixture.")]
    assert ["data.mixture.photos.weight", "2.0", "--set"] in lines
    assert ["data.mixture.birds.weight", "0.5", str(path)] in lines
    folder = resolve_recipe("simclr:folder", ["data.train_dir=null", f"data.mixture={{{sources_of(data)}}}"])
    assert folder.name == "simclr-birds+photos"


@pytest.mark.slow
def test_a_mixture_is_probed_on_its_first_source_or_on_the_one_that_is_named(
    data: Path, finished: RunDir, tmp_path: Path, call: Call
) -> None:
    run_dir = RunDir(tmp_path / "run")
    for named, probed in ((), "birds"), (("data.probed_source=photos",), "photos"):
        shutil.rmtree(run_dir.path, ignore_errors=True)
        run(configure(data, "num_epochs=1", *named), run_dir.path)
        done = call(probe.main, run_dir.path)
        assert done.status == 0, done.stderr
        assert "warning" not in done.stderr
        (result,) = run_dir.path.glob("probes/step_*/base.json")
        assert json.loads(result.read_text())["train_manifest_sha256"] == load_manifest(data / probed).sha256


def test_pictures_are_normalised_by_the_mean_and_deviation_of_the_first_draws(data: Path) -> None:
    config = configure(data, "encoder.mean=null", "encoder.std=null", sources=sources_of(data, birds=1, photos=3))
    train_set = read_manifests(config.data).train
    assert isinstance(train_set, MixtureManifest)
    birds, photos = (load_manifest(data / name) for name in ("birds", "photos"))
    mean = 0.25 * np.array(birds.mean) + 0.75 * np.array(photos.mean)
    square = 0.25 * (np.square(birds.std) + np.square(birds.mean))
    square += 0.75 * (np.square(photos.std) + np.square(photos.mean))
    decided = decide(config, train_set).encoder
    assert decided.mean == pytest.approx(tuple(mean))
    assert decided.std == pytest.approx(tuple(np.sqrt(square - mean**2)))


@pytest.mark.parametrize("others", ["tars", "built"])
def test_tars_are_mixed_with_tars_and_with_built_shards(data: Path, tmp_path: Path, others: str) -> None:
    """Crops are cut out of the original pictures only if all sources are tars."""

    def indexed(name: str, seed: int, split: str) -> Path:
        make_index(
            str(write_tars(tmp_path / name, 32, sizes=((40, 30), (25, 44)), seed=seed)),
            tmp_path / f"{name}.index",
            fields=Fields(labels={"base": "cls"}),
            size=16,
        )
        return tmp_path / f"{name}.index"

    first, test = indexed("a", 1, "train"), indexed("test", 2, "test")
    second = indexed("b", 3, "train") if others == "tars" else data / "photos"
    sources = f"a: {{train_dir: {first}, weight: 1}}, b: {{train_dir: {second}, weight: 1}}"
    config = configure(data, f"data.test_dir={test}", "num_epochs=1", sources=sources)
    crops = original_crops(config, check_data(config).train)
    assert (crops is not None) == (others == "tars")
    run(config, tmp_path / "run")
    (batch,) = open_stream(config.data, global_batch_size=16, seed=0, end_step=1, crops=crops)
    assert (batch.inputs_a is batch.inputs_b) == (crops is None)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["data.train_dir=x"], "data: train_dir and mixture are both set; add --set data.train_dir=null"),
        (["data.probed_source=bird"], "probed_source is bird, which is no source of the mixture; did you mean"),
        (
            ["views={kind: by_epoch, policies: [{kind: expert_image}, {kind: random_mask}]}"],
            'views of kind "by_epoch" change with the epoch, but each source of data.mixture has epochs of its own',
        ),
    ],
)
def test_settings_of_a_mixture_that_cannot_be_are_one_sentence(data: Path, more: list[str], message: str) -> None:
    with pytest.raises(UserError) as refused:
        configure(data, *more)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_settings_of_no_mixture_are_refused() -> None:
    for name in ("mixture_epoch=5", "probed_source=a"):
        with pytest.raises(UserError, match=rf"{name.split('=')[0]} is for a mixture, but mixture is null"):
            resolve_recipe("debug:image", [f"data.{name}"])


def test_data_that_do_not_fit_a_mixture_are_one_sentence(data: Path, tmp_path: Path) -> None:
    def with_birds(name: str) -> RunConfig:
        second = f"photos: {{train_dir: {tmp_path / name}, weight: 1}}"
        return configure(data, sources=f"{sources_of(data, birds=1)}, {second}")

    (tmp_path / "link").symlink_to(data / "birds")
    with pytest.raises(UserError, match=r"mixture\.birds and mixture\.photos hold the same dataset, so a sample could"):
        check_data(with_birds("link"))
    write_tiny_dataset(tmp_path / "photos", num_samples=40, overlay="online")
    with pytest.raises(UserError, match=r"differ in input shape \(\(3, 16, 16\) and \(3, 32, 32\)"):
        check_data(with_birds("photos"))
    with pytest.raises(UserError, match=r"take up to 15 of a global batch of 16 from birds, which holds 30 samples"):
        check_data(configure(data, sources=sources_of(data, birds=9, photos=1)))
    write_tiny_dataset(tmp_path / "same", num_samples=40, seed=1)
    with pytest.raises(UserError, match=r"20 of the 20 test samples of .* in the mixture of birds and photos too"):
        check_data(with_birds("same"))


def test_a_label_of_a_mixture_has_the_same_classes_in_all_sources_that_have_it(data: Path, tmp_path: Path) -> None:
    train_set = read_manifests(configure(data).data).train
    assert isinstance(train_set, MixtureManifest)
    assert num_classes(train_set) == {"base": 2, "overlay": 3}
    birds, other = (
        train_set.sources["birds"],
        Path(write_tiny_dataset(tmp_path / "other", num_samples=40, overlay="online")),
    )
    mixed = dataclasses.replace(train_set, sources={"birds": birds, "other": load_manifest(other)})
    assert num_classes(mixed) == {"base": 2}
    config = configure(data, "objective.kind=supervised", "objective.label=digit")
    with pytest.raises(
        UserError, match=r"objective\.label=digit is no label of the train set; valid are: base, overlay"
    ):
        check_data(config)


@pytest.mark.slow
def test_a_mixture_is_planned(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    print_plan(configure(data), world_size=2, device_gigabytes=None)
    assert "debug-image" in capsys.readouterr().out


def test_an_epoch_of_a_mixture_can_be_set(data: Path) -> None:
    config = configure(data, "data.mixture_epoch=40")
    stream: Any = open_stream(config.data, global_batch_size=16, seed=0, end_step=6)
    assert stream.num_steps_per_epoch == 2
    assert [batch.epoch for batch in stream] == [0, 0, 1, 1, 2, 2]
