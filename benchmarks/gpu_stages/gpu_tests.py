"""Run the tests that need a GPU, file by file, and file what they print: the speed of kernels, and differences."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from typing import Final

from benchmarks.gpu_stages.session import ROOT, Outcome, Setting, Stage, Task
from benchmarks.record import rounded
from trainer.utilization import matrix_rate

_OF_KERNELS: Final = ("tests/trainer/models/", "tests/trainer/views/")
_PRINTED: Final = ("TB/s", "measured:")  # in the lines of a test that are filed


def files_with_gpu_tests() -> list[str]:
    """Return the test files that say that they need a GPU; those with several ranks, which take longest, come last."""
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if "needs a GPU" in path.read_text("utf-8")]
    return sorted((str(path.relative_to(ROOT)) for path in files), key=lambda file: ("ranks" in file, file))


def tasks(setting: Setting, *, of_kernels: bool) -> Mapping[str, Task]:
    """Return the tests of the models and views, after the rates of the card; or all other tests."""
    files = [file for file in files_with_gpu_tests() if file.startswith(_OF_KERNELS) == of_kernels]
    found = {"matrix rates": Task(partial(measure_matrix_rates, setting), needs_seconds=5)} if of_kernels else {}
    return found | {file: Task(partial(run_tests, setting, file), needs_seconds=_seconds(file)) for file in files}


def _seconds(file: str) -> float:
    return 140 if "ranks" in file else 30


def measure_matrix_rates(setting: Setting) -> Outcome:
    """Return the floating-point operations a second of large products of matrices, by precision."""
    size = 64 if setting.is_tiny else None
    return Outcome({name: rounded(matrix_rate(setting.device, name, size=size)) for name in ("bfloat16", "float32")})


def run_tests(setting: Setting, file: str) -> Outcome:
    """Run the tests of a file that need a GPU. It holds if a test ran and none failed. A dry run only collects them."""
    how = "--collect-only" if setting.is_tiny else "-s"
    command = [sys.executable, "-m", "pytest", "-q", "-rf", how, "-p", "no:cacheprovider", file, "-k", "gpu or cuda"]
    limit = 100 + 2 * _seconds(file)  # after which it hangs
    done = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8", timeout=limit)
    lines = done.stdout.strip().splitlines() or [done.stderr[-200:]]
    return Outcome(
        {
            "summary": lines[-1],
            "failures": [line[:300] for line in lines if line.startswith("FAILED ")],
            "printed": [line[:300] for line in lines if any(word in line for word in _PRINTED)],
        },
        holds=done.returncode == 0 and any(word in lines[-1] for word in (" passed", " collected")),
    )


KERNELS: Final = Stage("kernels", partial(tasks, of_kernels=True))
STAGE: Final = Stage("tests", partial(tasks, of_kernels=False))
