"""Test the linear model against plain versions of itself, and its verdicts in settings with a known truth."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from data_pipeline.core.counter_rng import DrawKeys, normal
from data_pipeline.core.errors import UserError
from trainer.theory.framework.claim import ClaimResult
from trainer.theory.framework.experiment import judge
from trainer.theory.linear_contrastive import model as linear_model
from trainer.theory.linear_contrastive.experiment import EXPERIMENT
from trainer.theory.linear_contrastive.model import (
    angular_speeds,
    downstream_error,
    draw_pairs,
    feature_states,
    speed_grid,
    train_arms,
)
from trainer.theory.linear_contrastive.settings import TrainingSettings

CPU = torch.device("cpu")
ONE_FEATURE_MORE = feature_states([45], [0.6], [0.7])
NONE_BESIDE = feature_states([], [], [])


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def run(*overrides: str) -> dict[str, ClaimResult]:
    """Return the judged claims by name."""
    settings = EXPERIMENT.defaults.override(overrides, where="test")
    return {result.name: result for result in judge("linear_contrastive", EXPERIMENT.run(settings, CPU))}


def views_of(x_KD: Tensor, independent_KD: Tensor, alpha_K: Tensor) -> Tensor:
    """Return views (..., K, D) of inputs, made of independent rows and the correlations of the features."""
    along_K = alpha_K * x_KD[..., 0] + (1 - alpha_K**2).sqrt() * independent_KD[..., 0]
    return torch.cat([along_K[..., None], independent_KD[..., 1:]], dim=-1)


def contrastive_loss(theta_KD: Tensor, x_MKD: Tensor, v_MKD: Tensor) -> Tensor:
    """Return the mean of -log p_ii over the batch, (...)."""
    fx_MK, fv_MK = (torch.einsum("...mkd,...kd->...mk", rows_MKD, theta_KD) for rows_MKD in (x_MKD, v_MKD))
    return -(fx_MK @ fv_MK.mT).log_softmax(-1).diagonal(dim1=-2, dim2=-1).mean(-1)


def test_the_grid_is_a_loop_over_its_points() -> None:
    weak = feature_states([5, 60, 85], [0.3, 2.0], [0.2, 0.9])
    other = feature_states([0, 40, 90], [0.5, 3.0], [0.0, 0.8])
    pairs = draw_pairs(3, 0, 5, num_pairs=12, num_features=3, device=CPU)
    of_grid = angular_speeds(weak, other, ONE_FEATURE_MORE, pairs)
    for p in range(0, len(weak), 3):
        for q in range(len(other)):
            at_point = angular_speeds(weak[p : p + 1], other[q : q + 1], ONE_FEATURE_MORE, pairs)
            for found_RPQ, expected_R11 in zip(of_grid, at_point, strict=True):
                assert torch.allclose(found_RPQ[:, p, q], expected_R11[:, 0, 0], rtol=1e-10, atol=1e-12)


def test_the_speed_equals_that_from_autograd_in_any_dimension() -> None:
    """Compare with -<dL/dtheta, u> / |theta| by autograd, for whole rows of 6 numbers, over 4,000 batches."""
    num, num_pairs, dim = 4_000, 8, 6
    states = feature_states([60], [0.8], [0.5]), feature_states([15], [1.2], [0.9])
    angle_K, norm_K, alpha_K = torch.cat(states).T
    theta_KD = torch.zeros(2, dim, dtype=torch.float64)
    theta_KD[:, 0], theta_KD[:, 3] = norm_K * angle_K.cos(), norm_K * angle_K.sin()
    towards_D = torch.zeros(dim, dtype=torch.float64)
    towards_D[0], towards_D[3] = angle_K[0].sin(), -angle_K[0].cos()
    x = gaussian(num, num_pairs, 2, dim)
    v = views_of(x, gaussian(num, num_pairs, 2, dim, seed=1), alpha_K)
    theta_RKD = theta_KD.expand(num, -1, -1).clone().requires_grad_()
    (gradient_RKD,) = torch.autograd.grad(contrastive_loss(theta_RKD, x, v).sum(), theta_RKD)
    plain_R = -(gradient_RKD[:, 0] @ towards_D) / norm_K[0]
    pairs = draw_pairs(0, 0, num, num_pairs=num_pairs, num_features=2, device=CPU)
    ours_R, p_positive_R = (found[:, 0, 0] for found in angular_speeds(*states, NONE_BESIDE, pairs))
    fx, fv = ((rows * theta_KD).sum(-1) for rows in (x, v))
    plain_p_R = (fx @ fv.mT).softmax(-1).diagonal(dim1=-2, dim2=-1).mean(-1)
    of_p = math.hypot(plain_p_R.std() / math.sqrt(num), p_positive_R.std() / math.sqrt(num))
    assert abs(plain_p_R.mean() - p_positive_R.mean()) < 4 * of_p
    standard_error = math.hypot(plain_R.std() / math.sqrt(num), ours_R.std() / math.sqrt(num))
    assert abs(plain_R.mean() - ours_R.mean()) < 4 * standard_error
    assert standard_error < 0.05 * ours_R.mean().abs()
    assert ours_R.std() < plain_R.std(), "the component across theta was averaged out"


def test_a_grid_does_not_depend_on_how_its_batches_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    weak, other = feature_states([30, 60], [0.5], [0.5]), feature_states([10], [1.0], [0.1, 0.9])

    def grid() -> Tensor:
        found = speed_grid(
            weak,
            other,
            ONE_FEATURE_MORE,
            reference_Q=torch.tensor([1, 1]),
            seed=4,
            num_batches=7,
            num_pairs=6,
            device=CPU,
        )
        return torch.stack([found["speed_PQ"], found["p_positive_PQ"], found["gain_PQ"]])

    whole = grid()
    monkeypatch.setitem(linear_model.CHUNK_NUMBERS, "cpu", 1)
    assert torch.allclose(grid(), whole, rtol=1e-12)


THEOREM = [
    "studies=[theorem]",
    "num_seeds=4",
    "theorem.num_batches_a_seed=200",
    "theorem.point_other_norm=1.2",
    "theorem.point_other_correlations=[0, 0.5, 0.95]",
]
SMALL_GRID = [
    "theorem.weak_angles_degrees=[60]",
    "theorem.weak_norms=[0.4]",
    "theorem.weak_correlations=[0.5]",
    "theorem.other_angles_degrees=[15]",
    "theorem.other_correlations=[0, 0.9]",
]


@pytest.mark.slow
def test_theorem_4_1_holds_if_its_conditions_do() -> None:
    claims = run(*THEOREM, *SMALL_GRID, "theorem.other_norms=[1.2]")
    assert {name: claim.verdict for name, claim in claims.items()} == {
        "theorem at a point": "holds",
        "theorem, step by step": "holds",
        "nothing from an unlearned feature": "holds",
        "the task gets harder": "holds",
        "theorem over the grid": "holds",
    }


@pytest.mark.slow
def test_an_unlearned_feature_is_not_said_to_speed_up_others() -> None:
    """At 90 degrees all speeds are equal up to rounding, so the sign of a gain must not decide."""
    unlearned = ["theorem.point_other_angle_degrees=90", "theorem.other_angles_degrees=[90]"]
    claims = run(*THEOREM, *SMALL_GRID[:3], *unlearned, "theorem.other_norms=[1.2]")
    for name in ("theorem at a point", "theorem, step by step", "theorem over the grid", "the task gets harder"):
        assert claims[name].verdict == "does not hold"
        assert abs(claims[name].interval.value) < 1e-10


@pytest.mark.slow
def test_one_bad_point_of_a_grid_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: at one of three norms the speed rises with the correlation of the other feature."""
    right = linear_model.angular_speeds

    def wrong(weak: Tensor, other: Tensor, rest: Tensor, pairs: Tensor) -> tuple[Tensor, Tensor]:
        speed_RPQ, p_positive_RPQ = right(weak, other, rest, pairs)
        planted_Q = torch.where(other[:, 1] == 1.0, 0.1 * other[:, 2], 0.0)
        return speed_RPQ + planted_Q, p_positive_RPQ

    monkeypatch.setattr(linear_model, "angular_speeds", wrong)
    result = run(*THEOREM, *SMALL_GRID, "theorem.other_norms=[0.8, 1.0, 1.2]")["theorem over the grid"]
    assert result.verdict == "does not hold"
    assert "other norms 1," in result.measured


