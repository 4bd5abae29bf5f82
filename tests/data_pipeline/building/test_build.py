from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import re
import signal
import tarfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from data_pipeline.audio.waveform import crop_last
from data_pipeline.building.build import build_dataset
from data_pipeline.building.catalogue import open_dataset
from data_pipeline.core.errors import UserError
from data_pipeline.core.randomness import generator, shuffled_in_rounds
from data_pipeline.core.sample import MASK_OUTSIDE, Sample
from data_pipeline.overlays import baked_keys, evaluation_keys
from data_pipeline.sources.background import read_sounds
from data_pipeline.storage.manifest import Manifest, load_manifest
from data_pipeline.storage.store import SampleStore
from data_pipeline.storage.totals import Totals
from tests.data_pipeline.stored_samples import decode_sample, find_problems
from tests.real_data import archive
from tests.tars import unpack_tar


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def samples(directory: Path) -> list[Sample]:
    store = SampleStore(directory)
    return [decode_sample(store, index) for index in range(len(store))]


@pytest.fixture(scope="module")
def cifar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty real pictures of each class, as `ROOT/test/CLASS/*.jpg`."""
    root = tmp_path_factory.mktemp("cifar")
    with tarfile.open(archive("cifar10-images-test.tar.gz")) as tar:
        unpack_tar(tar, root, [member for member in tar if member.isfile() and int(Path(member.name).stem) < 20])
    return root


# --- what is built


@pytest.fixture(scope="module")
def fsdd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three real recordings of each digit by each of six speakers, as `ROOT/recordings/*.wav`."""
    root = tmp_path_factory.mktemp("fsdd")
    with tarfile.open(archive("fsdd-recordings.tar.gz")) as tar:
        unpack_tar(tar, root, [member for member in tar if re.search(r"_[0-2]\.wav$", member.name)])
    return root


@pytest.mark.slow
def test_real_cifar_is_stored_whole_under_its_labels(cifar: Path, tmp_path: Path) -> None:
    manifest = build_dataset(
        "cifar10_digits",
        tmp_path / "built",
        source="folder",
        root=cifar,
        split="test",
        overlay_options={"digits": "mnist_t10k", "digits_root": str(archive("mnist"))},
        num_samples_per_shard=64,
    )
    assert manifest == load_manifest(tmp_path / "built")
    assert find_problems(tmp_path / "built") == []
    assert np.diff(SampleStore(tmp_path / "built").shard_ends, prepend=0).tolist() == [64, 64, 64, 8]
    assert manifest.labels["base"].counts == (20,) * 10
    assert manifest.input_shape == (3, 32, 32)

    # Every picture is there once, under its own label, and intact outside the object.
    originals = [(path.parent.name, np.asarray(Image.open(path))) for path in sorted((cifar / "test").glob("*/*.jpg"))]
    stored = samples(tmp_path / "built")
    found = []
    for sample in stored:
        assert sample.mask is not None
        photo = sample.mask == MASK_OUTSIDE
        name = manifest.labels["base"].classes[sample.labels["base"]]
        [same] = [
            number
            for number, (label, picture) in enumerate(originals)
            if label == name and np.array_equal(picture[photo], sample.content[photo])
        ]
        found.append(same)
    assert sorted(found) == list(range(200))
    pictures = np.stack([sample.content for sample in stored]).astype(np.float64) / 255
    np.testing.assert_allclose(manifest.mean, pictures.mean(axis=(0, 1, 2)), rtol=1e-12)
    np.testing.assert_allclose(manifest.std, pictures.std(axis=(0, 1, 2)), rtol=1e-12)
    counts = np.bincount([sample.labels["overlay"] for sample in stored], minlength=10)
    assert manifest.labels["overlay"].counts == tuple(counts.tolist())


