"""Requests to stop: a signal, or the end of the launcher that started this rank."""

from __future__ import annotations

import ctypes
import functools
import io
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.gloo import run_ranks
from trainer.distributed.collectives import rank
from trainer.fault_tolerance.preemption import StopRequests


@pytest.mark.parametrize(
    ("variable", "launcher"),
    [("TORCHELASTIC_RUN_ID", "torchrun"), ("SUBMITIT_LOCAL_JOB_ID", "submitit's local executor")],
)
def test_the_end_of_the_launcher_is_a_request_to_stop(
    variable: str, launcher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with StopRequests({variable: "7"}) as requests:
        assert not requests.agreed()
        parent = os.getppid()
        monkeypatch.setattr(os, "getppid", lambda: 1)
        assert requests.agreed()
        assert requests.reason == f"because {launcher} (process {parent}) has ended"


def test_a_shell_may_end_before_the_run_that_it_started(monkeypatch: pytest.MonkeyPatch) -> None:
    with StopRequests({"SLURM_JOB_ID": "7", "RANK": "0"}) as requests:
        monkeypatch.setattr(os, "getppid", lambda: 1)
        assert not requests.agreed()


def test_the_first_ctrl_c_asks_to_stop_and_the_second_stops_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGINT)
    with StopRequests({}) as requests:
        assert not requests.agreed()
        os.kill(os.getpid(), signal.SIGINT)
        assert requests.agreed()
        assert requests.reason == "as Ctrl-C asked"
        assert "press it again to stop at once" in capfd.readouterr().err
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) == before


def test_ctrl_c_under_torchrun_is_the_reason_although_sigterm_follows() -> None:
    with StopRequests({}) as requests:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        assert requests.agreed()
        assert requests.reason == "as Ctrl-C asked"


def test_a_signal_is_the_reason_even_if_the_launcher_ends_by_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with StopRequests({"TORCHELASTIC_RUN_ID": "7"}) as requests:
        os.kill(os.getpid(), signal.SIGTERM)
        monkeypatch.setattr(os, "getppid", lambda: 1)
        assert requests.agreed()
        assert requests.reason == "as SIGTERM asked"


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM])
def test_a_compiler_that_takes_the_signals_is_not_noticed_after_a_step(number: signal.Signals) -> None:
    """Triton replaces the handlers in C, so that Python still believes in its own."""
    with StopRequests({}) as requests:
        ours = signal.getsignal(number)
        ctypes.CDLL(None).signal(int(number), ctypes.c_void_p(1))  # SIG_IGN
        assert signal.getsignal(number) == ours
        os.kill(os.getpid(), number)
        assert not requests.agreed()  # the end of the step that was compiled
        os.kill(os.getpid(), number)
        assert requests.agreed()
        assert requests.reason == f"as {number.name} asked"


@pytest.fixture
def set_hangup() -> Iterator[Callable[[Any], Any]]:
    """Give the function that sets what SIGHUP does, which depends on how the tests were started, until their end."""
    before = signal.getsignal(signal.SIGHUP)
    yield functools.partial(signal.signal, signal.SIGHUP)
    signal.signal(signal.SIGHUP, before)


def test_a_terminal_that_closes_asks_to_stop(set_hangup: Callable[[Any], Any]) -> None:
    set_hangup(signal.SIG_DFL)
    with StopRequests({}) as requests:
        assert not requests.agreed()
        os.kill(os.getpid(), signal.SIGHUP)
        assert requests.agreed()
        assert requests.reason == "as SIGHUP asked"


def test_a_run_under_nohup_outlives_its_terminal(set_hangup: Callable[[Any], Any]) -> None:
    set_hangup(signal.SIG_IGN)
    with StopRequests({}) as requests:
        os.kill(os.getpid(), signal.SIGHUP)
        assert not requests.agreed()
        assert not requests.agreed()
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def test_an_interrupt_in_a_notebook_asks_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())  # has no descriptor
    with StopRequests({}) as requests:
        signal.raise_signal(signal.SIGINT)
        assert requests.agreed()


def ask_before_rank_0() -> bool:
    with StopRequests({}) as requests:
        if rank() == 0:
            dist.recv(torch.empty(1), src=1)
        requests.agreed()
        if rank() == 1:
            dist.send(torch.ones(1), dst=0)
        return requests.agreed()


@pytest.mark.ranks
def test_no_question_waits_for_a_rank_that_may_have_failed_in_the_first_step() -> None:
    assert run_ranks(ask_before_rank_0, 2, timeout_s=20) == [False, False]
