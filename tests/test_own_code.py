"""Code from outside: registered by a file, a module or an entry point, and treated as that of this project."""

from __future__ import annotations

import inspect
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import data_pipeline.__main__
import launch.slurm
import launch.train
import trainer.export
import trainer.probe
import trainer.report
from configs import describe_recipes, explain, resolve_recipe, resolve_study
from data_pipeline.building.build import build_dataset
from data_pipeline.core.errors import UserError
from data_pipeline.core.imports import import_code
from launch.snapshot import read_snapshot
from tests.commands import Call, Done
from tests.nursery import run_python
from tests.own_package import add_distribution, install, on_path
from tests.real_data import REPOSITORY
from tests.tiny_data import write_tiny_pair
from trainer import load_encoder
from trainer.config import read_config
from trainer.own_code import files_to_copy, own_packages
from trainer.probes.result import read_result
from trainer.recorded_step import why_not_by_default, why_not_recorded
from trainer.run_dir import RunDir

MINE = "seaside.recipes:mine"
OWN_KINDS = {
    "views": "seaside_light",
    "encoder": "seaside_patches",
    "objective": "seaside_triplet",
    "engine": "seaside_calm",
}
MINE_PY = """
from typing import Literal

from configs import debug
from data_pipeline.core.schema import PositiveFactor
from trainer.config import RunConfig
from trainer.objectives import BaseObjectiveConfig, PureObjective, nt_xent_loss

class ScaledConfig(BaseObjectiveConfig):
    kind: Literal["scaled"] = "scaled"
    temperature: PositiveFactor = 0.3

    def build(self, given):
        return PureObjective(nt_xent_loss, temperature=self.temperature)

def big():
    return RunConfig.model_validate(debug.image().model_dump() | {"name": "big", "objective": ScaledConfig()})
"""


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Path]:
    """Install the second package on the path."""
    site = install(tmp_path / "site")
    with on_path(site):
        yield site


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_pair(tmp_path_factory.mktemp("data"), num_train=64, num_test=40)


def settings(data: Path, **more: object) -> list[str]:
    given = {"data.train_dir": data / "train", "data.test_dir": data / "test", "data.num_workers": 0}
    given |= {"tracking.wandb": "disabled", "global_batch_size": 16, "checkpoint_every_steps": 2, **more}
    return [word for key, value in given.items() for word in ("--set", f"{key}={value}")]


@pytest.fixture
def run(call: Call) -> Callable[..., Done]:
    def command(module: object, *arguments: str | Path) -> Done:
        return call(module.main, *arguments)  # type: ignore[attr-defined]

    return command


@pytest.fixture
def mine_py(tmp_path: Path) -> Iterator[Path]:
    """Write a file that registers an objective."""
    path = tmp_path / "mine.py"
    path.write_text(MINE_PY)
    with on_path(tmp_path):
        yield path


# Ways to register, and to name a recipe.


@pytest.mark.parametrize("way", ["file", "module"])
def test_what_code_registers_is_set_like_any_other(
    way: str, mine_py: Path, run: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(mine_py.parent)
    command = ["--config", "debug:image", "--set", "objective.kind=scaled", "--set", "objective.temperature=0.2"]
    done = run(launch.train, *command, "--explain")
    assert done.status == 2
    assert "registered by --code FILE or an installed package" in done.stderr
    assert done.stderr.count("\n") == 1
    done = run(launch.train, *command, "--explain", "--code", {"file": mine_py, "module": "mine"}[way])
    assert re.search(r"^objective\.kind +scaled +--set$", done.stdout, re.MULTILINE), done.stderr


def test_an_entry_point_registers_a_recipe_and_kinds(site: Path, tmp_path: Path) -> None:
    config = resolve_recipe(MINE, ["objective.margin=0.3"])
    assert {name: getattr(config, name).kind for name in OWN_KINDS} == OWN_KINDS
    assert config.model_dump()["objective"] == {"kind": "seaside_triplet", "margin": 0.3}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config.model_dump(mode="json")))
    assert read_config(path) == config
    assert resolve_recipe(str(path)) == config
    (line,) = [line for line in explain(MINE).splitlines() if line.startswith("views.kind")]
    assert line.split() == ["views.kind", "seaside_light", MINE]
    assert re.search(r"^  seaside\.recipes:mine +Everything of our own", describe_recipes(), re.MULTILINE)
    runs = resolve_study("seaside.recipes:study", ["num_epochs=1"])
    assert [(each.name, each.num_epochs) for each in runs] == [("seaside-0.2", 1), ("seaside-0.8", 1)]
    with pytest.raises(UserError, match=r'did you mean "seaside_triplet"\?'):
        resolve_recipe("debug:image", ["objective.kind=seaside_triplex"])


