"""Samples a second of SimCLR, from stored pictures to weights: our training, against lightly's.

    python -m benchmarks.lightly_simclr --train-dir DIR [--device cuda] [--batch-size B] [--rounds R] [--out JSON]

DIR holds pictures of 32 x 32 without an overlay. Ours is what the loop does: batches from the shards, views, step, of
the recipe `simclr:cifar10`. lightly's is the loop of its examples: its transform on PIL pictures in DataLoader workers,
its head, its loss, torchvision's ResNet-18 in its small form. Both use bfloat16 and channels_last on a GPU, and take
turns there, round by round.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightly.loss import NTXentLoss
from lightly.models.modules import SimCLRProjectionHead
from lightly.transforms.simclr_transform import SimCLRTransform
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchvision.models import resnet18

from benchmarks import record
from benchmarks.record import ratio_line
from configs import resolve_recipe
from data_pipeline.core.errors import run_command
from data_pipeline.core.system import num_cores
from data_pipeline.loading.whole import read_all
from data_pipeline.storage.manifest import load_manifest
from trainer.build import build_training
from trainer.data import open_stream

SECONDS = 2.0  # of a round
LIGHTLY = "lightly"


class Pictures(Dataset[list[Tensor]]):
    """The pictures of a dataset in memory, as PIL's; an item is lightly's two views.

    Each process reads them itself: sent to sixteen new workers, one after another, they would take minutes.
    """

    def __init__(self, train_dir: Path) -> None:
        self.train_dir = train_dir
        self.transform = SimCLRTransform(input_size=32, cj_strength=0.5, gaussian_blur=0.0)

    @functools.cached_property
    def pictures(self) -> list[Image.Image]:
        return [
            Image.fromarray(picture)
            for batch in read_all(self.train_dir, batch_size=1000)
            for picture in batch.inputs_a.permute(0, 2, 3, 1).numpy()
        ]

    def __len__(self) -> int:
        return load_manifest(self.train_dir).num_samples

    def __getitem__(self, index: int) -> list[Tensor]:
        views: Any = self.transform(self.pictures[index])
        return list(views)


def ours(train_dir: Path, *, batch_size: int, device: torch.device) -> Iterator[int]:
    """Train on a batch after the other, without an end; yield the samples of each step."""
    form = ["precision=bfloat16"] if device.type == "cuda" else []
    settings = [f"data.train_dir={train_dir}", "data.overlay=baked", f"global_batch_size={batch_size}", *form]
    config = resolve_recipe("simclr:cifar10", settings)
    training = build_training(config, num_samples=1, device=device)
    rates = training.learning_rates(0, num_steps=1)
    for batch in open_stream(config.data, global_batch_size=batch_size, seed=0, end_step=1 << 20, device=device):
        output = training.step(batch, learning_rates=rates)
        yield _counted(output.metrics["train/loss"], batch_size)


def lightlys(train_dir: Path, *, batch_size: int, device: torch.device) -> Iterator[int]:
    """Do as `ours`, with lightly."""
    is_cuda = device.type == "cuda"
    num_workers = num_cores() if is_cuda else 0
    backbone = resnet18()
    backbone.conv1, backbone.maxpool = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Identity()
    backbone.fc = nn.Identity()
    model = nn.Sequential(backbone, SimCLRProjectionHead(512, 512, 128))
    model.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    criterion = NTXentLoss(temperature=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9, weight_decay=1e-4)
    loader = DataLoader(
        Pictures(train_dir),
        batch_size=batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=num_workers,
        # On an H200, sixteen workers that were forked beside CUDA had not begun after a minute.
        multiprocessing_context="spawn" if num_workers else None,
        pin_memory=is_cuda,
        persistent_workers=num_workers > 0,
    )
    while True:
        for views in loader:
            a, b = (view.to(device, non_blocking=True, memory_format=torch.channels_last) for view in views)
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=is_cuda):
                z_a, z_b = model(a), model(b)
            loss = criterion(z_a.float(), z_b.float())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            yield _counted(loss, batch_size)


def _counted(loss: Tensor, batch_size: int) -> int:
    """Wait for the step, and return its number of samples."""
    loss.item()
    return batch_size


def main() -> None:
    parser = record.benchmark_parser(__doc__, rounds=5)
    parser.add_argument("--train-dir", type=Path, required=True, metavar="DIR")
    parser.add_argument("--batch-size", type=int, default=256, metavar="B")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    arguments = parser.parse_args()
    form: dict[str, Any] = {"batch_size": arguments.batch_size, "device": torch.device(arguments.device)}
    steps = {"ours": ours(arguments.train_dir, **form), LIGHTLY: lightlys(arguments.train_dir, **form)}
    peers = {name: functools.partial(record.rate, each, seconds=SECONDS) for name, each in steps.items()}
    line = ratio_line("SimCLR with ResNet-18, from stored pictures", peers, against=LIGHTLY, target=5.0)
    results = record.measure_each([line], num_rounds=arguments.rounds)
    settings = {"device": arguments.device, "batch_size": arguments.batch_size}
    record.save(arguments.out, {**record.circumstances(packages=["torch", "lightly"]), **settings, "results": results})


if __name__ == "__main__":
    run_command(main)
