"""`make demo`: build data, train two encoders, and write a report that compares them.

The data are drawn pictures with digits on them. One encoder trains on expert views, the other with a viewmaker. Both
are probed on both labels, as is the untrained encoder. They are trained by two processes, or by one where there is one
GPU, which two processes may not share. Every stage is a command that a user could type, and is printed.
An interrupted demo goes on with the stage that it had not finished.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import torch

from data_pipeline.core.errors import run_command

DIRECTORY = Path("demo")
REPORT = DIRECTORY / "report.html"
RECIPES = {"demo:expert": DIRECTORY / "expert", "demo:viewmaker": DIRECTORY / "viewmaker"}
RUNS = [str(run_dir) for run_dir in RECIPES.values()]


def stages() -> list[tuple[str, list[str]]]:
    """Return the title and the command of each stage."""
    python = [sys.executable]
    build = [*python, "-m", "data_pipeline", "build", "procedural_digits", "--overlay", "online"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    torchrun += ["1" if torch.cuda.device_count() == 1 else "2"]
    train = [*python, *torchrun, "-m", "launch.train"]
    data = DIRECTORY / "data"
    return [
        ("draw the training pictures", [*build, "--out", str(data / "train"), "--limit", "5000"]),
        ("draw the test pictures", [*build, "--out", str(data / "test"), "--split", "test", "--limit", "2000"]),
        *(
            (f"train {recipe}", [*train, "--config", recipe, "--run-dir", str(run_dir)])
            for recipe, run_dir in RECIPES.items()
        ),
        ("probe both encoders, and the untrained ones", [*python, "-m", "trainer.probe", *RUNS, "--untrained"]),
        ("picture the views", [*python, "-m", "trainer.analyze", "views", *RUNS]),
        ("write the report", [*python, "-m", "trainer.report", *RUNS, "--out", str(REPORT)]),
    ]


def main() -> None:
    started = time.monotonic()
    plan = stages()
    for number, (title, command) in enumerate(plan, start=1):
        shown = shlex.join(["python", *command[1:]])
        print(f"\n[{number}/{len(plan)}, {time.monotonic() - started:.0f} s] {title}\n$ {shown}", flush=True)
        # Without the variable torchrun also chooses one thread, but prints a banner of five lines.
        is_parallel = "torch.distributed.run" in command
        done = subprocess.run(command, env={"OMP_NUM_THREADS": "1", **os.environ} if is_parallel else None)
        if done.returncode:
            print(
                f"error: this command of the demo failed: {shown}; correct the cause and run `make demo` again",
                file=sys.stderr,
            )
            raise SystemExit(done.returncode)
    print(f"\nDone in {time.monotonic() - started:.0f} s. The report: {REPORT.resolve()}")


if __name__ == "__main__":
    run_command(main)
