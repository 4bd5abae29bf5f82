"""DINO: its loss against a loop and lightly's, its teacher, centre and temperatures."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from trainer.objectives import DINOConfig, ViewPair, dino_loss
from trainer.objectives.dino import DINO, Prototypes

CONFIG = DINOConfig(num_prototypes=7, momentum=0.9, center_momentum=0.8, warmup_epochs=5)


def rows(number: int, size: int, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(6, size, generator=draw, dtype=torch.float64).to(dtype) for _ in range(number)]


def leaves(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.detach().clone().requires_grad_() for tensor in tensors]


def by_loop(student: list[Tensor], teacher: list[Tensor], center_K: Tensor, tau_s: float, tau_t: float) -> Tensor:
    """The pseudocode of the paper, one sample and one class at a time."""
    terms = []
    for t, scores_t in enumerate(teacher):
        for s, scores_s in enumerate(student):
            if s == t:
                continue
            for t_K, s_K in zip(scores_t, scores_s, strict=True):
                sharp_K = [torch.exp((value - c) / tau_t) for value, c in zip(t_K, center_K, strict=True)]
                log_sum = torch.log(sum((torch.exp(value / tau_s) for value in s_K), start=torch.zeros(())))
                products = [p / sum(sharp_K) * (value / tau_s - log_sum) for p, value in zip(sharp_K, s_K, strict=True)]
                terms.append(-torch.stack(products).sum())
    return torch.stack(terms).mean()


@pytest.mark.parametrize("num_views", [2, 3, 6])
def test_loss_and_gradients_equal_a_loop_and_lightlys_in_float64(num_views: int) -> None:
    from lightly.loss import DINOLoss

    student, teacher, (center_K,) = leaves(rows(num_views, 7)), rows(2, 7, seed=1), (rows(1, 7, seed=2)[0][0],)
    ours = dino_loss(student, teacher, center_K, student_temperature=0.2, teacher_temperature=0.3)
    peer = DINOLoss(output_dim=7, student_temp=0.2, center_momentum=0.8)
    peer.center = center_K[None, None].clone()
    theirs = peer(teacher, student, teacher_temp=0.3)
    looped = by_loop(student, teacher, center_K, 0.2, 0.3)
    gradients = torch.autograd.grad(ours, student)
    # lightly keeps a temperature in float32.
    for expected, tolerance in ((looped, 1e-12), (theirs, 1e-6)):
        torch.testing.assert_close(ours, expected, rtol=tolerance, atol=0)
        torch.testing.assert_close(gradients, torch.autograd.grad(expected, student), rtol=tolerance, atol=1e-8)


def test_the_teachers_temperature_rises_as_lightlys() -> None:
    from lightly.loss import DINOLoss

    expected = DINOLoss(warmup_teacher_temp=0.04, teacher_temp=0.07, warmup_teacher_temp_epochs=5).teacher_temp_schedule
    found = [CONFIG.teacher_temperature_at(epoch) for epoch in range(5)]
    torch.testing.assert_close(torch.tensor(found), expected)
    assert CONFIG.teacher_temperature_at(5) == CONFIG.teacher_temperature_at(99) == 0.07
    assert DINOConfig(warmup_epochs=0).teacher_temperature_at(0) == 0.07
    assert DINOConfig(warmup_epochs=1).teacher_temperature_at(0) == 0.04


def test_scores_are_cosines_with_the_prototypes() -> None:
    prototypes, (z_BD,) = Prototypes(4, 7).double(), rows(1, 4)
    expected = torch.cosine_similarity(z_BD[:, None], prototypes.weight[None], dim=2)
    torch.testing.assert_close(prototypes(z_BD), expected)


class Flat(nn.Module):
    """An encoder of 2 x 2 pixels, for views of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 4)

    def forward(self, views_BCHW: Tensor) -> Tensor:
        z_BD: Tensor = self.linear(nn.functional.adaptive_avg_pool2d(views_BCHW, 2).flatten(1))
        return z_BD


def test_three_steps_are_those_of_the_paper() -> None:
    """The teacher follows after each step of the optimizer, and the centre after each loss."""
    torch.manual_seed(0)
    encoder = Flat().double()
    objective = DINO(CONFIG, encoder=encoder, embedding_size=4).double()
    trained = [*encoder.parameters(), objective.prototypes.weight]
    student = [parameter.detach().clone() for parameter in trained]
    teacher, center_K = [each.clone() for each in student], torch.zeros(7, dtype=torch.float64)

    def scores(weights: list[Tensor], views_BCHW: Tensor) -> Tensor:
        flat = nn.functional.adaptive_avg_pool2d(views_BCHW, 2).flatten(1)
        z_BD = flat @ weights[0].T + weights[1]
        return nn.functional.normalize(z_BD, dim=1) @ nn.functional.normalize(weights[2], dim=1).T

    for step in range(3):
        draw = torch.Generator().manual_seed(step)
        views = [torch.rand(6, 3, size, size, generator=draw, dtype=torch.float64) for size in (4, 4, 2, 2, 2)]
        z_a, z_b, *further = (encoder(each) for each in views)
        pair = ViewPair(views[0], views[1], torch.arange(6), step, epoch=step)
        output = objective(z_a, z_b, pair, *further)
        gradients = torch.autograd.grad(output.loss, trained)

        student = leaves(student)
        teacher = [0.9 * old + 0.1 * new.detach() for old, new in zip(teacher, student, strict=True)]
        targets = [scores(teacher, each) for each in views[:2]]
        tau_t = (0.04, 0.0475, 0.055)[step]
        loss = by_loop([scores(student, each) for each in views], targets, center_K, 0.1, tau_t)
        expected = torch.autograd.grad(loss, student)
        probability_2BK = ((torch.cat(targets) - center_K) / tau_t).softmax(1)
        entropy = -(probability_2BK * probability_2BK.log()).sum(1).mean()
        center_K = 0.8 * center_K + 0.2 * torch.cat(targets).mean(0)

        torch.testing.assert_close(output.loss, loss, rtol=1e-10, atol=0)
        torch.testing.assert_close(gradients, expected, rtol=1e-8, atol=1e-12)
        torch.testing.assert_close(objective.center_K, center_K)
        torch.testing.assert_close(output.metrics["teacher_entropy"], entropy)
        with torch.no_grad():
            for parameter, gradient in zip(trained, gradients, strict=True):
                parameter.sub_(gradient, alpha=0.5)
            student = [each.detach() - 0.5 * gradient for each, gradient in zip(student, expected, strict=True)]


def test_low_precision_is_raised() -> None:
    student, teacher = (rows(2, 7, seed=seed, dtype=torch.bfloat16) for seed in (0, 1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = dino_loss(student, teacher, torch.zeros(7))
    assert loss.dtype == torch.float32
    assert torch.equal(loss, dino_loss([z.float() for z in student], [z.float() for z in teacher], torch.zeros(7)))
