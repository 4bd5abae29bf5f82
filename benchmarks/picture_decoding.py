"""Two crops of 224 pixels from JPEG files, against WebDataset with Pillow and against torchvision's decoder.

    python -m benchmarks.picture_decoding [--pictures DIR] [--num N] [--rounds R] [--seconds T] [--out JSON]

All peers read the same tar with WebDataset. "webdataset, PIL" decodes with Pillow and crops with torchvision's
transforms; "torchvision" is `decode_jpeg` and the v2 transforms on tensors. The boxes of all follow one law, and the
views are stacked, uint8. One thread, and its processor time.

The pictures are parts of the two photographs that scikit-learn ships, or of those in DIR, stretched to the sizes of the
line and stored with 4:2:0 chroma and quality 90. Larger files of one size take all peers longer to decode: some lines
have quality 97, with which a file of 500x400 is about as large as the average of ImageNet.
"""

from __future__ import annotations

import io
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import webdataset
from PIL import Image
from sklearn.datasets import load_sample_images
from torch import Tensor
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms import v2

from benchmarks import record
from benchmarks.record import Line, Peers, rate, ratio_line
from benchmarks.webdataset_peer import epoch_after_epoch
from data_pipeline.core.counter_rng import DrawKeys
from data_pipeline.core.errors import run_command
from data_pipeline.core.random_crop import Crop, CropLaw
from data_pipeline.loading.decode import draw_crops
from data_pipeline.loading.picture_decode import decode_crops, picture_size

SIZE = 224
BATCH_SIZE = 64
PACKAGES = ("torch", "torchvision", "webdataset", "pillow", "simplejpeg", "numpy")
MANY_SIZES = ((96, 128), (333, 500), (500, 375), (480, 640), (1024, 683), (1200, 1600), (3000, 4000))


_LAW = CropLaw((0.08, 1.0), (3 / 4, 4 / 3), purpose=0)
_EPOCHS = count()  # new boxes in every epoch


def photographs(folder: Path | None) -> list[Image.Image]:
    if folder is None:
        return [Image.fromarray(pixels) for pixels in load_sample_images().images]
    return [Image.open(path).convert("RGB") for path in sorted(folder.iterdir())]


def jpeg_files(
    photos: Sequence[Image.Image], *, height: int, width: int, num: int, quality: int = 90
) -> Iterator[bytes]:
    """Yield `num` JPEG files: parts of the photographs, stretched to a size."""
    rng = np.random.default_rng(0)
    for number in range(num):
        photo = photos[number % len(photos)]
        share = rng.uniform(0.5, 1)
        left, top = rng.uniform(0, 1 - share, 2)
        box = (left * photo.width, top * photo.height, (left + share) * photo.width, (top + share) * photo.height)
        stretched = photo.resize((width, height), Image.Resampling.LANCZOS, box=box)
        file = io.BytesIO()
        stretched.save(file, "JPEG", quality=quality, subsampling=2)
        yield file.getvalue()


def write_tar(path: Path, files: Iterable[bytes]) -> float:
    """Write a tar of JPEG files; return their mean kilobytes."""
    sizes = []
    with tarfile.open(path, "w") as tar:
        for number, file in enumerate(files):
            member = tarfile.TarInfo(f"{number:06}.jpg")
            member.size = len(file)
            sizes.append(member.size)
            tar.addfile(member, io.BytesIO(file))
    return float(np.mean(sizes)) / 1e3


def samples(tar: Path) -> Any:
    return webdataset.WebDataset(str(tar), shardshuffle=False, empty_check=False)


def by_pillow(tar: Path) -> Iterator[int]:
    view = v2.Compose([v2.RandomResizedCrop(SIZE), v2.PILToTensor()])
    for (picture,) in samples(tar).decode("pil").to_tuple("jpg"):
        yield len(torch.stack([view(picture), view(picture)])) // 2


