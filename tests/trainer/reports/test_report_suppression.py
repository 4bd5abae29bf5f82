"""The page of the suppression benchmark, from run directories with planted accuracies."""

from __future__ import annotations

import json
import re
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from configs import debug
from data_pipeline.core.errors import UserError
from tests.trainer.reports.suppression_runs import PROBE, make_run, probe_result, samples, worst_groups
from trainer.config import RunConfig
from trainer.neighbours import NeighboursConfig
from trainer.report import main
from trainer.reports.suppression.changes import changed_settings
from trainer.reports.suppression.measured import read_benchmark
from trainer.reports.suppression.verdicts import column_of, halving, kept_of_easy, kept_of_hard, sentence, worst_group
from trainer.run_dir import RunDir, write_json

CURES = {"plain": (0.9, 0.3), "viewmaker": (0.88, 0.85), "IFM": (0.9, 0.32)}  # on the hard label at 0 and at 10 bits


def factors(cure: str, *, bits: int = 10, setting: str = "RandBit", **more: str) -> dict[str, str]:
    return {"setting": setting, "difficulty": str(bits), "cure": cure, "unit": "bits"} | more


def make_study(home: Path, *, num_test: int = 1000, seeds: tuple[int, ...] = (0, 1, 2), **more: Any) -> Path:
    """Make the runs of three cures, both ceilings and two difficulties; "viewmaker" is the only cure at 10 bits."""
    for cure_number, (cure, hard) in enumerate([*CURES.items(), ("ceiling: base", (0.95, 0.95))]):
        for accuracy, bits in zip(hard, (0, 10), strict=True):
            for seed in seeds:
                draw = 100 * cure_number + seed
                make_run(
                    home,
                    factors(cure, bits=bits),
                    seed=seed,
                    right={
                        "base": samples(accuracy, num_test=num_test, seed=draw),
                        "overlay": samples(0.7, num_test=num_test, seed=draw + 50),
                    },
                    untrained={"base": samples(0.31, num_test=num_test, seed=seed)} if cure == "plain" else None,
                    **more,
                )
    return home


def report(*arguments: str | Path) -> None:
    before = sys.argv
    sys.argv = ["report", *map(str, arguments)]
    try:
        main()
    finally:
        sys.argv = before


def row(page: str, title: str) -> list[str]:
    """Return the cells of the first row of a table that begins with `title`."""
    line = next(line for line in page.splitlines() if line.startswith(f"| {title} |"))
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_the_page_names_the_planted_winner_and_draws_a_figure(tmp_path: Path) -> None:
    home = make_study(tmp_path / "suppression_small", rank_me=10.0)
    report("--study", "suppression_small", home, "--out", tmp_path / "docs.md")
    page = (tmp_path / "docs.md").read_text()
    assert "24 of 24 runs are measured, with the seeds 0, 1, 2." in page
    assert row(page, "viewmaker")[0].startswith("**85.0 ±")
    assert row(page, "plain")[0].endswith(" ○")  # 30 against 31 of the untrained encoder
    assert row(page, "*untrained*")[0].startswith("31.0 ±")
    assert row(page, "*ceiling*")[0].startswith("95.0 ±")
    assert row(page, "*chance*") == ["10.0"]
    assert "| hard label, % | RandBit, 10 bits: digit |" in page
    assert "| easy label, % | RandBit, 10 bits: bits |" in page
    assert "- RandBit. On the digit, 10 bits: viewmaker (85.0" in page
    assert "Best on a hard label, or not told from the best: viewmaker (1 of 1)." in page
    assert re.findall(r"\n\| (plain|viewmaker|IFM) \|", page)[0] == "viewmaker"  # rows begin with the best
    assert "On the digit, 10 bits: viewmaker (85.0" in page
    assert "is ahead of every other cure: of IFM, the next, by 53.0 ±" in page
    assert "At 10 bits, 2 of 3 cures lose more than half of the hard feature; viewmaker keeps at least 90 %" in page
    assert "Nothing: every run of the settings, difficulties, cures and seeds is measured." in page
    assert "![RandBit: accuracy over the difficulty](docs/randbit.png)" in page
    assert (tmp_path / "docs" / "randbit.png").read_bytes().startswith(b"\x89PNG")


def test_equal_runs_give_an_equal_page(tmp_path: Path) -> None:
    home = make_study(tmp_path / "runs", num_test=100, seeds=(0,))
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        report("--study", "suppression", home, "--out", tmp_path / name / "page.md")
    for path in ("page.md", "page/randbit.png"):
        assert (tmp_path / "a" / path).read_bytes() == (tmp_path / "b" / path).read_bytes()


def test_a_cure_that_is_as_good_is_not_told_from_the_best(tmp_path: Path) -> None:
    home = make_study(tmp_path)
    (setting,) = read_benchmark(sorted(home.iterdir())).settings
    easiest, hardest = (column_of(setting, at, "base") for at in setting.difficulties)
    assert {cure: hardest.mark(cure) for cure in CURES} == {"plain": "lower", "IFM": "lower", "viewmaker": "best"}
    assert {easiest.mark("plain"), easiest.mark("IFM")} == {"best", "tied"}
    assert "has the highest mean" in sentence(easiest) or "Not told from it" in sentence(easiest)
    assert hardest.not_above_floor is not None
    assert "plain" in hardest.not_above_floor
    assert "viewmaker" not in hardest.not_above_floor


