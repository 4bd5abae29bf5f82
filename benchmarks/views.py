"""Our views against their peers on the same pictures, in one process and one run.

    python -m benchmarks.views [--batch-size B] [--rounds R] [--sizes S ...]

Expert views: pairs a second, against torchvision's transforms on PIL pictures (what the original code did) and on
tensors, one picture after the other. torchvision can also take a whole batch, but then draws once for all of it, which
is no substitute; it is timed to show what the drawing for each picture costs. On pictures of more than 32 pixels the
blur is SimCLR's, and a batch has as many values as one of 32 pixels, but at least 16 pictures. All other groups are of
32 pixels. The transforms of Huang et al. (2023),
each alone and composed as they compose them: against the same on PIL pictures, where the blur is PIL's, as in their
published code. Random masks (Wen and Li 2021): against the two lines that define them, one picture after the other.
Viewmaker: pictures a second, forward and backward, against the same network from torch's own layers in the order of the
paper. The peers take turns, round by round, so that a machine that slows down does so for all; printed are medians. One
thread, and its processor time.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping

import torch
from PIL import Image, ImageFilter
from torch import Tensor
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as tv

from benchmarks.record import print_rates
from data_pipeline.core.counter_rng import DrawKeys
from data_pipeline.core.errors import run_command
from tests.trainer.views.viewmaker_as_written import AsWritten
from trainer.views.expert_image import HUANG_LETTERS, ExpertImage, ExpertImageConfig, huang_views
from trainer.views.random_mask import RandomMask, RandomMaskConfig
from trainer.views.viewmaker import Viewmaker, ViewmakerConfig


def keys(batch_size: int, *, view: int) -> DrawKeys:
    return DrawKeys(seed=0, epoch=0, index_B=torch.arange(batch_size), view=view)


def expert_peers(images_BCHW: Tensor) -> Mapping[str, Callable[[], object]]:
    """Each makes two views of every picture."""
    size = images_BCHW.shape[-1]
    policy = ExpertImage(ExpertImageConfig(blur="pil" if size == 32 else "simclr"))
    on_tensors = v2.Compose(
        [
            v2.RandomResizedCrop(size, scale=(0.2, 1.0)),
            v2.RandomApply([v2.ColorJitter(0.4, 0.4, 0.4, 0.1)], p=0.8),
            v2.RandomGrayscale(0.2),
            v2.RandomApply([v2.GaussianBlur(17 if size == 32 else 2 * (size // 20) + 1, sigma=(0.1, 2.0))], p=0.5),
            v2.RandomHorizontalFlip(),
        ]
    )
    on_pil = v2.Compose([on_tensors, v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True)])
    on_bytes = v2.Compose([on_tensors, v2.ToDtype(torch.float32, scale=True)])
    pictures, bytes_BCHW = [tv.to_pil_image(image) for image in images_BCHW], (images_BCHW * 255).byte()
    return {
        "torchvision on PIL": lambda: torch.stack([on_pil(picture) for picture in pictures * 2]),
        "torchvision on tensors": lambda: torch.stack([on_tensors(image) for _ in range(2) for image in images_BCHW]),
        "torchvision on tensors of bytes": lambda: torch.stack(
            [on_bytes(image) for _ in range(2) for image in bytes_BCHW]
        ),
        "torchvision, one draw for all": lambda: [on_tensors(images_BCHW) for _ in range(2)],
        "ours": lambda: [policy(images_BCHW, keys(len(images_BCHW), view=view)) for view in range(2)],
    }


def huang_peers(images_BCHW: Tensor, letters: str) -> Mapping[str, Callable[[], object]]:
    """Each makes two views of every picture."""
    policy = ExpertImage(huang_views(letters))
    transforms = {
        "a": v2.RandomResizedCrop(images_BCHW.shape[-1], scale=(0.08, 1.0)),
        "e": v2.RandomHorizontalFlip(),
        "d": v2.RandomApply([v2.ColorJitter(0.4, 0.4, 0.4, 0.1)], p=0.8),
        "c": v2.RandomGrayscale(0.2),
        "b": v2.RandomApply([v2.Lambda(blur_on_pil, Image.Image)], p=0.5),
    }
    chosen = [transform for letter, transform in transforms.items() if letter in letters]
    on_pil = v2.Compose([*chosen, v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True)])
    pictures = [tv.to_pil_image(image) for image in images_BCHW]
    return {
        "torchvision on PIL": lambda: torch.stack([on_pil(picture) for picture in pictures * 2]),
        "ours": lambda: [policy(images_BCHW, keys(len(images_BCHW), view=view)) for view in range(2)],
    }


def blur_on_pil(picture: Image.Image) -> Image.Image:
    return picture.filter(ImageFilter.GaussianBlur(radius=1))


def mask_peers(images_BCHW: Tensor) -> Mapping[str, Callable[[], object]]:
    """Each makes two views of every picture."""
    policy = RandomMask(RandomMaskConfig())

    def views(image_CHW: Tensor) -> Tensor:
        keep_CHW = torch.rand_like(image_CHW) < 0.5
        return torch.stack([2 * keep_CHW * image_CHW, 2 * ~keep_CHW * image_CHW])

    return {
        "one by one, on tensors": lambda: torch.stack([views(image) for image in images_BCHW]),
        "ours": lambda: [policy(images_BCHW, keys(len(images_BCHW), view=view)) for view in range(2)],
    }


def viewmaker_peers(images_BCHW: Tensor, config: ViewmakerConfig) -> Mapping[str, Callable[[], object]]:
    viewmaker = Viewmaker(config, image_channels=images_BCHW.shape[1])
    as_written = AsWritten(viewmaker)
    batch_keys = keys(len(images_BCHW), view=0)
    return {
        "as written": lambda: torch.autograd.backward(as_written(images_BCHW, batch_keys).square().mean()),
        "ours": lambda: torch.autograd.backward(viewmaker(images_BCHW, batch_keys).square().mean()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="our views against torchvision's, and the viewmaker as written")
    parser.add_argument("--batch-size", type=int, default=256, metavar="B")
    parser.add_argument("--rounds", type=int, default=7, metavar="R", help="measurements of each")
    parser.add_argument("--sizes", type=int, nargs="+", default=[32, 96, 224], metavar="S", help="pixels of a side")
    args = parser.parse_args()
    for size in args.sizes:
        num_pictures = max(16, args.batch_size * 32**2 // size**2)
        groups = {f"expert views at {size} pixels (two of each)": expert_peers(random_pictures(num_pictures, size))}
        print_rates(groups, num_samples=num_pictures, num_rounds=args.rounds, unit="pictures/s")
    if 32 in args.sizes:
        measure_at_32_pixels(args.batch_size, num_rounds=args.rounds)


def random_pictures(num: int, size: int) -> Tensor:
    return torch.rand(num, 3, size, size, generator=torch.Generator().manual_seed(0))


def measure_at_32_pixels(batch_size: int, *, num_rounds: int) -> None:
    images_BCHW = random_pictures(batch_size, 32)
    huang = [*HUANG_LETTERS, "ab", "abc", "abcd", "abcde", "ad"]
    groups = {
        **{f'expert views "{letters}" of Huang et al.': huang_peers(images_BCHW, letters) for letters in huang},
        "random mask and its complement": mask_peers(images_BCHW),
        "viewmaker, forward and backward": viewmaker_peers(images_BCHW, ViewmakerConfig()),
        "viewmaker of half the width": viewmaker_peers(images_BCHW, ViewmakerConfig(base_width=16)),
    }
    print_rates(groups, num_samples=batch_size, num_rounds=num_rounds, unit="pictures/s")


if __name__ == "__main__":
    run_command(main)
