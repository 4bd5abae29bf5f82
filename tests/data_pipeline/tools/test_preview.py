from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from data_pipeline.__main__ import main
from data_pipeline.building.build import build_dataset
from data_pipeline.core.errors import UserError
from data_pipeline.loading.decode import decode
from data_pipeline.overlays import evaluation_keys
from data_pipeline.overlays.noise import Noise
from data_pipeline.overlays.shapes import Shapes
from data_pipeline.sources.background import procedural_sounds
from data_pipeline.storage.store import SampleStore
from data_pipeline.tools.preview import colour_spectrograms, draw_cell, draw_grid
from tests.data_pipeline.stored_samples import decode_sample
from tests.tiny_data import NUM_POINTS, SAMPLE_RATE, write_tiny_dataset, write_tiny_sounds

PINK, GREY = (255, 0, 200), (40, 40, 40)
MARGIN = 8
CELL = 128  # the side of an enlarged picture, in pixels


def cells_of(grid: Image.Image, *, height: int, width: int) -> list[NDArray[np.uint8]]:
    """The enlarged pictures of a grid, row by row, without captions."""
    points = np.asarray(grid)[MARGIN:, MARGIN:]
    tops, lefts = range(0, points.shape[0], height), range(0, points.shape[1], width)
    return [points[top : top + CELL, left : left + CELL] for top in tops for left in lefts]


def test_a_cell_shows_the_picture_the_outline_of_its_mask_and_both_names() -> None:
    picture = np.random.default_rng(0).integers(0, 200, (32, 32, 3), dtype=np.uint8)
    mask = np.zeros((32, 32), dtype=np.uint8)
    mask[10:22, 10:22] = 255
    outline = np.zeros((CELL, CELL), dtype=bool)
    outline[40:88, 40:88] = True
    outline[41:87, 41:87] = False
    cells = {}
    for names in (("frog", "square"), ("ship", "square"), ("frog", "ellipse"), ("frog", ""), ("", "square")):
        captions = list(zip(names, (GREY, PINK), strict=True))
        cells[names] = cell = np.asarray(draw_cell(picture, mask, captions))
        assert (cell[:CELL, :CELL][outline] == PINK).all()
        enlarged = np.kron(picture, np.ones((4, 4, 1), np.uint8))
        np.testing.assert_array_equal(cell[:CELL, :CELL][~outline], enlarged[~outline])
    base_line, overlay_line = slice(CELL, CELL + 17), slice(CELL + 17, None)
    assert not np.array_equal(cells["frog", "square"][base_line], cells["ship", "square"][base_line])
    assert not np.array_equal(cells["frog", "square"][overlay_line], cells["frog", "ellipse"][overlay_line])
    np.testing.assert_array_equal(cells["frog", "square"][base_line], cells["frog", "ellipse"][base_line])
    assert (cells["frog", ""][overlay_line] == 255).all()
    assert (cells["", "square"][base_line] == 255).all()


def test_large_pictures_are_shown_as_they_are() -> None:
    picture = np.random.default_rng(0).integers(0, 255, (140, 170, 3), dtype=np.uint8)
    cell = np.asarray(draw_cell(picture, None, []))
    np.testing.assert_array_equal(cell[:140, :170], picture)


def test_very_large_pictures_are_made_smaller_with_their_mask() -> None:
    picture, mask = np.zeros((600, 600, 3), dtype=np.uint8), np.zeros((600, 600), dtype=np.uint8)
    picture[:300] = 200
    mask[150:450, 150:450] = 255
    cell = np.asarray(draw_cell(picture, mask, []))
    assert cell.shape[:2] == (200 + 4 + MARGIN, 200 + MARGIN)
    assert (cell[20, 20] == 200).all()
    assert (cell[180, 20] == 0).all()
    assert (cell[50, 50:150] == PINK).all()
    assert (cell[150:, :200] != PINK).any(axis=-1).all()


def test_a_caption_that_is_too_long_ends_in_dots() -> None:
    picture = np.zeros((32, 32, 3), dtype=np.uint8)
    short, long, longer = (np.asarray(draw_cell(picture, None, [("w" * number, GREY)])) for number in (8, 40, 60))
    assert short.shape == long.shape
    assert (long[:, CELL:] == 255).all()
    assert (long[CELL:] != 255).any()
    np.testing.assert_array_equal(long, longer)
    assert not np.array_equal(short, long)


def test_large_pictures_have_fewer_columns(tmp_path: Path) -> None:
    for name in "ab":
        folder = tmp_path / "root" / "train" / name
        folder.mkdir(parents=True)
        for number in range(6):
            Image.new("RGB", (230, 224), (20 * number, 0, 0)).save(folder / f"{number}.png")
    build_dataset("folder_letters", tmp_path / "built", root=tmp_path / "root", image_size=224)
    width, height = draw_grid(str(tmp_path / "built"), num_samples=60).size
    assert (width, height) == (MARGIN + 6 * (224 + MARGIN), MARGIN + 2 * (224 + 2 * 15 + 4 + MARGIN))


