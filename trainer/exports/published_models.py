"""Take weights of torchvision and timm, for architectures that both have.

The models of these libraries take normalised pictures, `(pictures - mean) / std`, while an `Encoder` normalises its
input itself. Both give equal pooled features.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from trainer.pretrained import unwrapped

_CLASSIFIERS = ("fc.", "classifier.", "head.", "last_linear.")  # names of the classifier in torchvision and timm


def load_published(encoder: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy weights with the names of torchvision or timm, such as `model.state_dict()`, into an encoder.

    The encoder, and the network of the weights, may be inside DataParallel or DistributedDataParallel. Leaves out the
    weights of a classifier. The head of the encoder does not change. Raises the `RuntimeError` of `load_state_dict` if
    any other weight is missing, is left over or has another shape.
    """
    target = unwrapped(encoder).trunk.as_published
    own, given = target.state_dict(), dict(weights)
    consume_prefix_in_state_dict_if_present(given, "module.")
    target.load_state_dict({name: x for name, x in given.items() if name in own or not name.startswith(_CLASSIFIERS)})
