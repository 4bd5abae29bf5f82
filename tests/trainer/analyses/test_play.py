"""The page of views: what its script reads, beside encoders, heads and probes of the same runs; and in a browser."""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
import subprocess
import sys
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from scipy.special import softmax

from configs import debug
from data_pipeline.core.counter_rng import DrawKeys
from tests.tiny_data import write_tiny_pair
from tests.trainer.analyses.planted import write_run
from trainer.analyses.play import page
from trainer.analyze import main
from trainer.modules import TrainedModules, build_modules
from trainer.pretrained import load_modules
from trainer.probed_runs.probing import ProbeOptions, probe_run
from trainer.probes.features import Pictures, read_pictures
from trainer.probes.heads import read_heads
from trainer.probes.result import read_result
from trainer.run_dir import RunDir

NUM_TEST = 37
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[RunDir]:
    """Make two untrained runs with probes that have learned a little: expert views, and a viewmaker."""
    directory = tmp_path_factory.mktemp("play")
    data = write_tiny_pair(directory, num_train=48, num_test=NUM_TEST)
    found = []
    for recipe in (debug.image, debug.viewmaker):
        run_dir = write_run(directory / recipe.__name__, data, recipe=recipe, probe={"num_epochs": 2, "views": "none"})
        probe_run(run_dir, ProbeOptions(steps=0), device=torch.device("cpu"))
        found.append(run_dir)
    return found


@pytest.fixture(scope="module")
def written(runs: list[RunDir]) -> Path:
    """Write the page by the command, and return its path."""
    out = runs[0].path.parent / "play.html"
    settings = ("num_samples=3", "num_draws=2", "budgets=[0.5,1,2]")
    with pytest.MonkeyPatch.context() as patch:
        changes = [part for setting in settings for part in ("--set", setting)]
        paths = [str(run_dir.path) for run_dir in runs]
        patch.setattr(sys, "argv", ["analyze", "play", *paths, "--step", "0", "--out", str(out), *changes])
        main()
    return out


def state_of(html: str) -> dict[str, Any]:
    [text] = re.findall(r'<script type="application/json" id="state">(.*?)</script>', html, flags=re.DOTALL)
    state: dict[str, Any] = json.loads(text)
    return state


def picture(sheet: str, *, row: int, column: int, size: int = 16) -> NDArray[np.uint8]:
    pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(sheet))))
    return pixels[row * size : (row + 1) * size, column * size : (column + 1) * size]


def test_the_page_shows_the_views_and_readings_of_the_runs(runs: list[RunDir], written: Path) -> None:
    """Every view is drawn again by a network that was built with its budget, and read by the heads in the files."""
    state = state_of(written.read_text())
    test = read_pictures(runs[0].path.parent / "test")
    modules = [load_modules(run_dir, step=0) for run_dir in runs]
    index_N = torch.tensor(state["samples"])
    images = test.inputs(index_N).inputs_a / 255
    for column in range(3):
        expected = (255 * images[column]).permute(1, 2, 0).round().numpy()
        np.testing.assert_array_equal(picture(state["plain"]["sheet"], row=0, column=column), expected)
    check_readings(state, state["plain"]["readings"], images, modules, runs, test)

    assert [len(policy["views"]) for policy in state["policies"]] == [2, 6]
    assert [policy["budget"] for policy in state["policies"]] == [None, 0.05]
    seen = set()
    for policy, of_policy in zip(state["policies"], modules, strict=True):
        for row, view in enumerate(policy["views"]):
            config = of_policy.config
            if policy["budget"] is not None:
                views = config.views.model_copy(update={"budget": view["times"] * policy["budget"]})
                config = config.model_copy(update={"views": views})
            drawn = build_modules(config).view_policy.eval()
            with torch.no_grad():
                views = drawn(images, DrawKeys(seed=view["seed"], epoch=0, index_B=index_N, view=0), None)
            for column in range(3):
                found = picture(policy["sheet"], row=row, column=column)
                expected = (255 * views[column].clamp(0, 1)).permute(1, 2, 0).numpy()
                np.testing.assert_allclose(found, expected, atol=0.51)
                seen.add(found.tobytes())
            check_readings(state, view["readings"], views, modules, runs, test)
    assert len(seen) == 3 * (2 + 6)  # every slider changes the picture


