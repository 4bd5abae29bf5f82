from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from configs import debug
from data_pipeline.core.counter_rng import DrawKeys
from data_pipeline.core.errors import UserError
from data_pipeline.core.sample import NO_LABEL
from data_pipeline.core.schema import drawn
from data_pipeline.loading.decode import DecodedSamples
from tests.tiny_data import write_tiny_pair, write_tiny_sound_pair
from tests.trainer.analyses.planted import DropBottom, plant, write_run
from trainer.analyses import feature_dropout
from trainer.analyses.analysis import LoadedRun
from trainer.analyses.dip import uniform_dips
from trainer.analyses.feature_dropout import (
    ANALYSIS,
    FeatureDropoutConfig,
    FeatureDropoutResult,
    heads_of,
    right_class_probability,
)
from trainer.probed_runs.probing import ProbeOptions, probe_run
from trainer.probes.features import read_pictures
from trainer.probes.heads import Heads, read_heads, write_heads
from trainer.probes.linear import LinearHead
from trainer.run_dir import RunDir

NUM_TEST = 300
CONFIG = FeatureDropoutConfig(num_examples=1000, num_uniform_samples=99)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_pair(tmp_path_factory.mktemp("data"), num_train=64, num_test=NUM_TEST)


def write_exact_heads(run_dir: RunDir) -> None:
    """Write heads that are sure of the class with the nearest brightness in the tiny dataset."""
    train = read_pictures(run_dir.path.parent / "data" / "train")

    def head(feature: int, brightness_K: list[float]) -> LinearHead:
        centre_K = torch.tensor(brightness_K) / 255
        weight_KF = torch.zeros(len(brightness_K), 2)
        weight_KF[:, feature] = 600 * centre_K
        return LinearHead(weight_KF, -300 * centre_K.square())

    by_label = {"base": head(0, [44.5, 164.5]), "overlay": head(1, [44.5, 124.5, 199.0])}
    write_heads(
        run_dir.probes(0) / "heads.safetensors",
        Heads(by_label, "planted", train.manifest.sha256),
    )


def plant_two_runs(
    data: Path, directory: Path, monkeypatch: pytest.MonkeyPatch, policy: DropBottom, *, draws: bool = False
) -> list[RunDir]:
    """Make two runs with exact heads: "drops" has the views of `policy`, and the views of "keeps" change nothing.

    Analyses draw no figure, which takes a second, unless `draws`.
    """
    if not draws:
        monkeypatch.setattr(feature_dropout, "to_png", lambda figure: b"")
    (directory / "data").symlink_to(data)
    runs = [write_run(directory / name, data, name=name) for name in ("drops", "keeps")]
    for run_dir in runs:
        write_exact_heads(run_dir)
    plant(monkeypatch, drops=policy, keeps=DropBottom(0.0))
    return runs