def train(alpha_AK: Tensor, beta_AK: Tensor, **changed: int) -> dict[str, Tensor]:
    sizes = {"dim": 4, "num_pairs": 12, "num_steps": 5, "noise_from_step": 3} | changed
    training = TrainingSettings().model_copy(update={"learning_rate": 0.5, "initial_scale": 0.5, **sizes})
    return train_arms(training, alpha_AK, beta_AK, seeds=[0, 5], device=CPU)


def test_training_is_gradient_descent_on_whole_views() -> None:
    """Compare with a plain loop over arms and seeds, with the same draws, in float64 and by autograd."""
    alpha_AK = torch.tensor([[0.2, 0.9, 0.9], [0.6, 0.8, 0.5]], dtype=torch.float64)
    beta_AK = torch.tensor([[1.0, 0.5, 0.0], [1.0, 1.0, 0.7]], dtype=torch.float64)
    history = train(alpha_AK, beta_AK)
    for seed_place, seed in enumerate([0, 5]):
        for arm in range(2):

            def draws(step: int, purpose: int, rows: int, seed: int = seed) -> Tensor:
                keys = DrawKeys(seed=0, epoch=step, index_B=torch.tensor([seed]), view=0)
                return normal(keys, 3 * rows * 4, purpose=purpose).double().view(3, rows, 4)

            theta = (draws(0, 0, 1)[:, 0] * 0.25).requires_grad_()
            for step in range(5):
                x, n, w = (draws(step, purpose, 12).transpose(0, 1) for purpose in (1, 2, 3))
                v = views_of(x, n, alpha_AK[arm])
                if step >= 3:
                    beta = beta_AK[arm][:, None]
                    v = beta * v + (1 - beta**2).sqrt() * w
                angle = torch.acos(theta[:, 0].abs() / theta.norm(dim=1)).rad2deg()
                place = (arm, seed_place, step)
                assert history["weak_AST"][place].item() == pytest.approx(angle[0].item(), abs=1e-3)
                assert history["second_AST"][place].item() == pytest.approx(angle[1].item(), abs=1e-3)
                assert history["dominant_AST"][place].item() == pytest.approx(angle[1:].mean().item(), abs=1e-3)
                loss = contrastive_loss(theta, x, v)
                assert history["loss_AST"][place].item() == pytest.approx(loss.item(), abs=1e-4)
                (gradient,) = torch.autograd.grad(loss, theta)
                theta = (theta - 0.5 * gradient).detach().requires_grad_()


