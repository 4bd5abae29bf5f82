"""Notice views and objectives of the user's own that draw from a global random generator.

Such a draw is not a function of the seed, the step and the sample. All ranks may draw the same, and a run that goes on
draws again what it drew at its start. Nothing else would show that.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from data_pipeline.core.kinds import KindConfig, is_own
from trainer.distributed.collectives import rank

logger = logging.getLogger(__name__)

_ADVICE = {
    "views": "draw from the keys that the policy gets, by the functions of data_pipeline.core.counter_rng",
    "objective": "draw from a torch.Generator whose seed is made of the seed of the run and pair.step",
}


def notice_global_draws(parts: Mapping[str, tuple[KindConfig, nn.Module]], *, device: torch.device) -> None:
    """Log a warning if the first call of a module that is the user's own draws from a global generator.

    `parts` holds the config and the module of "views" and "objective".
    """
    for name, (config, module) in parts.items():
        if is_own(config):
            _check_first_call(module, f"{name}.kind={config.kind}", _ADVICE[name], device)


def _check_first_call(module: nn.Module, what: str, advice: str, device: torch.device) -> None:
    states: list[Any] = []

    def before(*_: object) -> None:
        states.append(_states(device))
        first.remove()

    def after(*_: object) -> None:
        second.remove()
        if states and _states(device) != states[0] and rank() == 0:
            logger.warning(
                "the code of %s draws from a global random generator: the draws do not depend on the seed of the run, "
                "may be equal on all ranks, and begin anew when the run goes on; %s",
                what,
                advice,
            )

    first = module.register_forward_pre_hook(before)
    second = module.register_forward_hook(after)


def _states(device: torch.device) -> tuple[object, ...]:
    """Return the states of the generators of Python, NumPy and torch, in a form that can be compared."""
    of_numpy = str(np.random.get_state())  # noqa: NPY002  the generator that code may use, though it should not
    of_torch = [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]
    return random.getstate(), of_numpy, *(state.numpy().tobytes() for state in of_torch)