def test_shares_are_above_chance(tmp_path: Path) -> None:
    home = make_study(tmp_path)
    (setting,) = read_benchmark(sorted(home.iterdir())).settings
    assert kept_of_hard(setting, "10", "plain", "base") == pytest.approx((0.3 - 0.1) / (0.9 - 0.1))
    assert kept_of_hard(setting, "10", "viewmaker", "base") == pytest.approx(0.75 / 0.8)
    assert kept_of_easy(column_of(setting, "10", "overlay"), "plain") == pytest.approx(1, abs=0.05)
    assert kept_of_easy(column_of(setting, "10", "overlay"), "unknown") is None


def test_a_cure_that_never_reads_the_hard_label_keeps_nothing_of_it(tmp_path: Path) -> None:
    for cure, bits, accuracy in (("plain", 0, 0.9), ("plain", 10, 0.3), ("blind", 0, 0.2), ("blind", 10, 0.2)):
        make_run(tmp_path, factors(cure, bits=bits), right={"base": samples(accuracy, num_test=1000, seed=bits)})
    (setting,) = read_benchmark(sorted(tmp_path.iterdir())).settings
    assert kept_of_hard(setting, "10", "blind", "base") == pytest.approx(0.1 / 0.8)


@pytest.mark.parametrize(
    ("best", "ceiling", "is_learnable"), [(0.32, 0.3, False), (0.33, 0.6, True), (0.5, 0.3, True), (0.5, 0.6, True)]
)
def test_a_label_that_is_too_hard_for_every_cure_says_nothing_about_them(
    best: float, ceiling: float, is_learnable: bool, tmp_path: Path
) -> None:
    """If a cure reads it, it is not too hard, even if the ceiling does not: that may take the easy feature for it."""
    for number, (cure, accuracy) in enumerate({"plain": 0.3, "viewmaker": best, "ceiling: base": ceiling}.items()):
        make_run(
            tmp_path,
            factors(cure, bits=1) | {"unit": "correlation"},
            right={
                "base": samples(accuracy, num_test=1000, seed=number),
                "overlay": samples(0.7, num_test=1000, seed=number + 50),
            },
            untrained={"base": samples(0.31, num_test=1000, seed=9)} if cure == "plain" else None,
        )
    (setting,) = read_benchmark(sorted(tmp_path.iterdir())).settings
    column = column_of(setting, "1", "base")
    assert column.is_learnable is is_learnable
    assert ("The label may be too hard for this encoder" in sentence(column)) is not is_learnable
    assert ("the easy feature predicts the label too" in sentence(column)) == (is_learnable and ceiling < 0.5)
    report("--study", "suppression_small", tmp_path, "--out", tmp_path / "page.md")
    often = "viewmaker (1 of 1)" if is_learnable else "none"
    assert f"not told from the best: {often}." in (tmp_path / "page.md").read_text()


@pytest.mark.parametrize(("bits", "hard"), [(0, "base"), (1, "overlay")])
def test_a_low_ceiling_is_due_to_the_easy_feature_only_if_it_is_correlated_with_a_hard_label(
    bits: int, hard: str, tmp_path: Path
) -> None:
    easy = {"base": "overlay", "overlay": "base"}[hard]
    for number, (cure, accuracy) in enumerate({"plain": 0.5, "ceiling: base": 0.3}.items()):
        make_run(
            tmp_path,
            factors(cure, bits=bits, hard=hard, easy=easy) | {"unit": "correlation"},
            right={"base": samples(accuracy, num_test=1000, seed=number)},
            untrained={"base": samples(0.31, num_test=1000, seed=9)} if cure == "plain" else None,
        )
    (setting,) = read_benchmark(sorted(tmp_path.iterdir())).settings
    assert sentence(column_of(setting, str(bits), "base")).endswith("is not told to be above the untrained encoder.")


def test_comparisons_of_one_seed_are_said_to_be(tmp_path: Path) -> None:
    for cure, accuracy in (("best", 0.6), ("lower", 0.4), ("lowest", 0.2)):
        for seed in (0, 1) if cure != "lowest" else (0,):
            right = {"base": samples(accuracy, num_test=1000, seed=seed)}
            make_run(tmp_path / "runs", factors(cure), seed=seed, right=right)
        make_run(tmp_path / "runs", factors(cure, bits=5), right={"base": samples(accuracy, num_test=1000, seed=7)})
    (setting,) = read_benchmark(sorted((tmp_path / "runs").iterdir())).settings
    assert sentence(column_of(setting, "10", "base")).endswith(" 1 of 2 of these comparisons have one seed.")
    assert sentence(column_of(setting, "5", "base")).endswith(" With one seed.")
    report("--study", "suppression", tmp_path / "runs", "--out", tmp_path / "page.md")
    assert "With one seed, intervals and comparisons hold for this seed only." in (tmp_path / "page.md").read_text()


