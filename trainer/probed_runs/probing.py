"""Probe the checkpoints of a run, write the results into its directory, and print them.

Guarantees: no encoder or checkpoint is changed, and no result depends on the number of ranks.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data_pipeline.core.errors import UserError, printable
from data_pipeline.core.progress import Progress
from data_pipeline.core.sample import NO_LABEL
from data_pipeline.storage.manifest import Manifest
from trainer.checkpoint.run_state import other_data
from trainer.config import RunConfig, read_run_config
from trainer.data import Manifests, read_agreed_manifests, read_manifests
from trainer.distributed.collectives import FirstRankExit, broadcast_object, is_known_to_all, on_first_rank, rank
from trainer.modules import TrainedModules
from trainer.observability.wandb_run import summarize
from trainer.own_code import hashes_of_code, import_code_of, warn_of_changed_code
from trainer.pretrained import load_modules
from trainer.probes.curve import ProbeCurve, read_curves
from trainer.probes.features import TRAIN_DRAW, FrozenFeatures, LabelSpace, Pictures, read_pictures
from trainer.probes.groups import describe_groups, measure_groups, pairs_of
from trainer.probes.heads import Heads, write_heads
from trainer.probes.knn import probe_knn
from trainer.probes.linear import ProbeConfig, Target, check_ranks, num_labelled, probe_linear, spread
from trainer.probes.memory_limit import MemoryLimit
from trainer.probes.reads import reader
from trainer.probes.result import ProbeResult, read_result
from trainer.probes.right_samples import pack_right
from trainer.probes.shared import check_shared, find_shared
from trainer.probes.targets import label_targets, option_difference, readable_labels
from trainer.reports.config_identity import config_identity, run_identity
from trainer.run_dir import RunDir, steps_in, write_json

_DEFAULT_MEMORY = MemoryLimit()


def probe_each(
    run_dirs: Sequence[RunDir], *, allow_code: bool = False, **options: Any
) -> list[Mapping[LabelSpace, ProbeResult] | None]:
    """Call `probe_run` with `options` for each run, one after another. Every rank calls this.

    allow_code: import the code that the config of each run names.

    Returns the results of each run. Those of a run that failed with a `UserError` are None, and the reason is printed.
    Raises this error if the run is the only one, or if only some ranks know of it.
    """
    of_runs: list[Mapping[LabelSpace, ProbeResult] | None] = []
    for run_dir in run_dirs:
        try:
            if allow_code:
                on_first_rank(partial(import_code_of, [run_dir]))
                import_code_of([run_dir])
            of_runs.append(probe_run(run_dir, **options))
        except (UserError, FirstRankExit) as error:
            if len(run_dirs) == 1 or not is_known_to_all(error):
                raise
            of_runs.append(None)
            if rank() == 0:
                print_not_probed(run_dir, str(error))
    return of_runs


def print_not_probed(run_dir: RunDir, reason: str) -> None:
    """Print the reason why a run was not probed, on stderr."""
    print(f"{printable(str(run_dir.path))}: not probed: {printable(reason)}", file=sys.stderr, flush=True)


def probe_run(
    run_dir: RunDir,
    *,
    steps: int | str | None,
    labels: Sequence[LabelSpace] | None,
    num_draws: int,
    changes: Mapping[str, Any],
    device: torch.device,
    untrained: bool = False,
    pixels: bool = False,
    allow_shared: float | None = None,
    allow_pipe: bool = False,
    memory: MemoryLimit = _DEFAULT_MEMORY,
) -> Mapping[LabelSpace, ProbeResult]:
    """Probe checkpoints of a run, write the results, and return those of the last one. Every rank calls this.

    steps: the checkpoint, "all", or None for the newest.
    changes: to the probe of the run's config; the names of the result files then say them.
    untrained: probe the untrained encoder too, before the others.
    pixels: probe the raw pixels too, before the others. Their results are those of step 0.
    allow_shared: replaces the share in the config if it is given.
    allow_pipe: as in `read_config`.
    memory: pictures that take more are streamed.

    Raises `UserError` if a checkpoint or a dataset is missing, if the datasets share too many samples, if the results
    would be written beside those of another run, or if the memory of the GPU is full.
    """
    read = partial(read_run_config, run_dir, allow_pipe=allow_pipe)
    config = on_first_rank(read) or read()
    if rank() == 0:
        warn_of_changed_code([run_dir])
    probe_config = ProbeConfig.parse(config.probe.model_dump() | dict(changes), where="the probe")
    suffix = _suffix(config.probe, changes)
    identity = broadcast_object(on_first_rank(lambda: run_identity(config, run_dir.read_provenance())))

    manifests = read_agreed_manifests(config.data)

    def check() -> list[int | None]:
        _refuse_place_of_other_run(run_dir, identity)
        pairs_of(readable_labels(manifests.probed, manifests.test), probe_config.groups)
        readable_labels(manifests.probed, manifests.test, wanted=labels or probe_config.labels)
        check_ranks(probe_config)
        chosen = checkpoint_steps(run_dir) if steps == "all" else [None if steps is None else int(steps)]
        return [0, *chosen] if untrained else chosen

    chosen = broadcast_object(on_first_rank(check)) or []
    modules = _load(run_dir, chosen[-1])  # before the data are read, in case the run has no checkpoint
    num_shared = broadcast_object(on_first_rank(lambda: count_shared(config, manifests, allowed=allow_shared)))
    if rank() == 0 and (said := option_difference(manifests.probed, manifests.test)) is not None:
        print(f"warning: {said}; the accuracies measure this difference too", file=sys.stderr)
    data = config.data
    train = read_pictures(data.probed_dir, read=data, draw=TRAIN_DRAW, memory=memory)
    test = read_pictures(data.test_dir, read=data, memory=memory)
    if train.streamed is not None and probe_config.views == "policy" and rank() == 0:
        print(
            f"{data.probed_dir} does not fit in memory, and a probe on views reads it once in each of its "
            f"{probe_config.num_epochs} epochs; --views none reads it twice in all",
            file=sys.stderr,
        )
    if num_draws > 1 and not test.is_drawn_online and rank() == 0:
        print(f"{data.test_dir} has no online overlay, so there is only one draw, and no spread", file=sys.stderr)
    other_draws = [test.with_draw(draw) for draw in range(1, num_draws)] if test.is_drawn_online else []

    def read_out(modules: TrainedModules, config: ProbeConfig) -> Readout:
        try:
            return probe(
                modules,
                train=train,
                test=test,
                device=device,
                config=config,
                labels=labels or config.labels,
                other_draws=other_draws,
                num_shared=num_shared,
                run=identity,
            )
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"the probe of {run_dir.path} has not enough memory on {device} ({str(error).partition('. GPU')[0]}); "
                "keep samples and features on the host with a small --memory-gigabytes, see in nvidia-smi what else "
                "uses the GPU, or set CUDA_VISIBLE_DEVICES= for the CPU"
            ) from error

    if pixels:
        of_pixels = read_out(_load(run_dir, 0), probe_config.model_copy(update={"reads": "pixels"}))
        of_pixels_suffix = _suffix(config.probe, {**changes, "reads": "pixels"})
        on_first_rank(partial(_write, run_dir.probes(0), of_pixels, suffix=of_pixels_suffix))
        if rank() == 0:
            print(f"raw pixels:\n{table(of_pixels.results)}")
    for number, step in enumerate(chosen):
        modules = modules if len(chosen) == 1 else _load(run_dir, step)
        if rank() == 0:
            warn_of_other_data(modules, train=train.manifest, test=test.manifest)
        readout = read_out(modules, probe_config)
        directory = run_dir.probes(modules.step)
        on_first_rank(partial(_write, directory, readout, suffix=suffix))
        if rank() == 0:
            if run_dir.probes_at is None and not suffix and number + 1 == len(chosen) and not isinstance(steps, int):
                final = {
                    f"probe/{space}/{method}_final": getattr(result, method).accuracy
                    for space, result in readout.results.items()
                    for method in ("linear", "knn")
                }
                final |= {
                    f"probe/{space}/{method}_worst_{'_'.join(groups.labels)}_final": worst.accuracy
                    for space, result in readout.results.items()
                    for groups in result.groups
                    for method, worst in groups.worst.items()
                }
                summarize(run_dir, config.tracking, final)
            print(table(readout.results))
            print(directory)

    def write_curves() -> None:
        steps_per_epoch = config.data.num_steps_per_epoch(manifests.train.num_samples, config.global_batch_size)
        curves = read_curves(run_dir, suffix=suffix, steps_per_epoch=steps_per_epoch)
        if curves.curves:
            write_json(run_dir.all_probes / f"curves{suffix}.json", curves.model_dump(mode="json"))
        if len(chosen) > 1:
            print(curve_table(curves.curves))

    on_first_rank(write_curves)
    return readout.results


def is_probed(
    run_dir: RunDir,
    *,
    steps: int | str | None,
    labels: Sequence[LabelSpace] | None,
    num_draws: int,
    changes: Mapping[str, Any],
    untrained: bool,
    pixels: bool,
    allow_pipe: bool,
    allow_code: bool = False,
    **_: object,
) -> bool:
    """Tell whether a run has all results that `probe_run` would write with these options.

    A result counts if it is newer than its checkpoint, and has the settings and the data of the run. It must not be
    known to be of another run, or of other code of the user's own than that of now, which `allow_code` imports. A run
    with damaged files or missing data has none, so that `probe_run` says what is wrong. A finished run without
    checkpoints, such as an unpacked one, needs the results of its last step.
    """
    newest = run_dir.latest_step()
    if newest is None:
        newest = run_dir.read_provenance().get("finished_step")
    if newest is None:
        return False
    at_all = steps_in(run_dir.checkpoints) or [newest]
    chosen = at_all if steps == "all" else [newest if steps is None else int(steps)]
    wanted = [(step, dict(changes)) for step in ([0, *chosen] if untrained else chosen)]
    if pixels:
        wanted.append((0, {**changes, "reads": "pixels"}))
    try:
        own = read_run_config(run_dir, allow_pipe=allow_pipe, allow_code=allow_code)
        code = hashes_of_code(own)
        identity = run_identity(own, run_dir.read_provenance())
        manifests = read_manifests(own.data, makes_index=False)
        train, test = manifests.probed, manifests.test
        for space in readable_labels(train, test, wanted=labels or own.probe.labels):
            for step, changed in wanted:
                path = run_dir.probes(step) / f"{space}{_suffix(own.probe, changed)}.json"
                result = read_result(path)
                found = result.probe_config, result.train_manifest_sha256, result.test_manifest_sha256
                draws = result.linear.draws
                checkpoint = run_dir.checkpoint(step)
                if (
                    result.is_of_other_run(identity)
                    or found != (own.probe.model_copy(update=changed).protocol, train.sha256, test.sha256)
                    or any(result.own_code.get(package, sha256) != sha256 for package, sha256 in code.items())
                    or (num_draws > 1 and (draws is None or len(draws.accuracies) < num_draws))
                    or (checkpoint.exists() and path.stat().st_mtime < checkpoint.stat().st_mtime)
                ):
                    return False
    except UserError:
        return False
    return True


def _suffix(own: ProbeConfig, changes: Mapping[str, Any]) -> str:
    """Return the part of file names that says how a probe differs from the one of the run's config."""
    changed = {name: value for name, value in changes.items() if value != getattr(own, name)}
    return "".join(f"-{name}_{value}" for name, value in changed.items())