def test_noise_of_beta_one_is_no_noise_to_the_bit() -> None:
    alpha_AK = torch.tensor([[0.3, 0.9, 0.9]] * 2)
    ones = torch.ones(2, 3)
    with_noise_step, without = train(alpha_AK, ones, noise_from_step=2), train(alpha_AK, ones, noise_from_step=5)
    assert torch.equal(with_noise_step["weak_AST"], without["weak_AST"])
    assert torch.equal(with_noise_step["p_positive_AST"], without["p_positive_AST"])


TRAINING = [
    "studies=[training]",
    "num_seeds=8",
    "training.num_pairs=48",
    "training.learning_rate=0.3",
    "training.num_dominant=24",
    "training.fewer_dominant=[1]",
    "training.weak_correlation=0.3",
    "training.weak_correlations=[0.3]",
    "training.num_steps=60",
    "training.noise_from_step=25",
]
FEW_STEPS = ["num_seeds=2", "training.num_steps=6", "training.noise_from_step=3"]


@pytest.mark.slow
def test_the_noise_helps_the_weak_feature() -> None:
    claims = run(*TRAINING, "training.other_betas=[0]")
    for name in ("weak feature", "p_ii drops", "fewer dominant features", "total noise"):
        assert claims[name].verdict == "holds"


@pytest.mark.slow
def test_without_noise_nothing_is_claimed() -> None:
    """With beta 1 both arms are equal, so p_ii does not drop and the weak feature gains exactly 0."""
    claims = run(*TRAINING, *FEW_STEPS, "training.noise_beta=1", "training.other_betas=[]")
    assert claims["p_ii drops"].verdict == "does not hold"
    assert claims["weak feature"].interval.value == 0
    assert claims["weak feature"].verdict == claims["fewer dominant features"].verdict == "does not hold"
    assert "total noise" not in claims


def test_a_training_that_diverges_is_named() -> None:
    with pytest.raises(UserError, match=r"diverged at training.learning_rate 1e\+30"):
        run(*TRAINING, *FEW_STEPS, "training.learning_rate=1e30", "training.other_betas=[]")


def test_the_error_is_the_angle() -> None:
    claims = run("studies=[error]", "error.angles_degrees=[0, 30, 85]")
    assert claims["error is the angle"].verdict == "holds"


def test_an_error_that_is_not_the_angle_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: errors are counted at angles that are 2 degrees larger."""
    module = "trainer.theory.linear_contrastive.model.downstream_error"
    monkeypatch.setattr(module, lambda angles, **given: downstream_error([angle + 2 for angle in angles], **given))
    claims = run("studies=[error]", "num_seeds=8", "error.num_samples_a_seed=50000")
    assert claims["error is the angle"].verdict == "does not hold"


def test_the_error_of_a_trained_direction_is_its_angle_in_ten_dimensions() -> None:
    """Draw whole inputs, not only their components in the plane of the two directions."""
    theta, x = gaussian(10), gaussian(200_000, 10, seed=1)
    angle = math.acos(float(theta[0] / theta.norm()))
    error = ((x @ theta > 0) != (x[:, 0] > 0)).double().mean().item()
    assert error == pytest.approx(angle / math.pi, abs=4 * math.sqrt(0.25 / 200_000))
    in_plane = downstream_error([math.degrees(angle)], seeds=[0], num_samples=200_000, device=CPU).item()
    assert in_plane == pytest.approx(error, abs=6 * math.sqrt(0.25 / 200_000))
