"""Run the benchmarks that compare our training with others on the same card."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Final

from benchmarks.gpu_stages.data import built
from benchmarks.gpu_stages.session import Outcome, Setting, Stage, Task, call
from trainer.run_dir import read_object

_COMMANDS: Final = {
    "the viewmaker in the original's order": ("benchmarks.viewmaker_step",),
    "lightly's SimCLR": ("benchmarks.lightly_simclr", "--train-dir", "{data}/train"),
}
_TINY: Final = ("--batch-size", "2", "--rounds", "1")
_IN_FLOAT32: Final = ("--only", "ours, one pass", "as written, two passes")  # few CPUs are fast in bfloat16


def tasks(setting: Setting) -> Mapping[str, Task]:
    """Return the comparisons."""
    needs = 0 if setting.is_tiny else 120
    return {name: Task(partial(compare, setting, name), needs_seconds=needs) for name in _COMMANDS}


def compare(setting: Setting, name: str) -> Outcome:
    """Run a benchmark at the published batch size, and return what it files."""
    data, out = built(setting, "cifar10"), setting.out.absolute() / "peers.json"
    words = [word.format(data=data.absolute()) for word in _COMMANDS[name]]
    size = ("--batch-size", "256")
    if setting.is_tiny:
        size = (*_TINY, *(_IN_FLOAT32 if "viewmaker" in name else ()))
    call(setting, "-m", *words, *size, "--device", setting.device.type, "--out", str(out))
    return Outcome({"results": read_object(out, mend="run it again")["results"]})


STAGE: Final = Stage("peers", tasks, runs_commands=True)
