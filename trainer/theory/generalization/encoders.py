"""Train small encoders on Gaussian classes, in lockstep for all losses and seeds.

A sample of class k is c_k + `sample_sd` z, and a view of it is the sample + `view_sd` z', with normal z and z'. The
encoder is a multi-layer perceptron with outputs normalised to unit length. Every loss starts from the same weights and
sees the same batches.

Shapes: S seeds, O objectives, K classes, N samples of a class, A views of a sample, B pairs of a batch, I inputs,
H hidden units, D dimensions of an embedding, T steps, M any number of encoders, P embeddings of one encoder.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from data_pipeline.core.counter_rng import integers, normal
from data_pipeline.core.schema import Count, LearningRate, PositiveFactor, Schema
from trainer.objectives.barlow_twins import barlow_twins_loss
from trainer.objectives.linear_loss import linear_loss
from trainer.objectives.nt_xent import nt_xent_loss
from trainer.objectives.objective import ObjectiveOutput
from trainer.objectives.split_loss import split_loss
from trainer.theory.framework.experiment import TwoOrMore, draw_keys

# Purposes of `counter_rng`.
_CENTRE, _WEIGHT, _CLASS, _SAMPLE, _VIEW = range(5)
# Numbers of views that separate the samples of training, of the measures and of the test.
_TRAINING, MEASURED, TEST = range(3)

PairLoss = Callable[[Tensor, Tensor], Tensor]


class ObjectiveSettings(Schema):
    """Settings of one loss. "info_nce" and "split" use the temperature, "split" and "linear" the divergence weight."""

    loss: Literal["info_nce", "linear", "barlow_twins", "split"]
    temperature: PositiveFactor = 1
    divergence_weight: PositiveFactor = 1

    @property
    def name(self) -> str:
        return {
            "info_nce": f"InfoNCE, temperature {self.temperature:g}",
            "linear": f"linear, weight {self.divergence_weight:g}",
            "barlow_twins": "Barlow Twins",
            "split": f"split, temperature {self.temperature:g}, weight {self.divergence_weight:g}",
        }[self.loss]


class EncoderSettings(Schema):
    """Settings of the classes, the encoder, its training by Adam with a cosine schedule, and the measured samples."""

    objectives: tuple[ObjectiveSettings, ...] = Field(
        default=(
            ObjectiveSettings(loss="info_nce", temperature=0.5),
            ObjectiveSettings(loss="info_nce", temperature=1),
            ObjectiveSettings(loss="info_nce", temperature=10),
            ObjectiveSettings(loss="linear", divergence_weight=1),
            ObjectiveSettings(loss="linear", divergence_weight=5),
            ObjectiveSettings(loss="barlow_twins"),
            ObjectiveSettings(loss="split", temperature=0.2, divergence_weight=0.2),
            ObjectiveSettings(loss="split", temperature=0.2, divergence_weight=1),
        ),
        min_length=1,
    )
    num_classes: int = Field(default=10, ge=3, le=10**9)
    input_dim: Count = 20
    hidden_dim: Count = 64
    embedding_dim: TwoOrMore = 16
    centre_sd: PositiveFactor = 1
    sample_sd: PositiveFactor = 0.2
    view_sd: PositiveFactor = 0.5
    num_steps: TwoOrMore = 1000
    batch_size: TwoOrMore = 96
    learning_rate: LearningRate = 1e-2
    log_every: Count = 25
    samples_a_class: TwoOrMore = 10
    views_a_sample: TwoOrMore = 4


@dataclass
class Encoders:
    """Perceptrons (S, O) with one hidden layer. All tensors are float32, and weights are (inputs, outputs)."""

    first_SOIH: Tensor
    first_bias_SOH: Tensor
    second_SOHD: Tensor
    second_bias_SOD: Tensor

    def tensors(self) -> list[Tensor]:
        return [self.first_SOIH, self.first_bias_SOH, self.second_SOHD, self.second_bias_SOD]

    def embed(self, x_SBI: Tensor) -> Tensor:
        """Return embeddings of unit length, (S, O, B, D). All objectives of a seed embed the same inputs."""
        hidden_SOBH = torch.relu(x_SBI[:, None] @ self.first_SOIH + self.first_bias_SOH[:, :, None])
        return F.normalize(hidden_SOBH @ self.second_SOHD + self.second_bias_SOD[:, :, None], dim=-1)


def class_centres(settings: EncoderSettings, seeds_S: Tensor) -> Tensor:
    """Draw the centres c_k, (S, K, I), which are normal with deviation `centre_sd`."""
    keys = draw_keys(seeds_S)
    drawn = normal(keys, settings.num_classes * settings.input_dim, purpose=_CENTRE)
    return settings.centre_sd * drawn.view(-1, settings.num_classes, settings.input_dim)


def new_encoders(settings: EncoderSettings, seeds_S: Tensor) -> Encoders:
    """Draw normal weights, the same for every objective of a seed, and set the biases to 0.

    The variance is 2 / inputs in the first layer and 1 / inputs in the second.
    """
    keys = draw_keys(seeds_S)
    num, inputs = len(settings.objectives), settings.input_dim
    H, D = settings.hidden_dim, settings.embedding_dim
    drawn = normal(keys, inputs * H + H * D, purpose=_WEIGHT)
    first_SIH, second_SHD = drawn[:, : inputs * H].view(-1, inputs, H), drawn[:, inputs * H :].view(-1, H, D)

    def for_each(weight: Tensor) -> Tensor:
        return weight[:, None].repeat(1, num, 1, 1)

    return Encoders(
        for_each(first_SIH * math.sqrt(2 / inputs)),
        drawn.new_zeros(len(drawn), num, H),
        for_each(second_SHD * math.sqrt(1 / H)),
        drawn.new_zeros(len(drawn), num, D),
    )


def draw_batch(settings: EncoderSettings, centre_SKI: Tensor, seeds_S: Tensor, *, step: int) -> tuple[Tensor, Tensor]:
    """Draw both views of the step's samples, (S, B, I) each."""
    keys = draw_keys(seeds_S, step=step, view=_TRAINING)
    B, inputs = settings.batch_size, settings.input_dim
    label_SB = integers(keys, B, settings.num_classes, purpose=_CLASS)
    sample_SBI = centre_SKI.gather(1, label_SB[..., None].expand(-1, -1, inputs))
    noise_S3BI = normal(keys, 3 * B * inputs, purpose=_SAMPLE).view(-1, 3, B, inputs)
    sample_SBI = sample_SBI + settings.sample_sd * noise_S3BI[:, 0]
    return tuple(sample_SBI + settings.view_sd * noise_S3BI[:, view] for view in (1, 2))  # type: ignore[return-value]