def test_a_hard_label_without_a_share_is_not_said_to_be_lost(tmp_path: Path) -> None:
    """No cure reads the texture at the easiest difficulty, so nothing can be said of what is kept of it."""
    for bits in (0, 10):
        for number, cure in enumerate(("plain", "viewmaker")):
            accuracies = {"base": 0.9, "texture": 0.1, "overlay": 0.9}
            right = {
                label: samples(accuracy, num_test=1000, seed=10 * at + number)
                for at, (label, accuracy) in enumerate(accuracies.items())
            }
            make_run(tmp_path / "runs", factors(cure, bits=bits, hard="base,texture", easy="overlay"), right=right)
    report("--study", "suppression", tmp_path / "runs", "--out", tmp_path / "page.md")
    page = (tmp_path / "page.md").read_text()
    assert "At 10 bits, 0 of 2 cures lose more than half of the hard feature; plain, viewmaker keep at least" in page


def test_a_label_that_random_weights_read_is_not_called_too_hard(tmp_path: Path) -> None:
    for number, cure in enumerate(("plain", "ceiling: base")):
        make_run(
            tmp_path,
            factors(cure, bits=0),
            right={"base": samples(0.95, num_test=1000, seed=number)},
            untrained={"base": samples(0.95, num_test=1000, seed=9)} if cure == "plain" else None,
        )
    (setting,) = read_benchmark(sorted(tmp_path.iterdir())).settings
    column = column_of(setting, "0", "base")
    assert column.is_learnable is False
    assert "That one reads most of the label already" in sentence(column)
    assert "too hard" not in sentence(column)


def test_a_half_finished_study_gives_an_honest_half_page(tmp_path: Path) -> None:
    home = tmp_path / "suppression_small"
    right = {"base": samples(0.5, num_test=200, seed=0)}
    make_run(home, factors("plain"), right=right)
    make_run(home, factors("plain"), seed=1, right=right, is_finished=False)
    make_run(home, factors("plain", bits=0), right=None)
    make_run(home, factors("IFM"))
    report("--study", "studies:suppression_small", home, "--out", tmp_path / "page.md")
    page = (tmp_path / "page.md").read_text()
    assert "1 of 4 runs are measured" in page
    assert "On the digit, 10 bits: only plain (50.0" in page
    assert "On the digit, 0 bits: not measured." in page
    assert "| IFM |" not in page.split("## RandBit")[0]
    assert "2 runs of other settings x difficulties x cures x seeds have no directory, and 1 are not finished." in page
    assert "the difficulty cannot have the cure or none was begun: RandBit, 0 bits with IFM." in page
    assert "python launch/slurm.py --executor local --study studies:suppression_small --at-a-time 2" in page
    assert "2 finished runs have no probe of their last step." in page
    unprobed = f"{home}/RandBit-0-plain-bits-seed0 {home}/RandBit-10-IFM-bits-seed0"
    assert f"python -m trainer.probe {unprobed} --missing" in page
    assert "are measured for no cure of these runs" in page
    assert "| kept, % |" not in page


def test_results_of_other_data_and_protocols_are_left_out_and_named(tmp_path: Path) -> None:
    home = make_study(tmp_path, num_test=100, seeds=(0, 1))
    right = {"base": samples(0.99, num_test=100, seed=0)}
    make_run(home, factors("other data"), right=right, test_set="c")
    make_run(home, factors("replaced data"), right=right, trained_on="c")
    make_run(home, factors("other probe"), right=right, probe=PROBE.model_copy(update={"num_epochs": 7}))
    make_run(home, factors("plain"), seed=5, right=right, num_epochs=77)
    make_run(home, {"setting": "RandBit"}, right=right)
    found = read_benchmark(sorted(home.iterdir()))
    told = " ".join(found.gaps.problems)
    assert "other_data-bits-seed0 was probed on other data than most runs of RandBit at 10." in told
    assert "replaced_data-bits-seed0 was trained on another train set than its probes read." in told
    assert "other_probe-bits-seed0 was probed with other settings than most runs." in told
    assert "plain-bits-seed5 differs from the other seeds of its cell in more than the seed." in told
    assert "RandBit-seed0 lacks a factor (difficulty, cure)." in told
    (setting,) = found.settings
    assert max(one.accuracy for one in setting.readings("10", "plain", "base").values()) < 0.4
    assert not setting.readings("10", "other data", "base")
    assert not setting.readings("10", "replaced data", "base")


