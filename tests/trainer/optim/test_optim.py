"""Optimizers against the libraries started the usual way;
rates as functions of the step, against torch's own scheduler.
"""

from __future__ import annotations

import itertools
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from data_pipeline.core.errors import UserError
from trainer.distributed.engines.ddp_engine import DDPEngine
from trainer.optim import skipping
from trainer.optim.optimizers import (
    AdamConfig,
    AdamWConfig,
    LARSConfig,
    OptimizerConfig,
    ScheduleConfig,
    SGDConfig,
    build_optimizer,
    learning_rate_at,
    scaled_learning_rate,
)

timm_optim = pytest.importorskip("timm.optim")

RATES = (0.1, 0.2, 0.05, 0.05, 0.3)
# Decays and thresholds large enough that leaving one out, or putting it elsewhere, shows.
CONFIGS: dict[str, OptimizerConfig] = {
    "sgd": SGDConfig(weight_decay=0.1),
    "sgd, matrices": SGDConfig(weight_decay=0.1, decay="matrices"),
    "sgd without momentum": SGDConfig(momentum=0.0),
    "adam": AdamConfig(weight_decay=0.1, betas=(0.8, 0.9)),
    "adam, matrices": AdamConfig(weight_decay=0.1, decay="matrices"),
    "adamw": AdamWConfig(weight_decay=0.1, epsilon=1e-3),
    "adamw, all": AdamWConfig(weight_decay=0.1, decay="all"),
    "lars": LARSConfig(weight_decay=0.1, trust=0.5),
    "lars, all": LARSConfig(weight_decay=0.1, trust=0.5, decay="all"),
}
every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
EACH_STATE = ("sgd", "sgd without momentum", "adam", "adamw", "lars")
every_state = pytest.mark.parametrize("config", [CONFIGS[name] for name in EACH_STATE], ids=EACH_STATE)


