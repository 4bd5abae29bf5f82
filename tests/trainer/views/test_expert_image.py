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

from data_pipeline.counter_rng import DrawKeys
from tests.trainer.views.kolmogorov import ks_p_value
from trainer.views.expert_image import (
    BRIGHTNESS,
    CONTRAST,
    HUE,
    SATURATION,
    ExpertDraws,
    ExpertImage,
    ExpertImageConfig,
    apply_draws,
    apply_matrices,
    blend_,
    blur_matrix,
    crop_matrix,
    draw,
    luma,
    shift_hue_,
)

LUMA_TOLERANCE = 2e-4  # torchvision's tensors weigh red by 0.2989, PIL and we by 0.299


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


@pytest.mark.parametrize("antialias", [False, True])
def test_crop_and_flip_equal_torchvision(antialias: bool) -> None:
    """Antialiasing changes nothing, because a crop is never larger than the picture that it is resized to."""
    draws = draw(ExpertImageConfig(area=(0.01, 1.0)), keys(200), size=32)
    x = pictures(200)
    rows = crop_matrix(draws.top_B, draws.height_B, size=32)
    columns = crop_matrix(draws.left_B, draws.width_B, size=32, mirror_B=draws.flip_B)
    ours = apply_matrices(x, rows, columns)
    for i in range(len(x)):
        box = [int(side[i]) for side in (draws.top_B, draws.left_B, draws.height_B, draws.width_B)]
        expected = tv.resized_crop(
            x[i], *box, size=[32, 32], interpolation=InterpolationMode.BILINEAR, antialias=antialias
        )
        expected = tv.horizontal_flip(expected) if draws.flip_B[i] else expected
        torch.testing.assert_close(ours[i], expected, atol=2e-6, rtol=0)


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


def test_luma_equals_torchvision() -> None:
    x = pictures(8)
    torch.testing.assert_close(luma(x), tv.rgb_to_grayscale(x), atol=LUMA_TOLERANCE, rtol=0)


@pytest.mark.parametrize("sigma", [0.1, 0.3, 0.5, 1.0, 1.5, 2.0])
def test_blur_equals_torchvision_on_repeated_edges(sigma: float) -> None:
    x = pictures(6)
    matrix = blur_matrix(torch.full((6,), sigma), size=32)
    expected = tv.gaussian_blur(tv.pad(x, [30], padding_mode="edge"), kernel_size=[31, 31], sigma=[sigma, sigma])
    torch.testing.assert_close(apply_matrices(x, matrix, matrix), expected[..., 30:-30, 30:-30], atol=2e-6, rtol=0)


@pytest.mark.parametrize("sigma", [0.5, 1.0, 2.0])
def test_blur_is_near_pil(sigma: float) -> None:
    """PIL's box filters approximate the Gaussian, in 8 bits: within 1.5 grey levels on average."""
    x = (pictures(1)[0] * 255).round()
    blurred = Image.fromarray(x.permute(1, 2, 0).byte().numpy()).filter(ImageFilter.GaussianBlur(radius=sigma))
    matrix = blur_matrix(torch.tensor([sigma]), size=32)
    ours = apply_matrices(x[None], matrix, matrix)[0].permute(1, 2, 0).numpy()
    assert np.abs(ours - np.asarray(blurred, dtype=np.float32)).mean() < 1.5


def test_no_blur_is_exactly_nothing() -> None:
    assert torch.equal(blur_matrix(torch.zeros(2), size=32), torch.eye(32).expand(2, 32, 32))


def one_by_one(x: Tensor, draws: ExpertDraws, i: int) -> Tensor:
    """Sample i's view by torchvision's functions in the policy's own order: crop, jitter, grayscale, blur, flip."""
    box = [int(side[i]) for side in (draws.top_B, draws.left_B, draws.height_B, draws.width_B)]
    x = tv.resized_crop(x, *box, size=list(x.shape[1:]), antialias=True)
    adjust = {
        BRIGHTNESS: tv.adjust_brightness,
        CONTRAST: tv.adjust_contrast,
        SATURATION: tv.adjust_saturation,
        HUE: tv.adjust_hue,
    }
    for operation in draws.order_B4[i].tolist():
        x = adjust[operation](x, float(draws.factor_B4[i, operation]))
    if draws.gray_B[i]:
        x = tv.rgb_to_grayscale(x, num_output_channels=3)
    if draws.sigma_B[i] > 0:
        wide = tv.pad(x, [30], padding_mode="edge")
        x = tv.gaussian_blur(wide, kernel_size=[31, 31], sigma=[float(draws.sigma_B[i])] * 2)[..., 30:-30, 30:-30]
    return tv.horizontal_flip(x) if draws.flip_B[i] else x


