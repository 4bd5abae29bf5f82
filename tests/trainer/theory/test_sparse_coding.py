"""Test the sparse coding model: draws, growth matrices, closed-form gradient, bias schedule, training in lockstep."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from scipy.linalg import hadamard
from torch import Tensor
from torch.nn.functional import cross_entropy, relu

from data_pipeline.core.counter_rng import DrawKeys
from trainer.theory.sparse_coding import model
from trainer.theory.sparse_coding.model import (
    TRAINING,
    Trained,
    contrast,
    descend,
    draw_atoms,
    draw_codes,
    masked_views,
    measure_atoms,
    new_learners,
    raise_bias,
    regress,
    train,
    train_step,
)
from trainer.theory.sparse_coding.settings import (
    MASK_BIAS,
    MASK_LINEAR,
    MASK_TRAINED,
    NONE_BIAS,
    SUPERVISED,
    Problem,
    SparseCodingSettings,
    problems,
)

CPU = torch.device("cpu")
SMALL = SparseCodingSettings(
    num_features=8,
    feature_probability=0.15,
    noise_variance=0.1,
    pixels_per_feature=8,
    num_steps=40,
    num_logs=4,
    learning_rate=1.0,
    num_seeds=3,
    label_counts=(32, 64),
    num_test_items=64,
    bias_growth_start=1.2,
)


def problem_of(settings: SparseCodingSettings) -> Problem:
    (problem,) = problems(settings, "arms")
    return problem


def train_small(settings: SparseCodingSettings, seeds: tuple[int, ...] | None = None) -> Trained:
    return train(problem_of(settings), seeds=settings.seeds if seeds is None else seeds, device=CPU)


def keys_of(*seeds: int, epoch: int = 0) -> DrawKeys:
    return DrawKeys(seed=0, epoch=epoch, index_B=torch.tensor(seeds), view=TRAINING)


def arm_weights(trained: Trained) -> Tensor:
    """Return weights (S, A, M, P) in the order of the problem's arms."""
    return torch.cat([group.weights_by_arm for group in trained.groups], dim=1)


def test_atoms_are_orthonormal() -> None:
    atoms_SDP = draw_atoms(keys_of(0, 5), num_features=8, num_pixels=50)
    torch.testing.assert_close(atoms_SDP @ atoms_SDP.mT, torch.eye(8).double().expand(2, 8, 8), atol=1e-12, rtol=0)
    assert not torch.allclose(atoms_SDP[0], atoms_SDP[1])


def test_masked_views_share_no_coordinate_and_sum_to_twice_the_example() -> None:
    x_SBP = torch.randn(2, 50, 40)
    first, second = masked_views(x_SBP, keys_of(0, 1))
    torch.testing.assert_close(first + second, 2 * x_SBP)
    assert not (first * second).any()
    assert (first != 0).double().mean().item() == pytest.approx(0.5, abs=0.03)


def growth_matrix(atoms_DP: Tensor, *, probability: float, noise_variance: float, mask_share: float = 1.0) -> Tensor:
    """Return a linear neuron's growth matrix, E[first view second view^T] = Sigma - mask_share diag(Sigma); (P, P).

    Sigma = E[x x^T] = E[z^2] M M^T + sigma^2 I. Two disjoint halves have no coordinate in common, so the diagonal is
    lost. All noise is on the diagonal, but most of an atom is not.
    """
    eye_PP = torch.eye(atoms_DP.shape[-1], dtype=atoms_DP.dtype, device=atoms_DP.device)
    sigma_PP = probability * atoms_DP.mT @ atoms_DP + noise_variance * eye_PP
    return sigma_PP - mask_share * torch.diag_embed(sigma_PP.diagonal(dim1=-2, dim2=-1))


