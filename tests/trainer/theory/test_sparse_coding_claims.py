"""Test the experiment on sparse coding: probes of planted features, verdicts on planted metrics, and whole runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from data_pipeline.core.counter_rng import DrawKeys
from data_pipeline.core.errors import UserError
from trainer.theory.framework.claim import ClaimResult, judge_rows, read_claims
from trainer.theory.framework.experiment import judge
from trainer.theory.framework.figures import draw
from trainer.theory.sparse_coding.claims import (
    ArmMetrics,
    measure_arms,
    measure_gaps,
    steps_to_reach,
)
from trainer.theory.sparse_coding.experiment import EXPERIMENT, train_grid
from trainer.theory.sparse_coding.model import TRAINING, Trained, draw_atoms, new_learners
from trainer.theory.sparse_coding.probes import measure, planted_losses, probe_curves
from trainer.theory.sparse_coding.settings import (
    MASK_BIAS,
    MASK_TRAINED,
    NONE_BIAS,
    SUPERVISED,
    SparseCodingSettings,
    problems,
)

CPU = torch.device("cpu")
TINY = SparseCodingSettings(
    num_features=4,
    feature_probability=0.3,
    noise_variance=0.1,
    pixels_per_feature=8,
    num_steps=8,
    num_logs=4,
    num_seeds=3,
    label_counts=(32, 64),
    num_test_items=64,
    noise_variances=(0.05, 0.2),
    pixel_counts=(16, 32),
    feature_counts=(4, 6),
)


def planted_targets(num_items: int) -> tuple[Tensor, Tensor]:
    """Return codes z (1, 1, T, D), and targets <w, z> and its sign (1, 1, T, 2)."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, 1, num_items, 5)
    z = (torch.rand(shape, generator=generator) < 0.3) * torch.randn(shape, generator=generator)
    y = z @ torch.randn(5, 1, generator=generator)
    return z, torch.cat([y, y.sign()], dim=-1)


def test_probes_read_a_linear_code() -> None:
    z, targets = planted_targets(1200)
    features = torch.cat([z @ torch.randn(5, 9), torch.zeros(1, 1, 1200, 1)], dim=-1)
    r2, accuracy = probe_curves(features, targets, counts=(50, 200), num_test=500)
    assert r2.shape == accuracy.shape == (1, 1, 2)
    assert (r2 > 0.999).all()
    assert (accuracy > 0.9).all()


def test_probes_find_nothing_in_noise() -> None:
    _, targets = planted_targets(5000)
    r2, accuracy = probe_curves(torch.randn(1, 1, 5000, 9), targets, counts=(1000,), num_test=2000)
    assert r2.item() == pytest.approx(0.0, abs=0.02)
    assert accuracy.item() == pytest.approx(0.5, abs=0.05)


def test_probe_penalty_is_not_chosen_on_the_items_that_measure() -> None:
    """With the labels of the measuring items negated, the same probe has an R^2 far below 0."""
    z, targets = planted_targets(400)
    turned = targets.clone()
    turned[:, :, -100:] *= -1
    r2, accuracy = probe_curves(z, turned, counts=(200,), num_test=100)
    assert r2.item() < -2.5
    assert accuracy.item() < 0.1


def test_metrics_of_planted_neurons() -> None:
    """Neurons that equal the atoms, with a bias above the noise, see the signal alone. No noise activates them."""
    settings = TINY.model_copy(update={"noise_variance": 1e-4, "label_counts": (500,), "neurons_per_feature": 1})
    (problem,) = problems(settings, settings.studies[0])
    keys = DrawKeys(seed=0, epoch=0, index_B=torch.tensor(settings.seeds), view=TRAINING)
    atoms_SDP = draw_atoms(keys, num_features=4, num_pixels=32).float()
    groups = [new_learners(arms, atoms_SDP) for arms in (problem.arms[:2], problem.arms[2:])]
    for group in groups:
        group.bias_SAM = torch.full_like(group.bias_SAM, 0.1)
    found = measure(Trained(atoms_SDP, groups, {}), problem, seeds=settings.seeds)
    assert (found["coverage"] == 4).all()
    assert (found["neurons_per_atom"] == 1).all()
    assert found["size_ratio"].sub(1).abs().max() < 1e-5
    assert found["other_cosine"].max() < 1e-5
    assert found["atoms_per_neuron"].sub(1).abs().max() < 1e-5
    assert (found["active_on_noise"] == 0).all()
    assert (found["active"] - 0.3).abs().max() < 0.05
    assert (found["signal_cosine"] > 0.99).all()
    assert (found["noise_cosine"] == 0).all()
    assert (found["r2_labels"] > 0.99).all()


