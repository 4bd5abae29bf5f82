"""Whole training steps against loops over torch's own layers and optimizers, from the same weights, in float64.

The game of Tamkin et al. (2022) in both orders over four steps, and the four methods of Huang et al. (2023) over two.
The viewmaker is a network as written from the paper, and losses are loops over anchors and candidates.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision.models import ResNet
from torchvision.models.resnet import BasicBlock

from configs import huang, viewmaker
from data_pipeline.core.batch import Batch
from data_pipeline.core.counter_rng import DrawKeys
from tests.trainer.objectives import loops, test_moco, test_simsiam
from tests.trainer.views.viewmaker_as_written import AsWritten
from trainer.build import build_training
from trainer.config import RunConfig
from trainer.models.batch_norm import share_running_statistics
from trainer.models.encoder import Encoder, ResNetConfig
from trainer.modules import TrainedModules, build_modules
from trainer.objectives import Objective, SimSiamConfig
from trainer.recorded_step import RecordedStep
from trainer.step import TrainingStep
from trainer.views.viewmaker import Viewmaker, ViewmakerConfig

BATCH_SIZE, EMBEDDING_SIZE, WIDTH = 6, 8, 4
CPU = torch.device("cpu")


def small(config: RunConfig, **changes: Any) -> RunConfig:
    """Return the recipe with a tiny network, in float64; losses, optimizers and order are the recipe's."""
    encoder = config.encoder
    assert isinstance(encoder, ResNetConfig)
    assert encoder.kind == "resnet18_small"
    head = encoder.head.model_copy(update={"hidden_sizes": tuple(8 for _ in encoder.head.hidden_sizes)})
    tiny = ResNetConfig(
        kind="resnet10",
        width=WIDTH,
        embedding_size=EMBEDDING_SIZE,
        head=head,
        mean=encoder.mean,
        std=encoder.std,
        stem_relu=encoder.stem_relu,
    )
    settings = {"encoder": tiny, "precision": "float64", "global_batch_size": BATCH_SIZE} | changes
    return RunConfig.model_validate(config.model_dump() | settings)


def batches(num: int) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(0)
    for step in range(num):
        images = torch.randint(256, (BATCH_SIZE, 3, 16, 16), generator=generator, dtype=torch.uint8)
        index_B = torch.arange(BATCH_SIZE) + BATCH_SIZE * step
        yield Batch(step, 0, index_B, images, images, None, None, {})


def ours(config: RunConfig) -> tuple[TrainedModules, Objective, TrainingStep | RecordedStep]:
    training = build_training(config, num_samples=1, device=CPU)
    return training.modules, training.objective, training.step


class AsTorchHasIt(nn.Module):
    """torchvision's ResNet of one block a stage, narrow and with the stem for small pictures, and a head behind it."""

    def __init__(self, encoder: Encoder, config: RunConfig) -> None:
        super().__init__()
        net: Any = ResNet(BasicBlock, [1, 1, 1, 1])
        net.inplanes = WIDTH
        net.conv1, net.bn1, net.maxpool = (
            nn.Conv2d(3, WIDTH, 3, padding=1, bias=False),
            nn.BatchNorm2d(WIDTH),
            nn.Identity(),
        )
        for stage in range(4):
            layer = net._make_layer(BasicBlock, WIDTH << stage, 1, stride=2 if stage else 1)
            setattr(net, f"layer{stage + 1}", layer)
        net.fc = nn.Identity()
        self.trunk = net.double()
        self.trunk.load_state_dict(encoder.trunk.state_dict())
        if not getattr(config.encoder, "stem_relu", True):
            self.trunk.relu = nn.Identity()
        self.head = plain(encoder.head)
        self.mean, self.std = encoder.mean_C11.clone(), encoder.std_C11.clone()

    def forward(self, views: Tensor) -> Tensor:
        embeddings: Tensor = self.head(self.trunk((views - self.mean) / self.std))
        return embeddings


def plain(head: nn.Module) -> nn.Module:
    """The same layers of torch's own classes."""
    layers = list(head) if isinstance(head, nn.Sequential) else [head]
    own: list[nn.Module] = []
    for layer in layers:
        if isinstance(layer, nn.Linear):
            own.append(nn.Linear(layer.in_features, layer.out_features))
        elif isinstance(layer, nn.ReLU):
            own.append(nn.ReLU())
        else:
            own.append(nn.BatchNorm1d(int(layer.num_features)))  # type: ignore[arg-type]
    made = nn.Sequential(*own).double()
    made.load_state_dict(nn.Sequential(*layers).state_dict())
    return made