def test_a_file_with_a_recipe_needs_no_package(mine_py: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(mine_py.parent)
    (mine_py.parent / "more.py").write_text("from mine import big\ndef again():\n    return big()\n")
    assert resolve_recipe("./mine.py:big").name == "big"
    assert resolve_recipe(f"{mine_py}:big", ["name=x"]).name == "x"
    assert resolve_recipe("mine:big").objective.kind == "scaled"  # a module in the working directory
    assert resolve_recipe("./more.py:again").name == "big"  # imports the file beside it


# Files with a base.


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_a_file_with_a_base_holds_only_what_differs(tmp_path: Path) -> None:
    path = write(
        tmp_path / "mine.yaml",
        """
        base: viewmaker:digits
        name: mine
        views: {budget: 0.1}
        adversary: {optimizer: {learning_rate: 0.01}}
        objective: {kind: barlow_twins, off_diagonal_weight: 0.02}
        """,
    )
    theirs = [
        "name=mine",
        "views.budget=0.1",
        "adversary.optimizer.learning_rate=0.01",
        "objective.kind=barlow_twins",
        "objective.off_diagonal_weight=0.02",
    ]
    config = resolve_recipe(path)
    assert config == resolve_recipe("viewmaker:digits", theirs)
    assert resolve_recipe(path, ["views.budget=0.2"]).views.model_dump()["budget"] == 0.2
    origins = {line.split()[0]: line.split()[-1] for line in explain(path, ["seed=5"]).splitlines()}
    assert origins["seed"] == "--set"
    assert origins["views.budget"] == origins["global_batch_size"] == path
    assert origins["objective.kind"] == path


def test_a_base_may_be_another_file_beside_it(tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    write(tmp_path / "first.yaml", "{base: 'debug:image', seed: 3, probe: {num_epochs: 7}}")
    second = write(tmp_path / "more" / "second.yaml", "{base: ../first.yaml, probe: {seed: 4}}")
    config = resolve_recipe(second)
    assert (config.seed, config.probe.num_epochs, config.probe.seed) == (3, 7, 4)
    origins = {line.split()[0]: line.split()[-1] for line in explain(second).splitlines()}
    assert origins["probe.num_epochs"] == origins["probe.seed"] == second


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{base: none.yaml}", "cannot read"),
        ("{base: 'mine:big'}", "not a recipe of this project"),
    ],
)
def test_a_file_whose_base_is_wrong_is_one_sentence(text: str, said: str, tmp_path: Path) -> None:
    path = write(tmp_path / "mine.yaml", text)
    with pytest.raises(UserError, match=said) as raised:
        resolve_recipe(path)
    assert "\n" not in str(raised.value)


# Bad input.


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        ("nowhere.recipes:mine", "is not found"),
        ("seaside.recipes:mne", 'did you mean "mine"'),
        ("seaside.recipes:study", "must return a RunConfig"),
        ("./nowhere.py:mine", "is not a file"),
    ],
)
def test_wrong_code_is_one_sentence(recipe: str, said: str, site: Path) -> None:
    with pytest.raises(UserError, match=said) as raised:
        resolve_recipe(recipe)
    assert "\n" not in str(raised.value)


def test_a_class_that_has_inherited_its_kind_is_refused(tmp_path: Path) -> None:
    """The config of the run holds the kind alone, so the other class would be built in its place."""
    (tmp_path / "derived.py").write_text(
        "from configs import debug\n"
        "from trainer.objectives import NTXentConfig\n"
        "from trainer.optim.optimizers import AdamConfig\n"
        "class Loss(NTXentConfig): pass\n"
        "class Optimizer(AdamConfig): pass\n"
        "def loss(): return debug.image().model_copy(update={'objective': Loss()})\n"
        "def optimizer(): return debug.image().model_copy(update={'optimizer': Optimizer()})\n"
    )
    with on_path(tmp_path):
        with pytest.raises(UserError, match="derived:Loss in the section objective"):
            resolve_recipe("derived:loss")
        with pytest.raises(UserError, match="derived:Optimizer in the section optimizer"):
            resolve_recipe("derived:optimizer")