def small_net(*, seed: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A convolution, a norm and a matrix with its bias, which starts with a length of zero, a bad divisor."""
    net = nn.Sequential(nn.Conv2d(1, 2, 2, bias=False), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3)).to(dtype)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw))
        for linear in (module for module in net if isinstance(module, nn.Linear)):
            linear.bias.zero_()
    return net


def gradients(net: nn.Module, step: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(100 + step)
    return [torch.randn(parameter.shape, generator=draw).to(parameter.dtype) for parameter in net.parameters()]


def take_steps(optimizer: torch.optim.Optimizer, net: nn.Module, rates: tuple[float, ...], *, first: int = 0) -> None:
    for step, rate in enumerate(rates, first):
        for group in optimizer.param_groups:
            group["lr"] = rate
        for parameter, gradient in zip(net.parameters(), gradients(net, step), strict=True):
            parameter.grad = gradient
        optimizer.step()


def usual_groups(net: nn.Module, config: OptimizerConfig) -> Any:
    if config.decay == "all":
        return net.parameters()
    return [
        {"params": [p for p in net.parameters() if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in net.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]


def the_usual_way(config: OptimizerConfig, net: nn.Module) -> torch.optim.Optimizer:
    groups, decay = usual_groups(net, config), config.weight_decay
    match config:
        case SGDConfig():
            return torch.optim.SGD(groups, lr=1, momentum=config.momentum, weight_decay=decay)
        case LARSConfig():
            usual: torch.optim.Optimizer = timm_optim.Lars(
                groups, lr=1, momentum=0.9, weight_decay=decay, trust_coeff=config.trust
            )
            return usual
        case _:
            kind = torch.optim.Adam if isinstance(config, AdamConfig) else torch.optim.AdamW
            return kind(groups, lr=1, betas=config.betas, eps=config.epsilon, weight_decay=decay)


@every_config
def test_bits_are_those_of_the_library_started_the_usual_way(config: OptimizerConfig) -> None:
    ours, theirs = small_net(seed=0), small_net(seed=0)
    usual, optimizer = the_usual_way(config, theirs), build_optimizer(config, ours)
    for step, rate in enumerate(RATES):
        take_steps(optimizer, ours, (rate,), first=step)
        take_steps(usual, theirs, (rate,), first=step)
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(mine, other)
            for name, value in usual.state[other].items():
                assert torch.equal(optimizer.state[mine][name], value)
                assert optimizer.state[mine][name].dtype == value.dtype


@pytest.mark.parametrize("weight_decay", [0.1, 0.0])
@pytest.mark.parametrize("decay", ["all", "matrices"])
def test_lars_equals_lightlys(decay: Any, weight_decay: float) -> None:
    lightly_lars = pytest.importorskip("lightly.utils.lars")  # here, because a GPU may run this file without lightly
    ours, theirs = small_net(seed=0, dtype=torch.float64), small_net(seed=0, dtype=torch.float64)
    config = LARSConfig(weight_decay=weight_decay, trust=0.02, decay=decay)
    # Theirs adapts no rate where the decay is zero.
    groups = usual_groups(theirs, config.model_copy(update={"weight_decay": weight_decay or 1e-30}))
    peer = lightly_lars.LARS(groups, lr=1.0, momentum=0.9, weight_decay=weight_decay or 1e-30, trust_coefficient=0.02)
    take_steps(peer, theirs, RATES)
    take_steps(build_optimizer(config, ours), ours, RATES)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


@every_state
def test_the_state_is_there_before_the_first_step_and_keeps_its_names(config: OptimizerConfig) -> None:
    engine = DDPEngine(small_net(seed=0), optimizer=config)
    before = {name: value.clone() for name, value in engine.optimizer_state().items()}
    assert not any(value.any() for value in before.values())
    for parameter, gradient in zip(engine.module.parameters(), gradients(engine.module, 0), strict=True):
        parameter.grad = gradient
    engine.step(learning_rate=0.1)
    after = engine.optimizer_state()
    assert before.keys() == after.keys()
    assert all((before[name].shape, before[name].dtype) == (after[name].shape, after[name].dtype) for name in before)
    has_momentum = not (isinstance(config, SGDConfig) and config.momentum == 0)
    assert bool(after) == has_momentum
    assert all(value.any() for value in after.values())


@pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))],
    ids=["cpu", "gpu"],
)
@every_state
def test_a_skipped_step_leaves_no_trace(config: OptimizerConfig, device: str) -> None:
    engine = DDPEngine(small_net(seed=0).to(device), optimizer=config)
    parameters = list(engine.module.parameters())

    def step(number: int, skip: bool, spoil: float = 1.0) -> dict[str, Tensor]:
        for parameter, gradient in zip(parameters, gradients(engine.module, number), strict=True):
            parameter.grad = gradient.to(device) * spoil
        engine.step(learning_rate=0.1, skip=torch.tensor(skip, device=device))
        assert all(parameter.grad is None for parameter in parameters)
        return {name: value.clone() for name, value in (engine.module_state() | engine.optimizer_state()).items()}

    before = step(0, skip=False)
    after = step(1, skip=True, spoil=math.nan)
    assert all(torch.equal(after[name], before[name]) for name in before)
    goes_on = step(1, skip=False)
    assert not any(
        torch.equal(goes_on[name], before[name]) for name in before if "running" not in name and "num" not in name
    )


@pytest.mark.parametrize("config", [CONFIGS["lars"], CONFIGS["lars, all"]], ids=["lars", "lars, all"])
def test_a_step_that_is_taken_back_was_never_taken(config: OptimizerConfig) -> None:
    """This is the path of a GPU, where the host does not know whether the step stays."""

    def states(skips: list[bool]) -> list[Tensor]:
        net = small_net(seed=0)
        optimizer = build_optimizer(config, net)
        tensors = [t for p in net.parameters() for t in (p, *optimizer.state[p].values())]
        number = 0
        for skip in skips:
            for parameter, gradient in zip(net.parameters(), gradients(net, number), strict=True):
                parameter.grad = gradient * (math.nan if skip else 1.0)
            skipping._step_and_undo(optimizer.step, tensors, torch.tensor(skip))
            number += not skip
        return [tensor.detach() for tensor in tensors]

    for found, expected in zip(states([True, False, True, False]), states([False, False]), strict=True):
        assert torch.equal(found, expected)


@every_state
def test_a_run_taken_up_by_the_names_of_its_parameters_ends_in_the_same_bits(
    config: OptimizerConfig, tmp_path: Path
) -> None:
    def train(engine: DDPEngine, steps: range) -> None:
        for step in steps:
            for parameter, gradient in zip(engine.module.parameters(), gradients(engine.module, step), strict=True):
                parameter.grad = gradient
            engine.step(learning_rate=RATES[step])

    engine = DDPEngine(small_net(seed=0), optimizer=config)
    train(engine, range(3))
    safetensors.torch.save_file(engine.module_state(), tmp_path / "module.safetensors")
    safetensors.torch.save_file(engine.optimizer_state(), tmp_path / "optimizer.safetensors")
    again = DDPEngine(small_net(seed=1), optimizer=config)
    train(again, range(1))  # so that nothing of a later life remains either
    again.load(
        safetensors.torch.load_file(tmp_path / "module.safetensors"),
        safetensors.torch.load_file(tmp_path / "optimizer.safetensors"),
    )
    for each in (engine, again):
        train(each, range(3, 5))
    for state, expected in (
        (again.module_state(), engine.module_state()),
        (again.optimizer_state(), engine.optimizer_state()),
    ):
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[name], expected[name]) for name in state)


def test_without_timm_the_config_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(UserError, match=r"recipe: .*needs the package timm; .* pip install -e '.\[timm\]'"):
        LARSConfig.parse({}, where="recipe")
    SGDConfig.parse({}, where="recipe")


def rates(config: OptimizerConfig, num_steps: int, *, global_batch_size: int = 256) -> list[float]:
    return [
        learning_rate_at(config, step=step, num_steps=num_steps, global_batch_size=global_batch_size)
        for step in range(num_steps)
    ]


@pytest.mark.parametrize("kind", ["cosine", "linear"])
def test_a_schedule_equals_torchs(kind: Any) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.06)
    schedulers: dict[str, torch.optim.lr_scheduler.LRScheduler] = {
        "cosine": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=97),
        "linear": torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1, end_factor=0, total_iters=97),
    }
    for rate in rates(SGDConfig(learning_rate=0.06, schedule=ScheduleConfig(kind=kind)), 97):
        assert rate == pytest.approx(schedulers[kind].get_last_lr()[0], rel=1e-9)
        optimizer.step()
        schedulers[kind].step()


def test_warm_up_rises_to_the_rate_and_the_cosine_ends_near_zero() -> None:
    config = AdamConfig(learning_rate=1.0, schedule=ScheduleConfig(kind="cosine", warmup_fraction=0.1))
    of_step = rates(config, 100)
    assert of_step[:10] == pytest.approx([0.1 * step for step in range(1, 11)])
    assert of_step[10] == 1.0
    assert all(later < earlier for earlier, later in itertools.pairwise(of_step[10:]))
    assert of_step[-1] < 1e-3


def test_the_rate_grows_with_the_batch_as_published() -> None:
    # Chen et al. 2020: 0.3 x batch / 256, and 0.075 x the square root of the batch.
    linear = LARSConfig(learning_rate=0.3, scaling="linear")
    root = LARSConfig(learning_rate=0.075, scaling="square_root", reference_batch_size=1)
    for global_batch_size in (256, 1024, 4096, 8192):
        of_batch = [scaled_learning_rate(config, global_batch_size=global_batch_size) for config in (linear, root)]
        assert of_batch == pytest.approx([0.3 * global_batch_size / 256, 0.075 * global_batch_size**0.5])
    assert scaled_learning_rate(SGDConfig(learning_rate=0.3), global_batch_size=4096) == 0.3


@pytest.mark.parametrize("kind", ["constant", "cosine", "linear"])
def test_every_step_of_a_schedule_is_scaled_alike(kind: Any) -> None:
    schedule = ScheduleConfig(kind=kind, warmup_fraction=0.2)
    config = SGDConfig(schedule=schedule, scaling="linear", reference_batch_size=64)
    assert rates(config, 20, global_batch_size=256) == pytest.approx(
        [4 * rate for rate in rates(config, 20, global_batch_size=64)]
    )
