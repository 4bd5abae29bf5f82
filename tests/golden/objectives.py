"""Losses and gradients of every objective in float64, in one process or on some ranks, each with its own samples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from configs import resolve_recipe
from tests.golden.digests import Numbers, digest
from trainer.distributed.collectives import all_gather_rows, all_reduce_sum, rank, world_size
from trainer.objectives import ObjectiveInputs, ViewPair

NUM_STEPS, NUM_SAMPLES, SIZE = 2, 8, 6
VIEWS = ("a", "b", "further")

IN_CHUNKS = ("nt_xent", "nt_xent_published", "split", "dcl", "macl", "ifm", "sieve")

# Settings by the name of a case, whose first word is the kind.
CASES: dict[str, str] = {
    **dict.fromkeys(("nt_xent", "nt_xent_published", "info_nce", "split", "linear", "barlow_twins", "simsiam"), ""),
    **dict.fromkeys(("symmetric_info_nce", "dcl", "macl", "ifm", "vicreg", "sigreg", "sieve"), ""),
    **{f"{kind} in chunks": "chunk_size=3" for kind in IN_CHUNKS},
    "barlow_twins unbiased": "unbiased=true",
    "symmetric_info_nce mean": "total=mean chunk_size=3",
    "moco": "queue_size=16",
    "moco one way": "queue_size=16 direction=one_way",
    "instance_discrimination": "num_negatives=5",
    "nt_xent_cycle": "period_epochs=3",
    "nt_xent_decoder": "decoder.hidden_sizes=[8] target_size=4",
    "byol": "predictor.hidden_sizes=[8]",
    **dict.fromkeys(("dino", "dino of three views"), "num_prototypes=12"),
    **dict.fromkeys(("supervised", "supervised of three views", "joint_contrastive"), "label=digit"),
    "nt_xent of three views": "negatives=samples",
}


def numbers_of(cases: Iterable[str] = tuple(CASES)) -> dict[str, Numbers]:
    return {case: one_case(case) for case in cases}


def one_case(case: str) -> Numbers:
    """Return the loss of all ranks at each of two steps, and the gradients of their sum.

    Gradients of embeddings are those of all samples; gradients of parameters are means over the ranks, as in training.
    """
    kind = case.split()[0]
    overrides = [f"objective.kind={kind}", *(f"objective.{setting}" for setting in CASES[case].split())]
    if kind == "sieve":
        overrides.append("encoder.early_head=1")
    config = resolve_recipe("debug:image", [*overrides, f"global_batch_size={NUM_SAMPLES}"]).objective
    with _in_float64():
        encoder = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, SIZE))
        given = ObjectiveInputs(encoder, SIZE, num_samples=NUM_STEPS * NUM_SAMPLES, seed=3, num_classes={"digit": 3})
        objective = config.build(given).double()
    draw = np.random.default_rng(0)
    own = slice(rank() * NUM_SAMPLES // world_size(), (rank() + 1) * NUM_SAMPLES // world_size())
    found: Numbers = {}
    leaves: dict[str, Tensor] = {}
    total: Tensor = torch.zeros((), dtype=torch.float64)
    for step in range(NUM_STEPS):
        anchors = draw.standard_normal((NUM_SAMPLES, SIZE))
        embeddings = {}
        for view in VIEWS:
            z_BD = torch.tensor(anchors + draw.standard_normal(anchors.shape))
            embeddings[f"z_{view} of step {step}"] = z_BD[own].requires_grad_()
        pictures = torch.tensor(draw.uniform(size=(3, NUM_SAMPLES, 3, 8, 8)))[:, own]
        index_B = step * NUM_SAMPLES + torch.tensor(draw.permutation(NUM_SAMPLES))
        labels = {"digit": torch.tensor([1, 0, 2, -1, -1, -1, 2, -1])[own]}
        z_a, z_b, *further = embeddings.values()
        further = further if "three views" in case else []
        a, b, *others = pictures
        seen = tuple(others) if further else ()
        pair = ViewPair(a, b, index_B[own], step, epoch=step, labels=labels, further_views=seen)
        loss = objective(z_a, z_b, pair, *further).loss
        found[f"loss of step {step}"] = [_mean(loss).item()]
        leaves |= embeddings
        total = total + loss
    torch.autograd.backward(total)
    for name, leaf in leaves.items():
        if leaf.grad is not None:  # averaging over ranks divides an embedding's gradient by their number
            found[f"gradient of {name}"] = digest(all_gather_rows(leaf.grad) / world_size())
    for name, parameter in objective.named_parameters():
        if parameter.grad is not None:
            found[f"gradient of {name}"] = digest(_mean(parameter.grad))
    return found


def _mean(tensor: Tensor) -> Tensor:
    return all_reduce_sum(tensor.detach().clone()) / world_size()


@contextmanager
def _in_float64() -> Iterator[None]:
    """Draw weights in float64 from a fixed seed: vector units of CPUs round draws in float32 differently."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            yield
    finally:
        torch.set_default_dtype(before)
