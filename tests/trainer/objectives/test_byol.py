"""BYOL: against the loop of the paper in plain torch, with lightly's parts."""

from __future__ import annotations

import copy

import torch
from lightly.loss import NegativeCosineSimilarity
from lightly.models.utils import deactivate_requires_grad, update_momentum
from torch import Tensor, nn

from tests.trainer.objectives.toy_moco import pair_of, toy_encoder, training_views
from trainer.models.heads import HeadConfig
from trainer.objectives.byol import BYOL, BYOLConfig, byol_loss

CONFIG = BYOLConfig(predictor=HeadConfig(hidden_sizes=(6,), batch_norm=True), momentum=0.8)


def byol(encoder: nn.Module) -> BYOL:
    torch.manual_seed(1)
    return BYOL(CONFIG, encoder=encoder, embedding_size=5).double()


def by_loop(p_a_BD: Tensor, p_b_BD: Tensor, t_a_BD: Tensor, t_b_BD: Tensor) -> Tensor:
    """Squared distances of unit vectors, summed over the two directions."""
    distances = []
    for p_a, p_b, t_a, t_b in zip(p_a_BD, p_b_BD, t_a_BD, t_b_BD, strict=True):
        first = (p_a / p_a.norm() - t_b / t_b.norm()).square().sum()
        second = (p_b / p_b.norm() - t_a / t_a.norm()).square().sum()
        distances.append(first + second)
    return torch.stack(distances).mean()


def test_loss_and_gradients_equal_a_loop_in_float64() -> None:
    p_a, p_b, t_a, t_b = torch.randn(4, 7, 4, dtype=torch.float64, requires_grad=True).unbind()
    value, expected = byol_loss(p_a, p_b, t_a, t_b), by_loop(p_a, p_b, t_a, t_b)
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=0)
    ours, theirs = (torch.autograd.grad(loss, (p_a, p_b)) for loss in (value, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-14)


def steps_of_ours(num_steps: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Each step's loss, and encoder, predictor and teacher after the last one."""
    encoder = toy_encoder()
    objective = byol(encoder)
    trained = [*encoder.parameters(), *objective.predictor.parameters()]
    losses = []
    for step, views_VBCHW in enumerate(training_views(num_steps)):
        output = objective(encoder(views_VBCHW[0]), encoder(views_VBCHW[1]), pair_of(views_VBCHW, step=step))
        gradients = torch.autograd.grad(output.loss, trained)
        losses.append(output.loss.detach())
        with torch.no_grad():
            for parameter, gradient in zip(trained, gradients, strict=True):
                parameter.sub_(0.5 * gradient)
    state = {f"encoder.{name}": value for name, value in encoder.state_dict().items()}
    return losses, copy.deepcopy(state | objective.saved_state())


def steps_of_the_paper(num_steps: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Algorithm 1 of Grill et al. 2020 with lightly's cosine and momentum update, in one process.

    The teacher is returned as it was in the last step, because ours follows at the beginning of the next one.
    """
    online = toy_encoder()
    teacher = copy.deepcopy(online)
    predictor = byol(online).predictor
    deactivate_requires_grad(teacher)
    cosine = NegativeCosineSimilarity()
    trained = [*online.parameters(), *predictor.parameters()]
    losses: list[Tensor] = []
    state: dict[str, Tensor] = {}
    for view_a, view_b in training_views(num_steps):
        p_a, p_b = (predictor(online(view)) for view in (view_a, view_b))
        with torch.no_grad():
            t_a, t_b = teacher(view_a), teacher(view_b)
        loss = 2 + 2 * cosine(p_a, t_b) + 2 + 2 * cosine(p_b, t_a)
        gradients = torch.autograd.grad(loss, trained)
        losses.append(loss.detach())
        with torch.no_grad():
            for parameter, gradient in zip(trained, gradients, strict=True):
                parameter.sub_(0.5 * gradient)
        state = {f"teacher.module.{name}": value.clone() for name, value in teacher.state_dict().items()}
        update_momentum(online, teacher, m=0.8)
    state |= {f"encoder.{name}": value for name, value in online.state_dict().items()}
    state |= {f"predictor.{name}": value for name, value in predictor.state_dict().items()}
    return losses, state


def test_three_steps_are_those_of_the_paper() -> None:
    losses, state = steps_of_ours(3)
    expected_losses, expected = steps_of_the_paper(3)
    torch.testing.assert_close(losses, expected_losses, rtol=1e-10, atol=0)
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-13, msg=name)
