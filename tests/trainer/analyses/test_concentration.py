from __future__ import annotations

import json
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from data_pipeline.core.counter_rng import DrawKeys
from data_pipeline.core.errors import UserError
from data_pipeline.core.sample import NO_LABEL
from data_pipeline.loading.decode import DecodedSamples
from tests.tiny_data import write_tiny_pair
from tests.trainer.analyses.planted import write_run
from tests.trainer.probes.toy import toy_manifest
from trainer.analyses.analysis import LoadedRun
from trainer.analyses.concentration import (
    ANALYSIS,
    PAIRS,
    ConcentrationConfig,
    ConcentrationResult,
    draw_views,
    largest_clique,
    least_distances,
)
from trainer.probes.features import Pictures, read_pictures
from trainer.views.expert_image import ExpertImage, huang_views


def search(near_NN: np.ndarray) -> int:
    num = len(near_NN)
    for size in range(num, 1, -1):
        for members in combinations(range(num), size):
            if all(near_NN[a, b] for a, b in combinations(members, 2)):
                return size
    return 1


def random_graphs(num: int, *, size: int, seed: int) -> torch.Tensor:
    upper = torch.rand(num, size, size, generator=torch.Generator().manual_seed(seed)).triu(1)
    return (upper + upper.mT) < torch.linspace(0.2, 0.9, num)[:, None, None]


def test_distances_are_those_of_the_nearest_views() -> None:
    views_NVP = torch.rand(13, 4, 20, generator=torch.Generator().manual_seed(0))
    found_NN = least_distances(views_NVP).numpy()
    double = views_NVP.double().numpy()
    for one in range(13):
        for other in range(13):
            expected = min(np.linalg.norm(a - b) for a in double[one] for b in double[other])
            assert found_NN[one, other] == pytest.approx(expected if one != other else 0, abs=1e-5)


def test_the_largest_clique_is_that_of_a_search_through_all_sets() -> None:
    near_KNN = random_graphs(24, size=9, seed=1)
    near_KNN |= torch.eye(9, dtype=torch.bool)
    assert [largest_clique(near_NN) for near_NN in near_KNN] == [search(near_NN) for near_NN in near_KNN.numpy()]
    assert [largest_clique(torch.full((3, 3), value)) for value in (False, True)] == [1, 3]


def test_a_planted_clique_is_found() -> None:
    near_KNN = random_graphs(1, size=50, seed=2)  # every fifth edge
    members = torch.randperm(50, generator=torch.Generator().manual_seed(3))[:17]
    near_KNN[0, members[:, None], members] = True
    assert largest_clique(near_KNN[0]) == 17


def test_the_picture_itself_is_one_of_the_views_and_draws_depend_on_the_sample_alone() -> None:
    images_NCHW = torch.rand(5, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    index_N, policy = torch.arange(40, 45), ExpertImage(huang_views("ad"))
    views_NVP = draw_views(policy, images_NCHW, index_N, num_views=4, seed=3)
    torch.testing.assert_close(views_NVP[:, 0], images_NCHW.flatten(1) - 0.5)
    torch.testing.assert_close(
        draw_views(policy, images_NCHW[2:4], index_N[2:4], num_views=4, seed=3), views_NVP[2:4], rtol=0, atol=1e-6
    )
    second_NCHW = policy(images_NCHW, DrawKeys(3, 0, index_N, 1))
    torch.testing.assert_close(views_NVP[:, 2], second_NCHW.flatten(1) - 0.5)


@pytest.mark.slow
def test_pairs_that_undo_what_tells_pictures_apart_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of a class is the mirror image of the other half: only a flip brings the two together."""
    draw = torch.Generator().manual_seed(0)
    patterns = torch.randint(0, 256, (2, 3, 8, 8), generator=draw)
    label_N, mirrored_N = torch.arange(24) % 2, torch.arange(24) // 2 % 2
    images_NCHW = torch.where(mirrored_N[:, None, None, None] == 1, patterns[label_N].flip(3), patterns[label_N]).to(
        torch.uint8
    )
    labels = {"base": label_N, "overlay": label_N}
    pictures = Pictures(toy_manifest(24), DecodedSamples(torch.arange(24), labels, pictures_BCHW=images_NCHW), labels)
    monkeypatch.setattr(LoadedRun, "read_test", lambda loaded, pictures_for: pictures)
    data = write_tiny_pair(tmp_path / "data", num_train=4, num_test=4)
    run_dir = write_run(tmp_path / "run", data)
    config = ConcentrationConfig(num_per_class=12, num_views=12, deltas=(0.5, 100.0))
    png_path, json_path = ANALYSIS.analyze([LoadedRun(run_dir)], config=config)
    result = ConcentrationResult.parse(json.loads(json_path.read_text()), where="")
    assert (result.num_classes, result.num_pictures) == (2, 24)
    assert set(result.sets) == set(PAIRS)
    for pair in ("be", "ce"):
        assert result.sets[pair][0].outside == 0
    for pair in ("ab", "ac", "ad", "bc", "bd", "cd"):
        assert result.sets[pair][0].outside == result.sets[pair][0].outside_worst == 0.5
    assert result.order[0][0] in ("be", "ce", "de", "ae")
    assert {measured[1].outside for measured in result.sets.values()} == {0.0}
    assert Image.open(png_path).size[0] > 600


def test_a_class_without_pictures_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = write_tiny_pair(tmp_path / "data", num_train=4, num_test=6)
    run_dir, test = write_run(tmp_path / "run", data), read_pictures(data / "test")
    config = ConcentrationConfig(num_views=2, deltas=(10,))

    def give(number: int) -> None:
        """Let every picture be of this class."""
        given = replace(test, by_label=dict.fromkeys(test.by_label, torch.full((6,), number)))
        monkeypatch.setattr(LoadedRun, "read_test", lambda loaded, pictures_for: given)

    give(1)
    _, json_path = ANALYSIS.analyze([LoadedRun(run_dir)], config=config)
    result = ConcentrationResult.parse(json.loads(json_path.read_text()), where="")
    assert (result.num_classes, result.num_pictures) == (1, 6)
    give(NO_LABEL)
    with pytest.raises(UserError, match="needs two or more test pictures of each class"):
        ANALYSIS.analyze([LoadedRun(run_dir)], config=config)


def test_any_set_of_letters_is_measured_at_each_strength_of_the_colours(tmp_path: Path) -> None:
    data = write_tiny_pair(tmp_path / "data", num_train=4, num_test=8)
    run_dir = write_run(tmp_path / "run", data)

    def measure(*overrides: str) -> ConcentrationResult:
        config = ConcentrationConfig(num_views=3, deltas=(1.0, 3.0)).override(overrides, where="settings")
        _, json_path = ANALYSIS.analyze([LoadedRun(run_dir)], config=config)
        return ConcentrationResult.parse(json.loads(json_path.read_text()), where="")

    several = measure("transforms=[a, ad, abcde]", "strengths=[1, 0.125]", "jitter_probability=1").sets
    assert list(several) == ["a", "ad 1", "ad 0.125", "abcde 1", "abcde 0.125"]
    one = measure("transforms=[ad]", "strengths=[0.125]", "jitter_probability=1").sets
    assert one == {"ad": several["ad 0.125"]}
    assert several["ad 0.125"] != several["ad 1"]
    with pytest.raises(UserError, match='each once, got "aa"'):
        measure("transforms=[aa]")