def test_a_grid_holds_the_samples_in_rows_of_ten(tmp_path: Path) -> None:
    directory = write_tiny_dataset(tmp_path / "built", num_samples=25)
    store = SampleStore(directory)
    sample = decode_sample(store, 13)
    assert sample.mask is not None
    words = {name: label.classes[sample.labels[name]] for name, label in store.manifest.labels.items()}
    captions = [(words["base"], GREY), (words["overlay"], PINK)]
    cell = np.asarray(draw_cell(np.asarray(sample.content, dtype=np.uint8), sample.mask, captions))
    height, width, _ = cell.shape
    grid = np.asarray(draw_grid(str(directory), num_samples=60))
    assert grid.shape == (MARGIN + 3 * height, MARGIN + 10 * width, 3)
    np.testing.assert_array_equal(
        grid[MARGIN + height : MARGIN + 2 * height, MARGIN + 3 * width : MARGIN + 4 * width], cell
    )
    assert (grid[MARGIN + 2 * height :, MARGIN + 5 * width :] == 255).all()
    assert draw_grid(str(directory), num_samples=3).size == (MARGIN + 3 * width, MARGIN + height)


def test_an_online_overlay_is_drawn_as_in_an_evaluation(tmp_path: Path) -> None:
    directory = write_tiny_dataset(tmp_path / "built", num_samples=4, overlay="online")
    clean = decode(SampleStore(directory), np.arange(4)).pictures_BCHW
    assert clean is not None
    expected = Shapes()(clean, evaluation_keys(torch.arange(4), draw=0))
    grid = draw_grid(str(directory), num_samples=4)
    cells = cells_of(grid, height=grid.height - MARGIN, width=(grid.width - MARGIN) // 4)
    assert not torch.equal(expected.inputs, clean)
    for cell, picture_CHW in zip(cells, expected.inputs, strict=True):
        # The outline covers one point in four of a picture's pixel; the middle of each pixel is never on a border.
        np.testing.assert_array_equal(cell[1::4, 1::4], picture_CHW.permute(1, 2, 0).numpy())


def test_sounds_are_drawn_with_time_to_the_right_and_frequency_upwards(tmp_path: Path) -> None:
    directory = write_tiny_sounds(tmp_path / "built", num_samples=30)
    store = SampleStore(directory)
    grid = draw_grid(str(directory), num_samples=30)
    cells = cells_of(grid, height=(grid.height - MARGIN) // 3, width=(grid.width - MARGIN) // 10)
    loudest_rows: dict[int, list[float]] = {0: [], 1: []}
    num_short = 0
    for index, cell in enumerate(cells):
        sample = decode_sample(store, index)
        brightness = cell.astype(float).sum(axis=2)
        loudest_rows[sample.labels["base"]].append(float(brightness[:, : CELL // 8].mean(axis=1).argmax()))
        if len(sample.content) < 0.7 * NUM_POINTS:
            num_short += 1
            end = CELL * len(sample.content) // NUM_POINTS
            assert brightness[:, : end - 12].max() > 2 * brightness[:, end + 12 :].max()
    assert num_short > 5
    assert max(loudest_rows[1]) < min(loudest_rows[0])  # a high tone lies above a deep one


def test_the_colours_of_a_sound_go_from_its_quietest_cell_to_its_loudest() -> None:
    values = torch.linspace(-2, 5, 64 * 64).reshape(1, 64, 64)
    silence = torch.full((1, 64, 64), -0.823)
    colours = colour_spectrograms(torch.cat([values, silence, values - 3]))
    brightness = colours[:, ::-1].astype(int).sum(axis=-1)  # the first band is at the bottom
    assert (np.diff(brightness[0].reshape(-1)) >= 0).all()
    assert brightness[0].min() < 10
    assert brightness[0].max() > 600
    assert (brightness[1] == brightness[0].min()).all()
    np.testing.assert_array_equal(brightness[2], brightness[0])


def test_a_background_drawn_online_is_seen_and_named(tmp_path: Path) -> None:
    sounds = procedural_sounds(0, sample_rate=SAMPLE_RATE, num_points=NUM_POINTS)
    noise = Noise.of(sounds, num_points=NUM_POINTS, volume=1.0, crop="first")
    plain = write_tiny_sounds(tmp_path / "plain", num_samples=3)
    mixed = write_tiny_sounds(tmp_path / "mixed", num_samples=3, overlay=noise)
    clean, drawn = (np.asarray(draw_grid(str(path), num_samples=3)).astype(int) for path in (plain, mixed))
    assert len(drawn) == len(clean) + 15  # one line more
    assert (drawn[MARGIN + CELL + 15 :] == PINK).all(axis=-1).any()
    pictures = slice(MARGIN, MARGIN + CELL)
    assert drawn[pictures].mean() > clean[pictures].mean() + 20  # the gaps of the speech are filled


def run_preview(*words: str) -> None:
    main(["preview", *words])


def test_the_command_writes_a_png(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = write_tiny_dataset(tmp_path / "built", num_samples=12, overlay="none")
    run_preview(str(directory), "--out", str(tmp_path / "grid.png"), "--samples", "11")
    with Image.open(tmp_path / "grid.png") as grid:
        assert grid.size == draw_grid(str(directory), num_samples=11).size
    assert capsys.readouterr().out.strip() == str(tmp_path / "grid.png")


@pytest.mark.parametrize(
    ("out", "samples", "problem"),
    [("grid.png", "0", "--samples"), ("grid.jpg", "1", "does not end in .png"), ("no/grid.png", "1", "cannot write")],
)
def test_what_cannot_be_drawn_is_said(tmp_path: Path, out: str, samples: str, problem: str) -> None:
    directory = write_tiny_dataset(tmp_path / "built", num_samples=2)
    with pytest.raises(UserError, match=problem):
        run_preview(str(directory), "--out", str(tmp_path / out), "--samples", samples)
