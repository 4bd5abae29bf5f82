"""Studies against the published tables that they are for."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path

import pytest

from configs import studies
from configs.resolve import resolve_study
from data_pipeline.__main__ import main as data_pipeline
from data_pipeline.core.schema import flatten
from trainer.config import RunConfig
from trainer.data import open_stream
from trainer.models.encoder import build_encoder
from trainer.objectives import SplitLossConfig
from trainer.preflight import check_data
from trainer.reports.studies import SMALL_RUN, read_published, study
from trainer.views.expert_image import ExpertImageConfig, huang_views
from trainer.views.viewmaker import ViewmakerConfig

STUDIES = [line["study"] for line in read_published("studies")]
EVERY = [*STUDIES, "table1_as_code", "table1_as_paper"]
FORMS = [form for name in EVERY for form in (name, f"{name}_small")]


@cache
def runs_of(name: str) -> list[RunConfig]:
    """Return the runs of a study. Several tests look at the same ones, and to check them all takes seconds."""
    return resolve_study(f"studies:{name}")


@pytest.mark.parametrize("name", FORMS)
def test_a_study_fills_every_cell_of_its_table_and_no_other(name: str) -> None:
    table, runs = study(name), runs_of(name)
    assert {cell["run"] for cell in table.cells} == {run.name for run in runs}
    assert all((run.tracking.tags, run.tracking.group) == ((name,), name) for run in runs)


@pytest.mark.parametrize(
    ("name", "encoder", "batch_size", "num_epochs"),
    [
        ("table1", "resnet18_small", 256, {200}),
        ("table2", "resnet18", 128, {200}),
        ("table3", "resnet18_small", 256, {200}),
        ("richness", "resnet18_small", 512, {800}),
        ("colour", "resnet18_small", 512, {800}),
        ("temperatures", "resnet18_small", 512, {200, 400, 600, 800}),
        ("pairs", "resnet18_small", 512, {200}),
    ],
)
def test_at_paper_scale_runs_have_the_papers_encoder_batch_and_epochs(
    name: str, encoder: str, batch_size: int, num_epochs: set[int]
) -> None:
    runs = runs_of(name)
    assert {(run.encoder.kind, run.global_batch_size) for run in runs} == {(encoder, batch_size)}
    assert {run.num_epochs for run in runs} == num_epochs
    assert all(str(run.num_epochs) in run.name for run in runs if name == "temperatures")


@pytest.mark.parametrize("name", EVERY)
def test_at_paper_scale_every_recipe_has_three_seeds_and_the_published_one(name: str) -> None:
    seeds: dict[str, set[int]] = {}
    for run in runs_of(name):
        seeds.setdefault(run.name, set()).add(run.seed)
    for run_name, found in seeds.items():
        assert len(found) == 3
        assert {"audio": 1337, "viewmaker": 2}.get(run_name.partition("-")[0], 0) in found


@pytest.mark.parametrize("name", EVERY)
def test_the_documented_numbers_of_runs_are_those_of_the_studies(name: str) -> None:
    text = (Path(studies.__file__).parents[1] / "docs" / "reports.md").read_text()
    (row,) = (line for line in text.splitlines() if line.startswith(f"| `{name}` |"))
    full, small = (len(runs_of(form)) for form in (name, f"{name}_small"))
    assert row.endswith(f"| {full} | {small} |")


@pytest.mark.parametrize("name", EVERY)
def test_the_small_form_differs_in_size_alone(name: str) -> None:
    full = {run.name: run for run in runs_of(name)}
    for run in {run.name: run for run in runs_of(f"{name}_small")}.values():  # one of its seeds
        large = full[run.name.removesuffix(SMALL_RUN)]
        assert run.objective == large.objective
        assert run.optimizer == large.optimizer
        assert run.memory == large.memory
        assert run.data.overlay == large.data.overlay
        if isinstance(large.views, ViewmakerConfig):
            size = {"base_width": 8, "num_res_blocks": 1}
            assert run.views == large.views.model_copy(update=size)
        else:
            assert run.views == large.views
        assert sum(parameter.numel() for parameter in build_encoder(run.encoder).parameters()) < 1_000_000


@pytest.fixture(scope="module")
def small_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the datasets in the docstring of the studies from sources that need no download."""
    directory = tmp_path_factory.mktemp("small")
    sets = {f"cifar10{ending}": [f"procedural{ending}"] for ending in ("", "_shapes", "_digits", "_letters")}
    sets |= {name: [name, "--source", "procedural"] for name in ("spoken", "noise", "spoken_noise")}
    for name, what in sets.items():
        online = [] if name in {"cifar10", "spoken"} else ["--overlay", "online"]
        for split in ("train", "test"):
            out = directory / "data" / "small" / name / split
            num_samples = 1024 if name == "cifar10_digits" else 80  # the largest batch of a small study
            size = ["--split", split, "--limit", str(num_samples), "--workers", "1"]
            data_pipeline(["build", *what, *online, *size, "--out", str(out)])
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_every_run_of_a_small_study_can_start_on_its_data(
    name: str, small_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(small_data)
    first = {run.name: run for run in resolve_study(f"studies:{name}_small")}  # one of its seeds
    for config in first.values():
        check_data(config)
    for data, batch_size in {(run.data, run.global_batch_size) for run in first.values()}:
        stream = open_stream(data, global_batch_size=batch_size, seed=0, end_step=1)
        assert len(next(iter(stream))) == batch_size


def test_large_batches_keep_their_ratios_in_the_small_form() -> None:
    sizes = [[run.global_batch_size for run in runs_of(name)] for name in ("large_batches", "large_batches_small")]
    assert sizes[0][::3] == [256, 1024, 4096, 4096]
    assert sizes[1] == [size // 4 for size in sizes[0][::3]]
    assert [run.memory.micro_batches for run in runs_of("large_batches_small")] == [1, 1, 1, 4]


def test_views_of_the_huang_tables_are_those_of_their_rows() -> None:
    def views(name: str, run: str) -> ExpertImageConfig:
        (found,) = {config.views for config in runs_of(name) if config.name == run}  # of three seeds
        assert isinstance(found, ExpertImageConfig)
        return found

    assert views("richness", "moco-cifar100-abc") == huang_views("abc")
    strong = views("colour", "simsiam-cifar10-ad-strength0.25")
    assert strong == huang_views("ad", strength=0.25, jitter_probability=1.0)
    assert strong.brightness == 0.2
    assert views("pairs", "simclr-huang-cifar10-ce-200epochs").area is None
    objectives = {run.name: run.objective for run in studies.temperatures()}
    assert objectives["split-t0.2-400epochs"] == SplitLossConfig(temperature=0.2)


def test_the_studies_of_huang_vote_on_all_pictures_after_every_tenth_epoch() -> None:
    for name in ("richness", "colour", "temperatures", "pairs"):
        for run in runs_of(name):
            assert run.probe.online_every_steps == 10 * (50_000 // run.global_batch_size)
            assert (run.probe.online_num_train, run.probe.online_num_test) == (50_000, 10_000)


def test_an_ablation_changes_one_thing() -> None:
    runs = {run.name: run.model_dump() for run in studies.ablations()}
    bases = [name for name in runs if name.endswith(("_shapes", "_digits"))]
    assert len(bases) == 4
    for name, run in runs.items():
        (base,) = (base for base in bases if name.startswith(base))
        changed = {field for field in run if run[field] != runs[base][field]} - {"name"}
        assert len(changed) == (0 if name == base else 1)


def test_table_1_as_code_and_as_paper_differ_from_table_1_where_code_and_paper_do() -> None:
    def changes(name: str) -> dict[str, dict[str, object]]:
        ours = {run.name: flatten(run) for run in studies.table1() if run.seed == 0}
        return {
            run.name: {key: value for key, value in flatten(run).items() if value != ours[run.name][key]}
            for run in getattr(studies, name)()
            if run.seed == 0
        }

    ours = changes("table1")
    learned = [name for name in ours if name.startswith("viewmaker")]
    probe = {"probe.batch_norm": "train"}
    code = {name: {**probe, "views.clamp": False, "adversary.update": "alternating"} for name in learned}
    assert changes("table1_as_code") == dict.fromkeys(ours, probe) | code
    paper = {name: {"objective.temperature": 0.1} for name in ours}
    letters = {"viewmaker-cifar10_letters": {"objective.temperature": 0.1, "views.budget": 0.05}}
    assert changes("table1_as_paper") == paper | letters


def test_published_differences_are_those_of_the_cells_and_larger_than_their_deviation() -> None:
    """A published deviation is that of a population of three seeds: the error of a mean is a root of 2 smaller."""
    cells = {(cell["study"], cell["label"], cell["run"]): cell for cell in read_published("cells")}
    for line in read_published("differences"):
        a, b = (cells[line["study"], line["label"], line[name]] for name in ("first", "second"))
        if not a["mean"]:  # a figure without numbers, or nothing
            assert (
                line["points"]
                in {"pairs": {"+"}, "firing": {"+"}, "sharing": {""}, "ablations": {"+", ""}, "masks": {""}}[
                    line["study"]
                ]
            )
            continue
        assert float(line["points"]) == pytest.approx(float(a["mean"]) - float(b["mean"]), abs=1e-6)
        error = math.hypot(float(a["deviation"] or 0), float(b["deviation"] or 0)) / math.sqrt(2)
        assert abs(float(line["points"])) > 2 * error
    compared = {(line["first"], line["second"]) for line in read_published("differences")}
    assert ("barlow_twins-cifar10-ab", "barlow_twins-cifar10-a") not in compared  # 67.83 ± 0.94 and 67.77 ± 0.69
    assert ("simclr-cifar10_digits", "simclr-cifar10") in compared  # the cost of a second feature
