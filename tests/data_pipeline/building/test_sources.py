from __future__ import annotations

import gzip
import hashlib
import pickle
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torchvision
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import RidgeClassifier

from data_pipeline.core.errors import UserError
from data_pipeline.sources.cifar import Cifar
from data_pipeline.sources.digits import MnistKind, mnist_digits, sklearn_digits
from data_pipeline.sources.procedural import Procedural
from tests.data_pipeline.building.test_suppression_settings import write_mnist
from tests.data_pipeline.folders import open_folder
from tests.real_data import archive


def save_picture(path: Path, *, size: tuple[int, int] = (6, 4), colour: tuple[int, int, int] = (10, 20, 30)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)


# --- CIFAR as torchvision unpacks it


def write_cifar(root: Path, monkeypatch: pytest.MonkeyPatch, *, num_classes: int) -> np.ndarray:
    """Tiny files in the format of CIFAR-10 or CIFAR-100, with torchvision's checksums replaced by theirs.

    Returns the pixels of two training files (one of CIFAR-100) and the test file, four pictures each.
    """
    cifar = {10: torchvision.datasets.CIFAR10, 100: torchvision.datasets.CIFAR100}[num_classes]
    folder = root / cifar.base_folder
    folder.mkdir(parents=True)
    names = {10: ["data_batch_1", "data_batch_2", "test_batch"], 100: ["train", "test"]}[num_classes]
    pixels = np.random.default_rng(0).integers(0, 256, (len(names), 4, 3, 32, 32), dtype=np.uint8)
    labels = {10: "labels", 100: "fine_labels"}[num_classes]
    contents = [{"data": part.reshape(4, -1), labels: [3, 1, 2, 0], "coarse_labels": [0] * 4} for part in pixels]
    meta = {"label_names": list("abcdefghij"), "fine_label_names": [f"kind_{label}" for label in range(100)]}
    checksums = {}
    for name, content in dict(zip([*names, cifar.meta["filename"]], [*contents, meta], strict=True)).items():
        (folder / name).write_bytes(pickle.dumps(content))
        checksums[name] = hashlib.md5((folder / name).read_bytes()).hexdigest()
    monkeypatch.setattr(cifar, "train_list", [[name, checksums[name]] for name in names[:-1]])
    monkeypatch.setattr(cifar, "test_list", [[names[-1], checksums[names[-1]]]])
    monkeypatch.setattr(cifar, "meta", {**cifar.meta, "md5": checksums[cifar.meta["filename"]]})
    return pixels.transpose(0, 1, 3, 4, 2)


