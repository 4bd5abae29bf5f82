from __future__ import annotations

import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from configs import debug
from data_pipeline.audio.log_mel import FSDD, power_mel
from data_pipeline.building.build import build_dataset
from data_pipeline.core.counter_rng import DrawKeys
from data_pipeline.core.sample import MASK_BOX, MASK_OBJECT
from data_pipeline.overlays import evaluation_keys
from tests.commands import Call
from tests.tiny_data import write_tiny_pair
from tests.trainer.analyses.planted import plant, write_run
from tests.trainer.probed_runs.test_probe_command import make_run
from trainer.analyses.analysis import LoadedRun
from trainer.analyses.views import ANALYSIS, ViewsAnalysisConfig, mean_change
from trainer.analyze import ANALYSES, TITLE, load_analysis, main
from trainer.modules import build_modules
from trainer.observability.figures import GAP, LEFT, TOP, GridRow, picture_grid
from trainer.probes.features import read_pictures
from trainer.run_dir import RunDir
from trainer.views.expert_audio import clean_spectrogram


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """Make an untrained run with data; these tests need no training."""
    directory = tmp_path_factory.mktemp("run")
    return write_run(directory / "run", write_tiny_pair(directory, num_train=37, num_test=37), recipe=debug.viewmaker)


def test_change_is_split_by_the_mask() -> None:
    """The policy changes the object by 0.3, the rest of its box by 0.1 and nothing else."""
    masks_NHW = torch.zeros(2, 8, 8, dtype=torch.uint8)
    masks_NHW[:, 2:6, 2:6] = MASK_BOX
    masks_NHW[:, 3:5, 3:5] = MASK_OBJECT
    difference = torch.zeros(2, 3, 8, 8)
    difference[:, :, 2:6, 2:6] = -0.1
    difference[:, :, 3:5, 3:5] = 0.3
    total = 4 * 0.3 + 12 * 0.1
    change_NHW = difference.abs().mean(1)
    parts = list(zip(torch.split(change_NHW, 1), torch.split(masks_NHW, 1), strict=True))
    assert mean_change(parts) == pytest.approx((total / 64, total / 16, 0.3))
    for masks in (torch.zeros_like(masks_NHW), None):
        assert mean_change([(change_NHW, masks)])[1:] == (None, None)


def test_grid_shows_every_pixel_as_an_equal_square() -> None:
    """The first picture of each row is read back from the PNG, pixel by pixel."""
    draw = np.random.default_rng(0)
    rows = [GridRow(f"row {n}", (draw.integers(0, 256, (2, 16, 16, 3)) / 255).astype(np.float32)) for n in range(3)]
    png = picture_grid(rows, column_titles=["a", "b"])
    assert png == picture_grid(rows, column_titles=["a", "b"])
    pixels = np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))
    scale = 128 // 16
    for number, row in enumerate(rows):
        for column in range(2):
            top, left = TOP + number * (128 + GAP), LEFT + column * (128 + GAP)
            cell = pixels[top : top + 128, left : left + 128]
            expected = np.round(row.pictures_NHWC[column] * 255).repeat(scale, 0).repeat(scale, 1)
            np.testing.assert_allclose(cell, expected, atol=1)


def test_numbers_are_those_of_the_views_that_training_draws(run_dir: RunDir) -> None:
    png_path, json_path = ANALYSIS.analyze([LoadedRun(run_dir, step=0)], config=ViewsAnalysisConfig())
    result = json.loads(json_path.read_text())
    modules = build_modules(debug.viewmaker())
    test = read_pictures(run_dir.path.parent / "test")
    batch = test.inputs(torch.arange(37))
    images = batch.inputs_a / 255
    with torch.no_grad():
        views = modules.view_policy.eval()(images, DrawKeys(seed=0, epoch=0, index_B=test.samples.index_B, view=0))
    change = (views - images).abs().mean(1).numpy()
    assert result["change"] == pytest.approx(float(change.mean()), rel=1e-4)
    assert batch.masks_BHW is not None
    expected = change[batch.masks_BHW.numpy() == 255].mean() / change.mean()
    assert result["selectivity_object"] == pytest.approx(float(expected), rel=1e-4)
    assert result["checkpoint_step"] == 0
    assert result["num_pictures"] == 37
    assert Image.open(png_path).size[0] > 1000

    before = png_path.read_bytes(), json_path.read_bytes()
    ANALYSIS.analyze([LoadedRun(run_dir, step=0)], config=ViewsAnalysisConfig())
    assert (png_path.read_bytes(), json_path.read_bytes()) == before


