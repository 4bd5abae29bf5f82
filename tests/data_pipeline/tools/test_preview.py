from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure

from data_pipeline.loading.decode import decode
from data_pipeline.overlays import evaluation_keys
from data_pipeline.overlays.shapes import Shapes
from data_pipeline.storage.store import SampleStore
from data_pipeline.tools.preview import draw_grid
from tests.data_pipeline.stored_samples import decode_sample
from tests.tiny_data import NUM_POINTS, write_tiny_dataset, write_tiny_sounds


def drawn(figure: Figure) -> list[np.ndarray]:
    """The pictures of a grid, row by row."""
    return [np.asarray(image.get_array()) for cell in figure.axes for image in cell.images]


def test_a_cell_shows_the_picture_the_outline_of_its_mask_both_names_and_its_file(tmp_path: Path) -> None:
    directory = write_tiny_dataset(tmp_path / "built", num_samples=25)
    store = SampleStore(directory)
    figure = draw_grid(str(directory), num_samples=60)
    assert len(figure.axes) == 30
    for index, picture in enumerate(drawn(figure)):
        sample, cell = decode_sample(store, index), figure.axes[index]
        np.testing.assert_array_equal(picture, sample.content)
        assert [text.get_text() for text in cell.texts] == [
            *(label.classes[sample.labels[name]] for name, label in store.manifest.labels.items()),
            f"{sample.key}.png",
        ]
        (outline,) = cell.collections
        assert sample.mask is not None
        assert np.asarray(outline.get_paths()[0].vertices)[:, 1].min() == np.nonzero(sample.mask)[0].min() - 0.5
        assert (sample.mask[-1] != 0).all()  # the outline is a line above the lower half


def test_an_online_overlay_is_drawn_as_in_an_evaluation(tmp_path: Path) -> None:
    directory = write_tiny_dataset(tmp_path / "built", num_samples=4, overlay="online")
    clean = decode(SampleStore(directory), np.arange(4)).pictures_BCHW
    assert clean is not None
    expected = Shapes()(clean, evaluation_keys(torch.arange(4), draw=0))
    assert not torch.equal(expected.inputs, clean)
    for picture, picture_CHW in zip(drawn(draw_grid(str(directory), num_samples=4)), expected.inputs, strict=True):
        np.testing.assert_array_equal(picture, picture_CHW.permute(1, 2, 0).numpy())


def test_sounds_are_drawn_with_time_to_the_right_and_frequency_upwards(tmp_path: Path) -> None:
    directory = write_tiny_sounds(tmp_path / "built", num_samples=30)
    store = SampleStore(directory)
    figure = draw_grid(str(directory), num_samples=30)
    loudest_bands: dict[int, list[int]] = {0: [], 1: []}
    for index, values in enumerate(drawn(figure)):
        assert figure.axes[index].images[0].origin == "lower"
        sample, num_frames = decode_sample(store, index), values.shape[1]
        loudest_bands[sample.labels["base"]].append(int(values[:, : num_frames // 8].mean(axis=1).argmax()))
        end = num_frames * len(sample.content) // NUM_POINTS
        if end < 0.7 * num_frames:
            assert values[:, : end - 3].max() > values[:, end + 3 :].max()
    assert min(loudest_bands[1]) > max(loudest_bands[0])  # a high tone lies above a deep one
