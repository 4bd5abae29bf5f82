"""Expert views of pictures against torchvision's transforms, in one process and one run.

    python -m benchmarks.views [--batch-size B] [--rounds R] [--sizes S ...] [--out JSON]

The peers are torchvision's transforms on PIL pictures (what the original code did) and on tensors, one picture after
the other. torchvision can also take a whole batch, but then draws once for all of it, which is no substitute; it is
timed to show what the drawing for each picture costs. On pictures of more than 32 pixels the blur is SimCLR's, and a
batch has as many values as one of 32 pixels, but at least 16 pictures. One thread, and its processor time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as tv

from benchmarks import record
from benchmarks.record import Line, ratio_line
from data_pipeline.core.counter_rng import DrawKeys
from data_pipeline.core.errors import run_command
from trainer.views.expert_image import ExpertImage, ExpertImageConfig


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


def lines(sizes: Sequence[int], batch_size: int) -> Iterator[Line]:
    """Yield a comparison for each size of pictures: views of pictures a second of processor time."""
    for size in sizes:
        num = max(16, batch_size * 32**2 // size**2)
        pictures_BCHW = torch.rand(num, 3, size, size, generator=torch.Generator().manual_seed(0))
        peers = {name: partial(rate, call, num) for name, call in expert_peers(pictures_BCHW).items()}
        yield ratio_line(f"two expert views at {size} pixels, one core", peers, against="torchvision on PIL")


def rate(call: Callable[[], object], num_pictures: int) -> float:
    return num_pictures / record.cpu_seconds(call)


def main() -> None:
    parser = record.benchmark_parser("our views of pictures against torchvision's", rounds=7)
    parser.add_argument("--batch-size", type=int, default=256, metavar="B")
    parser.add_argument("--sizes", type=int, nargs="+", default=[32, 96, 224], metavar="S", help="pixels of a side")
    args = parser.parse_args()
    before = record.on_one_core(packages=["torch", "torchvision", "pillow"])
    results = record.measure_each(lines(args.sizes, args.batch_size), num_rounds=args.rounds)
    record.save(args.out, {**before, "rounds": args.rounds, "batch_size": args.batch_size, "lines": results})


if __name__ == "__main__":
    run_command(main)