@pytest.mark.slow
@pytest.mark.parametrize("split", ["train", "test"])
def test_a_background_is_heard_behind_the_speech(split: str, fsdd: Path, tmp_path: Path) -> None:
    """A sample minus its speech is the first or the last second of the recording of its label."""
    noise_root, num_points = archive("noise"), 8333
    manifest = build_dataset(
        "spoken_noise",
        tmp_path / "built",
        source="fsdd",
        root=fsdd,
        split=split,
        overlay_options={"noise_root": str(noise_root)},
        limit=30,
    )
    build_dataset("spoken", tmp_path / "clean", source="fsdd", root=fsdd, split=split, limit=30)
    assert find_problems(tmp_path / "built") == []
    assert manifest.labels["overlay"].classes == ("babble", "traffic", "machinery")
    sounds = [sound.numpy() for sound in read_sounds(noise_root, sample_rate=8000, num_points=num_points)]
    scaled = [0.05 * sound / np.abs(sound).max() for sound in sounds]
    last_B = crop_last(baked_keys(torch.arange(30), seed=0, split=split)) & (split == "train")
    places = set()
    for sample, clean, last in zip(samples(tmp_path / "built"), samples(tmp_path / "clean"), last_B, strict=True):
        assert sample.labels["base"] == clean.labels["base"]
        speech = np.zeros(num_points)
        kept = clean.content[-num_points:] if last else clean.content[:num_points]
        speech[: len(kept)] = kept / 32768
        behind, recording = sample.content - speech, scaled[sample.labels["overlay"]]
        near = [np.abs(behind - part).max() < 1e-6 for part in (recording[:num_points], recording[-num_points:])]
        assert sum(near) == 1
        places.add((sample.labels["overlay"], near.index(True)))
    assert len(places) == (6 if split == "train" else 3)
    assert {place for _, place in places} == ({0, 1} if split == "train" else {0})
    points = np.stack([sample.content for sample in samples(tmp_path / "built")]).astype(np.float64)
    np.testing.assert_allclose(manifest.mean, [points.mean()], atol=1e-7)
    np.testing.assert_allclose(manifest.std, [points.std()], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dataset", ["procedural_digits", "spoken_noise"])
def test_an_online_overlay_lies_beside_clean_samples(dataset: str, tmp_path: Path) -> None:
    """The file draws as the build's own overlay would, and the shards hold what a build without overlay holds."""
    manifest = build_dataset(dataset, tmp_path / "online", source="procedural", overlay="online", limit=30)
    plain_name = {"procedural_digits": "procedural", "spoken_noise": "spoken"}[dataset]
    plain = build_dataset(plain_name, tmp_path / "plain", source="procedural", limit=30)
    assert find_problems(tmp_path / "online") == []
    assert manifest.files["tars.sha256"] == plain.files["tars.sha256"]
    assert manifest.is_online
    assert (manifest.labels["overlay"].counts, manifest.mean, manifest.std) == ((), plain.mean, plain.std)
    overlay = open_dataset(dataset, source="procedural").overlay
    assert overlay is not None
    assert manifest.labels["overlay"].classes == overlay.class_names
    store = SampleStore(tmp_path / "online")
    assert store.overlay is not None
    inputs = torch.zeros(30, 3, 32, 32, dtype=torch.uint8) if manifest.medium == "picture" else torch.zeros(30, 8333)
    keys = evaluation_keys(torch.arange(30), draw=0)
    drawn, expected = store.overlay(inputs, keys), overlay(inputs, keys)
    assert torch.equal(drawn.inputs, expected.inputs)
    assert torch.equal(drawn.label_B, expected.label_B)
    assert drawn.inputs.any()


@pytest.mark.slow
def test_the_same_arguments_give_the_same_bytes_with_any_number_of_workers(tmp_path: Path) -> None:
    for name, num_workers in (("a", 1), ("b", 2)):
        build_dataset(
            "procedural_shapes",
            tmp_path / name,
            limit=50,
            num_samples_per_shard=20,
            num_workers=num_workers,
        )
    first = contents(tmp_path / "a")
    assert len([name for name in first if name.endswith(".tar")]) == 3
    assert contents(tmp_path / "b") == first


def test_repeats_show_each_picture_again_with_a_draw_of_its_own(tmp_path: Path) -> None:
    build_dataset("procedural_shapes", tmp_path / "thrice", limit=20, repeats=3)
    build_dataset("procedural_shapes", tmp_path / "once", limit=20)
    stored = samples(tmp_path / "thrice")
    assert len(stored) == 60
    colours = set()
    for sample, again in zip(stored[:20], stored[20:40], strict=True):
        outside = sample.mask == MASK_OUTSIDE
        np.testing.assert_array_equal(sample.content[outside], again.content[outside])
        assert sample.labels["base"] == again.labels["base"]
        colours |= {sample.content[18, 16].tobytes(), again.content[18, 16].tobytes()}
    assert len(colours) == 40
    for sample, single in zip(stored, samples(tmp_path / "once"), strict=False):
        np.testing.assert_array_equal(sample.content, single.content)
    digests = [load_manifest(tmp_path / name).how_made.source_sha256 for name in ("once", "thrice")]
    assert digests[0] == digests[1]


def test_the_order_is_a_shuffle_in_balanced_rounds() -> None:
    labels = np.repeat([0, 1, 2], [50, 50, 5])
    order = shuffled_in_rounds(labels, generator(0, "order"))
    assert sorted(order) == list(range(105))
    for first in range(0, 15, 3):
        assert sorted(labels[order[first : first + 3]]) == [0, 1, 2]
    assert np.bincount(labels[order[:75]]).tolist() == [35, 35, 5]
    firsts = {tuple(shuffled_in_rounds(labels, generator(seed, "order"))[:3]) for seed in range(60)}
    assert len(firsts) > 55
    assert len({tuple(labels[list(first)]) for first in firsts}) > 3  # the classes of a round are shuffled, too


# --- whole or not at all


def test_a_finished_dataset_is_left_alone_and_refused_for_other_arguments(tmp_path: Path) -> None:
    first = build_dataset("procedural_shapes", tmp_path / "built", limit=30)
    before = contents(tmp_path / "built")
    times = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "built").iterdir()}
    assert build_dataset("procedural_shapes", tmp_path / "built", limit=30) == first
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "built").iterdir()} == times
    for changed, message in (
        ({"seed": 1}, "was built with seed 0, not 1; choose another directory or remove it"),
        ({"repeats": 2}, "was built with repeats 1, not 2"),
        ({"num_samples_per_shard": 7}, "was built with number of shards 1, not 5"),
        ({"overlay": "online"}, "was built with overlay"),
    ):
        with pytest.raises(UserError, match=message):
            build_dataset("procedural_shapes", tmp_path / "built", **{"limit": 30, **changed})  # type: ignore[arg-type]
    assert contents(tmp_path / "built") == before
    assert names(tmp_path) == ["built"]


