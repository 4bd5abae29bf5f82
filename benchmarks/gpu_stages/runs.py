"""Train runs of the papers' studies and read them out: tables of what to run, and the commands that they stand for.

A run is trained by launch/train.py and read out by trainer.probe or trainer.analyze. Each of these pieces is a
measurement of its own. All can be killed at any time: a training goes on from its newest checkpoint, and a readout
begins again; it trains the run again if only another machine has it. Trainings of a few epochs measure the speed of
this commit, and begin anew.
"""

from __future__ import annotations

import functools
import json
import shutil
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks.gpu_stages.data import built
from benchmarks.gpu_stages.session import Outcome, Setting, Stage, Task, call, done_where
from benchmarks.record import rounded
from configs import resolve_study
from trainer.config import RunConfig
from trainer.data import read_manifests
from trainer.planning.plan import bytes_of_data, plan
from trainer.run_dir import RunDir, read_object, write_atomically

_NUM_POINTS: Final = 40  # of the curve of the loss in the record
_LONGEST: Final = 99  # entries of a list, or characters of a text, in the record; the run directory keeps longer ones
_SECONDS_TO_START: Final = 60.0  # without which no training begins


@dataclass(frozen=True)
class Readout:
    """A command that reads a trained run out, the files of the run directory that it writes, and its seconds."""

    command: tuple[str, ...]
    files: tuple[str, ...]
    seconds: float


READOUTS: Final = {
    "probe": Readout(("trainer.probe",), ("probes/*/base.json", "probes/*/overlay.json"), 120),
    "probe with batch norm in train mode": Readout(
        ("trainer.probe", "--set", "batch_norm=train"),
        ("probes/*/base-batch_norm_train.json", "probes/*/overlay-batch_norm_train.json"),
        120,
    ),
    "filters": Readout(("trainer.analyze", "filters"), ("analysis/filters.json",), 30),
}


@dataclass(frozen=True)
class Runs:
    """Some runs of a study.

    Attributes:
        study: its name in configs/studies.py.
        names: a pattern of their names, as of file names.
        seed: the seed that comes first: the published one, if there is one.
        minutes: what the training of one takes on an H200.
        readouts: names of `READOUTS`.
        settings: changes to their configs, as `--set` takes them.
        ending: of their names, if the settings make other runs of them.
        is_short: whether they measure the speed.
    """

    study: str
    names: str
    seed: int
    minutes: float
    readouts: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    ending: str = ""
    is_short: bool = False

    def configs(self, other_seeds: bool) -> list[RunConfig]:
        """Return the configs of the runs with the first seed, or of those with the other seeds."""
        runs = _study(self.study)
        return [run for run in runs if fnmatchcase(run.name, self.names) and (run.seed != self.seed) == other_seeds]


@functools.cache
def _study(name: str) -> Sequence[RunConfig]:
    return resolve_study(f"studies:{name}")


def _tamkin(data: str, kind: str, *readouts: str) -> Runs:
    """Return a row of Tamkin et al.'s tables: expert views, a viewmaker, or one that cannot change the object."""
    study, name = ("table3", f"viewmaker-{data}-masked") if kind == "masked" else ("table1", f"{kind}-{data}")
    seed, minutes = (0, 7) if kind == "simclr" else (2, 11)
    every_ten_epochs = "probe.online_every_steps=1950"
    return Runs(study, name, seed, minutes, ("probe", *readouts), (every_ten_epochs,))


def _speed(batch_size: int, compiled: str, *, num_epochs: int) -> tuple[Runs, ...]:
    """Return short runs of the recipes simclr:digits and viewmaker:digits with a setting of `compile`."""
    settings = (f"global_batch_size={batch_size}", f"num_epochs={num_epochs}", f"compile={compiled}")
    minutes, ending = (1.2 if compiled == "both" else 0.4), f"-{batch_size}-{compiled}"
    rows = (("simclr", 0), ("viewmaker", 2))
    return tuple(
        Runs("table1", f"{kind}-cifar10_digits", seed, minutes, (), settings, ending, is_short=True)
        for kind, seed in rows
    )


