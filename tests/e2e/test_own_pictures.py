"""Own pictures of 96 pixels: built, looked at, trained on, probed, analysed and reported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from configs import resolve_recipe
from data_pipeline.tools.preview import draw_grid
from tests.data_pipeline.stored_samples import find_problems
from tests.photos import build_photos
from trainer.analyses.analysis import AnalysisOptions
from trainer.analyze import ANALYSES, load_analysis
from trainer.probed_runs.probing import ProbeOptions, probe_run
from trainer.reports.page import page
from trainer.reports.runs import read_runs
from trainer.reports.table import measure
from trainer.run_dir import RunDir
from trainer.train import train

CPU = torch.device("cpu")
SMALL = ["encoder={kind: resnet10, width: 4, embedding_size: 8, probe_reads: pooled}", "global_batch_size=8"]
SMALL += [
    "num_epochs=1",
    "tracking.wandb=disabled",
    "watchdog.enabled=false",
    "probe.num_epochs=1",
    "data.num_workers=0",
]
NARROW = ["views.base_width=4", "views.num_res_blocks=1"]
FEW = {
    "feature_dropout": ["num_examples=64", "num_uniform_samples=20"],
    "concentration": ["num_views=3", "num_per_class=3", "deltas=[8.0]"],
    "collision": ["max_uses=4"],
    "filters": ["num_shown=4"],
    "alignment": ["num_views=2"],
    "monitors": ["num_views=3"],
    "views": ["num_shown=4"],
}


def test_runs_on_own_pictures_are_probed_analysed_and_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = build_photos(tmp_path / "birds", size=96, num_train=16, num_test=8, layout="tiled")
    assert list(find_problems(data / "train")) == []
    draw_grid(str(data / "train"), num_samples=10)
    where = [f"data.train_dir={data / 'train'}", f"data.test_dir={data / 'test'}"]
    run_dirs = []
    for recipe, more in (("simclr:folder", []), ("viewmaker:folder", [*NARROW, "views.mask=box"])):
        config = resolve_recipe(recipe, [*where, *SMALL, *more])
        assert config.name == f"{recipe.partition(':')[0]}-birds"
        run_dirs.append(RunDir(tmp_path / config.name))
        train(config, run_dirs[-1], device=CPU, command="train")
        results = probe_run(run_dirs[-1], ProbeOptions(untrained=True), device=CPU)
        assert set(results) == {"base", "overlay"}
    monkeypatch.chdir(tmp_path)
    for name in ANALYSES:
        analysis = load_analysis(name)
        settings = analysis.settings().override(FEW.get(name, []), where=name)
        for taken in analysis.groups(run_dirs[1:]):
            for path in analysis.analyze(taken, config=settings, options=AnalysisOptions()):
                if path.suffix == ".png":
                    assert min(Image.open(path).size) > 100
    masked = json.loads((run_dirs[1].analysis / "views.json").read_text())
    assert masked["change_in_box"] == 0
    assert masked["change"] > 0
    runs = read_runs([run_dir.path for run_dir in run_dirs])
    html = page(runs, measure(runs))
    assert "viewmaker-birds" in html
