"""Code of another package: found by import path, entry point, file or YAML, and treated as that of this project."""

from __future__ import annotations

import inspect
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import data_pipeline.__main__
import launch.slurm
import launch.train
import trainer.analyze
import trainer.export
import trainer.probe
import trainer.replay
import trainer.report
from configs import describe_recipes, explain, resolve_recipe, resolve_study
from data_pipeline.building.build import build_dataset
from data_pipeline.building.catalogue import open_picture_overlay
from data_pipeline.building.index_tars import DrawnOverlay, make_index
from data_pipeline.building.tar_scan import Fields
from data_pipeline.core import errors
from data_pipeline.core.errors import UserError
from data_pipeline.core.imports import import_object
from data_pipeline.core.kinds import check_kinds
from data_pipeline.core.schema import difference
from data_pipeline.overlays.registry import find_overlay
from data_pipeline.storage.manifest import INDEX_NAME
from data_pipeline.storage.store import SampleStore
from launch.rank import train_on
from launch.snapshot import read_snapshot
from tests.commands import Done, call
from tests.nursery import PythonProcess
from tests.own_package import add_distribution, install, on_path
from tests.processes import kill_tree
from tests.real_data import REPOSITORY
from tests.tiny_data import write_tiny_pair
from tests.trainer.probed_runs.test_probe_command import make_run
from tests.trainer.test_tars import write_tars
from trainer.config import RunConfig, read_config, read_run_config
from trainer.distributed.engines.engine import ENGINES
from trainer.exports.encoder import save_encoder
from trainer.models import build_encoder, load_encoder
from trainer.models.encoder import ENCODERS
from trainer.objectives.objective import OBJECTIVES
from trainer.own_code import check_same_code, files_to_copy, own_packages, read_own_code
from trainer.probes.result import read_result
from trainer.recorded_step import why_not_by_default, why_not_recorded
from trainer.run_dir import RunDir
from trainer.views.policy import VIEWS

MINE = "seaside.recipes:mine"
OWN_KINDS = {
    "views": "seaside.views:LightConfig",
    "encoder": "seaside.encoders:PatchesConfig",
    "objective": "seaside.losses:TripletConfig",
    "engine": "seaside.engines:CalmConfig",
}


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
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    def command(module: object, *arguments: str | Path) -> Done:
        return call(module.main, *arguments, monkeypatch=monkeypatch, capsys=capsys)  # type: ignore[attr-defined]

    return command


# Recipes from outside.


def test_a_recipe_of_another_package_is_a_recipe(site: Path, tmp_path: Path) -> None:
    config = resolve_recipe(MINE, ["objective.margin=0.3"])
    assert {name: getattr(config, name).kind for name in OWN_KINDS} == OWN_KINDS
    assert config.model_dump()["objective"] == {"kind": "seaside.losses:TripletConfig", "margin": 0.3}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config.model_dump(mode="json")))
    assert read_config(path) == config
    assert resolve_recipe(str(path)) == config
    (line,) = [line for line in explain(MINE, ["objective.margin=0.3"]).splitlines() if "margin" in line]
    assert line.split() == ["objective.margin", "0.3", "--set"]
    (line,) = [line for line in explain(MINE).splitlines() if line.startswith("views.kind")]
    assert line.split() == ["views.kind", "seaside.views:LightConfig", MINE]


def test_a_study_of_another_package_is_a_study(site: Path) -> None:
    runs = resolve_study("seaside.recipes:study", ["num_epochs=1"])
    assert [(run.name, run.num_epochs) for run in runs] == [("seaside-0.2", 1), ("seaside-0.8", 1)]


def test_the_list_has_the_recipes_that_other_packages_name(site: Path) -> None:
    said = describe_recipes()
    assert re.search(r"^  seaside\.recipes:mine +Everything of our own, on the data of debug:image\.$", said, re.M)
    assert "_private" not in said


@pytest.mark.parametrize("kind", ["seaside.losses:Triplet", "seaside.losses:TripletConfig"])
def test_a_kind_of_another_package_is_set_like_any_other(kind: str, site: Path) -> None:
    config = resolve_recipe("debug:image", [f"objective.kind={kind}", "objective.margin=2"])
    assert config.objective.model_dump() == {"kind": "seaside.losses:TripletConfig", "margin": 2.0}
    again = resolve_recipe("debug:image", [f"objective={{kind: {kind}, margin: 2}}"])
    assert again == config


def test_a_name_of_an_entry_point_is_set_like_any_other(site: Path, tmp_path: Path) -> None:
    config = resolve_recipe("debug:image", ["objective.kind=seaside_triplet"])
    assert config.objective.model_dump() == {"kind": "seaside_triplet", "margin": 0.5}
    with pytest.raises(UserError, match=r'objective\.kind is "seaside_triplex"; did you mean "seaside_triplet"\?'):
        resolve_recipe("debug:image", ["objective.kind=seaside_triplex"])


def test_a_file_with_a_recipe_needs_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "beside.py").write_text("MARGIN = 0.7\n")
    (tmp_path / "my_recipes.py").write_text(
        "from beside import MARGIN\n"
        "from configs import debug\n"
        "from trainer.config import RunConfig\n"
        "def big():\n"
        "    return debug.image().model_copy(update={'name': 'big', 'global_batch_size': 64, 'num_epochs': 3})\n"
    )
    with on_path():
        assert resolve_recipe("./my_recipes.py:big").global_batch_size == 64
        assert resolve_recipe(f"{tmp_path}/my_recipes.py:big", ["name=x"]).name == "x"
        assert resolve_recipe("my_recipes:big").num_epochs == 3  # a module in the working directory


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
    assert origins["views.budget"] == origins["objective.kind"] == path
    assert origins["global_batch_size"] == "viewmaker:digits"
    assert origins["objective.kind"] == path


