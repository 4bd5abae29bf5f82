"""Test the experiment on generalisation against brute force, plain loops, and planted truths and failures."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from trainer.analyses.concentration import largest_clique
from trainer.objectives.barlow_twins import barlow_twins_loss
from trainer.objectives.linear_loss import linear_loss
from trainer.objectives.nt_xent import nt_xent_loss
from trainer.objectives.split_loss import split_loss
from trainer.theory.framework.claim import ClaimResult, Measurements, judge_rows, read_claims
from trainer.theory.framework.experiment import judge
from trainer.theory.framework.figures import draw
from trainer.theory.generalization.bound import (
    BoundSettings,
    Samples,
    alignment_bound,
    concentration,
    draw_samples,
    measure_cells,
)
from trainer.theory.generalization.claims import (
    measure_bound,
    measure_classifiers,
    measure_collapse,
    measure_theorems,
)
from trainer.theory.generalization.divergence import (
    Population,
    classify,
    closest_centres,
    population_of,
    theorem_3_bound,
    theorem_3_sharpened,
    theorem_4_bounds,
)
from trainer.theory.generalization.encoders import (
    EncoderSettings,
    ObjectiveSettings,
    class_centres,
    draw_batch,
    new_encoders,
    train,
)
from trainer.theory.generalization.experiment import (
    EXPERIMENT,
    GeneralizationSettings,
    loss_floor,
)

CPU = torch.device("cpu")
TINY_ENCODERS = EncoderSettings(
    num_classes=3,
    input_dim=5,
    hidden_dim=8,
    embedding_dim=4,
    num_steps=6,
    batch_size=8,
    log_every=3,
    samples_a_class=3,
    views_a_sample=2,
)
TINY_BOUND = BoundSettings(
    samples_a_class=60, outlier_shares=(0, 0.05), gains=(0, 0.01, 0.1), strengths=(0, 0.5, 2, 100), num_deltas=9
)
TINY = GeneralizationSettings(num_seeds=3, encoders=TINY_ENCODERS, bound=TINY_BOUND, classifier_steps=5)


def judged(measured: Measurements, **words: object) -> list[ClaimResult]:
    return judge_rows(read_claims("generalization"), measured, **words)


def verdicts(measured: Measurements, **words: object) -> dict[str, str]:
    return {result.name: result.verdict for result in judged(measured, **words)}


def random_units(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(shape, generator=generator, dtype=torch.float64), dim=-1)


# Encoders


def plain_loss(objective: ObjectiveSettings, z_a_BD: Tensor, z_b_BD: Tensor) -> Tensor:
    weight, temperature = objective.divergence_weight, objective.temperature
    if objective.loss == "linear":
        return linear_loss(z_a_BD, z_b_BD, divergence_weight=weight).loss
    if objective.loss == "barlow_twins":
        return barlow_twins_loss(z_a_BD, z_b_BD, unbiased=True).loss
    if objective.loss == "split":
        return split_loss(z_a_BD, z_b_BD, temperature=temperature, divergence_weight=weight).loss
    return nt_xent_loss(z_a_BD, z_b_BD, temperature=temperature).loss


def trained_alone(settings: EncoderSettings, at: int) -> tuple[Tensor, list[float]]:
    """Train one objective with seed 1 by torch's modules, optimiser and schedule; return weights and losses."""
    seed = torch.tensor([1])
    start = new_encoders(settings, seed)
    first, second = torch.nn.Linear(5, 8), torch.nn.Linear(8, 4)
    with torch.no_grad():
        for layer, weight in ((first, start.first_SOIH), (second, start.second_SOHD)):
            layer.weight.copy_(weight[0, at].T)
            layer.bias.zero_()
    model = torch.nn.Sequential(first, torch.nn.ReLU(), second)
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, settings.num_steps)
    centre = class_centres(settings, seed)
    losses = []
    for step in range(settings.num_steps):
        views = draw_batch(settings, centre, seed, step=step)
        z_a_BD, z_b_BD = (F.normalize(model(view[0]), dim=1) for view in views)
        loss = plain_loss(settings.objectives[at], z_a_BD, z_b_BD)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return second.weight.detach(), losses


