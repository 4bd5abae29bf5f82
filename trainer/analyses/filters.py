"""Measure the sparsity of features and their dependence on colour: figures 1 to 4 of Wen and Li (2021), in numbers.

The paper finds that with augmentations that hide colour few features fire on a picture. Features then see shapes, and
pictures of a class lie together. Without such augmentations features fire densely and follow the colour of the whole
picture. The figure shows pictures that drive some features most, found by gradient ascent on the pixels (Erhan et al.
2009).

Shapes: N pictures, B batch, C channels of the trunk's last map, H by W its pixels, F features chosen to be shown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from data_pipeline.core.errors import UserError
from data_pipeline.core.progress import Progress
from data_pipeline.core.randomness import generator
from data_pipeline.core.schema import Count, LearningRate, Measured, Schema
from trainer.analyses.analysis import Analysis, LoadedRun, RunResult
from trainer.analyses.embedding import silhouette
from trainer.observability.figures import GridRow, picture_grid
from trainer.observability.view_grid import to_nhwc
from trainer.probes.features import LabelSpace, frozen, to_float

NUM_COLUMNS = 8
NUM_STARTS = 64
_CONTRAST = 1e-6


class FiltersConfig(Schema):
    """The settings of the analysis of filters."""

    num_pictures: Count = Field(2000, description="The test pictures that are measured.")
    num_shown: Count = Field(24, description="The features that the picture shows.")
    num_steps: Count = Field(64, description="The steps of gradient ascent for each shown feature.")
    learning_rate: LearningRate = Field(0.1, description="The learning rate of the gradient ascent.")


class Sparsity(Schema):
    """Sparsity of the map before pooling; values below 0 count as 0.

    active_share: the share of values above 0.
    treves_rolls: 1 - (mean)^2 / mean of squares (Rolls and Tovee 1995).
    hoyer: Hoyer's measure (2004).
    dead_share: the share of channels that fire on no picture.

    `treves_rolls` and `hoyer` are means over pictures; each is from 0 (all values equal) to nearly 1 (a single value).
    All are None if the map is not finite.
    """

    active_share: Measured
    treves_rolls: Measured
    hoyer: Measured
    dead_share: Measured


class FiltersResult(RunResult):
    """analysis/filters.json.

    colour_r2: the share of the pooled features' variance that a linear function of the picture's mean colour explains.
    shown: the channels of the figure, those that vary most first.
    gain: for each of them, its value on the found picture over its highest value on a real picture. 0 if no start of
        the gradient ascent drives the channel, so that nothing was found; None if no real picture drives it.
    colourfulness: the share of the found picture's contrast that lies between colours, not between light and dark; None
        if nothing was found.
    """

    config: FiltersConfig
    num_pictures: int
    num_channels: int
    sparsity: Sparsity
    colour_r2: Measured
    silhouette: dict[LabelSpace, Measured]
    shown: tuple[int, ...]
    gain: tuple[Measured, ...]
    colourfulness: tuple[Measured, ...]


def measure(loaded: LoadedRun, config: FiltersConfig) -> tuple[FiltersResult, bytes]:
    """Return the numbers and the found pictures.

    Raises `UserError` for sounds, and for an encoder whose last map is not (B, C, H, W).
    """
    test = loaded.read_test(pictures_for="filters")
    rows_N = loaded.choose_rows(test, config.num_pictures)
    sparsity, pooled = _measure(loaded, rows_N)
    colour_NC = (test.images(rows_N).double() / 255).mean((2, 3)).to(loaded.device)
    unit = F.normalize(pooled, dim=1).cpu().numpy()
    shown_F = pooled.var(0).argsort(descending=True)[: config.num_shown]
    found_FCHW = activating_pictures(
        loaded.modules.encoder.pooled,
        shown_F,
        shape=tuple(test.images_NCHW.shape[1:]),
        config=config,
        seed=loaded.seed,
    )
    with frozen(loaded.modules.encoder):
        driven_F = loaded.modules.encoder.pooled(found_FCHW).double().gather(1, shown_F[:, None])[:, 0]
    gain_F, colourfulness_F = describe_found(found_FCHW, driven_F, highest_F=pooled.amax(0)[shown_F])
    result = FiltersResult(
        config=config,
        num_pictures=len(rows_N),
        num_channels=pooled.shape[1],
        sparsity=sparsity,
        colour_r2=explained_share(colour_NC, pooled),
        silhouette={space: silhouette(unit, test.labels(space)[rows_N].numpy()) for space in loaded.label_spaces()},
        shown=tuple(shown_F.tolist()),
        gain=tuple(gain_F.tolist()),
        colourfulness=tuple(colourfulness_F.tolist()),
        **loaded.facts,
    )
    return result, _picture(found_FCHW, result)


ANALYSIS = Analysis("filters", FiltersConfig, measure)


def sparsity_of(map_BCHW: Tensor) -> dict[str, Tensor]:
    """Return (B,) float64 active_share, treves_rolls and hoyer of each picture (see `Sparsity`), and `fires` (B, C)."""
    r_BP = map_BCHW.flatten(1).double().clamp_min(0)
    is_finite_B = map_BCHW.flatten(1).isfinite().all(1)
    num = r_BP.shape[1]
    squares_B = r_BP.square().sum(1)
    silent_B = squares_B == 0
    share_B = r_BP.sum(1).square() / squares_B.clamp_min(torch.finfo(torch.float64).tiny)  # from 1 to num
    return {
        "active_share": (r_BP > 0).double().mean(1).masked_fill(~is_finite_B, torch.nan),
        "treves_rolls": (1 - share_B / num).masked_fill(silent_B, 0.0),
        "hoyer": ((num**0.5 - share_B.sqrt()) / (num**0.5 - 1)).masked_fill(silent_B, 0.0),
        "fires": map_BCHW.amax((2, 3)) > 0,
    }


def explained_share(x_NP: Tensor, y_NC: Tensor) -> float:
    """Return R^2 of the least-squares fit of y by x and a constant, over all columns of y together.

    0 if y is constant, nan if it is not finite.
    """
    x, y = x_NP - x_NP.mean(0), y_NC - y_NC.mean(0)
    total = y.square().sum()
    if total == 0 or not total.isfinite():
        return 0.0 if total == 0 else math.nan
    # By the singular vectors, so that linearly dependent columns of x do no harm.
    left, singular, _ = torch.linalg.svd(x, full_matrices=False)
    basis = left[:, singular > singular.max() * 1e-10]
    return float((basis.T @ y).square().sum() / total)


def colourfulness(pictures_NCHW: Tensor) -> Tensor:
    """Return the share of a picture's variance that its channels do not have in common, (N,); 0 for a flat picture."""
    centred = pictures_NCHW - pictures_NCHW.mean((2, 3), keepdim=True)
    total_N = centred.square().mean((1, 2, 3))
    common_N = centred.mean(1).square().mean((1, 2))
    return torch.where(total_N > _CONTRAST, 1 - common_N / total_N.clamp_min(_CONTRAST), 0.0)