def test_a_base_may_be_another_file_beside_it(tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    write(tmp_path / "first.yaml", "{base: 'debug:image', seed: 3, probe: {num_epochs: 7}}")
    second = write(tmp_path / "more" / "second.yaml", "{base: ../first.yaml, probe: {seed: 4}}")
    config = resolve_recipe(second)
    assert (config.seed, config.probe.num_epochs, config.probe.seed) == (3, 7, 4)
    origins = {line.split()[0]: line.split()[-1] for line in explain(second).splitlines()}
    assert origins["probe.num_epochs"].endswith("first.yaml")
    assert origins["probe.seed"] == second


def test_a_section_that_the_base_lacks_starts_from_its_defaults(tmp_path: Path) -> None:
    path = write(
        tmp_path / "mine.yaml", "{base: 'debug:image', views: {kind: viewmaker}, adversary: {update: alternating}}"
    )
    config = resolve_recipe(path)
    assert config.adversary is not None
    assert config.adversary.update == "alternating"


def test_a_base_takes_the_name_of_the_data(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.yaml", "{base: 'simclr:folder', data: {train_dir: data/birds/train}}")
    assert resolve_recipe(path).name == "simclr-birds"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{base: mine.yaml}", r"mine\.yaml is its own base \(.*mine\.yaml -> .*mine\.yaml\); leave out one of these"),
        ("{base: other.yaml}", r"mine\.yaml is its own base \(.*mine\.yaml -> .*other\.yaml -> .*mine\.yaml\); leave"),
        ("{base: none.yaml}", r"cannot read the config .*none\.yaml: No such file"),
        ("{base: 3}", r"mine\.yaml: base is 3; it must be the name of a recipe or the path of a config file"),
        ("{base: 'simclr:digts'}", r"mine\.yaml: base is simclr:digts, which is not a recipe of this project"),
        ("{base: 'debug:image', sed: 3}", r'unknown key "sed"; did you mean "seed"\?'),
        (
            "{base: 'debug:image', views: {hu: 3}}",
            r'unknown key "views\.hu" of kind "expert_image"; did you mean "hue"',
        ),
        ("{base: 'debug:image', seed: {a: {b: 1}}}", r"seed is .*; it must be a whole number"),
    ],
)
def test_a_file_whose_base_is_wrong_is_one_sentence(text: str, said: str, tmp_path: Path) -> None:
    path = write(tmp_path / "mine.yaml", text)
    write(tmp_path / "other.yaml", "{base: mine.yaml}")
    with pytest.raises(UserError, match=said) as raised:
        resolve_recipe(path)
    assert "\n" not in str(raised.value)


# Bad input.


@pytest.mark.parametrize(
    ("recipe", "override", "said"),
    [
        ("nowhere.recipes:mine", None, 'needs the module "nowhere", which is not found; install its package, or put'),
        ("seaside.recepies:mine", None, 'needs the module "seaside.recepies", which is not found'),
        (
            "seaside.recipes:mne",
            None,
            'the module seaside.recipes of seaside.recipes:mne has no "mne"; did you mean "min',
        ),
        ("seaside.recipes:RunConfig", None, "is not a function without arguments, so it is no recipe"),
        ("seaside.recipes:study", None, "the recipe seaside.recipes:study returns list; it must return a RunConfig"),
        ("./nowhere.py:mine", None, "nowhere.py is not a file; name a Python file and a function in it"),
        ("simclr:digts", None, 'unknown recipe "simclr:digts"; did you mean "simclr:digits"?'),
        ("a b:c", None, 'unknown recipe "a b:c"'),
        ("debug:image", "objective.kind=nowhere:Loss", 'needs the module "nowhere", which is not found'),
        ("debug:image", "objective.kind=seaside.losses:Tripel", 'has no "Tripel"; did you mean "Triplet"?'),
        ("debug:image", "objective.kind=seaside.losses:F", "has no config, so it is no objective; name a subclass of"),
        ("debug:image", "objective.kind=seaside.views:LightConfig", "has no config, so it is no objective"),
        ("debug:image", "objective.kind='seaside.views:'", 'the module seaside.views of seaside.views: has no ""'),
        ("debug:image", "objective.kind=9:Loss", "9:Loss is not an import path; write it as package.module:Name"),
        ("debug:image", "objective.kind=bad:Open", "has frozen=False, but the config of a run must be frozen and"),
        ("debug:image", "objective.kind=bad:Loose", "has extra='allow', but the config of a run must be frozen and"),
        ("debug:image", "objective.kind=bad:Shadow", "declares the kind nt_xent, so it cannot be named bad:Shadow"),
        ("bad:with_open_config", None, "has frozen=False, but the config of a run must be frozen and"),
        (
            MINE,
            "objective.margn=3",
            'unknown key "objective.margn" of kind "seaside.losses:TripletConfig"; did you mean',
        ),
        (MINE, "objective.margin=-1", "objective.margin is -1; it must be at least"),
        (MINE, "adversary={}", 'views of kind "seaside.views:LightConfig" take no section `adversary`'),
    ],
)
def test_wrong_code_is_one_sentence(recipe: str, override: str | None, said: str, site: Path) -> None:
    (site / "bad.py").write_text(
        "from typing import Literal\n"
        "from configs import debug\n"
        "from trainer.objectives import BaseObjectiveConfig\n"
        "class Open(BaseObjectiveConfig, frozen=False): pass\n"
        "class Loose(BaseObjectiveConfig, extra='allow'): pass\n"
        "class Shadow(BaseObjectiveConfig):\n"
        "    kind: Literal['nt_xent'] = 'nt_xent'\n"
        "def with_open_config():\n"
        "    values = {name: getattr(debug.image(), name) for name in type(debug.image()).model_fields}\n"
        "    return type(debug.image()).model_validate(values | {'objective': Open()})\n"
    )
    with pytest.raises(ValueError, match=re.escape(said)) as raised:  # pydantic's own, if a recipe raises it
        resolve_recipe(recipe, [] if override is None else [override])
    if recipe != "bad:with_open_config":
        assert isinstance(raised.value, UserError)
        assert "\n" not in str(raised.value)


