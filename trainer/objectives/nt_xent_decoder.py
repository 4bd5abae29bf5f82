"""NT-Xent beside a decoder that reconstructs each view from its embedding (after Li et al. 2020, arXiv 2012.09962).

An embedding that must show the view again cannot leave a feature out. The paper decodes the features of a masked
picture and compares with the whole picture. An objective here gets embeddings and views, so the decoder sees the
embedding, and its target is the view itself, averaged to a few pixels.

Shapes: B samples of this rank, C channels, H height, W width, S rows and columns of a target, D dimensions.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from data_pipeline.core.schema import PositiveFactor, Temperature
from trainer.models.heads import HeadConfig, build_head
from trainer.objectives.contrast import ContrastiveConfig
from trainer.objectives.nt_xent import nt_xent_loss
from trainer.objectives.objective import Objective, ObjectiveInputs, ObjectiveOutput, ViewPair
from trainer.objectives.simsiam import predict


class NTXentDecoderConfig(ContrastiveConfig):
    """The config of NT-Xent with a decoder.

    decoder: the network from embeddings to targets; its batch norm is over the batch of all ranks.
    decoder_weight: the weight of the mean squared error; NT-Xent has weight 1.
    target_size: the rows and columns to which a view is averaged, S.
    """

    has_trained_layers: ClassVar[bool] = True

    kind: Literal["nt_xent_decoder"] = "nt_xent_decoder"
    temperature: Temperature = 0.5
    decoder: HeadConfig = HeadConfig(hidden_sizes=(256,))
    decoder_weight: PositiveFactor = 1.0
    target_size: Annotated[int, Field(ge=1, le=64)] = 8

    def build(self, given: ObjectiveInputs) -> Objective:
        return NTXentDecoder(self, embedding_size=given.embedding_size, image_channels=given.image_channels)


def reconstruction_loss(decoded_BX: Tensor, views_BCHW: Tensor, *, target_size: int) -> Tensor:
    """Return the mean squared difference of decoded views and views averaged to S by S pixels, a scalar.

    The views get no gradient. The mean over the ranks is as in `nt_xent_loss`.

    Args:
        decoded_BX: (B, C * S * S), channel by channel and row by row; computed in its dtype.
        views_BCHW: (B, C, H, W).
        target_size: S.
    """
    target_BX = F.adaptive_avg_pool2d(views_BCHW.detach(), target_size).flatten(1).to(decoded_BX.dtype)
    return (decoded_BX - target_BX).square().mean()


class NTXentDecoder(Objective):
    """The objective of NT-Xent with a decoder, which is trained. Also logs `reconstruction`, the mean squared error.

    A call that may not update state does not change the running statistics of the decoder. Its weights come from
    torch's default generator.
    """

    def __init__(self, config: NTXentDecoderConfig, *, embedding_size: int, image_channels: int) -> None:
        super().__init__()
        self._config = config
        num_values = image_channels * config.target_size**2
        self.decoder = build_head(config.decoder, embedding_size, num_values, batch_norm="synchronized")

    def forward(self, z_a_BD: Tensor, z_b_BD: Tensor, pair: ViewPair) -> ObjectiveOutput:
        config = self._config
        output = nt_xent_loss(z_a_BD, z_b_BD, temperature=config.temperature, chunk_size=config.chunk_size)
        errors = []
        for z_BD, views_BCHW in ((z_a_BD, pair.views_a_BCHW), (z_b_BD, pair.views_b_BCHW)):
            decoded_BX = predict(self.decoder, z_BD, updates_buffers=pair.updates_state)
            errors.append(reconstruction_loss(decoded_BX, views_BCHW, target_size=config.target_size))
        reconstruction = torch.stack(errors).mean()
        loss = output.loss + config.decoder_weight * reconstruction
        return ObjectiveOutput(loss, {**output.metrics, "reconstruction": reconstruction.detach()})
