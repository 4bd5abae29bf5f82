"""Nothing in a run directory or a config file is executed, unless the user allows it."""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import launch.train
import trainer.analyze
import trainer.export
import trainer.probe
import trainer.replay
import trainer.report
from configs import debug, resolve_recipe
from data_pipeline.core.errors import UserError
from data_pipeline.core.schema import difference
from launch.runs import resubmit
from tests.tiny_data import write_tiny_pair
from tests.trainer.probed_runs.test_probe_command import make_run
from trainer.config import read_config
from trainer.fault_tolerance.step_record import NonFiniteRecord
from trainer.models import load_encoder
from trainer.run_dir import RunDir, write_json


@pytest.fixture
def ran(tmp_path: Path) -> Path:
    """Return the file that the run's locations create if they are executed."""
    return tmp_path / "ran"


@pytest.fixture
def run(tmp_path: Path, ran: Path) -> RunDir:
    """Make a stranger's run, whose config names a command for its data."""
    data = write_tiny_pair(tmp_path / "data", num_train=40, num_test=20)
    run_dir = make_run(tmp_path / "run", data)
    config = json.loads(run_dir.config.read_text())
    for split in ("train", "test"):
        config["data"][f"{split}_dir"] = f"pipe:touch {ran}; cat {data / split}/{{name}}"
    config["data"]["remote"]["read_back_from"] = None  # as a stranger may write it
    write_json(run_dir.config, config)
    return run_dir


def call(monkeypatch: pytest.MonkeyPatch, command: Any, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["command", *map(str, arguments)])
    command.main()