@pytest.mark.parametrize("size", [32, 48])
def test_whole_views_equal_torchvision_one_by_one(size: int) -> None:
    x, draws = pictures(150, size=size), draw(ExpertImageConfig(), keys(150), size=size)
    views = ExpertImage(ExpertImageConfig())(x, keys(150))
    assert torch.equal(views, apply_draws(x, draws))
    for i in range(150):
        torch.testing.assert_close(views[i], one_by_one(x[i], draws, i), atol=5e-4, rtol=0)


def test_every_order_of_the_jitter_is_drawn_equally_often() -> None:
    order = draw(ExpertImageConfig(), keys(24_000), size=32).order_B4
    counts = Counter(map(tuple, order.tolist()))
    assert len(counts) == 24
    chi_square = sum((count - 1000) ** 2 / 1000 for count in counts.values())
    assert chi_square < 49.7  # 23 degrees of freedom, p = 0.001


@pytest.mark.parametrize("area", [(0.2, 1.0), (0.08, 1.0), (0.9, 1.0)])
def test_crop_boxes_have_torchvisions_law(area: tuple[float, float]) -> None:
    """With an area of at least 0.9 most attempts fail, so this tests the repeated attempts as well."""
    torch.manual_seed(0)
    transform = v2.RandomResizedCrop(32, scale=area)
    theirs = [transform.make_params([torch.empty(3, 32, 32)]) for _ in range(5000)]
    draws = draw(ExpertImageConfig(area=area), keys(5000), size=32)
    for name, ours in {
        "height": draws.height_B,
        "width": draws.width_B,
        "top": draws.top_B,
        "left": draws.left_B,
    }.items():
        assert ks_p_value(ours.numpy(), [box[name] for box in theirs]) > 1e-3, name
    slack = torch.tensor([32 - box["height"] - box["top"] for box in theirs])
    assert ks_p_value((32 - draws.height_B - draws.top_B).numpy(), slack.numpy()) > 1e-3
    ratio = np.array([box["width"] / box["height"] for box in theirs])
    assert ks_p_value((draws.width_B.double() / draws.height_B).numpy(), ratio) > 1e-3


def test_jitter_factors_have_torchvisions_law() -> None:
    torch.manual_seed(0)
    transform = v2.ColorJitter(0.4, 0.4, 0.4, 0.1)
    theirs = [transform.make_params([]) for _ in range(5000)]
    ours = draw(ExpertImageConfig(jitter_probability=1.0), keys(5000), size=32).factor_B4
    for operation, name in enumerate(["brightness", "contrast", "saturation", "hue"]):
        factor = [params[f"{name}_factor"] for params in theirs]
        assert ks_p_value(ours[:, operation].numpy(), factor) > 1e-3, name
    correlation = np.corrcoef(ours.numpy().T) - np.eye(4)
    assert np.abs(correlation).max() < 4 / 5000**0.5


def test_operations_happen_as_often_as_configured() -> None:
    num = 20_000
    draws = draw(ExpertImageConfig(), keys(num), size=32)
    happened = torch.stack(
        [draws.factor_B4[:, HUE] != 0, draws.gray_B, draws.sigma_B > 0, draws.flip_B], dim=1
    ).double()
    for share, expected in zip(happened.mean(dim=0).tolist(), [0.8, 0.2, 0.5, 0.5], strict=True):
        assert abs(share - expected) < 4 * (expected * (1 - expected) / num) ** 0.5
    assert np.abs(np.corrcoef(happened.numpy().T) - np.eye(4)).max() < 4 / num**0.5
    sigma = draws.sigma_B[draws.sigma_B > 0]
    assert ks_p_value(((sigma - 0.1) / 1.9).numpy()) > 1e-3