def test_results_of_another_run_of_the_same_name_are_left_out_and_named(tmp_path: Path) -> None:
    """Only the final result is of another run, as if the run had been trained again between the two."""
    right = {"base": samples(0.5, num_test=100, seed=0)}
    run = RunDir(make_run(tmp_path, factors("plain"), right=right, untrained=right))
    write_json(run.provenance, run.read_provenance() | {"started_at": "2026-11-26T02:10:34+00:00", "host": "vm"})
    path = run.probes(40) / "base.json"
    write_json(path, json.loads(path.read_text()) | {"run": "other, seed 0, started at noon on vm"})
    found = read_benchmark([run.path])
    assert not found.settings[0].readings("10", "plain", "base")
    assert found.gaps.problems == (
        f"{run.all_probes} holds probe results of another run (other, seed 0, started at noon on vm) than {run.path}; "
        "probe this one with an --out of its own.",
    )


def test_the_same_run_twice_is_refused(tmp_path: Path) -> None:
    make_run(tmp_path / "a", factors("plain"))
    make_run(tmp_path / "b", factors("plain"))
    with pytest.raises(UserError, match="are both RandBit at 10 with plain and seed 0; leave one out"):
        read_benchmark(sorted(tmp_path.glob("*/*")))


def test_runs_without_factors_are_refused(tmp_path: Path) -> None:
    make_run(tmp_path, {"a": "b"})
    with pytest.raises(UserError, match="has the factors setting, difficulty, cure"):
        read_benchmark(sorted(tmp_path.iterdir()))


def test_hard_and_easy_labels_belong_to_the_setting_and_difficulties_are_sorted_as_numbers(tmp_path: Path) -> None:
    for bits in (5, 10, 0):
        make_run(tmp_path, factors("plain", bits=bits, hard="shape, texture", easy="colour"))
    (setting,) = read_benchmark(sorted(tmp_path.iterdir())).settings
    assert setting.difficulties == ("0", "5", "10")
    assert setting.with_unit("5") == "5 bits"
    assert (setting.middle, setting.easiest) == ("5", "0")
    assert setting.hard == ("shape", "texture")
    assert setting.labels == ("shape", "texture", "colour")


@pytest.mark.parametrize("numbers", [(10, 1000, 100), (10, 100)])
def test_fewer_may_be_harder_and_the_easiest_may_be_missing(numbers: tuple[int, ...], tmp_path: Path) -> None:
    for number in numbers:
        make_run(tmp_path, factors("plain", bits=number) | {"unit": "digits", "easiest": "1000"})
    (setting,) = read_benchmark(sorted(tmp_path.iterdir())).settings
    assert setting.difficulties == tuple(str(number) for number in sorted(numbers, reverse=True))


def test_a_setting_of_one_difficulty_has_points_and_no_difficulty_in_its_sentences(tmp_path: Path) -> None:
    home = tmp_path / "runs"
    for number, cure in enumerate(("plain", "viewmaker")):
        right = {"base": samples(0.5 + 0.2 * number, num_test=300, seed=number)}
        make_run(home, {"setting": "C+Digits", "difficulty": "all", "cure": cure}, right=right)
    report("--study", "suppression", home, "--out", tmp_path / "page.md")
    page = (tmp_path / "page.md").read_text()
    assert (
        "- On the digit: viewmaker (70.0 ± 5.2 %) is ahead of every other cure: of plain, the next, by 20.0 ±" in page
    )
    assert "all" not in page.split("## C+Digits")[1].split("## ")[0].replace("overall", "")
    assert (tmp_path / "page" / "c_digits.png").exists()


def test_worst_groups_are_shown(tmp_path: Path) -> None:
    home, right = (
        tmp_path / "runs",
        {"base": samples(0.5, num_test=200, seed=0), "overlay": samples(0.9, num_test=200, seed=1)},
    )
    for seed, worst in enumerate((0.2, 0.3)):
        make_run(home, factors("plain"), seed=seed, right=right, groups={"base": worst_groups(worst)})
    report("--study", "suppression", home, "--out", tmp_path / "page.md")
    page = (tmp_path / "page.md").read_text()
    assert "| worst group | digit, % | bits, % |" in page
    assert re.search(r"\| plain \| 25.0, expected 6\d.\d \(cat · 3, 40 samples\) \| – \|", page)
    assert "The worst of many groups is low by chance alone" in page


def test_a_worst_group_that_alone_counts_has_no_expected_accuracy(tmp_path: Path) -> None:
    home, right = tmp_path / "runs", {"base": samples(0.5, num_test=200, seed=0)}
    groups = worst_groups(0.2).model_copy(update={"num_test": ((9, 9), (9, 40))})
    make_run(home, factors("plain"), right=right, groups={"base": groups})
    report("--study", "suppression", home, "--out", tmp_path / "page.md")
    assert "| 20.0, the only one that counts (cat · 3, 40 samples) |" in (tmp_path / "page.md").read_text()


