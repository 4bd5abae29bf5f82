"""Measure whether a GPU should decode JPEG files: nvJPEG through torchvision against our decoder on the CPU.

Both make two crops of 224 pixels of the same files, and the rates hold both decoding and cropping. The files are those
of `benchmarks.picture_decoding`. nvJPEG decodes a picture whole; our decoder may decode it at a smaller scale.

Shapes: B pictures, K crops of each, C channels, H height, W width.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import numpy as np
import simplejpeg
import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.io import ImageReadMode, decode_jpeg

from benchmarks.gpu_stages.session import Outcome, Setting, Stage, Task, task
from benchmarks.picture_decoding import SIZE, crops_of, jpeg_files, photographs, views_of
from benchmarks.record import rounded
from data_pipeline.core.random_crop import Crop

LEFT_OUT: Final = "nvJPEG was left out, because this machine has no GPU"
_PICTURES: Final = {"500x400": (400, 500, 128), "4000x3000": (3000, 4000, 16)}  # height, width, how many at once
_NUM_ROUNDS: Final = 5
_SECONDS_OF_A_ROUND: Final = 1.0


def tasks(setting: Setting) -> Mapping[str, Task]:
    """Return the measurements, one for each size of the pictures."""
    return {
        name: task(partial(measure_decoding, setting, height, width, num), needs_seconds=40)
        for name, (height, width, num) in _PICTURES.items()
    }


def measure_decoding(setting: Setting, height: int, width: int, num: int) -> Outcome:
    """Measure pictures a second on one core, on all cores and on the GPU, and how far their pixels differ."""
    if setting.is_tiny:
        height, width, num = height // 4, width // 4, 2
    contents = list(jpeg_files(photographs(None), height=height, width=width, num=num))
    files = [memoryview(content) for content in contents]
    crops = crops_of(files)
    num_cores = len(os.sched_getaffinity(0))
    with _one_thread(), ThreadPoolExecutor(num_cores) as pool:
        one_core = _rate(setting, lambda: list(map(views_of, files, crops)), num)
        all_cores = _rate(setting, lambda: list(pool.map(views_of, files, crops)), num)
    values: dict[str, Any] = {
        "num_pictures": num,
        "kilobytes_a_picture": rounded(sum(map(len, contents)) / num / 1e3),
        "num_cores": num_cores,
        "pictures_per_second_on_one_core": rounded(one_core),
        "pictures_per_second_on_all_cores": rounded(all_cores),
    }
    if setting.device.type != "cuda":
        return Outcome({**values, "left_out": LEFT_OUT})
    stored = [torch.frombuffer(bytearray(content), dtype=torch.uint8) for content in contents]
    on_gpu = _rate(setting, lambda: two_crops(stored, crops, device=setting.device), num)
    return Outcome(
        {
            **values,
            "pictures_per_second_on_the_gpu": rounded(on_gpu),
            "gpu_over_one_core": rounded(on_gpu / one_core),
            "gpu_over_all_cores": rounded(on_gpu / all_cores),
            "largest_difference_of_a_pixel": largest_difference(contents, decoded(stored, setting.device)),
        }
    )


def decoded(stored: list[Tensor], device: torch.device) -> list[Tensor]:
    """Decode JPEG files, each (bytes,) uint8 on the CPU, with torchvision: each (3, H, W) uint8 on the device."""
    pictures: list[Tensor] = decode_jpeg(stored, mode=ImageReadMode.RGB, device=device)
    return pictures


def two_crops(stored: list[Tensor], crops: Sequence[Sequence[Crop]], *, device: torch.device) -> Tensor:
    """Decode files with torchvision, and resize their crops there: (B, K, 3, 224, 224) uint8 on the device.

    The resize is bilinear with antialiasing, as on the CPU. torch has it on GPUs for floating-point numbers only.
    """
    views = [
        F.interpolate(
            picture_CHW[None, :, top : top + height, left : left + width].float(),
            (SIZE, SIZE),
            mode="bilinear",
            antialias=True,
        )
        for picture_CHW, of_picture in zip(decoded(stored, device), crops, strict=True)
        for top, left, height, width in of_picture
    ]
    return torch.cat(views).round_().clamp_(0, 255).to(torch.uint8).view(len(stored), -1, 3, SIZE, SIZE)


def largest_difference(contents: Sequence[bytes], pictures: Sequence[Tensor]) -> int:
    """Return the largest difference, 0 to 255, between decoded pictures (3, H, W) and those of our decoder, whole."""
    differences = (
        np.abs(simplejpeg.decode_jpeg(content).astype(np.int16) - picture_CHW.permute(1, 2, 0).cpu().numpy()).max()
        for content, picture_CHW in zip(contents, pictures, strict=True)
    )
    return int(max(differences))


def _rate(setting: Setting, decode_all: Callable[[], object], num: int) -> float:
    """Return the pictures a second, the median of some rounds after one call to warm up."""
    decode_all()
    rates = []
    for _ in range(1 if setting.is_tiny else _NUM_ROUNDS):
        setting.wait()
        start, num_done = time.perf_counter(), 0
        while num_done == 0 or time.perf_counter() < start + (0 if setting.is_tiny else _SECONDS_OF_A_ROUND):
            decode_all()
            setting.wait()
            num_done += num
        rates.append(num_done / (time.perf_counter() - start))
    return statistics.median(rates)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Let each operation of torch use one thread inside the block, as data workers do."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


STAGE = Stage("jpeg", tasks)
