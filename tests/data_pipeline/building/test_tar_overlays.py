"""Overlays on somebody else's tars: the batches are those of a dataset that was built with the overlay."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from data_pipeline.__main__ import main
from data_pipeline.core.batch import Batch
from data_pipeline.core.errors import UserError
from data_pipeline.core.random_crop import CropLaw
from data_pipeline.core.sample import Layout
from data_pipeline.loading.stream import ReadConfig, Stream
from data_pipeline.loading.whole import read_all
from data_pipeline.storage.locations import INDEX_NAME
from data_pipeline.storage.manifest import OVERLAY_NAME, load_manifest
from data_pipeline.storage.store import SampleStore
from tests.data_pipeline.stored_samples import find_problems
from tests.photos import build_photos, write_photos

NAMES = {"digits": tuple("0123456789"), "letters": tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZ")}


def index(location: Path | str, *options: str | Path) -> None:
    main(["index", str(location), "--workers", "1", *map(str, options)])


def only_tars(built: Path, directory: Path) -> Path:
    """Copy the tars of a built dataset, whose pictures are PNGs, without anything that makes it one."""
    directory.mkdir(parents=True)
    for path in built.glob("*.tar"):
        shutil.copy(path, directory)
    return directory


def assert_same(found: Batch, expected: Batch) -> None:
    for name in ("inputs_a", "inputs_b", "masks_BHW", "masks_b_BHW", "index_B"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    assert found.labels.keys() == expected.labels.keys() == {"base", "overlay"}
    assert all(torch.equal(label_B, expected.labels[name]) for name, label_B in found.labels.items())


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "layout"), [("digits", "tiled"), ("letters", "scaled")])
def test_batches_are_those_of_a_dataset_that_was_built_with_the_overlay(
    tmp_path: Path, kind: str, layout: Layout
) -> None:
    built = build_photos(tmp_path, size=64, num_train=24, num_test=10, dataset=f"folder_{kind}", layout=layout)
    tars = tmp_path / "tars"
    options = ["--label", "json:base", "--size", "64", "--overlay", kind, "--overlay-option", f"layout={layout}"]
    options += ["--overlay-option", "digits=sklearn"] if kind == "digits" else []
    index(only_tars(built / "train", tars / "train"), *options)
    index(only_tars(built / "test", tars / "test"), *options, "--split", "test", "--classes-of", tars / "train")
    for split in ("train", "test"):
        found, expected = load_manifest(tars / split), load_manifest(built / split)
        assert found.overlay == expected.overlay
        assert expected.overlay is not None
        assert expected.overlay.layout == layout
        assert found.labels["overlay"].classes == expected.labels["overlay"].classes == NAMES[kind]
        assert found.how_made.split == split
        assert found.mean == pytest.approx(expected.mean)
        assert find_problems(tars / split) == []
    overlay_draws: tuple[Literal["per_item", "per_view"], ...] = ("per_item", "per_view")
    for overlay_draw in overlay_draws:
        options_of_stream: dict[str, Any] = {"read": ReadConfig(num_workers=0), "global_batch_size": 8, "seed": 3}
        options_of_stream |= {"rank": 0, "world_size": 1, "end_step": 6, "overlay_draw": overlay_draw}
        for ours, theirs in zip(
            Stream(tars / "train", **options_of_stream), Stream(built / "train", **options_of_stream), strict=True
        ):
            assert_same(ours, theirs)
    for draw in (0, 1):
        for ours, theirs in zip(
            read_all(tars / "test", batch_size=4, draw=draw),
            read_all(built / "test", batch_size=4, draw=draw),
            strict=True,
        ):
            assert_same(ours, theirs)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_photos(tmp_path_factory.mktemp("photos"), num_train=8, num_test=4)


def keep(photos: Path, out: Path) -> Path:
    main(["build", "folder", "--root", str(photos), "--keep", "--source-option", "image_size=32", "--out", str(out)])
    return out


def test_a_folder_is_kept_as_it_is_and_drawn_on_when_it_is_read(photos: Path, tmp_path: Path) -> None:
    words = ["build", "folder_shapes", "--root", str(photos), "--keep", "--source-option", "image_size=48"]
    main([*words, "--overlay", "online", "--out", str(tmp_path / "kept")])
    store = SampleStore(tmp_path / "kept")
    assert store.overlay is not None
    (batch,) = read_all(store, batch_size=8)
    assert batch.inputs_a.shape == (8, 3, 48, 48)
    assert batch.masks_BHW is not None
    assert (batch.masks_BHW == 255).flatten(1).any(1).all()
    assert set(batch.labels["overlay"].tolist()) <= {0, 1, 2}
    with pytest.raises(UserError, match=r"--keep stores pictures as they are.*--overlay online"):
        main([*words, "--out", str(tmp_path / "baked")])


def test_crops_are_refused_for_data_of_which_none_are_cut(photos: Path, tmp_path: Path) -> None:
    words = ["--root", str(photos), "--source-option", "image_size=48"]
    main(["build", "folder", *words, "--out", str(tmp_path / "built")])
    main(["build", "folder_shapes", *words, "--keep", "--overlay", "online", "--out", str(tmp_path / "kept")])
    for name, why in (("built", "they have one size"), ("kept", "its overlay is drawn on whole pictures")):
        with pytest.raises(
            UserError, match=f"no crops can be cut out of the stored pictures of .*{name}, because {why}"
        ):
            Stream(tmp_path / name, global_batch_size=8, seed=0, crops=CropLaw((0.1, 1), (1, 1), purpose=0))


def test_an_index_that_is_made_again_without_its_overlay_draws_nothing(photos: Path, tmp_path: Path) -> None:
    tars = only_tars(keep(photos, tmp_path / "kept"), tmp_path / "tars")
    index(tars, "--label", "json:base", "--size", "32", "--overlay", "letters")
    assert (tars / INDEX_NAME / OVERLAY_NAME).is_file()
    drawn = load_manifest(tars)
    index(tars, "--label", "json:base", "--size", "32")
    plain = load_manifest(tars)
    assert plain.overlay is None
    assert plain.sha256 != drawn.sha256
    assert not (tars / INDEX_NAME / OVERLAY_NAME).exists()


def test_what_cannot_be_drawn_is_one_sentence(photos: Path, tmp_path: Path) -> None:
    tars = only_tars(keep(photos, tmp_path / "kept"), tmp_path / "tars")
    for options, said in (
        (["--overlay", "letters", "--size", "31"], r"but these pictures have 31x31"),
        (["--overlay", "bits", "--overlay-option", "bits=2"], r"makes pictures of \(5, 224, 224\) out of"),
        (["--overlay", "colours", "--overlay-option", "correlation=1"], "follows the label base"),
        (["--overlay-option", "bits=2"], "bits is an option of an overlay"),
    ):
        with pytest.raises(UserError, match=said):
            index(tars, *options)
    assert not (tars / INDEX_NAME / "manifest.json").exists()
