from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from data_pipeline.__main__ import main
from data_pipeline.core.errors import UserError
from data_pipeline.loading.stream import ReadConfig, Stream
from tests.data_pipeline.random_shards import write_dataset

NUM_STEPS = 6


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("dataset")
    write_dataset(directory, [9, 4, 12])
    return directory


def traced(
    directory: Path, capsys: pytest.CaptureFixture[str], *options: str, more: Sequence[Path] = ()
) -> list[tuple[int, int, list[str]]]:
    """Step, rank and keys of every line that the command prints."""
    main(["trace", str(directory), *map(str, more), "--batch-size", "4", *options])
    rows = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    return [(int(step), int(rank), keys.split()) for step, rank, keys in rows]


def test_lines_are_what_training_would_see(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--ranks", "2", "--seed", "3", "--epoch", "2")
    lines = traced(directory, capsys, *options, "--workers", "1")
    assert traced(directory, capsys, *options, "--from-step", "3") == lines[6:]
    expected = []
    for rank in range(2):
        batches = Stream(
            directory,
            read=ReadConfig(num_workers=0),
            global_batch_size=4,
            seed=3,
            rank=rank,
            world_size=2,
            start_step=2 * NUM_STEPS,
            end_step=3 * NUM_STEPS,
        )
        expected += [(batch.step, rank, batch.keys) for batch in batches]
    assert lines == sorted(expected)


def test_several_directories_are_a_mixture(directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_dataset(tmp_path / "more", [15, 10])
    options = ["--weights", "3", "1", "--ranks", "2", "--epoch", "1"]
    lines = traced(directory, capsys, *options, more=[tmp_path / "more"])
    num_steps = (25 + 25) // 4
    assert [(step, rank) for step, rank, _ in lines] == [
        (step, rank) for step in range(num_steps, 2 * num_steps) for rank in range(2)
    ]
    keys = [int(key) for _, _, part in lines for key in part]
    assert sum(key < 25 for key in keys) == 3 * num_steps
    with pytest.raises(UserError, match=r"--weights must be 2 positive numbers, one for each DIR, got \[1\.0\]"):
        traced(directory, capsys, "--weights", "1", more=[tmp_path / "more"])