_TRAIN_MODE: Final = "probe with batch norm in train mode"
SPEEDS: Final[Mapping[str, tuple[Runs, ...]]] = {
    "throughput-256": tuple(row for how in ("step", "both", "false") for row in _speed(256, how, num_epochs=3)),
    "throughput-1024": tuple(row for how in ("step", "both") for row in _speed(1024, how, num_epochs=6)),
    "throughput-4096": tuple(row for how in ("step", "both") for row in _speed(4096, how, num_epochs=20)),
}
PAPERS: Final[Mapping[str, tuple[Runs, ...]]] = {
    "digits": tuple(_tamkin("cifar10_digits", kind, _TRAIN_MODE) for kind in ("simclr", "viewmaker")),
    "ours": (Runs("temperatures", "*-200epochs", 0, 8),),
    "table2": (Runs("table2", "*", 1337, 1.2, ("probe",), ("data.sample_rate=of_data",)),),
    "shapes": tuple(_tamkin("cifar10_shapes", kind) for kind in ("simclr", "viewmaker", "masked")),
    "digits-masked": (_tamkin("cifar10_digits", "masked"),),
    "cifar10": tuple(_tamkin("cifar10", kind) for kind in ("simclr", "viewmaker")),
    "letters": tuple(_tamkin("cifar10_letters", kind) for kind in ("simclr", "viewmaker", "masked")),
    "pairs": (Runs("pairs", "*-a[bcde]-200epochs", 0, 8),),
    "firing": (Runs("firing", "*", 0, 15, ("filters",)),),
}
_ON_A_GPU: Final = ("precision=bfloat16", "keep_checkpoints=1")
_TINY: Final = (
    *("global_batch_size=8", "num_epochs=1", "compile=false", "data.num_workers=0", "log_every_steps=1"),
    *("probe.num_epochs=1", "probe.online_every_steps=2", "probe.online_num_train=16", "probe.online_num_test=8"),
)
_TINY_VIEWMAKER: Final = ("views.base_width=4", "views.num_res_blocks=1")


