"""Expert views against torchvision: each operation for given parameters, the laws of the parameters, and the whole."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter
from torch import Tensor
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms.v2 import functional as tv

from data_pipeline.core.random_crop import (
    CropLaw,
    random_resized_crops,
)
from tests.data_pipeline.building.draws import keys_of as keys
from tests.trainer.views.kolmogorov import ks_p_value
from trainer.views import colour, expert_image
from trainer.views.colour import BRIGHTNESS, CONTRAST, HUE, SATURATION, blend_, shift_hue_
from trainer.views.expert_image import (
    HUANG_LETTERS,
    ExpertDraws,
    ExpertImage,
    ExpertImageConfig,
    draw,
    huang_views,
)
from trainer.views.inputs import rows_of
from trainer.views.resampling import apply_matrices, blur, blur_, crop_and_flip, gaussian_blur_matrix, pil_blur_matrix

LUMA_TOLERANCE = 2e-4  # torchvision's tensors weigh red by 0.2989, PIL and we by 0.299
GAUSSIAN, SIMCLR = ExpertImageConfig(blur="gaussian"), ExpertImageConfig(blur="simclr")


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


@pytest.mark.parametrize(("width", "antialias"), [(32, False), (20, True)])
def test_crop_and_flip_equal_torchvision(width: int, antialias: bool) -> None:
    """Antialiasing changes nothing, because a crop is never larger than the picture that it is resized to."""
    draws = draw(ExpertImageConfig(area=(0.01, 1.0)), keys(80), size=(32, width))
    box_B4, flip_B = draws.box_B4, draws.flip_B
    assert box_B4 is not None
    assert flip_B is not None
    x = pictures(80)[..., :width]
    ours = crop_and_flip(x, box_B4, flip_B)
    for i, box in enumerate(box_B4.int().tolist()):
        expected = tv.resized_crop(
            x[i], *box, size=[32, width], interpolation=InterpolationMode.BILINEAR, antialias=antialias
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


def test_pil_cuts_a_blend_down_to_a_whole_level() -> None:
    """So the published views are darker, by half a level for each blend; ours keep the fraction."""
    levels = (pictures(1) * 255).floor()
    ours = blend_(levels / 255, torch.tensor([BRIGHTNESS]), torch.tensor([0.7]))[0] * 255
    theirs = tv.adjust_brightness(tv.to_pil_image(levels[0].byte()), 0.7)
    assert torch.equal(tv.pil_to_tensor(theirs).float(), (ours + 1e-3).floor())


def test_hue_equals_torchvision() -> None:
    x, turns = pictures(101), torch.linspace(-0.5, 0.5, 101)
    ours = shift_hue_(x.clone(), turns)
    for i in range(101):
        torch.testing.assert_close(ours[i], tv.adjust_hue(x[i], float(turns[i])), atol=5e-6, rtol=0)


@pytest.mark.parametrize("sigma", [0.1, 0.5, 2.0])
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


@pytest.mark.parametrize(
    ("sigma", "size"), [(0.1, 32), (0.52, 32), (1.0, 7), (1.41, 32), (1.42, 32), (3.97, 32), (3.97, 2)]
)
def test_pil_blur_is_that_of_pil(sigma: float, size: int) -> None:
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


def one_by_one(x: Tensor, draws: ExpertDraws, i: int, *, blur: str) -> Tensor:
    """Sample i's view by torchvision's functions in the order of the published code: the flip is last."""
    if draws.box_B4 is not None:
        x = tv.resized_crop(x, *draws.box_B4[i].int().tolist(), size=list(x.shape[1:]), antialias=True)
    adjust = {
        BRIGHTNESS: tv.adjust_brightness,
        CONTRAST: tv.adjust_contrast,
        SATURATION: tv.adjust_saturation,
        HUE: tv.adjust_hue,
    }
    if draws.factor_B4 is not None and draws.order_B4 is not None:
        for operation in draws.order_B4[i].tolist():
            x = adjust[operation](x, float(draws.factor_B4[i, operation]))
    if draws.gray_B is not None and draws.gray_B[i]:
        x = tv.rgb_to_grayscale(x, num_output_channels=3)
    if draws.sigma_B is not None and draws.sigma_B[i] > 0:
        sigma = float(draws.sigma_B[i])
        if blur in ("pil", "constant"):
            x = boxes_of_pil(x, sigma=sigma)
        else:
            side = 31 if blur == "gaussian" else 2 * (x.shape[1] // 20) + 1
            wide = tv.pad(x, [30], padding_mode="edge")
            x = tv.gaussian_blur(wide, kernel_size=[side] * 2, sigma=[sigma] * 2)[..., 30:-30, 30:-30]
    return tv.horizontal_flip(x) if draws.flip_B is not None and draws.flip_B[i] else x


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "size", "num"),
    [
        (ExpertImageConfig(), 32, 60),
        (ExpertImageConfig(), 224, 4),
        (GAUSSIAN, 48, 24),
        (SIMCLR, 64, 24),
        *((huang_views(letters, strength=1.0), 32, 24) for letters in ("ad", "abcde")),
    ],
)
def test_whole_views_equal_torchvision_one_by_one(config: ExpertImageConfig, size: int, num: int) -> None:
    x, draws = pictures(num, size=size), draw(config, keys(num), size=size)
    policy = ExpertImage(config)
    views = policy(x, keys(num))
    assert torch.equal(views, policy.apply_draws(x, draws))
    for i in range(num):
        torch.testing.assert_close(views[i], one_by_one(x[i], draws, i, blur=config.blur), atol=1e-3, rtol=0)


@pytest.mark.parametrize(
    "config",
    [ExpertImageConfig(), ExpertImageConfig(blur_probability=0.01), GAUSSIAN, huang_views("ce"), huang_views("abcde")],
)
def test_what_a_cpu_leaves_out_changes_no_bit(config: ExpertImageConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """On other devices the host reads no draw, and leaves out nothing."""
    x, policy = pictures(40), ExpertImage(config)
    draws = draw(config, keys(40), size=32)
    expected = [policy.apply_draws(x[:num], rows_of(draws, slice(num))) for num in (1, 40)]
    for module in (colour, expert_image):
        monkeypatch.setattr(module, "changes_any", lambda _: True)
    monkeypatch.setattr(expert_image, "blur_", blur)
    found = [policy.apply_draws(x[:num], rows_of(draws, slice(num))) for num in (1, 40)]
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize(("size", "reach"), [(32, 1), (96, 4), (224, 11)])
def test_the_blur_of_simclr_reaches_a_tenth_of_the_picture(size: int, reach: int) -> None:
    matrix = draw(SIMCLR, keys(1), size=size).blur_matrix(torch.full((1,), 2.0), size=size)[0]
    distance = (torch.arange(size)[:, None] - torch.arange(size)).abs()
    assert torch.equal(matrix > 0, distance <= reach)
    torch.testing.assert_close(matrix.sum(dim=1), torch.ones(size))


@pytest.mark.parametrize(
    ("config", "size", "num"),
    [(ExpertImageConfig(), 32, 60), (SIMCLR, 96, 12), (huang_views("abcde"), 32, 60), (huang_views("ab"), 224, 4)],
)
def test_pictures_that_are_changed_a_few_at_a_time_are_those_of_the_whole_batch(
    config: ExpertImageConfig, size: int, num: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU also leaves out what changes none of the few; neither changes a bit."""
    monkeypatch.setattr(expert_image, "_VALUES_ON_CPU", 3 * size**2 * 3)
    x = pictures(num, size=size)
    policy, draws = ExpertImage(config), draw(config, keys(num), size=size)
    whole = policy.apply_draws(x, draws)
    assert torch.equal(policy(x, keys(num)), whole)
    alone = torch.cat([policy.apply_draws(x[i : i + 1], rows_of(draws, slice(i, i + 1))) for i in range(num)])
    assert torch.equal(alone, whole)


