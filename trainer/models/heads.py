"""Build heads: the few layers after a trunk (a projector) or after an embedding (a predictor).

Shapes: B rows of this rank, C channels.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Final, Literal, Self

from pydantic import Field, model_validator
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from data_pipeline.core.schema import LayerSize, Schema
from trainer.models.batch_norm import SynchronizedBatchNorm1d

KERAS_EPSILON: Final = 1e-3
KERAS_MOMENTUM: Final = 0.01  # Keras calls this 0.99, the share of the old running statistics that is kept


class HeadConfig(Schema):
    """The config of a head: hidden layers, each followed by a ReLU, then one linear layer.

    hidden_sizes: the numbers of outputs of the hidden layers.
    batch_norm: whether a batch norm is between every hidden layer and its ReLU.
    output_batch_norm: whether a batch norm follows the last layer, which has no ReLU.
    bias: whether the layers have a bias.
    defaults: the library whose first weights and batch norm the layers get. "keras" is for experiments that were run in
        it, see `set_keras_defaults`.

    The heads of the papers: SimCLR's (512,); SimSiam's projector (2048,) with both batch norms, and its predictor
    (512,) with `batch_norm` (Chen and He 2021); the head of Barlow Twins (2048, 2048) with both (Zbontar et al. 2021);
    that of the RandBit experiment (256,) with `batch_norm`, `bias=False`, `defaults="keras"` (Chen, Luo and Li 2021).
    """

    hidden_sizes: Annotated[tuple[LayerSize, ...], Field(max_length=16)] = ()
    batch_norm: bool = False
    output_batch_norm: bool = False
    bias: bool = True
    defaults: Literal["torch", "keras"] = "torch"

    @model_validator(mode="after")
    def _batch_norm_has_a_place(self) -> Self:
        if self.batch_norm and not self.hidden_sizes:
            raise ValueError("batch_norm follows hidden layers, but there are none; set hidden_sizes as well")
        return self


def build_head(
    config: HeadConfig, num_in: int, num_out: int, *, batch_norm: Literal["synchronized", "local"]
) -> nn.Module:
    """Return a head, (B, num_in) to (B, num_out), with new weights from torch's default generator.

    By default, every linear layer has a bias, even before a batch norm, as in the published code of Huang et al. 2023.
    A `batch_norm` computes statistics over the batch of all ranks ("synchronized") or over each rank's part ("local").
    """
    norm = SynchronizedBatchNorm1d if batch_norm == "synchronized" else nn.BatchNorm1d
    layers: list[nn.Module] = []
    for size_in, size_out in pairwise((num_in, *config.hidden_sizes)):
        linear = nn.Linear(size_in, size_out, bias=config.bias)
        layers += [linear, *([norm(size_out)] if config.batch_norm else []), nn.ReLU()]
    last = nn.Linear((num_in, *config.hidden_sizes)[-1], num_out, bias=config.bias)
    layers += [last, *([norm(num_out)] if config.output_batch_norm else [])]
    head = nn.Sequential(*layers) if len(layers) > 1 else last
    if config.defaults == "keras":
        set_keras_defaults(head)
    return head


def set_keras_defaults(module: nn.Module) -> None:
    """Give every convolution, linear layer and batch norm in `module` what Keras gives them by default, in place.

    Weights are uniform within sqrt(6 / (fan_in + fan_out)) (Glorot and Bengio 2010), from torch's default generator.
    Biases are 0. Batch norms add 1e-3 to the variance, and a step changes their running statistics by a hundredth.
    """
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
        elif isinstance(layer, _BatchNorm):
            layer.eps, layer.momentum = KERAS_EPSILON, KERAS_MOMENTUM
