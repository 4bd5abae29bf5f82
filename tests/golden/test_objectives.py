"""The losses and gradients of every objective are those of `objectives.json`, on one process and on two ranks."""

from __future__ import annotations

import functools

import pytest

from tests.gloo import run_ranks
from tests.golden.digests import Numbers, assert_frozen, frozen
from tests.golden.objectives import CASES, all_cases, one_case
from trainer.objectives.objective import OBJECTIVES

RTOL = 1e-9
BANK_RTOL = 1e-6  # the bank of instance discrimination is normalised in float32

GOLDEN = frozen("objectives")


def test_every_objective_is_frozen() -> None:
    assert {case.split()[0] for case in CASES} == OBJECTIVES.keys()
    assert CASES.keys() == GOLDEN.keys()


def assert_case_is_frozen(case: str, found: Numbers) -> None:
    assert_frozen(found, GOLDEN[case], rtol=BANK_RTOL if case == "instance_discrimination" else RTOL)


@pytest.mark.parametrize("case", CASES)
def test_one_process(case: str) -> None:
    assert_case_is_frozen(case, one_case(case))


@functools.cache
def of_two_ranks() -> list[dict[str, Numbers]]:
    return run_ranks(all_cases, 2)


@pytest.mark.ranks
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_are_one_process(case: str) -> None:
    for of_rank in of_two_ranks():
        assert_case_is_frozen(case, of_rank[case])