@pytest.mark.parametrize("letters", ["b", "abcd"])
def test_a_switched_off_operation_changes_no_draw_of_the_others(letters: str) -> None:
    whole, part = (draw(huang_views(which), keys(50), size=32) for which in (HUANG_LETTERS, letters))
    fields = {"a": "box_B4", "b": "sigma_B", "c": "gray_B", "d": "factor_B4", "e": "flip_B"}
    for letter, field in fields.items():
        ours, expected = getattr(part, field), getattr(whole, field)
        assert (ours is None) == (letter not in letters)
        assert ours is None or torch.equal(ours, expected)


def test_every_order_of_the_jitter_is_drawn_equally_often() -> None:
    order_B4 = draw(ExpertImageConfig(), keys(24_000), size=32).order_B4
    assert order_B4 is not None
    counts = Counter(map(tuple, order_B4.tolist()))
    assert len(counts) == 24
    chi_square = sum((count - 1000) ** 2 / 1000 for count in counts.values())
    assert chi_square < 49.7  # 23 degrees of freedom, p = 0.001


@pytest.mark.parametrize(("area", "aspect"), [((0.2, 1.0), (3 / 4, 4 / 3)), ((0.95, 1.0), (1.5, 2.0))])
def test_a_decoder_draws_the_boxes_of_the_views(area: tuple[float, float], aspect: tuple[float, float]) -> None:
    box_B4 = draw(ExpertImageConfig(area=area, aspect=aspect), keys(500), size=96).box_B4
    sizes_B2 = torch.full((500, 2), 96)
    of_decoder_B4 = random_resized_crops(sizes_B2, keys(500), CropLaw(area, aspect, purpose=0))
    assert box_B4 is not None
    assert torch.equal(box_B4, of_decoder_B4.float())