def _refuse_place_of_other_run(run_dir: RunDir, identity: str | None) -> None:
    """Raise `UserError` if the directory of the results holds some of another run. Damaged ones will be replaced."""
    for path in sorted(run_dir.all_probes.glob("step_*/*.json")):
        try:
            result = read_result(path)
        except UserError:
            continue
        if result.is_of_other_run(identity):
            raise UserError(
                f"{run_dir.all_probes} holds probe results of another run ({result.run}) than {run_dir.path} "
                f"({identity}); pass another --out, or remove {run_dir.all_probes}"
            )


def _write(directory: Path, readout: Readout, *, suffix: str) -> None:
    """Write the heads and results of one checkpoint."""
    write_heads(directory / f"heads{suffix}.safetensors", readout.heads)
    for space, result in readout.results.items():
        write_json(directory / f"{space}{suffix}.json", result.model_dump(mode="json"))


def checkpoint_steps(run_dir: RunDir) -> list[int | None]:
    """Return the steps of all checkpoints, ascending. Raises `UserError` if there is none."""
    steps = steps_in(run_dir.checkpoints)
    if not steps:
        raise UserError(f"{run_dir.path} has no checkpoint yet; train it, or use step 0, the untrained encoder")
    return [*steps]


@dataclass(frozen=True)
class Readout:
    """The results of one checkpoint by label, and the trained heads."""

    results: Mapping[LabelSpace, ProbeResult]
    heads: Heads


