"""Kernels of expert views: their code for an H100, run on a CPU and looked at, and on a GPU."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any, Final
from unittest import mock

import pytest
import torch
from torch import Tensor

from benchmarks import ptx
from data_pipeline.core.counter_rng import DrawKeys
from tests.trainer.machine_code import CAPABILITIES, assert_in_registers, on_the_cpu
from trainer import triton_works
from trainer.views import expert_image, expert_image_kernels
from trainer.views.expert_image import NO_VIEWS, ExpertDraws, ExpertImage, ExpertImageConfig, draw, huang_views

needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


STRONG = ExpertImageConfig(brightness=1, contrast=1, saturation=1, hue=0.5, jitter_probability=1, blur_sigma=(0.1, 9))
GAUSSIAN, SIMCLR = ExpertImageConfig(blur="gaussian"), ExpertImageConfig(blur="simclr")
COLOURLESS = ExpertImageConfig().without_colours()
# Config, height, width, channels, pictures.
CASES: Final = (
    (ExpertImageConfig(), 32, 32, 3, 4),
    (STRONG, 32, 32, 3, 10),
    (STRONG, 33, 47, 3, 2),
    (STRONG, 17, 31, 3, 2),
    (ExpertImageConfig(), 7, 2, 3, 2),
    (ExpertImageConfig(), 64, 32, 3, 2),
    (ExpertImageConfig(), 96, 80, 3, 2),
    (ExpertImageConfig(area=(0.01, 1.0)), 32, 32, 3, 1),
    (GAUSSIAN, 32, 32, 3, 2),
    (SIMCLR, 64, 64, 3, 2),
    (ExpertImageConfig().without_crop(), 32, 32, 3, 2),
    *((huang_views(letters, strength=1.25), 32, 32, 3, 2) for letters in (*"abcde", "ad", "ce", "abcde")),
    (COLOURLESS, 32, 32, 11, 2),
    (COLOURLESS, 32, 32, 1, 2),
    (NO_VIEWS, 32, 32, 3, 2),
)


def keys(num: int) -> DrawKeys:
    return DrawKeys(seed=0, epoch=0, index_B=torch.arange(num), view=0)


def pictures(num: int, *, channels: int, height: int, width: int) -> Tensor:
    """Smooth patches, noise, flat greys and primary colours, where HSV has its edges: (num, channels, H, W)."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.rand(num, channels, height, width, generator=generator)
    smooth = torch.nn.functional.interpolate(noise[:, :, :5, :5], size=(height, width), mode="bicubic").clamp(0, 1)
    x = torch.where(torch.arange(num)[:, None, None, None] % 2 == 0, smooth, noise)
    if channels == 3:
        corners = torch.tensor(list(itertools.product([0.0, 1.0], repeat=3))).T.view(3, 2, 4)
        x[:, :, :2, :4] = corners[..., : x.shape[3]]
    x[:, :, 2:4] = 0.5
    return x


def assert_equal_views(found: Tensor, expected: Tensor, case: object) -> None:
    """Every pixel equals that of the form in torch to a 40th of a shade, and the mean to 1e-5."""
    away = (found - expected).abs().max()
    assert away <= 1e-4, f"{case}: a pixel is {away:.1e} away"
    of_mean = (found.mean((2, 3)) - expected.mean((2, 3))).abs().max()
    assert of_mean <= 1e-5, f"{case}: a mean is {of_mean:.1e} away"


@pytest.mark.pinned
@pytest.mark.parametrize(
    ("config", "height", "width", "channels", "num", "capability"),
    [*((*case, 90) for case in CASES), (STRONG, 33, 47, 3, 2, 100)],
)
def test_views_are_those_of_a_cpu(
    config: ExpertImageConfig, height: int, width: int, channels: int, num: int, capability: int
) -> None:
    x = pictures(num, channels=channels, height=height, width=width)
    policy, draws = ExpertImage(config), draw(config, keys(num), size=(height, width))
    if config == GAUSSIAN:
        x = x.bfloat16().float().contiguous(memory_format=torch.channels_last)
    before = x.clone()
    with on_the_cpu(capability):
        found = policy.apply_draws(x, draws)
    assert_equal_views(found, policy.apply_draws(x, draws), config)
    assert torch.equal(x, before)
    assert found.is_contiguous()
    assert found.data_ptr() != x.data_ptr()
    assert config != NO_VIEWS or torch.equal(found, x)


