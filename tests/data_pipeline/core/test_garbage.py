"""A command searches its modules for garbage neither while it imports them nor at its end, but its tensors always."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from configs import debug
from data_pipeline.core.garbage import search_modules_rarely
from trainer.modules import build_modules

# The function that prints is registered before gc.freeze is, so it runs after it.
COMMAND = """
import atexit, gc
from data_pipeline.core.errors import run_command

def main():
    import torch
    print(gc.get_stats()[2]["collections"], gc.get_threshold()[:2] == usual[:2], gc.isenabled())

usual = gc.get_threshold()
atexit.register(lambda: print(gc.get_freeze_count() > 100_000))
run_command(main)
"""


@pytest.mark.process
def test_a_command_does_not_search_its_modules_for_garbage() -> None:
    done = subprocess.run([sys.executable, "-c", COMMAND], capture_output=True, text=True)
    assert done.stdout.split() == ["0", "True", "True", "True"], done.stderr


def test_once_there_are_networks_all_objects_are_searched_as_usual() -> None:
    usual = gc.get_threshold()
    search_modules_rarely()
    assert gc.get_threshold()[2] == 1000
    build_modules(debug.image())
    assert gc.get_threshold() == (700, 10, 10)
    gc.set_threshold(*usual)


def test_thresholds_of_the_user_stay() -> None:
    usual = gc.get_threshold()
    gc.set_threshold(5000, 7, 9)
    build_modules(debug.image())
    assert gc.get_threshold() == (5000, 7, 9)
    gc.set_threshold(*usual)