def by_torchvision(tar: Path) -> Iterator[int]:
    view = v2.RandomResizedCrop(SIZE)
    for (data,) in samples(tar).to_tuple("jpg"):
        picture = decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8), ImageReadMode.RGB)
        yield len(torch.stack([view(picture), view(picture)])) // 2


def views_of(file: memoryview, crops: Sequence[Crop]) -> Tensor:
    return decode_crops(file, crops, size=SIZE)


def crops_of(files: Sequence[memoryview], *, epoch: int = 0) -> list[list[Crop]]:
    """Draw two boxes for each file."""
    sizes_B2 = torch.tensor([picture_size(file) for file in files])
    index_B = torch.arange(len(files))
    of_first, of_second = (DrawKeys(seed=0, epoch=epoch, index_B=index_B, view=view) for view in (0, 1))
    both = draw_crops(_LAW, (of_first, of_second), sizes_B2)
    return [list(pair) for pair in zip(*both, strict=True)]


def ours(tar: Path) -> Iterator[int]:
    epoch = next(_EPOCHS)
    files = (memoryview(data) for (data,) in samples(tar).to_tuple("jpg"))
    while batch := list(islice(files, BATCH_SIZE)):
        for file, crops in zip(batch, crops_of(batch, epoch=epoch), strict=True):
            yield len(views_of(file, crops)) // 2


def one_core_peers(tar: Path, *, seconds: float) -> Peers:
    def measurement(epoch: Callable[[Path], Iterator[int]]) -> Callable[[], float]:
        return lambda: rate(epoch_after_epoch(partial(epoch, tar)), seconds=seconds, clock=time.process_time)

    peers = {"webdataset, PIL": by_pillow, "torchvision": by_torchvision, "ours": ours}
    return {name: measurement(epoch) for name, epoch in peers.items()}


def lines(work: Path, photos: Sequence[Image.Image], *, num: int, seconds: float) -> Iterator[Line]:
    def tar_and_title(height: int, width: int, quality: int) -> tuple[Path, str]:
        tar = work / f"{width}x{height}_{quality}.tar"
        num_here = max(1, num * 400 * 500 // max(400 * 500, height * width))
        kilobytes = write_tar(tar, jpeg_files(photos, height=height, width=width, quality=quality, num=num_here))
        return tar, f"JPEG of {width}x{height} ({kilobytes:.0f} kB) to two crops of {SIZE}"

    for quality, targets in ((90, (2, 1.3)), (97, (None, None))):
        tar, title = tar_and_title(400, 500, quality)
        for against, target in zip(("webdataset, PIL", "torchvision"), targets, strict=True):
            yield ratio_line(f"{title}, one core", one_core_peers(tar, seconds=seconds), against=against, target=target)
    for height, width in MANY_SIZES:
        tar, title = tar_and_title(height, width, 90)
        yield ratio_line(f"{title}, one core", one_core_peers(tar, seconds=seconds), against="torchvision")


def main() -> None:
    parser = record.benchmark_parser("JPEG files to crops, against WebDataset, Pillow and torchvision", rounds=5)
    parser.add_argument("--pictures", type=Path, metavar="DIR", help="photographs; default: those of scikit-learn")
    parser.add_argument("--num", type=int, default=128, metavar="N", help="pictures of 500x400")
    parser.add_argument("--seconds", type=float, default=2.0, metavar="T", help="length of one measurement")
    args = parser.parse_args()
    before = record.on_one_core(packages=PACKAGES)
    with tempfile.TemporaryDirectory(prefix="picture_decoding-") as name:
        results = record.measure_each(
            lines(Path(name), photographs(args.pictures), num=args.num, seconds=args.seconds), num_rounds=args.rounds
        )
    settings = {"rounds": args.rounds, "seconds_a_measurement": args.seconds, "num": args.num}
    record.save(args.out, {**before, **settings, "lines": results})


if __name__ == "__main__":
    run_command(main)
