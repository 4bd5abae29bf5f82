"""Expert views against torchvision: each operation for given parameters, the laws of the parameters, and the whole."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter
from pydantic import ValidationError
from torch import Tensor
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms.v2 import functional as tv

from data_pipeline.core.counter_rng import DrawKeys, uniform
from data_pipeline.core.random_crop import (
    NUM_CROP_NUMBERS,
    crop_boxes,
    crop_boxes_of_squares,
    random_resized_crops,
)
from tests.trainer.views.kolmogorov import ks_p_value
from trainer.views import expert_image
from trainer.views.colour import (
    BRIGHTNESS,
    CONTRAST,
    HUE,
    LUMA,
    SATURATION,
    blend_,
    jitter_colour_,
    luma,
    shift_hue_,
)
from trainer.views.expert_draws import ExpertDraws
from trainer.views.expert_image import (
    HUANG_LETTERS,
    ExpertImage,
    ExpertImageConfig,
    apply_draws,
    draw,
    huang_views,
)
from trainer.views.few_kernels import apply_draws_in_few_kernels
from trainer.views.inputs import rows_of
from trainer.views.resampling import (
    CropDraws,
    apply_matrices,
    blur_,
    constant_blur_,
    constant_blur_matrix,
    crop_and_flip,
    gaussian_blur_matrix,
    pil_blur_matrix,
)

LUMA_TOLERANCE = 2e-4  # torchvision's tensors weigh red by 0.2989, PIL and we by 0.299
# Draws for seed 3, epoch 0, view 0 and the samples 0, 1, ...
GOLDEN_BOXES = [[0, 5, 21, 17], [3, 1, 29, 27]]
GOLDEN_FACTORS = [
    [0.7444413900, 1.1300711632, 1.1126406193, 0.0682309046],
    [1.0770692825, 0.7123368979, 1.0972925425, 0.0276626237],
]
GOLDEN_SIGMAS = [0.6579807401, 0.3608081937, 0.6144099236, 0]
COMPOSED = ["ab", "abc", "abcd", "abcde", "ad", "bcde", "ce"]


def keys(num: int, *, seed: int = 0, epoch: int = 0, view: int = 0) -> DrawKeys:
    return DrawKeys(seed=seed, epoch=epoch, index_B=torch.arange(num), view=view)


def pictures(num: int, *, size: int = 32) -> Tensor:
    """Smooth patches, hard edges, noise, flat greys and primary colours: (num, 3, size, size) in [0, 1]."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.rand(num, 3, size, size, generator=generator)
    smooth = torch.nn.functional.interpolate(noise[:, :, :5, :5], size=(size, size), mode="bicubic").clamp(0, 1)
    x = torch.where(torch.rand(num, 1, 1, 1, generator=generator) < 0.5, smooth, noise)
    corners = torch.tensor(list(itertools.product([0.0, 1.0], repeat=3)))
    x[:, :, :2, :4] = corners.T.view(3, 2, 4)  # black, white and the pure hues, where HSV has its edges
    x[:, :, 2:4] = 0.5
    return x


def box(crop: CropDraws, i: int) -> list[int]:
    """Sample i's top, left, height and width, as torchvision takes them."""
    return [int(side[i]) for side in (crop.top_B, crop.left_B, crop.height_B, crop.width_B)]


@pytest.mark.parametrize("antialias", [False, True])
def test_crop_and_flip_equal_torchvision(antialias: bool) -> None:
    """Antialiasing changes nothing, because a crop is never larger than the picture that it is resized to."""
    draws = draw(ExpertImageConfig(area=(0.01, 1.0)), keys(200), size=32)
    crop, flip_B = draws.crop, draws.flip_B
    assert crop is not None
    assert flip_B is not None
    x = pictures(200)
    ours = crop_and_flip(x, crop, flip_B)
    for i in range(len(x)):
        expected = tv.resized_crop(
            x[i], *box(crop, i), size=[32, 32], interpolation=InterpolationMode.BILINEAR, antialias=antialias
        )
        expected = tv.horizontal_flip(expected) if flip_B[i] else expected
        torch.testing.assert_close(ours[i], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("operation", "theirs"),
    [(BRIGHTNESS, tv.adjust_brightness), (CONTRAST, tv.adjust_contrast), (SATURATION, tv.adjust_saturation)],
)
def test_blends_equal_torchvision(operation: int, theirs: object) -> None:
    assert callable(theirs)
    x, factor = pictures(50), torch.linspace(0, 2, 50)
    ours = blend_(x.clone(), torch.full((50,), operation), factor)
    for i in range(50):
        torch.testing.assert_close(ours[i], theirs(x[i], float(factor[i])), atol=LUMA_TOLERANCE, rtol=0)


