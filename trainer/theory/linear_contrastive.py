"""The linear model of feature suppression (Tamkin et al. 2022, section 4 and appendices D and E).

Shapes: S seeds, N samples, A angles.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import torch
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor

from data_pipeline.counter_rng import DrawKeys, normal
from trainer.theory.claim import Claim, judge, t_interval
from trainer.theory.experiment import Experiment, Outcome, Part, Tensors, TheorySettings
from trainer.theory.figures import Curve, Panel, draw

LEMMA_E1 = Claim(
    name="error is the angle",
    statement="The test error of task k is the angle between what was learned and the feature's direction over pi.",
    source="Tamkin et al. 2022, Lemma E.1",
)


class LinearContrastiveSettings(TheorySettings):
    kind: Literal["linear_contrastive"] = "linear_contrastive"
    error_angles_degrees: tuple[float, ...] = (0, 5, 15, 30, 45, 60, 75, 90)
    num_test_samples: PositiveInt = 100_000
    error_tolerance: PositiveFloat = 0.002


def downstream_error(angle_A: Tensor, *, seeds: tuple[int, ...], num_samples: int) -> Tensor:
    """(S, A) share of samples x ~ N(0, I) with sign <theta, x> != sign <mu, x>, theta at each angle (radians) to mu.

    Only the plane of the two directions matters, whatever the dimension of x.
    """
    keys = DrawKeys(seed=0, epoch=0, index_B=torch.tensor(seeds, device=angle_A.device), view=0)
    x_SN2 = normal(keys, 2 * num_samples, purpose=0).double().view(len(seeds), num_samples, 2)
    theta_A2 = torch.stack([angle_A.cos(), angle_A.sin()], dim=1).double()
    errors = [((x_SN2 @ theta_2 > 0) != (x_SN2[..., 0] > 0)).double().mean(1) for theta_2 in theta_A2]
    return torch.stack(errors, dim=1)


def _parts(settings: LinearContrastiveSettings) -> Mapping[str, Part]:
    def errors(device: torch.device) -> Tensors:
        angle_A = torch.tensor(settings.error_angles_degrees, dtype=torch.float64, device=device).deg2rad()
        return {"error_SA": downstream_error(angle_A, seeds=settings.seeds, num_samples=settings.num_test_samples)}

    return {"downstream_error": errors}


def _conclude(settings: LinearContrastiveSettings, found: Mapping[str, Tensors]) -> Outcome:
    error_SA = found["downstream_error"]["error_SA"]
    angle_A = torch.tensor(settings.error_angles_degrees, dtype=torch.float64)
    deviation_SA = error_SA - angle_A.deg2rad() / math.pi
    worst = int(deviation_SA.mean(0).abs().argmax())
    claim = judge(
        LEMMA_E1,
        t_interval(deviation_SA[:, worst]),
        measured=f"error - angle/pi at the worst of the angles, {angle_A[worst]:g} degrees",
        at_least=-settings.error_tolerance,
        at_most=settings.error_tolerance,
    )
    panel = Panel(
        "Test error against the angle",
        "angle (degrees)",
        "test error",
        [Curve(angle_A, angle_A / 180, "angle / pi"), Curve(angle_A, error_SA.mean(0), "measured", 1, "", "o")],
    )
    return Outcome([claim], {"error_against_angle": draw([panel], num_columns=1)}, {})


EXPERIMENT = Experiment(
    title="feature suppression in the linear model of Tamkin et al. 2022: Theorem 4.1, appendix D, Lemma E.1",
    defaults=LinearContrastiveSettings(),
    parts=_parts,
    conclude=_conclude,
)
