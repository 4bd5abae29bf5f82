"""Probe the encoder of one checkpoint: a linear probe and a vote of nearest neighbours for each label.

Guarantees: the encoder is not changed, and no result depends on the number of ranks.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from data_pipeline.core.progress import Progress
from data_pipeline.core.sample import NO_LABEL
from trainer.distributed.collectives import rank
from trainer.modules import TrainedModules
from trainer.own_code import hashes_of_code
from trainer.probes.features import FeatureEncoder, FrozenFeatures, LabelSpace, Pictures, ViewFunction
from trainer.probes.groups import measure_groups, pairs_of
from trainer.probes.heads import Heads
from trainer.probes.knn import probe_knn
from trainer.probes.linear import ProbeConfig, Target, num_labelled, probe_linear
from trainer.probes.reads import InBfloat16, reader
from trainer.probes.result import ProbeResult
from trainer.probes.right_samples import pack_right
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
    # Now, because the user may edit it meanwhile.
    own_code = hashes_of_code(modules.config, (train.manifest, test.manifest))
    targets = label_targets(train, test, wanted=labels)
    pairs = pairs_of(readable_labels(train.manifest, test.manifest), (config or modules.config.probe).groups)
    modules = modules.to(device)
    config = modules.config.probe if config is None else config
    title = f"probe of step {modules.step}"
    encoder: FeatureEncoder = reader(modules.encoder, config.reads)
    view_policy: ViewFunction = modules.view_policy
    if config.precision == "bfloat16":
        encoder, view_policy = InBfloat16(encoder), InBfloat16(view_policy)
    without_views = FrozenFeatures(encoder, device=device)
    known, asked = train.on(device), test.on(device)
    with Progress(title, total=config.num_epochs, enabled=rank() == 0) as progress:
        progress.show_while_waiting(lambda: "encoding samples and fitting heads")

        def on_epoch(epoch: int, accuracy: Mapping[LabelSpace, float]) -> None:
            progress.advance(note=", ".join(f"label_{name} {100 * value:.1f} %" for name, value in accuracy.items()))

        linear = probe_linear(
            encoder,
            view_policy=view_policy,
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