DERIVED = """
from configs import debug
from trainer.config import RunConfig
from trainer.models import ResNetConfig
from trainer.objectives import NTXentConfig
from trainer.optim.optimizers import AdamConfig
from trainer.views import ExpertImageConfig
class Loss(NTXentConfig): pass
class MoreSettings(NTXentConfig):
    margin: float = 0.5
class Views(ExpertImageConfig): pass
class Network(ResNetConfig): pass
class Named(NTXentConfig):
    kind: str = ""
class Optimizer(AdamConfig): pass
def loss(): return RunConfig.model_validate(debug.image().model_dump() | {"objective": Loss()})
def more(): return RunConfig.model_validate(debug.image().model_dump() | {"objective": MoreSettings()})
def views(): return debug.image().model_copy(update={"views": Views()})
def encoder(): return debug.image().model_copy(update={"encoder": Network(kind="resnet10", embedding_size=16)})
def named(): return debug.image().model_copy(update={"objective": Named()})
def optimizer(): return debug.image().model_copy(update={"optimizer": Optimizer()})
def study(): return [views()]
"""


@pytest.fixture
def derived(tmp_path: Path) -> Iterator[None]:
    """Put a module on the path whose classes are derived from those of this project."""
    (tmp_path / "derived.py").write_text(DERIVED)
    with on_path(tmp_path):
        yield


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        ("loss", 'derived:Loss has the kind "nt_xent", which names trainer.objectives.nt_xent:NTXentConfig'),
        ("more", 'derived:MoreSettings has the kind "nt_xent", which names trainer.objectives.nt_xent:NTXentConfig'),
        (
            "views",
            'derived:Views has the kind "expert_image", which names trainer.views.expert_image:ExpertImageConfig',
        ),
        ("optimizer", "the section optimizer has the class derived:Optimizer, which is derived from AdamConfig, and"),
        ("encoder", 'derived:Network has the kind "resnet10", which names trainer.models.encoder:ResNetConfig'),
    ],
)
@pytest.mark.usefixtures("derived")
def test_a_class_that_has_the_kind_of_another_one_is_refused(recipe: str, said: str) -> None:
    """The config of the run holds the kind alone, so the other class was built in its place."""
    with pytest.raises(UserError, match=re.escape(said)):
        resolve_recipe(f"derived:{recipe}")


@pytest.mark.usefixtures("derived")
def test_a_study_with_a_class_that_has_the_kind_of_another_one_is_refused() -> None:
    with pytest.raises(UserError, match="derived:Views has the kind"):
        resolve_study("derived:study")


@pytest.mark.usefixtures("derived")
def test_a_class_derived_from_another_one_with_a_kind_of_its_own_is_used() -> None:
    assert type(resolve_recipe("derived:named").objective).__name__ == "Named"
    assert resolve_recipe("debug:image", ["objective.kind=derived:Named"]).objective.kind == "derived:Named"


@pytest.mark.usefixtures("derived")
def test_an_encoder_whose_class_has_the_kind_of_another_one_is_not_exported(tmp_path: Path) -> None:
    """`load_encoder` would build the other class from the file."""
    network = import_object("derived:Network")
    encoder = build_encoder(network(kind="resnet10", width=4, mean=(0.5,) * 3, std=(0.25,) * 3))
    with pytest.raises(UserError, match='derived:Network has the kind "resnet10"'):
        save_encoder(encoder, tmp_path / "encoder.safetensors")


def test_a_name_that_no_entry_point_has_is_refused(site: Path) -> None:
    from seaside.losses import NamedTripletConfig  # type: ignore[import-not-found]

    for file in site.glob("*.dist-info/entry_points.txt"):
        file.unlink()
    with on_path(site), pytest.raises(UserError, match="which names no class of an entry point in the group overlay"):
        check_kinds(resolve_recipe("debug:image").model_copy(update={"objective": NamedTripletConfig()}))


def test_a_name_that_two_packages_claim_is_refused(site: Path) -> None:
    add_distribution(
        site, "harbour", "1.0", {"overlay.objectives": {"seaside_triplet": "seaside.losses:TripletConfig"}}
    )
    with on_path(site), pytest.raises(UserError, match=r"the packages .* both have an entry point \"seaside_triplet\""):
        resolve_recipe("debug:image", ["objective.kind=seaside_triplet"])