def test_lockstep_is_a_plain_loop() -> None:
    encoders, loss_SOL = train(TINY_ENCODERS, seeds=(0, 1), device=CPU)
    for at in (0, 3, 5, 7):  # one of each loss
        weight, losses = trained_alone(TINY_ENCODERS, at)
        torch.testing.assert_close(encoders.second_SOHD[1, at], weight.T, rtol=1e-4, atol=1e-5)
        expected = [losses[0], sum(losses[:3]) / 3, sum(losses[3:]) / 3]
        torch.testing.assert_close(loss_SOL[1, at], torch.tensor(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "objective",
    [
        ObjectiveSettings(loss="info_nce", temperature=0.5),
        ObjectiveSettings(loss="linear", divergence_weight=5),
        ObjectiveSettings(loss="split", temperature=0.2, divergence_weight=0.4),
    ],
)
def test_no_embeddings_pass_the_floor_of_a_loss(objective: ObjectiveSettings) -> None:
    """A regular simplex with as many points as the batch is the best case, and reaches the floor."""
    num = 6
    simplex = torch.eye(num, dtype=torch.float64) - 1 / num
    floor = loss_floor(objective, num)
    at_best = plain_loss(objective, simplex, simplex).item()
    assert at_best == pytest.approx(floor, abs=1e-9)
    for seed in range(20):
        z_a, z_b = random_units(2, num, 4, seed=seed)
        assert plain_loss(objective, z_a, z_b).item() > floor


# Divergence of class centres


def by_loops(z_KNAD: Tensor) -> tuple[Tensor, Tensor]:
    """Return the means of log(e^f1.f2 + e^f1.f-) and of f1 f2^T, pair by pair."""
    K, N, A, D = z_KNAD.shape
    rows = z_KNAD.reshape(-1, D)
    logs, products = [], []
    for k, n in itertools.product(range(K), range(N)):
        for a, b in itertools.product(range(A), range(A)):
            f1, f2 = z_KNAD[k, n, a], z_KNAD[k, n, b]
            products.append(torch.outer(f1, f2))
            logs += [math.log(math.exp(f1 @ f2) + math.exp(f1 @ other)) for other in rows]
    return torch.tensor(logs, dtype=torch.float64).mean(), torch.stack(products).mean(0)


def test_population_equals_plain_loops() -> None:
    z_MKNAD = random_units(2, 3, 2, 2, 4)
    found = population_of(z_MKNAD)
    for m, z_KNAD in enumerate(z_MKNAD):
        divergence, correlation = by_loops(z_KNAD)
        torch.testing.assert_close(found.info_nce_divergence_M[m], divergence)
        torch.testing.assert_close(found.correlation_MDD[m], correlation)
    torch.testing.assert_close(found.centre_MKD, z_MKNAD.mean((2, 3)))
    greatest = max((a @ b).item() for a, b in itertools.permutations(found.centre_MKD[1], 2))
    assert closest_centres(found.centre_MKD)[1].item() == pytest.approx(greatest)


@pytest.mark.parametrize("spread", [0.0, 0.05, 3.0])
def test_no_embeddings_pass_the_bounds(spread: float) -> None:
    """The centres are random, and two of them coincide."""
    for seed in range(4):
        centre = random_units(4, 5, 1, 1, 6, seed=seed)
        centre[:, 1] = centre[:, 0]
        noise = random_units(4, 5, 3, 2, 6, seed=100 + seed)
        population = population_of(F.normalize(centre + spread * noise, dim=-1))
        closest_M = closest_centres(population.centre_MKD)
        printed_M, sharpened_M = theorem_4_bounds(population)
        for bound_M in (
            theorem_3_bound(population),
            theorem_3_sharpened(population),
            printed_M,
            sharpened_M,
        ):
            assert (closest_M <= bound_M + 1e-9).all()
        assert (sharpened_M <= printed_M + 1e-9).all()
        assert (theorem_3_sharpened(population) <= theorem_3_bound(population)).all()


def simplex_population(num_classes: int, num_dims: int) -> Population:
    corner_KK = F.normalize(torch.eye(num_classes, dtype=torch.float64) - 1 / num_classes, dim=-1)
    padded = F.pad(corner_KK, (0, num_dims - num_classes))
    return population_of(padded[None, :, None, None, :].expand(1, -1, 2, 2, -1))


def test_the_sharpened_bounds_are_attained_by_a_simplex() -> None:
    """If views have no spread and centres are as far apart as possible, only the proof's last step loses."""
    population = simplex_population(5, 7)
    assert closest_centres(population.centre_MKD).item() == pytest.approx(-0.25)
    assert theorem_3_sharpened(population).item() == pytest.approx(-0.25, abs=1e-6)
    assert theorem_3_bound(population).item() > 1


def test_theorem_4_is_attained_by_orthogonal_centres() -> None:
    """With K = D orthogonal classes C is the identity, so all terms and the products of centres are 0."""
    population = population_of(torch.eye(4, dtype=torch.float64)[None, :, None, None, :].expand(1, -1, 2, 2, -1))
    printed_M, sharpened_M = theorem_4_bounds(population)
    assert printed_M.item() == sharpened_M.item() == pytest.approx(0, abs=1e-7)


@pytest.mark.slow
def test_a_linear_classifier_can_do_better_than_nearest_centre() -> None:
    """A linear classifier separates these two classes on a line. Nearest centre does not."""
    far = torch.tensor([[0.1, 0.0], [0.1, 0.1], [10.0, 0.0], [10.0, 0.1]])
    near = torch.tensor([[-0.1, 0.0], [-0.1, 0.1], [-0.2, 0.0], [-0.2, 0.1]])
    both = torch.stack([far, near])[None]
    found = classify(both, both, num_steps=300, learning_rate=0.5)
    assert found["nearest_centre_error"].item() == 0.25
    assert found["linear_error"].item() == 0
    assert found["disagreements"].item() == 0


# Verdicts of planted metrics

COLD, HOT = (ObjectiveSettings(loss="info_nce", temperature=temperature) for temperature in (1, 10))
LINEAR, TWINS = ObjectiveSettings(loss="linear"), ObjectiveSettings(loss="barlow_twins")


def planted(rank: tuple[float, ...], closest: tuple[float, ...], share: float = 0.9) -> Mapping[str, Tensor]:
    spread_S1 = torch.tensor([[-0.01], [0.0], [0.01]])
    values = {"rank": torch.tensor(rank) + spread_S1, "closest": torch.tensor(closest) + spread_S1}
    return values | {"trained": torch.full((3, 3), share)}


def test_verdicts_of_planted_collapse() -> None:
    found = verdicts(measure_collapse((COLD, HOT, LINEAR), planted((9, 3, 2), (-0.1, 0.95, 0.95))))
    assert found["linear loss: few directions"] == found["linear loss: centres coincide"] == "holds"
    assert found["other losses: many directions"] == found["other losses: centres apart"] == "holds"
    assert found["hot InfoNCE: many directions"] == found["hot InfoNCE: centres apart"] == "does not hold"
    found = verdicts(measure_collapse((COLD, HOT, LINEAR), planted((2, 9, 9), (0.95, 0, 0))))
    assert found["linear loss: few directions"] == found["linear loss: centres coincide"] == "does not hold"
    assert found["other losses: many directions"] == found["other losses: centres apart"] == "does not hold"
    assert found["hot InfoNCE: many directions"] == "holds"


def test_losses_that_have_not_trained_decide_nothing() -> None:
    measured = measure_collapse((COLD, HOT, LINEAR), planted((9, 3, 2), (-0.1, 0.95, 0.95), share=0.05))
    results = judged(measured)
    assert {result.verdict for result in results} == {"not decidable here"}
    assert all("near its start" in result.measured for result in results)


def test_two_steps_decide_nothing_on_training() -> None:
    encoders = TINY_ENCODERS.model_copy(update={"num_steps": 2})  # only the first step is logged
    outcome = EXPERIMENT.run(TINY.model_copy(update={"encoders": encoders, "studies": ("encoders",)}), CPU)
    found = verdicts(outcome.measured, **outcome.words)
    of_training = [name for name in found if ":" in name or "sharpened says" in name]
    assert len(of_training) == 8
    assert {found[name] for name in of_training} == {"not decidable here"}


def test_verdicts_of_planted_theorems() -> None:
    names = ("theorem_3", "theorem_3_sharpened", "theorem_4", "theorem_4_sharpened")
    found = {"closest": torch.full((2, 3), 0.5)} | {name: torch.full((2, 3), 0.7) for name in names}
    found["theorem_4"] = torch.tensor([[3.0, 3.0, 3.0], [3.0, 3.0, 0.49]])  # one encoder exceeds its bound
    found["theorem_3"] = torch.full((2, 3), 100.0)
    found["trained"] = torch.tensor([[0.5, 0.05, 0.5], [0.5, 0.05, 0.5]])  # Barlow Twins has not trained
    told = verdicts(measure_theorems((COLD, TWINS, LINEAR), found))
    assert told["theorem 4 sharpened says something"] == "not decidable here"
    assert told["theorem 3"] == told["theorem 3 sharpened says something"] == "holds"
    assert told["theorem 3 says something"] == told["theorem 4"] == "does not hold"


def test_verdicts_of_planted_classifiers() -> None:
    spread_S1 = torch.tensor([[-0.001], [0.0], [0.001]])
    errors = {"nearest_centre_error": 0.1 + spread_S1.expand(3, 2), "disagreements": torch.zeros(3, 2)}
    worse = errors | {"linear_error": torch.tensor([[0.1, 0.2]]).expand(3, 2)}
    assert verdicts(measure_classifiers((COLD, HOT), worse))["a linear classifier does as well"] == "does not hold"
    better = errors | {"linear_error": torch.full((3, 2), 0.05), "disagreements": torch.ones(3, 2)}
    assert verdicts(measure_classifiers((COLD, HOT), better)) == {
        "nearest centre is linear": "does not hold",
        "a linear classifier does as well": "holds",
    }


# The error bound


def test_concentration_equals_brute_force_over_views() -> None:
    """Compare with d_A between views as points (t', u), and with the largest clique."""
    settings = BoundSettings(samples_a_class=8, outlier_shares=(0.25,), num_classes=2)
    samples = draw_samples(settings, seeds=(3,), device=CPU)
    strength, deltas = 0.2, torch.tensor([0.05, 0.6], dtype=torch.float64)
    found = concentration(samples, strength=strength, deltas=deltas, outlier_distance=settings.outlier_angle)
    step_V = torch.linspace(-1, 1, 2001, dtype=torch.float64)
    for w, delta in enumerate(deltas):
        shares = []
        for k in range(2):
            view_NV = samples.t_SQKN[0, 0, k, :, None] + strength * samples.b_SQKN[0, 0, k, :, None] * step_V
            low_N, high_N, u_N = view_NV[:, 0], view_NV[:, -1], samples.u_QN[0]
            gap_NN = torch.stack(
                [(view_NV[n].clamp(low_N[:, None], high_N[:, None]) - view_NV[n]).abs().amin(1) for n in range(8)]
            )
            apart_NN = (gap_NN**2 + (u_N[:, None] - u_N) ** 2).sqrt()
            shares.append(largest_clique(apart_NN <= delta) / 8)
        assert found[0, 0, w].item() == min(shares)


def brute_cell(settings: BoundSettings, samples: Samples, *, q: int, gain: float, strength: float) -> dict[str, float]:
    """Compute a cell from views on a grid: centres by averaging their embeddings, the error by distances."""
    K = settings.num_classes
    corner_KK = F.normalize(torch.eye(K, dtype=torch.float64) - 1 / K, dim=-1)

    def embed(phi: Tensor, k: int) -> Tensor:
        return torch.cat([phi.cos()[..., None] * corner_KK[k], phi.sin()[..., None]], dim=-1)

    step_V = (torch.arange(400, dtype=torch.float64) + 0.5) / 200 - 1
    t_KN, b_KN, u_N = samples.t_SQKN[0, q], samples.b_SQKN[0, q], samples.u_QN[q]
    view_KNV = t_KN[..., None] + strength * b_KN[..., None] * step_V
    centre_KD = torch.stack([embed(gain * view_KNV[k] + u_N[:, None], k).mean((0, 1)) for k in range(K)])
    wrong = [torch.cdist(embed(gain * t_KN[k] + u_N, k), centre_KD).argmin(1) != k for k in range(K)]
    product = centre_KD @ centre_KD.T
    return {
        "error": torch.stack(wrong).double().mean().item(),
        "closest": product.masked_fill(torch.eye(K, dtype=torch.bool), -9).max().item(),
        "centre_shrinkage": 1 - product.diagonal().min().item(),
    }


@pytest.mark.parametrize(("gain", "strength"), [(0.1, 2.0), (0.01, 100.0)])
def test_cells_equal_brute_force(gain: float, strength: float) -> None:
    settings = BoundSettings.model_validate(TINY_BOUND.model_dump() | {"gains": (gain,), "strengths": (strength,)})
    cells = measure_cells(settings, seeds=(4,), device=CPU)
    samples = draw_samples(settings, seeds=(4,), device=CPU)
    for q in range(2):
        for name, value in brute_cell(settings, samples, q=q, gain=gain, strength=strength).items():
            assert cells[name][0, q, 0, 0].item() == pytest.approx(value, abs=2e-3), name


def test_a_cell_is_the_theorem_term_by_term() -> None:
    """Loop over every delta and epsilon of one cell, with the spread measured between views."""
    K, N, gain, strength = 4, 60, 0.003, 2.0
    settings = BoundSettings(
        samples_a_class=N, outlier_shares=(0.05,), gains=(gain,), strengths=(strength,), num_deltas=5, num_epsilons=4
    )
    cells = measure_cells(settings, seeds=(2,), device=CPU)
    samples = draw_samples(settings, seeds=(2,), device=CPU)
    shift_KNV = strength * samples.b_SQKN[0, 0, :, :, None] * torch.linspace(-1, 1, 41, dtype=torch.float64)
    phi_PV = gain * shift_KNV.flatten(0, 1)
    views = torch.stack(
        [phi_PV.cos(), phi_PV.sin()], dim=-1
    )  # components along the class and across it, up to a rotation
    spread = sorted((torch.cdist(one, one).max().item() for one in views), reverse=True)
    lipschitz = math.sqrt(1 + gain**2)
    shrinkage, closest = cells["centre_shrinkage"].item(), cells["closest"].item()
    bounds, slacks = [1.0], []
    for delta in (0, 0.5, 1, 1.5, 2):
        sigma = concentration(
            samples,
            strength=strength,
            deltas=torch.tensor([delta], dtype=torch.float64),
            outlier_distance=settings.outlier_angle,
        ).item()
        for place in (0, 8, 16, 24):  # up to a tenth of 240 samples
            epsilon, unaligned = spread[place], place / (K * N)
            rho = 2 * (1 - sigma) + unaligned / (1 / K) + sigma * (lipschitz * delta + 2 * epsilon)
            slacks.append(1 - rho - math.sqrt(2 * rho) - shrinkage / 2 - closest)
            if slacks[-1] > 0:
                bounds.append(1 - sigma + unaligned)
    assert cells["slack"].item() == pytest.approx(max(slacks), abs=1e-6)
    assert cells["bound"].item() == pytest.approx(min(bounds), abs=1e-9)
    assert cells["met"].item()
    assert len(bounds) > 1


def test_theorem_2_equals_a_search_for_its_infimum() -> None:
    """Compare with pairs of views of each sample, and with the best h of a fine grid, at every epsilon of one cell."""
    N, gain, strength = 60, 0.1, 3.0
    settings = BoundSettings(
        samples_a_class=N, outlier_shares=(0.05,), gains=(gain,), strengths=(strength,), num_epsilons=4
    )
    cells = measure_cells(settings, seeds=(2,), device=CPU)
    reach_N = gain * strength * draw_samples(settings, seeds=(2,), device=CPU).b_SQKN.flatten()
    place_V = (torch.arange(200, dtype=torch.float64) + 0.5) / 100 - 1
    phi_NV = reach_N[:, None] * place_V
    alignment = (2 - 2 * (phi_NV[:, :, None] - phi_NV[:, None]).cos()).mean().item()
    spread = (2 * reach_N.clamp(max=math.pi / 2).sin()).sort(descending=True).values.tolist()
    excesses, bounds = [], []
    for place in (0, 80, 159, 239):
        epsilon, speed = spread[place], 2 * reach_N.max().item()
        h = torch.linspace(0, epsilon / (2 * speed), 200_001, dtype=torch.float64)[1:-1]
        eta = (4 * h.square().clamp(min=1) / (h.square() * (epsilon - 2 * speed * h))).min().item()
        bound, unaligned = eta * math.sqrt(alignment), sum(one > epsilon for one in spread) / len(spread)
        excesses.append(unaligned - bound)
        bounds += [bound] * (unaligned > 0)
    assert cells["alignment_excess"].item() == pytest.approx(max(excesses), rel=1e-3)
    assert cells["alignment_bound"].item() == pytest.approx(min(bounds), rel=1e-3)
    slow = alignment_bound(torch.tensor(2.0), alignment=torch.tensor(0.01), speed=torch.tensor(0.1))
    assert slow.item() == pytest.approx(0.1 * 4 / 1.8)  # the infimum is at h = 1


def test_verdicts_of_planted_cells() -> None:
    cells = measure_cells(TINY_BOUND, seeds=TINY.seeds, device=CPU)

    def told(**planted: Tensor) -> dict[str, str]:
        measured, words = measure_bound({**cells, **planted}, TINY_BOUND)
        return verdicts(measured, **words)

    found = told()
    assert found["error bound"] == found["error bound says something"] == found["the condition is needed"] == "holds"
    assert found["stronger augmentation lets the bound hold"] == found["too strong augmentation"] == "holds"
    assert told(error=cells["error"] + 0.01)["error bound"] == "does not hold"
    assert found["theorem 2"] == "holds"
    assert found["theorem 2 says something"] == "does not hold"
    assert told(alignment_excess=cells["alignment_excess"] + 1e9)["theorem 2"] == "does not hold"
    nowhere = told(met=torch.zeros_like(cells["met"]), bound=torch.ones_like(cells["bound"]))
    assert nowhere["error bound"] == "not decidable here"
    assert nowhere["error bound says something"] == "does not hold"


# Runs


@pytest.mark.parametrize("study", ["encoders", "bound"])
def test_every_study_runs_by_itself(study: str) -> None:
    settings = GeneralizationSettings.model_validate(TINY.model_dump() | {"studies": (study,)})
    outcome = EXPERIMENT.run(settings, CPU)
    names = [claim.name for claim in judge("generalization", outcome)]
    assert len(set(names)) == len(names) > 0
    assert [draw(figure)[:4] for figure in outcome.figures.values()] == [b"\x89PNG"] * (study == "bound")
