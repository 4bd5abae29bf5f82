"""What the README shows must work as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.real_data import REPOSITORY

# What the README says: the class in a file of its own, and a line in the registry.
WITH_STRIPES = """
import sys
from data_pipeline.overlays import registry
from stripes import Stripes
registry.OVERLAYS = {**registry.OVERLAYS, "stripes": Stripes}
from data_pipeline.__main__ import main
main()
"""


@pytest.mark.parametrize("drawn", ["baked", "online"])
def test_the_new_overlay_builds_and_verifies(drawn: str, tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (REPOSITORY / "README.md").read_text(), flags=re.DOTALL)
    assert len(code.splitlines()) <= 20
    (tmp_path / "stripes.py").write_text(code)

    def run(*arguments: str) -> str:
        command = [sys.executable, "-c", WITH_STRIPES, *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run("build", "procedural_stripes", "--out", "data", "--limit", "40", "--overlay", drawn, "--workers", "1")
    assert "40 samples" in run("verify", "data")
    run("preview", "data", "--out", "grid.png")
    assert (tmp_path / "grid.png").stat().st_size > 10_000
