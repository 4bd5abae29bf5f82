"""The machine code of kernels of Triton for a GPU that need not be there: run on a CPU, and looked at."""

from __future__ import annotations

import functools
import re
import subprocess
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from unittest import mock

import torch
import triton

from benchmarks import ptx
from benchmarks.kernels import launched_by
from trainer import triton_works

CAPABILITIES: Final = (80, 90, 100)


@contextmanager
def on_the_cpu(capability: int = 90) -> Iterator[mock.Mock]:
    """Let kernels take tensors of a CPU, which runs their machine code; yields what counts their launches.

    capability: the GPU for which they are compiled. 80 is an A100, 90 an H100 or H200, 100 a B200.
    """
    launches = mock.Mock(wraps=functools.partial(ptx.launch, capability=capability))
    with mock.patch.object(triton_works, "DEVICE", "cpu"), launched_by(launches):
        yield launches


def compiled_for_an_h100(kernel: Any, half: Collection[str], constants: Mapping[str, Any], *, num_warps: int) -> Any:
    """Return the code of a kernel, as a launch makes it: the arguments of `half` are tensors in bfloat16.

    All tensors, and numbers of channels, are multiples of 16 bytes.
    """

    def argument(name: str) -> Any:
        if name in constants:
            return constants[name]
        if name.endswith("_ptr"):
            return torch.bfloat16 if name in half else torch.float32
        return 1e-5 if name in {"eps", "momentum", "budget"} else 64

    return ptx.compiled_for(90, kernel, (1,), *map(argument, kernel.arg_names), num_warps=num_warps).asm


def assert_in_registers(asm: Mapping[str, Any], directory: Path, *, most: int) -> None:
    """All numbers of a thread are in registers, of which it takes at most `most`: none is spilled to memory."""
    assert not re.search(r"(ld|st)\.local", asm["ptx"])
    (directory / "kernel.cubin").write_bytes(asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    usage = subprocess.run([tool, "-res-usage", directory / "kernel.cubin"], capture_output=True, text=True).stdout
    registers, stack = (int(re.findall(rf"{word}:(\d+)", usage)[0]) for word in ("REG", "STACK"))
    assert stack == 0
    assert registers <= most
