"""Probe the checkpoints of a run, write the results into its directory, and print them.

Guarantees: no encoder or checkpoint is changed, and no result depends on the number of ranks.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from data_pipeline.core.errors import UserError, printable
from data_pipeline.storage.manifest import FileEntry
from trainer.config import RunConfig, read_run_config
from trainer.config_changes import edited_config
from trainer.data import DataConfig, Manifests, read_agreed_manifests
from trainer.distributed.collectives import (
    FirstRankExit,
    broadcast_json,
    from_first_rank,
    is_known_to_all,
    on_first_rank,
    rank,
)
from trainer.modules import TrainedModules
from trainer.observability.tracking import uses_wandb
from trainer.own_code import hashes_of_code
from trainer.pretrained import load_modules, warn_of_other_data
from trainer.probed_runs.readout import read_out, reader
from trainer.probes.features import LabelSpace, Pictures, read_pictures, read_train
from trainer.probes.groups import pairs_of
from trainer.probes.heads import Heads, write_heads
from trainer.probes.linear import ProbeConfig, check_ranks
from trainer.probes.result import ProbeResult, ScoredEncoder, read_result
from trainer.probes.shared import check_shared
from trainer.probes.targets import option_difference, readable_labels
from trainer.provenance import origin_of_numbers, train_sets
from trainer.reports.config_identity import run_identity
from trainer.run_dir import RunDir, step_name, steps_in, write_json


@dataclass(frozen=True)
class ProbeOptions:
    """What to probe of a run. The defaults are the newest checkpoint and the probe of the run's config.

    steps: the checkpoint, or "all"; None for the newest.
    settings: changes to the probe of the config, such as "views=none". The names of the result files say those that
        change a result.
    untrained: probe the untrained encoder too, before the others.
    missing: leave out a run that has all results asked for.
    train_dir, test_dir: other datasets than those of the run, or its datasets at another place.
    """

    steps: int | Literal["all"] | None = None
    settings: Sequence[str] = ()
    untrained: bool = False
    missing: bool = False
    train_dir: str | None = None
    test_dir: str | None = None

    def data(self, own: DataConfig) -> DataConfig:
        """Return the datasets of a run with the changes."""
        no_mixture = {"mixture": None, "mixture_epoch": None, "probed_source": None}
        train = {} if self.train_dir is None else {"train_dir": self.train_dir, **no_mixture}
        return own.model_copy(update=train if self.test_dir is None else {**train, "test_dir": self.test_dir})

    def changed(self, own: ProbeConfig) -> ProbeConfig:
        """Return the probe of a run's config with the changes. Raises `UserError` for a value that it cannot have."""
        return own.override(self.settings, where="the probe")

    def suffix(self, own: ProbeConfig) -> str:
        """Return the part of file names that says how the probe differs from the one of the run's config."""
        settings = self.changed(own).fit_settings.items()
        return "".join(f"-{name}_{value}" for name, value in settings if value != getattr(own, name))

    def checkpoint_steps(self, at_all: Sequence[int | None], newest: int | None) -> list[int | None]:
        """Return the steps to probe, 0 for the untrained encoder.

        at_all: the steps of all checkpoints.
        newest: the step that None stands for; None leaves it open.
        """
        untrained: list[int | None] = [0] if self.untrained else []
        if self.steps == "all":
            return [*untrained, *at_all]
        return [*untrained, newest if self.steps is None else self.steps]


def probe_each(
    run_dirs: Sequence[RunDir], options: ProbeOptions, *, device: torch.device
) -> list[Mapping[LabelSpace, ProbeResult] | None]:
    """Call `probe_run` for each run, one after another. Every rank calls this.

    Returns the results of each run. Those of a run that failed with a `UserError` are None, and the reason is printed.
    Raises this error if the run is the only one, or if only some ranks know of it.
    """
    of_runs: list[Mapping[LabelSpace, ProbeResult] | None] = []
    for run_dir in run_dirs:
        try:
            of_runs.append(probe_run(run_dir, options, device=device))
        except (UserError, FirstRankExit) as error:
            if len(run_dirs) == 1 or not is_known_to_all(error):
                raise
            of_runs.append(None)
            if rank() == 0:
                reason = f"{printable(str(run_dir.path))}: not probed: {printable(str(error))}"
                print(reason, file=sys.stderr, flush=True)
    return of_runs


