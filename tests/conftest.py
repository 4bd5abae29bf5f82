"""Threads, marks of whole folders, the order of the files, and the check that marks are true."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests import nursery, tiers

if TYPE_CHECKING:
    from tests.commands import Call

gc.disable()  # until the tests are collected, which imports everything

# Tensors of tests are small, and `make test` has a worker or more on each core: more threads only wait for each other.
# The runtime of OpenMP reads this when torch is imported, here and in every process that a test starts.
THREADS = os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("NUMBA_OPT", "0")  # to optimize what librosa compiles takes longer than to run it
# torch.compile compiles in the process that asks, without a pool of others, and for scalars: to try an instruction set
# for vectors, it starts a new interpreter, for two seconds.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")

FOLDERS = {"slurm": "slurm", "e2e": "process"}  # the mark of every test in a folder of tests/
SECONDS = {"slurm": 15, "process": 8, "ranks": 6, "slow": 2}  # about, of a test with this mark


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Run a command line's `main` with arguments in this process."""
    from tests.commands import caller  # imports torch, whose threads are set above

    return caller(monkeypatch, capsys)


def pytest_configure() -> None:
    tiers.watch_processes()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in `make test &`; what a test starts would inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes() -> None:
    nursery.fork_workers()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        folder = item.path.relative_to(Path(__file__).parent).parts[0]
        if folder in FOLDERS:
            item.add_marker(FOLDERS[folder])
    # Workers take whole files, in this order: a long file that begins last leaves the others without work.
    seconds = Counter[Path]()
    for item in items:
        seconds[item.path] += max((SECONDS.get(mark.name, 0) for mark in item.iter_markers()), default=0)
    items.sort(key=lambda item: -seconds[item.path])


def pytest_collection_finish() -> None:
    """Take what is imported and collected out of garbage collection, which would search it again and again."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    tiers.begin(item)


@pytest.hookimpl(trylast=True)  # once the fixtures are gone
def pytest_runtest_teardown() -> None:
    """Fail a test after which torch computes on another number of threads: all tests after it would be slower."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != int(THREADS):
        number = torch.get_num_threads()
        torch.set_num_threads(int(THREADS))
        pytest.fail(f"the test leaves torch with {number} threads in place of {THREADS}")