@pytest.mark.pinned
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_before_their_first_use_right_kernels_pass_and_wrong_ones_do_not(capability: int) -> None:
    """The second policy of the trial has no kernels here."""
    right = expert_image_kernels.views
    for factor in (1.0, 1.1):
        found = mock.Mock(side_effect=[expert_image_kernels] * 2 + [None] * 2)
        wrong = mock.patch.object(expert_image_kernels, "views", lambda x, draws, f=factor: right(x, draws) * f)
        with on_the_cpu(capability), mock.patch.object(expert_image, "kernels", found), wrong:
            if factor == 1:
                expert_image._try_out(expert_image_kernels, torch.float32)
            else:
                with pytest.raises(ValueError, match="they are 10% away"):
                    expert_image._try_out(expert_image_kernels, torch.float32)
        assert found.call_count == 4


TIGHT = ExpertImageConfig(area=(0.98, 1.0), aspect=(1.0, 1.6))  # in four of ten pictures no box fits
NEVER = ExpertImageConfig(jitter_probability=0, grayscale_probability=0, flip_probability=0, blur_probability=0)


@pytest.mark.pinned
@pytest.mark.parametrize(
    ("config", "height", "width"), [(STRONG, 32, 32), (TIGHT, 64, 48), (huang_views("abcde"), 33, 47), (NEVER, 32, 32)]
)
def test_draws_are_those_of_a_cpu(config: ExpertImageConfig, height: int, width: int) -> None:
    """A product that is added at once may differ in its last bit; all else is equal."""
    large = dataclasses.replace(keys(3), epoch=3, seed=-(1 << 40), index_B=torch.arange(3) + (1 << 50))
    recorded = dataclasses.replace(large, view=2, recorded_epoch=torch.tensor(7))
    for given in (keys(7), large.two_views(), recorded, recorded.two_views()):
        expected = vars(draw(config, given, size=(height, width)))
        with on_the_cpu():
            found = vars(draw(config, given, size=(height, width)))
        assert found.pop("blur_matrix") is expected.pop("blur_matrix")
        for name, of_torch in expected.items():
            if of_torch is None:
                assert found[name] is None
            else:
                tolerance = {"factor_B4": 2e-7, "sigma_B": 1e-6}.get(name, 0)
                torch.testing.assert_close(found[name], of_torch, atol=tolerance, rtol=0)


