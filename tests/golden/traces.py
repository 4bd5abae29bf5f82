"""The keys of samples that `python -m data_pipeline trace` prints, for some datasets and layouts."""

from __future__ import annotations

import contextlib
import hashlib
import io
from pathlib import Path

from data_pipeline.__main__ import main
from tests.tars import simple

NUM_KEYS = 10  # are kept as they are; the others in the hash of all

LAYOUTS = {
    "1 rank, 0 workers": [],
    "2 ranks, 2 workers": ["--ranks", "2", "--workers", "2"],
    "seed 5, epoch 2, windows of 2 shards": ["--seed", "5", "--epoch", "2", "--shuffle-shards", "2"],
    "seed 5, epoch 2, from step 3": ["--seed", "5", "--epoch", "2", "--from-step", "3", "--ranks", "2"],
}
DATASETS = {"built": ["built"], "tars": ["tars"], "built and tars": ["built", "tars", "--weights", "1", "3"]}
CASES = {f"{dataset}: {layout}": (dataset, layout) for dataset in DATASETS for layout in LAYOUTS}


def write_datasets(directory: Path) -> Path:
    """Build 47 pictures in 5 shards, and index 23 in 4 tars; returns `directory`."""
    build = ["build", "procedural", "--out", f"{directory}/built", "--limit", "47", "--workers", "1"]
    command(*build, "--samples-per-shard", "10")
    simple(directory / "tars", [7, 2, 9, 5])
    command("index", f"{directory}/tars", "--size", "32", "--workers", "1")
    return directory


def one_case(case: str, directory: Path) -> dict[str, str | list[str]]:
    """Return the number of lines of `trace`, the first keys, and a hash of all steps, ranks and keys."""
    dataset, layout = CASES[case]
    words = [str(directory / word) if word in DATASETS else word for word in DATASETS[dataset]]
    lines = command("trace", *words, "--batch-size", "4", *LAYOUTS[layout]).splitlines()
    keys = [key for line in lines for key in line.split("\t")[2].split()]
    sha256 = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    return {"lines": str(len(lines)), "first keys": keys[:NUM_KEYS], "sha256": sha256}


def command(*words: str) -> str:
    """Run a command of the data pipeline in this process, and return what it prints."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        main(words)
    return printed.getvalue()