@pytest.mark.parametrize("name", ["seaside_triplet", "nt_xent"])
def test_a_name_that_two_classes_claim_is_refused(name: str, site: Path) -> None:
    add_distribution(site, "harbour", "1.0", {"overlay.objectives": {name: "harbour.losses:Loss"}})
    with on_path(site), pytest.raises(UserError, match="both claim the name"):
        resolve_recipe("debug:image", [f"objective.kind={name}"])


def test_reading_a_config_imports_nothing(tmp_path: Path) -> None:
    (tmp_path / "a_trap.py").write_text(f"open({str(tmp_path / 'sprung')!r}, 'w')\n")
    values = resolve_recipe("debug:image").model_dump(mode="json")
    (tmp_path / "config.json").write_text(json.dumps(values | {"objective": {"kind": "a_trap:Loss"}}))
    with on_path(tmp_path), pytest.raises(UserError, match="registered by --code FILE"):
        read_config(tmp_path / "config.json")
    assert not (tmp_path / "sprung").exists()


# A run.


@pytest.mark.process
def test_a_run_goes_through_every_command_that_gets_its_code(
    mine_py: Path, data: Path, tmp_path: Path, run: Callable[..., Done], caplog: pytest.LogCaptureFixture
) -> None:
    run_dir = RunDir(tmp_path / "run")
    words = ["--config", "debug:image", *settings(data, num_epochs=1), "--set", "objective.kind=scaled"]
    code = ["--code", mine_py]
    train = [launch.train, *words, "--run-dir", run_dir.path]
    assert run(launch.train, *words, *code, "--plan").status == 0
    assert run(*train, *code).status == 0
    assert list(run_dir.read_provenance()["starts"][-1]["own_code"]) == ["mine"]
    readers: list[tuple[object, list[str | Path]]] = [
        (trainer.probe, ["--set", "views=none", "--set", "num_epochs=1"]),
        (trainer.export, ["--out", tmp_path / "encoder.safetensors"]),
        (trainer.report, ["--out", tmp_path / "r.html"]),
    ]
    for command, more in readers:
        assert run(command, run_dir.path, *more, *code).status == 0, command
    assert list(read_result(next(run_dir.probes(4).glob("base*.json"))).own_code) == ["mine"]
    load_encoder(tmp_path / "encoder.safetensors")
    with mine_py.open("a") as file:
        file.write("# changed\n")
    for command, more in readers[:2]:
        caplog.clear()
        assert run(command, run_dir.path, *more, *code).status == 0
        assert "the code of mine has changed since the training" in caplog.text
    done = run(*train, *code)
    assert (done.status, done.stderr.count("\n")) == (2, 1)
    (name,) = re.findall(r"the code of mine .* has changed.*--accept-code (\S+)", done.stderr)
    assert run(*train, *code, "--accept-code", "mine:000000000000").status == 2
    assert run(*train, *code, "--accept-code", name).status == 0


@pytest.mark.process
def test_changed_code_of_an_online_overlay_is_noticed(site: Path, tmp_path: Path, run: Callable[..., Done]) -> None:
    """No section of the config names it, but it draws each sample anew."""
    data, run_dir = tmp_path / "waves", tmp_path / "run"
    for split in ("train", "test"):
        build_dataset("procedural_waves", data / split, split=split, overlay="online", limit=64, num_workers=1)
    command = ["--config", "debug:image", *settings(data, num_epochs=1), "--set", "data.overlay=online"]
    assert run(launch.train, *command, "--run-dir", run_dir).status == 0
    assert list(RunDir(run_dir).read_provenance()["starts"][-1]["own_code"]) == ["seaside"]
    with (site / "seaside" / "overlays.py").open("a") as file:
        file.write("\n# changed\n")
    again = run(launch.train, *command, "--run-dir", run_dir)
    assert again.status == 2
    assert "the code of seaside" in again.stderr


def test_a_step_with_code_of_ones_own_is_recorded_only_on_request(site: Path) -> None:
    """It may draw from Python's own generator, for example, and a replay would repeat that draw."""
    config = resolve_recipe("debug:image", ["encoder.kind=seaside_patches"])
    assert why_not_recorded(config, device=torch.device("cuda"), num_ranks=1) is None
    assert "code of seaside takes part" in str(why_not_by_default(config))


