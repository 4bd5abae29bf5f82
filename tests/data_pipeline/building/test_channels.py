"""Pictures of any number of channels and of more than 8 bits, from a folder and from tars of others."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import webdataset
from PIL import Image
from torch import Tensor

from data_pipeline.__main__ import main
from data_pipeline.building.build import build_dataset
from data_pipeline.core.errors import UserError
from data_pipeline.core.random_crop import CropLaw
from data_pipeline.core.value_range import ValueRange
from data_pipeline.loading.decode import decode, draw_crops
from data_pipeline.loading.whole import read_all
from data_pipeline.sources.picture_file import read_pixels
from data_pipeline.storage.store import SampleStore
from data_pipeline.tools.preview import draw_grid
from tests.commands import call
from tests.data_pipeline.building.draws import keys_of
from tests.data_pipeline.stored_samples import find_problems
from tests.data_pipeline.tools.test_verify import change_member
from tests.tars import by_webdataset, indexed

SIZE, NUM = 16, 8


def npy(values: np.ndarray[Any, Any]) -> bytes:
    file = io.BytesIO()
    np.save(file, values)
    return file.getvalue()


def of_channels(number: int, num_channels: int) -> bytes:
    rows, columns, channels = np.mgrid[:SIZE, :SIZE, :num_channels]
    return npy((rows * number + columns + 20 * channels).astype(np.uint8))


def of_12_bits(number: int) -> bytes:
    file = io.BytesIO()
    values_HW = np.linspace(0, 300 * number + 500, SIZE * SIZE).astype(np.uint16).reshape(SIZE, SIZE)
    Image.fromarray(values_HW).save(file, "PNG")
    return file.getvalue()


def write(root: Path, files: list[bytes], suffix: str) -> Path:
    for number, content in enumerate(files):
        path = root / "train" / ("owl" if number % 2 else "crow") / f"{number}.{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return root


def stores(directory: Path, files: list[bytes], suffix: str, *, value_range: str | None) -> dict[str, SampleStore]:
    """Build, pack and index the same files."""
    root, made = write(directory / "root", files, suffix), {}
    options: dict[str, Any] = {"image_size": SIZE} | ({} if value_range is None else {"value_range": value_range})
    for name, keep in (("built", False), ("kept", True)):
        build_dataset("folder", directory / name, root=root, source_options=options, keep=keep)
        made[name] = SampleStore(directory / name)
    (directory / "tars").mkdir()
    by_webdataset(
        directory / "tars" / "a.tar",
        [{"__key__": f"{number:02}", suffix: content} for number, content in enumerate(files)],
    )
    given = ValueRange.parse(value_range)
    made["indexed"] = indexed(directory / "tars", directory / "tars" / ".tar_index", size=SIZE, value_range=given)
    return made


def whole(store: SampleStore) -> Tensor:
    return torch.cat([batch.inputs_a for batch in read_all(store, batch_size=5)])


def in_file_order(store: SampleStore) -> Tensor:
    order = sorted(range(len(store)), key=lambda index: Path(store.file_of(index)).stem)
    return whole(store)[order]


@pytest.mark.parametrize("num_channels", [1, 2, 3, 4, 7])
def test_pictures_of_any_number_of_channels_are_stored_and_read(num_channels: int, tmp_path: Path) -> None:
    files = [of_channels(number, num_channels) for number in range(NUM)]
    expected = torch.from_numpy(np.stack([np.moveaxis(read_pixels(file), -1, 0) for file in files]))
    for name, store in stores(tmp_path, files, "npy", value_range=None).items():
        manifest = store.manifest
        assert manifest.input_shape == (num_channels, SIZE, SIZE)
        assert torch.equal(in_file_order(store), expected)
        values = expected.double() / 255
        np.testing.assert_allclose(manifest.mean, values.mean(dim=(0, 2, 3)), rtol=1e-12)
        np.testing.assert_allclose(manifest.std, values.std(dim=(0, 2, 3), correction=0), rtol=1e-9)
        assert not find_problems(tmp_path / name if name != "indexed" else tmp_path / "tars")
        draw_grid(str(store.location), num_samples=3)
    built = tmp_path / "built" / "shard-00000.tar"
    field = "png" if num_channels in (1, 3) else "npy"
    seen = [sample[field] for sample in webdataset.WebDataset(str(built), shardshuffle=False).decode("l8")]
    for theirs, ours in zip(seen, whole(SampleStore(tmp_path / "built")), strict=True):
        if field == "npy":
            np.testing.assert_array_equal(np.moveaxis(theirs, -1, 0), ours)


def test_crops_of_many_channels_have_all_of_them(tmp_path: Path) -> None:
    store = stores(tmp_path, [of_channels(number, 5) for number in range(NUM)], "npy", value_range=None)["indexed"]
    law = CropLaw(scale=(0.2, 1.0), ratio=(0.75, 4 / 3), purpose=0)
    samples = decode(store, np.arange(NUM), crops=partial(draw_crops, law, (keys_of(NUM), keys_of(NUM, view=1))))
    for pictures_BCHW in (samples.pictures_BCHW, samples.pictures_b_BCHW):
        assert pictures_BCHW is not None
        assert pictures_BCHW.shape == (NUM, 5, SIZE, SIZE)
        # The channels of a picture differ by 20 everywhere.
        assert ((pictures_BCHW[:, 1:].int() - pictures_BCHW[:, :-1].int()) % 256 == 20).all()
    assert not samples.bad


def test_values_of_twelve_bits_are_scaled_wherever_they_are_read(tmp_path: Path) -> None:
    files = [of_12_bits(number) for number in range(NUM)]
    stored = np.stack([np.asarray(Image.open(io.BytesIO(file))) for file in files])
    expected = np.rint(stored * (255 / 2_600))
    for store in stores(tmp_path, files, "png", value_range="2600").values():
        assert store.manifest.value_range == ValueRange(0, 2_600)
        assert store.manifest.how_made.source_options == {"value_range": "0..2600"}
        np.testing.assert_array_equal(in_file_order(store)[:, 0], expected)
        np.testing.assert_allclose(store.manifest.mean, expected.mean() / 255, rtol=1e-12)
    with pytest.raises(UserError, match=r"built with source_options .*2600.*, not .*4095"):
        build_dataset(
            "folder",
            tmp_path / "built",
            root=tmp_path / "root",
            source_options={"image_size": SIZE, "value_range": "4095"},
        )


def test_the_command_line_takes_a_range(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The index of a test set has that of its train set."""
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        by_webdataset(tmp_path / split / "a.tar", [{"__key__": "0", "png": of_12_bits(3), "cls": b"1"}])
    words = ["index", str(tmp_path / "train"), "--size", str(SIZE), "--value-range"]
    assert call(main, *words, "100..1500", monkeypatch=monkeypatch, capsys=capsys).status == 0
    words = ["index", str(tmp_path / "test"), "--classes-of", str(tmp_path / "train")]
    assert call(main, *words, monkeypatch=monkeypatch, capsys=capsys).status == 0
    assert SampleStore(tmp_path / "test").manifest.value_range == ValueRange(100, 1_500)
    done = call(main, *words, "--value-range", "5..5", monkeypatch=monkeypatch, capsys=capsys)
    assert done.status == 2
    assert "5..5 is not a range from a lower to a higher value" in done.stderr