def test_hue_equals_torchvision() -> None:
    x, turns = pictures(101), torch.linspace(-0.5, 0.5, 101)
    ours = shift_hue_(x.clone(), turns)
    for i in range(101):
        torch.testing.assert_close(ours[i], tv.adjust_hue(x[i], float(turns[i])), atol=5e-6, rtol=0)


@pytest.mark.parametrize("sigma", [0.1, 0.3, 0.5, 1.0, 1.5, 2.0])
def test_blur_equals_torchvision_on_repeated_edges(sigma: float) -> None:
    x = pictures(6)
    matrix = gaussian_blur_matrix(torch.full((6,), sigma), size=32)
    expected = tv.gaussian_blur(tv.pad(x, [30], padding_mode="edge"), kernel_size=[31, 31], sigma=[sigma, sigma])
    torch.testing.assert_close(apply_matrices(x, matrix, matrix), expected[..., 30:-30, 30:-30], atol=2e-6, rtol=0)


def on_pil(x: Tensor, change: Callable[[Image.Image], Image.Image]) -> Tensor:
    """A (3, H, W) picture in [0, 1] changed as a PIL picture of 256 levels."""
    changed: Tensor = tv.pil_to_tensor(change(tv.to_pil_image((x * 255).round().byte())))
    return changed / 255


def boxes_of_pil(x: Tensor, *, sigma: float = 1.0, rounded: bool = False) -> Tensor:
    """The three box filters by which PIL blurs with that radius, along rows, then columns, on repeated edges.

    A box has the variance sigma^2 / 3: all pixels up to a distance count fully, the next ones in part. `rounded`: to
    256 levels after each filter, halves to the lower, as PIL does.
    """
    variance, whole = sigma**2 / 3, 0
    while (whole + 1) * (whole + 2) / 3 <= variance:  # the variance of a box of whole pixels
        whole += 1
    # Such a box, and the weight w of the two pixels next to it, have that variance together.
    inner = sum(d * d for d in range(-whole, whole + 1))
    part = (variance * (2 * whole + 1) - inner) / (2 * (whole + 1) ** 2 - 2 * variance)
    weights = {d: 1.0 if abs(d) <= whole else part for d in range(-whole - 1, whole + 2)}
    total = sum(weights.values())
    for axis in (2, 2, 2, 1, 1, 1):
        pixel = torch.arange(x.shape[axis])
        x = sum(
            (w / total * x.index_select(axis, (pixel + d).clamp(0, len(pixel) - 1)) for d, w in weights.items()),
            start=torch.zeros_like(x),
        )
        if rounded:
            x = torch.ceil(x * 255 - 0.5 - 1e-4) / 255
    return x


@pytest.mark.parametrize("size", [32, 7, 2])
@pytest.mark.parametrize("sigma", [0.1, 0.52, 1.0, 1.41, 1.42, 3.97])
def test_pil_blur_is_that_of_pil(size: int, sigma: float) -> None:
    """Ours are PIL's filters without the rounding, and with it they are PIL's: one level aside, in a pixel of 50.

    At a sigma of 0.5 or 2 the weights are such that many sums lie half-way between two levels.
    """
    x = (pictures(12)[..., :size, :size] * 255).round() / 255
    matrix = pil_blur_matrix(torch.full((12,), sigma), size=size)
    ours = apply_matrices(x, matrix, matrix)
    assert torch.equal(blur_(x.clone(), torch.full((12,), sigma), pil_blur_matrix), ours)
    for picture, view in zip(x, ours, strict=True):
        torch.testing.assert_close(view, boxes_of_pil(picture.double(), sigma=sigma).float(), atol=2e-6, rtol=0)
    blur = ImageFilter.GaussianBlur(radius=sigma)
    pil = torch.stack([on_pil(picture, lambda image: image.filter(blur)) for picture in x])
    with_rounding = torch.stack([boxes_of_pil(picture.double(), sigma=sigma, rounded=True) for picture in x])
    levels = ((pil - with_rounding) * 255).abs().round()
    assert levels.max() <= 1
    assert levels.mean() < 0.02
    assert (ours - pil).abs().mean() < 1 / 255


@pytest.mark.parametrize(
    ("sigma", "of_pil", "of_gaussian"), [(0.3, 0.3, 0.088), (0.5, 0.5, 0.4637), (1.0, 1.0, 1.0), (2.0, 2.0, 2.0)]
)
def test_pil_blurs_as_far_as_asked_where_a_sampled_gaussian_does_not(
    sigma: float, of_pil: float, of_gaussian: float
) -> None:
    """The standard deviation of the weights of the middle pixel."""
    distance = torch.arange(65) - 32
    for matrix_of, expected in ((pil_blur_matrix, of_pil), (gaussian_blur_matrix, of_gaussian)):
        weight = matrix_of(torch.tensor([sigma], dtype=torch.float64), size=65)[0, 32]
        assert float(weight.sum()) == pytest.approx(1)
        assert float((weight * distance**2).sum().sqrt()) == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("size", [32, 7, 2])
