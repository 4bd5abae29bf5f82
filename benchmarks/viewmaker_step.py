"""One training step of the viewmaker's game: both players in one pass, against the original's two passes.

    python -m benchmarks.viewmaker_step [--device cuda] [--batch-size B] [--rounds R] [--only PEER ...] [--out JSON]

ResNet-18 in its small form against the published viewmaker, on pictures of 32 x 32: a step of the recipe
`viewmaker:cifar10`. In the original's order the encoder learns from a pass of its own, and then the viewmaker from
another one on new views; while one learns, the other passes gradients through and collects none. That order is
measured twice: as our alternating game, and as written down here from torch's own layers, torchvision's ResNet and the
formula of the loss. All start from the same weights and noise, and the losses of the first step must agree. The peers
take turns; on a CPU step by step, with one thread and its processor time, on a GPU some steps at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torchvision.models import resnet18

from benchmarks import record
from benchmarks.record import Line, Measured, replayed
from configs import viewmaker
from data_pipeline.core.batch import Batch
from data_pipeline.core.counter_rng import DrawKeys
from data_pipeline.core.errors import run_command
from data_pipeline.core.sample import NO_LABEL
from tests.trainer.views.viewmaker_as_written import AsWritten
from trainer.build import build_training
from trainer.config import RunConfig
from trainer.modules import TrainedModules, build_modules
from trainer.objectives import PublishedNTXentConfig
from trainer.optim.optimizers import AdamConfig, SGDConfig
from trainer.views.viewmaker import Viewmaker

Step = Callable[[Batch], float]  # which returns the encoder's loss

ONE, TWO, WRITTEN = "ours, one pass", "ours, two passes", "as written, two passes"
FAST, TWO_FAST, WRITTEN_FAST = (f"{name}, bfloat16, channels last" for name in (ONE, TWO, WRITTEN))
PEERS = (ONE, TWO, WRITTEN, FAST, TWO_FAST, WRITTEN_FAST)
_NUM_STEPS_ON_A_GPU = 15  # of a round


def config_of(name: str, batch_size: int) -> RunConfig:
    config = viewmaker.cifar10().model_dump()
    is_fast = name in {FAST, TWO_FAST, WRITTEN_FAST}
    config |= {"global_batch_size": batch_size, "precision": "bfloat16" if is_fast else "float32"}
    config["adversary"]["update"] = "simultaneous" if name in {ONE, FAST} else "alternating"
    return RunConfig.parse(config, where="benchmark")


def our_step(config: RunConfig, device: torch.device) -> Step:
    training = build_training(config, num_samples=50_000, device=device)
    rates = training.learning_rates(0, num_steps=1)
    return lambda batch: training.step(batch, learning_rates=rates).metrics["train/loss"].item()


class StepAsWritten:
    """The original's order, with as little as it takes, on the device of `modules`."""

    def __init__(self, config: RunConfig, modules: TrainedModules) -> None:
        assert isinstance(modules.viewmaker, Viewmaker)
        assert isinstance(config.objective, PublishedNTXentConfig)
        self.config = config
        self.temperature = config.objective.temperature
        self.mean, self.std = (modules.encoder.mean_C11.clone(), modules.encoder.std_C11.clone())
        where: dict[str, Any] = {"device": self.mean.device, "memory_format": memory_format_of(config)}
        self.viewmaker = AsWritten(modules.viewmaker).to(**where)
        self.encoder = resnet_of(modules).to(**where)
        optimizers = config.engine_optimizers
        sgd, adam = optimizers["encoder"], optimizers["viewmaker"]
        assert isinstance(sgd, SGDConfig)
        assert isinstance(adam, AdamConfig)
        self.encoder_optimizer = torch.optim.SGD(
            self.encoder.parameters(), sgd.learning_rate, momentum=sgd.momentum, weight_decay=sgd.weight_decay
        )
        self.viewmaker_optimizer = torch.optim.Adam(self.viewmaker.parameters(), adam.learning_rate)

    def __call__(self, batch: Batch) -> float:
        return self.train(batch).item()

    def train(self, batch: Batch) -> Tensor:
        """Return the encoder's loss, without waiting for the device."""
        self.encoder.requires_grad_(True)
        self.viewmaker.requires_grad_(False)
        loss = self.loss(batch, first=0)
        learn(loss, self.encoder_optimizer)
        self.encoder.requires_grad_(False)
        self.viewmaker.requires_grad_(True)
        learn(-self.loss(batch, first=2), self.viewmaker_optimizer)
        return loss.detach()

    def loss(self, batch: Batch, *, first: int) -> Tensor:
        images_BCHW = (batch.inputs_a.float() / 255).to(memory_format=memory_format_of(self.config))
        embeddings = []
        with torch.autocast(self.mean.device.type, dtype=torch.bfloat16, enabled=self.config.precision == "bfloat16"):
            for view in (first, first + 1):
                keys = DrawKeys(seed=self.config.seed, epoch=batch.epoch, index_B=batch.index_B, view=view)
                embeddings.append(self.encoder((self.viewmaker(images_BCHW, keys) - self.mean) / self.std).float())
        u_ND = F.normalize(torch.cat(embeddings), dim=1)
        logits_BN = u_ND[: len(images_BCHW)] @ u_ND.T / self.temperature
        own_B = torch.arange(len(images_BCHW), device=images_BCHW.device)
        own_logit_B = logits_BN[own_B, own_B + len(images_BCHW)]
        return (logits_BN.exp().mean(1).log() - own_logit_B).mean()