def test_wrong_input_is_said_in_one_sentence(run_dir: RunDir, tmp_path: Path, call: Call) -> None:
    for arguments, message in (
        (["vews", str(run_dir.path)], 'no analysis "vews"; did you mean "views"?'),
        (["views", str(run_dir.path)], "has no checkpoint yet"),
        (["views", str(run_dir.path), "--seed", "-1"], "'-1' is not a whole number from 0"),
        (["views", str(run_dir.path), "--set", "num_picture=3"], 'unknown key "num_picture"; did you mean "num_pict'),
    ):
        refused = call(main, *arguments)
        assert refused.status == 2
        assert message in refused.stderr
    assert call(main, "views", run_dir.path, "--step", "0").stdout.split() == [
        str(run_dir.analysis / "views.png"),
        str(run_dir.analysis / "views.json"),
    ]


def test_runs_that_cannot_be_analysed_do_not_stop_the_others(run_dir: RunDir, tmp_path: Path, call: Call) -> None:
    for number in range(2):
        path = tmp_path / f"run{number}"
        path.mkdir()
        RunDir(path).config.write_text(run_dir.config.read_text())
    whole = make_run(tmp_path / "run9", run_dir.path.parent)
    done = call(main, "monitors", tmp_path, "--set", "num_samples=8")
    assert done.status == 1
    assert done.stdout.splitlines()[-1] == str(whole.analysis / "monitors.json")
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert [f"run{number} has no checkpoint yet" in errors[number] for number in range(2)] == [True] * 2
    assert errors[2:] == ["error: 2 of 3 runs were not analysed"]


@pytest.mark.parametrize("name", ANALYSES)
def test_every_setting_is_listed_with_its_value_and_what_it_means(name: str, call: Call) -> None:
    settings = load_analysis(name).settings()
    lines = [re.split(r" {2,}", line, maxsplit=2) for line in call(main, name, "--list-settings").stdout.splitlines()]
    assert {setting: json.loads(value) for setting, value, _ in lines} == settings.model_dump(mode="json")
    assert all(len(meaning.split()) >= 3 and meaning.endswith(".") for _, _, meaning in lines)


def test_settings_and_seed_reach_the_analysis_of_every_run(run_dir: RunDir, tmp_path: Path, call: Call) -> None:
    other = RunDir(tmp_path)
    other.config.write_text(run_dir.config.read_text())
    paths = [run_dir.path, other.path]
    options = ["--seed", "5", "--set", "num_pictures=9", "--set", "max_uses=1", "--device", "cpu"]
    json_paths = call(main, "collision", *paths, *options).stdout.split()[1::2]
    assert json_paths == [f"{path}/analysis/collision.json" for path in paths]
    for path in json_paths:
        result = json.loads(Path(path).read_text())
        assert (result["num_pictures"], result["seed"], result["uses"]) == (9, 5, [0, 1])


def test_the_pictures_of_several_runs_are_drawn_together(run_dir: RunDir, tmp_path: Path, call: Call) -> None:
    paths = [tmp_path / name for name in ("one", "two", "three")]
    for number, path in enumerate(paths):
        path.mkdir()
        RunDir(path).config.write_text(run_dir.config.read_text().replace('"seed": 0', f'"seed": {number}'))
    together = tmp_path / "all.png"
    call(main, "views", *paths, "--step", "0", "--set", "num_shown=2", "--together", together)
    pixels = np.asarray(Image.open(together))
    cells = [np.asarray(Image.open(RunDir(path).analysis / "views.png").convert("RGB")) for path in paths]
    height, width = cells[0].shape[:2]
    assert pixels.shape == (2 * (height + TITLE), 2 * width, 3)
    for number, cell in enumerate(cells):
        top, left = number // 2 * (height + TITLE), number % 2 * width
        np.testing.assert_array_equal(pixels[top + TITLE : top + TITLE + height, left : left + width], cell)
        assert (pixels[top : top + TITLE, left : left + width] < 128).any()  # a title
    assert not np.array_equal(cells[0], cells[1])