def probe_run(run_dir: RunDir, options: ProbeOptions, *, device: torch.device) -> Mapping[LabelSpace, ProbeResult]:
    """Probe checkpoints of a run, write the results, and return those of the last one. Every rank calls this.

    Returns no results of a run that is left out. Raises `UserError` if a checkpoint or a dataset is missing, or if the
    datasets share too many samples.
    """
    read = partial(read_run_config, run_dir)
    config = on_first_rank(read) or read()
    if rank() == 0 and (said := edited_config(run_dir, config)) is not None:
        print(f"warning: {said}", file=sys.stderr)
    data, probe_config = options.data(config.data), options.changed(config.probe)
    identity = from_first_rank(lambda: run_identity(config, run_dir.read_provenance()), str | None)
    manifests = read_agreed_manifests(data)
    check_labels(data, manifests, probe_config)
    place, suffix = results_on(run_dir, config, options, manifests), options.suffix(config.probe)
    is_own = place == run_dir.all_probes

    def check() -> list[int | None]:
        if options.missing and _has_results(run_dir, config, options, manifests, place):
            return []
        at_all = steps_in(run_dir.checkpoints)
        if options.steps == "all" and not at_all:
            raise UserError(f"{run_dir.path} has no checkpoint yet; train it, or use step 0, the untrained encoder")
        return options.checkpoint_steps(at_all, None)

    steps = from_first_rank(check, list[int | None])
    if not steps:
        return {}
    modules = _load(run_dir, steps[-1])  # before the data are read, in case the run has no checkpoint
    train, test, num_shared = read_data(data, manifests, probe_config)
    for step in steps:
        modules = modules if len(steps) == 1 else _load(run_dir, step)
        if rank() == 0 and is_own:
            warn_of_other_data(modules, "train", train.manifest)
            warn_of_other_data(modules, "test", test.manifest)
        facts = {
            "num_shared": num_shared,
            # The hashes now, because the user may edit the code meanwhile.
            "own_code": hashes_of_code(modules.config, (train.manifest, test.manifest)),
            "run": identity,
            "scored": None if is_own else scored_on(data, config.name, seed=config.seed),
        }
        modules = modules.to(device)
        encoder, policy = reader(modules.encoder, probe_config.reads), modules.view_policy
        results, heads = read_out(encoder, policy, train, test, probe_config, device, step=modules.step, facts=facts)
        write_results(place / step_name(modules.step), results, heads, suffix=suffix)
    if rank() == 0 and is_own and not suffix:
        _summarize(run_dir, config, results)
    return results


def check_labels(data: DataConfig, manifests: Manifests, config: ProbeConfig) -> None:
    """Check on the first rank that the datasets have the labels of a probe. Every rank calls this.

    Raises `UserError` if they have not, or if several ranks cannot fit the probe.
    """

    def check() -> None:
        where = (data.probed_dir, data.test_dir)
        pairs_of(readable_labels(manifests.probed, manifests.test, where=where), config.groups)
        readable_labels(manifests.probed, manifests.test, wanted=config.labels)
        check_ranks(config)

    from_first_rank(check, None)


def read_data(data: DataConfig, manifests: Manifests, config: ProbeConfig) -> tuple[Pictures, Pictures, int | None]:
    """Return train set, test set, and the number of test samples that are in the train set too. Every rank calls this.

    Raises `UserError` if they are more than the config allows, or if the data cannot be read.
    """

    def count_shared() -> int | None:
        num_shared, said = check_shared(data, train=manifests.train, test=manifests.test, allowed=config.allow_shared)
        if said is not None:
            print(said, file=sys.stderr)
        return num_shared

    num_shared = from_first_rank(count_shared, int | None)
    if (said := option_difference(manifests.probed, manifests.test)) is not None and rank() == 0:
        print(f"warning: {said}; the accuracies measure this difference too", file=sys.stderr)
    return read_train(data), read_pictures(data.test_dir, read=data), num_shared


def results_on(run_dir: RunDir, config: RunConfig, options: ProbeOptions, manifests: Manifests) -> Path:
    """Return the directory below which the results of each step lie.

    It is that of the run, unless the options name other datasets, by content, than it has: then it has their short hash
    in its name.
    """
    provenance, data = run_dir.read_provenance(), (manifests.probed.sha256, manifests.test.sha256)
    of_run = (*train_sets(config, provenance)[-1:], provenance.get("test_manifest_sha256"))
    if options.data(config.data) == config.data or of_run == data:
        return run_dir.all_probes
    return run_dir.all_probes / f"data_{short_hash(data)}"


def scored_on(data: DataConfig, name: str, *, seed: int = 0, file: Path | None = None) -> ScoredEncoder:
    """Return the record of an encoder that this process scores on some datasets; `file` holds it."""
    return ScoredEncoder(
        name=name,
        seed=seed,
        train_dir=data.probed_dir,
        test_dir=data.test_dir,
        origin=origin_of_numbers(),
        sha256=None if file is None else FileEntry.of(file).sha256,
    )