def memory_format_of(config: RunConfig) -> torch.memory_format:
    return torch.channels_last if config.precision == "bfloat16" else torch.contiguous_format


def learn(loss: Tensor, optimizer: Optimizer) -> None:
    torch.autograd.backward(loss)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def resnet_of(modules: TrainedModules) -> nn.Module:
    """torchvision's ResNet-18 with the stem for small pictures and the encoder's weights."""
    encoder = modules.encoder
    network = resnet18(num_classes=modules.config.encoder.embedding_size)
    network.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    network.maxpool = nn.Identity()
    network.load_state_dict(
        {**encoder.trunk.state_dict(), **{f"fc.{name}": value for name, value in encoder.head.state_dict().items()}}
    )
    resnet: nn.Module = network
    return resnet


def build(name: str, batch_size: int, device: torch.device) -> Step:
    config = config_of(name, batch_size)
    if name not in {WRITTEN, WRITTEN_FAST}:
        return our_step(config, device)
    return StepAsWritten(config, build_modules(config).to(device, torch.float32))


def batch_of(batch_size: int) -> Batch:
    generator = torch.Generator().manual_seed(0)
    images_BCHW = torch.randint(0, 256, (batch_size, 3, 32, 32), generator=generator, dtype=torch.uint8)
    none_B = torch.full((batch_size,), NO_LABEL)
    return Batch(
        step=0,
        epoch=0,
        index_B=torch.arange(batch_size),
        inputs_a=images_BCHW,
        inputs_b=images_BCHW,
        masks_BHW=None,
        masks_b_BHW=None,
        labels={"base": none_B, "overlay": none_B},
    )


def check_equal(losses: Mapping[str, float], device: torch.device) -> None:
    """Raises `RuntimeError` unless all peers began with the same loss, as far as their precision goes."""
    reference, in_float32 = next(iter(losses.values())), 1e-4 if device.type == "cpu" else 1e-2  # which may be TF32
    for name, loss in losses.items():
        if not abs(loss - reference) <= (0.05 if "bfloat16" in name else in_float32):
            raise RuntimeError(f"the loss of the first step is {loss} {name}, and {reference} elsewhere")


def rate(step: Step, batch: Batch) -> float:
    """Pictures a second of processor time; on a GPU, a second."""
    if batch.index_B.device.type == "cpu":
        return len(batch.index_B) / record.cpu_seconds(partial(step, batch))
    step(batch)
    start = time.perf_counter()
    for _ in range(_NUM_STEPS_ON_A_GPU):
        step(batch)
    return _NUM_STEPS_ON_A_GPU * len(batch.index_B) / (time.perf_counter() - start)


def lines_of(rates: Mapping[str, Sequence[float]]) -> list[Line]:
    wanted = [
        (ONE, TWO, 1.25),
        (ONE, WRITTEN, 1.25),
        (FAST, WRITTEN, 3.0),
        (FAST, TWO, None),
        (FAST, WRITTEN_FAST, None),
    ]
    return [
        Line(
            f"steps a second: {name}, over {against}",
            "pictures/s",
            {each: replayed(rates[each]) for each in (against, name)},
            partial(ratio, name, against),
            "ratio",
            target,
        )
        for name, against, target in wanted
        if {name, against} <= rates.keys()
    ]


def ratio(name: str, against: str, measured: Measured) -> float:
    return measured[name] / measured[against]


def main() -> None:
    parser = record.benchmark_parser("a step of the viewmaker's game in one pass, against two passes", rounds=5)
    parser.add_argument("--batch-size", type=int, default=64, metavar="B")
    parser.add_argument("--only", nargs="+", choices=PEERS, default=PEERS, metavar="PEER", help="; ".join(PEERS))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args()
    before, device = record.on_one_core(packages=["torch", "torchvision"]), torch.device(args.device)
    batch = batch_of(args.batch_size).to(device)
    built = {name: build(name, args.batch_size, device) for name in args.only}
    check_equal({name: step(batch) for name, step in built.items()}, device)
    rates: dict[str, list[float]] = {name: [] for name in built}
    for _ in range(args.rounds):
        for name, step in built.items():
            rates[name].append(rate(step, batch))
    results = record.measure_each(lines_of(rates), num_rounds=args.rounds)
    settings = {"rounds": args.rounds, "batch_size": args.batch_size, "device": args.device}
    record.save(args.out, {**before, **settings, "results": results})


if __name__ == "__main__":
    run_command(main)