class LowestBands(nn.Module):
    """A policy that adds 1 to the lowest 20 bands of a spectrogram."""

    def forward(self, waveforms_BT: Tensor, keys: DrawKeys, masks: None) -> Tensor:
        views_B1MN = clean_spectrogram(waveforms_BT, FSDD)
        views_B1MN[:, :, :20] += 1
        return views_B1MN


def test_change_of_sounds_is_split_by_the_power_of_speech_and_background(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The background alone is the overlay on silence; what it leaves of a mixture is the speech."""
    for split in ("train", "test"):
        build_dataset("spoken_noise", tmp_path / split, split=split, source="procedural", limit=16, overlay="online")
    run = write_run(tmp_path / "run", tmp_path, recipe=debug.audio)
    plant(monkeypatch, run=LowestBands())
    (_, json_path) = ANALYSIS.analyze([LoadedRun(run)], config=ViewsAnalysisConfig(num_shown=2))
    result = json.loads(json_path.read_text())
    test = read_pictures(tmp_path / "test")
    assert test.overlay is not None
    mixed_NT = test.inputs(torch.arange(16)).inputs_a
    background_NT = test.overlay(torch.zeros_like(mixed_NT), evaluation_keys(test.samples.index_B, draw=0)).inputs
    speech, background = power_mel(mixed_NT - background_NT, FSDD), power_mel(background_NT, FSDD)
    is_speech = (speech > background).float()
    assert 0.05 < is_speech.mean() < 0.95
    assert result["change_in_object"] == pytest.approx(float(is_speech[:, :20].sum() / is_speech.sum()), rel=1e-3)
    assert result["selectivity_object"] == pytest.approx(result["change_in_object"] * 64 / 20, rel=1e-4)
    band = speech.sum((0, 2)) > background.sum((0, 2))
    assert result["change_in_box"] == pytest.approx(float(band[:20].sum() / band.sum()), rel=1e-4)
    assert result["change_by_band"] == pytest.approx([1.0] * 20 + [0.0] * 44, abs=1e-5)
    expected = background.sum((0, 2)) / background.sum()
    assert result["background_by_band"] == pytest.approx(expected.tolist(), rel=1e-3, abs=1e-7)


@pytest.fixture(scope="module")
def run_of_channels(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """Make an untrained run on pictures of seven channels: three colours, and four that bits fill."""
    directory = tmp_path_factory.mktemp("channels")
    for split in ("train", "test"):
        bits = {"bits": 4}
        build_dataset(
            "procedural_bits", directory / split, split=split, limit=24, overlay="online", overlay_options=bits
        )
    channels = {"in_channels": 7, "mean": (0.5,) * 7, "std": (0.25,) * 7}
    return write_run(directory / "run", directory, recipe=debug.viewmaker, encoder=channels)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "small"),
    [
        ("views", {"num_shown": 4}),
        ("concentration", {"num_per_class": 3, "num_views": 2}),
        ("collision", {"num_pictures": 9, "max_uses": 2}),
        ("filters", {"num_pictures": 16, "num_shown": 4}),
    ],
)
def test_analyses_of_pixels_take_other_channels_than_colours(
    name: str, small: dict[str, int], run_of_channels: RunDir
) -> None:
    analysis = load_analysis(name)
    config = analysis.settings.parse(small, where=name)
    paths = analysis.analyze([LoadedRun(run_of_channels, step=0)], config=config)
    assert all(path.is_file() for path in paths)
    if name == "concentration":  # without grayscale and colour jitter
        result = json.loads((run_of_channels.analysis / "concentration.json").read_text())
        assert set(result["sets"]) == {"ab", "ae", "be"}