@pytest.mark.parametrize(("num_classes", "num_files"), [(10, 2), (100, 1)])
def test_cifar_gives_the_pictures_of_the_split(
    num_classes: Literal[10, 100], num_files: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pixels = write_cifar(tmp_path, monkeypatch, num_classes=num_classes)
    train, test = (Cifar(tmp_path, num_classes=num_classes, split=split) for split in ("train", "test"))
    base = train.labels["base"]
    assert base.label_N.tolist() == [3, 1, 2, 0] * num_files
    assert (train.num_records, test.num_records) == (4 * num_files, 4)
    assert len(base.classes) == num_classes
    assert base.classes[2] == {10: "c", 100: "kind_2"}[num_classes]
    np.testing.assert_array_equal(train[num_files * 4 - 3].content, pixels[-2, 1])
    np.testing.assert_array_equal(test[0].content, pixels[-1, 0])


@pytest.mark.parametrize("num_classes", [10, 100])
def test_cifar_that_is_missing_or_damaged_says_how_to_get_it(
    num_classes: Literal[10, 100], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = rf"does not hold torchvision's cifar-{num_classes}-.*\.CIFAR{num_classes}\(.*download=True"
    with pytest.raises(UserError, match=message):
        Cifar(tmp_path / "nowhere", num_classes=num_classes, split="train")
    write_cifar(tmp_path, monkeypatch, num_classes=num_classes)
    name = {10: "cifar-10-batches-py/data_batch_2", 100: "cifar-100-python/train"}[num_classes]
    (tmp_path / name).write_bytes(b"torn")
    with pytest.raises(UserError, match="damaged"):
        Cifar(tmp_path, num_classes=num_classes, split="train")


# --- a folder of pictures


def test_folder_names_the_picture_of_another_size(tmp_path: Path) -> None:
    save_picture(tmp_path / "train" / "a" / "0.png", size=(6, 4))
    save_picture(tmp_path / "train" / "b" / "0.png", size=(4, 6))
    with pytest.raises(UserError, match=r"b/0\.png is 4x6 pixels but .*a/0\.png is 6x4 .*image_size"):
        open_folder(tmp_path, split="train")[1]


def test_folder_reads_names_of_any_letters(tmp_path: Path) -> None:
    names = ["a/ä ö.png", "a/b\udcff.png", "a/x.png", "b/日本.png"]  # the second is not UTF-8
    for number, name in enumerate(names):
        save_picture(tmp_path / "train" / name, colour=(number, 0, 0))
    folder = pickle.loads(pickle.dumps(open_folder(tmp_path, split="train")))
    assert sorted(int(folder[number].content[0, 0, 0]) for number in range(4)) == [0, 1, 2, 3]


# --- handwritten digits


def test_the_test_digits_of_mnist_are_cut_in_two_where_that_is_asked_for(tmp_path: Path) -> None:
    root = archive("mnist")
    raw = root / "MNIST" / "raw"
    for name in ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"):
        (tmp_path / name).write_bytes(gzip.decompress((raw / f"{name}.gz").read_bytes()))
    images = torchvision.datasets.mnist.read_image_file(str(tmp_path / "t10k-images-idx3-ubyte")).numpy()
    labels = torchvision.datasets.mnist.read_label_file(str(tmp_path / "t10k-labels-idx1-ubyte")).numpy()
    train, test = (mnist_digits(root, split=split, kind="mnist_t10k") for split in ("train", "test"))
    np.testing.assert_array_equal(train.images, images[:8000])
    np.testing.assert_array_equal(train.labels, labels[:8000])
    np.testing.assert_array_equal(test.images, images[8000:])
    np.testing.assert_array_equal(test.labels, labels[8000:])
    assert train.name == "mnist t10k digits 0-7999"
    assert test.name == "mnist t10k digits 8000-9999"


@pytest.mark.parametrize(("kind", "split"), [("mnist", "train"), ("mnist", "test"), ("mnist_test_for_test", "train")])
def test_test_digits_do_not_stand_in_for_training_digits(kind: MnistKind, split: str, tmp_path: Path) -> None:
    write_mnist(tmp_path, prefix="t10k", num=15)
    with pytest.raises(UserError, match=r"has no train-images-idx3-ubyte.*mnist_t10k"):
        mnist_digits(tmp_path, split=split, kind=kind)


def test_each_split_has_its_digits_of_mnist(tmp_path: Path) -> None:
    write_mnist(tmp_path, prefix="train", num=20)
    with pytest.raises(UserError, match="has no t10k-images-idx3-ubyte"):
        mnist_digits(tmp_path, split="test", kind="mnist_test_for_test")
    write_mnist(tmp_path, prefix="t10k", num=15)
    train, test = mnist_digits(tmp_path, split="train"), mnist_digits(tmp_path, split="test")
    assert train.description == test.description  # as published
    assert train.images.shape == (20, 28, 28)
    assert mnist_digits(tmp_path, split="train", kind="mnist_test_for_test").description == train.description
    assert mnist_digits(tmp_path, split="test", kind="mnist_test_for_test").images.shape == (15, 28, 28)


def test_mnist_that_is_missing_or_damaged_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"MNIST/raw has no train-images-idx3-ubyte.*download=True"):
        mnist_digits(tmp_path, split="train")
    write_mnist(tmp_path, prefix="train", num=20)
    images = tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte"
    whole = images.read_bytes()
    for damaged in (whole[:-1], whole[:6], b"\x01" + whole[1:]):
        images.write_bytes(damaged)
        with pytest.raises(UserError, match="train-images-idx3-ubyte is not a whole MNIST file"):
            mnist_digits(tmp_path, split="train")
    images.rename(images.with_suffix(".gz")).write_bytes(gzip.compress(whole)[:-20])
    with pytest.raises(UserError, match=r"train-images-idx3-ubyte\.gz is not a whole MNIST file"):
        mnist_digits(tmp_path, split="train")
    images.with_suffix(".gz").write_bytes(gzip.compress(whole))
    assert len(mnist_digits(tmp_path, split="train").labels) == 20


def test_sklearn_digits_keep_their_labels_and_spread_their_levels() -> None:
    train, test = sklearn_digits(split="train"), sklearn_digits(split="test")
    bunch = load_digits()
    np.testing.assert_array_equal(np.concatenate([train.labels, test.labels]), bunch.target)
    pixels = np.concatenate([train.images, test.images])
    assert pixels.min() == 0
    assert pixels.max() == 255
    assert np.abs(pixels / 255 - bunch.images / 16).max() <= 0.5 / 255
    assert (len(train.labels), len(test.labels)) == (1437, 360)


# --- drawn pictures


def drawn(split: str, num: int, *, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    source = Procedural(seed=seed, split=split, num_records=num)
    return np.stack([source[number].content for number in range(num)]), source.labels["base"].label_N


def test_a_drawn_picture_depends_on_seed_split_and_number_alone() -> None:
    first, labels = drawn("train", 40)
    np.testing.assert_array_equal(first, drawn("train", 50)[0][:40])
    assert labels.tolist() == [number % 10 for number in range(40)]
    everything = np.concatenate([first, drawn("test", 40)[0], drawn("train", 40, seed=1)[0]])
    assert len(np.unique(everything.reshape(120, -1), axis=0)) == 120
    assert everything.shape == (120, 32, 32, 3)
    assert everything.dtype == np.uint8


@pytest.mark.slow
def test_drawn_kinds_differ_in_form_and_not_in_the_pixels_themselves() -> None:
    """A linear classifier of raw pixels fails; one of the grey spectrum, which keeps nothing but form, does not."""
    (train, train_labels), (test, test_labels) = drawn("train", 800), drawn("test", 400)
    linear = RidgeClassifier(alpha=100).fit(train.reshape(800, -1) / 255, train_labels)
    assert linear.score(test.reshape(400, -1) / 255, test_labels) < 0.4  # the demo needs less than 0.6

    forest = RandomForestClassifier(25, max_features=24, random_state=0).fit(spectrum(train), train_labels)
    assert forest.score(spectrum(test), test_labels) > 0.8


def spectrum(images: np.ndarray) -> np.ndarray:
    """The strongest frequencies of each scale in the grey pictures, whatever their direction."""
    grey = images.mean(axis=-1) * np.outer(np.hanning(32), np.hanning(32))
    strength = np.abs(np.fft.fft2(grey))
    row, column = np.meshgrid(np.fft.fftfreq(32), np.fft.fftfreq(32), indexing="ij")
    ring = np.floor(np.hypot(row, column) * 32)
    rings = [np.sort(strength[:, ring == radius], axis=1)[:, ::-2][:, :12] for radius in range(1, 16)]
    features = np.concatenate(rings, axis=1)
    shares: np.ndarray = features / features.sum(axis=1, keepdims=True)
    return shares
