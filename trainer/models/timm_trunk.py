"""Use any backbone of the package timm (Wightman 2019), which is an optional dependency.

Shapes: B pictures, C channels, H by W pixels.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from data_pipeline.core.errors import UserError
from data_pipeline.core.imports import check_installed
from trainer.models.activation_checkpointing import run_blocks
from trainer.models.batch_norm import SynchronizedBatchNorm2d
from trainer.models.trunk import Trunk

# The encoder sets the first three. The others would load weights, but a config may come from a stranger.
OWN_ARGUMENTS = frozenset(
    {"features_only", "in_chans", "num_classes"}
    | {"cache_dir", "checkpoint_path", "pretrained", "pretrained_cfg", "pretrained_cfg_overlay"}
)


class TimmTrunk(Trunk):
    """A timm model without its classifier, from (B, `in_channels`, H, W) to its features, a map or tokens.

    `options` are other arguments of `timm.create_model`, such as img_size and patch_size of a vision transformer. The
    weights come from torch's default generator. Pretrained weights are never fetched.

    Raises:
        UserError: if timm is not installed, has no such model, or refuses the options.
    """

    def __init__(self, name: str, *, in_channels: int, options: Mapping[str, bool | int | float | str]) -> None:
        super().__init__()
        try:
            self.model: Any = load_timm().create_model(
                name, pretrained=False, num_classes=0, in_chans=in_channels, **options
            )
        except (AssertionError, RuntimeError, TypeError, ValueError) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            given = ", ".join(f"{key}={value!r}" for key, value in options.items())
            raise UserError(f'timm cannot build "{name}" with options ({given}): {reason}') from None
        self.num_channels = self.model.head_hidden_size

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return the features. If `checkpointing` is "whole", the backward pass computes all layers again."""
        checkpointing = self.checkpointing if self.training else "none"
        return run_blocks([self.model.forward_features], x_BCHW, checkpointing=checkpointing, random=True)

    def pool(self, map_BCHW: Tensor) -> Tensor:
        """Return the input of the model's classifier, (B, C): a mean or a class token, after its norms."""
        map_BCHW = map_BCHW.to(torch.promote_types(map_BCHW.dtype, torch.float32))
        pooled_BC: Tensor = self.model.forward_head(map_BCHW, pre_logits=True)
        return pooled_BC

    def blocks(self) -> tuple[nn.Module, ...]:
        """Return the blocks of a vision transformer, and of other models that keep their layers in `blocks`."""
        return tuple(getattr(self.model, "blocks", ()))

    def stage_parameters(self) -> list[list[nn.Parameter]]:
        """Return the parameters of timm's groups: the stem, then the stages of a network, or a transformer's blocks."""
        group = load_timm().models.group_parameters
        found = group(self.model, self.model.group_matcher(coarse=True), return_values=True)
        return [found[number] for number in sorted(found)]

    def split_batch_norm(self, num_splits: int) -> None:
        """Raise `UserError`."""
        raise UserError("encoder.batch_norm=split does not work with encoders of timm; set it to synchronized or local")

    @property
    def as_published(self) -> nn.Module:
        model: nn.Module = self.model
        return model

    def synchronize_batch_norm(self) -> None:
        """Synchronise every batch norm, also timm's batch norm with activation. Raises `UserError` for other types."""
        super().synchronize_batch_norm()
        with_activation = load_timm().layers.BatchNormAct2d
        for parent in list(self.modules()):
            for name, child in parent.named_children():
                if type(child) is with_activation:
                    setattr(parent, name, _SynchronizedBatchNormAct2d(child))
        left = {type(m).__name__ for m in self.modules() if isinstance(m, _BatchNorm | nn.SyncBatchNorm)}
        left -= {SynchronizedBatchNorm2d.__name__, _SynchronizedBatchNormAct2d.__name__}
        if left:
            raise UserError(
                f"batch norm of type {', '.join(sorted(left))} cannot be synchronised; set encoder.batch_norm=local "
                "(then results depend on the number of ranks) or choose another model"
            )


class _SynchronizedBatchNormAct2d(SynchronizedBatchNorm2d):
    """timm's BatchNormAct2d over the batch of all ranks, with the same parameters, buffers and names."""

    def __init__(self, local: Any) -> None:
        super().__init__(local.num_features, eps=local.eps, momentum=local.momentum)
        self.drop: nn.Module = local.drop
        self.act: nn.Module = local.act
        self.load_state_dict(local.state_dict())

    def forward(self, input: Tensor, residual: Tensor | None = None, relu: bool = False) -> Tensor:  # noqa: A002  the base class's name
        activated_BCHW: Tensor = self.act(self.drop(super().forward(input, residual, relu)))
        return activated_BCHW


def load_timm() -> ModuleType:
    """Return the module timm. Raises `UserError` if it is not installed."""
    check_installed("timm", extra="timm", user="this encoder")
    return importlib.import_module("timm")
