"""A linear probe that was stopped goes on after its last epoch that was kept, with the bits of one that was not."""

from __future__ import annotations

import functools
import itertools
import logging
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from tests.gloo import run_ranks
from tests.tiny_data import write_tiny_pair
from tests.trainer.probed_runs.test_probe_command import make_run
from trainer.probed_runs.options import ProbeOptions
from trainer.probed_runs.probing import probe_run
from trainer.probes import unfinished
from trainer.probes.linear import FitState
from trainer.probes.unfinished import UnfinishedFit
from trainer.run_dir import RunDir

CPU = torch.device("cpu")
NUM_EPOCHS, STOPPED_AFTER = 4, 2
STATE = FitState({"base": {"weight": torch.arange(6.0).view(2, 3)}}, {"base": [0.25, 0.5]}, {"base": [0.125, 1 / 3]})


class StoppedError(Exception):
    """Stands in for a kill."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_pair(tmp_path_factory.mktemp("data"), num_train=53, num_test=41, overlay="online")


def options(**changes: Any) -> ProbeOptions:
    return ProbeOptions(changes={"num_epochs": NUM_EPOCHS, "batch_size": 16, "learning_rate": 0.1, **changes})


def probe_on_rank(run_dir: Path, changes: Mapping[str, Any], stop: bool) -> list[int]:
    """Probe, and return the epochs that were fitted. Keep the state of each; `stop` raises after some of them."""
    fitted: list[int] = []
    keep = UnfinishedFit.keep

    def keep_each(self: UnfinishedFit, state: FitState) -> None:
        fitted.append(state.num_epochs)
        keep(self, state)
        if stop and state.num_epochs == STOPPED_AFTER:
            raise StoppedError

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(unfinished, "_SECONDS_BETWEEN", 0.0)
        monkeypatch.setattr(UnfinishedFit, "keep", keep_each)
        if stop:
            with pytest.raises(StoppedError):
                probe_run(RunDir(run_dir), options(**changes), device=CPU)
        else:
            probe_run(RunDir(run_dir), options(**changes), device=CPU)
    return fitted


def results(run_dir: RunDir) -> dict[str, Any]:
    """Return the bytes of all files of probes, and of results all but the seconds."""
    files = {path.relative_to(run_dir.path): path.read_bytes() for path in run_dir.all_probes.rglob("*.*")}
    return {
        str(path): [line for line in content.splitlines() if not line.strip().startswith(b'"seconds"')]
        for path, content in files.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("views", ["policy", "none"])
def test_a_probe_that_was_stopped_goes_on_with_the_same_bits(
    views: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, stopped = (make_run(tmp_path / name, data, channels_last=True) for name in ("whole", "stopped"))
    assert probe_on_rank(whole.path, {"views": views}, False) == [1, 2, 3]
    assert probe_on_rank(stopped.path, {"views": views}, True) == [1, 2]
    assert len(list(stopped.all_probes.glob("unfinished_*"))) == 1
    assert stopped.probe_steps() == []
    assert probe_on_rank(stopped.path, {"views": views}, False) == [3]  # from the third epoch on
    assert "the probe goes on after its epoch 2, from" in capsys.readouterr().err
    assert results(stopped) == results(whole)


@pytest.mark.slow
@pytest.mark.parametrize("other", ["checkpoint", "settings", "data"])
def test_the_state_of_another_probe_is_not_taken_up(other: str, data: Path, tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", data)
    probe_on_rank(run_dir.path, {}, True)
    if other == "checkpoint":
        path = run_dir.checkpoint(10) / "encoder.safetensors"
        state = {name: tensor / 2 for name, tensor in safetensors.torch.load_file(path).items()}
        safetensors.torch.save_file(state, path)
    if other == "data":
        write_tiny_pair(tmp_path / "other", num_train=61, num_test=41, overlay="online")
        text = run_dir.config.read_text()
        run_dir.config.write_text(text.replace(str(data), str(tmp_path / "other")))
    changes = {"momentum": 0.5} if other == "settings" else {}
    (kept,) = run_dir.all_probes.glob("unfinished_*")
    if changes:  # they are in the name of the file too
        shutil.copy(kept, kept.with_name(f"{kept.stem}-momentum_0.5{kept.suffix}"))
    assert probe_on_rank(run_dir.path, changes, False) == [1, 2, 3]


@pytest.mark.ranks
def test_two_ranks_go_on_where_one_process_stopped(data: Path, tmp_path: Path) -> None:
    whole, stopped = (make_run(tmp_path / name, data) for name in ("whole", "stopped"))
    assert run_ranks(probe_on_rank, 1, whole.path, {}, False) == [[1, 2, 3]]
    assert run_ranks(probe_on_rank, 1, stopped.path, {}, True) == [[1, 2]]
    assert run_ranks(probe_on_rank, 2, stopped.path, {}, False) == [[3], [3]]
    assert results(stopped) == results(whole)


def fit_at(path: Path | None, *, seconds: float = 30.0, identity: str = "this") -> UnfinishedFit:
    """Return a fit whose clock moves on by some seconds each time it is read."""
    clock: Callable[[], float] = functools.partial(next, itertools.count(0.0, seconds))
    return UnfinishedFit(path, lambda: {"fit": identity}, clock=clock)


def test_a_state_is_written_and_read_with_all_its_digits(tmp_path: Path) -> None:
    path = tmp_path / "probes" / "unfinished.safetensors"
    fit_at(path).keep(STATE)
    found = fit_at(path).load()
    assert found is not None
    assert (found.num_epochs, found.test_accuracy, found.train_accuracy) == (
        2,
        STATE.test_accuracy,
        STATE.train_accuracy,
    )
    assert torch.equal(found.heads["base"]["weight"], STATE.heads["base"]["weight"])
    assert fit_at(path, identity="another").load() is None


def test_a_state_is_written_every_half_minute_at_most(tmp_path: Path) -> None:
    path = tmp_path / "unfinished.safetensors"
    fit_at(path, seconds=29.0).keep(STATE)
    assert not path.exists()
    fit_at(path, seconds=30.0).keep(STATE)
    assert path.exists()


@pytest.mark.parametrize("content", [b"", b"8", b"\xff" * 100])
def test_a_damaged_file_is_no_state(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "unfinished.safetensors"
    path.write_bytes(content)
    assert fit_at(path).load() is None


def test_a_fit_whose_state_cannot_be_written_goes_on_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "probes").write_text("a file where a directory should be")
    with caplog.at_level(logging.WARNING):
        fit_at(tmp_path / "probes" / "unfinished.safetensors").keep(STATE)
    assert "the probe is not kept while it is fitted" in caplog.text


def test_without_a_path_nothing_is_kept() -> None:
    fit = UnfinishedFit(
        None, lambda: pytest.fail("nobody needs it"), clock=functools.partial(next, itertools.count(0, 99))
    )
    fit.keep(STATE)
    assert fit.load() is None
