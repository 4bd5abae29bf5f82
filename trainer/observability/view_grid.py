"""Draw a grid of pictures, their views and the changes of the views.

Shapes: N pictures, C channels, H height, W width.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from data_pipeline.core.sample import NO_LABEL
from trainer.observability.figures import GridRow, difference_gain, difference_pictures, picture_grid
from trainer.probes.features import Pictures, ViewFunction
from trainer.probes.view_batches import view_batches

CPU = torch.device("cpu")


def draw_views(
    policy: ViewFunction, pictures: Pictures, rows_N: Tensor, *, seed: int, view: int, device: torch.device = CPU
) -> tuple[Tensor, Tensor]:
    """Return the pictures of `rows_N` and one view of each, both (N, C, H, W) float32 on the CPU.

    Views are drawn as in the first epoch.
    """
    batches = view_batches(policy, pictures, rows_N, seed=seed, view=view, device=device)
    image_parts, view_parts = zip(*((batch.seen_BCHW.cpu(), batch.views_BCHW.cpu()) for batch in batches), strict=True)
    return torch.cat(image_parts), torch.cat(view_parts)


def choose_pictures(pictures: Pictures, num: int) -> Tensor:
    """Return the rows of up to `num` pictures: the first of each class, then the second of each class, and so on.

    The classes are those of the first label.
    """
    seen: dict[int, int] = {}
    turn: list[tuple[int, int, int]] = []
    label_N = next(iter(pictures.by_label.values()), torch.zeros(len(pictures), dtype=torch.int64))
    for row, label in enumerate(label_N.tolist()):
        seen[label] = seen.get(label, 0) + 1
        turn.append((seen[label], label, row))
    return torch.tensor([row for _, _, row in sorted(turn)[:num]])


def view_grid(
    policy: ViewFunction, pictures: Pictures, rows_N: Tensor, *, seed: int, device: torch.device = CPU
) -> tuple[bytes, int]:
    """Return the grid as PNG, and the gain of its difference rows.

    The rows are: picture, view 1, difference, view 2, difference. Of spectrograms, see `as_shown`.
    """
    picture_NCHW, first_NCHW = draw_views(policy, pictures, rows_N, seed=seed, view=0, device=device)
    _, second_NCHW = draw_views(policy, pictures, rows_N, seed=seed, view=1, device=device)
    picture, first, second = as_shown(pictures, picture_NCHW, first_NCHW, second_NCHW)
    gain = difference_gain(first - picture, second - picture)
    rows = [GridRow("picture", picture)]
    for number, view in ((1, first), (2, second)):
        rows.append(GridRow(f"view {number}", np.clip(view, 0.0, 1.0)))
        rows.append(GridRow(f"difference\n× {gain}", difference_pictures(view - picture, gain=gain)))
    return picture_grid(rows, column_titles=[_title(pictures, row) for row in rows_N.tolist()]), gain


def as_shown(pictures: Pictures, picture_NCHW: Tensor, *views_NCHW: Tensor) -> list[NDArray[np.float32]]:
    """Return pictures and views for the eye, each (N, H, W, 3), black at 0 and white at 1.

    Spectrograms are grey, from black for the lowest value of `picture_NCHW` to white for the highest, with low bands at
    the bottom.
    """
    parts = [picture_NCHW, *views_NCHW]
    if pictures.are_sounds:
        low, high = picture_NCHW.min(), picture_NCHW.max()
        parts = [((part - low) / (high - low)).flip(2) for part in parts]
    return [to_nhwc(part) for part in parts]


def _title(pictures: Pictures, row: int) -> str:
    """Return the classes of the picture: of its first two labels, which are its own and that of its overlay."""
    numbers = {space: int(label_N[row]) for space, label_N in list(pictures.by_label.items())[:2]}
    return " · ".join(pictures.class_names(space)[number] for space, number in numbers.items() if number != NO_LABEL)


def to_nhwc(pictures_NCHW: Tensor) -> NDArray[np.float32]:
    """Return (N, H, W, 3). If there are not three channels, the first one is shown in grey."""
    shown_NCHW = pictures_NCHW if pictures_NCHW.shape[1] == 3 else pictures_NCHW[:, :1].expand(-1, 3, -1, -1)
    return shown_NCHW.permute(0, 2, 3, 1).numpy()