def test_planted_dropout_is_found(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One run blackens the object in half of its views, the other changes nothing; both read perfectly."""
    policy = DropBottom(0.5)
    runs = plant_two_runs(data, tmp_path, monkeypatch, policy, draws=True)
    paths = ANALYSIS.analyze([LoadedRun(run_dir) for run_dir in runs], config=CONFIG)
    assert paths == [run.analysis / f"feature_dropout.{end}" for run in runs for end in ("png", "json")]
    assert paths[1].read_bytes() == paths[3].read_bytes()
    result = FeatureDropoutResult.parse(json.loads(paths[1].read_text()), where="")

    test = read_pictures(data / "test")
    dropped_N = policy.dropped(DrawKeys(0, 0, test.samples.index_B, 0))
    lost = float((dropped_N & (test.by_label["overlay"] != 0)).float().mean())  # class 0 is what black looks like
    assert 0.2 < lost < 0.5
    judged = {(j.views_of, j.judged_by, j.label): j for j in result.judgements}
    assert len(judged) == 8
    for judge in ("drops", "keeps"):
        overlay = judged["drops", judge, "overlay"]
        assert overlay.accuracy == pytest.approx(1 - lost)
        shown = overlay.probabilities
        assert (shown.share_below_0_1, shown.share_above_0_9) == pytest.approx((lost, 1 - lost))
        assert shown.histogram[0] == pytest.approx(lost)
        assert sum(drawn(shown.histogram)) == pytest.approx(1.0)
        assert shown.tails_exceed_middle
        assert shown.dip_p == 1 / 100
        for other in (judged["drops", judge, "base"], judged["keeps", judge, "overlay"]):
            assert other.probabilities.share_above_0_9 == 1.0
            assert not other.probabilities.tails_exceed_middle
            assert other.accuracy == 1.0
    drops, keeps = result.runs
    assert drops.classifier == "planted"
    assert drops.accuracy == {"base": 1.0, "overlay": 1.0}
    for run in result.runs:  # both judges are sure of the samples without views, so the loss is due to the views
        assert {space: shown.share_above_0_9 for space, shown in run.without_views.items()} == {
            "base": 1.0,
            "overlay": 1.0,
        }
    assert drops.selectivity_object == pytest.approx(2.0)  # the object is half of the picture
    assert keeps.selectivity_object is None  # nothing is changed at all
    assert Image.open(paths[0]).size[0] > 600


def test_a_dip_is_compared_with_dips_of_as_many_labelled_samples(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = plant_two_runs(data, tmp_path, monkeypatch, DropBottom(0.5))
    sizes = []

    def noted(num: int, *, num_draws: int, seed: int) -> NDArray[np.float64]:
        sizes.append(num)
        return uniform_dips(num, num_draws=num_draws, seed=seed)

    test = read_pictures(data / "test")
    overlay_N = test.by_label["overlay"].clone()
    overlay_N[::3] = NO_LABEL
    monkeypatch.setattr(feature_dropout, "uniform_dips", noted)
    monkeypatch.setattr(LoadedRun, "test", replace(test, by_label={**test.by_label, "overlay": overlay_N}))
    ANALYSIS.analyze([LoadedRun(run_dir) for run_dir in runs], config=CONFIG)
    assert set(sizes) == {NUM_TEST, NUM_TEST * 2 // 3}


def test_all_views_may_be_of_one_sample(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = DropBottom(0.3)
    runs = plant_two_runs(data, tmp_path, monkeypatch, policy)
    seen = read_pictures(data / "test").by_label["overlay"] != 0  # class 0 is what black looks like
    number = int(seen.nonzero()[0])
    config = CONFIG.model_copy(update={"of_sample": number})
    *_, path = ANALYSIS.analyze([LoadedRun(run_dir) for run_dir in runs], config=config)
    assert path == runs[1].analysis / f"feature_dropout-of_sample_{number}.json"
    result = FeatureDropoutResult.parse(json.loads(path.read_text()), where="")
    lost = float(policy.dropped(DrawKeys(0, 0, torch.arange(1000), 0)).float().mean())
    assert 0.25 < lost < 0.35
    shares = {j.views_of: j.probabilities.share_below_0_1 for j in result.judgements if j.label == "overlay"}
    assert shares == pytest.approx({"drops": lost, "keeps": 0.0})


def test_the_one_sample_is_named_by_its_index(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples that are left out shift the rows. Planted: the first two were, and every view blackens the object."""
    runs = plant_two_runs(data, tmp_path, monkeypatch, DropBottom(1.0))
    whole = read_pictures(data / "test")
    assert isinstance(whole.samples, DecodedSamples)
    shifted = replace(whole, samples=replace(whole.samples, index_B=whole.samples.index_B + 2))
    monkeypatch.setattr(LoadedRun, "test", shifted)
    is_dark = whole.by_label["overlay"] == 0  # what a black object is taken for
    row = next(row for row in range(NUM_TEST - 2) if is_dark[row] and not is_dark[row + 2])
    config = CONFIG.model_copy(update={"of_sample": row + 2, "num_examples": 10})
    *_, path = ANALYSIS.analyze([LoadedRun(run_dir) for run_dir in runs], config=config)
    result = FeatureDropoutResult.parse(json.loads(path.read_text()), where="")
    assert {j.accuracy for j in result.judgements if (j.views_of, j.label) == ("drops", "overlay")} == {1.0}
    with pytest.raises(UserError, match="of_sample=1, but the test set has samples from 2 to 301; take another"):
        ANALYSIS.analyze([LoadedRun(run_dir) for run_dir in runs], config=config.model_copy(update={"of_sample": 1}))


def test_probabilities_are_those_of_scipy() -> None:
    from scipy.special import softmax

    draw = torch.Generator().manual_seed(0)
    head = LinearHead(torch.randn(5, 3, generator=draw), torch.randn(5, generator=draw))
    features_NF, label_N = torch.randn(20, 3, generator=draw), torch.randint(5, (20,), generator=draw)
    logits = features_NF.numpy() @ head.weight_KF.numpy().T + head.bias_K.numpy()
    expected = softmax(logits.astype(np.float64), axis=1)[np.arange(20), label_N.numpy()]
    np.testing.assert_allclose(right_class_probability(head, features_NF, label_N).numpy(), expected, rtol=1e-5)


def test_heads_that_a_probe_fitted_in_train_mode_are_not_used(tmp_path: Path) -> None:
    data = write_tiny_pair(tmp_path / "data", num_train=20, num_test=20)
    run_dir = write_run(tmp_path / "run", data, probe={"batch_norm": "train", "num_epochs": 1})

    def probe(*settings: str) -> None:
        probe_run(run_dir, ProbeOptions(steps=0, settings=settings), device=torch.device("cpu"))

    probe()
    loaded = LoadedRun(run_dir, step=0)
    with pytest.raises(UserError, match=r"heads-batch_norm_eval\.safetensors does not exist; .*--set batch_norm=eval"):
        heads_of(loaded)
    probe("batch_norm=eval")
    assert "batch_norm eval" in heads_of(loaded).made_by
    path = run_dir.probes(0) / "heads-batch_norm_eval.safetensors"
    write_heads(path, Heads(read_heads(path).by_label, "probe", "0" * 64))
    with pytest.raises(UserError, match="another train set or encoder"):
        heads_of(loaded)


def test_one_run_twice_or_of_other_data_is_refused(data: Path, tmp_path: Path) -> None:
    other_data = write_tiny_pair(tmp_path / "other", num_train=20, num_test=20)
    one, other = write_run(tmp_path / "one", data), write_run(tmp_path / "two", other_data)
    for runs, message in (
        ([one, RunDir(tmp_path / "two" / ".." / "one")], "name each run directory once"),
        ([one, other], "different test sets; feature_dropout compares runs of one dataset"),
    ):
        with pytest.raises(UserError, match=message):
            ANALYSIS.analyze([LoadedRun(run_dir, step=0) for run_dir in runs], config=CONFIG)


def test_real_encoders_judge_sounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_dropout, "to_png", lambda figure: b"")
    data = write_tiny_sound_pair(tmp_path / "data", num_train=24, num_test=16)
    runs = []
    for name in ("a", "b"):
        run_dir = write_run(tmp_path / name, data, recipe=debug.audio, name="same", probe={"num_epochs": 1})
        probe_run(run_dir, ProbeOptions(steps=0), device=torch.device("cpu"))
        runs.append(run_dir)
    config = FeatureDropoutConfig(num_uniform_samples=19)
    result = json.loads(
        ANALYSIS.analyze([LoadedRun(run_dir, step=0) for run_dir in runs], config=config)[1].read_text()
    )
    assert [run["name"] for run in result["runs"]] == [str(run_dir.path) for run_dir in runs]
    assert [run["selectivity_box"] for run in result["runs"]] == [None, None]
    assert result["num_examples"] == 16
    first, second = [j["probabilities"] for j in result["judgements"] if j["label"] == "base"][:2]
    assert first == second  # the same weights judge the same views