def planted_arms(
    *, losses: Mapping[str, list[float]], r2: Mapping[str, float], settings: SparseCodingSettings = TINY
) -> ArmMetrics:
    """Return three seeds with planted metrics. By arm, `losses` has four logged losses and `r2` the last R^2."""
    problem = problems(settings, settings.studies[0])[0]
    spread_S = torch.tensor([-0.001, 0.0, 0.001])
    num = len(problem.arms)
    loss_SAL = torch.stack([torch.tensor(losses[arm.name]) for arm in problem.arms]).expand(3, num, 4)
    r2_SAC = torch.stack([torch.tensor([0.0, r2[arm.name]]) for arm in problem.arms]) + spread_S[:, None, None]
    ones_SA = torch.ones(3, num)
    names = ("noise_cosine", "signal_cosine", "active_on_noise", "coverage", "atoms_per_neuron", "neurons_per_atom",
             "size_ratio", "other_cosine", "resemblance")  # fmt: skip
    metrics = dict.fromkeys(names, ones_SA) | {
        "loss_log": loss_SAL,
        "share_log": torch.tensor([0.0, 1.0, 1.0, 1.0]).expand(3, num, 4),
        "cosine_log": torch.tensor([0.0, 0.1, 0.5, 1.0]).expand(3, num, 4) * torch.arange(num, 0, -1)[:, None],
        "r2_labels": r2_SAC,
        "accuracy_labels": r2_SAC,
        "raw_r2_labels": torch.zeros(3, 1, 2),
    }
    return ArmMetrics(problem, metrics)


LOW, HIGH = [2.0, 0.6, 0.5, 0.5], [3.4, 3.1, 3.0, 3.0]  # from 3.5 at the start
GOOD = {"mask, growing bias": 0.9, "mask, no bias": 0.2, "no mask, growing bias": 0.3, "no mask, no bias": 0.2}
SETTLED = {"mask, growing bias": HIGH, "mask, no bias": HIGH, "no mask, growing bias": LOW, "no mask, no bias": LOW}


CLAIMS = read_claims("sparse_coding")


def judged(arms: ArmMetrics) -> dict[str, ClaimResult]:
    measured, words = measure_arms(arms)
    return {result.name: result for result in judge_rows(CLAIMS, measured, **words)}


def verdicts(arms: ArmMetrics) -> dict[str, str]:
    return {name: result.verdict for name, result in judged(arms).items()}


def verdict_on_the_gap(arms: ArmMetrics) -> str:
    _, result = judge_rows(CLAIMS, measure_gaps([arms]))
    return result.verdict


def test_verdicts_of_planted_metrics() -> None:
    found = verdicts(planted_arms(losses=SETTLED, r2=GOOD))
    assert found["the mask makes the loss higher"] == "holds"
    assert found["low loss without mask"] == found["the lower loss has the worse features"] == "holds"
    assert found["good regression with mask"] == found["the subspace comes first"] == "holds"
    assert found["low loss with mask"] == "does not hold"  # planted: 3.0 of 3.5
    assert found["noise fires nothing with mask"] == "does not hold"  # planted: all neurons are active on noise
    swapped = GOOD | {"mask, growing bias": 0.3, "no mask, growing bias": 0.9}
    found = verdicts(planted_arms(losses=SETTLED, r2=swapped))
    assert found["the lower loss has the worse features"] == found["bad regression without mask"] == "does not hold"


def test_a_mask_and_a_bias_that_change_nothing_are_not_said_to_help() -> None:
    """Planted: equal arms. With equal losses the mask does not make the loss higher either."""
    equal = planted_arms(losses=dict.fromkeys(GOOD, HIGH), r2=dict.fromkeys(GOOD, 0.9))
    cosine_log = equal.metrics["cosine_log"][:, :1].expand(3, 4, 4)
    arms = ArmMetrics(equal.problem, {**equal.metrics, "cosine_log": cosine_log})
    found = verdicts(arms)
    assert found["the mask makes the loss higher"] == found["the lower loss has the worse features"] == "does not hold"
    assert found["single atoms need the bias"] == "does not hold"
    assert verdict_on_the_gap(arms) == "does not hold"


@pytest.mark.parametrize("losses", [[3.5, 3.5, 3.49, 3.48], [3.5, 3.4, 3.2, 2.0]])
def test_an_arm_that_has_not_trained_is_not_judged(losses: list[float]) -> None:
    """This holds for a loss near its start, and for a loss that still falls."""
    arms = planted_arms(losses=SETTLED | {"no mask, growing bias": losses}, r2=GOOD | {"no mask, growing bias": 0.95})
    results = judged(arms)
    for name in ("low loss without mask", "bad regression without mask", "the lower loss has the worse features"):
        assert results[name].verdict == "not decidable here"
        assert '"no mask, growing bias"' in results[name].measured
    assert results["good regression with mask"].verdict == "holds"


