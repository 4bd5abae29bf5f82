"""Build the modules of a run: the encoder, the view policy and the objective."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch
from torch import nn

from trainer.checkpoint.run_state import DataIdentity
from trainer.config import RunConfig
from trainer.models.encoder import Encoder, Normalization, build_encoder
from trainer.objectives import Objective, ObjectiveInputs
from trainer.views import Viewmaker, ViewPolicy, build_view_policy
from trainer.views.adversarial_mask import AdversarialMask

NO_CLASSES: Final[Mapping[str, int]] = MappingProxyType({})  # of labels that are not known


@dataclass(frozen=True)
class TrainedModules:
    """The modules of a run at `step` (0: untrained), with their config.

    `trained_on` names the datasets that they were trained on; None for untrained modules, or if unknown.
    """

    config: RunConfig
    step: int
    encoder: Encoder
    view_policy: ViewPolicy
    trained_on: DataIdentity | None = None

    @property
    def viewmaker(self) -> nn.Module | None:
        """Return the view policy if it is learned."""
        return self.view_policy if self.config.views.is_learned else None

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> TrainedModules:
        """Move the modules in place, with the memory format of the encoder, and return them."""
        modules = (self.encoder, self.view_policy)
        for module in modules:
            module.to(device, dtype)
        form = memory_format(self.encoder)
        for module in modules:
            module.to(memory_format=form)  # type: ignore[call-overload]
        return self

    @property
    def trained_modules(self) -> dict[str, nn.Module]:
        """Return the trained modules by name, in a fixed order: "encoder", and "viewmaker" if there is one."""
        encoder: dict[str, nn.Module] = {"encoder": self.encoder}
        return encoder | ({"viewmaker": self.viewmaker} if self.viewmaker is not None else {})


def memory_format(encoder: nn.Module) -> torch.memory_format:
    """Return channels_last, in which convolutions are faster, unless the encoder is in float64 or torch would crash.

    With torch 2.11 on a CPU with AVX2, a few of these steps write outside their memory:

        x = torch.randn(2, 4, 16, 16).to(memory_format=torch.channels_last)
        torch.nn.Conv2d(4, 8, 1, stride=2)(x).square().sum().backward()

    See https://github.com/uxlfoundation/oneDNN/issues/6035: convolutions of 1x1 with a stride, of fewer channels than a
    block has, which are 8, and 16 with AVX-512.
    """
    parameter = next(encoder.parameters(), torch.empty(0))
    strided = [m for m in encoder.modules() if isinstance(m, nn.Conv2d) and m.kernel_size == (1, 1) != m.stride]
    crashes = parameter.device.type == "cpu" and any(convolution.in_channels < 16 for convolution in strided)
    return torch.contiguous_format if crashes or parameter.dtype == torch.float64 else torch.channels_last


def build_run_objective(
    config: RunConfig,
    encoder: Encoder,
    *,
    num_samples: int,
    num_classes: Mapping[str, int] = NO_CLASSES,
    device: torch.device,
) -> Objective:
    """Return the objective of a run, on the `device` of its encoder. Draws its weights with the config's seed."""
    given = ObjectiveInputs(
        encoder=encoder,
        embedding_size=config.encoder.embedding_size,
        num_samples=num_samples,
        seed=config.seed,
        image_channels=config.encoder.in_channels,
        num_classes=num_classes,
    )
    with _drawing_from(config.seed):
        objective = config.objective.build(given)
    return objective.to(device, config.parameter_dtype)


@contextlib.contextmanager
def _drawing_from(seed: int) -> Iterator[None]:
    """Let draws on the CPU start from `seed` inside the block. No generator is another one after it.

    `torch.manual_seed` would also seed every GPU, where a loop of the user's own may draw.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def learned_part(policy: ViewPolicy) -> nn.Module:
    """Return the network inside a composition that learns, or `policy` if it is none."""
    return next((part for part in policy.modules() if isinstance(part, Viewmaker | AdversarialMask)), policy)


def build_modules(config: RunConfig) -> TrainedModules:
    """Return untrained modules: a function of the config alone, because its seed draws the initial weights.

    An encoder whose config has no mean and std has its parameters, but cannot run: see `trainer.open_settings`.
    Spectrograms are normalised already.
    """
    normalization = None if config.data.mel is None else Normalization(mean=(0.0,), std=(1.0,))
    with _drawing_from(config.seed):
        encoder = build_encoder(config.encoder, normalization=normalization)
        view_policy = build_view_policy(config.views, image_channels=config.encoder.in_channels, mel=config.data.mel)
    encoder.trunk.checkpointing = config.memory.encoder_checkpointing
    if config.views.is_learned:
        # Not by an assignment, which a type checker allows for tensors and modules only.
        setattr(learned_part(view_policy), "checkpointing", config.memory.viewmaker_checkpointing)  # noqa: B010
    return TrainedModules(config=config, step=0, encoder=encoder, view_policy=view_policy)