def test_a_copy_of_the_code_for_jobs_holds_what_is_not_installed(
    site: Path, mine_py: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = resolve_recipe(MINE)
    assert own_packages(config) == ["seaside"]
    assert own_packages(resolve_recipe("debug:image")) == []
    import_code([str(mine_py)])
    files = files_to_copy([config, resolve_recipe("debug:image")])
    assert {"seaside/__init__.py", "seaside/losses.py", "mine.py"} <= files.keys()
    assert read_snapshot(own_files=files).files["mine.py"] == mine_py.read_bytes()
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"purelib": str(site), "platlib": str(site)})
    assert files_to_copy([config]).keys() == {"mine.py"}


@pytest.mark.process
def test_the_processes_of_a_job_import_the_code(mine_py: Path, data: Path, tmp_path: Path) -> None:
    """They are others, which see the copy of the code and not the directory of the file."""
    words: list[str | Path] = [sys.executable, "launch/slurm.py", "--executor", "local"]
    words += ["--config", f"{mine_py}:big", *settings(data, num_epochs=1), "--run-dir", tmp_path / "run"]
    done = run_python(words, cwd=REPOSITORY, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, done.stderr
    (start,) = RunDir(tmp_path / "run").read_provenance()["starts"]
    assert start["own_code"].keys() == {"mine"}
    (copy,) = (tmp_path / "run" / "code").glob("*/mine.py")
    assert copy.read_text() == MINE_PY


# Data.


WAVES_PY = """
from data_pipeline.overlays.registry import NAMES
from seaside.overlays import Waves
NAMES.register("swell")(Waves)
"""


def test_a_dataset_of_code_is_built_and_read_with_that_code(tmp_path: Path, run: Callable[..., Done]) -> None:
    site = install(tmp_path / "site", entry_points={"console_scripts": {}})
    (site / "waves.py").write_text(WAVES_PY)
    words = ["--limit", "20", "--overlay", "online", "--out", tmp_path / "data", "--workers", "1"]
    code = ["--code", site / "waves.py"]
    with on_path(site):
        assert run(data_pipeline.__main__, "build", "procedural_swell", *words).status == 2
        assert run(data_pipeline.__main__, "build", "procedural_swell", *words, *code).status == 0
        assert run(data_pipeline.__main__, "verify", tmp_path / "data").status == 0
    with on_path(site):
        done = run(data_pipeline.__main__, "preview", tmp_path / "data", "--out", tmp_path / "grid.png")
        assert done.status == 2
        assert "--code FILE" in done.stderr
        assert run(data_pipeline.__main__, "verify", tmp_path / "data").status == 2
        assert run(data_pipeline.__main__, "verify", tmp_path / "data", *code).status == 0


# The page.


@pytest.mark.process
def test_every_block_of_the_page_works_in_an_empty_folder(
    tmp_path: Path, run: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (REPOSITORY / "docs" / "own-code.md").read_text()
    programs = {
        "-m data_pipeline": data_pipeline.__main__,
        "-m trainer.probe": trainer.probe,
        "-m trainer.report": trainer.report,
        "$REPO/launch/train.py": launch.train,
    }
    monkeypatch.chdir(tmp_path)
    said = []
    with on_path():
        for language, block in re.findall(r"^ *```(\w+)\n(.*?)^ *```", page, flags=re.DOTALL | re.MULTILINE):
            lines = inspect.cleandoc(block).splitlines()
            if language in {"python", "yaml"}:
                Path(lines[0].removeprefix("# ")).write_text("\n".join(lines) + "\n")
            for line in lines if language == "bash" else ():
                name = next((name for name in programs if line.startswith(f"python {name} ")), None)
                assert name is not None, line
                done = run(programs[name], *shlex.split(line.removeprefix(f"python {name} ")))
                assert done.status == 0, done.stderr
                said.append(done.stdout)
    assert len(said) == 9
    assert "label_base" in said[6]  # of the trained mobile
    assert re.search(r"objective\.spread_weight +2\.0 +\./recipes\.py:spread", said[7])
    assert re.search(r"objective\.spread_weight +0\.5 +mine\.yaml", said[8])
    assert RunDir(Path("runs/spread")).report.is_file()
    assert json.loads(Path("runs/spread/config.json").read_text())["objective"]["spread_weight"] == 3