def test_a_dataset_of_other_pictures_or_with_a_torn_shard_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "root" / "train"
    for name in ("a/0.png", "b/0.png", "b/1.png"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (32, 32), (ord(name[0]), ord(name[2]), 0)).save(folder / name)

    def build() -> Manifest:
        return build_dataset("cifar10_shapes", tmp_path / "built", source="folder", root=tmp_path / "root")

    first = build()
    Image.new("RGB", (32, 32), (9, 9, 9)).save(folder / "b" / "0.png")
    with pytest.raises(UserError, match="was built from other data; choose another directory or remove it"):
        build()
    Image.new("RGB", (32, 32), (ord("b"), ord("0"), 0)).save(folder / "b" / "0.png")
    assert build() == first
    (folder / "b").rename(folder / "c")
    with pytest.raises(UserError, match="was built from other data"):
        build()
    shard = tmp_path / "built" / "shard-00000.tar"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"shard-00000\.tar has .* bytes"):
        build()


def test_a_directory_with_something_else_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("all of it")
    (tmp_path / "file").write_text("")
    for name in ("mine", "file"):
        with pytest.raises(UserError, match=f"{name} holds no manifest"):
            build_dataset("procedural", tmp_path / name, limit=10)
    with pytest.raises(NotADirectoryError):
        build_dataset("procedural", tmp_path / "file" / "below", limit=10)
    (tmp_path / "mine").rename(tmp_path / "out.partial")
    with pytest.raises(UserError, match="is not from a build"):
        build_dataset("procedural", tmp_path / "out", limit=10)
    assert names(tmp_path) == ["file", "out.partial"]
    assert names(tmp_path / "out.partial") == ["thesis.txt"]
    (tmp_path / "empty").mkdir()
    assert build_dataset("procedural", tmp_path / "empty", limit=10).num_samples == 10