def test_a_name_that_hides_one_of_this_project_is_refused(site: Path) -> None:
    add_distribution(site, "harbour", "1.0", {"overlay.objectives": {"nt_xent": "seaside.losses:TripletConfig"}})
    with on_path(site), pytest.raises(UserError, match=r'package harbour has an entry point "nt_xent" .* is built in'):
        resolve_recipe("debug:image")


def test_a_package_that_lacks_a_package_of_its_own_shows_where(site: Path) -> None:
    (site / "broken.py").write_text("import nowhere_at_all\n")
    with pytest.raises(ModuleNotFoundError, match="nowhere_at_all"):
        resolve_recipe("broken:mine")


# Files of strangers.


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Put a module on the path that leaves a file if it is imported, and return that file."""
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "a_trap.py").write_text(
        f"open({str(tmp_path / 'sprung')!r}, 'w').close()\n"
        "from trainer.objectives import BaseObjectiveConfig, NTXentConfig\n"
        "from trainer.objectives.nt_xent import NTXent\n"
        "class Loss(BaseObjectiveConfig):\n"
        "    margin: float = 0.5\n"
        "    def build(self, given):\n"
        "        return NTXent(NTXentConfig())\n"
        "def recipe():\n"
        "    from configs import debug\n"
        "    return debug.image()\n"
    )
    with on_path(tmp_path / "there"):
        yield tmp_path / "sprung"


def strangers_config(path: Path, data: Path) -> Path:
    values = resolve_recipe("debug:image").model_dump(mode="json")
    values["data"] |= {"train_dir": str(data / "train"), "test_dir": str(data / "test")}
    path.write_text(json.dumps(values | {"objective": {"kind": "a_trap:Loss", "margin": 0.1}}))
    return path


def test_reading_a_file_imports_nothing(trap: Path, data: Path, tmp_path: Path) -> None:
    config = read_config(strangers_config(tmp_path / "config.json", data))
    assert not trap.exists()
    assert config.objective.model_dump() == {"kind": "a_trap:Loss", "margin": 0.1}
    assert difference(config, resolve_recipe("debug:image")) != []
    assert RunConfig.model_validate(config.model_dump()) == config
    assert config.model_copy(update={"seed": 1}) != config


@pytest.mark.parametrize("option", [["--explain"], ["--plan"], []])
def test_a_config_file_imports_nothing_until_it_is_allowed(
    option: list[str], trap: Path, data: Path, tmp_path: Path, run: Callable[..., Done]
) -> None:
    path = strangers_config(tmp_path / "config.json", data)
    done = run(launch.train, "--config", path, "--run-dir", tmp_path / "run", *option)
    assert (done.status, trap.exists()) == (2, False)
    assert "the objective a_trap:Loss is code that a file names, and reading a file imports no code" in done.stderr
    assert done.stderr.count("\n") == 1
    if option:
        done = run(launch.train, "--config", path, "--run-dir", tmp_path / "run", *option, "--allow-code")
        assert (done.status, trap.exists()) == (0, True), done.stderr


@pytest.mark.parametrize("base", ["a_trap:recipe", "{there}/a_trap.py:recipe"])
def test_the_base_of_a_file_imports_nothing_until_it_is_allowed(base: str, trap: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "mine.yaml", f"base: {base.format(there=tmp_path / 'there')}\n")
    with pytest.raises(UserError, match="which is not a recipe of this project, and reading a file imports no other"):
        resolve_recipe(path)
    assert not trap.exists()
    resolve_recipe(path, allow_code=True)
    assert trap.exists()


def test_what_is_typed_is_not_asked_about(trap: Path, data: Path, tmp_path: Path) -> None:
    path = strangers_config(tmp_path / "config.json", data)
    assert resolve_recipe(str(path), ["objective.kind=a_trap:Loss"]).objective.model_dump()["margin"] == 0.1
    assert trap.exists()


@pytest.mark.process
def test_a_strangers_run_is_reported_without_its_code_and_probed_only_with_leave(
    trap: Path, data: Path, tmp_path: Path, run: Callable[..., Done]
) -> None:
    run_dir = RunDir(tmp_path / "run")
    assert run(launch.train, "--config", "debug:image", *settings(data), "--run-dir", run_dir.path).status == 0
    values = json.loads(run_dir.config.read_text())
    values["objective"] = {"kind": "a_trap:Loss", "margin": 0.1}
    values["encoder"]["kind"] = "a_trap:Encoder"
    run_dir.config.write_text(json.dumps(values))
    assert run(trainer.report, run_dir.path, "--out", tmp_path / "r.html").status == 0
    assert "a_trap:Loss" in (tmp_path / "r.html").read_text()
    for command in (trainer.probe, trainer.export):
        out = ["--out", tmp_path / "encoder.safetensors"] if command is trainer.export else []
        done = run(command, run_dir.path, *out)
        assert done.status == 2
        assert "the encoder a_trap:Encoder is code that a file names" in done.stderr
    assert not trap.exists()
    done = run(trainer.probe, run_dir.path, "--allow-code")
    assert 'the module a_trap of a_trap:Encoder has no "Encoder"' in done.stderr


def test_a_run_of_a_package_that_is_not_here_is_reported(
    data: Path, tmp_path: Path, run: Callable[..., Done], site: Path
) -> None:
    run_dir = make_run(tmp_path / "run", data, objective={"kind": "seaside_triplet", "margin": 0.5})
    values = json.loads(run_dir.config.read_text())
    values["encoder"]["kind"] = "a_net_of_seaside"
    run_dir.config.write_text(json.dumps(values))
    assert run(trainer.report, run_dir.path, "--out", tmp_path / "r.html").status == 0
    assert "a_net_of_seaside" in (tmp_path / "r.html").read_text()
    done = run(trainer.probe, run_dir.path)
    assert done.status == 2
    assert "error: the encoder a_net_of_seaside is of a package that is not installed here; install" in done.stderr
    with pytest.raises(UserError, match=r'encoder\.kind is "a_net_of_seaside"; valid are: '):
        resolve_recipe(str(run_dir.config))


# A run.


@pytest.mark.process
def test_a_run_of_another_package_goes_through_every_command(
    site: Path, data: Path, tmp_path: Path, run: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = RunDir(tmp_path / "run")
    flags = ["--config", MINE, *settings(data)]
    done = run(launch.train, *flags, "--plan")
    assert done.status == 0, done.stderr
    assert "parameters, objective" in done.stdout
    done = run(launch.train, *flags, "--run-dir", run_dir.path)
    assert done.status == 0, done.stderr
    (start,) = run_dir.read_provenance()["starts"]
    assert start["own_code"]["seaside"]["version"] == "0.3.1"
    assert {"train/scale", "train/alignment"} <= run_dir.read_metrics()[-1].keys()
    assert (run_dir.checkpoint(8) / "objective.safetensors").is_file()
    for command, more in (
        (trainer.probe, ["--allow-code"]),
        (trainer.export, ["--out", tmp_path / "encoder.safetensors", "--allow-code"]),
        (trainer.report, ["--out", tmp_path / "r.html"]),
    ):
        done = run(command, run_dir.path, *more)
        assert done.status == 0, done.stderr
    assert "seaside.losses:TripletConfig" in (tmp_path / "r.html").read_text()
    encoder = load_encoder(tmp_path / "encoder.safetensors")
    pictures = torch.rand(3, 3, 16, 16)
    torch.testing.assert_close(encoder.pooled(pictures), load_encoder(run_dir.path).pooled(pictures))
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    done = run(launch.slurm, *flags, "--run-dir", tmp_path / "job", "--dry-run")
    assert done.status == 0, done.stderr
    assert "/code/" in done.stdout


@pytest.mark.process
def test_a_setting_of_ones_own_class_is_swept(site: Path, data: Path, tmp_path: Path, run: Callable[..., Done]) -> None:
    flags = ["--config", MINE, *settings(data), "--set", "num_epochs=1", "--study-dir", tmp_path / "sweep"]
    done = run(launch.train, *flags, "--sweep", "objective.margin=0.1,0.3,0.5", "--sweep", "seed=0,1")
    assert done.status == 0, done.stderr
    runs = sorted((tmp_path / "sweep").glob("*-margin=*"))
    assert len(runs) == 6
    assert all("finished_step" in RunDir(path).read_provenance() for path in runs)
    done = run(trainer.report, tmp_path / "sweep", "--out", tmp_path / "r.html")
    assert done.status == 0, done.stderr
    assert "objective.margin" in (tmp_path / "r.html").read_text()


@pytest.mark.process
def test_code_that_has_changed_since_the_checkpoint_is_noticed(
    site: Path, data: Path, tmp_path: Path, run: Callable[..., Done]
) -> None:
    run_dir = RunDir(tmp_path / "run")
    train = [launch.train, "--config", MINE, *settings(data), "--run-dir", run_dir.path]
    assert run(*train).status == 0
    assert run(*train).status == 0  # the same code: there is nothing left to do
    with (site / "seaside" / "losses.py").open("a") as file:
        file.write("# changed\n")
    done = run(*train)
    assert (done.status, done.stderr.count("\n")) == (2, 1)
    said = r"the code of seaside \(version 0\.3\.1, source \w{12}\) with which .* was trained up to step 8 has changed "
    said += r"\(version 0\.3\.1, source \w{12}\); put it back, pass --accept-code seaside:\w{12} to go on with the new"
    assert re.search(said, done.stderr)
    name = re.findall(r"--accept-code (\S+)", done.stderr)[0]
    assert run(*train, "--accept-code", "seaside:000000000000").status == 2
    assert run(*train, "--accept-code", name).status == 0


@pytest.mark.process
def test_changed_code_of_an_online_overlay_is_noticed(site: Path, tmp_path: Path, run: Callable[..., Done]) -> None:
    """No section of the config names it, but it draws each sample anew."""
    data, run_dir = tmp_path / "waves", tmp_path / "run"
    for split in ("train", "test"):
        build_dataset("procedural_waves", data / split, split=split, overlay="online", limit=64, num_workers=1)
    command = ["--config", "debug:image", *settings(data, num_epochs=1), "--set", "data.overlay=online"]
    assert run(launch.train, *command, "--run-dir", run_dir).status == 0
    assert list(RunDir(run_dir).read_provenance()["starts"][-1]["own_code"]) == ["seaside"]
    assert run(trainer.probe, run_dir, "--views", "none", "--epochs", "1").status == 0
    path = next(RunDir(run_dir).probes(4).glob("base*.json"))
    assert list(read_result(path).own_code) == ["seaside"]
    with (site / "seaside" / "overlays.py").open("a") as file:
        file.write("\n# changed\n")
    again = run(launch.train, *command, "--run-dir", run_dir)
    assert again.status == 2
    assert "the code of seaside (version 0.3.1, source" in again.stderr
    analysed = run(trainer.analyze, "views", run_dir)
    assert "warning: the code of seaside has changed since the training" in analysed.stderr


@pytest.mark.process
def test_commands_that_read_a_run_warn_of_code_that_has_changed_since_its_training(
    site: Path, data: Path, tmp_path: Path, run: Callable[..., Done]
) -> None:
    run_dir = RunDir(tmp_path / "run")
    few = ["--set", "num_epochs=1", "--set", "probe.num_epochs=1"]
    assert run(launch.train, "--config", MINE, *settings(data), *few, "--run-dir", run_dir.path).status == 0
    said = f"warning: the code of seaside has changed since the training of {run_dir.path}; the results are those of"
    probe = (trainer.probe, [run_dir.path, "--allow-code", "--missing"])
    commands = [
        (trainer.export, [run_dir.path, "--allow-code", "--out", tmp_path / "encoder.safetensors"]),
        (trainer.analyze, ["alignment", run_dir.path, "--allow-code"]),
        (trainer.replay, [run_dir.path, "--allow-code", "--step", "1"]),
    ]
    for command, words in (probe, *commands):
        assert "has changed" not in run(command, *words).stderr
    (result,) = run_dir.all_probes.glob("step_*/base.json")
    trained = run_dir.read_provenance()["starts"][-1]["own_code"]["seaside"]["sha256"]
    assert read_result(result).own_code == {"seaside": trained}
    assert "1 of 1 run(s) are probed already" in run(*(probe[0], *probe[1])).stdout
    with (site / "seaside" / "encoders.py").open("a") as file:
        file.write("# changed\n")
    for command, words in (probe, *commands):
        assert run(command, *words).stderr.count(said) == 1
    assert read_result(result).own_code["seaside"] != trained
    assert "1 of 1 run(s) are probed already" in run(*(probe[0], *probe[1])).stdout


def test_the_terminal_shows_what_ones_own_code_logs(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(errors, "_SHOWN_PACKAGES", set())
    monkeypatch.setattr("launch.rank.train", lambda *_, **__: None)
    train_on(torch.device("cpu"), resolve_recipe(MINE), tmp_path, command="")
    assert {"seaside"} == errors._SHOWN_PACKAGES


def test_a_class_of_the_script_itself_is_refused(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = resolve_recipe(MINE)
    monkeypatch.setattr(type(config.objective), "__module__", "__main__")
    with pytest.raises(UserError, match="TripletConfig is a class of the script that runs, so no later"):
        check_same_code(RunDir(tmp_path), config, step=0, accepted=())


def test_a_step_with_code_of_ones_own_is_recorded_only_on_request(site: Path) -> None:
    """It may draw from Python's own generator, for example, and a replay would repeat that draw."""
    config = resolve_recipe("debug:image", ["encoder.kind=seaside.encoders:PatchesConfig"])
    assert why_not_recorded(config, device=torch.device("cuda"), num_ranks=1) is None
    assert "code of seaside takes part" in str(why_not_by_default(config))


