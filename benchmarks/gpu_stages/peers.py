"""Trainings to measure on one device: SimCLR and the viewmaker's game of ours, and lightly's SimCLR.

Each of ours is what the loop does: batches from the shards, views, forward, backward, step, with ResNet-18 in its small
form and channels_last. lightly's is the loop of its examples: its transform on PIL pictures in DataLoader workers, its
head, its loss, torchvision's ResNet-18, the same precision.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.flop_counter import FlopCounterMode
from torchvision.models import resnet18

from benchmarks.step_throughput import wait_for
from configs import simclr, viewmaker
from data_pipeline.loading.whole import read_all
from data_pipeline.storage.manifest import load_manifest
from trainer.build import build_training
from trainer.config import RunConfig
from trainer.data import open_stream
from trainer.profiling import Clock
from trainer.recorded_step import RecordedStep
from trainer.step import TrainingStep

OURS, GAME, TWO_PASSES, LIGHTLY = "SimCLR", "viewmaker, one pass", "viewmaker, two passes", "lightly's SimCLR"
CompileSetting: TypeAlias = bool | Literal["step", "both"]


@dataclass(frozen=True)
class Form:
    """How a peer trains.

    Attributes:
        train_dir: a train set of pictures of 32 x 32 without an online overlay.
        batch_size: the number of samples of a step.
        precision: "float32", or "bfloat16" for autocast.
        compile: as the setting `compile` of a run; lightly's peer does not use it.
        num_workers: the number of workers of lightly's DataLoader.
        overrides: further settings of our runs, as `--set` takes them.
    """

    train_dir: Path
    batch_size: int
    precision: str
    compile: CompileSetting
    num_workers: int
    overrides: tuple[str, ...] = ()


@dataclass
class Peer:
    """A training under measurement.

    `step` takes one step on the next batch, and `clock` knows how long it waited for the batch. `training_step` is the
    step of ours without its data.
    """

    step: Callable[[], None]
    clock: Clock | None = None
    training_step: TrainingStep | RecordedStep | None = None
    rates: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    flops: int = 0
    data_wait_fraction: float | None = None


def config_of(name: str, form: Form) -> RunConfig:
    recipe = simclr.digits() if name == OURS else viewmaker.digits()
    config = recipe.model_dump()
    config["data"] |= {"train_dir": str(form.train_dir), "overlay": "baked"}
    config |= {"global_batch_size": form.batch_size, "precision": form.precision, "channels_last": True}
    config["compile"] = form.compile
    if name == TWO_PASSES:
        config["adversary"]["update"] = "alternating"
    return RunConfig.parse(config, where="benchmark").override(form.overrides, where="benchmark")


def ours(name: str, form: Form, device: torch.device) -> Peer:
    config = config_of(name, form)
    training = build_training(config, num_samples=1, device=device)
    stream = open_stream(
        config.data, global_batch_size=config.global_batch_size, seed=0, end_step=1 << 20, device=device
    )
    clock = Clock(device=device)
    batches = clock.timed(stream)
    rates = training.learning_rates(0, num_steps=1)
    return Peer(lambda: void(training.step(next(batches), learning_rates=rates)), clock, training.step)


class Pictures(Dataset[list[Tensor]]):
    """The pictures of a dataset in memory, as PIL's; an item is lightly's two views.

    Each process reads them itself: sent to sixteen new workers, one after another, they would take minutes.
    """

    def __init__(self, train_dir: Path) -> None:
        from lightly.transforms.simclr_transform import SimCLRTransform

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


def lightlys(form: Form, device: torch.device) -> Peer:
    from lightly.loss import NTXentLoss  # here, because a machine without lightly can measure ours
    from lightly.models.modules import SimCLRProjectionHead

    backbone = resnet18()
    backbone.conv1, backbone.maxpool = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Identity()
    backbone.fc = nn.Identity()
    model = nn.Sequential(backbone, SimCLRProjectionHead(512, 512, 128)).to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    criterion = NTXentLoss(temperature=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9, weight_decay=1e-4)
    loader = DataLoader(
        Pictures(form.train_dir),
        batch_size=form.batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=form.num_workers,
        # On an H200, sixteen workers that were forked beside CUDA had not begun after a minute.
        multiprocessing_context="spawn" if form.num_workers and device.type == "cuda" else None,
        pin_memory=device.type == "cuda",
        persistent_workers=form.num_workers > 0,
    )

    def without_end() -> Iterator[list[Tensor]]:
        while True:
            yield from loader

    batches = without_end()
    autocast = torch.autocast(device.type, dtype=torch.bfloat16, enabled=form.precision == "bfloat16")

    def step() -> None:
        a, b = (view.to(device, non_blocking=True, memory_format=torch.channels_last) for view in next(batches))
        with autocast:
            z_a, z_b = model(a), model(b)
        loss = criterion(z_a.float(), z_b.float())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Peer(step)


def void(_: object) -> None:
    """What a step gives is not looked at."""


def matrix_rate(device: torch.device, precision: str, *, size: int | None = None) -> float:
    """Return the floating-point operations a second of a product of matrices, which are large if no size is given."""
    size = size or (8192 if device.type == "cuda" else 1024)
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    matrix = torch.randn(size, size, device=device, dtype=dtype)
    matrix @ matrix
    wait_for(device)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(4):
            matrix @ matrix
        wait_for(device)
        times.append(time.perf_counter() - start)
    return 4 * 2 * size**3 / min(times)


def count_flops(peer: Peer) -> int:
    """Return the floating-point operations of one step, which is taken."""
    with FlopCounterMode(display=False) as counter:
        peer.step()
    return int(counter.get_total_flops())


def measure(peer: Peer, *, num_steps: int, batch_size: int, device: torch.device) -> None:
    """One round."""
    if peer.clock is not None:
        peer.clock.read(num_samples=batch_size)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    wait_for(device)
    start = time.perf_counter()
    for _ in range(num_steps):
        peer.step()
    wait_for(device)
    peer.rates.append(num_steps * batch_size / (time.perf_counter() - start))
    if device.type == "cuda":
        peer.peak_bytes = torch.cuda.max_memory_allocated()
    if peer.clock is not None:
        peer.data_wait_fraction = peer.clock.read(num_samples=batch_size)["perf/data_wait_fraction"]
