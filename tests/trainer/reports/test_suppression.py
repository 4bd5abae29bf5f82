"""The page of the suppression benchmark, from run directories with planted accuracies."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data_pipeline.building.suppression_settings import SETTINGS
from data_pipeline.core.errors import UserError
from tests.trainer.reports.made_runs import PROVENANCE, make_run, probe_result, report, samples
from tests.trainer.reports.test_studies import row
from trainer.probes.linear import ProbeConfig
from trainer.probes.result import ScoredEncoder, pack_right
from trainer.reports.paired import mean_of
from trainer.reports.runs import read_runs, read_scored
from trainer.reports.suppression import column_of, settings_of
from trainer.reports.table import measure
from trainer.run_dir import RunDir, write_json

PROBE = ProbeConfig(num_epochs=20, views="none")
CURES = {"SimCLR": (0.9, 0.3), "viewmaker": (0.88, 0.85), "IFM": (0.9, 0.32)}  # on the hard label at 0 and at 10 bits
TITLES = {"base": "digit", "overlay": "bits"}


def cure_run(
    home: Path, cure: str, accuracy: float, *, bits: int = 10, seed: int = 0, draw: int = 0, **more: Any
) -> Path:
    factors = {"setting": "RandBit", "difficulty": str(bits), "cure": cure, "unit": "bits"} | more.pop("factors", {})
    right = {
        "base": samples(accuracy, num_test=400, seed=100 * draw + seed),
        "overlay": samples(0.7, num_test=400, seed=100 * draw + seed + 50),
    }
    return make_run(
        home / f"{cure}-{bits}-seed{seed}".replace(" ", "_").replace(":", ""),
        name=f"{cure.replace(' ', '_').replace(':', '')}-{bits}",
        seed=seed,
        right=right,
        probe=PROBE,
        titles=TITLES,
        tracking={"factors": factors, "wandb": "disabled"},
        num_epochs=2 + 100 * draw + bits,
        **more,
    )


def make_study(home: Path, *, seeds: tuple[int, ...] = (0, 1, 2)) -> Path:
    """Make the runs of three cures, a ceiling and two difficulties; "viewmaker" is the only cure at 10 bits."""
    for draw, (cure, hard) in enumerate([*CURES.items(), ("ceiling: base", (0.95, 0.95))]):
        for accuracy, bits in zip(hard, (0, 10), strict=True):
            for seed in seeds:
                untrained = {"base": samples(0.31, num_test=400, seed=seed)} if cure == "SimCLR" else None
                cure_run(home, cure, accuracy, bits=bits, seed=seed, draw=draw, untrained_right=untrained)
    return home


def test_the_page_names_the_planted_winner_and_draws_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = make_study(tmp_path / "runs")
    page = report(monkeypatch, tmp_path / "page.md", "--study", "suppression_small", home)
    cells = row(page, "RandBit, 10 bits: digit")
    assert cells[0] == "viewmaker"
    assert cells[1].startswith("85.0 ± ")
    assert cells[2].startswith("2 of 2, by 53.0 ± ")
    assert cells[3:] == ["95.0", "31.0", "–"]
    assert "viewmaker (1 of 1)." in page
    published = row(page, "RandBit, SimCLR")
    assert published[0].startswith("90.0 ± ")
    assert published[0].endswith(" (89.2)")
    assert published[2].endswith(" (18.7)")
    assert published[4] == "– (10.3)"
    assert "24 runs, seeds 0, 1, 2" in page
    links = re.findall(r"\]\((.+?)\)", page)
    assert links == ["page/accuracies.png", "page/difficulties.png"], "nothing else is beside the page"
    for link in links:
        assert (tmp_path / link).read_bytes().startswith(b"\x89PNG")


def test_the_page_of_the_table_is_that_of_the_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, table = make_study(tmp_path / "runs", seeds=(0, 1)), tmp_path / "t.csv.gz"
    page = report(monkeypatch, tmp_path / "page.md", "--study", "suppression", home, "--csv", table)
    figure = (tmp_path / "page" / "accuracies.png").read_bytes()
    again = report(monkeypatch, tmp_path / "page.md", "--study", "suppression", table)
    assert again.replace(str(table), str(home)) == page
    assert (tmp_path / "page" / "accuracies.png").read_bytes() == figure
    with pytest.raises(UserError, match="--study"):
        report(monkeypatch, tmp_path / "r.html", table)


def test_cures_are_marked_by_what_is_told_from_chance(tmp_path: Path) -> None:
    ((setting,), left_out) = settings_of(measure(read_runs(sorted(make_study(tmp_path).iterdir()))))
    assert left_out == []
    assert (setting.difficulties, setting.middle, setting.cures) == (("0", "10"), "10", ("IFM", "SimCLR", "viewmaker"))
    easiest, hardest = (column_of(setting, at, "base") for at in setting.difficulties)
    assert [cure for cure in setting.cures if hardest.is_best(cure)] == ["viewmaker"]
    assert hardest.floor == {"SimCLR", "IFM"}  # 30 and 32 against 31 of the untrained encoder
    assert all(easiest.is_best(cure) for cure in setting.cures)
    assert easiest.floor == set()
    assert hardest.references["ceiling"].mean == pytest.approx(0.95)
    assert hardest.chance == 0.1


def test_results_of_other_data_and_protocols_and_unfinished_runs_are_left_out_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = make_study(tmp_path / "runs", seeds=(0, 1))
    for path in RunDir(home / "SimCLR-10-seed0").all_probes.rglob("*.json"):
        write_json(path, json.loads(path.read_text()) | {"test_manifest_sha256": "c" * 64})
    for path in RunDir(home / "IFM-10-seed0").all_probes.rglob("*.json"):
        result = json.loads(path.read_text())
        write_json(path, result | {"probe_config": result["probe_config"] | {"num_epochs": 3}})
    unfinished = {name: fact for name, fact in PROVENANCE.items() if name != "finished_step"}
    write_json(RunDir(home / "viewmaker-10-seed0").provenance, unfinished)
    page = report(monkeypatch, tmp_path / "page.md", "--study", "suppression", home)
    assert "3 runs are left out" in " ".join(page.split())


def test_two_runs_in_one_place_and_runs_without_factors_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "runs"
    cure_run(home, "IFM", 0.4)
    make_run(home / "bare", trained={"base": [0.4]})
    with pytest.raises(UserError, match="factors"):
        report(monkeypatch, tmp_path / "page.md", "--study", "suppression", home / "bare")
    cure_run(home / "other", "IFM", 0.5, num_test=7, draw=2)
    with pytest.raises(UserError, match="seed 0"):
        report(monkeypatch, tmp_path / "page.md", "--study", "suppression", home, home / "other")


@pytest.mark.parametrize(
    ("levels", "easiest", "order"),
    [
        (("10", "5", "0"), None, ("0", "5", "10")),
        (("10", "100", "1000"), "1000", ("1000", "100", "10")),
        (("hard", "easy"), "easy", ("easy", "hard")),
    ],
)
def test_difficulties_begin_with_the_easiest(
    levels: tuple[str, ...], easiest: str | None, order: tuple[str, ...], tmp_path: Path
) -> None:
    for number, level in enumerate(levels):
        factors = {"difficulty": level} | ({} if easiest is None else {"easiest": easiest})
        cure_run(tmp_path, "IFM", 0.5, bits=number, factors=factors)
    ((setting,), _) = settings_of(measure(read_runs(sorted(tmp_path.iterdir()))))
    assert setting.difficulties == order


def test_raw_pixels_are_a_floor_and_hard_labels_are_those_of_the_factor(tmp_path: Path) -> None:
    run = RunDir(cure_run(tmp_path, "IFM", 0.5, factors={"hard": "overlay", "easy": "base"}))
    pixels = PROBE.model_copy(update={"reads": "pixels"})
    write_json(run.probes(0) / "overlay-reads_pixels.json", probe_result("overlay", 0, [0.66], 400, config=pixels))
    ((setting,), _) = settings_of(measure(read_runs([run.path])))
    assert (setting.hard, setting.easy) == (("overlay",), ("base",))
    column = column_of(setting, "10", "overlay")
    assert column.references["raw pixels"].mean == 0.66
    assert column.of_cure["IFM"].mean == pytest.approx(0.7)


def scored_encoder(home: Path, accuracy: float, **more: Any) -> Path:
    """Write the results of an encoder of others on RandBit with 10 bits, as `trainer.probe --data` does."""
    factors = SETTINGS["randbit"].factors("10", scale="small", cure="encoder: my.py:net")
    scored = ScoredEncoder(
        name="my.py:net", seed=0, train_dir="10/train", test_dir="10/test", origin={}, factors=factors
    )
    for label in TITLES:
        right_N = samples(accuracy, num_test=400, seed=77)
        result = probe_result(label, 1, [float(right_N.mean())], 400, config=PROBE, title=TITLES[label])
        bits = {"linear": pack_right(torch.from_numpy(right_N))}
        facts = {"scored": scored.model_dump(mode="json"), "right_samples": bits}
        write_json(home / "randbit-10" / f"{label}.json", result | facts | more)
    return home


def test_an_encoder_of_others_stands_beside_the_cures_and_changes_none_of_their_comparisons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, encoder, table = make_study(tmp_path / "runs"), scored_encoder(tmp_path / "net", 0.6), tmp_path / "t.csv"
    without = report(monkeypatch, tmp_path / "p.md", "--study", "suppression_small", home, "--csv", table)
    picture = (tmp_path / "p" / "accuracies.png").read_bytes()
    page = report(monkeypatch, tmp_path / "p.md", "--study", "suppression_small", home, encoder)
    others = page[page.index("## Encoders of others") :]
    name, ours, best, of_best, difference = row(others, "RandBit, 10 bits: digit")
    assert (name, best) == ("my.py:net", "viewmaker")
    assert ours.startswith("60.0 ± ")
    assert of_best.startswith("85.0 ± ")
    assert difference.startswith("−25.0 ± ")
    assert row(page, "RandBit, 10 bits: digit") == row(without, "RandBit, 10 bits: digit")
    assert page[: page.index("## Encoders of others")].count("my.py:net") == 0
    assert (tmp_path / "p" / "accuracies.png").read_bytes() != picture
    beside_table = report(monkeypatch, tmp_path / "p.md", "--study", "suppression_small", table, encoder)
    assert row(beside_table[beside_table.index("## Encoders") :], "RandBit, 10 bits: digit")[4] == difference
    alone = report(monkeypatch, tmp_path / "p.md", "--study", "suppression_small", encoder)
    assert row(alone, "RandBit: digit")[2:] == ["–", "–", "–"]
    with pytest.raises(UserError, match="without runs beside it"):
        report(monkeypatch, tmp_path / "p.md", "--study", "suppression_small", table, home)
    scored_encoder(tmp_path / "net", 0.6, test_manifest_sha256="c" * 64)
    other_data = report(monkeypatch, tmp_path / "p.md", "--study", "suppression_small", home, encoder)
    assert "## Encoders of others" not in other_data
    assert f"another protocol than most. They are {encoder / 'randbit-10'}." in " ".join(other_data.split())


def test_the_interval_of_an_encoder_of_others_holds_its_samples_and_its_lead_the_seeds_of_the_cure(
    tmp_path: Path,
) -> None:
    runs = read_runs(sorted(make_study(tmp_path / "runs").iterdir()))
    ((setting,), _) = settings_of(measure(runs, read_scored([scored_encoder(tmp_path / "net", 0.85)])))
    column = column_of(setting, "10", "base")
    [(name, reading)] = column.of_encoder.items()
    assert (setting.encoders, name in setting.cures, name in column.readings) == ((name,), False, False)
    assert column.references[name] == mean_of([reading])
    lead = column.lead_over_best(name)
    assert lead is not None
    assert lead.num_seeds == 3
    right_SN = np.array([one.right_N for one in column.readings["viewmaker"].values()], dtype=float)
    difference_SN = np.array(reading.right_N, dtype=float) - right_SN
    assert lead.mean == pytest.approx(difference_SN.mean())
    # Those of the crossed analysis of variance: samples, seeds, and once too many the cells.
    samples_, seeds = difference_SN.mean(0).var(ddof=1) / 400, difference_SN.mean(1).var(ddof=1) / 3
    rest_SN = difference_SN - difference_SN.mean(0) - difference_SN.mean(1)[:, None] + difference_SN.mean()
    cells = np.square(rest_SN).sum() / (2 * 399) / 1200
    assert lead.error**2 == pytest.approx(samples_ + max(0.0, seeds - cells), rel=1e-6)