def probe(
    modules: TrainedModules,
    *,
    train: Pictures,
    test: Pictures,
    device: torch.device,
    config: ProbeConfig | None = None,
    labels: Sequence[LabelSpace] | None = None,
    other_draws: Sequence[Pictures] = (),
    num_shared: int | None = None,
    run: str | None = None,
) -> Readout:
    """Probe `labels` (default: all that the pictures have) by `config` (default: of the run). Every rank calls this.

    `num_shared` and `run` are only copied into the results: the number of test samples that are in the train set too,
    and the identity of the run. Raises `UserError` if the train set and the test set have different classes, or lack
    one of the labels.
    """
    started = time.monotonic()
    own_code = hashes_of_code(modules.config)  # now, because the user may edit it meanwhile
    targets = label_targets(train, test, wanted=labels)
    pairs = pairs_of(readable_labels(train.manifest, test.manifest), (config or modules.config.probe).groups)
    modules = modules.to(device)
    config = modules.config.probe if config is None else config
    title = f"probe of step {modules.step}"
    encoder = reader(modules.encoder, config.reads)
    without_views = FrozenFeatures(encoder, device=device)
    known, asked = train.on(device), test.on(device)
    with Progress(title, total=config.num_epochs, enabled=rank() == 0) as progress:

        def on_epoch(epoch: int, accuracy: Mapping[LabelSpace, float]) -> None:
            progress.advance(note=", ".join(f"label_{name} {100 * value:.1f} %" for name, value in accuracy.items()))

        linear = probe_linear(
            encoder,
            view_policy=modules.view_policy,
            train=known,
            test=asked,
            targets=targets,
            config=config,
            device=device,
            other_draws=other_draws,
            without_views=without_views,
            on_epoch=on_epoch,
        )
    knn = probe_knn(
        encoder,
        train=known,
        test=asked,
        targets=targets,
        device=device,
        other_draws=other_draws,
        without_views=without_views,
    )
    seconds = round(time.monotonic() - started, 1)
    results = {
        space: ProbeResult(
            label=space,
            checkpoint_step=modules.step,
            linear=linear[space].result,
            knn=knn[space].result,
            chance=target.chance,
            majority_share=majority_share(target),
            class_names=train.class_names(space),
            num_train=num_labelled(target.train_N),
            num_test=num_labelled(target.test_N),
            probe_config=config.protocol,
            train_manifest_sha256=train.manifest.sha256,
            test_manifest_sha256=test.manifest.sha256,
            seconds=seconds,
            title=train.manifest.labels[space].title,
            num_shared=num_shared,
            num_unlabelled=len(test) + test.num_left_out - num_labelled(target.test_N),
            own_code=own_code,
            groups=tuple(
                measure_groups(
                    space,
                    {"linear": linear[space].predicted_N, "knn": knn[space].predicted_N},
                    pair=pair,
                    labels=test.by_label,
                    manifest=test.manifest,
                    min_size=config.min_group_size,
                    num_left_out=test.num_left_out,
                )
                for pair in pairs
                if space in pair
            ),
            right_samples=_right_samples(linear[space].predicted_N, knn[space].predicted_N, target),
            run=run,
        )
        for space, target in targets.items()
    }
    settings = (f"{name} {value}" for name, value in config.fit_settings.items())
    made_by = f"probe with {', '.join(settings)}"
    return Readout(results, Heads({space: one.head for space, one in linear.items()}, made_by, train.manifest.sha256))


