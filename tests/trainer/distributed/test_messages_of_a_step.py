"""The messages of a training step: how many, how large, and when, as the first of several ranks sends them.

The other ranks do not exist, so nothing is sent. DDP sends the same buckets of gradients as on gloo: a gather for each,
where NCCL sends a sum.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from configs import resolve_recipe
from data_pipeline.core.batch import Batch
from trainer.build import Training, build_training
from trainer.distributed.fake_process_group import fake_ranks

NUM_RANKS, NUM_ROWS = 2, 2
FIRST_BUCKET, BUCKET = 1 << 20, 25 << 20  # bytes: the limits of DDP
LAYER = "layer"
SETTINGS = ["tracking.wandb=disabled", f"global_batch_size={NUM_RANKS * NUM_ROWS}"]
SETTINGS += ["encoder.mean=[0.5, 0.5, 0.5]", "encoder.std=[0.25, 0.25, 0.25]"]


@dataclass(frozen=True)
class Message:
    """A collective by its operation, and how many bytes this rank puts into it; or the backward pass of a layer."""

    name: str
    num_bytes: int = 0


class Messages(TorchDispatchMode):
    """Notes the collectives in their order, among the backward passes of convolutions."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[Message] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if func.namespace == "c10d":
            output_first = "gather" in name or "scatter" in name
            given = [each for each in tree_leaves(args[int(output_first)]) if isinstance(each, Tensor)]
            self.found.append(Message(name.strip("_").removesuffix("_base"), sum(each.nbytes for each in given)))
        elif name == "convolution_backward":
            self.found.append(Message(LAYER))
        return func(*args, **(kwargs or {}))


def two_steps(recipe: str) -> tuple[Training, list[Message], list[Message]]:
    """Return the messages of the third and of the fourth step; after its first one, DDP plans its buckets anew."""
    training = build_training(resolve_recipe(recipe, SETTINGS), num_samples=64, device=torch.device("cpu"))
    pictures = torch.randint(0, 256, (NUM_ROWS, 3, 16, 16), dtype=torch.uint8)
    batch = Batch(0, 0, torch.arange(NUM_ROWS), pictures, pictures, None, None, {})
    sent = []
    for _ in range(4):
        with Messages() as messages:
            training.step(batch, learning_rates=defaultdict(float))
        sent.append(messages.found)
    return training, sent[2], sent[3]


def bytes_of(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters() if parameter.requires_grad)


def without_engines(training: Training) -> Counter[Message]:
    """Return the messages that the method needs, without those for parameters and gradients."""
    norms = [each for each in training.modules.encoder.modules() if isinstance(each, nn.modules.batchnorm._BatchNorm)]
    size = 4 * 2 * NUM_ROWS * training.modules.config.encoder.embedding_size  # of both views
    expected = Counter({Message("allgather", size): 1, Message("reduce_scatter", NUM_RANKS * size): 1})
    for norm in norms:  # two numbers a channel and view each way, and the number of rows
        expected[Message("allgather", 4 * (4 * norm.num_features + 1))] += 1
        expected[Message("allreduce", 4 * 4 * norm.num_features)] += 1
    assert expected.total() == 2 + 2 * 20
    return expected


@pytest.mark.slow
def test_a_step_sends_each_number_once_and_gradients_while_others_are_computed() -> None:
    with fake_ranks(NUM_RANKS, sums_by_gathering=False):
        training, found, after = two_steps("viewmaker:digits")
        assert after == found  # so a recorded step would send what a plain one sends
        buckets = Counter(found) - without_engines(training)
        del buckets[Message(LAYER)]
        assert not without_engines(training) - Counter(found)
        modules = [*training.modules.trained_modules.values()]
        places = [number for number, message in enumerate(found) if message in buckets]
        assert {found[place].name for place in places} == {"allgather"}
        start = 0
        for module in modules:  # gradients reach the encoder first
            num_buckets, num_bytes = 0, 0
            while num_bytes < bytes_of(module):
                num_bytes += found[places[start + num_buckets]].num_bytes
                num_buckets += 1
            assert num_bytes == bytes_of(module)
            assert num_buckets <= 3 + (bytes_of(module) - FIRST_BUCKET) // BUCKET
            last_layer = max(
                place for place, m in enumerate(found[: places[start + num_buckets - 1]]) if m == Message(LAYER)
            )
            assert all(place < last_layer for place in places[start : start + num_buckets - 1])
            assert num_buckets > 1
            start += num_buckets
        assert start == len(places)
