"""Kernels of expert views: in the interpreter of Triton on a CPU, compiled for an H100 without one, and on a GPU."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget

from tests.trainer.code_of_kernels import assert_in_registers, run_in_the_interpreter
from tests.trainer.views.interpreted_views import CASES, assert_equal_views, keys, pictures
from trainer import triton_works
from trainer.views import expert_image, expert_image_kernels
from trainer.views.expert_image import ExpertDraws, ExpertImage, ExpertImageConfig, draw, huang_views

needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.process
@pytest.mark.parametrize("check", ["trial", "draws", "views"])
def test_in_the_interpreter_kernels_give_the_views_of_a_cpu(check: str) -> None:
    run_in_the_interpreter("tests.trainer.views.interpreted_views", check)


class Processor:
    """An H100 that is not there, for which Triton compiles. Its number is not that of a GPU that may be there."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 90

    def get_current_stream(self, _: int) -> int:
        return 0


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
        compiled.append(kernel.warmup(*arguments, grid=programs, **constants))

    monkeypatch.setattr(triton_works, "DEVICE", "cpu")
    monkeypatch.setattr(expert_image, "kernels", lambda *_: expert_image_kernels)
    monkeypatch.setattr(expert_image_kernels, "launch", compile_only)
    monkeypatch.setattr(triton.runtime.driver, "_active", Processor())
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
