"""Measure the claims in claims.yaml, of Huang et al. 2023.

Shapes: S seeds, O objectives, Q shares of outliers, G gains, T strengths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from trainer.theory.framework.claim import Interval, Measurement, at_places, exact_interval
from trainer.theory.generalization.bound import BoundSettings
from trainer.theory.generalization.encoders import ObjectiveSettings

ROUNDING = 1e-9  # as in claims.yaml
_HOT = 2  # InfoNCE above this temperature has its own claims, because it approaches the linear loss
_TRAINED = 0.1  # a loss with a smaller `training_progress` is near its start, and its claims are not judged


def measure_collapse(objectives: Sequence[ObjectiveSettings], found: Mapping[str, Tensor]) -> dict[str, Measurement]:
    """Return the rank and the closest centres of each group of objectives, for the worst objective of the group.

    `found` has "rank", "closest" and "trained", (S, O) each; see `training_progress` for the last. A group is not
    decidable if one of its objectives has not trained with some seed.
    """
    coinciding = {"rank": "few directions", "closest": "centres coincide"}
    spread = {"rank": "many directions", "closest": "centres apart"}
    groups = {"linear loss": coinciding, "other losses": spread, "hot InfoNCE": spread}
    of_group = [_group(objective) for objective in objectives]
    measured = {}
    for group, claims in groups.items():
        members = [at for at, name in enumerate(of_group) if name == group]
        if not members:
            continue
        places = [f", at the worst loss ({objectives[at].name})" for at in members]
        untrained = ", ".join(objectives[at].name for at in members if _is_untrained(found, at))
        reason = f"; not judged, because the loss of {untrained} is near its start" if untrained else ""
        for quantity, claim in claims.items():
            values = at_places(found[quantity][:, members], places, of="losses")
            measured[f"{group}: {claim}"] = Measurement(values, undecided=reason)
    return measured


def _group(objective: ObjectiveSettings) -> str:
    if objective.loss == "linear":
        return "linear loss"
    is_hot = objective.loss == "info_nce" and objective.temperature > _HOT
    return "hot InfoNCE" if is_hot else "other losses"


def _is_untrained(found: Mapping[str, Tensor], at: int) -> bool:
    return bool((found["trained"][:, at] < _TRAINED).any())


def measure_theorems(objectives: Sequence[ObjectiveSettings], found: Mapping[str, Tensor]) -> dict[str, Measurement]:
    """Return the measurements of the bounds of Theorems 3 and 4, which are claimed for any encoder.

    `found` has "closest", "trained" and the bounds, (S, O) each. The claim that a sharpened bound is below the trivial
    one is judged for its own loss, and only if that loss has trained.
    """
    everyone = range(len(objectives))
    chosen = {
        "theorem 3": everyone,
        "theorem 3 sharpened": [at for at in everyone if objectives[at].name == "InfoNCE, temperature 1"],
        "theorem 4": everyone,
        "theorem 4 sharpened": [at for at in everyone if objectives[at].loss == "barlow_twins"],
    }
    measured = {}
    for name, members in chosen.items():
        bound_SO = found[name.replace(" ", "_")]
        measured[name] = _greatest(found["closest"] - bound_SO, "encoders")
        if not members:
            continue
        of_loss_SO = bound_SO[:, list(members)]
        least, greatest = of_loss_SO.min().item(), of_loss_SO.max().item()
        kind = f"least to greatest of {of_loss_SO.numel()} encoders"
        is_untrained = members is not everyone and any(_is_untrained(found, at) for at in members)
        measured[f"{name} says something"] = Measurement(
            Interval(value=greatest, low=least, high=greatest, kind=kind),
            undecided="; not judged, because the loss is near its start" if is_untrained else "",
        )
    return measured


def measure_classifiers(objectives: Sequence[ObjectiveSettings], found: Mapping[str, Tensor]) -> dict[str, Measurement]:
    """Return the measurements of the classifiers. `found` has the quantities of `classify`, (S, O) each."""
    gain_SO = found["nearest_centre_error"] - found["linear_error"]
    differing = exact_interval(found["disagreements"].max().item(), kind=f"most of {gain_SO.numel()} encoders")
    return {
        "nearest centre is linear": Measurement(differing),
        "a linear classifier does as well": Measurement(
            at_places(gain_SO, [objective.name for objective in objectives], of="losses")
        ),
    }


def measure_bound(
    found: Mapping[str, Tensor], bound: BoundSettings
) -> tuple[dict[str, Measurement], dict[str, object]]:
    """Return the measurements of the error bound, and words for their claims.

    `found` has the quantities of `measure_cells`, (S, Q, G, T) each.
    """
    error, value, met = found["error"], found["bound"], found["met"]
    excess = (error - value)[met]
    order_T = torch.tensor(bound.strengths).argsort()
    ascending = [bound.strengths[int(at)] for at in order_T]

    def share_of(cells: Tensor) -> Measurement:
        return Measurement(cells.double().flatten(1).mean(1))

    def best_less(at: int, met_SQGT: Tensor) -> Measurement:
        share_ST = met_SQGT.double()[..., order_T].mean((1, 2))
        best = int(share_ST.mean(0).argmax())
        words = {"best": ascending[best], "least": ascending[0], "most": ascending[-1]}
        return Measurement(share_ST[:, best] - share_ST[:, at], words)

    unmet = Measurement(Interval(value=0, low=-1, high=1, kind="no cell meets the condition"))
    measured = {
        "error bound": _greatest(excess, "cells") if len(excess) else unmet,
        "error bound says something": share_of(met & (value < 1 - 1 / bound.num_classes)),
        "theorem 2": _greatest(found["alignment_excess"], "cells"),
        "theorem 2 says something": Measurement(
            exact_interval(found["alignment_bound"].min().item(), kind=f"least of {met.numel()} cells")
        ),
        "error bound is attained": share_of(met & (error > 0) & (error >= value - ROUNDING)),
        "the condition is needed": share_of(~met & (error > found["unconditional"] + ROUNDING)),
        "stronger augmentation lets the bound hold": best_less(0, met),
    }
    varying = torch.tensor(bound.gains) > 0
    if bool(varying.any()):
        measured["too strong augmentation"] = best_less(-1, met[:, :, varying])
    return measured, {"num_met": len(excess), "num_cells": met.numel(), "one_cell": 1 / met[0].numel()}


def _greatest(values: Tensor, of: str) -> Measurement:
    return Measurement(exact_interval(values.max().item(), kind=f"greatest of {values.numel()} {of}"))