def test_constant_blur_is_that_of_pil(size: int) -> None:
    """Ours are PIL's filters without the rounding, and with it they are PIL's: one level aside, in one pixel of 100."""
    x = (pictures(40)[..., :size, :size] * 255).round() / 255
    matrix = constant_blur_matrix(size=size).expand(40, -1, -1)
    ours = apply_matrices(x, matrix, matrix)
    torch.testing.assert_close(constant_blur_(x.clone(), torch.ones(40, dtype=torch.bool)), ours, atol=1e-6, rtol=0)
    for picture, view in zip(x, ours, strict=True):
        torch.testing.assert_close(view, boxes_of_pil(picture.double()).float(), atol=1e-6, rtol=0)
    pil = torch.stack(
        [on_pil(picture, lambda image: image.filter(ImageFilter.GaussianBlur(radius=1))) for picture in x]
    )
    with_rounding = torch.stack([boxes_of_pil(picture.double(), rounded=True) for picture in x])
    levels = ((pil - with_rounding) * 255).abs().round()
    assert levels.max() <= 1
    assert levels.mean() < 0.01
    assert (ours - pil).abs().mean() < 1 / 255


def test_no_blur_leaves_exactly_the_picture() -> None:
    x, some = pictures(8), torch.arange(8) % 2 == 0
    for blurred in (
        constant_blur_(x.clone(), some),
        *(blur_(x.clone(), 2.0 * some, matrix_of) for matrix_of in (pil_blur_matrix, gaussian_blur_matrix)),
    ):
        assert torch.equal(blurred[~some], x[~some])
        assert ((blurred - x)[some].abs().amax(dim=(1, 2, 3)) > 0.1).all()


def one_by_one(x: Tensor, draws: ExpertDraws, i: int, *, flip_last: bool) -> Tensor:
    """Sample i's view by torchvision's functions in the source's own order: crop, jitter, grayscale, blur, flip, or
    crop, flip, jitter, grayscale, blur.
    """
    flips = draws.flip_B is not None and bool(draws.flip_B[i])
    if draws.crop is not None:
        x = tv.resized_crop(x, *box(draws.crop, i), size=list(x.shape[1:]), antialias=True)
    if flips and not flip_last:
        x = tv.horizontal_flip(x)
    adjust = {
        BRIGHTNESS: tv.adjust_brightness,
        CONTRAST: tv.adjust_contrast,
        SATURATION: tv.adjust_saturation,
        HUE: tv.adjust_hue,
    }
    if draws.jitter is not None:
        for operation in draws.jitter.order_B4[i].tolist():
            x = adjust[operation](x, float(draws.jitter.factor_B4[i, operation]))
    if draws.gray_B is not None and draws.gray_B[i]:
        x = tv.rgb_to_grayscale(x, num_output_channels=3)
    if draws.pil_sigma_B is not None and draws.pil_sigma_B[i] > 0:
        x = boxes_of_pil(x, sigma=float(draws.pil_sigma_B[i]))
    if draws.sigma_B is not None and draws.sigma_B[i] > 0:
        wide, side = tv.pad(x, [30], padding_mode="edge"), 31 if draws.reach is None else 2 * draws.reach + 1
        x = tv.gaussian_blur(wide, kernel_size=[side] * 2, sigma=[float(draws.sigma_B[i])] * 2)[..., 30:-30, 30:-30]
    if draws.constant_blur_B is not None and draws.constant_blur_B[i]:
        x = boxes_of_pil(x)
    return tv.horizontal_flip(x) if flips and flip_last else x


GAUSSIAN, SIMCLR = ExpertImageConfig(blur="gaussian"), ExpertImageConfig(blur="simclr")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "size", "num"),
    [
        (ExpertImageConfig(), 32, 150),
        (GAUSSIAN, 48, 60),
        (SIMCLR, 64, 40),
        (SIMCLR, 96, 30),
        (ExpertImageConfig(), 224, 12),
    ],
)
def test_whole_views_equal_torchvision_one_by_one(config: ExpertImageConfig, size: int, num: int) -> None:
    x, draws = pictures(num, size=size), draw(config, keys(num), size=size)
    views = ExpertImage(config)(x, keys(num))
    assert torch.equal(views, apply_draws(x, draws))
    for i in range(num):
        torch.testing.assert_close(views[i], one_by_one(x[i], draws, i, flip_last=True), atol=5e-4, rtol=0)