def test_a_copy_of_the_code_for_jobs_holds_what_is_not_installed(site: Path, tmp_path: Path) -> None:
    config = resolve_recipe(MINE)
    assert own_packages(config) == ["seaside"]
    assert read_own_code(config)["seaside"]["version"] == "0.3.1"
    assert own_packages(resolve_recipe("debug:image")) == []
    files = files_to_copy([config, resolve_recipe("debug:image")])
    assert {"seaside/__init__.py", "seaside/losses.py", "seaside/recipes.py"} <= files.keys()
    snapshot = read_snapshot(own_files=files)
    assert snapshot.files["seaside/losses.py"] == (site / "seaside" / "losses.py").read_bytes()
    assert snapshot.sha256 != read_snapshot().sha256


def test_installed_packages_are_not_copied(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"purelib": str(site), "platlib": str(site)})
    assert files_to_copy([resolve_recipe(MINE)]) == {}


@pytest.mark.process
def test_a_run_is_killed_and_goes_on_with_other_ranks(site: Path, data: Path, tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    launchers = {
        1: [sys.executable],
        2: [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
    }
    environment = os.environ | {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}

    def start(num_ranks: int) -> subprocess.Popen[str]:
        command = [*launchers[num_ranks], "launch/train.py", "--config", MINE, "--run-dir", str(run_dir.path)]
        command += settings(data, num_epochs=20)
        return PythonProcess(
            command, cwd=REPOSITORY, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )

    killed = start(2)
    try:
        deadline = time.monotonic() + 120
        while not run_dir.latest.exists():
            assert killed.poll() is None, "it ended by itself"
            assert time.monotonic() < deadline, "there is no checkpoint"
            time.sleep(0.01)
    finally:
        kill_tree(killed)
        killed.communicate()
    again = start(1)
    try:
        _, said = again.communicate(timeout=300)
    finally:
        kill_tree(again)
    assert again.returncode == 0, said
    assert "going on from step" in said
    starts = run_dir.read_provenance()["starts"]
    assert [start["world_size"] for start in starts] == [2, 1]
    assert starts[0]["own_code"] == starts[1]["own_code"]
    assert read_run_config(run_dir).objective.kind == OWN_KINDS["objective"]


MINE_PY = """
from configs import debug
from data_pipeline.core.schema import PositiveFactor
from trainer.config import RunConfig
from trainer.objectives import BaseObjectiveConfig, NTXent, NTXentConfig

class ScaledConfig(BaseObjectiveConfig):
    temperature: PositiveFactor = 0.3

    def build(self, given):
        return NTXent(NTXentConfig(temperature=self.temperature))

def big():
    return RunConfig.model_validate(debug.image().model_dump() | {"name": "big", "objective": ScaledConfig()})
"""


@pytest.mark.process
def test_the_ranks_of_a_job_find_the_file_of_a_recipe(
    data: Path, tmp_path: Path, run: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are other processes, which see the copy of the code and not the directory of the file."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "mine.py").write_text(MINE_PY)
    flags = ["--config", f"{tmp_path}/mine.py:big", *settings(data, num_epochs=1), "--run-dir", tmp_path / "run"]
    with on_path(tmp_path):
        done = run(launch.slurm, "--executor", "local", "--tasks-per-node", "2", "--wait", *flags)
    assert done.status == 0, done.stderr
    run_dir = RunDir(tmp_path / "run")
    (start,) = run_dir.read_provenance()["starts"]
    assert (start["world_size"], start["own_code"].keys()) == (2, {"mine"})
    (copy,) = (tmp_path / "run" / "code").glob("*/mine.py")
    assert copy.read_text() == MINE_PY


# Data.


@pytest.mark.parametrize(
    ("dataset", "source", "kind"),
    [
        ("folder_waves", "beaches", "waves"),
        ("folder_seaside.overlays:Waves", "seaside.sources:Beaches", "waves"),
        ("procedural_waves", None, "waves"),
    ],
)
def test_a_dataset_of_another_package_is_built(
    dataset: str, source: str | None, kind: str, site: Path, tmp_path: Path
) -> None:
    choices = {} if source is None else {"source": source}
    build_dataset(dataset, tmp_path / "data", limit=20, overlay="online", num_workers=1, **choices)  # type: ignore[arg-type]
    store = SampleStore(tmp_path / "data")
    assert store.manifest.overlay is not None
    assert store.manifest.overlay.kind == kind
    assert store.manifest.label_names.overlay == ("high", "low")
    assert store.manifest.num_samples == 20


@pytest.mark.parametrize(
    ("dataset", "source", "said"),
    [
        ("procedural_nothing", None, 'unknown dataset "procedural_nothing"'),
        ("procedural_seaside.overlays:Nothing", None, 'has no "Nothing"'),
        ("procedural_seaside.losses:Triplet", None, "seaside.losses:Triplet is no overlay"),
        ("folder", "seaside.losses:Triplet", "seaside.losses:Triplet is no source of pictures; name a class with"),
        ("folder", "beeches", 'folder cannot come from the source "beeches"'),
        ("spoken", "seaside.sources:Beaches", 'spoken cannot come from the source "seaside.sources:Beaches"'),
    ],
)
def test_a_dataset_of_wrong_code_is_one_sentence(
    dataset: str, source: str | None, said: str, site: Path, tmp_path: Path
) -> None:
    choices = {} if source is None else {"source": source}
    with pytest.raises(UserError, match=re.escape(said)):
        build_dataset(dataset, tmp_path / "data", limit=20, num_workers=1, **choices)  # type: ignore[arg-type]


def test_an_overlay_that_only_a_dataset_names_is_not_imported(trap: Path) -> None:
    with pytest.raises(
        UserError, match="the overlay a_trap:Waves is code that a dataset names, and reading data imports"
    ):
        find_overlay("a_trap:Waves")
    assert not trap.exists()


@pytest.fixture(params=["shards", "tars"])
def overlaid(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A dataset with an online overlay of a package that has no entry points. The package is not imported any more."""
    site = install(tmp_path / "site", entry_points={"console_scripts": {}})
    kind, directory = "seaside.overlays:Waves", tmp_path / "data"
    with on_path(site):
        if request.param == "shards":
            build_dataset(f"procedural_{kind}", directory, limit=20, overlay="online", num_workers=1)
        else:
            write_tars_with_overlay(directory, kind)
    with on_path(site):
        yield directory


def write_tars_with_overlay(directory: Path, kind: str) -> None:
    write_tars(directory, 20, sizes=((40, 32),))
    overlay = DrawnOverlay(open_picture_overlay(kind, shape=(3, 32, 32), split="train"), "train")
    make_index(str(directory), directory / INDEX_NAME, fields=Fields(), size=32, overlay=overlay)


def test_an_overlay_of_code_that_is_not_imported_is_not_checked_and_no_problem(
    overlaid: Path, run: Callable[..., Done]
) -> None:
    done = run(data_pipeline.__main__, "verify", overlaid)
    assert (done.status, "to mend it" in done.stderr) == (0, False), done
    *_, said, summary = done.stdout.splitlines()
    assert said.startswith(
        "overlay.safetensors: not checked beyond its hash: the overlay seaside.overlays:Waves is code that the dataset "
        "names, and reading data imports no code"
    )
    assert " is sound (1 part not checked): 20 samples in " in summary
    done = run(data_pipeline.__main__, "verify", overlaid, "--allow-code")
    assert (done.status, "not checked" in done.stdout) == (0, False), done
    assert " is sound: 20 samples in " in done.stdout


def test_reading_an_overlay_of_code_that_is_not_imported_says_what_helps(
    overlaid: Path, tmp_path: Path, run: Callable[..., Done]
) -> None:
    done = run(data_pipeline.__main__, "preview", overlaid, "--out", tmp_path / "grid.png")
    said = "register it by an entry point in the group overlay.overlays and build the dataset by that name"
    assert (done.status, said in done.stderr) == (2, True), done
    assert "commands of data_pipeline take --allow-code" in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["preview", "--out", "grid.png"],
        ["trace", "--batch-size", "10"],
        ["bench", "--batch-size", "10", "--max-workers", "0", "--seconds", "0.01"],
    ],
)
def test_every_command_that_reads_data_imports_an_overlay_on_request(
    words: list[str], overlaid: Path, tmp_path: Path, run: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data_pipeline.tools.bench.WARM_UP_SECONDS", 0.0)
    monkeypatch.chdir(tmp_path)
    command, *options = words
    assert run(data_pipeline.__main__, command, overlaid, *options).status == 2
    done = run(data_pipeline.__main__, command, overlaid, *options, "--allow-code")
    assert done.status == 0, done.stderr


def test_a_damaged_overlay_of_code_that_is_not_imported_is_a_problem(overlaid: Path, run: Callable[..., Done]) -> None:
    path = next(overlaid.rglob("overlay.safetensors"))
    path.write_bytes(path.read_bytes() + b" ")
    done = run(data_pipeline.__main__, "verify", overlaid)
    assert done.status == 1
    assert "is not the file that the manifest names by sha256" in done.stdout


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
    (tmp_path / "my_ssl").mkdir()
    (tmp_path / "my_ssl" / "__init__.py").touch()
    said = []
    with on_path():
        for language, block in re.findall(r"^ *```(\w+)\n(.*?)^ *```", page, flags=re.DOTALL | re.MULTILINE):
            lines = inspect.cleandoc(block).splitlines()
            if language in {"python", "yaml"}:
                Path(lines[0].removeprefix("# ")).write_text("\n".join(lines) + "\n")
            for line in lines if language == "bash" else ():
                name = next((name for name in programs if line.startswith(f"python {name} ")), None)
                assert name is not None or line.startswith(("mkdir", "touch")), line
                if name is not None:
                    done = run(programs[name], *shlex.split(line.removeprefix(f"python {name} ")))
                    assert done.status == 0, done.stderr
                    said.append(done.stdout)
    assert len(said) == 8
    assert re.search(r"objective\.spread_weight +2\.0 +my_ssl\.recipes:spread", said[2])
    assert "objective.off_diagonal_weight" in said[6]
    assert re.search(r"objective\.kind +my_ssl\.losses:SpreadConfig +--set", said[7])
    assert RunDir(Path("runs/spread")).report.is_file()
    assert read_run_config(RunDir(Path("runs/spread"))).objective.model_dump()["spread_weight"] == 3


# One way in.


TABLES = {
    "trainer/objectives/objective.py": OBJECTIVES,
    "trainer/views/policy.py": VIEWS,
    "trainer/models/encoder.py": ENCODERS,
    "trainer/distributed/engines/engine.py": ENGINES,
}
# A view inside another, an analysis of one policy, the engine of a run that says nothing or runs in one process and of
# the modules that FSDP does not cut, and exports to the libraries that have the same encoder.
EXPORTS = {"trainer/exports/model_card.py", "trainer/exports/published_models.py"}
COMPOSED = "trainer/views/composed.py"  # says which of them may be a part of which
NAMED_BY = {
    "ResNetConfig": EXPORTS,
    "TimmConfig": EXPORTS,
    "NTXentConfig": {"trainer/objectives/nt_xent_cycle.py", "trainer/objectives/nt_xent_decoder.py"},
    "WaveformConfig": {"trainer/views/viewmaker.py", COMPOSED},
    "ExpertImageConfig": {
        "trainer/analyses/collision.py",
        "trainer/reports/suppression/published.py",
        "trainer/views/multi_crop.py",
        COMPOSED,
    },
    "RandomMaskConfig": {COMPOSED},
    "ChannelDropoutConfig": {COMPOSED},
    "SpectralConfig": {COMPOSED},
    "ViewmakerConfig": {COMPOSED},
    "DDPConfig": {
        "trainer/config.py",
        "trainer/distributed/engines/fsdp_engine.py",
        "trainer/planning/measure.py",
        "trainer/step_replay.py",
    },
}


@pytest.mark.parametrize("table", TABLES)
def test_a_kind_of_this_project_stands_in_its_file_and_in_one_line_of_its_room(table: str) -> None:
    """So a class is added by a file, a line, and its tests. Its room may make it public."""
    files = [path for top in ("trainer", "launch") for path in (REPOSITORY / top).rglob("*.py")]
    sources = {str(path.relative_to(REPOSITORY)): path.read_text() for path in files}
    for target in set(TABLES[table].values()):
        module, _, config = target.partition(":")
        own = f"{module.replace('.', '/')}.py"
        naming = {path for path, text in sources.items() if re.search(rf"\b{config}\b", text)}
        public = {str(Path(table).with_name("__init__.py"))}
        assert {own, table} <= naming <= {own, table} | public | NAMED_BY.get(config, set()), config
        assert sources[table].count(f'"{target}"') == 1


@pytest.mark.process
def test_the_objectives_import_little_besides_torch() -> None:
    """With an idle processor they take less than a second after torch."""
    code = "import sys, trainer.objectives; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert not {"torchvision", "sklearn", "scipy", "matplotlib", "wandb", "timm"} & set(done.stdout.split())