def test_pictures_of_other_channels_are_refused_or_counted(tmp_path: Path) -> None:
    files = [of_channels(number, 4 if number else 5) for number in range(NUM)]
    root = write(tmp_path / "root", files, "npy")
    with pytest.raises(UserError, match=r"\d\.npy is .* of 4 channels but .*0\.npy is .* of 5 channels; "):
        build_dataset("folder", tmp_path / "out", root=root, source_options={"image_size": SIZE})
    by_webdataset(tmp_path / "a.tar", [{"__key__": str(number), "npy": file} for number, file in enumerate(files)])
    store = indexed(tmp_path / "a.tar", tmp_path / "index", size=SIZE)
    bad = decode(store, np.arange(NUM)).bad
    assert {row: sample.reason for row, sample in bad.items()}[1] == "1.npy: it has 4 channels, but the dataset 5"
    assert len(bad) == NUM - 1


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda file: file.replace(b"NUMPY", b"MUMPY"), "magic string is not correct"),
        (lambda file: file.replace(b"|u1", b"|i1"), "it holds int8 of the shape"),
        (lambda file: file.replace(b"(16, 16, 5)", b"(16, 80, 1)"), "it holds uint8 of the shape"),
        (lambda file: file.replace(b"(16, 16, 5)", b"(99, 99, 9)"), "holds 88,209 bytes, not 1,280"),
    ],
)
def test_a_damaged_npy_of_a_build_is_a_bad_sample(
    damage: Callable[[bytes], bytes], reason: str, tmp_path: Path
) -> None:
    root = write(tmp_path / "root", [of_channels(number, 5) for number in range(NUM)], "npy")
    build_dataset("folder", tmp_path / "built", root=root, num_samples_per_shard=2)
    change_member(tmp_path / "built", "00000003.npy", damage)
    bad = decode(SampleStore(tmp_path / "built"), np.arange(NUM)).bad
    assert list(bad) == [3]
    assert re.search(rf"it is not a whole \.npy of a build, \(5, 16, 16\) uint8 .*{reason}", bad[3].reason)