def test_the_whole_policy_has_torchvisions_law() -> None:
    """Views of one picture: mean, contrast and colourfulness are distributed as under torchvision's own pipeline."""
    torch.manual_seed(0)
    num, picture = 1000, pictures(2)[1]
    pipeline = v2.Compose(
        [
            v2.RandomResizedCrop(32, scale=(0.2, 1.0)),
            v2.RandomApply([v2.ColorJitter(0.4, 0.4, 0.4, 0.1)], p=0.8),
            v2.RandomGrayscale(0.2),
            v2.RandomApply([v2.GaussianBlur(kernel_size=17, sigma=(0.1, 2.0))], p=0.5),
            v2.RandomHorizontalFlip(),
        ]
    )
    theirs = torch.stack([pipeline(picture) for _ in range(num)])
    ours = ExpertImage(ExpertImageConfig())(picture.expand(num, -1, -1, -1), keys(num))
    statistics: dict[str, Callable[[Tensor], Tensor]] = {
        "mean": lambda x: x.mean(dim=(1, 2, 3)),
        "contrast": lambda x: luma(x).std(dim=(1, 2, 3)),
        "colourfulness": lambda x: x.std(dim=1).mean(dim=(1, 2)),
        "sharpness": lambda x: x.diff(dim=3).abs().mean(dim=(1, 2, 3)),
        "leaning": lambda x: (x[..., 16:] - x[..., :16]).mean(dim=(1, 2, 3)),
    }
    for name, statistic in statistics.items():
        assert ks_p_value(statistic(ours).numpy(), statistic(theirs).numpy()) > 1e-3, name


def test_a_view_does_not_depend_on_its_batch() -> None:
    policy, x, all_keys = ExpertImage(ExpertImageConfig()), pictures(8), keys(8)
    whole = policy(x, all_keys)
    for part in (slice(0, 4), slice(4, 8), slice(3, 4)):
        assert torch.equal(whole[part], policy(x[part], dataclasses.replace(all_keys, index_B=all_keys.index_B[part])))


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
    views = ExpertImage(ExpertImageConfig(brightness=1, contrast=1, saturation=1, hue=0.5))(x, keys(64))
    assert torch.equal(x, before)
    assert views.dtype == torch.float32
    assert views.min() >= 0
    assert views.max() <= 1 + 1e-6


def test_the_whole_area_without_anything_else_is_the_picture() -> None:
    """With an area of exactly 1 almost no other box fits, so the attempts end with the whole picture."""
    config = ExpertImageConfig(
        area=(1, 1), jitter_probability=0, grayscale_probability=0, blur_probability=0, flip_probability=0
    )
    x = pictures(500)
    torch.testing.assert_close(ExpertImage(config)(x, keys(500)), x, atol=1e-6, rtol=0)


def test_views_are_made_without_waiting_for_the_device() -> None:
    """On the meta device there are shapes and no values: whatever would need a value on the host raises."""
    index = torch.arange(8, device="meta")
    views = ExpertImage(ExpertImageConfig())(
        torch.empty(8, 3, 32, 32, device="meta"), DrawKeys(seed=0, epoch=0, index_B=index, view=0)
    )
    assert views.shape == (8, 3, 32, 32)


def test_other_pictures_are_refused() -> None:
    with pytest.raises(ValueError, match="1 channels of 32 x 32"):
        ExpertImage(ExpertImageConfig())(torch.rand(2, 1, 32, 32), keys(2))
    with pytest.raises(ValueError, match="3 channels of 32 x 64"):
        ExpertImage(ExpertImageConfig())(torch.rand(2, 3, 32, 64), keys(2))


@pytest.mark.parametrize("wrong", [{"area": (0.5, 0.2)}, {"area": (0.5, 1.5)}, {"blur_sigma": (0, 1)}, {"hue": 0.6}])
def test_config_refuses_what_makes_no_sense(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        ExpertImageConfig.model_validate(wrong)


def test_config_survives_json() -> None:
    config = ExpertImageConfig(area=(0.08, 1.0), hue=0.2)
    assert ExpertImageConfig.model_validate_json(config.model_dump_json()) == config