def test_the_worst_group_is_the_worst_of_all_pairs_and_its_size_is_its_own(tmp_path: Path) -> None:
    right = {"base": samples(0.5, num_test=200, seed=0)}
    for seed, (name, worst, size) in enumerate((("cat", 0.2, 40), ("cat", 0.3, 40), ("dog", 0.1, 12))):
        result = make_run(tmp_path, factors("plain", hard="base,site"), seed=seed, right=right)
        groups = [
            worst_groups(worst, num_test=size, name=name),
            worst_groups(0.9, num_test=99).model_copy(update={"labels": ("base", "site")}),
        ]
        path = result / "probes" / "step_00000040" / "base.json"
        of_label = json.loads(path.read_text()) | {"groups": [one.model_dump(mode="json") for one in groups]}
        write_json(path, of_label)
    (setting,) = read_benchmark(sorted(tmp_path.iterdir())).settings
    found = worst_group(setting, "10", "plain", "base")
    assert found is not None
    assert found.accuracy == pytest.approx(0.2)
    assert found.usual == ("cat · 3", 40)


def test_a_worst_group_that_differs_between_the_seeds_is_not_named(tmp_path: Path) -> None:
    home, right = tmp_path / "runs", {"base": samples(0.5, num_test=200, seed=0)}
    for seed, name in enumerate(("cat", "dog")):
        make_run(home, factors("plain"), seed=seed, right=right, groups={"base": worst_groups(0.2, name=name)})
    report("--study", "suppression", home, "--out", tmp_path / "page.md")
    page = (tmp_path / "page.md").read_text()
    assert re.search(r"\| plain \| 20.0, expected 6\d.\d \(differs between seeds\) \|", page)
    assert "the group that is the worst in more than half of the seeds" in page


def test_the_page_says_which_setting_has_which_seeds(tmp_path: Path) -> None:
    home, right = tmp_path / "runs", {"base": samples(0.5, num_test=300, seed=0)}
    for cure in ("plain", "viewmaker"):
        for seed in (0, 1):
            make_run(home, {"setting": "RandBit", "difficulty": "5", "cure": cure}, seed=seed, right=right)
        make_run(home, {"setting": "C+Digits", "difficulty": "all", "cure": cure}, right=right)
    report("--study", "suppression", home, "--out", tmp_path / "page.md")
    page = (tmp_path / "page.md").read_text()
    assert "6 of 6 runs are measured, with the seeds 0, 1 (RandBit) and the seed 0 (C+Digits)." in page
    assert "With one seed, intervals and comparisons hold for this seed only." in page


def test_cures_of_other_seeds_are_compared_on_the_seeds_that_both_have(tmp_path: Path) -> None:
    def run(cure: str, seed: int, accuracy: float) -> None:
        make_run(tmp_path, factors(cure), seed=seed, right={"base": samples(accuracy, num_test=1000, seed=seed)})

    run("highest mean", 0, 0.6)
    run("highest mean", 1, 0.9)
    run("above it on seed 0", 0, 0.7)
    run("far below", 0, 0.2)
    run("other seed", 2, 0.3)
    (setting,) = read_benchmark(sorted(tmp_path.iterdir())).settings
    column = column_of(setting, "10", "base")
    marks = {cure: column.mark(cure) for cure in setting.cures}
    assert marks == {"highest mean": "lower", "above it on seed 0": "best", "far below": "lower", "other seed": ""}
    assert "above it on seed 0 (70.0" in sentence(column)
    assert "is ahead of every other cure that shares a seed with it: of highest mean, the next, by" in sentence(column)
    assert "−" not in sentence(column)
    assert sentence(column).endswith("Not compared with it, because they share no seed: other seed. With one seed.")


def test_runs_that_lack_a_label_are_counted_and_cells_of_fewer_seeds_are_marked(tmp_path: Path) -> None:
    """The seed that "viewmaker" has of the easy label is the lowest of every cure."""
    home = tmp_path / "runs"
    for cure, lead in {"plain": 0.0, "viewmaker": 0.05}.items():
        for seed in (0, 1, 2):
            right_N = samples(0.5 + 0.1 * seed + lead, num_test=1000, seed=seed)
            is_short = cure == "viewmaker" and seed > 0
            right = {"base": right_N} if is_short else {"base": right_N, "overlay": right_N}
            make_run(home, factors(cure, bits=0), seed=seed, right=right)
    report("--study", "suppression", home, "--out", tmp_path / "page.md")
    page = (tmp_path / "page.md").read_text()
    assert "4 of 6 runs are measured (2 more on some of their labels only), with the seeds 0, 1, 2." in page
    assert re.search(r"On the bits: viewmaker .* by 5.0 ± .* points. With one seed.", page)
    easy = page[page.index("| easy label, %") :]
    assert row(easy, "viewmaker")[0].endswith("(1 of 3 seeds)**")
    assert "seeds)" not in row(easy, "plain")[0]
    assert "2 runs have no probe of overlay at their last step, although others" in page
    assert f"{home}/RandBit-0-viewmaker-bits-seed2 --label overlay --missing" in page
    (setting,) = read_benchmark(sorted(home.iterdir())).settings
    assert kept_of_easy(column_of(setting, "0", "overlay"), "plain") == pytest.approx(0.4 / 0.45)