def damaged_folder(root: Path, *, num: int = 16) -> list[Path]:
    """Write pictures of two classes; return those that are damaged, the very first among them."""
    rng = np.random.default_rng(0)
    for number in range(num):
        path = root / str(number % 2) / f"{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(path)
    damaged = [root / "0" / "00.png", root / "0" / "06.png", root / "1" / "13.png"]
    for path, content in zip(damaged, (b"", b"<html>404</html>", damaged[2].read_bytes()[:900]), strict=True):
        path.write_bytes(content)
    return damaged


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("dataset", ["folder", "folder_shapes", "folder_bits"])
def test_all_bad_records_are_named_at_once_and_may_be_left_out(
    dataset: str, num_workers: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A build without them is that of the folder from which they were removed, to the byte."""
    damaged = damaged_folder(tmp_path / "root" / "train")
    online = {"overlay": "online"} if dataset == "folder_bits" else {}
    arguments: dict[str, Any] = {"num_samples_per_shard": 2, **online}
    bad = {**arguments, "root": tmp_path / "root", "num_workers": num_workers}
    with pytest.raises(UserError) as told:
        build_dataset(dataset, tmp_path / "out", skip_bad=2, **bad)
    assert str(told.value).startswith("3 records cannot be used: ")
    assert str(told.value).endswith("mend or remove them, or leave them out with --skip-bad 3")
    assert names(tmp_path) == ["out.bad.txt", "root"]
    lines = (tmp_path / "out.bad.txt").read_text().splitlines()
    assert [line.partition(" cannot be read, because ")[0] for line in lines] == list(map(str, damaged))
    assert all(line in str(told.value) for line in lines)
    built = build_dataset(dataset, tmp_path / "out", skip_bad=3, **bad)
    assert built.num_samples == 13
    assert built.how_made.source.endswith(", without 3 records that cannot be read")
    assert caplog.messages[-1].startswith("left out 3 records that cannot be used: ")
    assert build_dataset(dataset, tmp_path / "out", skip_bad=3, **bad) == built
    with pytest.raises(UserError, match="3 records cannot be used"):
        build_dataset(dataset, tmp_path / "out", **bad)
    for path in damaged:
        path.unlink()
    whole = build_dataset(dataset, tmp_path / "whole", root=tmp_path / "root", **arguments)
    assert whole.how_made.source_sha256 == built.how_made.source_sha256
    assert (whole.mean, whole.std, whole.overlay) == (built.mean, built.std, built.overlay)
    tars = {name: content for name, content in contents(tmp_path / "out").items() if name.endswith(".tar")}
    assert {name: contents(tmp_path / "whole")[name] for name in tars} == tars
    with pytest.raises(UserError, match=r"was built with source .*, without 3 records"):
        build_dataset(dataset, tmp_path / "out", skip_bad=3, **bad)


def test_others_take_the_places_of_bad_records_within_the_limit(tmp_path: Path) -> None:
    damaged_folder(tmp_path / "root" / "train")
    arguments: dict[str, Any] = {"root": tmp_path / "root", "skip_bad": 3}
    assert build_dataset("folder", tmp_path / "out", limit=8, **arguments).num_samples == 8
    for path in (tmp_path / "root").rglob("*.png"):
        path.write_bytes(b"")
    with pytest.raises(UserError, match=r"no record can be used: .*00\.png cannot be read, because it "):
        build_dataset("folder", tmp_path / "none", **arguments)


def holders(partial: Path) -> set[int]:
    """The processes that write a tar of a build."""
    start, found = str(partial / "shard-"), set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if any(str(path.readlink()).startswith(start) for path in (process / "fd").iterdir()):
                found.add(int(process.name))
    return found


@pytest.mark.slow
def test_a_killed_worker_ends_the_build_and_a_later_one_is_whole(tmp_path: Path) -> None:
    arguments = {"dataset": "procedural_shapes", "limit": 400, "num_samples_per_shard": 20}

    def kill_one() -> None:
        deadline = time.monotonic() + 60
        while not (found := holders(tmp_path / "out.partial") - {os.getpid()}):
            assert time.monotonic() < deadline, "no worker has begun"
            time.sleep(0.01)
        os.kill(found.pop(), signal.SIGKILL)

    killer = threading.Thread(target=kill_one)
    killer.start()
    with pytest.raises(UserError, match=r"a worker process was killed.*fewer --workers"):
        build_dataset(directory=tmp_path / "out", num_workers=2, **arguments)  # type: ignore[arg-type]
    killer.join()
    assert names(tmp_path) == []
    assert build_dataset(directory=tmp_path / "out", **arguments).num_samples == 400  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_killed_build_leaves_no_dataset_and_no_workers(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["data_pipeline.building.workers"])
    arguments = {"limit": 50_000, "num_samples_per_shard": 20, "num_workers": 2}
    build = context.Process(target=build_dataset, args=("procedural_shapes", tmp_path / "out"), kwargs=arguments)
    build.start()
    deadline, partial = time.monotonic() + 120, tmp_path / "out.partial"
    workers: set[int] = set()
    while not list(partial.glob("*.tar")) or len(workers) < 2:
        workers |= holders(partial)
        assert time.monotonic() < deadline
        assert build.is_alive()
    build.kill()
    build.join()
    while any(Path(f"/proc/{worker}").exists() for worker in workers):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert names(tmp_path) == ["out.partial"]
    build_dataset("procedural_shapes", tmp_path / "out", limit=40, num_samples_per_shard=50)
    assert names(tmp_path) == ["out"]
    assert find_problems(tmp_path / "out") == []
    assert len(list((tmp_path / "out").glob("*.tar"))) == 1


def test_two_builds_do_not_write_the_same_dataset(tmp_path: Path) -> None:
    partial = tmp_path / "out.partial"
    partial.mkdir()
    descriptor = os.open(partial / ".lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        with pytest.raises(UserError, match="another process is writing"):
            build_dataset("procedural", tmp_path / "out", limit=10)
    finally:
        os.close(descriptor)
    assert build_dataset("procedural", tmp_path / "out", limit=10).num_samples == 10


def test_totals_are_exact_in_any_order() -> None:
    rng = np.random.default_rng(0)
    waveforms = rng.uniform(-1.05, 1.05, (40, 1000)).astype(np.float32)
    recorded = rng.integers(-32768, 32768, (40, 1000)).astype(np.int16)
    for contents_NT, scale in ((waveforms, 1.0), (recorded, 32768.0)):
        of_each = [Totals.of(content) for content in contents_NT]
        totals = sum(of_each, Totals())
        assert totals == sum(reversed(of_each[15:]), sum(of_each[:15], Totals()))
        assert totals + Totals() == totals
        exact = contents_NT.astype(np.float64) / scale
        assert totals.mean == pytest.approx([exact.mean()], abs=1e-8)
        assert totals.std == pytest.approx([exact.std()], rel=1e-6)


# --- bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dataset": "cifar10"}, "name it with --root"),
        ({"overlay": "online", "repeats": 2}, "--repeats stores nothing new"),
        ({"dataset": "cifar10", "overlay": "online"}, "cifar10 has no overlay"),  # said before the source is opened
        ({"dataset": "procedural_digits", "overlay_options": {"digits": "mnist"}}, "digits_root"),
    ],
)
def test_bad_arguments_are_named_with_the_mend(arguments: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as raised:
        build_dataset(**{"dataset": "procedural_shapes", "directory": tmp_path / "out", **arguments})  # type: ignore[arg-type]
    assert message in str(raised.value)
    assert names(tmp_path) == []
