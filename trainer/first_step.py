"""Check code of the user's own in the first step: what it returns, where gradients arrive, and how it draws.

A trunk that returns other rows than it got, or that passes no gradient on, would train to the end with plausible
metrics. Each check is a hook that removes itself, so later steps cost nothing.

Shapes: B samples, C channels, H by W pixels, D embedding size.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from data_pipeline.core.errors import UserError
from data_pipeline.core.kinds import OF_THIS_PROJECT, KindConfig, is_own, package_of, path_of
from trainer.distributed.collectives import on_every_rank, rank
from trainer.modules import TrainedModules
from trainer.objectives import Objective

logger = logging.getLogger(__name__)

# Each step seeds torch's generators for the forward pass of an encoder.
_DRAW_FROM = {
    "views": "the keys that the policy gets, by the functions of data_pipeline.core.counter_rng",
    "objective": "a torch.Generator whose seed is made of the seed of the run and pair.step",
}
_ROUNDING = 0.01  # that of bfloat16 and more; a fault is larger
_Check = Callable[[tuple[Any, ...], Any], str | None]  # from inputs and result, returns "X, return Y" if X is wrong


def check_first_step(modules: TrainedModules, objective: Objective, *, device: torch.device) -> None:
    """Let the first step raise `UserError` if views or trunk of the user's own return what cannot train.

    The error comes on one rank, and the others exit. Also warns of views and objectives that draw from a global random
    generator. Compiled networks are not checked, because the compiler cannot follow hooks.
    """
    config = modules.config
    if config.compiles_networks:
        return
    views, trunk = modules.view_policy, modules.encoder.trunk
    view_shape = None if config.data.mel is None else (1, config.data.mel.num_mels, config.data.mel.num_frames)
    may_leave_range = config.views.is_learned or not config.views.is_bounded or view_shape is not None
    check_views = partial(_wrong_views, shape=view_shape, is_bounded=not may_leave_range)
    # Gradients are checked of the encoder with its head, which is trained even if a trunk detaches its map.
    parts: dict[str, tuple[KindConfig, nn.Module, _Check, nn.Module | None]] = {
        "views": (config.views, views, check_views, modules.viewmaker),
        "encoder": (config.encoder, trunk, partial(_wrong_map, trunk), modules.encoder),
        "objective": (config.objective, objective, lambda *_: None, objective),  # the step raises what is wrong
    }
    for section, (kind, module, check, trained) in parts.items():
        if is_own(kind):
            owner = type(kind) if package_of(type(module)) in OF_THIS_PROJECT else type(module)
            name = f"{path_of(owner)} ({section}.kind={kind.kind})"
            _check_first_call(module, name, check, draw_from=_DRAW_FROM.get(section), device=device)
            if trained is not None:
                _check_gradients(trained, name)


def _check_first_call(
    module: nn.Module, name: str, check: _Check, *, draw_from: str | None, device: torch.device
) -> None:
    """Check the result of the first call, and log a warning if it draws from a global generator.

    Such a draw is not a function of the seed, the step and the sample. All ranks may draw the same, and a run that goes
    on draws again what it drew at its start.
    """
    states: list[Any] = []

    def before(*_: object) -> None:
        if module.training:
            first.remove()
            states.append(_generator_states(device))

    def after(_: nn.Module, given: tuple[Any, ...], result: Any) -> None:
        if not module.training:  # a probe, in which ranks may call it differently often
            return
        second.remove()

        def raise_if_wrong() -> None:
            if (said := check(given, result)) is not None:
                raise UserError(f"{name} returned {said}")

        on_every_rank(raise_if_wrong)
        if draw_from is not None and _generator_states(device) != states[0] and rank() == 0:
            logger.warning(
                "%s draws from a global random generator: the draws do not depend on the seed of the run, may be equal "
                "on all ranks, and begin anew when the run goes on; draw from %s",
                name,
                draw_from,
            )

    first = module.register_forward_pre_hook(before)
    second = module.register_forward_hook(after)


def _wrong_views(given: tuple[Any, ...], views: Any, *, shape: tuple[int, ...] | None, is_bounded: bool) -> str | None:
    """`shape` is that of a spectrogram, (C, H, W); None for pictures, whose views have their shape."""
    inputs = given[0]
    expected = tuple(inputs.shape) if shape is None else (len(inputs), *shape)
    if said := _wrong_tensor(views, f"one view for each input, {expected}", lambda found: found.shape == expected):
        return said
    low, high = (float(bound) for bound in views.detach().aminmax())
    if is_bounded and (low < -_ROUNDING or high > 1 + _ROUNDING):
        return f"values from {low:.3g} to {high:.3g}, return views in [0, 1], or set is_bounded = False in the config"
    return None


def _wrong_map(trunk: Any, given: tuple[Any, ...], map_BCHW: Any) -> str | None:
    num_rows = len(given[0])
    wanted = f"a map for each of the {num_rows} pictures"
    if said := _wrong_tensor(map_BCHW, wanted, lambda found: found.dim() > 1 and len(found) == num_rows):
        return said
    wanted = "from pool num_channels values for each map"
    expected = (num_rows, trunk.num_channels)
    return _wrong_tensor(trunk.pool(map_BCHW.detach()), wanted, lambda found: found.shape == expected)


def _wrong_tensor(result: Any, wanted: str, fits: Callable[[Tensor], bool]) -> str | None:
    if not isinstance(result, Tensor):
        return f"{type(result).__name__}, return {wanted}, of floats"
    if not (result.is_floating_point() and fits(result)):
        kind = str(result.dtype).removeprefix("torch.")
        return f"{kind} of shape {tuple(result.shape)}, return {wanted}, of floats"
    if num_bad := int((~result.detach().isfinite()).sum()):
        return f"{num_bad} of {result.numel()} values that are inf or nan, return {wanted}, all finite"
    return None


def _check_gradients(module: nn.Module, name: str) -> None:
    """Raise `UserError` in the first backward pass that reaches a module if it leaves out some of its parameters.

    Does nothing where an engine has cut the parameters into pieces (FSDP, ZeRO 3), which get their gradients elsewhere.
    """
    trained = {label: each for label, each in module.named_parameters() if each.requires_grad}
    if not trained or not all(each.numel() for each in trained.values()):
        return

    def arrived(gradients: Sequence[Tensor | None]) -> None:
        hook.remove()
        left_out = [label for label, gradient in zip(trained, gradients, strict=True) if gradient is None]
        if left_out:
            raise UserError(
                f"no gradient reaches {len(left_out)} of {len(trained)} parameters of {name}, such as {left_out[0]}; "
                "use them in forward, or set requires_grad_(False) on what shall not be trained"
            )

    hook = torch.autograd.graph.register_multi_grad_hook(list(trained.values()), arrived)


def _generator_states(device: torch.device) -> tuple[object, ...]:
    """Return the states of the generators of Python, NumPy and torch, in a form that can be compared."""
    of_numpy = str(np.random.get_state())  # noqa: NPY002  the generator that code may use, though it should not
    of_torch = [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]
    return random.getstate(), of_numpy, *(state.numpy().tobytes() for state in of_torch)
