"""Own pictures of 96 pixels: built, looked at, trained on, probed, analysed and reported."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from PIL import Image

from configs import resolve_recipe
from data_pipeline.tools.preview import draw_grid
from tests.data_pipeline.stored_samples import find_problems
from tests.photos import build_photos
from trainer.analyses.analysis import LoadedRun
from trainer.analyze import load_analysis
from trainer.probed_runs.probing import ProbeOptions, probe_run
from trainer.reports.page import page
from trainer.reports.runs import read_runs
from trainer.reports.table import measure
from trainer.run_dir import RunDir
from trainer.train import train

CPU = torch.device("cpu")
SMALL = ["encoder={kind: resnet10, width: 4, embedding_size: 8, probe_reads: pooled}", "global_batch_size=8"]
SMALL += ["num_epochs=1", "tracking.wandb=disabled", "watchdog.enabled=false"]
SMALL += ["probe.num_epochs=1", "data.num_workers=0"]
NARROW = ["views.base_width=4", "views.num_res_blocks=1", "views.mask=box"]
FEW = {"views": ["num_shown=4"], "feature_dropout": ["num_examples=16", "num_uniform_samples=20"]}


def test_a_run_on_own_pictures_is_probed_analysed_and_reported(tmp_path: Path) -> None:
    data = build_photos(tmp_path / "birds", size=96, num_train=16, num_test=8, layout="tiled")
    assert find_problems(data / "train") == []
    draw_grid(str(data / "train"), num_samples=10)
    where = [f"data.train_dir={data / 'train'}", f"data.test_dir={data / 'test'}"]
    config = resolve_recipe("viewmaker:folder", [*where, *SMALL, *NARROW])
    assert config.name == "viewmaker-birds"
    assert resolve_recipe("simclr:folder", where).name == "simclr-birds"
    run_dir = RunDir(tmp_path / "run")
    train(config, run_dir, device=CPU, command="train")
    assert set(probe_run(run_dir, ProbeOptions(), device=CPU)) == {"base", "overlay"}
    for name, few in FEW.items():
        analysis = load_analysis(name)
        settings = analysis.settings().override(few, where=name)
        png_path, _ = analysis.analyze([LoadedRun(run_dir)], config=settings)
        assert min(Image.open(png_path).size) > 100
    masked = json.loads((run_dir.analysis / "views.json").read_text())
    assert masked["change_in_box"] == 0
    assert masked["change"] > 0
    runs = read_runs([run_dir.path])
    assert "viewmaker-birds" in page(runs, measure(runs))