def test_the_page_says_which_settings_a_cure_changes_and_no_others(tmp_path: Path) -> None:
    home, right = tmp_path / "runs", {"base": samples(0.5, num_test=200, seed=0)}
    plain: Any = {"objective": {"kind": "nt_xent", "temperature": 0.1}}
    for bits in (0, 10):
        make_run(home, factors("plain", bits=bits), right=right, **plain)
        make_run(home, factors("longer", bits=bits), right=right, num_epochs=3 + bits, **plain)
        make_run(home, factors("IFM", bits=bits), right=right, objective={"kind": "ifm", "temperature": 0.1})
        views = debug.viewmaker().model_dump()
        learned: Any = {"views": views["views"], "adversary": views["adversary"]}
        make_run(home, factors("viewmaker", bits=bits), right=right, **plain, **learned)
        larger = debug.image().encoder.model_copy(update={"embedding_size": 99}).model_dump()
        make_run(home, factors("VICReg", bits=bits), right=right, encoder=larger, objective={"kind": "vicreg"})
    report("--study", "suppression", home, "--out", tmp_path / "page.md")
    page = (tmp_path / "page.md").read_text().split("## What each cure changes")[1]
    assert "| cure | settings that differ from plain | and others, by setting |" in page
    assert row(page, "IFM") == ["objective.kind=ifm", "–"]
    assert row(page, "VICReg") == ["encoder.embedding_size=99, objective.kind=vicreg", "–"]
    assert row(page, "longer") == ["–", "num_epochs"]
    assert "views.kind=viewmaker" in row(page, "viewmaker")[0]
    assert "views.base_width=4" in row(page, "viewmaker")[0]
    assert "adversary={}" in row(page, "viewmaker")[0]
    assert "| plain |" not in page


def test_a_section_that_is_switched_on_or_off_is_said(tmp_path: Path) -> None:
    neighbours = debug.image().model_dump() | {
        "objective": {"kind": "symmetric_info_nce"},
        "num_epochs": 4,
        "neighbours": {"from_epoch": 1, "group_size": 4},
    }
    near = RunConfig.model_validate(neighbours)
    plain = near.model_copy(update={"neighbours": None})
    assert changed_settings(plain, near) == {"neighbours.from_epoch": 1}
    assert changed_settings(plain, near.model_copy(update={"neighbours": NeighboursConfig()})) == {"neighbours": {}}
    assert changed_settings(near, plain) == {"neighbours": None}
    once = near.model_copy(update={"neighbours": NeighboursConfig(from_epoch=1, find_every_epochs=None)})
    assert changed_settings(plain, once) == {"neighbours.from_epoch": 1, "neighbours.find_every_epochs": None}


def test_randbit_stands_beside_the_published_table(tmp_path: Path) -> None:
    def with_loss(**loss: Any) -> Mapping[str, Any]:
        return {"objective": {"kind": "nt_xent"} | loss, "num_epochs": 10, "global_batch_size": 32}

    home = tmp_path / "runs"
    for bits, accuracy in ((0, 0.9), (5, 0.5), (10, 0.1), (16, 0.1)):
        right = {"base": samples(accuracy, num_test=500, seed=bits)}
        make_run(home, factors("tau 0.1", bits=bits), right=right, **with_loss(temperature=0.1))
        near = with_loss(kind="symmetric_info_nce", temperature=0.1)
        make_run(home, factors("near", bits=bits), right=right, neighbours={"from_epoch": 1}, **near)
        make_run(home, factors("tau 0.3", bits=bits), right=right, **with_loss(temperature=0.3))
    report("--study", "suppression", home, "--out", tmp_path / "page.md")
    page = (tmp_path / "page.md").read_text()
    assert row(page, "*published, temperature 0.1*") == ["89.2", "61.2", "18.7", "9.8", "10.3", "6.4 bits"]
    ours = row(page, "ours, tau 0.1")
    assert [cell.split()[0] for cell in ours] == ["90.0", "50.0", "10.0", "–", "–", "5.0"]
    assert "ours, tau 0.3" not in page
    assert "ours, near" not in page
    assert "8,000 train pictures instead of 60,000" in page
    assert "epochs instead" not in page
    assert "tau 0.1 at 16 bits: 10.0 ±" in page


def test_of_two_cures_with_a_published_loss_the_one_with_the_views_of_the_paper_counts(tmp_path: Path) -> None:
    home = tmp_path / "runs"
    loss: dict[str, Any] = {"objective": {"kind": "symmetric_info_nce", "temperature": 0.1}}
    crop = {"kind": "expert_image", "area": (0.5, 1.0)} | {
        f"{name}_probability": 0.0 for name in ("jitter", "grayscale", "blur", "flip")
    }
    of_cures = {
        "SimCLR": crop,
        "another length": crop,
        "A mask": {"kind": "random_mask"},
        "Flips": crop | {"flip_probability": 0.5},
    }
    for number, (cure, views) in enumerate(of_cures.items()):
        more: dict[str, Any] = {"num_epochs": 99} if cure.startswith("another") else {}
        for bits in (0, 10):
            right = {"base": samples(0.2 + number / 10, num_test=100, seed=bits)}
            make_run(home, factors(cure, bits=bits), right=right, views=views, **loss, **more)

    def published() -> str:
        report("--study", "suppression", home, "--out", tmp_path / "page.md")
        return (tmp_path / "page.md").read_text().split("beside the published table")[1]

    assert row(published(), "ours, SimCLR")[0].startswith("20.0")
    assert "the views" not in published()
    for run in [*home.glob("*SimCLR*"), *home.glob("*another*")]:
        shutil.rmtree(run)
    assert row(published(), "ours, Flips")[0].startswith("50.0")
    assert "the views expert_image with flip_probability=0.5 instead of a crop of half of the picture" in published()
    for run in home.glob("*Flips*"):
        shutil.rmtree(run)
    assert row(published(), "ours, A mask")[0].startswith("40.0")
    assert "the views random_mask instead of a crop of half of the picture or more" in published()


