from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError

from trainer.models.heads import HeadConfig, build_head


@pytest.mark.parametrize(
    ("config", "num_in", "num_out", "expected"),
    [
        (HeadConfig(), 512, 128, 65_664),
        (HeadConfig(hidden_sizes=(512,)), 512, 128, 328_320),
        (HeadConfig(hidden_sizes=(2048,), batch_norm=True, output_batch_norm=True), 512, 2048, 5_255_168),
        (HeadConfig(hidden_sizes=(512,), batch_norm=True), 2048, 2048, 2_100_736),
        (HeadConfig(hidden_sizes=(2048, 2048), batch_norm=True, output_batch_norm=True), 512, 2048, 9_455_616),
    ],
    ids=["linear", "simclr", "simsiam projector", "simsiam predictor", "barlow twins"],
)
def test_numbers_of_parameters(config: HeadConfig, num_in: int, num_out: int, expected: int) -> None:
    with torch.device("meta"):
        head = build_head(config, num_in, num_out, batch_norm="synchronized")
    assert sum(parameter.numel() for parameter in head.parameters()) == expected


def test_a_batch_norm_without_a_place_is_refused() -> None:
    with pytest.raises(ValidationError, match="batch_norm follows hidden layers, but there are none"):
        HeadConfig(batch_norm=True)
    with pytest.raises(ValidationError):
        HeadConfig(hidden_sizes=(512, 0))
