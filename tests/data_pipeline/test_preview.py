from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from data_pipeline.build import build_dataset
from data_pipeline.overlays.shapes import shape_mask
from data_pipeline.preview import draw_cell, draw_grid
from data_pipeline.sample import MASK_OUTSIDE, NO_LABEL, Sample
from data_pipeline.shards import SampleStore

PINK = (255, 0, 200)


def test_a_cell_shows_the_picture_the_outline_of_its_mask_and_both_names(tmp_path: Path) -> None:
    manifest = build_dataset("procedural_shapes", tmp_path / "built", limit=10)
    image = np.random.default_rng(0).integers(0, 200, (32, 32, 3), dtype=np.uint8)
    mask = shape_mask("square")
    cells = {}
    for label_base, label_overlay in ((0, 0), (1, 0), (0, 1), (0, NO_LABEL)):
        cell = draw_cell(Sample(0, image, mask, label_base, label_overlay), manifest)
        cells[label_base, label_overlay] = np.asarray(cell)
        enlarged, outline = cells[label_base, label_overlay][:96, :96], np.zeros((96, 96), dtype=bool)
        outline[30:66, 30:66] = True
        outline[31:65, 31:65] = False
        assert (enlarged[outline] == PINK).all()
        np.testing.assert_array_equal(enlarged[~outline], np.kron(image, np.ones((3, 3, 1), np.uint8))[~outline])
    base_line, overlay_line = slice(96, 111), slice(113, 130)
    assert not np.array_equal(cells[0, 0][base_line], cells[1, 0][base_line])
    assert not np.array_equal(cells[0, 0][overlay_line], cells[0, 1][overlay_line])
    np.testing.assert_array_equal(cells[0, 0][base_line], cells[0, 1][base_line])
    assert (cells[0, NO_LABEL][overlay_line] == 255).all()


def test_a_grid_holds_the_samples_in_rows_of_ten(tmp_path: Path) -> None:
    build_dataset("procedural", tmp_path / "built", limit=25)
    store = SampleStore(tmp_path / "built")
    grid = np.asarray(draw_grid(store, num_samples=60))
    cell = np.asarray(draw_cell(store[13], store.manifest))
    height, width, _ = cell.shape
    assert grid.shape == (8 + 3 * height, 8 + 10 * width, 3)
    np.testing.assert_array_equal(grid[8 + height : 8 + 2 * height, 8 + 3 * width : 8 + 4 * width], cell)
    assert (grid[8 + 2 * height :, 8 + 5 * width :] == 255).all()
    assert draw_grid(store, num_samples=3).size == (8 + 3 * width, 8 + height)


def test_large_pictures_are_shown_as_they_are(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / "root" / name).mkdir(parents=True)
        Image.new("RGB", (120, 90), (1, 2, 3)).save(tmp_path / "root" / name / "0.png")
    build_dataset("cifar10", tmp_path / "built", source="folder", root=tmp_path / "root")
    sample = SampleStore(tmp_path / "built")[0]
    assert (sample.mask == MASK_OUTSIDE).all()
    cell = np.asarray(draw_cell(sample, SampleStore(tmp_path / "built").manifest))
    assert (cell[:90, :120] == (1, 2, 3)).all()
