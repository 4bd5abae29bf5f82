"""`python -m trainer.probe RUN_DIR`: one linear probe and one kNN vote for each label, from the frozen encoder.

Comes in: a run directory and the shards its config names. Goes out: RUN_DIR/probes/step_00010000/base.json, and
overlay.json where something was drawn on the pictures, or mixed into the sounds. What may never happen: a changed
encoder or checkpoint.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from pathlib import Path

import torch

from data_pipeline.errors import UserError, run_command
from data_pipeline.progress import Progress
from trainer.checkpoint import load_players
from trainer.players import Players
from trainer.probes.features import LABEL_SPACES, LabelSpace, Pictures, read_pictures
from trainer.probes.knn import probe_knn
from trainer.probes.linear import Target, probe_linear
from trainer.probes.result import ProbeResult
from trainer.rundir import open_run, write_json


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m trainer.probe", description=__doc__.partition("\n")[0])
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    parser.add_argument(
        "--step", type=int, help="checkpoint to probe; 0 is the untrained encoder (default: the newest)"
    )
    arguments = parser.parse_args()
    run_dir = open_run(arguments.run_dir)
    players = load_players(run_dir, step=arguments.step)
    data = players.config.data
    train, test = read_pictures(data.train_dir, read=data), read_pictures(data.test_dir, read=data)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    results = probe(players, train=train, test=test, device=device)
    for space, result in results.items():
        write_json(run_dir.probes(players.step) / f"{space}.json", result.model_dump(mode="json"))
    print(table(results))
    print(run_dir.probes(players.step))


def probe(players: Players, *, train: Pictures, test: Pictures, device: torch.device) -> dict[LabelSpace, ProbeResult]:
    """Read out every label the pictures have. Raises `UserError` where train and test set have different classes."""
    started = time.monotonic()
    targets = label_targets(train, test)
    memory_format = torch.channels_last if players.config.channels_last else torch.contiguous_format
    encoder, view_policy = players.encoder.to(device), players.view_policy.to(device)
    for module in (encoder, view_policy):
        module.to(memory_format=memory_format)  # type: ignore[call-overload]
    config = players.config.probe
    with Progress(f"probe of step {players.step}", total=config.num_epochs) as progress:

        def on_epoch(epoch: int, accuracy: Mapping[LabelSpace, float]) -> None:
            progress.advance(note=", ".join(f"label_{name} {100 * value:.1f} %" for name, value in accuracy.items()))

        linear = probe_linear(
            encoder,
            view_policy=view_policy,
            train=train,
            test=test,
            targets=targets,
            config=config,
            device=device,
            on_epoch=on_epoch,
        )
    knn = probe_knn(encoder, train=train, test=test, targets=targets, device=device)
    seconds = round(time.monotonic() - started, 1)
    return {
        space: ProbeResult(
            label=space,
            checkpoint_step=players.step,
            linear=linear[space],
            knn=knn[space],
            chance=1 / target.num_classes,
            majority_share=majority_share(target),
            class_names=train.class_names(space),
            num_train=len(train),
            num_test=len(test),
            probe_config=config,
            train_manifest_sha256=train.manifest.sha256,
            test_manifest_sha256=test.manifest.sha256,
            seconds=seconds,
        )
        for space, target in targets.items()
    }


def label_targets(train: Pictures, test: Pictures) -> dict[LabelSpace, Target]:
    """The labels there are to read out: `base`, and `overlay` where something was drawn."""
    targets: dict[LabelSpace, Target] = {}
    for space in LABEL_SPACES:
        names, test_names = train.class_names(space), test.class_names(space)
        if names != test_names:
            raise UserError(
                f"label_{space} has classes {', '.join(names) or 'none'} in the train set but "
                f"{', '.join(test_names) or 'none'} in the test set; build both from the same dataset"
            )
        if names:
            targets[space] = Target(train.labels(space), test.labels(space), num_classes=len(names))
    return targets


def majority_share(target: Target) -> float:
    """Test accuracy of always answering the commonest class of the train set."""
    commonest = torch.bincount(target.train_N, minlength=target.num_classes).argmax()
    return float((target.test_N == commonest).float().mean().item())


def table(results: Mapping[LabelSpace, ProbeResult]) -> str:
    """Test accuracies in per cent, one line a label."""
    lines = [f"{'test accuracy, %':18}{'linear':>8}{'(best, epoch)':>16}{'kNN':>8}{'majority':>10}{'chance':>8}"]
    for space, result in results.items():
        best = f"({100 * result.linear.best_accuracy:.1f}, {result.linear.best_epoch})"
        lines.append(
            f"{'label_' + space:18}{100 * result.linear.accuracy:8.1f}{best:>16}{100 * result.knn.accuracy:8.1f}"
            f"{100 * result.majority_share:10.1f}{100 * result.chance:8.1f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    run_command(main)
