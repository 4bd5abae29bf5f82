"""docs/metrics.md has every name that a run logs, and no other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from configs import resolve_recipe
from tests.real_data import REPOSITORY
from tests.small_encoder import CONVNET
from tests.tiny_data import on_data, write_tiny_pair
from trainer.objectives.objective import OBJECTIVES
from trainer.run_dir import RunDir
from trainer.train import train

ELSEWHERE = {"perf/replay_fraction", "perf/mfu", "memory/gpu_gigabytes"}  # on a GPU
ELSEWHERE |= {"perf/slowest_rank", "perf/slowest_rank_ratio"}  # on several ranks
PLACES = {"probe": "probe/LABEL/", "mixture": "mixture/NAME/"}
SETTINGS = {
    "supervised": ["objective={kind: supervised, label: base}"],
    "sieve": ["objective.kind=sieve", "encoder.early_head=1"],
    "dino": ["objective={kind: dino, num_prototypes: 8}"],
}


def names_of_the_page() -> set[str]:
    text = (REPOSITORY / "docs/metrics.md").read_text(encoding="utf-8").partition("\n## Of the end")[0]
    cells = re.findall(r"^\| (`.*?`) \|", text, flags=re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`(.*?)`", cell)}


def logged(data: Path, run_dir: RunDir, recipe: str, *settings: str) -> set[str]:
    """The names in the log of a run of a few steps."""
    small = [CONVNET, "num_epochs=1", "global_batch_size=16", "log_every_steps=1", "watchdog.enabled=false"]
    train(
        resolve_recipe(recipe, on_data(data, *small, *settings)), run_dir, device=torch.device("cpu"), command="a test"
    )
    return {
        re.sub(r"^(probe|mixture)/(base|overlay|data|other)/", lambda part: PLACES[part[1]], name)
        for entry in run_dir.read_metrics()
        for name in entry
    }


@pytest.mark.slow
def test_the_page_has_every_name_that_is_logged_and_no_other(tmp_path: Path) -> None:
    for name, num_train in (("data", 35), ("other", 33)):
        write_tiny_pair(tmp_path / name, num_train=num_train, num_test=20)
    sources = (f"data.mixture.{name}={{train_dir: {tmp_path}/{name}/train, weight: 1}}" for name in ("data", "other"))
    runs = {
        **{kind: ("debug:image", *SETTINGS.get(kind, [f"objective.kind={kind}"])) for kind in OBJECTIVES},
        "of a viewmaker": ("debug:viewmaker", "probe.online_every_steps=1"),
        "of a mixture": ("debug:image", "data.train_dir=null", "data.mixture={}", *sources),
    }
    found = [logged(tmp_path / "data", RunDir(tmp_path / name), *settings) for name, settings in runs.items()]
    assert set().union(*found) == names_of_the_page() - ELSEWHERE