def test_the_monitors_do_not_see_what_the_probe_sees(tmp_path: Path) -> None:
    """At each difficulty they order the cures the other way round; over both, the easier one would hide that."""
    home = tmp_path / "runs"
    for number in range(6):
        for bits, (accuracy, rank_me) in {0: (0.9, 100.0), 10: (0.4, 10.0)}.items():
            for seed, shift in ((0, -3.0), (1, 3.0)):
                right = {"base": samples(accuracy - 0.05 * number, num_test=200, seed=number)}
                named = factors(f"cure {number}", bits=bits, hard="base", easy="overlay")
                make_run(home, named, seed=seed, right=right, rank_me=rank_me + number + shift)
    report("--study", "suppression", home, "--out", tmp_path / "page.md")
    page = (tmp_path / "page.md").read_text()
    assert "| RandBit: digit (hard) | −1.00 (6 cures) | −1.00 (6 cures) | – |" in page
    assert "accuracy on hard labels: of RankMe −1.00 to −1.00, of LiDAR −1.00 to −1.00." in page
    assert "| cure 2 | 30.0" in page[page.index("| RandBit, 10 bits | digit, % |") :].split("\n\n")[0]


def test_the_table_of_monitors_says_how_many_seeds_have_them(tmp_path: Path) -> None:
    for number in range(5):
        right = {"base": samples(0.9 - 0.1 * number, num_test=200, seed=number)}
        for seed in range(3):
            rank_me = None if seed > min(number, 1) else 10.0 + number
            make_run(tmp_path / "runs", factors(f"cure {number}"), seed=seed, right=right, rank_me=rank_me)
    report("--study", "suppression", tmp_path / "runs", "--out", tmp_path / "page.md")
    assert (
        "mean over the seeds that have them (1 to 2 of 3); the accuracy is that of all"
        in (tmp_path / "page.md").read_text()
    )


def test_monitors_of_few_cures_are_no_order(tmp_path: Path) -> None:
    for number in range(4):
        right = {"base": samples(0.9 - 0.1 * number, num_test=200, seed=number)}
        make_run(tmp_path / "runs", factors(f"cure {number}"), right=right, rank_me=10.0 + number)
    report("--study", "suppression", tmp_path / "runs", "--out", tmp_path / "page.md")
    assert "They are measured for no cure of these runs, or for too few" in (tmp_path / "page.md").read_text()


def test_monitors_with_other_settings_than_most_are_left_out_and_named(tmp_path: Path) -> None:
    for number in range(3):
        path = make_run(
            tmp_path, factors(f"cure {number}"), right={"base": samples(0.9, num_test=100, seed=0)}, rank_me=10.0
        )
    found = json.loads((path / "analysis" / "monitors.json").read_text())
    write_json(path / "analysis" / "monitors.json", found | {"config": found["config"] | {"num_views": 2}})
    gaps = read_benchmark(sorted(tmp_path.iterdir())).gaps
    assert gaps.without_monitors == (path,)
    assert gaps.problems == (f"The monitors of {path} were measured with other settings than most.",)


def test_monitors_of_a_test_set_that_was_replaced_are_missing(tmp_path: Path) -> None:
    """The monitors of `make_run` are of the test set b; the probe of the second run was repeated on another one."""
    for number, test_set in enumerate("bc"):
        right = {"base": samples(0.9, num_test=100, seed=number)}
        make_run(tmp_path, factors(f"cure {number}", bits=number), right=right, rank_me=10.0, test_set=test_set)
    found = read_benchmark(sorted(tmp_path.iterdir()))
    assert [path.name for path in found.gaps.without_monitors] == ["RandBit-1-cure_1-bits-seed0"]