def _right_samples(linear_N: Tensor, knn_N: Tensor, target: Target) -> dict[str, str]:
    """Return the bits of `ProbeResult.right_samples` from the classes that each method gives to the test samples."""
    packed = {name: pack_right(class_N, target.test_N) for name, class_N in (("linear", linear_N), ("knn", knn_N))}
    return {name: bits for name, bits in packed.items() if bits is not None}


def majority_share(target: Target) -> float:
    """Return the test accuracy of a probe that always answers the commonest class of the train set."""
    train_N, test_N = (label_N[label_N != NO_LABEL] for label_N in (target.train_N, target.test_N))
    commonest = torch.bincount(train_N, minlength=target.num_classes).argmax()
    return float((test_N == commonest).float().mean().item())


def table(results: Mapping[LabelSpace, ProbeResult]) -> str:
    """Return a table of test accuracies in per cent, by label; several draws of the overlays add a line."""
    width = max([18, *(len(f"label_{space} ") for space in results)])
    lines = [f"{'test accuracy, %':{width}}{'linear':>8}{'(best, epoch)':>16}{'kNN':>8}{'majority':>10}{'chance':>8}"]
    for space, result in results.items():
        best = f"({100 * result.linear.best_accuracy:.1f}, {result.linear.best_epoch})"
        lines.append(
            f"{'label_' + space:{width}}{100 * result.linear.accuracy:8.1f}{best:>16}{100 * result.knn.accuracy:8.1f}"
            f"{100 * result.majority_share:10.1f}{100 * result.chance:8.1f}"
        )
        if result.linear.draws is not None and result.knn.draws is not None:
            linear, knn = (
                f"{100 * draws.mean:.1f} ± {100 * draws.deviation:.1f}"
                for draws in (result.linear.draws, result.knn.draws)
            )
            lines.append(f"  {len(result.linear.draws.accuracies)} draws of the test overlays: {linear}, kNN {knn}")
        lines += [f"  {describe_groups(groups)}" for groups in result.groups]
    return "\n".join(lines)