def check_readings(
    state: dict[str, Any],
    readings: Any,
    views: torch.Tensor,
    modules: list[TrainedModules],
    runs: list[RunDir],
    test: Pictures,
) -> None:
    for label, of_label in zip(("base", "overlay"), readings, strict=True):
        right_N = test.by_label[label][state["samples"]].numpy()
        for reading, judge, run_dir in zip(of_label, modules, runs, strict=True):
            head = read_heads(run_dir.probes(0) / "heads.safetensors").by_label[label]
            with torch.no_grad():
                features_NF = judge.encoder.eval().features(views).numpy()
            probability_NK = softmax(features_NF @ head.weight_KF.numpy().T + head.bias_K.numpy(), axis=1)
            assert reading["read"] == probability_NK.argmax(1).tolist()
            np.testing.assert_allclose(reading["sure"], probability_NK.max(1), atol=2e-4)
            np.testing.assert_allclose(reading["right"], probability_NK[np.arange(3), right_N], atol=2e-4)


def test_without_a_view_the_shares_are_those_of_the_probes(runs: list[RunDir], written: Path) -> None:
    state = state_of(written.read_text())
    assert state["num_measured"] == NUM_TEST  # all, so the shares must agree exactly
    for label, of_label in zip(("base", "overlay"), state["plain"]["readings"], strict=True):
        for reading, run_dir in zip(of_label, runs, strict=True):
            probed = read_result(run_dir.probes(0) / f"{label}.json").linear.accuracy
            assert reading["accuracy"] == pytest.approx(probed, abs=1e-4)


def test_one_small_file_that_needs_nothing_else(written: Path) -> None:
    html = written.read_text()
    assert "default-src 'none'" in html
    assert not re.findall(r"https?://|@import|<link|src=", html)
    assert len(html) < 5e6
    hostile = {"labels": [{"classes": ["</script><img src=x onerror=alert(1)>"]}]}
    assert state_of(page(hostile)) == hostile
    assert "<img" not in page(hostile)


@pytest.mark.process
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
def test_a_browser_shows_the_state_in_the_address(written: Path, tmp_path: Path) -> None:
    assert CHROMIUM is not None
    state = state_of(written.read_text())
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--virtual-time-budget=5000",
        f"--user-data-dir={tmp_path}",
    ]
    address = f"file://{written}#sample=2&budget=2&seed=1"
    dom = subprocess.run([CHROMIUM, *options, "--dump-dom", address], capture_output=True, text=True, check=True).stdout
    _, _, after = dom.partition("<form>")
    shown = [unescape(text) for text in re.findall(r"<output>(.*?)</output>", after)]
    classes = [label["classes"][label["of_sample"][1]] for label in state["labels"]]
    assert shown == [f"2: {' · '.join(classes)}", "0.1, 2 × trained: an extrapolation", "1"]
    said = [unescape(text) for text in re.findall(r"<b>(.*?)</b>", after)]
    expected = []
    for policy in state["policies"]:
        times = 1 if policy["budget"] is None else 2
        [view] = [view for view in policy["views"] if (view["times"], view["seed"]) == (times, 1)]
        for label, of_label in zip(state["labels"], view["readings"], strict=True):
            for reading in of_label:
                mark = "✓" if reading["read"][1] == label["of_sample"][1] else "✗"
                expected.append(f"{mark} {label['classes'][reading['read'][1]]}, {100 * reading['sure'][1]:.0f} %")
    assert [text.partition(",")[0] for text in said] == [text.partition(",")[0] for text in expected]
    assert len(said) == 8