def growth_rates(growth_PP: Tensor, atoms_DP: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean growth along the atoms, and over all directions orthogonal to them; (...) each."""
    D, P = atoms_DP.shape[-2:]
    along = torch.einsum("...dp,...pq,...dq->...", atoms_DP, growth_PP, atoms_DP)
    return along / D, (growth_PP.diagonal(dim1=-2, dim2=-1).sum(-1) - along) / (P - D)


def even_atoms(*, num_seeds: int, num_features: int, num_pixels: int) -> Tensor:
    """Return atoms (S, D, P) whose entries all have the same square, for which the growth matrix is exact."""
    rows_DP = torch.from_numpy(hadamard(num_pixels, dtype=float)[1 : 1 + num_features])
    atoms_SDP: Tensor = (rows_DP / num_pixels**0.5).repeat(num_seeds, 1, 1)
    return atoms_SDP


def test_growth_matrix_equals_the_mean_over_sampled_views() -> None:
    """Each entry agrees within five standard errors of the mean of products."""
    D, P, num = 4, 12, 40_000
    keys = keys_of(3)
    atoms_SDP = draw_atoms(keys, num_features=D, num_pixels=P)
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(1, num, P, generator=generator, dtype=torch.float64)
    x_SNP = draw_codes(keys, num, num_features=D, probability=0.3).double() @ atoms_SDP + 0.5 * noise
    first, second = masked_views(x_SNP, keys)
    products_NPP = first[0, :, :, None] * second[0, :, None, :]
    error_PP = products_NPP.std(0) / math.sqrt(num)
    closed_PP = growth_matrix(atoms_SDP[0], probability=0.3, noise_variance=0.25)
    assert ((products_NPP.mean(0) - closed_PP).abs() <= 5 * error_PP + 1e-12).all()


@pytest.mark.parametrize(("temperature", "bias_scale"), [(0.3, 0.5), (4.0, 0.0)])
def test_closed_form_gradient_equals_autograd(temperature: float, bias_scale: float) -> None:
    generator = torch.Generator().manual_seed(1)
    first, second, negative = (torch.randn(3, num, 20, generator=generator, dtype=torch.float64) for num in (6, 6, 9))
    weights_SMP = (0.4 * torch.randn(3, 7, 20, generator=generator, dtype=torch.float64)).requires_grad_()
    bias_S1M = bias_scale * torch.rand(3, 1, 7, generator=generator, dtype=torch.float64)

    def features(x: Tensor) -> Tensor:
        u = x @ weights_SMP.mT
        return relu(u - bias_S1M) - relu(-u - bias_S1M)

    positive_SB1 = (features(first) * features(second).detach()).sum(-1, keepdim=True)
    logits = torch.cat([positive_SB1, features(first) @ features(negative).detach().mT], dim=-1) / temperature
    loss_S = temperature * torch.stack([cross_entropy(rows, torch.zeros(6, dtype=torch.long)) for rows in logits])
    (gradient_SMP,) = torch.autograd.grad(loss_S.sum(), weights_SMP)
    with torch.no_grad():
        u_first, u_second, u_negative = (x @ weights_SMP.mT for x in (first, second, negative))
        ours_S, coefficient_SBM = contrast(u_first, u_second, u_negative, bias_S1M, temperature=temperature)
    torch.testing.assert_close(ours_S, loss_S.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(-coefficient_SBM.mT @ first, gradient_SMP, rtol=1e-10, atol=1e-13)


def test_the_fall_of_trained_biases_and_of_supervised_arms_equals_autograd() -> None:
    """One step of each learner moves weights and biases down the gradient in float64; a bias stops at 0."""
    draw = torch.Generator().manual_seed(2)
    config = SMALL.model_copy(update={"learning_rate": 0.1, "weight_decay": 0.0})
    problem = problem_of(config)
    first, second, negative = (torch.randn(1, num, 20, generator=draw, dtype=torch.float64) for num in (6, 6, 9))
    start_1MP = 0.4 * torch.randn(1, 7, 20, generator=draw, dtype=torch.float64)
    y_11BK, readout_11MK = (torch.randn(1, 1, num, 3, generator=draw, dtype=torch.float64) for num in (6, 7))

    def features(x: Tensor, weights: Tensor, bias: Tensor) -> Tensor:
        u = x @ weights.mT
        return relu(u - bias) - relu(-u - bias)

    for arm in (MASK_TRAINED, SUPERVISED):
        learners = new_learners([arm], start_1MP, trained_bias_start=0.3)
        weights, bias = start_1MP.clone().requires_grad_(), learners.bias_SAM[0].clone().requires_grad_()
        f_first = features(first, weights, bias)
        if arm.supervised:
            loss = (y_11BK[0] - f_first @ readout_11MK[0]).square().sum(-1).mean() / 2
            u = learners.project(first)
            ours, coefficient, direction = regress(u, learners.bias_SAM[:, :, None], readout_11MK, y_11BK)
            expected = f_first.detach().mT @ (y_11BK[0] - f_first.detach() @ readout_11MK[0]) / 6
            torch.testing.assert_close(direction[0], expected)
            descend(learners, first, u, coefficient, problem=problem, step=0)
        else:
            f_second, f_negative = (features(x, weights, bias).detach() for x in (second, negative))
            s = torch.cat([(f_first * f_second).sum(-1, keepdim=True), f_first @ f_negative.mT], dim=-1)
            loss = cross_entropy(s[0], torch.zeros(6, dtype=torch.long))
            ours = train_step(learners, (first, second), negative, problem=problem, step=0)
        of_weights, of_bias = torch.autograd.grad(loss, (weights, bias))
        torch.testing.assert_close(ours[0], loss.detach()[None])
        torch.testing.assert_close(learners.weights_SQP, start_1MP - 0.1 * of_weights)
        moved = 0.3 * start_1MP.norm(dim=-1) - 0.1 * of_bias
        assert (moved - 0.3 * start_1MP.norm(dim=-1)).abs().max() > 1e-4
        torch.testing.assert_close(learners.bias_SAM[0], moved.clamp(min=0))


def test_contrast_of_far_apart_similarities_is_finite() -> None:
    u = torch.full((1, 2, 3), 40.0)
    loss, coefficient = contrast(u, -u, u, torch.zeros(1, 1, 3), temperature=1.0)
    assert loss.item() == pytest.approx(2 * 4800 + math.log(2))
    assert coefficient.isfinite().all()


def schedule(norms: list[float], **settings: float) -> list[float]:
    """Return the bias of a neuron of a masked arm, while its norm goes through `norms`."""
    config = SMALL.model_copy(update=settings)
    problem = dataclasses.replace(problem_of(config), bias_first=0.1, bias_cap=0.5)
    learners = new_learners([MASK_BIAS, MASK_LINEAR], torch.tensor([[[1.0, 0.0]]]))
    biases = []
    for step, norm in enumerate(norms):
        raise_bias(learners, torch.full((1, 2, 1), norm), problem=problem, step=step)
        biases.append(learners.bias_SAM[0, 0, 0].item())
        assert learners.bias_SAM[0, 1, 0] == 0
    return biases


def test_bias_waits_grows_follows_the_norm_and_stops_at_its_cap() -> None:
    biases = schedule([2.0, 3.0, 3.0, 6.0, 6.0, 1.0], bias_growth_start=3.0, learning_rate=0.8)
    assert biases == pytest.approx([0.0, 0.3, 0.33, 0.66, 0.726, 0.5])


def test_bias_starts_when_the_last_neuron_has_grown() -> None:
    learners = new_learners([NONE_BIAS], torch.eye(2)[None])
    for step, (one, other) in enumerate([(5.0, 1.0), (5.0, 1.1), (5.0, 1.3), (5.0, 5.0)]):
        norms_SAM = torch.tensor([[[one, other]]])
        raise_bias(learners, norms_SAM, problem=problem_of(SMALL), step=step)
    assert learners.start_SA.item() == 2


@pytest.mark.slow
def test_without_noise_weights_across_the_atoms_only_decay() -> None:
    """Unmasked examples lie in the span of the atoms, so no step can move weights out of it."""
    settings = SMALL.model_copy(update={"noise_variance": 0.0, "weight_decay": 0.01})
    trained = train_small(settings)
    start_SDP = train_small(settings.model_copy(update={"learning_rate": 1e-12}))

    def across(run: Trained) -> Tensor:
        weights = arm_weights(run)[:, 2:]
        return weights - weights @ run.atoms_SDP[:, None].mT @ run.atoms_SDP[:, None]

    expected = across(start_SDP) * (1 - 0.01) ** settings.num_steps
    torch.testing.assert_close(across(trained), expected, rtol=0, atol=1e-6)
    share_SA = torch.cat([measure_atoms(group, trained.atoms_SDP)[0] for group in trained.groups], dim=1)
    assert (share_SA[:, 2:] > 0.9).all()


@pytest.mark.slow
def test_small_neurons_grow_as_the_growth_matrix_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """While similarities are 0, weights grow by 1 + rate (growth N / (N + 1) - decay) a step, in both parts."""
    settings = SMALL.model_copy(
        update={"initial_scale": 1e-4, "positives_per_feature": 64, "num_steps": 30, "bias_growth_start": 1e9}
    )  # fmt: skip
    atoms_SDP = even_atoms(num_seeds=3, num_features=8, num_pixels=64)
    monkeypatch.setattr(model, "draw_atoms", lambda *given, **sizes: atoms_SDP)
    before = train_small(settings.model_copy(update={"learning_rate": 1e-12}))
    after = train_small(settings)
    atoms_S1DP, N = before.atoms_SDP[:, None], problem_of(settings).num_negatives
    for arm, share in ((1, 1.0), (3, 0.0)):
        closed = growth_matrix(before.atoms_SDP.double(), probability=0.15, noise_variance=0.1, mask_share=share)
        for part, growth_S in enumerate(growth_rates(closed, before.atoms_SDP.double())):
            sizes = []
            for run in (before, after):
                weights = arm_weights(run)[:, arm : arm + 1]
                along = weights @ atoms_S1DP.mT @ atoms_S1DP
                start = arm_weights(before)[:, arm : arm + 1]
                start = (start @ atoms_S1DP.mT @ atoms_S1DP, start - start @ atoms_S1DP.mT @ atoms_S1DP)[part]
                sizes.append(
                    ((along, weights - along)[part] * start).sum((-1, -2, -3))
                )  # the noise of the steps averages out
            factor_S = (1 + settings.learning_rate * (growth_S * N / (N + 1) - settings.weight_decay)) ** 30
            ratio_S = sizes[1] / sizes[0]
            assert ratio_S.mean().item() == pytest.approx(factor_S.mean().item(), rel=0.06), (arm, part)