def sgd(modules: list[nn.Module], config: RunConfig) -> torch.optim.SGD:
    """Return the published optimizer, with the recipe's numbers."""
    settings: Any = config.optimizer
    parameters = [parameter for module in modules for parameter in module.parameters()]
    return torch.optim.SGD(
        parameters, settings.learning_rate, momentum=settings.momentum, weight_decay=settings.weight_decay
    )


def draw_keys(config: RunConfig, batch: Batch, view: int) -> DrawKeys:
    return DrawKeys(seed=config.seed, epoch=batch.epoch, index_B=batch.index_B, view=view)


def assert_same_encoder(encoder: Encoder, written: AsTorchHasIt, *, atol: float) -> None:
    """Weights and running statistics."""
    share_running_statistics(encoder)
    theirs = written.trunk.state_dict()
    for name, value in encoder.trunk.state_dict().items():
        torch.testing.assert_close(value, theirs[name], rtol=0, atol=atol)
    for value, their in zip(encoder.head.state_dict().values(), written.head.state_dict().values(), strict=True):
        torch.testing.assert_close(value, their, rtol=0, atol=atol)


@pytest.mark.slow
@pytest.mark.parametrize(("update", "weight"), [("alternating", 1.0), ("simultaneous", 1.0), ("alternating", 0.5)])
def test_four_steps_of_a_game_are_those_of_the_loop_as_written(update: str, weight: float) -> None:
    """Alternating is the published order: the encoder steps, then the viewmaker, on new views and a pass of its own.

    Each view is encoded by itself, and the running statistics move in both passes. Simultaneous: one pass for both.
    """
    recipe = viewmaker.cifar10()
    assert recipe.adversary is not None
    config = small(
        recipe,
        views=ViewmakerConfig(base_width=4, clamp=False),
        adversary=recipe.adversary.model_copy(update={"update": update, "weight": weight}),
    )
    modules, _, step = ours(config)
    assert isinstance(modules.viewmaker, Viewmaker)
    written, their_viewmaker = AsTorchHasIt(modules.encoder, config), AsWritten(modules.viewmaker)
    encoder_optimizer = sgd([written], config)
    viewmaker_optimizer = torch.optim.Adam(their_viewmaker.parameters(), lr=1e-3)
    rates = {"encoder": 0.03, "viewmaker": 1e-3}

    def loss_of(batch: Batch, first: int) -> Tensor:
        images = batch.inputs_a.double() / 255
        z_a, z_b = (written(their_viewmaker(images, draw_keys(config, batch, view))) for view in (first, first + 1))
        return loops.published_nt_xent(z_a, z_b, temperature=0.07)

    for batch in batches(4):
        output = step(batch, learning_rates=rates)
        loss = loss_of(batch, 0)
        torch.testing.assert_close(output.metrics["train/loss"], loss.detach(), rtol=0, atol=1e-11)
        encoder_gradients = torch.autograd.grad(loss, list(written.parameters()), retain_graph=True)
        if update == "alternating":
            take_step(encoder_optimizer, written, encoder_gradients)
            loss = loss_of(batch, 2)
        viewmaker_gradients = torch.autograd.grad(-weight * loss, list(their_viewmaker.parameters()))
        if update == "simultaneous":
            take_step(encoder_optimizer, written, encoder_gradients)
        take_step(viewmaker_optimizer, their_viewmaker, viewmaker_gradients)
        torch.testing.assert_close(output.metrics["train/viewmaker_loss"], -weight * loss.detach(), rtol=0, atol=1e-11)
    assert_same_encoder(modules.encoder, written, atol=1e-11)
    images, keys = batch.inputs_a.double() / 255, draw_keys(config, batch, 7)
    before = AsWritten(build_modules(config).to(CPU, torch.float64).view_policy)(images, keys)  # type: ignore[arg-type]
    views = modules.viewmaker(images, keys)
    torch.testing.assert_close(views, their_viewmaker(images, keys), rtol=0, atol=1e-11)
    assert (views - before).abs().max() > 1e-4