def test_an_unsettled_arm_leaves_the_grid_undecided() -> None:
    settings = TINY.model_copy(update={"studies": ("noise",)})
    arms = planted_arms(losses=SETTLED, r2=GOOD, settings=settings)
    assert verdict_on_the_gap(arms) == "holds"
    arms = planted_arms(losses=SETTLED | {"mask, growing bias": [3.5] * 4}, r2=GOOD, settings=settings)
    assert verdict_on_the_gap(arms) == "not decidable here"


def test_steps_to_reach_most_of_a_rise() -> None:
    log_SL = torch.tensor([[0.2, 0.5, 1.2, 1.0], [0.0, 0.0, 0.0, 0.1]])
    assert steps_to_reach(log_SL, every=10).tolist() == [30, 40]


@pytest.mark.slow
@pytest.mark.parametrize("study", ["noise", "pixels", "features"])
def test_every_study_runs_and_covers_its_grid(study: str) -> None:
    settings = SparseCodingSettings.model_validate(TINY.model_dump() | {"studies": (study,)})
    outcome = EXPERIMENT.run(settings, CPU)
    names = [claim.name for claim in judge("sparse_coding", outcome)]
    assert len(set(names)) == len(names) == 2 * len(outcome.tables[study]) == 4  # the gap and the loss of each problem
    (figure,) = outcome.figures.values()
    if study == "noise":
        assert draw(figure)[:4] == b"\x89PNG"


def test_planted_atoms_have_a_low_loss_if_noise_is_weak_and_codes_differ() -> None:
    """With codes that nearly never repeat and little noise, planted atoms tell examples apart; the floor is exact."""
    settings = SparseCodingSettings(studies=("planted",), num_features=24, feature_probability=0.4, noise_variance=1e-4,
                                    pixels_per_feature=64, feature_counts=(24,), num_seeds=3)  # fmt: skip
    (problem,) = problems(settings, settings.studies[0])
    clear = planted_losses(problem, seeds=settings.seeds, device=CPU)
    assert (clear["planted"] < 0.05).all()
    assert (clear["floor"] <= clear["planted"]).all()
    noisy = planted_losses(dataclasses.replace(problem, noise_variance=9.0), seeds=settings.seeds, device=CPU)
    assert (noisy["planted"] > 0.9).all()
    torch.testing.assert_close(noisy["floor"], clear["floor"])
    silent = dataclasses.replace(problem, feature_probability=0.0)
    alike = planted_losses(silent, seeds=settings.seeds, device=CPU)["floor"]
    torch.testing.assert_close(alike, torch.ones_like(alike))


def test_a_supervised_arm_resembles_itself_and_learns_its_labels() -> None:
    settings = SparseCodingSettings.model_validate(
        TINY.model_dump()
        | {"studies": ("biases",), "num_steps": 100, "num_logs": 100, "learning_rate": 0.5, "noise_variance": 0.01}
    )
    (arms,) = train_grid(settings, "biases", CPU)
    assert (arms.of(SUPERVISED, "resemblance") > 1 - 1e-5).all()
    assert (arms.of(MASK_TRAINED, "resemblance") < 0.999).all()
    first = arms.problem.first_loss_of(SUPERVISED)
    assert arms.of(SUPERVISED, "loss_log")[:, 0].mean().item() == pytest.approx(first, rel=0.2)
    assert (arms.of(SUPERVISED, "loss") < 0.5 * first).all()
    outcome = EXPERIMENT.run(settings.model_copy(update={"num_steps": 8}), CPU)
    assert len(judge("sparse_coding", outcome)) == 4


@pytest.mark.slow
def test_metrics_of_a_seed_do_not_depend_on_the_others() -> None:
    settings = TINY.model_copy(update={"studies": ("noise",)})
    two, three = (train_grid(settings.model_copy(update={"seeds_at_once": num}), "noise", CPU)[1] for num in (2, 3))
    assert two.of(MASK_BIAS, "r2").shape == two.of(NONE_BIAS, "loss").shape == (3,)
    for name in ("r2_labels", "noise_cosine", "loss_log", "raw_r2_labels"):
        torch.testing.assert_close(two.metrics[name], three.metrics[name], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_eight_steps_decide_nothing_on_training() -> None:
    outcome = EXPERIMENT.run(TINY, CPU)
    assert {draw(figure)[:4] for figure in outcome.figures.values()} == {b"\x89PNG"}
    claims = judge("sparse_coding", outcome)
    assert len(claims) == 19
    assert {claim.verdict for claim in claims} == {"not decidable here"}


def test_a_training_that_diverges_is_named() -> None:
    settings = TINY.model_copy(update={"learning_rate": 1e30})
    with pytest.raises(UserError, match="diverged at learning_rate"):
        EXPERIMENT.run(settings, CPU)