@dataclass(frozen=True)
class Run:
    """A run of a row in a session: `published` is its config in the study, `config` the one that is trained."""

    setting: Setting
    stage: str
    row: Runs
    published: RunConfig

    @property
    def name(self) -> str:
        return f"{self.published.name}{self.row.ending}-seed{self.published.seed}"

    @property
    def dataset(self) -> str:
        """Return the name of the dataset, such as "cifar10_digits"."""
        return Path(self.published.data.probed_dir).parent.name

    @property
    def run_dir(self) -> RunDir:
        return RunDir(self.setting.out.absolute() / "runs" / self.name)

    def config(self) -> RunConfig:
        data, is_learned = self.setting.data.absolute() / self.dataset, self.published.views.is_learned
        places = [f"data.train_dir={data / 'train'}", f"data.test_dir={data / 'test'}"]
        # To compile a viewmaker takes a minute, and makes it half as fast again.
        form = [*_ON_A_GPU, f"compile={'both' if is_learned else 'auto'}", *self.row.settings]
        if self.setting.is_tiny:
            encoder = self.published.encoder
            inputs = {name: getattr(encoder, name) for name in ("in_channels", "mean", "std")}
            small = f"encoder={json.dumps({'kind': 'resnet10', 'width': 4, **inputs})}"
            form = [*self.row.settings, small, *_TINY, *(_TINY_VIEWMAKER if is_learned else ())]
        name = f"name={self.published.name}{self.row.ending}"
        return self.published.override([name, "tracking.wandb=disabled", *places, *form], where=self.name)

    def pieces(self) -> dict[str, Task]:
        """Return the training and the readouts by name."""
        is_tiny, seconds = self.setting.is_tiny, 60 * self.row.minutes
        needs = seconds if self.row.is_short else min(seconds, _SECONDS_TO_START)
        pieces = {"train": Task(self.train, 0 if is_tiny else needs, seconds)}
        for name in self.row.readouts:
            # A readout of a small dataset takes at most a third as long as its training.
            run, needs = partial(self.read_out, READOUTS[name]), min(READOUTS[name].seconds, seconds / 3)
            pieces[name] = Task(run, 0 if is_tiny else needs, is_ready=self.can_be_read_out)
        return {f"{self.name}: {piece}": task for piece, task in pieces.items()}

    def is_trained(self) -> bool:
        return "finished_step" in self.run_dir.read_provenance()

    def can_be_read_out(self) -> bool:
        """Return whether the run is trained here, or was trained elsewhere."""
        return self.is_trained() or done_where(self.stage, f"{self.name}: train", self.setting) is not None

    def train(self) -> Outcome:
        """Train, and return what was trained and how, the speed, and the curves of loss and online probe."""
        built(self.setting, self.dataset)
        config, file = self.config(), self.setting.out.absolute() / "configs" / f"{self.name}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, config.model_dump_json(indent=1))
        if self.row.is_short:
            shutil.rmtree(self.run_dir.path, ignore_errors=True)
        call(self.setting, "launch/train.py", "--config", str(file), "--run-dir", str(self.run_dir.path))
        entries = [entry for entry in self.run_dir.read_metrics() if "train/loss" in entry]
        provenance = self.run_dir.read_provenance()
        values: dict[str, Any] = {
            "study": f"studies:{self.row.study}",
            "settings": {name: getattr(config, name) for name in ("precision", "compile")},
            "batch_size": config.global_batch_size,
            "num_steps": provenance["finished_step"],
            "seconds": rounded(provenance["total_wall_seconds"]),
            "speed": _medians(entries[len(entries) // 4 :]),
            "loss": _points(entries, "train/loss"),
            "online_probe": {
                name: _points(self.run_dir.read_metrics(), name)
                for name in sorted({name for entry in entries for name in entry if name.startswith("probe/")})
            },
        }
        if self.row.is_short:
            values |= _planned(config)
        return Outcome(values)

    def read_out(self, readout: Readout) -> Outcome:
        """Run the command of a readout on the trained run, and return what it wrote, without what is long."""
        if not self.is_trained():
            self.train()
        module, *arguments = readout.command
        call(self.setting, "-m", module, *arguments, str(self.run_dir.path))
        paths = sorted(path for pattern in readout.files for path in self.run_dir.path.glob(pattern))
        found = {path.stem: _shortened(read_object(path, mend="read the run out again")) for path in paths}
        if not found:
            raise RuntimeError(f"{module} wrote none of {', '.join(readout.files)}")
        return Outcome(found)


def _medians(entries: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the medians of speeds and memory over lines of the log; of the samples a second also least and most."""
    names = sorted({name for entry in entries for name in entry if name.startswith(("perf/", "memory/"))})
    of_name = {name: [entry[name] for entry in entries if name in entry] for name in names}
    rates = of_name.get("perf/samples_per_second", [])
    spread = {"least_samples_per_second": min(rates), "most_samples_per_second": max(rates)} if rates else {}
    medians = {name: statistics.median(values) for name, values in of_name.items()}
    return {name: rounded(value) for name, value in (medians | spread).items()}


def _points(entries: Sequence[Mapping[str, Any]], name: str) -> list[list[float]]:
    """Return some pairs of step and value of a metric, the last one among them."""
    points = [[entry["step"], rounded(entry[name])] for entry in entries if name in entry]
    return points[:: -max(1, len(points) // _NUM_POINTS)][::-1]


def _planned(config: RunConfig) -> dict[str, float]:
    """Return the memory of plain steps in a plan, which holds no data."""
    manifest = read_manifests(config.data).train
    planned = plan(config, world_size=1, train=manifest, device_gigabytes=None)
    return {"planned_bytes": planned.peak_bytes, "data_bytes": bytes_of_data(config, manifest, device_bytes=10**12)}


def _shortened(value: Any) -> Any:
    """Return a JSON value without long lists and texts."""
    if isinstance(value, dict):
        kept = {
            name: each for name, each in value.items() if not (isinstance(each, list | str) and len(each) > _LONGEST)
        }
        return {name: _shortened(each) for name, each in kept.items()}
    return [_shortened(each) for each in value] if isinstance(value, list) else value


def tasks(setting: Setting, *, stage: str, rows: Sequence[Runs], other_seeds: bool = False) -> Mapping[str, Task]:
    """Return the pieces of all runs of some rows, run after run."""
    runs = [Run(setting, stage, row, config) for row in rows for config in row.configs(other_seeds)]
    return {name: task for run in runs for name, task in run.pieces().items()}


def _stage(name: str, rows: Sequence[Runs], *, is_about_speed: bool, other_seeds: bool = False) -> Stage:
    made = partial(tasks, stage=name, rows=rows, other_seeds=other_seeds)
    return Stage(name, made, is_about_speed=is_about_speed, runs_commands=True)


SPEED_STAGES: Final = tuple(_stage(name, rows, is_about_speed=True) for name, rows in SPEEDS.items())
STAGES: Final = (
    *(_stage(name, rows, is_about_speed=False) for name, rows in PAPERS.items()),
    _stage("seeds", [row for rows in PAPERS.values() for row in rows], is_about_speed=False, other_seeds=True),
)