def test_the_page_says_which_feature_rises_first(tmp_path: Path) -> None:
    """A change from 30 to 31 % of 2 x 100 samples is chance."""
    probe = PROBE.model_copy(update={"online_every_steps": 10, "online_num_test": 100})
    curves = {
        "base": [0.1, 0.1, 0.2, 0.4, 0.5],
        "overlay": [0.1, 0.8, 0.9, 0.9, 0.9],
        "shade": [0.3, 0.3, 0.3, 0.3, 0.31],
        "texture": [0.6, 0.5, 0.3, 0.2, 0.2],
    }
    for seed, bits in ((0, 10), (1, 10), (0, 0)):
        right = {label: samples(curve[-1], num_test=100, seed=seed) for label, curve in curves.items()}
        named = factors("plain", bits=bits, hard="base,texture", easy="overlay,shade")
        path = make_run(tmp_path / "runs", named, seed=seed, right=right, probe=probe if bits else PROBE)
        lines = [
            {"step": 10 * place}
            | {f"probe/{label}/ridge": curve[place] + 0.02 * seed for label, curve in curves.items()}
            for place in range(5)
        ]
        RunDir(path).metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    report("--study", "suppression_small", tmp_path / "runs", "--out", tmp_path / "p.md")
    page = (tmp_path / "p.md").read_text()
    section = page[page.index("## Which feature rises first?") :].split("\n## ")[0]
    said = "Of 1 settings and difficulties, an easy label gains first in 1, and a hard label is read worse"
    assert said in section
    assert "after the training than before it in 1." in section
    rows = [re.findall(r"[^|]+", line) for line in section.splitlines() if line.startswith("| RandBit, 10 bits")]
    assert [[cell.strip() for cell in row[1:5]] for row in rows] == [
        ["bits (easy)", "11.0", "91.0", "half of the gain after 10 steps"],
        ["digit (hard)", "11.0", "51.0", "half of the gain after 30 steps"],
        ["shade (easy)", "31.0", "32.0", "none"],
        ["texture (hard)", "61.0", "21.0", "half of the loss after 20 steps"],
    ]
    assert (tmp_path / "p" / "rises.png").is_file()


def test_the_last_online_reading_of_an_unread_end_is_named_by_its_step(tmp_path: Path) -> None:
    probe = PROBE.model_copy(update={"online_every_steps": 30, "online_num_test": 100})
    right = {"base": samples(0.9, num_test=100, seed=0)}
    path = make_run(tmp_path / "runs", factors("plain", bits=10), right=right, probe=probe)
    lines = [{"step": step, "probe/base/ridge": accuracy} for step, accuracy in ((0, 0.1), (30, 0.6))]
    RunDir(path).metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    report("--study", "suppression_small", tmp_path / "runs", "--out", tmp_path / "p.md")
    page = (tmp_path / "p.md").read_text()
    assert "| digit (hard) | 10.0 | 60.0 (step 30) | half of the gain after 30 steps |" in page
    assert "With a step: the last that was read." in page


def test_without_online_probes_the_page_does_not_say_what_rises_first(tmp_path: Path) -> None:
    make_run(tmp_path / "runs", factors("plain"), right={"base": samples(0.5, num_test=100, seed=0)})
    report("--study", "suppression_small", tmp_path / "runs", "--out", tmp_path / "p.md")
    assert "No run has online probes" in (tmp_path / "p.md").read_text()


def test_raw_pixels_are_a_floor_of_their_own(tmp_path: Path) -> None:
    home, right = tmp_path / "runs", {"base": samples(0.5, num_test=200, seed=0)}
    run = make_run(home, factors("plain"), right=right)
    of_pixels = probe_result("base", 0, samples(0.4, num_test=200, seed=1), has_bits=True, test_set="b", probe=PROBE)
    write_json(run / "probes" / "step_00000000" / "base-reads_pixels.json", of_pixels)
    report("--study", "suppression", home, "--out", tmp_path / "page.md")
    page = (tmp_path / "page.md").read_text()
    assert row(page, "*raw pixels*")[0].startswith("40.0 ±")
    assert row(page, "*untrained*") == ["–"]


def test_half_is_above_chance_and_may_not_be_reached() -> None:
    assert halving([0, 10], [0.9, 0.8], chance=0.1) is None
    assert halving([0, 5, 10], [0.9, 0.5, 0.1], chance=0.1) == pytest.approx(5)


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    home, right = tmp_path / "runs", {"base": samples(0.5, num_test=100, seed=0)}
    make_run(home, factors("<b>|`x`"), right=right)
    report("--study", "suppression", home, "--out", tmp_path / "page.md")
    page = (tmp_path / "page.md").read_text()
    assert "<b>" not in page.replace("\\<b\\>", "")


@pytest.mark.slow
def test_hundreds_of_runs_take_seconds(tmp_path: Path) -> None:
    debug.image()
    right = {"base": samples(0.5, num_test=2000, seed=0), "overlay": samples(0.9, num_test=2000, seed=1)}
    for cure in range(10):
        for bits in range(5):
            for seed in range(4):
                make_run(tmp_path / "runs", factors(f"cure {cure}", bits=bits), seed=seed, right=right)
    started = time.process_time()
    report("--study", "suppression", tmp_path / "runs", "--out", tmp_path / "page.md")
    assert time.process_time() - started < 30  # 3 seconds on an idle core


def test_the_page_is_not_sent_to_wandb(tmp_path: Path) -> None:
    make_run(tmp_path, factors("plain"))
    with pytest.raises(UserError, match="--wandb makes no page of the suppression benchmark"):
        report("--study", "suppression", tmp_path, "--wandb", "--out", tmp_path / "page.md")
