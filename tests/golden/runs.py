"""The losses of short runs, and how many test samples the probes of their encoders get right."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from unittest import mock

import torch

from configs import resolve_recipe
from tests.golden.digests import FOLDER, Numbers
from tests.golden.traces import command
from tests.small_encoder import convnet
from trainer import probe
from trainer.run_dir import RunDir
from trainer.train import train

NUM_STEPS = 8
Row = tuple[str, str, str, str, int, int]
COLUMNS = ("recipe", "step", "label", "readout", "right", "samples")
NUM_TRAIN, NUM_TEST = 64, 60
SETTINGS = ["data.num_workers=0", "num_epochs=2", f"checkpoint_every_steps={NUM_STEPS}", "tracking.wandb=disabled"]
PICTURES = ["global_batch_size=16", "precision=float64", convnet(32)]
PICTURES += ["probe={num_epochs: 30, batch_size: 64, learning_rate: 0.03, views: none}"]

# For each recipe: what is built, the settings, and whether its encoders are probed.
CASES = {
    "debug:image": (["procedural_shapes"], PICTURES, True),
    "debug:viewmaker": (["procedural_shapes"], PICTURES, True),
    "debug:audio": (
        ["spoken_noise", "--source", "procedural", "--overlay", "online"],
        ["global_batch_size=16"],
        False,
    ),
}
PROBED = [recipe for recipe, (*_, is_probed) in CASES.items() if is_probed]


def one_run(recipe: str, directory: Path) -> Path:
    """Build the data, train, and return the run directory."""
    dataset, settings, _ = CASES[recipe]
    for split, number in (("train", NUM_TRAIN), ("test", NUM_TEST)):
        where = ["--out", str(directory / "data" / split), "--split", split, "--limit", str(number)]
        command("build", *dataset, *where, "--workers", "1")
    places = [f"data.{split}_dir={directory}/data/{split}" for split in ("train", "test")]
    config = resolve_recipe(recipe, [*SETTINGS, *settings, *places])
    train(config, RunDir(directory / "run"), device=torch.device("cpu"), command="golden")
    return directory / "run"


def losses(run: Path) -> Numbers:
    entries = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {"loss": [entry["train/loss"] for entry in entries]}


def probed(recipe: str, run: Path) -> list[Row]:
    """Probe the last checkpoint and the untrained encoder by the command; return the rows of its results."""
    with mock.patch.object(sys, "argv", ["probe", str(run), "--untrained"]):
        probe.main()
    rows: list[Row] = []
    for path in sorted((run / "probes").glob("step_*/*.json")):
        found = json.loads(path.read_text())
        step, label, number = str(found["checkpoint_step"]), path.stem, found["num_test"]
        for readout in ("linear", "knn"):
            rows.append((recipe, step, label, readout, round(found[readout]["accuracy"] * number), number))
    return rows


def write_rows(rows: list[Row]) -> None:
    with (FOLDER / "probes.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([COLUMNS, *rows])


def read_rows() -> list[Row]:
    with (FOLDER / "probes.csv").open(newline="") as file:
        _, *rows = csv.reader(file)
    return [(recipe, step, label, readout, int(right), int(num)) for recipe, step, label, readout, right, num in rows]
