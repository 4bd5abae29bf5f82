"""Ranks that have parted are noticed, by every bit of every kind of tensor, before their state is saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from configs import resolve_recipe
from data_pipeline.core.errors import UserError
from tests.gloo import run_ranks
from tests.tiny_data import write_tiny_pair
from trainer.distributed.collectives import FirstRankExit, rank
from trainer.distributed.replicas import first_difference
from trainer.run_dir import RunDir
from trainer.step import TrainingStep
from trainer.train import train

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool]


def flip_a_bit(tensor: Tensor, *, byte: int = 0, bit: int = 0) -> None:
    tensor.detach().view(-1).view(torch.uint8)[byte] ^= 1 << bit


def differences() -> list[str | None]:
    """Return what is found before and after rank 1 of three flips a bit in a tensor of each type."""
    states = {"encoder": {str(dtype): torch.ones(3, 2).to(dtype) for dtype in DTYPES}, "run": {"scale": torch.ones(())}}
    found = [first_difference(states)]
    for tensor in states["encoder"].values():
        highest = 0 if tensor.dtype == torch.bool else 7
        if rank() == 1:
            flip_a_bit(tensor, byte=tensor.itemsize - 1, bit=highest)
        found.append(first_difference(states))
        if rank() == 1:
            flip_a_bit(tensor, byte=tensor.itemsize - 1, bit=highest)
    return found


@pytest.mark.ranks
def test_a_flipped_bit_of_any_kind_of_tensor_names_the_rank_and_the_tensor() -> None:
    for none, *found in run_ranks(differences, 3):
        assert none is None
        expected = [f"rank 1 has other bits than rank 0 in 1 of 7 tensors ({dtype} (encoder))" for dtype in DTYPES]
        assert found == expected


def train_with_a_flipped_weight(data: Path, directory: Path) -> str:
    """Train on a rank; a bit of a weight flips on rank 1 in step 3. Return the error. Fail if a pickle is read."""
    take, torch_messages = TrainingStep.__call__, torch.distributed.distributed_c10d

    def flipping(self: TrainingStep, batch: Any, **given: Any) -> Any:
        output = take(self, batch, **given)
        if batch.step == 3 and rank() == 1:
            flip_a_bit(next(self._encoder.module.parameters()))
        return output

    TrainingStep.__call__ = flipping  # type: ignore[method-assign]
    torch_messages._tensor_to_object = None  # type: ignore[assignment]
    settings = {"data.train_dir": data / "train", "data.test_dir": data / "test", "data.num_workers": 0}
    settings |= {"global_batch_size": 8, "checkpoint_every_steps": 2, "encoder.width": 2, "tracking.wandb": "disabled"}
    config = resolve_recipe("debug:image", [f"{name}={value}" for name, value in settings.items()])
    with pytest.raises((UserError, FirstRankExit)) as raised:
        train(config, RunDir(directory), device=torch.device("cpu"), command="test")
    return str(raised.value)


@pytest.mark.ranks
def test_a_run_ends_before_it_saves_ranks_that_have_parted(tmp_path: Path) -> None:
    data = write_tiny_pair(tmp_path / "data", num_train=64, num_test=8)
    said, exit_of_other = run_ranks(train_with_a_flipped_weight, 2, data, tmp_path / "run")
    assert "rank 1 has other bits than rank 0" in said
    assert "equal at step 2" in said
    assert exit_of_other == "2"
    assert RunDir(tmp_path / "run").latest_step() == 2
