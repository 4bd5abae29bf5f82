from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from tests.gloo import run_ranks
from trainer.distributed.collectives import rank, world_size
from trainer.models.heads import HeadConfig, build_head

WITH_NORMS = HeadConfig(hidden_sizes=(6, 7), batch_norm=True, output_batch_norm=True)


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


def trained(x_BC: Tensor, weight_BD: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """A step's outputs, the inputs' gradient, and parameter gradients and running statistics, on this rank's rows."""
    torch.manual_seed(0)
    head = build_head(WITH_NORMS, 5, 4, batch_norm="synchronized").double()
    model = DistributedDataParallel(head, broadcast_buffers=False) if world_size() > 1 else head
    x = x_BC.chunk(world_size())[rank()].clone().requires_grad_()
    out = model(x)
    # Times the number of ranks, because DDP averages and this loss is a sum.
    (world_size() * (out * weight_BD.chunk(world_size())[rank()]).sum()).backward()
    assert x.grad is not None
    gradients = {name: p.grad for name, p in head.named_parameters() if p.grad is not None}
    assert len(gradients) == len(list(head.parameters()))
    return out.detach(), x.grad / world_size(), gradients | dict(head.named_buffers())


@pytest.mark.ranks
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_ranks_equal_one_process(num_ranks: int) -> None:
    generator = torch.Generator().manual_seed(1)
    x_BC = torch.randn(12, 5, generator=generator, dtype=torch.float64)
    x_BC += torch.linspace(-2, 2, 12, dtype=torch.float64)[:, None]  # each rank's own statistics would be wrong
    weight_BD = torch.randn(12, 4, generator=generator, dtype=torch.float64)
    out, grad_x, others = trained(x_BC, weight_BD)
    by_rank = run_ranks(trained, num_ranks, x_BC, weight_BD)
    torch.testing.assert_close(torch.cat([result[0] for result in by_rank]), out, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(torch.cat([result[1] for result in by_rank]), grad_x, rtol=1e-9, atol=1e-12)
    for result in by_rank:
        # The bias before a batch norm has no gradient but rounding errors; hence the absolute tolerance.
        torch.testing.assert_close(result[2], others, rtol=1e-9, atol=1e-12)
