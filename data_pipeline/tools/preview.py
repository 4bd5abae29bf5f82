"""Draw the first samples of a dataset as a grid, as training reads them, with their labels and files below.

The object on a picture is outlined by its mask. Of more than three channels the first three are drawn, of two the
first. A sound is drawn as the log-mel spectrogram that the encoder gets: time to the right, frequency upwards, the
quietest cell dark and the loudest bright. An online overlay has the first draw of an evaluation.
"""

from __future__ import annotations

import argparse
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from data_pipeline.audio.log_mel import log_mel, mel_config, power_mel
from data_pipeline.core.batch import Batch
from data_pipeline.core.errors import printable
from data_pipeline.core.sample import MASK_OUTSIDE, NO_LABEL
from data_pipeline.loading.whole import read_all
from data_pipeline.storage.manifest import Manifest
from data_pipeline.storage.store import SampleStore

NUM_COLUMNS: Final = 10
_CELL: Final = 1.3  # inches, with about as many lines of captions as there are labels
_MAX_CHARACTERS: Final = 22  # of the name of a file, as many as fit below a cell
_LINE: Final = 0.15  # inches
_INK, _OUTLINE = "#282828", "#ff00c8"


def draw_grid(location: str, *, num_samples: int) -> Figure:
    """Draw the first `num_samples` samples, up to ten in a row. Samples of all classes come first in a build."""
    store = SampleStore(location)
    manifest = store.manifest
    batch = next(read_all(store, batch_size=min(num_samples, manifest.num_samples)))
    num_columns = min(NUM_COLUMNS, len(batch))
    num_rows = -(-len(batch) // num_columns)
    num_lines = len(manifest.labels) + 1
    height = _CELL + _LINE * num_lines
    figure = Figure(figsize=(_CELL * num_columns, height * num_rows))
    cells = figure.subplots(num_rows, num_columns, squeeze=False)
    space = _LINE * (num_lines + 1) / _CELL
    figure.subplots_adjust(left=0.01, right=0.99, top=0.99, bottom=space / num_rows / 2, wspace=0.05, hspace=space)
    pictures = pictures_of(batch, manifest)
    for cell in cells.flat:
        cell.set_axis_off()
    for row, (cell, picture) in enumerate(zip(cells.flat, pictures, strict=False)):
        is_sound = picture.ndim == 2
        cell.imshow(
            picture,
            cmap="magma",
            interpolation="nearest",
            origin="lower" if is_sound else "upper",
            aspect="auto" if is_sound else "equal",
        )
        if batch.masks_BHW is not None and (inside_HW := batch.masks_BHW[row].numpy() != MASK_OUTSIDE).any():
            cell.contour(inside_HW, levels=[0.5], colors=[_OUTLINE], linewidths=1)
        _write_captions(cell, batch, store, row)
    return figure


def _write_captions(cell: Axes, batch: Batch, store: SampleStore, row: int) -> None:
    """Write the class names of a sample below it, in the order of the manifest, and then the end of its file's name.

    Those of an overlay have the colour of its outline.
    """
    captions = []
    for name, label in store.manifest.labels.items():
        number = int(batch.labels[name][row])
        colour = _OUTLINE if label.given_by == "overlay" else _INK
        captions.append(("" if number == NO_LABEL else label.classes[number], colour))
    captions.append((printable(store.file_of(int(batch.index_B[row])))[-_MAX_CHARACTERS:], _INK))
    for line, (text, colour) in enumerate(captions):
        cell.text(
            0,
            -_LINE * line / _CELL,
            text,
            transform=cell.transAxes,
            verticalalignment="top",
            fontsize=8,
            color=colour,
            clip_on=False,
            parse_math=False,
        )


def pictures_of(batch: Batch, manifest: Manifest) -> NDArray[np.generic]:
    """Return the pictures of a batch in colour, (B, H, W, 3) uint8, or its sounds as spectrograms, (B, bands, frames).

    Channels behind the third, and those that an overlay adds to grey pictures, are left out.
    """
    if manifest.sample_rate is not None:
        config = mel_config(manifest.sample_rate, batch.inputs_a.shape[1])
        return log_mel(power_mel(batch.inputs_a, config), config).numpy()
    inputs_BHWC: NDArray[np.uint8] = batch.inputs_a.permute(0, 2, 3, 1).contiguous().numpy()
    num_channels = inputs_BHWC.shape[3]
    is_grey = num_channels != 3 and min(manifest.input_shape[0], num_channels) < 3
    return np.repeat(inputs_BHWC[..., :1], 3, axis=3) if is_grey else inputs_BHWC[..., :3]


def run(args: argparse.Namespace) -> None:
    figure = draw_grid(args.location, num_samples=args.samples)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.out, dpi=100)
    print(args.out)
