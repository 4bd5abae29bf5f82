"""Adversarial masks: what a view hides, the penalty, what the network learns from in a step, and what it learns.

That ranks and micro batches are one process is in test_exactness.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from configs import resolve_recipe
from data_pipeline.core.batch import Batch
from data_pipeline.core.counter_rng import DrawKeys
from tests.small_encoder import CONVNET
from trainer.build import Training, build_training
from trainer.objectives import nt_xent_loss
from trainer.views.adversarial_mask import AdversarialMask, AdversarialMaskConfig, mask_penalty
from trainer.views.inputs import from_bytes

PAIR = "views={kind: pair, first: {kind: expert_image}, second: {kind: adversarial_mask, sparsity_weight: 0.3}}"


def policy_of(**settings: Any) -> AdversarialMask:
    torch.manual_seed(0)
    return AdversarialMask(AdversarialMaskConfig(**settings), image_channels=3).double()


def pictures(num: int, size: int = 20) -> Tensor:
    return torch.rand(num, 3, size, size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def keys(num: int, *, view: int = 0, epoch: int = 1) -> DrawKeys:
    return DrawKeys(seed=3, epoch=epoch, index_B=torch.arange(num), view=view)


def test_a_view_is_the_picture_without_one_of_the_masks_that_share_it_out() -> None:
    policy, x = policy_of(num_masks=3), pictures(60)
    with torch.no_grad():
        for parameter in policy.network.out.parameters():
            parameter.mul_(20)  # so that masks differ
        masks_BNHW, views = policy.masks(x), policy(x, keys(60))
    torch.testing.assert_close(masks_BNHW.sum(1), torch.ones(60, 20, 20, dtype=torch.float64))
    candidates = torch.stack([x * (1 - mask[:, None]) for mask in masks_BNHW.unbind(1)])
    is_it = torch.isclose(candidates, views, rtol=1e-12, atol=0).all(dim=(2, 3, 4))
    assert torch.equal(is_it.sum(0), torch.ones(60, dtype=torch.int64))
    assert is_it.sum(1).min() > 10  # each mask is drawn


def published_penalty(masks_BNHW: Tensor) -> Tensor:
    """The lines of the published code as a loop: 1 / (sin(pi share) + 1e-10), a mean of samples, a sum of masks."""
    total = torch.zeros((), dtype=torch.float64)
    for masks_NHW in masks_BNHW:
        for mask_HW in masks_NHW:
            total = total + 1 / (torch.sin(mask_HW.sum() / mask_HW.numel() * math.pi) + 1e-10) / len(masks_BNHW)
    return total


def test_the_penalty_is_the_published_one() -> None:
    masks_BNHW = (3 * pictures(5)).softmax(1)
    assert mask_penalty(masks_BNHW).item() == pytest.approx(published_penalty(masks_BNHW).item(), rel=1e-12)
    halves = torch.zeros(1, 2, 4, 4)
    halves[:, 0, :2] = halves[:, 1, 2:] = 1
    assert mask_penalty(halves).item() == pytest.approx(2)
    assert mask_penalty(torch.eye(2)[None, :, :1, None].expand(1, 2, 4, 4)).item() > 1e6  # nothing and everything
    policy = policy_of(sparsity_weight=0.3)
    policy(pictures(5), keys(5))
    expected = 0.3 * published_penalty(policy.masks(pictures(5)))
    torch.testing.assert_close(policy.take_penalty(), expected)


STORED = torch.randint(0, 256, (8, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(5))
BATCH = Batch(3, 1, torch.arange(8), STORED, STORED, None, None, {})


def gradients(*overrides: str) -> tuple[Training, dict[str, list[Tensor]]]:
    """Return an untrained run, and the gradients of its networks in a step."""
    every = [PAIR, CONVNET, "precision=float64", "objective.kind=nt_xent", "global_batch_size=8"]
    config = resolve_recipe("debug:viewmaker", [*every, *overrides])
    training = build_training(config, num_samples=8, num_classes={}, device=torch.device("cpu"))
    found: dict[str, list[Tensor]] = {}
    for name, engine in training.engines.items():

        def keep(name: str = name, engine: Any = engine, **_: object) -> None:
            found[name] = [parameter.grad.clone() for parameter in engine.module.parameters()]

        engine.step = keep  # type: ignore[method-assign]
    training.step(BATCH, learning_rates=dict.fromkeys(training.engines, 0.0))
    return training, found


@pytest.mark.parametrize("update", ["simultaneous", "alternating"])
def test_the_network_learns_from_the_published_loss(update: str) -> None:
    """Its gradient in a step is that of minus the encoder's loss plus the penalty, and the encoder's has none of it."""
    training, found = gradients(f"adversary.update={update}", "adversary.weight=0.5", "objective.temperature=0.2")
    encoder, policy = training.modules.encoder, training.modules.view_policy
    first_view = {"viewmaker": 2 if update == "alternating" else 0, "encoder": 0}
    for name, module in {"viewmaker": policy, "encoder": encoder}.items():
        x = from_bytes(STORED, torch.float64)
        drawn = BATCH.draw_keys(seed=0, view=first_view[name])
        views = policy(torch.cat([x, x]), drawn.two_views(), None)
        loss = nt_xent_loss(*encoder(views, 2).chunk(2), temperature=0.2).loss
        mask = next(each for each in policy.modules() if isinstance(each, AdversarialMask))
        wanted = -0.5 * loss + mask.take_penalty() if name == "viewmaker" else loss
        expected = torch.autograd.grad(wanted, list(module.parameters()))
        assert len(found[name]) == len(expected)
        for ours, theirs in zip(found[name], expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-13)


def test_the_penalty_of_micro_batches_is_that_of_the_batch() -> None:
    """With next to no weight of the loss, which batch norm changes, only the penalty is left."""
    whole, in_parts = (
        gradients("adversary.weight=1e-12", f"memory.micro_batches={number}")[1]["viewmaker"] for number in (1, 4)
    )
    for ours, theirs in zip(in_parts, whole, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)
    assert any(gradient.abs().max() > 1e-4 for gradient in whole)


def test_the_network_learns_to_hide_what_the_encoder_reads() -> None:
    """This encoder reads the left half only, so one of two masks hides that half, and the other one the rest."""
    policy, x = policy_of(num_masks=2, sparsity_weight=1.0), pictures(16, size=16)
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    for step in range(80):
        views = policy(x, keys(16, epoch=step))
        kept = (views[..., :8] / x[..., :8].clamp_min(0.01)).mean(dim=(1, 2, 3))
        loss = (kept - 1).square().mean()  # the distance of the views, which the encoder would lower
        optimizer.zero_grad()
        (policy.take_penalty() - 4 * loss).backward()
        optimizer.step()
    with torch.no_grad():
        left_BN, right_BN = (half.mean((2, 3)) for half in policy.masks(x).chunk(2, dim=3))
    hides_left_B = left_BN.argmax(1, keepdim=True)
    assert left_BN.gather(1, hides_left_B).min() > 0.9
    assert right_BN.gather(1, hides_left_B).max() < 0.2


def test_pictures_that_are_too_small_are_refused() -> None:
    with pytest.raises(ValueError, match="need pictures of 8 x 8 or more, got 7 x 20"):
        AdversarialMaskConfig().check_image_size(height=7, width=20)
