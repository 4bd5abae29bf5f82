from __future__ import annotations

import copy

import pytest
import torch
from lightly.loss import NTXentLoss
from lightly.models.utils import update_momentum
from torch import Tensor, nn

from configs import resolve_recipe
from data_pipeline.core.errors import UserError
from tests.gloo import run_ranks
from tests.trainer.objectives.toy_moco import (
    EMBEDDING_SIZE,
    NUM_SPLITS,
    pair_of,
    toy_encoder,
    toy_moco,
    train,
    training_views,
)
from trainer.objectives.moco import MoCoConfig, enqueue, key_log_probability, shuffled_order


def moco_loss(z_BD: Tensor, keys_BD: Tensor, queue_QD: Tensor, *, temperature: float) -> Tensor:
    return -key_log_probability(z_BD, keys_BD, queue_QD, temperature=temperature).mean()


def loss_by_loop(z_BD: Tensor, keys_BD: Tensor, queue_QD: Tensor, temperature: float) -> Tensor:
    losses = []
    for z, key in zip(z_BD.double(), keys_BD.double(), strict=True):
        u = z / z.norm()
        own = (u @ (key / key.norm()) / temperature).exp()
        others = torch.stack([(u @ other / temperature).exp() for other in queue_QD.double()])
        losses.append(-(own / (own + others.sum())).log())
    return torch.stack(losses).mean()


def random_inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    z_BD, keys_BD, queue_QD = (torch.randn(num, 6, generator=generator) for num in (7, 7, 12))
    return 3 * z_BD, keys_BD, nn.functional.normalize(queue_QD, dim=1)


@pytest.mark.parametrize("temperature", [0.07, 0.5])
def test_loss_and_gradient_equal_a_loop_in_float64(temperature: float) -> None:
    for dtype, rtol in ((torch.float32, 1e-5), (torch.float64, 1e-13)):
        z_BD, keys_BD, queue_QD = (tensor.to(dtype) for tensor in random_inputs())
        ours, theirs = z_BD.clone().requires_grad_(), z_BD.clone().requires_grad_()
        loss = moco_loss(ours, keys_BD, queue_QD, temperature=temperature)
        expected = loss_by_loop(theirs, keys_BD, queue_QD, temperature)
        torch.testing.assert_close(loss.double(), expected, rtol=rtol, atol=0)
        (grad_BD,), (expected_grad_BD,) = torch.autograd.grad(loss, ours), torch.autograd.grad(expected, theirs)
        assert (grad_BD - expected_grad_BD).norm() <= rtol * expected_grad_BD.norm()


def test_the_queue_forgets_the_oldest_keys() -> None:
    queue_QD = torch.eye(8)[:6]
    longer = enqueue(queue_QD, 3 * torch.eye(8)[6:])
    assert torch.equal(longer, torch.eye(8)[2:])
    assert torch.equal(queue_QD, torch.eye(8)[:6])


def test_a_queue_that_the_batch_does_not_divide_is_refused() -> None:
    resolve_recipe("debug:image", ["objective={kind: moco, queue_size: 512}", "global_batch_size=512"])
    with pytest.raises(UserError, match=r"queue_size 64 .* global_batch_size 256; the nearest is 256"):
        resolve_recipe("debug:image", ["objective={kind: moco, queue_size: 64}", "global_batch_size=256"])


