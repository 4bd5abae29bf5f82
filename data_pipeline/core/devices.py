"""Read the option --device of a command."""

from __future__ import annotations

import torch

from data_pipeline.core.errors import UserError


def named_device(name: str | None) -> torch.device:
    """Return the device called `name`; None stands for the GPU if there is one, else the CPU.

    Raises `UserError` if the device cannot be used.
    """
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError):
        device = None
    if device is None or device.type == "meta":  # a meta device computes nothing
        raise UserError(f'--device {name}: this machine has no such device; take "cpu" or leave it out')
    return device
