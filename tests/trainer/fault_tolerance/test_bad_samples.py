"""Samples that do not decode: training goes on with others, counts and lists them, and gives up above the limit."""

from __future__ import annotations

import contextlib
import json
import shutil
import tarfile
from pathlib import Path

import pytest
import torch

from configs import resolve_recipe
from data_pipeline.core.errors import UserError
from data_pipeline.core.sample import BadSample
from tests.gloo import run_ranks
from tests.small_encoder import CONVNET
from tests.tiny_data import on_data, write_tiny_dataset, write_tiny_pair
from trainer.checkpoint.restore import newest_state
from trainer.data import read_manifests
from trainer.distributed.collectives import rank
from trainer.fault_tolerance.bad_samples import BadSamples
from trainer.fault_tolerance.preemption import StoppedError, StopRequests
from trainer.run_dir import RunDir
from trainer.train import train as run

BAD_KEYS = ["00000007", "00000041"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """83 training pictures, two of which are no PNG any more."""
    directory = tmp_path_factory.mktemp("data")
    write_tiny_pair(directory, num_train=83, num_test=20)
    for shard in sorted((directory / "train").glob("*.tar")):
        with tarfile.open(shard) as tar:
            places = [member.offset_data for member in tar if member.name in {f"{key}.png" for key in BAD_KEYS}]
        content = bytearray(shard.read_bytes())
        for place in places:
            content[place : place + 32] = bytes(32)
        shard.chmod(0o644)
        shard.write_bytes(content)
    return directory


def train_on_rank(data: Path, run_dir: Path, placement: str) -> None:
    small = [CONVNET, "data.max_bad_share=0.05", "global_batch_size=16", "num_epochs=2", "precision=float64"]
    settings = on_data(data, f"data.placement={placement}", *small)
    run(resolve_recipe("debug:image", settings), RunDir(run_dir), device=torch.device("cpu"), command="train")


@pytest.mark.ranks
@pytest.mark.parametrize("placement", ["stream", "host"])
def test_training_goes_on_counts_and_lists(data: Path, tmp_path: Path, placement: str) -> None:
    losses = []
    for num_ranks in (1, 2):
        run_dir = RunDir(tmp_path / f"{num_ranks}")
        run_ranks(train_on_rank, num_ranks, data, run_dir.path, placement)
        lines = run_dir.read_metrics()
        assert lines[-1]["data/bad_samples"] == len(BAD_KEYS)
        listed = [json.loads(line) for line in run_dir.bad_samples.read_text().splitlines()]
        assert sorted(entry["key"] for entry in listed) == BAD_KEYS
        assert {entry["shard"] for entry in listed} == {"shard-00000.tar", "shard-00002.tar"}
        losses.append([line["train/loss"] for line in lines])
    assert losses[0] == pytest.approx(losses[1], rel=1e-8)  # in both epochs the same samples stood in


def flush_on_two_ranks(directory: Path, max_share: float) -> list[int] | str:
    """Rank 0 meets samples 1 and 2, rank 1 meets 2 and 3, then both meet 1 again."""
    ledger = BadSamples(RunDir(directory), num_samples=100, max_share=max_share, where="the data")
    counts = [ledger.flush()]
    try:
        for met in ([(1, 2), (2, 3)][rank()], (1,)):
            ledger.add(BadSample(index, "shard-00000.tar", "torn") for index in met)
            counts.append(ledger.flush())
    except UserError as error:
        return str(error)
    return counts


@pytest.mark.ranks
def test_what_any_rank_met_counts_once_on_every_rank(tmp_path: Path) -> None:
    assert run_ranks(flush_on_two_ranks, 2, tmp_path, 0.03) == [[0, 3, 3]] * 2
    lines = [json.loads(line) for line in RunDir(tmp_path).bad_samples.read_text().splitlines()]
    assert [line["key"] for line in lines] == ["00000001", "00000002", "00000003"]
    run_ranks(flush_on_two_ranks, 2, tmp_path, 0.03)  # a restart meets them again and lists none twice
    assert len(RunDir(tmp_path).bad_samples.read_text().splitlines()) == 3


@pytest.mark.ranks
def test_too_many_end_the_run_on_every_rank_at_the_same_step(tmp_path: Path) -> None:
    said, of_other = run_ranks(flush_on_two_ranks, 2, tmp_path, 0.02)
    assert said == of_other
    assert "the data: 3 of 100 samples" in str(said)


def test_bad_samples_of_earlier_starts_count_towards_the_limit(tmp_path: Path) -> None:
    """Each start meets one, of which the limit allows two."""
    found: tuple[BadSample, ...] = ()
    for index in (1, 2):
        ledger = BadSamples(RunDir(tmp_path), num_samples=100, max_share=0.02, where="the data", before=found)
        ledger.add([BadSample(index, "shard-00000.tar", "torn"), *found])
        assert ledger.flush() == index
        found = ledger.found
    ledger = BadSamples(RunDir(tmp_path), num_samples=100, max_share=0.02, where="the data", before=found)
    assert ledger.flush() == 2
    ledger.add([BadSample(3, "shard-00000.tar", "torn")])
    with pytest.raises(UserError, match="the data: 3 of 100 samples"):
        ledger.flush()


def test_a_checkpoint_holds_them_and_accepted_data_forget_them(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, copy = RunDir(tmp_path / "run"), tmp_path / "data"
    shutil.copytree(data, copy)
    small = [CONVNET, "data.max_bad_share=0.05", "global_batch_size=16", "num_epochs=4", "watchdog.enabled=false"]
    config = resolve_recipe("debug:image", on_data(copy, *small))

    def start(*accepted: str, last_step: int) -> tuple[list[str], list[float]]:
        asked = iter([False] * 4 + [True] + [False] * 99)
        monkeypatch.setattr(StopRequests, "agreed", lambda self: next(asked))
        with contextlib.suppress(StoppedError):
            run(config, run_dir, device=torch.device("cpu"), command="train", accepted_data=accepted)
        found = newest_state(run_dir)
        assert found.run is not None
        assert found.step == last_step
        counts = [line["data/bad_samples"] for line in run_dir.read_metrics()]
        return [sample.key for sample in found.run.bad_samples], counts

    keys, counts = start(last_step=5)
    assert keys == BAD_KEYS
    keys, counts = start(last_step=10)
    assert keys == BAD_KEYS
    assert counts[5:] == [2] * 5
    shutil.rmtree(copy / "train")
    write_tiny_dataset(copy / "train", num_samples=83, seed=3)
    keys, counts = start(read_manifests(config.data).identity.name, last_step=15)
    assert keys == []
    assert counts[10:] == [0] * 5
