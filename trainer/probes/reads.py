"""Choose what probes read: the features of an encoder, its embedding, or the pixels as a floor.

Shapes: B pictures, C channels, H by W pixels, D embedding size.
"""

from __future__ import annotations

from torch import Tensor, nn

from trainer.models.encoder import Encoder
from trainer.probes.features import FeatureEncoder


def reader(encoder: Encoder, reads: str) -> FeatureEncoder:
    """Return a module from which probes read, with the weights of the encoder.

    "features" is the encoder itself: the linear probe reads its `features`, and kNN its `pooled`. "embedding" gives
    both the output of the head, on which the loss works. "pixels" gives both the normalised pictures, flattened.
    """
    match reads:
        case "embedding":
            return _Embedding(encoder)
        case "pixels":
            return _Pixels(encoder)
        case _:
            return encoder


class _Embedding(nn.Module):
    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.encoder = encoder

    def features(self, views_BCHW: Tensor) -> Tensor:
        embeddings_BD: Tensor = self.encoder(views_BCHW)
        return embeddings_BD

    def pooled(self, views_BCHW: Tensor) -> Tensor:
        return self.features(views_BCHW)


class _Pixels(nn.Module):
    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.encoder = encoder

    def features(self, views_BCHW: Tensor) -> Tensor:
        return self.encoder.normalise(views_BCHW).flatten(1)

    def pooled(self, views_BCHW: Tensor) -> Tensor:
        return self.features(views_BCHW)
