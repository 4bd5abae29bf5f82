"""Look at the code that Triton has compiled for a GPU, which need not be there."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import triton


def assert_in_registers(asm: Mapping[str, Any], directory: Path, *, most: int) -> None:
    """All numbers of a thread are in registers, of which it takes at most `most`: none is spilled to memory."""
    assert not re.search(r"(ld|st)\.local", asm["ptx"])
    (directory / "kernel.cubin").write_bytes(asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    usage = subprocess.run([tool, "-res-usage", directory / "kernel.cubin"], capture_output=True, text=True).stdout
    registers, stack = (int(re.findall(rf"{word}:(\d+)", usage)[0]) for word in ("REG", "STACK"))
    assert stack == 0
    assert registers <= most