@pytest.mark.parametrize(
    "config",
    [
        *(ExpertImageConfig(), GAUSSIAN, SIMCLR),
        ExpertImageConfig(brightness=1, contrast=1, saturation=1, hue=0.5, jitter_probability=1, blur_sigma=(0.1, 9)),
        *(huang_views(letters, strength=1.0) for letters in ["c", "e", "ab", "abcde"]),
    ],
)
@pytest.mark.parametrize(("height", "width", "num"), [(32, 32, 200), (96, 96, 24), (64, 32, 60)])
def test_views_in_few_kernels_are_those_of_a_cpu(config: ExpertImageConfig, height: int, width: int, num: int) -> None:
    """Far below 1 / 255, the step between two shades: only the order of the additions differs."""
    x = pictures(num, size=height)[..., :width]
    draws = draw(config, keys(num), size=(height, width))
    constants = {"luma_C": torch.tensor(LUMA), "identity_CC": torch.eye(3)}
    views = apply_draws_in_few_kernels(x, draws, **constants)
    torch.testing.assert_close(views, apply_draws(x, draws), atol=1e-4, rtol=0)
    assert views.data_ptr() != x.data_ptr()
    assert views.is_contiguous()
    assert torch.equal(apply_draws_in_few_kernels(x.to(memory_format=torch.channels_last), draws, **constants), views)


@pytest.mark.parametrize("ratio", [(3 / 4, 4 / 3), (1.5, 2.0)])
@pytest.mark.parametrize("size", [7, 224])
def test_boxes_in_squares_are_the_boxes_in_any_pictures(size: int, ratio: tuple[float, float]) -> None:
    numbers_BN = uniform(keys(2_000), NUM_CROP_NUMBERS, purpose=0)
    sizes_B2 = torch.full((2_000, 2), size)
    for scale in ((0.08, 1.0), (0.95, 1.0)):
        expected = crop_boxes(numbers_BN, sizes_B2, scale=scale, ratio=ratio)
        assert torch.equal(crop_boxes_of_squares(numbers_BN, size, scale=scale, ratio=ratio), expected)


@pytest.mark.parametrize("config", [ExpertImageConfig(), huang_views("abcde")])
def test_both_views_at_once_are_each_of_them(config: ExpertImageConfig) -> None:
    policy, x = ExpertImage(config), pictures(12)
    both = policy(torch.cat([x, x]), keys(12, view=4).two_views())
    assert torch.equal(both, torch.cat([policy(x, keys(12, view=view)) for view in (4, 5)]))


@pytest.mark.parametrize(("size", "reach"), [(32, 1), (64, 3), (96, 4), (224, 11)])
def test_the_blur_of_simclr_reaches_a_tenth_of_the_picture(size: int, reach: int) -> None:
    draws = draw(SIMCLR, keys(50), size=size)
    assert draws.sigma_B is not None
    assert draws.reach == reach
    matrix = gaussian_blur_matrix(torch.full((1,), 2.0), size=size, reach=reach)[0]
    distance = (torch.arange(size)[:, None] - torch.arange(size)).abs()
    assert torch.equal(matrix > 0, distance <= reach)
    torch.testing.assert_close(matrix.sum(dim=1), torch.ones(size))
    same = draw(GAUSSIAN, keys(50), size=size).sigma_B
    assert same is not None
    assert torch.equal(draws.sigma_B, same)