def short_hash(data: tuple[str, str]) -> str:
    """Return eight digits that tell pairs of datasets apart, from the hashes of their manifests."""
    return hashlib.sha256("".join(data).encode()).hexdigest()[:8]


def table(results: Mapping[LabelSpace, ProbeResult]) -> str:
    """Return a table of test accuracies in per cent, by label, with the worst groups of the linear probe below."""
    class_names = {label: result.class_names for label, result in results.items()}
    width = max([18, *(len(f"label_{space} ") for space in results)])
    lines = [f"{'test accuracy, %':{width}}{'linear':>8}{'kNN':>8}{'k':>6}{'majority':>10}{'chance':>8}"]
    for space, result in results.items():
        lines.append(
            f"{f'label_{space}':{width}}{100 * result.linear.accuracy:8.1f}{100 * result.knn.accuracy:8.1f}"
            f"{result.knn.num_neighbors:6}{100 * result.majority_share:10.1f}{100 * result.chance:8.1f}"
        )
        for groups in result.groups:
            if (worst := groups.worst("linear")) is not None:
                which = f"{groups.name(worst, class_names)}, {worst.num_test} samples"
                labels = " x ".join(groups.labels)
                lines.append(f"  worst group of {labels}: linear {100 * worst.accuracy:.1f} ({which})")
    return "\n".join(lines)


def _summarize(run_dir: RunDir, config: RunConfig, results: Mapping[LabelSpace, ProbeResult]) -> None:
    """Write the accuracies at the end of a run into its summary at W&B. Does nothing for other steps."""
    if not uses_wandb(config.tracking):
        return
    from trainer.observability.wandb_run import summarize  # which imports W&B's library

    finished = run_dir.read_provenance().get("finished_step")
    if any(result.checkpoint_step != finished for result in results.values()):
        return
    final = {
        f"probe/{space}/{method}_final": getattr(result, method).accuracy
        for space, result in results.items()
        for method in ("linear", "knn")
    }
    summarize(run_dir, config.tracking, final)


def _has_results(run_dir: RunDir, config: RunConfig, options: ProbeOptions, manifests: Manifests, place: Path) -> bool:
    """Return whether all results that `probe_run` would write with these options lie below `place`.

    A result counts if it is newer than its checkpoint, and has the settings and the data of the run. It must not be
    known to be of another run, or of other code of the user's own than that of now. A finished run without checkpoints
    needs the results of its last step.
    """
    provenance, data = run_dir.read_provenance(), (manifests.probed, manifests.test)
    newest = run_dir.latest_step()
    if newest is None:
        newest = provenance.get("finished_step")
    if newest is None:
        return False
    wanted, code = options.changed(config.probe), hashes_of_code(config, data)
    identity, hashes = run_identity(config, provenance), tuple(each.sha256 for each in data)
    for step in options.checkpoint_steps(steps_in(run_dir.checkpoints) or [newest], newest):
        checkpoint = run_dir.checkpoint(step or 0)
        for space in readable_labels(*data, wanted=wanted.labels):
            path = place / step_name(step or 0) / f"{space}{options.suffix(config.probe)}.json"
            try:
                result = read_result(path)
            except UserError:  # there is none, or a damaged one
                return False
            if (
                result.is_of_other_run(identity)
                or result.probe_config != wanted.protocol
                or result.data != hashes
                or any(result.own_code.get(package, sha256) != sha256 for package, sha256 in code.items())
                or (checkpoint.exists() and path.stat().st_mtime < checkpoint.stat().st_mtime)
            ):
                return False
    return True


def write_results(
    directory: Path, results: Mapping[LabelSpace, ProbeResult], heads: Heads, *, suffix: str = ""
) -> None:
    """Write heads and results on the first rank, and print them. Every rank calls this."""

    def write() -> None:
        write_heads(directory / f"heads{suffix}.safetensors", heads)
        for space, result in results.items():
            write_json(directory / f"{space}{suffix}.json", result.model_dump(mode="json"))
        print(table(results))
        print(directory)

    on_first_rank(write)


def _load(run_dir: RunDir, step: int | None) -> TrainedModules:
    """Load the modules of the checkpoint that the first rank finds. Every rank calls this."""
    modules = on_first_rank(lambda: load_modules(run_dir, step=step))
    found = broadcast_json(None if modules is None else modules.step, int | None)
    return load_modules(run_dir, step=found) if modules is None else modules