REFUSAL = r"config\.json names the location 'pipe:touch .*', a command that this machine would run; pass --allow-pipe"


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        (trainer.probe, ["--views", "none", "--epochs", "1"]),
        (trainer.analyze, ["--set", "num_pictures=4"]),
    ],
)
def test_a_command_in_a_run_directory_is_refused_until_it_is_allowed(
    command: Any, arguments: list[str], run: RunDir, ran: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = ["views", run.path] if command is trainer.analyze else [run.path]
    with pytest.raises(UserError, match=REFUSAL):
        call(monkeypatch, command, *before, *arguments)
    assert not ran.exists()
    call(monkeypatch, command, *before, *arguments, "--allow-pipe")
    assert ran.exists()


@pytest.mark.parametrize("name", sorted(trainer.analyze.ANALYSES))
def test_no_analysis_runs_a_command(name: str, run: RunDir, ran: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [run.path]
    if name == "feature_dropout":  # which wants two runs
        runs.append(run.path.with_name("other"))
        RunDir(runs[1]).path.mkdir()
        RunDir(runs[1]).config.write_text(run.config.read_text())
    with pytest.raises(UserError, match=REFUSAL):
        call(monkeypatch, trainer.analyze, name, *runs, "--step", "0")
    assert not ran.exists()


def test_a_report_shows_what_there_is_and_runs_nothing(
    run: RunDir, ran: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "r.html"
    call(monkeypatch, trainer.report, run.path, "--out", out)
    assert not ran.exists()
    assert "a command that this machine would run; pass --allow-pipe" in out.read_text()
    call(monkeypatch, trainer.report, run.path, "--out", out, "--allow-pipe")
    assert ran.exists()
    assert 'alt="Views of' in out.read_text()


def test_replay_runs_no_command(run: RunDir, ran: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = NonFiniteRecord(
        step=0,
        state_step=0,
        epoch=0,
        seed=0,
        precision="float32",
        command="",
        learning_rates={},
        train_manifest_sha256="0" * 64,
        ranks=(),
    )
    monkeypatch.setattr("trainer.fault_tolerance.step_record.read_record", lambda run_dir, step: (record, {}))
    with pytest.raises(UserError, match=REFUSAL):
        call(monkeypatch, trainer.replay, run.path, "--step", "0")
    assert not ran.exists()
    with pytest.raises(UserError, match="is not the dataset from which step 0 was recorded"):  # so the data were read
        call(monkeypatch, trainer.replay, run.path, "--step", "0", "--allow-pipe")


def test_what_reads_no_data_does_not_ask(
    run: RunDir, ran: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_encoder(run.path)
    call(monkeypatch, trainer.export, run.path, "--out", tmp_path / "encoder.safetensors")
    call(monkeypatch, launch.train, "--config", run.config, "--explain")
    assert not ran.exists()


@pytest.mark.parametrize("option", [[], ["--plan"]])
def test_a_config_file_is_no_command_line(
    option: list[str], run: RunDir, ran: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user may pass a file to --config that somebody else has written."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=REFUSAL):
        call(monkeypatch, launch.train, "--config", run.config, *option)
    assert not ran.exists()


def test_a_command_that_is_typed_is_not_asked_about(run: RunDir, tmp_path: Path) -> None:
    typed = [f"data.{split}_dir=pipe:cat {tmp_path / 'data' / split}/{{name}}" for split in ("train", "test")]
    for recipe in (resolve_recipe("debug:image", typed), resolve_recipe(str(run.config), typed)):
        assert recipe.data.remote.read_back_from is None
    with pytest.raises(UserError, match=REFUSAL):
        resolve_recipe(str(run.config), typed[:1])  # the other one is still the file's
    allowed = resolve_recipe(str(run.config), allow_pipe=True)
    assert allowed.data.remote.read_back_from is None
    assert allowed.data.probed_dir.startswith("pipe:touch")


def test_going_on_with_a_run_of_ones_own_does_not_ask(run: RunDir) -> None:
    """The stored config is only compared with the typed one."""
    stored, typed = read_config(run.config), read_config(run.config, allow_pipe=True)
    assert difference(stored, typed) == []
    assert stored.data.remote.read_back_from == str(run.config)
    assert "read_back_from" not in stored.model_dump_json()


def test_no_file_can_say_that_it_is_trusted(run: RunDir, tmp_path: Path) -> None:
    config = json.loads(run.config.read_text())
    for claimed in (None, "another"):
        config["data"]["remote"]["read_back_from"] = claimed
        write_json(run.config, config)
        assert read_config(run.config).data.remote.read_back_from == str(run.config)
    plain = debug.image().model_dump(mode="json")
    write_json(tmp_path / "config.json", plain)
    assert read_config(tmp_path / "config.json") == debug.image()


def test_the_word_reaches_the_processes_that_read(run: RunDir) -> None:
    assert pickle.loads(pickle.dumps(read_config(run.config))).data.remote.read_back_from == str(run.config)


def test_a_failed_run_is_not_submitted_again_with_a_command_of_its_own(
    run: RunDir, ran: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=REFUSAL):
        resubmit([run], command="status")
    assert not ran.exists()


class Touches:
    """An object whose pickle creates the file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., None], tuple[Path]]:
        return (Path.touch, (self.path,))


def test_no_pickle_of_a_run_directory_is_read(
    run: RunDir, ran: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every file of the run directory that could be read is a pickle here, except the config."""
    evil = pickle.dumps(Touches(ran))
    checkpoint = run.checkpoint(10) / "encoder.safetensors"
    names = ["metrics.jsonl", "provenance.json", "analysis/views.json", "analysis/views.png", "analysis/alignment.png"]
    names += ["probes/curves.json", "probes/step_00000010/heads.safetensors"]
    for path in [checkpoint, *(run.path / name for name in names)]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(evil)
    call(monkeypatch, trainer.report, run.path, "--out", tmp_path / "r.html")
    for command, arguments in (
        (trainer.probe, [run.path]),
        (trainer.analyze, ["alignment", run.path]),
        (trainer.export, [run.path, "--out", tmp_path / "e.safetensors"]),
    ):
        with pytest.raises(UserError):
            call(monkeypatch, command, *arguments)
    assert not ran.exists()
