"""A run that has diverged fails however often it is started; a run with a few skipped steps does not."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import trainer.step
from configs import resolve_recipe
from data_pipeline.core.errors import UserError
from tests.small_encoder import CONVNET
from tests.tiny_data import on_data, write_tiny_pair
from trainer.build import build_training
from trainer.checkpoint.restore import newest_state
from trainer.checkpoint.run_state import SkipCounts
from trainer.config import RunConfig
from trainer.data import open_stream
from trainer.fault_tolerance.preemption import StoppedError, StopRequests
from trainer.run_dir import RunDir
from trainer.train import train

STEPS_PER_EPOCH = 4


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_pair(tmp_path_factory.mktemp("data"), num_train=STEPS_PER_EPOCH * 8, num_test=16)


def configure(data: Path, *overrides: str, num_steps: int) -> RunConfig:
    small = [CONVNET, "global_batch_size=8", f"num_epochs={num_steps // STEPS_PER_EPOCH}", "keep_checkpoints=99"]
    return resolve_recipe("debug:image", on_data(data, *small, "watchdog.enabled=false", *overrides))


def start(run_dir: RunDir, config: RunConfig) -> None:
    train(config, run_dir, device=torch.device("cpu"), command="train")


def saved_steps(run_dir: RunDir) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in run_dir.checkpoints.glob("step_*"))


def saved_counts(run_dir: RunDir) -> SkipCounts:
    state = newest_state(run_dir).run
    assert state is not None
    return state.skipped


Skip = Callable[[Collection[int]], None]


@pytest.fixture
def skip(monkeypatch: pytest.MonkeyPatch) -> Skip:
    """Return a function that lets the steps of these numbers be skipped, counted from the next training step."""

    def of(steps: Collection[int]) -> None:
        calls = 0

        def any_not_finite(norms: Iterable[Tensor]) -> Tensor:
            nonlocal calls
            calls += 1
            return torch.tensor(calls - 1 in steps)

        monkeypatch.setattr(trainer.step, "any_not_finite", any_not_finite)

    return of


@pytest.mark.slow
@pytest.mark.parametrize(("num_steps", "message"), [(32, "in 10 steps in a row, up to step 10;"), (8, "7 of 8 steps")])
def test_a_diverged_run_fails_however_often_it_is_started(
    num_steps: int, message: str, data: Path, tmp_path: Path
) -> None:
    run_dir = RunDir(tmp_path)
    config = configure(data, "optimizer.learning_rate=1e30", "checkpoint_every_steps=4", num_steps=num_steps)
    for _ in range(3):
        with pytest.raises(UserError, match=message):
            start(run_dir, config)
        assert saved_steps(run_dir) == [4]
        assert saved_counts(run_dir) == SkipCounts(total=3, in_a_row=3)
    assert "finished_step" not in json.loads(run_dir.provenance.read_text())


@pytest.mark.slow
def test_no_checkpoint_is_written_of_skipped_steps_alone(
    data: Path, tmp_path: Path, skip: Skip, caplog: pytest.LogCaptureFixture
) -> None:
    run_dir = RunDir(tmp_path)
    skip({2, 3, 4, 7})
    with caplog.at_level(logging.WARNING):
        start(run_dir, configure(data, "checkpoint_every_steps=1", num_steps=8))
    assert saved_steps(run_dir) == [1, 2, 6, 7, 8]  # the last one all the same, for the run is finished
    assert saved_counts(run_dir) == SkipCounts(total=4, in_a_row=1)
    assert "no checkpoint at step 5: every step since the checkpoint of step 2 was skipped" in caplog.text
    assert "the last 1 steps of the run were skipped" in caplog.text
    assert json.loads(run_dir.provenance.read_text())["finished_step"] == 8


@pytest.mark.slow
def test_counts_go_on_over_starts_and_a_stop_in_skipped_steps_goes_on_before_them(
    data: Path, tmp_path: Path, skip: Skip, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, config = RunDir(tmp_path), configure(data, "checkpoint_every_steps=100", num_steps=12)
    asked = iter([False] * 4 + [True])
    monkeypatch.setattr(StopRequests, "agreed", lambda self: next(asked))
    skip({1})
    with pytest.raises(StoppedError, match="stopped after step 5,"):
        start(run_dir, config)
    assert saved_counts(run_dir) == SkipCounts(total=1, in_a_row=0)

    asked = iter([False] * 2 + [True])
    skip({0, 1, 2})
    with pytest.raises(StoppedError, match="stopped after step 5,"):
        start(run_dir, config)
    assert saved_steps(run_dir) == [5]

    asked = iter([False] * 7)
    skip({0, 1})
    start(run_dir, config)
    assert [line["train/skipped_steps"] for line in run_dir.read_metrics()] == [0, 1, 1, 1, 1, 2, 3, 3, 3, 3, 3, 3]
    assert saved_counts(run_dir) == SkipCounts(total=3, in_a_row=0)


def test_a_row_of_skipped_steps_goes_on_over_a_start(data: Path, tmp_path: Path, skip: Skip) -> None:
    """Learned from step 0, 3 skipped and saved: the restart needs 2 more to reach 5."""
    run_dir = RunDir(tmp_path)
    config = configure(data, "checkpoint_every_steps=4", "max_skipped_in_a_row=5", num_steps=16)
    for steps in ({1, 2, 3, 4, 5}, {0, 1}):
        skip(steps)
        with pytest.raises(UserError, match="in 5 steps in a row, up to step 5;"):
            start(run_dir, config)
    skip({0})
    start(run_dir, config)
    assert saved_counts(run_dir) == SkipCounts(total=4, in_a_row=0)


@pytest.mark.slow
def test_where_players_alternate_what_was_done_before_the_bad_update_stays(data: Path) -> None:
    """All changes of the bad update are undone, so the state is that after the updates before it."""
    words = ["objective.kind=simsiam", "adversary.update=alternating", "adversary.viewmaker_steps=2"]
    bad = resolve_recipe("debug:viewmaker", on_data(data, *words, "global_batch_size=16"))
    good = bad.override(["adversary.viewmaker_steps=1"], where="x")  # it ends before the bad update
    (batch,) = open_stream(bad.data, global_batch_size=16, seed=0, end_step=1)
    rates = dict.fromkeys(("encoder", "viewmaker", "objective"), 0.01)
    states, skipped = [], []
    for config in (bad, good):
        training = build_training(config, num_samples=32, device=torch.device("cpu"))
        engines = training.engines
        calls = 0

        def poison(gradient: Tensor, config: RunConfig = config) -> Tensor:
            nonlocal calls
            calls += 1
            return gradient * math.inf if config is bad and calls == 2 else gradient

        next(engines["viewmaker"].module.parameters()).register_hook(poison)  # type: ignore[no-untyped-call]
        skipped.append(bool(training.step(batch, learning_rates=rates).skipped))
        states.append({f"{name}.{key}": value.clone() for name, engine in engines.items()
                       for key, value in (engine.module_state() | engine.optimizer_state()).items()})  # fmt: skip
    assert skipped == [True, False]
    assert states[0].keys() == states[1].keys()
    for name, value in states[1].items():
        assert torch.equal(states[0][name], value), name
