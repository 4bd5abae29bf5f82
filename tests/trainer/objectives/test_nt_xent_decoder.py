"""NT-Xent with a decoder: the squared error against a loop, and the sum of the two losses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.trainer.objectives.pair_losses import related_views
from trainer.models.heads import HeadConfig
from trainer.objectives import NTXentDecoderConfig, ViewPair, nt_xent_loss
from trainer.objectives.nt_xent_decoder import NTXentDecoder, reconstruction_loss

CONFIG = NTXentDecoderConfig(
    temperature=0.3, decoder=HeadConfig(hidden_sizes=(7,), batch_norm=True), decoder_weight=0.7, target_size=2
)


def objective(*, in_channels: int = 3) -> NTXentDecoder:
    torch.manual_seed(0)
    return NTXentDecoder(CONFIG, embedding_size=5, image_channels=in_channels).double()


def views(num: int, *, in_channels: int = 3) -> Tensor:
    """(2, B, C, 6, 4), brighter along the batch."""
    views_VBCHW = torch.rand(2, num, in_channels, 6, 4, generator=torch.Generator().manual_seed(0)).double()
    return views_VBCHW * torch.linspace(0.2, 1, num)[:, None, None, None]


def pair_of(views_VBCHW: Tensor) -> ViewPair:
    return ViewPair(views_VBCHW[0], views_VBCHW[1], torch.arange(views_VBCHW.shape[1]), step=0)


def test_the_squared_error_is_that_of_a_loop() -> None:
    views_BCHW = views(5)[0]
    decoded_BX = torch.rand(5, 3 * 2 * 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    squares = []
    for sample in range(5):
        number = 0
        for channel in range(3):
            for row in range(2):
                for column in range(2):
                    block = views_BCHW[sample, channel, 3 * row : 3 * row + 3, 2 * column : 2 * column + 2]
                    squares.append((decoded_BX[sample, number] - block.mean()).square())
                    number += 1
    expected = torch.stack(squares).mean()
    torch.testing.assert_close(reconstruction_loss(decoded_BX, views_BCHW, target_size=2), expected, rtol=1e-12, atol=0)


def test_the_loss_is_nt_xent_plus_the_weighted_error_of_both_views() -> None:
    z_a, z_b = related_views(6, 5)
    views_VBCHW = views(6)
    output, same = objective()(z_a, z_b, pair_of(views_VBCHW)), objective()
    seen = zip((z_a, z_b), views_VBCHW, strict=True)
    errors = [reconstruction_loss(same.decoder(z), views_BCHW, target_size=2) for z, views_BCHW in seen]
    expected = nt_xent_loss(z_a, z_b, temperature=0.3).loss + 0.7 * (errors[0] + errors[1]) / 2
    torch.testing.assert_close(output.loss, expected, rtol=1e-12, atol=0)
    assert output.metrics["reconstruction"].item() == pytest.approx((errors[0] + errors[1]).item() / 2)
    assert output.metrics.keys() == {"alignment", "positive_probability", "reconstruction"}


def test_the_views_get_no_gradient() -> None:
    z_a, z_b = related_views(6, 5)
    views_VBCHW = views(6).requires_grad_()
    torch.autograd.backward(objective()(z_a.requires_grad_(), z_b, pair_of(views_VBCHW)).loss)
    assert views_VBCHW.grad is None
