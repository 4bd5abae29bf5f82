"""Probe the encoder of one checkpoint: a linear probe and a vote of nearest neighbours for each label.

Guarantees: the encoder is not changed, and no result depends on the number of ranks.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from data_pipeline.core.progress import Progress
from data_pipeline.core.sample import NO_LABEL
from trainer.distributed.collectives import rank
from trainer.modules import TrainedModules
from trainer.own_code import hashes_of_code
from trainer.probes.features import FeatureEncoder, LabelSpace, Pictures, ViewFunction
from trainer.probes.fit import Fitted, fit
from trainer.probes.groups import measure_groups, pairs_of
from trainer.probes.heads import Heads
from trainer.probes.knn import NUM_NEIGHBORS, TEMPERATURE, KNNResult
from trainer.probes.linear import ProbeConfig, Target, finite_accuracy, num_labelled
from trainer.probes.reads import InBfloat16, reader
from trainer.probes.result import ProbeResult, pack_right
from trainer.probes.targets import label_targets, readable_labels


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
    num_shared: int | None = None,
    run: str | None = None,
) -> Readout:
    """Probe `labels` (default: all that the pictures have) by `config` (default: of the run). Every rank calls this.

    `num_shared` and `run` are only copied into the results: the number of test samples that are in the train set too,
    and the identity of the run. Raises `UserError` if the train set and the test set have different classes, or lack
    one of the labels.
    """
    started = time.monotonic()
    # Now, because the user may edit it meanwhile.
    own_code = hashes_of_code(modules.config, (train.manifest, test.manifest))
    config = config or modules.config.probe
    targets = label_targets(train, test, wanted=labels)
    modules = modules.to(device)
    encoder: FeatureEncoder = reader(modules.encoder, config.reads)
    view_policy: ViewFunction = modules.view_policy
    if config.precision == "bfloat16":
        encoder, view_policy = InBfloat16(encoder), InBfloat16(view_policy)
    with Progress(f"probe of step {modules.step}", total=config.num_epochs, enabled=rank() == 0) as progress:

        def on_epoch(epoch: int, accuracy: Mapping[LabelSpace, float]) -> None:
            progress.advance(note=", ".join(f"label_{name} {100 * value:.1f} %" for name, value in accuracy.items()))

        fitted = fit(
            encoder,
            view_policy=view_policy,
            train=train.on(device),
            test=test.on(device),
            targets=targets,
            config=config,
            device=device,
            on_epoch=on_epoch,
        )
    facts: dict[str, Any] = {
        "checkpoint_step": modules.step,
        "probe_config": config.protocol,
        "train_manifest_sha256": train.manifest.sha256,
        "test_manifest_sha256": test.manifest.sha256,
        "seconds": round(time.monotonic() - started, 1),
        "num_shared": num_shared,
        "own_code": own_code,
        "run": run,
    }
    pairs = pairs_of(readable_labels(train.manifest, test.manifest), config.groups)
    results = {space: describe(space, one, test, pairs=pairs, facts=facts) for space, one in fitted.items()}
    settings = (f"{name} {value}" for name, value in config.fit_settings.items())
    heads = {space: one.linear.head for space, one in fitted.items()}
    return Readout(results, Heads(heads, f"probe with {', '.join(settings)}", train.manifest.sha256))


def describe(
    space: LabelSpace,
    fitted: Fitted,
    test: Pictures,
    *,
    pairs: Sequence[tuple[LabelSpace, LabelSpace]],
    facts: Mapping[str, Any],
) -> ProbeResult:
    """Return the result of one label: its accuracies, on the whole and in the groups of `pairs`, and the `facts`."""
    target = fitted.target
    predicted = {"linear": fitted.linear.predicted_N, "knn": fitted.knn_N}
    groups = (
        measure_groups(
            space,
            predicted,
            pair=pair,
            labels=test.by_label,
            num_classes=(len(test.class_names(pair[0])), len(test.class_names(pair[1]))),
            num_left_out=test.num_left_out,
        )
        for pair in pairs
        if space in pair
    )
    right = {name: pack_right(class_N, target.test_N) for name, class_N in predicted.items()}
    return ProbeResult(
        label=space,
        title=test.manifest.labels[space].title,
        class_names=test.class_names(space),
        linear=fitted.linear.result,
        knn=KNNResult(
            accuracy=finite_accuracy(fitted.knn_N, target.test_N, name=space),
            num_neighbors=min(NUM_NEIGHBORS, num_labelled(target.train_N)),
            temperature=TEMPERATURE,
        ),
        chance=target.chance,
        majority_share=majority_share(target),
        num_train=num_labelled(target.train_N),
        num_test=num_labelled(target.test_N),
        num_unlabelled=len(test) + test.num_left_out - num_labelled(target.test_N),
        groups=tuple(groups),
        right_samples={name: bits for name, bits in right.items() if bits is not None},
        **facts,
    )


def majority_share(target: Target) -> float:
    """Return the test accuracy of a probe that always answers the commonest class of the train set."""
    train_N, test_N = (label_N[label_N != NO_LABEL] for label_N in (target.train_N, target.test_N))
    commonest = torch.bincount(train_N, minlength=target.num_classes).argmax()
    return float((test_N == commonest).float().mean().item())
