from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import json
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data_pipeline import shards
from data_pipeline.build import balanced_order, build_dataset
from data_pipeline.catalogue import DATASETS, open_dataset
from data_pipeline.errors import UserError
from data_pipeline.manifest import Manifest, load_manifest
from data_pipeline.sample import MASK_OUTSIDE, NO_LABEL, Sample
from data_pipeline.shards import SampleStore
from data_pipeline.verify import find_problems
from tests.real_data import REPOSITORY, archive


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def samples(directory: Path) -> list[Sample]:
    store = SampleStore(directory)
    return [store[index] for index in range(len(store))]


@pytest.fixture(scope="module")
def cifar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty real pictures of each class, as `ROOT/test/CLASS/*.jpg`."""
    root = tmp_path_factory.mktemp("cifar")
    with tarfile.open(archive("cifar10-images-test.tar.gz")) as tar:
        for member in tar:
            if member.isfile() and int(Path(member.name).stem) < 20:
                tar.extract(member, root, filter="data")
    return root


# --- what is built


@pytest.mark.parametrize("dataset", [name for name in DATASETS if name.startswith("cifar10")])
def test_real_cifar_in_all_four_forms(dataset: str, cifar: Path, tmp_path: Path) -> None:
    root = archive("mnist") if dataset == "cifar10_digits" else None
    arguments = {"source": "folder", "root": cifar, "split": "test", "digits_root": root}
    manifest = build_dataset(dataset, tmp_path / "built", num_samples_per_shard=64, **arguments)  # type: ignore[arg-type]
    assert manifest == load_manifest(tmp_path / "built")
    assert list(find_problems(tmp_path / "built")) == []
    assert [entry.num_samples for entry in manifest.shards] == [64, 64, 64, 8]
    assert manifest.counts_base == (20,) * 10
    assert manifest.image_shape == (3, 32, 32)
    num_overlay = {"cifar10": 0, "cifar10_shapes": 3, "cifar10_digits": 10, "cifar10_letters": 26}[dataset]
    assert len(manifest.label_names.overlay) == len(manifest.counts_overlay) == num_overlay
    assert sum(manifest.counts_overlay) == (200 if num_overlay else 0)

    # Every picture is there once, under its own label, and intact outside the object.
    originals = [(path.parent.name, np.asarray(Image.open(path))) for path in sorted((cifar / "test").glob("*/*.jpg"))]
    stored = samples(tmp_path / "built")
    found = []
    for sample in stored:
        photo = sample.mask == MASK_OUTSIDE
        name = manifest.label_names.base[sample.label_base]
        [same] = [
            number
            for number, (label, picture) in enumerate(originals)
            if label == name and np.array_equal(picture[photo], sample.image[photo])
        ]
        found.append(same)
        assert (sample.label_overlay == NO_LABEL) == (num_overlay == 0)
    assert sorted(found) == list(range(200))
    images = np.stack([sample.image for sample in stored]) / 255
    np.testing.assert_allclose(manifest.mean, images.mean(axis=(0, 1, 2)), rtol=1e-12)
    np.testing.assert_allclose(manifest.std, images.std(axis=(0, 1, 2)), rtol=1e-9)
    overlay_labels = [sample.label_overlay for sample in stored]
    assert manifest.counts_overlay == tuple(overlay_labels.count(label) for label in range(num_overlay))


def test_the_same_arguments_give_the_same_bytes_with_any_number_of_workers(tmp_path: Path) -> None:
    for name, num_workers in (("a", 1), ("b", 1), ("c", 3)):
        build_dataset(
            "procedural_digits", tmp_path / name, limit=450, num_samples_per_shard=200, num_workers=num_workers
        )
    first = contents(tmp_path / "a")
    assert sorted(first) == sorted(
        ["manifest.json", *(f"shard-0000{n}{end}" for n in range(3) for end in (".tar", ".index.npz"))]
    )
    assert contents(tmp_path / "b") == first
    assert contents(tmp_path / "c") == first


@pytest.mark.parametrize("changed", [{"seed": 1}, {"split": "test"}, {"limit": 31}, {"dataset": "procedural_letters"}])
def test_other_arguments_give_other_bytes(changed: dict[str, object], tmp_path: Path) -> None:
    arguments = {"dataset": "procedural_shapes", "seed": 0, "split": "train", "limit": 30}
    first = build_dataset(directory=tmp_path / "a", **arguments)  # type: ignore[arg-type]
    other = build_dataset(directory=tmp_path / "b", **{**arguments, **changed})  # type: ignore[arg-type]
    assert first.shards[0].sha256 != other.shards[0].sha256
    assert first.sha256 != other.sha256


def test_train_and_test_share_no_overlay_draw(tmp_path: Path) -> None:
    """The same pictures in both splits: the objects drawn on them differ all the same."""
    for number in range(20):
        for name in "ab":
            path = tmp_path / "root" / name / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (32, 32)).save(path)
    drawn = []
    for split in ("train", "test"):
        build_dataset("cifar10_letters", tmp_path / split, source="folder", root=tmp_path / "root", split=split)
        drawn += [sample.image.tobytes() for sample in samples(tmp_path / split)]
    assert len(set(drawn)) == 80


def test_repeats_show_each_picture_again_with_a_draw_of_its_own(tmp_path: Path) -> None:
    build_dataset("procedural_shapes", tmp_path / "thrice", limit=20, repeats=3)
    build_dataset("procedural_shapes", tmp_path / "once", limit=20)
    stored = samples(tmp_path / "thrice")
    assert len(stored) == 60
    colours = set()
    for sample, again in zip(stored[:20], stored[20:40], strict=True):
        outside = sample.mask == MASK_OUTSIDE
        np.testing.assert_array_equal(sample.image[outside], again.image[outside])
        assert sample.label_base == again.label_base
        colours |= {sample.image[18, 16].tobytes(), again.image[18, 16].tobytes()}
    assert len(colours) == 40
    for sample, single in zip(stored, samples(tmp_path / "once"), strict=False):
        np.testing.assert_array_equal(sample.image, single.image)
    digests = [load_manifest(tmp_path / name).how_made.source_sha256 for name in ("once", "thrice")]
    assert digests[0] == digests[1]


def test_the_order_is_a_shuffle_in_balanced_rounds() -> None:
    labels = np.repeat([0, 1, 2], [50, 50, 5])
    order = balanced_order(labels, seed=0, split="train", limit=None)
    assert sorted(order) == list(range(105))
    for first in range(0, 15, 3):
        assert sorted(labels[order[first : first + 3]]) == [0, 1, 2]
    assert np.bincount(labels[order[:75]]).tolist() == [35, 35, 5]
    np.testing.assert_array_equal(balanced_order(labels, seed=0, split="train", limit=40), order[:40])
    firsts = {tuple(balanced_order(labels, seed=seed, split="train", limit=3)) for seed in range(20)}
    assert len(firsts) == 20
    assert len({tuple(labels[list(first)]) for first in firsts}) > 3  # the classes of a round are shuffled, too
    assert not np.array_equal(order, balanced_order(labels, seed=0, split="test", limit=None))


# --- whole or not at all


def test_a_finished_dataset_is_found_and_left_alone(tmp_path: Path) -> None:
    first = build_dataset("procedural_shapes", tmp_path / "built", limit=30)
    times = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "built").iterdir()}
    assert build_dataset("procedural_shapes", tmp_path / "built", limit=30) == first
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "built").iterdir()} == times


def test_a_dataset_of_other_arguments_is_refused_with_their_name(tmp_path: Path) -> None:
    build_dataset("procedural_shapes", tmp_path / "built", limit=30)
    before = contents(tmp_path / "built")
    for changed, message in (
        ({"seed": 1}, "was built with seed 0, not 1; choose another directory or remove it"),
        ({"repeats": 2}, "was built with repeats 1, not 2"),
        ({"num_samples_per_shard": 7}, "was built with another --samples-per-shard"),
    ):
        with pytest.raises(UserError, match=message):
            build_dataset("procedural_shapes", tmp_path / "built", **{"limit": 30, **changed})  # type: ignore[arg-type]
    assert contents(tmp_path / "built") == before
    assert names(tmp_path) == ["built"]


def test_a_dataset_of_other_pictures_or_with_a_torn_shard_is_refused(tmp_path: Path) -> None:
    for name in ("a/0.png", "b/0.png", "b/1.png"):
        (tmp_path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (32, 32), (ord(name[0]), ord(name[2]), 0)).save(tmp_path / "root" / name)

    def build() -> Manifest:
        return build_dataset("cifar10_shapes", tmp_path / "built", source="folder", root=tmp_path / "root")

    first = build()
    Image.new("RGB", (32, 32), (9, 9, 9)).save(tmp_path / "root" / "b" / "0.png")
    with pytest.raises(UserError, match="was built from other pictures; choose another directory or remove it"):
        build()
    Image.new("RGB", (32, 32), (ord("b"), ord("0"), 0)).save(tmp_path / "root" / "b" / "0.png")
    assert build() == first
    (tmp_path / "root" / "b").rename(tmp_path / "root" / "c")
    with pytest.raises(UserError, match="was built from other pictures"):
        build()
    shard = tmp_path / "built" / "shard-00000.tar"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"shard-00000\.tar is missing or damaged; remove .* and build it again"):
        build()


def test_a_directory_with_something_else_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("all of it")
    (tmp_path / "file").write_text("")
    for name in ("mine", "file"):
        with pytest.raises(UserError, match=f"{name} is there already and is not a dataset"):
            build_dataset("procedural", tmp_path / name, limit=10)
    with pytest.raises(UserError, match=r"cannot make the folder .*; choose another --out"):
        build_dataset("procedural", tmp_path / "file" / "below", limit=10)
    assert names(tmp_path) == ["file", "mine"]
    assert names(tmp_path / "mine") == ["thesis.txt"]
    (tmp_path / "empty").mkdir()
    assert build_dataset("procedural", tmp_path / "empty", limit=10).num_samples == 10


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_picture_that_does_not_decode_leaves_nothing(num_workers: int, cifar: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    for path in (cifar / "test").glob("*/*.jpg"):
        (root / path.parent.name).mkdir(parents=True, exist_ok=True)
        (root / path.parent.name / path.name).write_bytes(path.read_bytes())
        (root / path.parent.name / f"again{path.name}").write_bytes(path.read_bytes())  # more than one worker's chunk
    (root / "cat" / "0007.jpg").write_bytes((root / "cat" / "0007.jpg").read_bytes()[:200])
    with pytest.raises(UserError, match=r"cat/0007\.jpg does not decode as a picture"):
        build_dataset("cifar10_shapes", tmp_path / "out", source="folder", root=root, num_workers=num_workers)
    assert names(tmp_path) == ["root"]


def test_a_full_disk_is_named_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("data_pipeline.shards.os.fsync", no_space)
    with pytest.raises(OSError, match="No space left") as raised:
        build_dataset("procedural", tmp_path / "out", limit=10)
    assert raised.value.errno == errno.ENOSPC
    assert "out.partial" in str(raised.value.filename)
    assert names(tmp_path) == []


def processes_with(environment: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if environment.encode() in path.read_bytes():
                found.append(path.parent.name)
    return found


def test_a_killed_build_leaves_no_dataset_no_lock_and_no_process(tmp_path: Path) -> None:
    out, mark = tmp_path / "out", f"BUILD_TO_KILL={tmp_path}"
    command = [sys.executable, "-m", "data_pipeline", "build", "procedural_shapes", "--out", str(out), "--workers", "2"]
    command += ["--limit", "50000", "--samples-per-shard", "50"]
    environment = {**os.environ, **dict([mark.split("=")])}
    process = subprocess.Popen(command, cwd=REPOSITORY, stderr=subprocess.DEVNULL, env=environment)
    deadline = time.monotonic() + 60
    partial = tmp_path / "out.partial"
    while not (partial / "shard-00002.tar").exists():
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.02)
    assert len(processes_with(mark)) >= 3
    process.kill()
    process.wait()
    assert not out.exists()
    with pytest.raises(UserError, match="not a finished dataset"):
        load_manifest(partial)
    build_dataset("procedural_shapes", out, limit=40, num_samples_per_shard=50)
    assert names(tmp_path) == ["out"]
    assert list(find_problems(out)) == []
    assert len(list(out.glob("*.tar"))) == 1
    while processes_with(mark):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_two_builds_do_not_write_the_same_dataset(tmp_path: Path) -> None:
    partial = tmp_path / "out.partial"
    partial.mkdir()
    descriptor = os.open(partial, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        with pytest.raises(UserError, match="another build is writing"):
            build_dataset("procedural", tmp_path / "out", limit=10)
    finally:
        os.close(descriptor)
    assert build_dataset("procedural", tmp_path / "out", limit=10).num_samples == 10


def test_a_file_system_without_locks_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("data_pipeline.build.fcntl.flock", no_locks)
    assert build_dataset("procedural", tmp_path / "out", limit=10).num_samples == 10


def test_what_no_build_left_is_not_cleared_away(tmp_path: Path) -> None:
    (tmp_path / "out.partial").mkdir()
    for name in ("shard-00000.tar", "thesis.txt"):
        (tmp_path / "out.partial" / name).write_text("all of it")
    with pytest.raises(UserError, match=r"out\.partial/thesis\.txt is not of a build"):
        build_dataset("procedural", tmp_path / "out", limit=10)
    assert names(tmp_path / "out.partial") == ["shard-00000.tar", "thesis.txt"]


def test_the_manifest_is_written_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    write_shards = shards.write_shards

    def watched(*args: object, **kwargs: object) -> object:
        entries = write_shards(*args, **kwargs)  # type: ignore[arg-type]
        seen.extend(names(tmp_path / "out.partial"))
        return entries

    monkeypatch.setattr("data_pipeline.build.write_shards", watched)
    build_dataset("procedural", tmp_path / "out", limit=10)
    assert seen == ["shard-00000.index.npz", "shard-00000.tar"]


# --- bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dataset": "cifar10_digit"}, 'unknown dataset "cifar10_digit"; did you mean "cifar10_digits"?'),
        ({"dataset": "imagenet"}, 'unknown dataset "imagenet"; valid are: cifar10, '),
        ({"split": "tset"}, 'unknown split "tset"; did you mean "test"?'),
        ({"dataset": "cifar10"}, "the source torchvision reads pictures from a folder; name it with --root"),
        ({"source": "folder"}, 'procedural cannot come from the source "folder"'),
        ({"dataset": "cifar10", "source": "foldr"}, 'the source "foldr"; did you mean "folder"?'),
        ({"root": Path("x")}, "procedural pictures are drawn, not read from x; leave --root out"),
        ({"digits": "mnist"}, "procedural_shapes has no digits, so it takes no --digits"),
        ({"dataset": "procedural_digits", "digits": "mnst"}, 'unknown digits "mnst"; did you mean "mnist"?'),
        ({"dataset": "procedural_digits", "digits": "mnist"}, "name it with --digits-root, or choose --digits sklearn"),
        ({"limit": 0}, "--limit must be at least 1, got 0"),
        ({"repeats": 0}, "--repeats must be at least 1, got 0"),
        ({"seed": -1}, "--seed must be at least 0, got -1"),
        ({"num_samples_per_shard": 0}, "--samples-per-shard must be at least 1, got 0"),
        ({"num_workers": 0}, "--workers must be at least 1, got 0"),
    ],
)
def test_bad_arguments_are_named_with_the_mend(arguments: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as raised:
        build_dataset(**{"dataset": "procedural_shapes", "directory": tmp_path / "out", **arguments})  # type: ignore[arg-type]
    assert message in str(raised.value)
    assert names(tmp_path) == []


def test_overlays_need_pictures_of_their_size(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / "root" / name).mkdir(parents=True)
        Image.new("RGB", (64, 48)).save(tmp_path / "root" / name / "0.png")
    with pytest.raises(UserError, match=r"draws on pictures of 32x32 pixels, but those in .*root are 64x48"):
        build_dataset("cifar10_letters", tmp_path / "out", source="folder", root=tmp_path / "root")
    assert build_dataset("cifar10", tmp_path / "out", source="folder", root=tmp_path / "root").image_shape == (
        3,
        48,
        64,
    )


def test_shards_are_plain_tars_of_pngs(tmp_path: Path) -> None:
    build_dataset("procedural_shapes", tmp_path / "out", limit=10)
    with tarfile.open(tmp_path / "out" / "shard-00000.tar") as tar:
        members = {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]
    assert json.loads(members["00000003.json"])["index"] == 3
    assert Image.open(io.BytesIO(members["00000003.png"])).mode == "RGB"
    assert Image.open(io.BytesIO(members["00000003.mask.png"])).mode == "L"


def test_digits_come_from_the_default_that_fits_the_pictures() -> None:
    assert "scikit-learn digits 0-1436" in open_dataset("procedural_digits").description
    mnist = open_dataset("procedural_digits", split="test", digits="mnist", digits_root=archive("mnist"))
    assert "mnist t10k digits 8000-9999" in mnist.description
