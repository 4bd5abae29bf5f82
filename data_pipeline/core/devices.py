"""Choose the device of a command: what --device names, else the GPU if there is one, else the CPU."""

from __future__ import annotations

import socket

import torch

from data_pipeline.core.errors import UserError


def has_gpu() -> bool:
    """Return whether this process sees a GPU.

    Raises `UserError` if there are GPUs that torch cannot use, for example because their driver is too old for it. The
    work would be done on the CPU without a word.
    """
    if torch.cuda.is_available():
        return True
    if num_gpus := torch.cuda.device_count():  # by the driver's own library, which works with any torch
        raise UserError(
            f"{socket.gethostname()} has {num_gpus} GPU(s), but torch {torch.__version__} can use none; see in "
            f"nvidia-smi whether the driver is new enough for CUDA {torch.version.cuda}, or set CUDA_VISIBLE_DEVICES= "
            "for the CPU"
        )
    return False


def named_device(name: str | None) -> torch.device:
    """Return the device called `name`; None stands for the GPU if there is one, else the CPU.

    Raises `UserError` if the device cannot be used.
    """
    name = name or ("cuda" if has_gpu() else "cpu")
    try:
        device = torch.device(name)
        torch.ones(1, device=device)  # by a kernel, which a torch for other GPUs does not have
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason, *_ = str(error).splitlines()
        raise UserError(
            f"--device {name} cannot be used now: {reason}; see in nvidia-smi what GPUs there are and what uses them, "
            'or take "cpu"'
        ) from error
    return device