@pytest.mark.parametrize("direction", ["symmetric", "one_way"])
def test_training_equals_lightly(direction: str) -> None:
    """Loss, every gradient, queue and key encoder over four steps, in the order of the published code."""
    config = MoCoConfig.model_validate({"queue_size": 24, "momentum": 0.9, "direction": direction})
    ours, theirs = toy_encoder(), toy_encoder()
    objective = toy_moco(ours, config)
    their_keys = copy.deepcopy(theirs)
    peer = NTXentLoss(temperature=0.1, memory_bank_size=(24, EMBEDDING_SIZE)).double()
    peer.memory_bank.bank.copy_(objective.queue_QD)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.5) for module in (ours, theirs)]
    for views_VBCHW in training_views(4):
        z_VBD = [ours(view_BCHW) for view_BCHW in views_VBCHW]
        loss = objective(*z_VBD, pair_of(views_VBCHW)).loss
        losses = []
        their_z = [theirs(view_BCHW) for view_BCHW in views_VBCHW]
        for query, key in [(0, 1), (1, 0)][: 1 if direction == "one_way" else 2]:
            update_momentum(theirs, their_keys, m=0.9)
            with torch.no_grad():
                keys_BD = their_keys(views_VBCHW[key])
            losses.append(peer(their_z[query], keys_BD))
        expected = torch.stack(losses).mean()
        torch.testing.assert_close(loss, expected, rtol=1e-10, atol=0)
        for value, module, optimizer in zip((loss, expected), (ours, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            torch.autograd.backward(value)
            assert all(parameter.grad is not None for parameter in module.parameters())
            optimizer.step()
        for parameter, twin in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(parameter, twin, rtol=1e-9, atol=1e-12)
    for value, twin in zip(
        objective.key_encoder.module.state_dict().values(), their_keys.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(value, twin, rtol=1e-9, atol=1e-12)
    # Ours begins with the oldest key, theirs with the first place.
    assert peer.memory_bank.bank_ptr.item() == (16 if direction == "symmetric" else 8)
    in_order = peer.memory_bank.bank.roll(-int(peer.memory_bank.bank_ptr), 0)
    torch.testing.assert_close(objective.queue_QD, in_order, rtol=1e-9, atol=1e-12)


def test_the_second_key_sees_the_first_in_the_queue() -> None:
    objective = toy_moco(toy_encoder(), MoCoConfig(queue_size=16))
    (views_VBCHW,) = training_views(1)
    z_a_BD, z_b_BD = torch.randn(2, 8, EMBEDDING_SIZE, dtype=torch.float64)
    before_QD = objective.queue_QD
    loss = objective(z_a_BD, z_b_BD, pair_of(views_VBCHW)).loss
    # At the first step the key encoder is the encoder, however often it follows.
    keys_a_BD, keys_b_BD = (toy_encoder()(view_BCHW).detach() for view_BCHW in views_VBCHW)
    between_QD = enqueue(before_QD, keys_b_BD)
    expected = (
        moco_loss(z_a_BD, keys_b_BD, before_QD, temperature=0.1)
        + moco_loss(z_b_BD, keys_a_BD, between_QD, temperature=0.1)
    ) / 2
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=0)
    torch.testing.assert_close(objective.queue_QD, enqueue(between_QD, keys_a_BD), rtol=1e-10, atol=1e-12)


def test_order_of_keys() -> None:
    index_G = torch.randperm(1000, generator=torch.Generator().manual_seed(0))[:64]
    orders = [shuffled_order(index_G, step=step, view=view) for step in range(3) for view in range(2)]
    assert len({tuple(order_G.tolist()) for order_G in orders}) == 6
    for order_G in orders:
        assert torch.equal(order_G.sort().values, torch.arange(64))
        # By chance a place keeps its group of 8 with probability 1/8.
        assert (order_G // 8 == torch.arange(64) // 8).float().mean() < 0.4
    assert torch.equal(shuffled_order(index_G, step=1, view=0), shuffled_order(index_G.clone(), step=1, view=0))
    # It goes by the samples, not by their places.
    first, second = (index[shuffled_order(index, step=0, view=0)] for index in (index_G, index_G.flip(0)))
    assert torch.equal(first, second)


def test_keys_of_split_batch_norm_are_shuffled_and_put_back() -> None:
    """One step against torch's own layers, group by group, in float64."""
    (views_VBCHW,) = training_views(1)
    encoder = toy_encoder("split")
    objective = toy_moco(encoder, MoCoConfig(queue_size=16))
    before_QD = objective.queue_QD
    conv, _, *rest = toy_encoder("split")
    reference = nn.BatchNorm2d(4).double()

    def keys_of(view: int) -> Tensor:
        order_G = shuffled_order(torch.arange(8), step=5, view=view)
        assert {frozenset(group) for group in order_G.view(NUM_SPLITS, -1).tolist()} != {
            frozenset(group) for group in torch.arange(8).view(NUM_SPLITS, -1).tolist()
        }
        keys_BD = torch.empty(8, EMBEDDING_SIZE, dtype=torch.float64)
        for group in order_G.view(NUM_SPLITS, -1):
            keys_BD[group] = nn.Sequential(conv, reference, *rest)(views_VBCHW[view][group]).detach()
        return keys_BD

    z_VBD = torch.randn(2, 8, EMBEDDING_SIZE, dtype=torch.float64)
    objective(*z_VBD, pair_of(views_VBCHW, step=5))
    torch.testing.assert_close(
        objective.queue_QD, enqueue(enqueue(before_QD, keys_of(1)), keys_of(0)), rtol=1e-10, atol=1e-12
    )


@pytest.mark.ranks
def test_ranks_with_split_batch_norm_equal_one_process() -> None:
    num_ranks, views_TVBCHW = 4, training_views()
    losses, *expected = train(views_TVBCHW)
    by_rank = run_ranks(train, num_ranks, views_TVBCHW)
    for step, loss in enumerate(losses):
        of_ranks = torch.stack([rank_losses[step] for rank_losses, *_ in by_rank])
        assert len(set(of_ranks.tolist())) == num_ranks
        torch.testing.assert_close(of_ranks.mean(), loss, rtol=1e-9, atol=0)
    for _, *results in by_rank:
        for ours, theirs in zip(results, expected, strict=True):
            assert ours.keys() == theirs.keys()
            for name, value in theirs.items():
                torch.testing.assert_close(ours[name], value, rtol=1e-9, atol=1e-11, msg=name)
    queues = [state["queue_QD"] for *_, state in by_rank]
    assert all(torch.equal(queue_QD, queues[0]) for queue_QD in queues)