def runs_table(paths: Sequence[Path], of_runs: Sequence[Mapping[LabelSpace, ProbeResult]]) -> str:
    """Return the mean and deviation (divisor n - 1) over the runs of each configuration, in per cent, by label.

    Names the runs that have the seed of another one, such as copies, and leaves them out, and says at which steps the
    runs were probed if these differ.
    """
    arms: dict[tuple[object, ...], dict[int, tuple[Path, Mapping[LabelSpace, ProbeResult]]]] = {}
    lines = []
    for path, results in zip(paths, of_runs, strict=True):
        one = next(iter(results.values()))
        config = read_run_config(RunDir(path))
        trained_on = RunDir(path).read_provenance().get("train_manifest_sha256")
        of_arm = arms.setdefault((config_identity(config), trained_on, *one.data), {})
        first, _ = of_arm.setdefault(config.seed, (path, results))
        if first.resolve() != path.resolve():
            lines.append(f"{path} is left out: {first} has the same configuration, data and seed {config.seed}")
    for of_arm in arms.values():
        if len(of_arm) == 1:
            continue
        lines.append(f"mean over {', '.join(str(path) for path, _ in of_arm.values())}:")
        by_step = {path: next(iter(results.values())).checkpoint_step for path, results in of_arm.values()}
        if len(set(by_step.values())) > 1:
            steps = ", ".join(f"{path} at step {step}" for path, step in by_step.items())
            lines.append(f"warning: the runs were probed at different steps, so ± is not of seeds alone: {steps}")
        for space in dict.fromkeys(space for _, results in of_arm.values() for space in results):
            of_space = [results[space] for _, results in of_arm.values() if space in results]
            if len(of_space) == 1:
                continue
            linear, knn = (
                spread([getattr(result, method).accuracy for result in of_space]) for method in ("linear", "knn")
            )
            assert linear is not None
            assert knn is not None
            lines.append(
                f"label_{space}, {len(of_space)} runs: linear {100 * linear.mean:.1f} ± {100 * linear.deviation:.1f}, "
                f"kNN {100 * knn.mean:.1f} ± {100 * knn.deviation:.1f}"
            )
    return "\n".join(lines) or "no two runs have the same configuration and dataset, so there is no mean over runs"


def curve_table(curves: Sequence[ProbeCurve]) -> str:
    """Return a table with the last and the best checkpoint of each curve, and the one with half of its gain, in %."""
    names = [f"label_{curve.label}, {curve.method}" for curve in curves]
    width = max([26, *map(len, names)])
    head = f"{'over checkpoints, %':{width}}{'last (step)':>18}{'best on the test set (step)':>30}"
    lines = [f"{head}{'half of the gain (step)':>26}"]
    for name, curve in zip(names, curves, strict=True):
        last, best, half = (
            "–" if point is None else f"{100 * point.accuracy:.1f} ({point.step})"
            for point in (curve.last, curve.best, curve.half_gain)
        )
        lines.append(f"{name:{width}}{last:>18}{best:>30}{half:>26}")
    return "\n".join(lines)


def _load(run_dir: RunDir, step: int | None) -> TrainedModules:
    """Load the modules of the checkpoint that the first rank finds. Every rank calls this."""
    modules = on_first_rank(lambda: load_modules(run_dir, step=step))
    found = broadcast_object(None if modules is None else modules.step)
    return load_modules(run_dir, step=found) if modules is None else modules


def count_shared(config: RunConfig, manifests: Manifests, *, allowed: float | None) -> int | None:
    """Return how many test samples are in the train set too, and print a warning if some are; None if it is unknown.

    `allowed` replaces the share in the config if it is given. Raises `UserError` if more are shared.
    """
    shared = find_shared(config.data, train=manifests.train, test=manifests.test)
    share = config.probe.allow_shared if allowed is None else allowed
    if (said := check_shared(shared, config.data, allowed=share)) is not None:
        print(said, file=sys.stderr)
    return None if shared is None else shared.num_shared


def warn_of_other_data(modules: TrainedModules, *, train: Manifest, test: Manifest) -> None:
    """Print a warning for each dataset that is not the one of the training. The results hold the hashes of both."""
    data = modules.config.data
    for warning in (
        other_data(modules.trained_on, which="train", sha256=train.sha256, location=data.probed_dir),
        other_data(modules.trained_on, which="test", sha256=test.sha256, location=data.test_dir),
    ):
        if warning is not None:
            print(f"warning: {warning}", file=sys.stderr)
