"""The first weights and the batch norm of layers in Keras, for reproductions of experiments that were run in it."""

from __future__ import annotations

from typing import Final

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

KERAS_EPSILON: Final = 1e-3
KERAS_MOMENTUM: Final = 0.01  # Keras calls this 0.99, the share of the old running statistics that is kept


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
