"""A run does not go on with a dataset that was replaced, unless the user names the new one."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import launch.slurm
import launch.train
from configs import resolve_recipe
from data_pipeline.core.errors import UserError
from data_pipeline.storage.manifest import load_manifest
from launch.slurm_command import plan_from
from tests.commands import Call
from tests.gloo import run_ranks
from tests.killed_runs import kill_after
from tests.tiny_data import on_data, write_tiny_dataset, write_tiny_pair
from trainer.analyses.analysis import LoadedRun
from trainer.build import build_training
from trainer.checkpoint.files import INDEX_NAME
from trainer.checkpoint.restore import newest_state, restore
from trainer.claim import claim
from trainer.config import RunConfig
from trainer.data import read_agreed_manifests, read_manifests
from trainer.distributed.collectives import rank
from trainer.pretrained import warn_of_other_data
from trainer.provenance import train_sets
from trainer.reports.page import _FACTS
from trainer.reports.runs import read_runs
from trainer.reports.table import data_of
from trainer.run_dir import RunDir
from trainer.train import train


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_tiny_pair(tmp_path / "data", num_train=40, num_test=20)


def configure(data: Path, *overrides: str) -> RunConfig:
    """Return the config of a run of 4 steps with 40 samples."""
    small = ["global_batch_size=20", "checkpoint_every_steps=1", "watchdog.enabled=false"]
    return resolve_recipe("debug:image", on_data(data, *small, *overrides))


def go_on(run_dir: RunDir, config: RunConfig, *accepted: str) -> None:
    train(config, run_dir, device=torch.device("cpu"), command="train", accepted_data=accepted)


def replace(data: Path, split: Any, *, num_samples: int, seed: int = 7) -> str:
    """Rebuild one of the datasets in its place, and return its manifest's hash."""
    shutil.rmtree(data / split)
    write_tiny_dataset(data / split, num_samples=num_samples, seed=seed, split=split)
    return load_manifest(data / split).sha256


def stopped_run(data: Path, directory: Path, *, step: int = 2) -> RunDir:
    run_dir = RunDir(directory)
    config = configure(data, "keep_checkpoints=9")
    go_on(run_dir, config)
    kill_after(run_dir, step)
    return run_dir