@pytest.mark.parametrize(
    ("config", "theirs"),
    [
        (ExpertImageConfig(jitter_probability=1.0), v2.ColorJitter(0.4, 0.4, 0.4, 0.1)),
        (huang_views("ad", strength=1.25, jitter_probability=1.0), v2.ColorJitter(1, 1, 1, 0.25)),
    ],
)
def test_jitter_factors_have_torchvisions_law(config: ExpertImageConfig, theirs: v2.ColorJitter) -> None:
    torch.manual_seed(0)
    params = [theirs.make_params([]) for _ in range(3000)]
    factor_B4 = draw(config, keys(3000), size=32).factor_B4
    assert factor_B4 is not None
    for operation, name in enumerate(["brightness", "contrast", "saturation", "hue"]):
        factor = [drawn[f"{name}_factor"] for drawn in params]
        assert ks_p_value(factor_B4[:, operation].numpy(), factor) > 1e-3, name
    correlation = np.corrcoef(factor_B4.numpy().T) - np.eye(4)
    assert np.abs(correlation).max() < 4 / 3000**0.5


@pytest.mark.parametrize("config", [ExpertImageConfig(), huang_views("abcde")])
def test_operations_happen_as_often_as_configured(config: ExpertImageConfig) -> None:
    num = 20_000
    draws = draw(config, keys(num), size=32)
    assert draws.factor_B4 is not None
    assert draws.gray_B is not None
    assert draws.flip_B is not None
    assert draws.sigma_B is not None
    hue_B, sigma_B = draws.factor_B4[:, HUE], draws.sigma_B
    happened = torch.stack([hue_B != 0, draws.gray_B, sigma_B > 0, draws.flip_B], dim=1).double()
    for share, expected in zip(happened.mean(dim=0).tolist(), [0.8, 0.2, 0.5, 0.5], strict=True):
        assert abs(share - expected) < 4 * (expected * (1 - expected) / num) ** 0.5
    assert np.abs(np.corrcoef(happened.numpy().T) - np.eye(4)).max() < 4 / num**0.5
    if config.blur == "pil":
        assert ks_p_value(((sigma_B[sigma_B > 0] - 0.1) / 1.9).numpy()) > 1e-3
    else:
        assert set(sigma_B.tolist()) == {0, 1}


@pytest.mark.parametrize("config", [ExpertImageConfig(), huang_views("b")])
def test_the_memory_layout_changes_nothing(config: ExpertImageConfig) -> None:
    policy, x = ExpertImage(config), pictures(16)
    views = policy(x, keys(16))
    assert torch.equal(policy(x.to(memory_format=torch.channels_last), keys(16)), views)
    assert views.is_contiguous()


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


def test_the_aspect_of_a_crop_is_relative_to_the_picture() -> None:
    wide, square, whole = (
        draw(ExpertImageConfig(area=area, aspect=aspect), keys(4_000), size=size).box_B4
        for area, aspect, size in (
            ((0.2, 1.0), (3 / 4, 4 / 3), (640, 320)),
            ((0.2, 1.0), (3 / 4, 4 / 3), (640, 640)),
            ((1.0, 1.0), (1.0, 1.0), (64, 32)),
        )
    )
    assert wide is not None
    assert square is not None
    assert whole is not None
    # The same law in relative units; float32 may round a side, or the test whether a box fits, the other way.
    assert float(((square - wide)[:, 2].abs() <= 1).double().mean()) > 0.99
    assert float(((square / 2 - wide)[:, 3].abs() <= 1).double().mean()) > 0.99
    assert (whole == torch.tensor([0, 0, 64, 32])).all()


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
    ("config", "num_channels", "gradient"),
    [
        (ExpertImageConfig().without_colours(), 11, False),
        (huang_views("abe"), 11, True),
        (SIMCLR.without_colours(), 1, False),
    ],
)
def test_each_of_any_number_of_channels_is_changed_as_in_a_picture_of_three(
    config: ExpertImageConfig, num_channels: int, gradient: bool
) -> None:
    policy, all_keys = ExpertImage(config), keys(40)
    x = pictures(40).repeat(1, 4, 1, 1)[:, :num_channels]
    views = policy(x.requires_grad_(gradient), all_keys)
    for channel in range(num_channels):
        expected = policy(x.detach()[:, channel : channel + 1].expand(-1, 3, -1, -1), all_keys)
        assert torch.equal(views[:, channel], expected[:, 0])
