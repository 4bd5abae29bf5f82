"""The numbers of the code are those of the JSON and CSV files beside this one; `renew.py` says how to renew them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.gloo import run_ranks
from tests.golden import contents, objectives, runs, steps, traces, views
from tests.golden.digests import FOLDER, assert_frozen
from trainer.objectives.objective import OBJECTIVES

GOLDEN = {path.stem: json.loads(path.read_text()) for path in FOLDER.glob("*.json")}
# Weights, spectrograms and the bank of instance discrimination are computed in float32, which the vector units of CPUs
# round differently. A run of sounds is in float32 throughout, and training amplifies the difference.
RTOL_OF_OBJECTIVES = dict.fromkeys(objectives.CASES, 1e-9) | {"instance_discrimination": 1e-6}
RTOL_OF_STEPS = dict.fromkeys(steps.CASES, 1e-5) | {"viewmaker of sounds": 1e-3}
RTOL_OF_VIEWS = RTOL_OF_SOUNDS = 1e-5
RTOL_OF_RUNS = {"debug:image": 1e-5, "debug:viewmaker": 1e-5, "debug:audio": 5e-3}

WITH_DINO = ("dino", "dino of three views", "multi_crop")


def test_every_objective_is_frozen() -> None:
    assert {case.split()[0] for case in objectives.CASES} == OBJECTIVES.keys()


def case_of(name: str) -> Any:
    """Return a case; DINO's first weights depend on the version of torch."""
    return pytest.param(name, marks=pytest.mark.pinned if name in WITH_DINO else ())


@pytest.mark.parametrize("case", [*map(case_of, objectives.CASES)])
def test_objective_on_one_process(case: str) -> None:
    assert_frozen(objectives.one_case(case), GOLDEN["objectives"][case], rtol=RTOL_OF_OBJECTIVES[case])


@pytest.mark.ranks
@pytest.mark.parametrize("case", [*map(case_of, ("nt_xent in chunks", "barlow_twins", "moco", "dino"))])
def test_objective_on_two_ranks(case: str) -> None:
    """One for each way in which ranks share rows; `test_exactness` has all objectives."""
    for of_rank in run_ranks(objectives.numbers_of, 2, (case,)):
        assert_frozen(of_rank[case], GOLDEN["objectives"][case], rtol=RTOL_OF_OBJECTIVES[case])


@pytest.mark.parametrize("case", [*map(case_of, steps.CASES)])
def test_training_step(case: str) -> None:
    assert_frozen(steps.one_case(case), GOLDEN["steps"][case], rtol=RTOL_OF_STEPS[case])


@pytest.mark.parametrize("case", views.CASES)
def test_views(case: str) -> None:
    assert_frozen(views.one_case(case), GOLDEN["views"][case], rtol=RTOL_OF_VIEWS)


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return traces.write_datasets(tmp_path_factory.mktemp("traced"))


@pytest.mark.parametrize("case", traces.CASES)
def test_keys_that_training_would_see(case: str, traced: Path) -> None:
    assert traces.one_case(case, traced) == GOLDEN["traces"][case]


@pytest.mark.parametrize("case", contents.CASES)
def test_contents_and_labels(case: str, tmp_path: Path) -> None:
    found, golden = contents.one_case(case, tmp_path), dict(GOLDEN["contents"][case])
    sounds = {name: golden.pop(name) for name in list(golden) if name.startswith("sounds")}
    assert_frozen({name: found.pop(name) for name in sounds}, sounds, rtol=RTOL_OF_SOUNDS)
    assert found == golden


@pytest.mark.slow
@pytest.mark.parametrize("recipe", runs.CASES)
def test_losses_and_probes_of_a_run(recipe: str, tmp_path: Path) -> None:
    run = runs.one_run(recipe, tmp_path)
    assert_frozen(runs.losses(run), GOLDEN["runs"][recipe], rtol=RTOL_OF_RUNS[recipe])
    if recipe in runs.PROBED:
        assert runs.probed(recipe, run) == [row for row in runs.read_rows() if row[0] == recipe]
