"""The stages of a session on a GPU in the order of their worth, and what a session does with them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks import record
from benchmarks.gpu_stages import checks, kernel_trace, probe, science, throughput
from benchmarks.gpu_stages.session import Setting, Stage, begin_session, read_record, run_stage
from data_pipeline.core.errors import UserError, nearest
from trainer.distributed.environment import why_gpu_is_unusable

_MACHINE, *_THROUGHPUT, _COMPILED = throughput.STAGES
STAGES: Final[tuple[Stage, ...]] = (
    *(_MACHINE, checks.STAGE, _THROUGHPUT[0], _COMPILED, kernel_trace.STAGE),
    *(probe.STAGE, *_THROUGHPUT[1:], *science.STAGES),
)
_PACKAGES: Final = ("torch", "torchvision", "triton", "numpy", "lightly", "simplejpeg")


def circumstances(setting: Setting, *, commit: str | None) -> dict[str, Any]:
    """Return what the figures of a session depend on: GPU, machine, command, commit."""
    facts = record.circumstances(packages=_PACKAGES)
    # The places on a lent machine mean nothing elsewhere.
    words = str(facts["command"]).split(" ")
    facts["command"] = " ".join(Path(word).name if word.startswith("/") else word for word in words)
    facts["git_commit"] = facts["git_commit"] or commit
    facts["device"] = "cpu"
    if setting.device.type == "cuda":
        gpu = torch.cuda.get_device_properties(setting.device)
        facts["device"] = gpu.name
        facts["gpu"] = {
            "gigabytes": record.rounded(gpu.total_memory / 1e9),
            "capability": [gpu.major, gpu.minor],
            "multiprocessors": gpu.multi_processor_count,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
            "architectures": torch.cuda.get_arch_list(),
        }
    return facts


def choose_gpu() -> torch.device:
    """Return the first GPU. Raises `UserError` if there is none, or none that this torch has kernels for."""
    if not torch.cuda.is_available():
        raise UserError(
            f"torch {torch.__version__} sees no GPU; check nvidia-smi, or try the stages on the CPU with --dry-run-tiny"
        )
    device = torch.device("cuda", 0)
    if (reason := why_gpu_is_unusable(device)) is not None:
        raise UserError(reason)
    return device


def chosen(names: str | None) -> list[Stage]:
    """Return the named stages in the order of their worth; None stands for all. Raises `UserError` for another name."""
    by_name = {stage.name: stage for stage in STAGES}
    wanted = list(by_name) if names is None else names.split(",")
    for name in wanted:
        if name not in by_name:
            raise UserError(f'--stages names "{name}", which is no stage{nearest(name, by_name)}')
    return [stage for name, stage in by_name.items() if name in wanted]


def run_session(
    stages: Sequence[Stage],
    setting: Setting,
    *,
    commit: str | None = None,
    is_isolated: bool = True,
    again: bool = False,
) -> None:
    """Run the stages, and print a line for each, and where the record is."""
    began = time.time()
    session = begin_session(setting, circumstances(setting, commit=commit))
    for stage in stages:
        try:
            said = str(run_stage(stage, setting, session=session, is_isolated=is_isolated, again=again))
        except KeyboardInterrupt:
            print(f"{stage.name}: interrupted; {setting.record} has all that was measured", flush=True)
            raise
        minutes, seconds = divmod(round(time.time() - began), 60)
        print(f"[{minutes:2d}:{seconds:02d}] {stage.name}: {said}", flush=True)
    measured = read_record(setting.record)
    print(f"{setting.record} holds {sum(len(of_stage) for of_stage in measured.stages.values())} measurements")
