"""The suppression benchmark: settings, cures, data and runs fit each other."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from PIL import Image

from configs.suppression import CURES, benchmark
from data_pipeline.building.suppression import Files, build_suppression
from data_pipeline.building.suppression_settings import SETTINGS, Scale, directory_of
from data_pipeline.loading.whole import read_all
from data_pipeline.storage.manifest import load_manifest
from data_pipeline.storage.store import SampleStore
from tests.data_pipeline.building.test_suppression_settings import write_mnist
from trainer.build import build_training
from trainer.config import RunConfig
from trainer.mixture import num_classes
from trainer.objectives.nt_xent_cycle import NTXentCycleConfig, cycled_temperature
from trainer.objectives.supervised import LabelledConfig
from trainer.open_settings import decide
from trainer.preflight import check_data

PICTURES = [name for name, setting in SETTINGS.items() if not setting.is_sound]
OF_TWO_VIEWS = {setting.title for setting in SETTINGS.values() if setting.draws_views}
# Like C+Digits, or like another setting, in the shape of their pictures and the kind of their labels.
LIKE_OTHERS = {"tiled_digits", "shapes", "letters", "boolean_correlated"}
_THAT_MEET_THE_PICTURE = (
    "SimCLR",
    "decoder",
    "masked viewmaker",
    "crop, then viewmaker",
    "adversarial masks",
    "expert against viewmaker",
)
NUM_PHOTOS = 20  # of each split
BATCH_SIZE = 10
NUM_DIGITS = 1_000  # as many as the setting "Digits on photos" tells apart


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All settings with pictures, with a few samples each."""
    directory = tmp_path_factory.mktemp("suppression")
    root = directory / "files"
    rng = np.random.default_rng(0)
    for split, digits in ("train", "train"), ("test", "t10k"):
        for number in range(NUM_PHOTOS):
            folder = root / split / f"class{number % 10}"
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(folder / f"{number:04}.png")
        write_mnist(root, num=NUM_DIGITS, prefix=digits)
    files = Files(root=root, cifar="folder")
    assert build_suppression(directory / "data", names=PICTURES, scale="small", files=files, limit=NUM_PHOTOS) == []
    return directory


def _shared(run: RunConfig) -> tuple[object, ...]:
    """Return what all cures of a point have in common. Online probes change nothing but the log.

    A run with a label has one draw of the overlay for both views.
    """
    without_online = run.probe.model_copy(
        update=dict.fromkeys(("online_every_steps", "online_num_train", "online_num_test"))
    )
    told = isinstance(run.objective, LabelledConfig) and run.data.overlay == "online"
    drawn = "online_per_view" if told and run.tracking.factors["setting"] in OF_TWO_VIEWS else run.data.overlay
    data = run.data.model_copy(update={"overlay": drawn})
    return data, run.optimizer, run.global_batch_size, run.num_epochs, without_online


def test_all_cures_of_a_point_have_the_same_data_optimizer_and_steps() -> None:
    runs = benchmark(scale="small", seeds=(0,))
    assert all({"setting", "difficulty", "cure", "hard", "easy"} <= run.tracking.factors.keys() for run in runs)
    points = [(run.tracking.factors["setting"], run.tracking.factors["difficulty"]) for run in runs]
    shared = {point: _shared(run) for point, run in zip(points, runs, strict=True)}
    for point, run in zip(points, runs, strict=True):
        assert _shared(run) == shared[point]


LACKS = {
    "speech": {"masked viewmaker", "crop, then viewmaker", "channel dropout", "adversarial masks"},
    "randbit": {"masked viewmaker"},
    "trifeature": {"masked viewmaker"},
    "colours": {"masked viewmaker"},
    "boolean": {"masked viewmaker"},
    "boolean_correlated": {"masked viewmaker"},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_has_every_cure_that_has_a_meaning_for_it(name: str) -> None:
    cures = {run.tracking.factors["cure"] for run in benchmark(scale="small", settings=(name,), seeds=(0,))}
    ceilings = {f"ceiling: {label}" for label in (*SETTINGS[name].hard, *SETTINGS[name].easy)}
    ceilings |= {f"ceiling: {label}, joint" for label in SETTINGS[name].hard}
    assert cures == CURES.keys() - LACKS.get(name, set()) | ceilings


def test_temperatures_in_cycles_reach_their_lowest() -> None:
    for scale in get_args(Scale):
        for run in benchmark(scale=scale, cures=("temperature in cycles",), seeds=(0,), with_ceilings=False):
            cycle = run.objective
            assert isinstance(cycle, NTXentCycleConfig)
            now = partial(
                cycled_temperature,
                lowest=cycle.lowest,
                highest=cycle.highest,
                period_epochs=cycle.period_epochs,
            )
            assert min(now(epoch) for epoch in range(run.num_epochs)) == cycle.lowest
            assert run.num_epochs % cycle.period_epochs == 0


def test_pictures_of_one_channel_have_none_to_lose() -> None:
    runs = benchmark(scale="small", settings=("randbit",), cures=("channel dropout",), seeds=(0,), with_ceilings=False)
    assert [run.tracking.factors["difficulty"] for run in runs] == ["5", "10"]


@pytest.mark.slow
@pytest.mark.parametrize("name", PICTURES)
def test_each_difficulty_is_built_with_its_option_and_its_labels(name: str, built: Path) -> None:
    setting = SETTINGS[name]
    for difficulty in setting.names_of_difficulties("small"):
        for split in ("train", "test"):
            manifest = load_manifest(Path(directory_of(str(built / "data"), name, difficulty, split)))
            assert {*setting.hard, *setting.easy} <= manifest.labels.keys()
            if setting.varies is None:
                continue
            part, option = setting.varies
            options = manifest.how_made.source_options
            if part == "overlay":
                assert manifest.overlay is not None
                options = manifest.overlay.options
            expected = 0.0 if option == "correlation" and split == "test" else float(difficulty)
            assert float(options[option]) == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PICTURES if name not in LIKE_OTHERS])
def test_every_cure_can_be_trained_on_every_setting(name: str, built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (built / "data" / "suppression_small").unlink(missing_ok=True)
    (built / "data" / "suppression_small").symlink_to(built / "data")
    monkeypatch.chdir(built)
    hardest = SETTINGS[name].names_of_difficulties("small")[-1]
    cures = tuple(CURES) if name == "randbit" else _THAT_MEET_THE_PICTURE  # the others see embeddings alone
    runs = [
        run
        for run in benchmark(scale="small", settings=(name,), cures=cures, seeds=(0,))
        if run.tracking.factors["difficulty"] == hardest
    ]
    assert len(runs) >= 5
    train_set = check_data(runs[0].model_copy(update={"global_batch_size": BATCH_SIZE})).train
    batch = next(read_all(SampleStore(Path(runs[0].data.probed_dir)), batch_size=BATCH_SIZE))
    for run in runs:
        training = build_training(
            decide(run, train_set),
            num_samples=train_set.num_samples,
            num_classes=num_classes(train_set),
            device=torch.device("cpu"),
        )
        output = training.step(batch, learning_rates=defaultdict(float))
        assert output.metrics["train/loss"].isfinite()
        assert not output.skipped


def test_a_setting_without_files_is_named_and_the_others_are_built(tmp_path: Path) -> None:
    (problem,) = build_suppression(
        tmp_path, names=("shapes", "trifeature"), scale="small", files=Files(root=tmp_path / "none"), limit=20
    )
    assert problem.startswith("C+Shapes was not built:")
    assert load_manifest(tmp_path / "trifeature" / "0.0" / "train").num_samples == 20