def describe_found(found_FCHW: Tensor, driven_F: Tensor, *, highest_F: Tensor) -> tuple[Tensor, Tensor]:
    """Return `gain` and `colourfulness` of found pictures (see `FiltersResult`), (F,) each, with nan for None.

    driven_F, highest_F: the values of the channels on the found pictures, and their highest values on real ones.
    """
    gain_F = torch.where(highest_F > 0, driven_F / highest_F, torch.nan)
    # A channel that is silent has no gradient, so its picture is still the cloud that the ascent started from.
    return gain_F, torch.where(driven_F == 0, torch.nan, colourfulness(found_FCHW))


def activating_pictures(
    pooled: Callable[[Tensor], Tensor], channels_F: Tensor, *, shape: Sequence[int], config: FiltersConfig, seed: int
) -> Tensor:
    """Find pictures (F, C, H, W) in [0, 1], each of which drives one channel of `pooled`.

    Runs Adam on the pixels' logits. It starts from that of `NUM_STARTS` cloudy pictures which drives the channel most,
    because a picture that does not drive it gives no gradient. Each step shifts all pictures by some pixels; otherwise
    they would become patterns of single pixels. The result is on the device of `channels_F`.
    """
    draw = generator(seed, "activating pictures")
    clouds = torch.from_numpy(draw.standard_normal((NUM_STARTS, shape[0], 4, 4))).float()
    starts_SCHW = F.interpolate(clouds, size=tuple(shape[1:]), mode="bicubic").to(channels_F.device)
    with torch.no_grad():
        best_F = pooled(torch.sigmoid(starts_SCHW))[:, channels_F].argmax(0)
    logits_FCHW = starts_SCHW[best_F].requires_grad_()
    optimizer = torch.optim.Adam([logits_FCHW], lr=config.learning_rate)
    shifts = draw.integers(-2, 3, size=(config.num_steps, 2)).tolist()
    with Progress("features driven", total=config.num_steps) as progress, torch.enable_grad():
        for down, right in shifts:
            seen_FCHW = torch.sigmoid(logits_FCHW).roll((down, right), (2, 3))
            activation_F = pooled(seen_FCHW).gather(1, channels_F[:, None])[:, 0]
            (logits_FCHW.grad,) = torch.autograd.grad(-activation_F.sum(), logits_FCHW)
            optimizer.step()
            progress.advance()
    return torch.sigmoid(logits_FCHW).detach()


