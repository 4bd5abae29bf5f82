"""The claims of Huang et al. 2023, and how what was measured is judged.

Shapes: S seeds, O objectives, Q shares of outliers, G gains, T strengths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from trainer.theory.framework.claim import (
    Claim,
    ClaimResult,
    Interval,
    exactly,
    judge,
    simultaneous,
    t_bounds,
    t_interval,
    worst,
)

PAPER = "Huang et al. 2023"

IDENTITIES: Mapping[str, Claim] = {
    "info_nce_split": Claim(
        name="InfoNCE splits",
        statement="InfoNCE is the sum of an alignment and a divergence, E |f1 - f2|^2 / 2 - 1 and E log(e^p + e^n).",
        source=f"{PAPER}, on InfoNCE",
    ),
    "correlation_split": Claim(
        name="the cross-correlation loss splits",
        statement="The loss of Barlow Twins is (1 - lambda) sum_i (1 - C_ii)^2 + lambda |C - I|^2.",
        source=f"{PAPER}, on the cross-correlation loss",
    ),
    "centre_moment": Claim(
        name="moment of the centres",
        statement="|sum_k p_k mu_k mu_k^T - I|^2 = sum_kl (sqrt(p_k p_l) mu_k.mu_l - [k = l])^2 + D - K.",
        source=f"{PAPER}, Theorem 4 (a step of its proof)",
    ),
    "linear_divergence": Claim(
        name="the linear loss wants mean zero",
        statement="The second term of the linear loss is |E f|^2.",
        source=f"{PAPER}, on the limit of InfoNCE without log and exp",
    ),
    "stacked_losses": Claim(
        name="the losses in lockstep",
        statement="The losses that train many encoders at once here are those of trainer.objectives.",
        source="not in the paper",
    ),
}
LEMMA = Claim(
    name="alignment from the cross-correlation loss",
    statement="E |f1 - f2|^2 <= 2 sqrt(D sum_i (1 - C_ii)^2).",
    source=f"{PAPER}, on the cross-correlation loss (a lemma)",
)
LINEAR_RANK = Claim(
    name="linear loss: few directions",
    statement="Embeddings of the linear loss collapse onto a few directions: effective rank below 4.",
    source=f"{PAPER}, on the linear loss (what counts as few is not said; the bound is ours)",
)
LINEAR_CLOSE = Claim(
    name="linear loss: centres coincide",
    statement="Some two classes get nearly the same centre under the linear loss: greatest mu_k.mu_l above 0.9.",
    source=f"{PAPER}, on the linear loss (the bound is ours)",
)
OTHERS_RANK = Claim(
    name="other losses: many directions",
    statement="InfoNCE, Barlow Twins and the split loss do not collapse: effective rank of 4 or more.",
    source=f"{PAPER}, on InfoNCE and the cross-correlation loss (the bound is ours)",
)
OTHERS_APART = Claim(
    name="other losses: centres apart",
    statement="InfoNCE, Barlow Twins and the split loss hold all class centres apart: greatest mu_k.mu_l below 0.9.",
    source=f"{PAPER}, on InfoNCE and the cross-correlation loss (the bound is ours)",
)
HOT_RANK = Claim(
    name="hot InfoNCE: many directions",
    statement="InfoNCE does not collapse at a high temperature either: effective rank of 4 or more.",
    source=f"{PAPER}, Theorem 3, which is for temperature 1; the limit of InfoNCE is the linear loss",
)
HOT_APART = Claim(
    name="hot InfoNCE: centres apart",
    statement="InfoNCE holds all class centres apart at a high temperature too: greatest mu_k.mu_l below 0.9.",
    source=f"{PAPER}, Theorem 3, which is for temperature 1; the limit of InfoNCE is the linear loss",
)
THEOREM_3 = Claim(
    name="theorem 3",
    statement="mu_k.mu_l <= log(exp((L2 + tau) / (p_k p_l)) - exp(1 - epsilon)).",
    source=f"{PAPER}, Theorem 3 (tau and epsilon as measured here; their formulas are not given in its text)",
)
THEOREM_3_SAYS = Claim(
    name="theorem 3 says something",
    statement="The bound is below 1, which no product of two centres exceeds anyway.",
    source="not in the paper",
)
THEOREM_3_SHARP = Claim(
    name="theorem 3 sharpened",
    statement="mu_k.mu_l is at most what the divergence of all pairs of classes together leaves to it.",
    source=f"the proof of {PAPER}, Theorem 3, with all pairs kept; not in the paper",
)
THEOREM_3_SHARP_SAYS = Claim(
    name="theorem 3 sharpened says something",
    statement="The sharpened bound is below 1 for InfoNCE at the temperature of the theorem, 1.",
    source="not in the paper",
)
THEOREM_4 = Claim(
    name="theorem 4",
    statement="mu_k.mu_l <= sqrt(2 (L2 + tau - (D - K) / 2) / (p_k p_l)), |f|^2 = D.",
    source=f"{PAPER}, Theorem 4 (tau as measured here; its formula is not given in its text)",
)
THEOREM_4_SAYS = Claim(
    name="theorem 4 says something",
    statement="The bound over D is below 1, which no product of two centres exceeds anyway.",
    source="not in the paper",
)
THEOREM_4_SHARP = Claim(
    name="theorem 4 sharpened",
    statement="mu_k.mu_l <= sqrt(((sqrt(L2) + sqrt(tau))^2 - (D - K)) / (2 p_k p_l)), |f|^2 = D.",
    source=f"the proof of {PAPER}, Theorem 4, with nothing thrown away; not in the paper",
)
THEOREM_4_SHARP_SAYS = Claim(
    name="theorem 4 sharpened says something",
    statement="The sharpened bound over D is below 1 for Barlow Twins.",
    source="not in the paper",
)
LINEAR_FORM = Claim(
    name="nearest centre is linear",
    statement="The nearest-centre classifier is argmax_k mu_k.f - |mu_k|^2 / 2.",
    source=f"{PAPER}, on the nearest-centre classifier",
)
LINEAR_AS_GOOD = Claim(
    name="a linear classifier does as well",
    statement="A trained linear classifier errs no more than the nearest-centre classifier, which is one of them.",
    source=f"{PAPER}, on the nearest-centre classifier (of the best one; here 1 % of the test samples is allowed)",
)
BOUND = Claim(
    name="error bound",
    statement="Where the condition on the centres is met, Err <= (1 - sigma) + R_epsilon.",
    source=f"{PAPER}, Theorem 1",
)
BOUND_SAYS = Claim(
    name="error bound says something",
    statement="There are cells in which the condition is met and the bound is below guessing, 1 - 1 / K.",
    source="not in the paper",
)
BOUND_ATTAINED = Claim(
    name="error bound is attained",
    statement="There is a cell with errors in which the bound is the error.",
    source="not in the paper",
)
CONCENTRATION = Claim(
    name="stronger augmentation lets the bound hold",
    statement="The condition is not met without augmentation, and is met once views of a class overlap.",
    source=f"{PAPER}, Theorem 1, through sigma and delta",
)
TOO_STRONG = Claim(
    name="too strong augmentation",
    statement="Past some strength, views spread in the embedding so that the condition fails again.",
    source=f"{PAPER}, Theorem 1, through epsilon",
)
CONDITION = Claim(
    name="the condition is needed",
    statement="Where the condition is not met, Err can exceed (1 - sigma) + R_epsilon.",
    source="not in the paper",
)

RANK_LIMIT, PRODUCT_LIMIT, ROUNDING, LINEAR_TOLERANCE = 4.0, 0.9, 1e-9, 0.01


def judge_identities(found: Mapping[str, Tensor], *, tolerance: float) -> list[ClaimResult]:
    """`found` is what `measure_identities` gives."""
    claims = [
        judge(
            claim,
            exactly(found[name].max().item(), kind=f"largest of {len(found[name])} seeds"),
            measured="relative deviation, float64",
            at_most=tolerance,
        )
        for name, claim in IDENTITIES.items()
    ]
    ratio_S = found["alignment_lemma"]
    lemma = judge(
        LEMMA, _greatest(ratio_S, "seeds"), measured="left side over right side, float64", at_most=1 + tolerance
    )
    return [*claims, lemma]


def judge_collapse(
    names: Sequence[str], linear: Sequence[bool], hot: Sequence[bool], found: Mapping[str, Tensor], *, trained: float
) -> list[ClaimResult]:
    """Rank and closest centres of each group of objectives, at its worst one.

    `found` has (S, O) "rank", "closest" and "trained", the share of the way from the first loss to its lower bound.
    Where an objective has gone less than the share `trained` of it in some seed, its group is not decidable.
    """
    other = [not one and not two for one, two in zip(linear, hot, strict=True)]
    plans = (
        (LINEAR_RANK, "rank", linear, None, RANK_LIMIT),
        (LINEAR_CLOSE, "closest", linear, PRODUCT_LIMIT, None),
        (OTHERS_RANK, "rank", other, RANK_LIMIT, None),
        (OTHERS_APART, "closest", other, None, PRODUCT_LIMIT),
        (HOT_RANK, "rank", hot, RANK_LIMIT, None),
        (HOT_APART, "closest", hot, None, PRODUCT_LIMIT),
    )
    results = []
    for claim, quantity, chosen, at_least, at_most in plans:
        places = [place for place, is_one in enumerate(chosen) if is_one]
        if not places:
            continue
        values_SO = found[quantity][:, places]
        what = {"rank": "effective rank of the embeddings", "closest": "greatest mu_k.mu_l of two classes"}[quantity]
        untrained = [names[place] for place in places if bool((found["trained"][:, place] < trained).any())]
        if untrained:
            interval = Interval(
                value=values_SO.mean().item(),
                low=0.0 if quantity == "rank" else -1.0,
                high=max(found["rank"].max().item(), 2 * RANK_LIMIT) if quantity == "rank" else 1.0,
                kind="any value: has not trained",
            )
            measured = f"{what}, not judged: the loss of {', '.join(untrained)} is near its start"
        else:
            mean_O, low_O, high_O = t_bounds(values_SO, confidence=simultaneous(0.95, len(places)))
            at = worst(low_O, high_O, at_least=at_least, at_most=at_most)
            kind = f"95 % t-interval for all {len(places)} losses, {len(values_SO)} seeds"
            interval = Interval(value=mean_O[at].item(), low=low_O[at].item(), high=high_O[at].item(), kind=kind)
            measured = f"{what}, at the worst loss ({names[places[at]]})"
        results.append(judge(claim, interval, measured=measured, at_least=at_least, at_most=at_most))
    return results


def judge_theorems(
    found: Mapping[str, Tensor], *, info_nce_at_1: Sequence[int], barlow: Sequence[int], trained: float
) -> list[ClaimResult]:
    """`found` has (S, O) "closest", the bounds, and "trained" as for `judge_collapse`.

    The bounds are of any encoder. Whether a sharpened one says something is judged for its loss, once that has trained.
    """
    plans = (
        (THEOREM_3, THEOREM_3_SAYS, "theorem_3", None),
        (THEOREM_3_SHARP, THEOREM_3_SHARP_SAYS, "theorem_3_sharpened", info_nce_at_1),
        (THEOREM_4, THEOREM_4_SAYS, "theorem_4", None),
        (THEOREM_4_SHARP, THEOREM_4_SHARP_SAYS, "theorem_4_sharpened", barlow),
    )
    results = []
    for claim, says, name, places in plans:
        excess_SO = found["closest"] - found[name]
        results.append(
            judge(
                claim,
                _greatest(excess_SO, "encoders"),
                measured="greatest mu_k.mu_l less the bound, |f| = 1",
                at_most=ROUNDING,
            )
        )
        bound_SO = found[name] if places is None else found[name][:, list(places)]
        if not bound_SO.numel():
            continue
        interval, measured = _range(bound_SO, "encoders"), "the bound, |f| = 1"
        if places is not None and bool((found["trained"][:, list(places)] < trained).any()):
            high = max(2.0, interval.high)
            interval = Interval(value=interval.value, low=-1.0, high=high, kind="any value: has not trained")
            measured = f"{measured}, not judged: the loss is near its start"
        results.append(judge(says, interval, measured=measured, at_most=1 - ROUNDING))
    return results


def judge_classifiers(names: Sequence[str], found: Mapping[str, Tensor]) -> list[ClaimResult]:
    gain_SO = found["nearest_centre_error"] - found["linear_error"]
    mean_O, low_O, high_O = t_bounds(gain_SO, confidence=simultaneous(0.95, len(names)))
    at = worst(low_O, high_O, at_least=-LINEAR_TOLERANCE)
    kind = f"95 % t-interval for all {len(names)} losses, {len(gain_SO)} seeds"
    return [
        judge(
            LINEAR_FORM,
            exactly(found["disagreements"].max().item(), kind=f"most of {gain_SO.numel()} encoders"),
            measured="test embeddings on which the two forms differ",
            at_most=0,
        ),
        judge(
            LINEAR_AS_GOOD,
            Interval(value=mean_O[at].item(), low=low_O[at].item(), high=high_O[at].item(), kind=kind),
            measured=f"test error of nearest centre less that of the linear one, at the worst loss ({names[at]})",
            at_least=-LINEAR_TOLERANCE,
        ),
    ]


def judge_bound(
    found: Mapping[str, Tensor], *, num_classes: int, strengths: Sequence[float], gains: Sequence[float]
) -> list[ClaimResult]:
    """`found` has the cells (S, Q, G, T) of `generalization_bound.Cells` by name."""
    error, bound, met = found["error"], found["bound"], found["met"]
    excess = (error - bound)[met]
    says = (met & (bound < 1 - 1 / num_classes)).double().flatten(1).mean(1)
    attained = (met & (error > 0) & (error >= bound - ROUNDING)).double().flatten(1).mean(1)
    beyond = (~met & (error > found["unconditional"] + ROUNDING)).double().flatten(1).mean(1)
    results = [
        judge(
            BOUND,
            _greatest(excess, "cells") if len(excess) else Interval(value=0, low=-1, high=1, kind="no cell meets it"),
            measured=f"Err less the least bound, in the {len(excess)} of {met.numel()} cells that meet the condition",
            at_most=ROUNDING,
        ),
        judge(BOUND_SAYS, t_interval(says), measured="share of such cells", at_least=1 / met[0].numel()),
        judge(BOUND_ATTAINED, t_interval(attained), measured="share of such cells", at_least=1 / met[0].numel()),
        judge(CONDITION, t_interval(beyond), measured="share of such cells", at_least=1 / met[0].numel()),
    ]
    order_T = torch.tensor(strengths).argsort()
    share_ST = met.double()[..., order_T].mean((1, 2))
    best = int(share_ST.mean(0).argmax())
    least, most = strengths[int(order_T[0])], strengths[int(order_T[-1])]
    results.append(
        judge(
            CONCENTRATION,
            t_interval(share_ST[:, best] - share_ST[:, 0]),
            measured=f"share of cells that meet it at strength {strengths[int(order_T[best])]:g} less at {least:g}",
            at_least=ROUNDING,
        )
    )
    variant = torch.tensor(gains) > 0
    if bool(variant.any()):
        of_variant_ST = met.double()[:, :, variant][..., order_T].mean((1, 2))
        top = int(of_variant_ST.mean(0).argmax())
        results.append(
            judge(
                TOO_STRONG,
                t_interval(of_variant_ST[:, top] - of_variant_ST[:, -1]),
                measured=(
                    f"share of cells of a gain above 0 that meet it at strength {strengths[int(order_T[top])]:g} "
                    f"less at {most:g}"
                ),
                at_least=ROUNDING,
            )
        )
    return results


def _greatest(values: Tensor, of: str) -> Interval:
    return exactly(values.max().item(), kind=f"greatest of {values.numel()} {of}")


def _range(values: Tensor, of: str) -> Interval:
    """From the least to the greatest; the value is the greatest."""
    low, high = values.min().item(), values.max().item()
    return Interval(value=high, low=low, high=high, kind=f"least to greatest of {values.numel()} {of}")
