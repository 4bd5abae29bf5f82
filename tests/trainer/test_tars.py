"""Training, probing and replaying on somebody else's tars, with crops cut out of the original pictures."""

from __future__ import annotations

import io
import shutil
from pathlib import Path
from typing import Literal
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import webdataset
from PIL import Image

from configs import resolve_recipe
from data_pipeline.building.catalogue import open_picture_overlay
from data_pipeline.building.index_tars import make_index
from data_pipeline.core.counter_rng import DrawKeys
from data_pipeline.core.errors import UserError
from data_pipeline.loading.stream import ReadConfig, Stream
from data_pipeline.loading.whole import read_all
from data_pipeline.overlays import OverlayInputs
from data_pipeline.storage.locations import INDEX_NAME
from data_pipeline.storage.manifest import Fields, load_manifest
from tests.commands import Call
from tests.killed_runs import kill_after
from tests.small_encoder import convnet
from tests.tiny_data import on_data
from trainer import probe, report
from trainer.original_crops import original_crops
from trainer.preflight import check_data
from trainer.run_dir import RunDir
from trainer.train import train
from trainer.views.expert_image import ExpertImage, ExpertImageConfig

CPU = torch.device("cpu")
CONVNET = convnet(32)


def write_tars(
    directory: Path,
    num: int,
    *,
    sizes: tuple[tuple[int, int], ...],
    kind: str = "PNG",
    seed: int = 0,
    with_labels: bool = True,
) -> Path:
    """Two tars of noisy pictures whose class is their brightest channel."""
    directory.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    for tar in range(2):
        with webdataset.TarWriter(str(directory / f"{tar}.tar"), encoder=False) as writer:
            for number in range(tar * num // 2, (tar + 1) * num // 2):
                height, width = sizes[number % len(sizes)]
                pixels = rng.integers(0, 120, (height, width, 3), dtype=np.uint8)
                pixels[..., number % 3] += 100
                file = io.BytesIO()
                Image.fromarray(pixels).save(file, kind)
                labels = {"cls": b"%d" % (number % 3)} if with_labels else {}
                writer.write({"__key__": f"{number:05d}", kind.lower(): file.getvalue(), **labels})
    return directory


def settings(data: Path, *more: str) -> list[str]:
    small = ["global_batch_size=16", "num_epochs=2", "log_every_steps=1", "checkpoint_every_steps=2"]
    return on_data(data, *small, "watchdog.enabled=false", "probe.num_epochs=2", *more)


@pytest.fixture(scope="module")
def tars(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tars")
    sizes = ((60, 40), (48, 64), (33, 33))
    write_tars(root / "train", 48, sizes=sizes, kind="JPEG")
    write_tars(root / "test", 18, sizes=sizes, kind="JPEG", seed=1)
    make_index(str(root / "train"), root / "train" / INDEX_NAME, fields=Fields(), size=32)
    make_index(str(root / "test"), root / "test" / INDEX_NAME, fields=Fields(), size=32, classes_of=root / "train")
    return root


def losses(run_dir: RunDir) -> list[float]:
    return [line["train/loss"] for line in run_dir.read_metrics() if "train/loss" in line]


def test_crops_of_the_original_are_the_views_that_the_policy_would_make(tmp_path: Path) -> None:
    """With lossless pictures that have the size of the encoder's input, both ways see the same pixels."""
    write_tars(tmp_path / "train", 16, sizes=((32, 32),))
    make_index(str(tmp_path / "train"), tmp_path / "train" / INDEX_NAME, fields=Fields(), size=32)
    config = ExpertImageConfig(
        brightness=0, contrast=0, saturation=0, hue=0, grayscale_probability=0, blur_probability=0, flip_probability=0
    )
    (squares,) = read_all(tmp_path / "train", batch_size=16)
    whole = squares.inputs_a.float() / 255
    law = config.crop_law()
    assert law is not None
    stream = Stream(
        tmp_path / "train",
        read=ReadConfig(num_workers=0),
        global_batch_size=8,
        seed=5,
        rank=0,
        world_size=1,
        end_step=6,
        crops=law,
    )
    assert stream.placement == "stream"
    policy = ExpertImage(config)
    num_seen = 0
    for batch in stream:
        for view, crops in enumerate((batch.inputs_a, batch.inputs_b)):
            keys = DrawKeys(seed=5, epoch=batch.epoch, index_B=batch.index_B, view=view)
            expected = policy(whole[batch.index_B], keys)
            difference = (crops.float() / 255 - expected).abs()
            assert difference.max() < 2.01 / 255
            assert difference.mean() < 0.6 / 255
            num_seen += len(batch)
    assert num_seen == 2 * 48


@pytest.mark.slow
def test_a_run_on_tars_can_be_resumed_to_the_same_bits(tars: Path, tmp_path: Path) -> None:
    """Also in windows of shards; and workers change nothing."""
    windows = settings(tars, "precision=float64", CONVNET, "data.shuffle_shards=1")
    config = resolve_recipe("debug:image", [*windows, "data.num_workers=2"])
    whole = RunDir(tmp_path / "whole")
    train(config, whole, device=CPU, command="train")
    resumed = RunDir(shutil.copytree(whole.path, tmp_path / "resumed"))
    kill_after(resumed, 4)
    train(config, resumed, device=CPU, command="train")
    assert len(losses(whole)) == 6
    assert losses(resumed)[-6:] == losses(whole)
    first = RunDir(tmp_path / "first")
    train(resolve_recipe("debug:image", windows), first, device=CPU, command="train")
    assert losses(first) == losses(whole)


@pytest.mark.slow
def test_tars_with_an_overlay_are_cut_out_of_squares_and_probed_for_both_labels(tmp_path: Path, call: Call) -> None:
    sizes = ((90, 70), (64, 100))
    for name, num in (("train", 48), ("test", 18)):
        write_tars(tmp_path / name, num, sizes=sizes, kind="JPEG", seed=num)
        split: Literal["train", "test"] = "train" if name == "train" else "test"
        make_index(
            str(tmp_path / name),
            tmp_path / name / INDEX_NAME,
            fields=Fields(),
            size=64,
            overlay=open_picture_overlay(OverlayInputs("shapes", (3, 64, 64), name)),
            split=split,
            classes_of=None if name == "train" else tmp_path / "train",
        )
    config = resolve_recipe("debug:image", settings(tmp_path, "num_epochs=1", "data.overlay=online"))
    assert original_crops(config, load_manifest(tmp_path / "train")) is None
    run_dir = RunDir(tmp_path / "run")
    train(config, run_dir, device=CPU, command="train")
    probed = call(probe.main, run_dir.path)
    assert probed.status == 0, probed.stderr
    assert "label_base" in probed.stdout
    assert "label_overlay" in probed.stdout
    page = tmp_path / "report.html"
    reported = call(report.main, run_dir.path, "--out", page)
    assert reported.status == 0, reported.stderr
    titles = {label.title for label in load_manifest(Path(config.data.test_dir)).labels.values()}
    assert len(titles) == 2
    assert all(f'class="group">{title}' in page.read_text() for title in titles)


def test_only_expert_views_of_tars_are_cropped_out_of_the_original(tars: Path, tmp_path: Path) -> None:
    train_set = load_manifest(tars / "train")
    built = train_set.model_copy(update={"any_size": False})
    expert = resolve_recipe("debug:image", settings(tars))
    assert original_crops(expert, train_set) is not None
    assert original_crops(expert, built) is None
    assert original_crops(resolve_recipe("debug:image", settings(tars, "data.crop_from=decoded")), train_set) is None
    assert original_crops(resolve_recipe("debug:image", settings(tars, "views.area=null")), train_set) is None
    whole = settings(tars, "objective={kind: nt_xent, negatives: samples}")  # a crop is no sample
    assert original_crops(resolve_recipe("debug:image", whole), train_set) is None


@pytest.mark.parametrize("crop_from", ["original", "decoded"])
def test_views_are_cropped_once(crop_from: str, tars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = resolve_recipe("debug:image", settings(tars, f"data.crop_from={crop_from}"))
    built = Mock(side_effect=InterruptedError)
    monkeypatch.setattr("trainer.train.build_training", built)
    with pytest.raises(InterruptedError):
        train(config, RunDir(tmp_path / "run"), device=CPU, command="train")
    assert (built.call_args.args[0].views == config.views) == (crop_from == "decoded")


def test_a_test_set_that_names_a_tar_of_the_train_set_is_refused(tars: Path, tmp_path: Path) -> None:
    both = tmp_path / "both"
    both.mkdir()
    for name, tar in {"0": "test/0.tar", "1": "test/1.tar", "2": "train/1.tar"}.items():
        (both / f"{name}.tar").symlink_to(tars / tar)
    out = tmp_path / "index"
    make_index(str(both), out, fields=Fields(), size=32, classes_of=tars / "train")
    refused = resolve_recipe("debug:image", settings(tars, f"data.test_dir={out}"))
    with pytest.raises(UserError, match=r"24 of the 42 test samples of .*sample 00000018 is sample 00000024 of"):
        check_data(refused)
    mixed = ["data.train_dir=null", f"data.mixture={{a: {{train_dir: {tars}/train, weight: 1}}}}"]
    with pytest.raises(UserError, match="24 of the 42 test samples"):
        check_data(resolve_recipe("debug:image", settings(tars, f"data.test_dir={out}", *mixed)))
    check_data(resolve_recipe("debug:image", settings(tars, f"data.test_dir={out}", "probe.allow_shared=0.6")))
    check_data(resolve_recipe("debug:image", settings(tars)))


def test_tars_without_an_index_are_refused_with_the_command_that_makes_it(tmp_path: Path) -> None:
    write_tars(tmp_path / "train", 32, sizes=((40, 40),))
    with pytest.raises(UserError, match=r"names tars without an index; run `python -m data_pipeline index \S+/train`$"):
        check_data(resolve_recipe("debug:image", settings(tmp_path)))