@pytest.mark.slow
@pytest.mark.pinned
@pytest.mark.parametrize(
    ("config", "size", "channels", "launches"),
    [
        (ExpertImageConfig(), 32, 3, ["draw", "change", "blur"]),
        (ExpertImageConfig(), 224, 3, ["draw", "change"]),
        (huang_views("b"), 32, 1, ["draw", "change", "blur"]),
        (huang_views("cd"), 32, 3, ["draw", "change"]),
    ],
)
def test_compiled_for_an_h100_kernels_spill_nothing(
    config: ExpertImageConfig,
    size: int,
    channels: int,
    launches: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    compiled: list[Any] = []

    def compile_only(kernel: Any, programs: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        compiled.append(ptx.compiled_for(90, kernel, programs, *arguments, **constants))

    monkeypatch.setattr(triton_works, "DEVICE", "cpu")
    monkeypatch.setattr(expert_image, "kernels", lambda *_: expert_image_kernels)
    monkeypatch.setattr(expert_image_kernels, "launch", compile_only)
    recorded = dataclasses.replace(keys(1), recorded_epoch=torch.tensor(3)).two_views()
    ExpertImage(config)(torch.rand(2, channels, size, size), recorded if size == 224 else keys(2))
    assert [each.metadata.name for each in compiled] == [f"_{name}_kernel" for name in launches]
    for each in compiled:
        assert_in_registers(each.asm, tmp_path, most=128)  # four programs of 128 threads on each processor


def on_the_gpu(draws: ExpertDraws) -> ExpertDraws:
    tensors: dict[str, Any] = {name: value.cuda() for name, value in vars(draws).items() if isinstance(value, Tensor)}
    return dataclasses.replace(draws, **tensors)


@needs_a_gpu
@pytest.mark.parametrize(("config", "height", "width", "channels", "num"), CASES)
def test_on_a_gpu_kernels_give_the_views_of_a_cpu(
    config: ExpertImageConfig, height: int, width: int, channels: int, num: int
) -> None:
    x, draws = (
        pictures(num, channels=channels, height=height, width=width),
        draw(config, keys(num), size=(height, width)),
    )
    assert expert_image._kernels(x.cuda()) is expert_image_kernels
    policy = ExpertImage(config)
    found, again = (policy.apply_draws(x.cuda(), on_the_gpu(draws)) for _ in range(2))
    assert torch.equal(found, again)
    assert_equal_views(found.cpu(), policy.apply_draws(x, draws), config)


@needs_a_gpu
@pytest.mark.parametrize(("height", "width"), [(32, 32), (96, 64)])
def test_on_a_gpu_the_draws_are_those_of_a_cpu(height: int, width: int) -> None:
    """Boxes are drawn with an exponential, whose rounding may move an edge by a pixel, in a few of 100,000 pictures."""
    config, of_cpu = ExpertImageConfig(area=(0.5, 1.0)), keys(20_000)
    on_gpu = dataclasses.replace(of_cpu, index_B=of_cpu.index_B.cuda())
    found, expected = (vars(draw(config, given, size=(height, width))) for given in (on_gpu, of_cpu))
    for name in ("flip_B", "gray_B", "order_B4"):
        assert torch.equal(found[name].cpu(), expected[name])
    for name in ("factor_B4", "sigma_B"):
        torch.testing.assert_close(found[name].cpu(), expected[name], atol=1e-6, rtol=0)
    assert (found["box_B4"].cpu() != expected["box_B4"]).any(1).sum() <= 5


@needs_a_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [32, 96])
def test_on_a_gpu_views_are_recorded(size: int, dtype: torch.dtype) -> None:
    x, policy = pictures(16, channels=3, height=size, width=size).to(dtype), ExpertImage(ExpertImageConfig())
    on_gpu = x.cuda(), dataclasses.replace(keys(16), index_B=torch.arange(16).cuda())
    views = policy(*on_gpu)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = policy(*on_gpu)
    graph.replay()
    assert torch.equal(recorded, views)
    # A box is drawn with an exponential, whose rounding may move an edge by a pixel, in a few of a million pictures.
    tolerance = 1e-4 if dtype == torch.float32 else 2.0**-8
    torch.testing.assert_close(views.cpu(), policy(x, keys(16)), atol=tolerance, rtol=0)


@needs_a_gpu
@pytest.mark.parametrize(("num", "size"), [(512, 32), (512, 96), (128, 224)])
def test_speed_on_a_gpu(num: int, size: int) -> None:
    """The printed TB/s count pictures and views once."""
    x, config = torch.rand(num, 3, size, size, device="cuda"), ExpertImageConfig()
    policy, draws = ExpertImage(config), on_the_gpu(draw(config, keys(num), size=size))
    for name, given in (("crop and colours", dataclasses.replace(draws, sigma_B=None)), ("with blur", draws)):
        run: Any = torch.cuda.CUDAGraph()
        policy.apply_draws(x, given)
        with torch.cuda.graph(run):
            policy.apply_draws(x, given)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        run.replay()
        start.record()
        for _ in range(20):
            run.replay()
        end.record()
        torch.cuda.synchronize()
        seconds = start.elapsed_time(end) / 20e3
        speed = 2 * x.numel() * 4 / seconds / 1e12
        print(f"expert views, {name}, {num} x {size} x {size}: {seconds * 1e6:.0f} us, {speed:.2f} TB/s")
        assert seconds > 0
