"""Forced collapses set off an alarm within 200 steps, once each; healthy training sets off none."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from configs import resolve_recipe
from data_pipeline.audio.log_mel import FSDD
from data_pipeline.core.batch import Batch
from data_pipeline.core.counter_rng import DrawKeys
from trainer.build import Training, build_training
from trainer.config import RunConfig
from trainer.objectives import nt_xent_loss
from trainer.objectives.health import embedding_health
from trainer.observability.alarms import AlarmConfig, Alarms
from trainer.step import StepOutput
from trainer.training_log import metrics_of_alarms
from trainer.views import BaseViewsConfig
from trainer.views.composed import ByEpochConfig
from trainer.views.expert_image import ExpertImageConfig
from trainer.views.health import view_health
from trainer.views.viewmaker import Viewmaker, ViewmakerConfig

LOG_EVERY = 10


def alarms_of(measure: Callable[[int], dict[str, float]], *, num_steps: int = 60) -> dict[int, list[str]]:
    """Return the alarms by step, if metrics are logged every few steps."""
    alarms = Alarms(AlarmConfig())
    by_step = {step: alarms.check(measure(step), step) for step in range(LOG_EVERY, num_steps + 1, LOG_EVERY)}
    return {step: sentences for step, sentences in by_step.items() if sentences}


def contrast(z_a: Tensor, z_b: Tensor) -> Tensor:
    return nt_xent_loss(z_a, z_b, temperature=0.5).loss


def attraction(z_a: Tensor, z_b: Tensor) -> Tensor:
    return -F.cosine_similarity(z_a, z_b).mean()


def training(loss_function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[int], dict[str, float]]:
    """Return a function that trains an encoder for `LOG_EVERY` steps on points in ten clouds, and returns metrics."""
    torch.manual_seed(0)
    centre = 2 * torch.randn(10, 20)
    encoder = nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 32))
    optimizer = torch.optim.Adam(encoder.parameters(), lr=3e-3)

    def measure(step: int) -> dict[str, float]:
        for _ in range(LOG_EVERY):
            x = centre[torch.randint(10, (64,))] + 0.5 * torch.randn(64, 20)
            z_a, z_b = (encoder(x + 0.3 * torch.randn_like(x)) for _ in range(2))
            optimizer.zero_grad()
            torch.autograd.backward(loss_function(z_a, z_b))
            optimizer.step()
        return {f"embeddings/{name}": float(value) for name, value in embedding_health(z_a, z_b).items()}

    return measure


@pytest.mark.slow
def test_an_encoder_that_is_only_attracted_collapses_and_is_told_within_200_steps() -> None:
    alarms = alarms_of(training(attraction), num_steps=200)
    assert any("collapsed to a point" in sentence for sentences in alarms.values() for sentence in sentences)


@pytest.mark.slow
def test_a_contrastive_encoder_sets_nothing_off() -> None:
    assert alarms_of(training(contrast), num_steps=100) == {}


def test_embeddings_too_long_for_float32_are_told_as_collapsed() -> None:
    """Their lengths overflow, so that objectives on the sphere see zeros; the others see a loss that is not finite."""
    health = embedding_health(*(3e37 * F.normalize(torch.randn(2, 16, 8), dim=2)))
    metrics = {f"embeddings/{name}": float(value) for name, value in health.items()}
    alarms = Alarms(AlarmConfig())
    assert alarms.check(metrics, 0) == []
    assert "collapsed to a point" in alarms.check(metrics, 50)[0]


def test_an_encoder_on_two_directions_is_told() -> None:
    torch.manual_seed(0)
    plane = torch.randn(2, 64)

    def measure(step: int) -> dict[str, float]:
        z = torch.randn(64, 2) @ plane
        return {f"embeddings/{name}": float(value) for name, value in embedding_health(z, z).items()}

    ((_, (sentence,)),) = alarms_of(measure).items()
    assert sentence.startswith("the encoder has collapsed to few directions")


def identity(viewmaker: Viewmaker) -> None:
    nn.init.zeros_(viewmaker.out.weight)
    assert viewmaker.out.bias is not None
    nn.init.zeros_(viewmaker.out.bias)


def nearly_identity(viewmaker: Viewmaker) -> None:
    identity(viewmaker)
    viewmaker.out.weight.add_(1e-8)


def saturated(viewmaker: Viewmaker) -> None:
    viewmaker.out.weight.mul_(1e4)


def deaf(viewmaker: Viewmaker) -> None:
    """Make a viewmaker ignore its noise: set to zero the weights on the noise channels, and on what comes of them."""
    num_blocks = viewmaker.config.num_res_blocks
    weights = dict(viewmaker.named_parameters())
    weights["stem.0.conv.weight"][:, -1] = 0
    for block in range(num_blocks):
        weights[f"blocks.{block}.first.conv.weight"][:, -1 - block :] = 0
    weights["upsample.0.conv.weight"][:, -num_blocks:] = 0


def untouched(viewmaker: Viewmaker) -> None:
    pass


@pytest.mark.slow
@pytest.mark.parametrize(
    ("force", "budget", "dropout_rate", "meanings"),
    [
        (identity, 0.05, None, ["become the identity", "lost their randomness"]),
        (deaf, 0.05, None, ["lost their randomness"]),
        (saturated, 0.05, None, ["viewmaker is saturated"]),
        (untouched, 3.0, None, ["clamp cuts the change"]),
        (untouched, 0.05, None, []),
        (nearly_identity, 0.05, 0.2, ["become the identity"]),
        (saturated, 0.05, 0.2, ["viewmaker is saturated"]),
        (untouched, 0.006, 0.2, []),  # a fifth of this budget is below the limit
    ],
)
def test_a_viewmaker_that_has_collapsed_is_told(
    force: Callable[[Viewmaker], None], budget: float, dropout_rate: float | None, meanings: list[str]
) -> None:
    torch.manual_seed(0)
    config = ViewmakerConfig(base_width=8, num_res_blocks=1, budget=budget, dropout_rate=dropout_rate)
    viewmaker = Viewmaker(config, image_channels=3)
    num = 8 if dropout_rate is None else 32
    images = torch.rand(num, 3, 16, 16)

    @torch.no_grad()
    def measure(step: int) -> dict[str, float]:
        keys = [DrawKeys(seed=0, epoch=step, index_B=torch.arange(num), view=view) for view in (0, 1)]
        views_a, views_b = (viewmaker(images, key) for key in keys)
        return {f"views/{name}": float(value) for name, value in view_health(views_a, views_b, images, None).items()}

    with torch.no_grad():
        force(viewmaker)
    sentences = [sentence for at_step in alarms_of(measure).values() for sentence in at_step]
    assert len(sentences) == len(meanings)
    assert all(meaning in sentence for meaning, sentence in zip(meanings, sentences, strict=True))


PICTURES = torch.randint(0, 256, (8, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def training_of(config: RunConfig) -> Training:
    return build_training(config, num_samples=8, device=torch.device("cpu"))


def step(training: Training, inputs: Tensor, *, number: int = 0, epoch: int = 0, rate: float = 0.0) -> StepOutput:
    batch = Batch(number, epoch, torch.arange(len(inputs)), inputs, inputs, None, None, {})
    return training.step(batch, learning_rates=dict.fromkeys(training.engines, rate))


SMALL = "{kind: viewmaker, base_width: 8, num_res_blocks: 1}"


@pytest.mark.parametrize(("update", "num_parts"), [("simultaneous", 1), ("alternating", 2)])
def test_the_change_of_a_viewmaker_in_a_composition_is_that_of_the_views_of_the_encoder(
    update: str, num_parts: int
) -> None:
    settings = [f"views={{kind: sequence, parts: [{SMALL}]}}", f"adversary.update={update}"]
    config = resolve_recipe("debug:viewmaker", [*settings, f"memory.micro_batches={num_parts}"])
    training = training_of(config)
    output = step(training, PICTURES, rate=0.1)
    assert output.viewmaker_change is not None
    assert output.views_b_BCHW is not None
    given, made = output.viewmaker_change
    last = slice(num_parts - 1, None, num_parts)
    assert torch.equal(given, (PICTURES[last] / 255).repeat(2, 1, 1, 1))
    assert torch.equal(made, torch.cat([output.views_a_BCHW[last], output.views_b_BCHW[last]]))
    assert [module for module in training.modules.view_policy.modules() if getattr(module, "change", None)] == []


SOUND = "{kind: viewmaker, base_width: 4, num_res_blocks: 1, budget: 0.125, clamp: false, waveform: {}}"


@pytest.mark.parametrize("views", [SOUND, f"{{kind: pair, first: {SOUND}, second: {{kind: waveform}}}}"])
def test_crop_and_noise_on_the_waveform_do_not_count_as_the_change_of_the_viewmaker_behind_them(views: str) -> None:
    config = resolve_recipe("debug:audio_viewmaker", [f"views={views}"])
    training = training_of(config)
    metrics = step(training, 0.1 * torch.randn(4, FSDD.num_points, generator=torch.Generator().manual_seed(0))).read()
    assert float(metrics["views/budget_spent"]) == pytest.approx(0.125, rel=2e-3)
    policies = training.modules.view_policy.modules()
    assert all(getattr(module, "change", None) is None for module in policies)  # no tensors are kept


def test_a_random_mask_does_not_hide_that_a_viewmaker_is_clamped() -> None:
    training = training_of(
        resolve_recipe("debug:viewmaker", [f"views={{kind: pair, first: {SMALL}, second: {{kind: random_mask}}}}"])
    )
    metrics = step(training, torch.full((8, 3, 16, 16), 1, dtype=torch.uint8)).read()
    assert 0.1 < metrics["views/clamped_share"] < 0.9


def test_an_epoch_of_other_views_is_not_measured_by_the_viewmaker_of_the_epoch_before() -> None:
    views = f"{{kind: by_epoch, policies: [{SMALL}, {{kind: random_mask}}]}}"
    training = training_of(resolve_recipe("debug:viewmaker", [f"views={views}", "num_epochs=2"]))
    pictures = torch.full((8, 3, 16, 16), 100, dtype=torch.uint8)
    spent = [float(step(training, pictures, epoch=epoch).read()["views/budget_spent"]) for epoch in (0, 1)]
    assert spent[0] < 0.051
    assert spent[1] == pytest.approx(100 / 255)  # each value is doubled or lost


@pytest.mark.parametrize(
    ("views", "comes_at"),
    [
        (ViewmakerConfig(), 9),
        (ByEpochConfig(policies=(ViewmakerConfig(), ExpertImageConfig())), 12),  # at the first step of epoch 2 after 9
        (ByEpochConfig(policies=(ExpertImageConfig(), ViewmakerConfig())), 18),
    ],
    ids=["alone", "first", "second"],
)
def test_epochs_of_other_views_do_not_put_the_alarm_of_a_viewmaker_off(views: BaseViewsConfig, comes_at: int) -> None:
    alarms, steps_per_epoch, came_at = Alarms(AlarmConfig(after_steps=9)), 6, []
    for step in range(24):
        epoch = step // steps_per_epoch
        spent = 1e-6 if views.learns_in(epoch) else 0.2
        if alarms.check(metrics_of_alarms({"views/budget_spent": spent}, views, epoch=epoch), step):
            came_at.append(step)
    assert came_at == [comes_at]


def test_an_alarm_that_was_over_comes_again_and_a_passing_one_never() -> None:
    alarms = Alarms(AlarmConfig(after_steps=20))
    low, high = {"embeddings/effective_rank": 1.2}, {"embeddings/effective_rank": 30.0}
    checks = [low, low, high, low, low, low, high, low, low, low]
    assert [bool(alarms.check(metrics, 10 * number)) for number, metrics in enumerate(checks)] == [
        *(False, False, False),
        *(False, False, True),
        *(False, False, False, True),
    ]


def test_rarely_logged_metrics_are_told_and_absent_or_nan_ones_are_not() -> None:
    alarms = Alarms(AlarmConfig())
    assert [len(alarms.check({"embeddings/uniformity": -0.01}, step)) for step in (1, 100)] == [0, 1]
    for at in range(0, 500, 100):
        assert alarms.check({"train/loss": 0.0, "views/diversity": math.nan}, at) == []