@pytest.mark.slow
@pytest.mark.parametrize("split", ["train", "test"])
def test_replaced_data_are_refused_and_a_named_replacement_is_accepted(
    split: str, data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_dir, config = stopped_run(data, tmp_path / "run"), configure(data, "keep_checkpoints=9")
    before = read_manifests(config.data).identity
    state = (run_dir.checkpoint(2) / INDEX_NAME).read_bytes()
    provenance = run_dir.provenance.read_bytes()
    new = replace(data, split, num_samples=40 if split == "train" else 20)
    name = read_manifests(config.data).identity.name

    with pytest.raises(UserError, match=rf"{data / split} holds another dataset \(manifest {new[:12]}\)") as refused:
        go_on(run_dir, config)
    assert f"came to step 2 (manifest {getattr(before, f'{split}_manifest_sha256')[:12]})" in str(refused.value)
    assert f"go on with the new data by --accept-data {name}" in str(refused.value)
    assert "\n" not in str(refused.value)
    assert (run_dir.checkpoint(2) / INDEX_NAME).read_bytes() == state
    assert run_dir.provenance.read_bytes() == provenance
    with pytest.raises(UserError, match="holds another dataset"):
        go_on(run_dir, config, before.name, "0" * 12)

    go_on(run_dir, config, "0" * 12, name)
    assert "the data were replaced after step 2: going on with the new data, which you accepted" in caplog.text
    now = read_manifests(config.data).identity
    found = newest_state(run_dir)
    assert found.run is not None
    assert (found.step, found.run.data) == (4, now)
    told = json.loads(run_dir.provenance.read_text())
    assert now.model_dump().items() <= told.items()
    hashes = [{name: start[name] for name in now.model_dump()} for start in told["starts"]]
    assert hashes == [before.model_dump(), now.model_dump()]
    claim(run_dir, config, read_manifests(config.data)).close()  # accepted once, it is the run's own


@pytest.mark.slow
def test_an_older_checkpoint_is_looked_at_too_when_the_newest_is_damaged(data: Path, tmp_path: Path) -> None:
    run_dir, config = stopped_run(data, tmp_path / "run"), configure(data, "keep_checkpoints=9")
    replace(data, "train", num_samples=40)
    go_on(run_dir, config, read_manifests(config.data).identity.name)
    (run_dir.checkpoint(3) / "encoder.safetensors").write_bytes(b"")
    (run_dir.checkpoint(4) / "encoder.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match="came to step 2"):
        go_on(run_dir, config)


@pytest.mark.slow
@pytest.mark.parametrize(("num_samples", "num_steps"), [(60, 6), (20, None)])
def test_accepted_data_of_another_size(num_samples: int, num_steps: int | None, data: Path, tmp_path: Path) -> None:
    """A run's position is its step, so a larger dataset makes the run longer; a smaller one may end it earlier."""
    run_dir, config = stopped_run(data, tmp_path / "run", step=3), configure(data, "keep_checkpoints=9")
    replace(data, "train", num_samples=num_samples)
    with pytest.raises(UserError, match=r"by --accept-data \w+$"):
        go_on(run_dir, config)
    name = read_manifests(config.data).identity.name
    if num_steps is None:
        with pytest.raises(
            UserError, match=r"is at step 3, but with the 20 samples of \S+ its 2 epochs end at step 2;"
        ):
            go_on(run_dir, config, name)
        return
    go_on(run_dir, config, name)
    assert run_dir.latest_step() == num_steps
    assert [line["epoch"] for line in run_dir.read_metrics()] == [0, 0, 1, 1, 1, 1]
    assert json.loads(run_dir.provenance.read_text())["finished_step"] == num_steps


def test_a_memory_bank_starts_anew_with_accepted_data(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its rows belong to samples of the old train set, also if the new one has as many."""
    bank = ["objective={kind: instance_discrimination, num_negatives: 4}", "keep_checkpoints=9"]
    run_dir, config = RunDir(tmp_path / "run"), configure(data, *bank)
    go_on(run_dir, config)
    kill_after(run_dir, 2)
    replace(data, "train", num_samples=40)
    new = read_manifests(config.data).identity

    for remembers, is_first in ((None, False), (new, True)):
        training = build_training(config, num_samples=40, device=torch.device("cpu"))
        first = training.objective.saved_state()["bank_ND"].clone()
        restore(run_dir, training.engines, training.objective, remembers=remembers)
        assert torch.equal(training.objective.saved_state()["bank_ND"], first) == is_first

    go_on(run_dir, config, new.name)
    assert "state for every sample of the train set, which starts anew" in caplog.text
    assert run_dir.latest_step() == 4


def agree(directories: list[list[Path]]) -> list[str]:
    said = []
    for of_ranks in directories:
        try:
            read_agreed_manifests(configure(of_ranks[rank()]).data)
            said.append("the same")
        except (UserError, SystemExit) as error:
            said.append(re.sub(r"at \S+ and \S+ than", "at A and B than", str(error)))
    return said


@pytest.mark.ranks
def test_ranks_that_read_different_data_do_not_train(data: Path, tmp_path: Path) -> None:
    same, other = (write_tiny_pair(tmp_path / name, num_train=40, num_test=20) for name in ("same", "other"))
    replace(other, "test", num_samples=20)
    first, second = run_ranks(agree, 2, [[data, same], [data, other]])
    assert first[0] == second[0] == "the same"
    assert first[1].startswith("rank 1 finds other datasets at A and B than rank 0; ")
    assert second[1] == "2"


def test_the_flag_reaches_training_and_jobs(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    run_dir = stopped_run(data, tmp_path / "run")
    replace(data, "train", num_samples=40)
    recipe = ["--config", str(run_dir.config), "--run-dir", str(run_dir.path)]
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    refused = call(launch.train.main, *recipe)
    assert refused.status == 2
    match = re.search(r"--accept-data (\w+)$", refused.stderr, re.MULTILINE)
    assert match is not None

    words = [*recipe, "--executor", "local", *match[0].split(), "--accept-data", "0" * 12]
    arguments = launch.slurm._parser().parse_args(words)
    plan = plan_from(arguments)
    assert plan.accepted_data == (match[1], "0" * 12)
    plan.claim()
    with pytest.raises(UserError, match="holds another dataset"):
        dataclasses.replace(plan, accepted_data=()).claim()

    call(launch.train.main, *recipe, *match[0].split())
    assert run_dir.latest_step() == 4


def test_whoever_reads_the_data_of_a_run_is_warned_and_the_report_names_both(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, config = stopped_run(data, tmp_path / "run"), configure(data, "keep_checkpoints=9")
    old = read_manifests(config.data).identity
    replace(data, "train", num_samples=40)
    new = read_manifests(config.data).identity
    warning = (
        f"warning: {data / 'train'} holds another dataset (manifest {new.train_manifest_sha256[:12]}) than the one "
        f"with which the run was trained (manifest {old.train_manifest_sha256[:12]})"
    )

    def warnings(step: int) -> list[str]:
        loaded = LoadedRun(run_dir, step=step)
        assert len(loaded.train) == 40
        assert len(loaded.test) == 20
        warn_of_other_data(loaded.modules, "train", loaded.train.manifest)
        warn_of_other_data(loaded.modules, "test", loaded.test.manifest)
        return [line.partition(";")[0] for line in capsys.readouterr().err.splitlines() if "warning: " in line]

    assert warnings(2) == [warning, warning]  # of the analysis and of the probe
    assert warnings(0) == []  # untrained

    go_on(run_dir, config, new.name)
    assert warnings(4) == []
    (run,) = read_runs([run_dir.path])
    assert _FACTS["train manifest"](run) == (
        f"{new.train_manifest_sha256[:12]} (in place of {old.train_manifest_sha256[:12]})"
    )
    assert _FACTS["test manifest"](run) == new.test_manifest_sha256[:12]
    assert run.trained_on == (old.train_manifest_sha256, new.train_manifest_sha256)
    assert "trained on" in data_of(run)  # so it is no seed of runs on the new set alone
    assert "trained on another train set" in " ".join(run.problems)


@pytest.mark.parametrize(
    ("starts", "expected"),
    [
        ([("new", 0)], ("new",)),
        ([("old", 0), ("new", 25)], ("old", "new")),
        ([("old", 0), ("new", 0)], ("new",)),  # the old one was given up before its first checkpoint
        ([("old", 0), ("between", 10), ("new", 10)], ("old", "new")),
        ([("old", 0), ("new", 10), ("old", 20), ("new", 30)], ("old", "new", "old", "new")),
    ],
)
def test_all_train_sets_on_which_steps_were_taken_are_known(
    starts: list[tuple[str, int]], expected: tuple[str, ...], data: Path
) -> None:
    listed = [{"train_manifest_sha256": name, "start_step": step} for name, step in starts]
    provenance = {"train_manifest_sha256": "new", "starts": listed}
    assert train_sets(configure(data), provenance) == expected
