from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from scipy.special import softmax

from configs import debug
from tests.tiny_data import write_tiny_pair
from tests.trainer.analyses.planted import write_run
from trainer.analyses.analysis import LoadedRun
from trainer.analyses.mistakes import ANALYSIS, MistakesConfig
from trainer.modules import build_modules
from trainer.probed_runs.probing import ProbeOptions, probe_run
from trainer.probes.features import read_pictures
from trainer.probes.heads import read_heads

NUM_TEST = 60


def test_the_most_confident_mistakes_are_those_of_a_loop(tmp_path: Path) -> None:
    """Over all test samples, with the heads in the file; the probe has learned for one epoch, so it is often wrong."""
    data = write_tiny_pair(tmp_path / "data", num_train=40, num_test=NUM_TEST)
    run_dir = write_run(tmp_path / "run", data, probe={"num_epochs": 1, "views": "none"})
    probe_run(run_dir, ProbeOptions(steps=0), device=torch.device("cpu"))
    png, path = ANALYSIS.analyze([LoadedRun(run_dir, step=0)], config=MistakesConfig(num_shown=7))
    found = json.loads(path.read_text())["mistakes"]
    test, heads = read_pictures(data / "test"), read_heads(run_dir.probes(0) / "heads.safetensors")
    encoder = build_modules(debug.image()).encoder.eval()
    with torch.no_grad():
        features_NF = encoder.features(test.images(torch.arange(NUM_TEST)) / 255).numpy()
    num_wrong = 0
    for label, head in heads.by_label.items():
        probability_NK = softmax(features_NF @ head.weight_KF.numpy().T + head.bias_K.numpy(), axis=1)
        names, wrong = test.class_names(label), []
        for row, right in enumerate(test.by_label[label].tolist()):
            read = int(probability_NK[row].argmax())
            if read != right:
                wrong.append((float(probability_NK[row, read]), row, names[right], names[read]))
        num_wrong += len(wrong)
        expected = sorted(wrong, reverse=True)[:7]
        assert [(one["index"], one["right"], one["read"]) for one in found[label]] == [one[1:] for one in expected]
        np.testing.assert_allclose(
            [one["probability"] for one in found[label]], [one[0] for one in expected], rtol=1e-4
        )
    assert num_wrong > 14  # so that both labels have more than are shown
    assert Image.open(png).size[0] > 600
