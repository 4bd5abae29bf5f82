"""Measure how fast a transform that is used repeatedly makes pictures alike (Tamkin et al. 2022, appendix B).

A transform that keeps the content of a picture could be used without end. The analysis applies each expert transform
alone, the brightness and the contrast of its jitter, a random mask that does not double what it keeps, and the whole
policy, k times to test pictures, each time with new draws. It compares the distances between the results with the
distances between the pictures themselves.

Shapes: N pictures, C channels, H height, W width.
"""

from __future__ import annotations

from typing import Annotated

import torch
from matplotlib.figure import Figure
from pydantic import Field
from torch import Tensor

from data_pipeline.core.counter_rng import DrawKeys
from data_pipeline.core.errors import UserError
from data_pipeline.core.progress import Progress
from data_pipeline.core.schema import Schema
from trainer.analyses.analysis import Analysis, LoadedRun
from trainer.observability.figures import to_png
from trainer.probes.features import ViewFunction
from trainer.views.colour import NUM_COLOURS
from trainer.views.expert_image import ExpertImage, ExpertImageConfig
from trainer.views.inputs import to_floating
from trainer.views.random_mask import RandomMask, RandomMaskConfig

# The setting that switches each transform on.
SWITCHES = {
    "crop": "area",
    "flip": "flip_probability",
    "jitter": "jitter_probability",
    "brightness": "jitter_probability",
    "contrast": "jitter_probability",
    "grayscale": "grayscale_probability",
    "blur": "blur_probability",
}
_STRENGTHS = ("brightness", "contrast", "saturation", "hue")  # of the jitter
_OFF = {switch: None if switch == "area" else 0.0 for switch in SWITCHES.values()}


class CollisionConfig(Schema):
    """The settings of the analysis of collisions."""

    num_pictures: Annotated[int, Field(ge=2, le=10**6)] = Field(256, description="The test pictures that are compared.")
    max_uses: Annotated[int, Field(ge=1, le=10**6)] = Field(
        64, description="The most times that a transform is applied, a power of two."
    )
    near: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.25,
        description="Two pictures collide within this multiple of the mean distance of the untransformed pictures.",
    )


class Collision(Schema):
    """One transform after each of the result's `uses`.

    relative_distance: the mean distance of two pictures over the mean before any use.
    near_share: the share of pairs that are near.
    uses_to_half: the first of `uses` at which the distance has halved; None: never.
    """

    relative_distance: tuple[float, ...]
    near_share: tuple[float, ...]
    uses_to_half: int | None


class CollisionResult(Schema):
    """analysis/collision.json. `policy` holds the transforms: the run's own expert views, or the default ones."""

    config: CollisionConfig
    seed: int
    num_pictures: int
    policy: ExpertImageConfig
    uses: tuple[int, ...]
    transforms: dict[str, Collision]
    test_manifest_sha256: str


def measure(loaded: LoadedRun, config: CollisionConfig) -> tuple[CollisionResult, bytes]:
    """Return the numbers and the figure from a run's views and test pictures, without a checkpoint.

    Raises `UserError` for sounds, and if there are not two different pictures.
    """
    test, seed = loaded.read_test(pictures_for="collision"), loaded.seed
    views = loaded.config.views
    policy = views if isinstance(views, ExpertImageConfig) else ExpertImageConfig()
    if loaded.config.encoder.in_channels != NUM_COLOURS:
        policy = policy.without_colours()
    rows_N = loaded.choose_rows(test, config.num_pictures)
    images_NCHW = to_floating(test.images(rows_N).to(loaded.device))
    if bool((images_NCHW == images_NCHW[0]).all()):  # distances are relative to that of the pictures
        raise UserError(
            f"collision compares pictures, but the test set of {loaded.run_dir.path} has no two different ones; pass a "
            "run on other data"
        )
    index_N = test.samples.index_B[rows_N].to(loaded.device)
    uses = powers_of_two(config.max_uses)
    transforms = {}
    functions: dict[str, ViewFunction] = {
        name: ExpertImage(alone(policy, name)) for name in SWITCHES if _is_on(policy, name)
    }
    functions |= {"mask": RandomMask(RandomMaskConfig(rescale=False)), "all": ExpertImage(policy)}
    with Progress("transforms used again", total=len(functions)) as progress:
        for name, function in functions.items():
            transforms[name] = collide(function, images_NCHW, index_N, uses=uses, near=config.near, seed=seed)
            progress.advance(note=name)
    result = CollisionResult(
        config=config,
        seed=seed,
        num_pictures=len(rows_N),
        policy=policy,
        uses=uses,
        transforms=transforms,
        test_manifest_sha256=test.manifest.sha256,
    )
    return result, _figure(result)


ANALYSIS = Analysis("collision", CollisionConfig, measure)


def collide(
    policy: ViewFunction, images_NCHW: Tensor, index_N: Tensor, *, uses: tuple[int, ...], near: float, seed: int
) -> Collision:
    """Apply a policy repeatedly to pictures (N, C, H, W), and compare them after each number of `uses`.

    `uses` ascends from 0. Distances are Euclidean, of all pairs of different pictures. Use k has the draws of epoch k.
    """
    start = torch.pdist(images_NCHW.flatten(1)).mean()
    relative, shares = [], []
    x_NCHW = images_NCHW
    for number in range(uses[-1] + 1):
        if number:
            x_NCHW = policy(x_NCHW, DrawKeys(seed, number, index_N, 0), None)
        if number in uses:
            distances = torch.pdist(x_NCHW.flatten(1)) / start.clamp_min(torch.finfo(start.dtype).tiny)
            relative.append(distances.mean().item())
            shares.append((distances <= near).float().mean().item())
    halved = (use for use, value in zip(uses, relative, strict=True) if value <= 0.5)
    return Collision(relative_distance=tuple(relative), near_share=tuple(shares), uses_to_half=next(halved, None))


def alone(policy: ExpertImageConfig, name: str) -> ExpertImageConfig:
    """Return a policy with one transform, in its strength and probability, and all others off."""
    switch = SWITCHES[name]
    others = {strength: 0.0 for strength in _STRENGTHS if name in _STRENGTHS and strength != name}
    return policy.model_copy(update=_OFF | {switch: getattr(policy, switch)} | others)


def powers_of_two(largest: int) -> tuple[int, ...]:
    """Return 0, 1, 2, 4, ..., below `largest`, and `largest` itself."""
    powers = [2**exponent for exponent in range(largest.bit_length()) if 2**exponent < largest]
    return (0, *powers, largest)


def _is_on(policy: ExpertImageConfig, name: str) -> bool:
    on = bool(getattr(policy, SWITCHES[name]))
    return on and (policy.jitters if name == "jitter" else name not in _STRENGTHS or getattr(policy, name) > 0)


def _figure(result: CollisionResult) -> bytes:
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    places = range(len(result.uses))
    for number, (name, collision) in enumerate(result.transforms.items()):
        style = {"color": "black" if name == "all" else f"C{number}", "marker": "o", "markersize": 3.5}
        left.plot(places, collision.relative_distance, **style)
        right.plot(places, collision.near_share, label=name, **style)
    left.set(ylabel="mean distance of two pictures, relative", ylim=(-0.03, None))
    right.set(
        ylabel=f"share of pairs nearer than\n{result.config.near:g} of the mean distance at 0", ylim=(-0.03, 1.03)
    )
    for axes in (left, right):
        axes.set_xticks(places, map(str, result.uses))
        axes.set_xlabel("times used")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    right.legend(frameon=False, fontsize=9)
    return to_png(figure)