def take_step(optimizer: torch.optim.Optimizer, module: nn.Module, gradients: tuple[Tensor, ...]) -> None:
    for parameter, gradient in zip(module.parameters(), gradients, strict=True):
        parameter.grad = gradient
    optimizer.step()
    optimizer.zero_grad()


Loss = Callable[[AsTorchHasIt, Tensor, Tensor], Tensor]


def simclr_by_loop(objective: Objective) -> tuple[Loss, list[nn.Module]]:
    return lambda net, a, b: loops.nt_xent(net(a), net(b), temperature=0.5), []


def barlow_by_loop(objective: Objective) -> tuple[Loss, list[nn.Module]]:
    return lambda net, a, b: loops.barlow_twins(net(a), net(b), off_diagonal_weight=5e-3, unbiased=True), []


def simsiam_by_loop(objective: Any) -> tuple[Loss, list[nn.Module]]:
    predictor = plain(objective.predictor)

    def loss(net: AsTorchHasIt, a: Tensor, b: Tensor) -> Tensor:
        z_a, z_b = net(a), net(b)
        return test_simsiam.by_loop(predictor(z_a), predictor(z_b), z_a, z_b)

    return loss, [predictor]


def moco_by_loop(objective: Any) -> tuple[Loss, list[nn.Module]]:
    """The key encoder moves before it encodes the keys of a view; used keys join the end of the queue."""
    state: dict[str, Any] = {"queue": objective.queue_QD.clone(), "keys": None}

    def loss(net: AsTorchHasIt, a: Tensor, b: Tensor) -> Tensor:
        state["keys"] = state["keys"] or copy.deepcopy(net)
        losses = []
        for z, other in zip([net(a), net(b)], [b, a], strict=True):
            with torch.no_grad():
                for key_parameter, parameter in zip(state["keys"].parameters(), net.parameters(), strict=True):
                    key_parameter.copy_(0.99 * key_parameter + 0.01 * parameter)
                keys = state["keys"](other)
            losses.append(test_moco.loss_by_loop(z, keys, state["queue"], 0.1))
            unit = keys / keys.norm(dim=1, keepdim=True)
            state["queue"] = torch.cat([state["queue"], unit])[len(unit) :]
        return (losses[0] + losses[1]) / 2

    return loss, []


@pytest.mark.parametrize(
    ("recipe", "by_loop", "learning_rate"),
    [
        (huang.simclr, simclr_by_loop, 0.06),
        (huang.barlow_twins, barlow_by_loop, 0.11),
        (huang.simsiam, simsiam_by_loop, 0.05),
        (huang.moco, moco_by_loop, 0.08),
    ],
    ids=["simclr", "barlow twins", "simsiam", "moco"],
)
def test_two_steps_of_a_method_of_huang_are_those_of_the_loop_as_written(
    recipe: Callable[[], RunConfig], by_loop: Callable[[Any], tuple[Loss, list[nn.Module]]], learning_rate: float
) -> None:
    """MoCo has one batch norm over the batch here; its split batch norm, with the shuffle, has tests of its own."""
    changes: dict[str, Any] = {}
    published = recipe()
    if published.objective.kind == "moco":
        changes["objective"] = published.objective.model_copy(update={"queue_size": 4 * BATCH_SIZE})
    if isinstance(published.objective, SimSiamConfig):
        predictor = published.objective.predictor.model_copy(update={"hidden_sizes": (8,)})
        changes["objective"] = published.objective.model_copy(update={"predictor": predictor})
    config = small(published, **changes)
    assert config.optimizer.learning_rate == learning_rate
    modules, objective, step = ours(config)
    written = AsTorchHasIt(modules.encoder, config)
    loss_of, others = by_loop(objective)
    optimizer = sgd([written, *others], config)
    for batch in batches(2):
        rates = dict.fromkeys(config.engine_optimizers, learning_rate)
        output = step(batch, learning_rates=rates)
        images = batch.inputs_a.float() / 255
        a, b = (modules.view_policy(images, draw_keys(config, batch, view)).double() for view in (0, 1))
        loss = loss_of(written, a, b)
        torch.testing.assert_close(output.metrics["train/loss"], loss.detach(), rtol=1e-10, atol=1e-10)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
    assert_same_encoder(modules.encoder, written, atol=1e-10)
    if others:
        for value, their in zip(objective.parameters(), others[0].parameters(), strict=True):
            torch.testing.assert_close(value, their, rtol=0, atol=1e-10)