def draw_population(settings: EncoderSettings, seeds_S: Tensor, *, which: int) -> Tensor:
    """Draw views of N new samples of every class, (S, K, N, A, I); `which` is `MEASURED` or `TEST`."""
    K, N, A = settings.num_classes, settings.samples_a_class, settings.views_a_sample
    inputs = settings.input_dim
    keys = draw_keys(seeds_S, view=which)
    sample = normal(keys, K * N * inputs, purpose=_SAMPLE).view(-1, K, N, 1, inputs)
    view = normal(keys, K * N * A * inputs, purpose=_VIEW).view(-1, K, N, A, inputs)
    centre = class_centres(settings, seeds_S)[:, :, None, None]
    return centre + settings.sample_sd * sample + settings.view_sd * view


def stacked_loss(objective: ObjectiveSettings) -> PairLoss:
    """Return a function from the unit embeddings (M, B, D) of both views to the losses of M encoders, (M,)."""
    temperature, weight = objective.temperature, objective.divergence_weight
    one: Callable[[Tensor, Tensor], ObjectiveOutput] = {
        "info_nce": partial(nt_xent_loss, temperature=temperature),
        "split": partial(split_loss, temperature=temperature, divergence_weight=weight),
        "linear": partial(linear_loss, divergence_weight=weight),
        "barlow_twins": partial(barlow_twins_loss, unbiased=True),
    }[objective.loss]
    mapped: PairLoss = torch.func.vmap(lambda u_BD, v_BD: one(u_BD, v_BD).loss)
    return mapped


def train(settings: EncoderSettings, *, seeds: Sequence[int], device: torch.device) -> tuple[Encoders, Tensor]:
    """Train every objective of every seed at once. The encoders of a seed do not depend on the other seeds.

    Returns the encoders after the last step, and the losses (S, O, L): of the first step, then the mean of each
    `log_every` steps.
    """
    seeds_S = torch.tensor(seeds, device=device)
    centre_SKI, encoders = class_centres(settings, seeds_S), new_encoders(settings, seeds_S)
    losses = [stacked_loss(objective) for objective in settings.objectives]
    for tensor in encoders.tensors():
        tensor.requires_grad_()
    optimizer = torch.optim.Adam(encoders.tensors(), lr=settings.learning_rate)
    logged: list[Tensor] = []
    running_SO = torch.zeros(len(seeds), len(losses), device=device)
    for step in range(settings.num_steps):
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * (1 + math.cos(math.pi * step / settings.num_steps)) / 2
        z_SOPD = encoders.embed(torch.cat(draw_batch(settings, centre_SKI, seeds_S, step=step), dim=1))
        z_a, z_b = z_SOPD.chunk(2, dim=2)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="There is a performance drop")  # masks are filled one by one
            loss_SO = torch.stack([loss(z_a[:, o], z_b[:, o]) for o, loss in enumerate(losses)], dim=1)
        optimizer.zero_grad()
        loss_SO.sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        running_SO += loss_SO.detach()
        if step == 0:
            logged.append(loss_SO.detach())
        if (step + 1) % settings.log_every == 0:
            logged.append(running_SO / settings.log_every)
            running_SO = torch.zeros_like(running_SO)
    return Encoders(*(tensor.detach() for tensor in encoders.tensors())), torch.stack(logged, dim=-1)