@pytest.mark.parametrize("config", [ExpertImageConfig(), SIMCLR, huang_views("abcde"), huang_views("ab")])
@pytest.mark.parametrize(("size", "num"), [(32, 120), (96, 12), (224, 4)])
def test_pictures_that_are_changed_a_few_at_a_time_are_those_of_the_whole_batch(
    config: ExpertImageConfig, size: int, num: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU also leaves out what changes none of the few; neither changes a bit."""
    monkeypatch.setattr(expert_image, "_VALUES_ON_CPU", 3 * size**2 * 3)
    x = pictures(num, size=size)
    draws = draw(config, keys(num), size=size)
    assert torch.equal(ExpertImage(config)(x, keys(num)), apply_draws(x, draws))
    alone = torch.cat([apply_draws(x[i : i + 1], rows_of(draws, slice(i, i + 1))) for i in range(num)])
    assert torch.equal(alone, apply_draws(x, draws))


@pytest.mark.slow
@pytest.mark.parametrize("letters", [*HUANG_LETTERS, *COMPOSED])
def test_views_of_huang_equal_torchvision_one_by_one(letters: str) -> None:
    config, x = huang_views(letters, strength=1.0), pictures(60)
    views, draws = ExpertImage(config)(x, keys(60)), draw(config, keys(60), size=32)
    for i in range(60):
        torch.testing.assert_close(views[i], one_by_one(x[i], draws, i, flip_last=False), atol=1e-3, rtol=0)
    assert (views != x).flatten(1).any(dim=1).double().mean() > 0.1


@pytest.mark.parametrize(
    ("config", "matrix_of"), [(ExpertImageConfig(), pil_blur_matrix), (GAUSSIAN, gaussian_blur_matrix)]
)
def test_views_are_bit_for_bit_the_operations_one_after_the_other(
    config: ExpertImageConfig, matrix_of: Callable[..., Tensor]
) -> None:
    """Recorded draws are part of it, so that recorded runs stay what they are."""
    x, draws = pictures(64), draw(config, keys(64, seed=3), size=32)
    crop, jitter, gray_B = draws.crop, draws.jitter, draws.gray_B
    sigma_B = draws.pil_sigma_B if config.blur == "pil" else draws.sigma_B
    assert crop is not None
    assert jitter is not None
    assert sigma_B is not None
    assert gray_B is not None
    expected = jitter_colour_(crop_and_flip(x, crop, draws.flip_B), jitter.factor_B4, jitter.order_B4)
    expected.lerp_(luma(expected), gray_B.float()[:, None, None, None])
    blur = matrix_of(sigma_B, size=32)
    assert torch.equal(ExpertImage(config)(x, keys(64, seed=3)), apply_matrices(expected, blur, blur))

    assert torch.stack(dataclasses.astuple(crop), dim=1)[:2].tolist() == GOLDEN_BOXES
    torch.testing.assert_close(jitter.factor_B4[:2], torch.tensor(GOLDEN_FACTORS))
    torch.testing.assert_close(sigma_B[:4], torch.tensor(GOLDEN_SIGMAS))


@pytest.mark.parametrize("letters", [*HUANG_LETTERS, "abcd"])
def test_a_switched_off_operation_changes_no_draw_of_the_others(letters: str) -> None:
    whole, part = (draw(huang_views(which), keys(50), size=32) for which in (HUANG_LETTERS, letters))
    fields = {"a": "crop", "b": "constant_blur_B", "c": "gray_B", "d": "jitter", "e": "flip_B"}
    for letter, field in fields.items():
        ours, expected = getattr(part, field), getattr(whole, field)
        if letter not in letters:
            assert ours is None
        elif isinstance(ours, Tensor):
            assert torch.equal(ours, expected)
        else:
            for a, b in zip(dataclasses.astuple(ours), dataclasses.astuple(expected), strict=True):
                assert torch.equal(a, b)


def test_every_order_of_the_jitter_is_drawn_equally_often() -> None:
    jitter = draw(ExpertImageConfig(), keys(24_000), size=32).jitter
    assert jitter is not None
    counts = Counter(map(tuple, jitter.order_B4.tolist()))
    assert len(counts) == 24
    chi_square = sum((count - 1000) ** 2 / 1000 for count in counts.values())
    assert chi_square < 49.7  # 23 degrees of freedom, p = 0.001


@pytest.mark.parametrize("area", [(0.2, 1.0), (0.08, 1.0), (0.9, 1.0)])
def test_crop_boxes_have_torchvisions_law(area: tuple[float, float]) -> None:
    """With an area of at least 0.9 most attempts fail, so this tests the repeated attempts as well."""
    torch.manual_seed(0)
    transform = v2.RandomResizedCrop(32, scale=area)
    theirs = [transform.make_params([torch.empty(3, 32, 32)]) for _ in range(5000)]
    crop = draw(ExpertImageConfig(area=area), keys(5000), size=32).crop
    assert crop is not None
    for name, ours in {
        "height": crop.height_B,
        "width": crop.width_B,
        "top": crop.top_B,
        "left": crop.left_B,
    }.items():
        assert ks_p_value(ours.numpy(), [box[name] for box in theirs]) > 1e-3, name
    slack = torch.tensor([32 - box["height"] - box["top"] for box in theirs])
    assert ks_p_value((32 - crop.height_B - crop.top_B).numpy(), slack.numpy()) > 1e-3
    ratio = np.array([box["width"] / box["height"] for box in theirs])
    assert ks_p_value((crop.width_B.double() / crop.height_B).numpy(), ratio) > 1e-3


def test_a_decoder_draws_the_boxes_of_the_views() -> None:
    crop = draw(ExpertImageConfig(), keys(500), size=96).crop
    assert crop is not None
    boxes_B4 = random_resized_crops(torch.full((500, 2), 96), keys(500), scale=(0.2, 1.0), purpose=0)
    assert torch.equal(torch.stack(dataclasses.astuple(crop), dim=1), boxes_B4.float())


@pytest.mark.parametrize(
    ("config", "theirs"),
    [
        (ExpertImageConfig(jitter_probability=1.0), v2.ColorJitter(0.4, 0.4, 0.4, 0.1)),
        *(
            (huang_views("ad", strength=s, jitter_probability=1.0), v2.ColorJitter(0.8 * s, 0.8 * s, 0.8 * s, 0.2 * s))
            for s in (1.25, 1, 1 / 2, 1 / 4, 1 / 8)
        ),
    ],
)
def test_jitter_factors_have_torchvisions_law(config: ExpertImageConfig, theirs: v2.ColorJitter) -> None:
    torch.manual_seed(0)
    params = [theirs.make_params([]) for _ in range(5000)]
    jitter = draw(config, keys(5000), size=32).jitter
    assert jitter is not None
    for operation, name in enumerate(["brightness", "contrast", "saturation", "hue"]):
        factor = [drawn[f"{name}_factor"] for drawn in params]
        assert ks_p_value(jitter.factor_B4[:, operation].numpy(), factor) > 1e-3, name
    correlation = np.corrcoef(jitter.factor_B4.numpy().T) - np.eye(4)
    assert np.abs(correlation).max() < 4 / 5000**0.5


@pytest.mark.parametrize("config", [ExpertImageConfig(), huang_views("abcde")])
def test_operations_happen_as_often_as_configured(config: ExpertImageConfig) -> None:
    num = 20_000
    draws = draw(config, keys(num), size=32)
    blurred_B = draws.constant_blur_B if draws.pil_sigma_B is None else draws.pil_sigma_B > 0
    assert draws.jitter is not None
    assert draws.gray_B is not None
    assert draws.flip_B is not None
    assert blurred_B is not None
    happened = torch.stack([draws.jitter.factor_B4[:, HUE] != 0, draws.gray_B, blurred_B, draws.flip_B], dim=1).double()
    for share, expected in zip(happened.mean(dim=0).tolist(), [0.8, 0.2, 0.5, 0.5], strict=True):
        assert abs(share - expected) < 4 * (expected * (1 - expected) / num) ** 0.5
    assert np.abs(np.corrcoef(happened.numpy().T) - np.eye(4)).max() < 4 / num**0.5


def test_the_blurs_sigma_is_uniform() -> None:
    sigma_B = draw(ExpertImageConfig(), keys(20_000), size=32).pil_sigma_B
    assert sigma_B is not None
    assert ks_p_value(((sigma_B[sigma_B > 0] - 0.1) / 1.9).numpy()) > 1e-3


TAMKIN = v2.Compose(
    [
        v2.RandomResizedCrop(32, scale=(0.2, 1.0)),
        v2.RandomApply([v2.ColorJitter(0.4, 0.4, 0.4, 0.1)], p=0.8),
        v2.RandomGrayscale(0.2),
        v2.RandomApply([v2.GaussianBlur(kernel_size=17, sigma=(0.1, 2.0))], p=0.5),
        v2.RandomHorizontalFlip(),
    ]
)
HUANG = v2.Compose(
    [
        v2.RandomResizedCrop(32, scale=(0.08, 1.0)),
        v2.RandomHorizontalFlip(),
        v2.RandomApply([v2.ColorJitter(0.4, 0.4, 0.4, 0.1)], p=0.8),
        v2.RandomGrayscale(0.2),
        v2.RandomApply([v2.Lambda(boxes_of_pil)], p=0.5),
    ]
)


@pytest.mark.slow
@pytest.mark.parametrize(("config", "pipeline"), [(ExpertImageConfig(), TAMKIN), (huang_views("abcde"), HUANG)])
def test_the_whole_policy_has_torchvisions_law(config: ExpertImageConfig, pipeline: v2.Compose) -> None:
    """Views of one picture: mean, contrast and colourfulness are distributed as under torchvision's own pipeline."""
    torch.manual_seed(0)
    num, picture = 1000, pictures(2)[1]
    theirs = torch.stack([pipeline(picture) for _ in range(num)])
    ours = ExpertImage(config)(picture.expand(num, -1, -1, -1), keys(num))
    statistics: dict[str, Callable[[Tensor], Tensor]] = {
        "mean": lambda x: x.mean(dim=(1, 2, 3)),
        "contrast": lambda x: luma(x).std(dim=(1, 2, 3)),
        "colourfulness": lambda x: x.std(dim=1).mean(dim=(1, 2)),
        "sharpness": lambda x: x.diff(dim=3).abs().mean(dim=(1, 2, 3)),
        "leaning": lambda x: (x[..., 16:] - x[..., :16]).mean(dim=(1, 2, 3)),
    }
    for name, statistic in statistics.items():
        assert ks_p_value(statistic(ours).numpy(), statistic(theirs).numpy()) > 1e-3, name


@pytest.mark.parametrize("config", [ExpertImageConfig(), huang_views("b")])
def test_masks_and_memory_layout_change_nothing(config: ExpertImageConfig) -> None:
    policy, x = ExpertImage(config), pictures(16)
    views = policy(x, keys(16))
    assert torch.equal(policy(x, keys(16), torch.ones(16, 32, 32, dtype=torch.bool)), views)
    assert torch.equal(policy(x.to(memory_format=torch.channels_last), keys(16)), views)
    assert views.is_contiguous()


@pytest.mark.parametrize("config", [ExpertImageConfig(), huang_views("b"), huang_views("abc"), huang_views("abcde")])
def test_a_view_does_not_depend_on_its_batch(config: ExpertImageConfig) -> None:
    policy, x, all_keys = ExpertImage(config), pictures(8), keys(8)
    whole = policy(x, all_keys)
    for part in (slice(0, 4), slice(4, 8), slice(3, 4)):
        assert torch.equal(whole[part], policy(x[part], dataclasses.replace(all_keys, index_B=all_keys.index_B[part])))


@pytest.mark.parametrize("policy", [ExpertImageConfig(), GAUSSIAN, huang_views("b")])
@pytest.mark.parametrize("probability", [0.01, 0.5, 1.0])
def test_pictures_without_blur_are_left_out(policy: ExpertImageConfig, probability: float) -> None:
    """The same bits as with the identity for a blur, down to a batch of which no picture is blurred."""
    config = policy.model_copy(update={"blur_probability": probability})
    x, draws = pictures(16), draw(config, keys(16), size=32)
    if draws.pil_sigma_B is not None:
        matrix = pil_blur_matrix(draws.pil_sigma_B, size=32)
    elif draws.sigma_B is not None:
        matrix = gaussian_blur_matrix(draws.sigma_B, size=32)
    else:
        assert draws.constant_blur_B is not None
        matrix = torch.where(draws.constant_blur_B[:, None, None], constant_blur_matrix(size=32), torch.eye(32))
    before = apply_draws(x, dataclasses.replace(draws, pil_sigma_B=None, sigma_B=None, constant_blur_B=None))
    assert torch.equal(apply_draws(x, draws), apply_matrices(before, matrix, matrix))


def test_views_repeat_exactly_and_differ_between_keys() -> None:
    policy, x = ExpertImage(ExpertImageConfig()), pictures(16)
    views = policy(x, keys(16))
    torch.manual_seed(1)
    assert torch.equal(views, policy(x, keys(16)))
    for other in (keys(16, view=1), keys(16, epoch=1), keys(16, seed=1)):
        assert ((policy(x, other) - views).abs().amax(dim=(1, 2, 3)) > 0.01).all()


def test_views_stay_in_range_and_the_pictures_as_they_were() -> None:
    x = pictures(64)
    before = x.clone()
    strongest = ExpertImageConfig(brightness=1, contrast=1, saturation=1, hue=0.5)
    for config in (strongest, *(huang_views(letters) for letters in [*HUANG_LETTERS, *COMPOSED])):
        views = ExpertImage(config)(x, keys(64))
        assert torch.equal(x, before)
        assert views.dtype == torch.float32
        assert views.min() >= 0
        assert views.max() <= 1 + 1e-6


def test_everything_switched_off_is_a_copy_of_the_picture() -> None:
    config = huang_views("d", jitter_probability=0)
    x = pictures(8)
    views = ExpertImage(config)(x, keys(8))
    assert torch.equal(views, x)
    assert views.data_ptr() != x.data_ptr()
    without_strength = config.model_copy(
        update={"jitter_probability": 1.0, "brightness": 0.0, "contrast": 0.0, "saturation": 0.0, "hue": 0.0}
    )
    assert torch.equal(ExpertImage(without_strength)(x, keys(8)), x)


@pytest.mark.parametrize("config", [ExpertImageConfig(), huang_views("abcde")])
def test_views_are_made_without_waiting_for_the_device(config: ExpertImageConfig) -> None:
    """On the meta device there are shapes and no values: whatever would need a value on the host raises."""
    index = torch.arange(8, device="meta")
    views = ExpertImage(config)(
        torch.empty(8, 3, 32, 32, device="meta"), DrawKeys(seed=0, epoch=0, index_B=index, view=0)
    )
    assert views.shape == (8, 3, 32, 32)


def test_other_pictures_are_refused() -> None:
    for colours in (ExpertImageConfig(), huang_views("c"), huang_views("d")):
        with pytest.raises(ValueError, match=r"need pictures of 3 channels, got 1; set views.jitter_probability=0 and"):
            ExpertImage(colours)(torch.rand(2, 1, 32, 32), keys(2))


def test_a_crop_of_a_picture_that_is_not_square_is_that_of_torchvision() -> None:
    config = huang_views("a")
    x, crop = torch.rand(80, 3, 64, 32), draw(config, keys(80), size=(64, 32)).crop
    assert crop is not None
    views = ExpertImage(config)(x, keys(80))
    box_B4 = torch.stack([crop.top_B, crop.left_B, crop.height_B, crop.width_B], dim=1).int()
    for picture, view, box in zip(x, views, box_B4.tolist(), strict=True):
        expected = tv.resized_crop(picture, *box, size=[64, 32], antialias=True)
        torch.testing.assert_close(view, expected, atol=1e-5, rtol=0)


def test_the_aspect_of_a_crop_is_relative_to_the_picture() -> None:
    crop = draw(ExpertImageConfig(area=(0.2, 1.0)), keys(4_000), size=(640, 320)).crop
    assert crop is not None
    share_B, aspect_B = crop.height_B * crop.width_B / (640 * 320), 2 * crop.width_B / crop.height_B
    assert 0.19 < float(share_B.min()) < 0.22
    assert 0.95 < float(share_B.max()) <= 1
    assert 0.73 < float(aspect_B.min()) < 0.77
    assert 1.3 < float(aspect_B.max()) < 1.36
    assert abs(float(aspect_B.log().mean())) < 0.02
    square = draw(ExpertImageConfig(area=(0.2, 1.0)), keys(4_000), size=640).crop
    assert square is not None
    # The same law in relative units; float32 may round a side, or the test whether a box fits, the other way.
    assert float(((square.height_B - crop.height_B).abs() <= 1).double().mean()) > 0.99
    whole = draw(ExpertImageConfig(area=(1.0, 1.0), aspect=(1.0, 1.0)), keys(9), size=(64, 32)).crop
    assert whole is not None
    assert (whole.height_B == 64).all()
    assert (whole.width_B == 32).all()


@pytest.mark.parametrize("config", [GAUSSIAN, SIMCLR, huang_views("b"), ExpertImageConfig()])
def test_a_blur_treats_rows_as_columns(config: ExpertImageConfig) -> None:
    blur_only = config.model_copy(
        update={"area": None, "flip_probability": 0.0, "jitter_probability": 0.0, "grayscale_probability": 0.0}
    )
    x = torch.rand(40, 3, 48, 24)
    views, turned = (ExpertImage(blur_only)(each.contiguous(), keys(40)) for each in (x, x.mT))
    torch.testing.assert_close(turned.mT, views, atol=1e-5, rtol=0)
    assert not torch.equal(views, x)


@pytest.mark.parametrize(
    "config", [ExpertImageConfig().without_colours(), huang_views("abe"), SIMCLR.without_colours()]
)
@pytest.mark.parametrize("num_channels", [1, 11])
@pytest.mark.parametrize("gradient", [False, True])
def test_each_of_any_number_of_channels_is_changed_as_in_a_picture_of_three(
    config: ExpertImageConfig, num_channels: int, gradient: bool
) -> None:
    policy, all_keys = ExpertImage(config), keys(40)
    x = pictures(40).repeat(1, 4, 1, 1)[:, :num_channels]
    views = policy(x.requires_grad_(gradient), all_keys)
    for channel in range(num_channels):
        expected = policy(x.detach()[:, channel : channel + 1].expand(-1, 3, -1, -1), all_keys)
        assert torch.equal(views[:, channel], expected[:, 0])
    draws = draw(config, all_keys, size=32)
    on_gpus = apply_draws_in_few_kernels(x.detach(), draws, luma_C=torch.tensor(LUMA), identity_CC=torch.eye(3))
    torch.testing.assert_close(on_gpus, views.detach(), atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"area": (0.5, 0.2)},
        {"area": (0.5, 1.5)},
        {"area": None, "aspect": (2, 1)},
        {"blur_sigma": (0, 1)},
        {"blur": "box"},
        {"hue": 0.6},
    ],
)
def test_config_refuses_what_makes_no_sense(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        ExpertImageConfig.model_validate(wrong)


@pytest.mark.parametrize("letters", ["", "abz", "aab"])
def test_other_letters_are_refused(letters: str) -> None:
    with pytest.raises(ValueError, match='letters of "abcde", each once'):
        huang_views(letters)
    with pytest.raises(ValueError, match="at most 1"):
        huang_views("d", strength=1.3)
