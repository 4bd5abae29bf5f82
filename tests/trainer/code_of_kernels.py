"""Run kernels of Triton in its interpreter, and look at their code for a GPU, which need not be there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

ROOT = Path(__file__).parents[2]


def run_in_the_interpreter(module: str, *arguments: str) -> None:
    """Run checks of kernels on a CPU, in a process of their own: Triton reads the variable when it is imported."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


def compiled_for_an_h100(kernel: Any, half: Collection[str], constants: Mapping[str, Any], *, num_warps: int) -> Any:
    """Return the code of a kernel, as a launch makes it: the arguments of `half` are pointers to bfloat16.

    All pointers, and numbers of channels, are multiples of 16 bytes.
    """
    signature, attributes = {}, {}
    for number, name in enumerate(kernel.arg_names):
        is_pointer = name.endswith("_ptr")
        scalar = "fp32" if name in {"eps", "momentum", "budget"} else "i32"
        pointer = "*bf16" if name in half else "*fp32"
        signature[name] = "constexpr" if name in constants else pointer if is_pointer else scalar
        if is_pointer or name == "channels":
            attributes[(number,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=dict(constants), attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps}).asm


def assert_in_registers(asm: Mapping[str, Any], directory: Path, *, most: int) -> None:
    """All numbers of a thread are in registers, of which it takes at most `most`: none is spilled to memory."""
    assert not re.search(r"(ld|st)\.local", asm["ptx"])
    (directory / "kernel.cubin").write_bytes(asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    usage = subprocess.run([tool, "-res-usage", directory / "kernel.cubin"], capture_output=True, text=True).stdout
    registers, stack = (int(re.findall(rf"{word}:(\d+)", usage)[0]) for word in ("REG", "STACK"))
    assert stack == 0
    assert registers <= most