def _measure(loaded: LoadedRun, rows_N: Tensor) -> tuple[Sparsity, Tensor]:
    """Return the sparsity of the map and the pooled features (N, C) float64 of test pictures without views."""
    encoder, pooled, measured = loaded.modules.encoder, [], []
    maps: list[Tensor] = []
    hook = encoder.trunk.register_forward_hook(lambda module, args, output: maps.append(output))
    try:
        with frozen(encoder):
            for images_BCHW in torch.split(loaded.test.images(rows_N), 256):
                pooled.append(encoder.pooled(to_float(images_BCHW, loaded.device)).double())
                map_BCHW = maps.pop()
                if map_BCHW.dim() != 4:
                    raise UserError(
                        f"filters needs a convolutional encoder, but the last map of {loaded.run_dir.path} has the "
                        f"shape {tuple(map_BCHW.shape[1:])}, not (channels, height, width); pass another run"
                    )
                measured.append(sparsity_of(map_BCHW))
    finally:
        hook.remove()
    values = {name: torch.cat([one[name] for one in measured]) for name in measured[0]}
    dead_share = 1 - values.pop("fires").any(0).double().mean().item()
    means = {name: value_N.mean().item() for name, value_N in values.items()}
    return Sparsity(**means, dead_share=dead_share if math.isfinite(means["hoyer"]) else None), torch.cat(pooled)


def _picture(found_FCHW: Tensor, result: FiltersResult) -> bytes:
    """Draw the found pictures in rows of `NUM_COLUMNS`; white fills the last row."""
    num_shown = len(found_FCHW)
    num_rows = -(-num_shown // NUM_COLUMNS)
    filled = torch.ones(num_rows * NUM_COLUMNS, *found_FCHW.shape[1:])
    filled[:num_shown] = found_FCHW.cpu()
    rows = [
        GridRow(f"features\n{NUM_COLUMNS * row + 1} to {min(NUM_COLUMNS * (row + 1), num_shown)}", to_nhwc(pictures))
        for row, pictures in enumerate(torch.split(filled, NUM_COLUMNS))
    ]
    return picture_grid(rows, column_titles=[""] * NUM_COLUMNS)
