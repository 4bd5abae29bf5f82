"""Probe the encoder of one checkpoint, and describe what was found: a result for each label, and the heads."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from data_pipeline.core.sample import NO_LABEL
from trainer.models.encoder import Encoder
from trainer.probes.features import FeatureEncoder, LabelSpace, Pictures, ViewFunction
from trainer.probes.fitting import Fitted, fit
from trainer.probes.groups import measure_groups, pairs_of
from trainer.probes.heads import Heads
from trainer.probes.knn import TEMPERATURE, KNNResult
from trainer.probes.linear import ProbeConfig, Target, num_labelled
from trainer.probes.result import ProbeResult, pack_right
from trainer.probes.targets import label_targets, readable_labels


def read_out(
    encoder: FeatureEncoder,
    view_policy: ViewFunction,
    train: Pictures,
    test: Pictures,
    config: ProbeConfig,
    device: torch.device,
    *,
    step: int,
    facts: Mapping[str, Any],
) -> tuple[Mapping[LabelSpace, ProbeResult], Heads]:
    """Probe the labels of `config`, or all that the pictures have, on an encoder on `device`. Every rank calls this.

    Returns the results of the checkpoint by label, and the trained heads. `facts` are more fields of the results.
    Raises `UserError` if the train set and the test set have different classes, or lack one of the labels.
    """
    started = time.monotonic()
    targets = label_targets(train, test, wanted=config.labels)
    fitted = fit(
        encoder,
        view_policy=view_policy,
        train=train.on(device),
        test=test.on(device),
        targets=targets,
        config=config,
        device=device,
    )
    facts = {
        "checkpoint_step": step,
        "probe_config": config.protocol,
        "train_manifest_sha256": train.manifest.sha256,
        "test_manifest_sha256": test.manifest.sha256,
        "seconds": round(time.monotonic() - started, 1),
        **facts,
    }
    pairs = pairs_of(readable_labels(train.manifest, test.manifest), config.groups)
    results = {space: describe(space, one, test, pairs=pairs, facts=facts) for space, one in fitted.items()}
    settings = (f"{name} {value}" for name, value in config.fit_settings.items())
    heads = {space: one.head for space, one in fitted.items()}
    return results, Heads(heads, f"probe with {', '.join(settings)}", train.manifest.sha256)


def reader(encoder: Encoder, reads: str) -> FeatureEncoder:
    """Return a module from which probes read, with the weights of the encoder.

    "features" is the encoder itself: the linear probe reads its `features`, and kNN its `pooled`. "embedding" gives
    both the output of the head, on which the loss works. "pixels" gives both the normalised pictures, flattened.
    """
    return encoder if reads == "features" else _Reader(encoder, reads)


class _Reader(nn.Module):
    """A module of the encoder's weights that gives one reading as both kinds of features."""

    def __init__(self, encoder: Encoder, reads: str) -> None:
        super().__init__()
        self.encoder, self._reads = encoder, reads

    def features_and_pooled(self, views_BCHW: Tensor) -> tuple[Tensor, Tensor]:
        is_embedding = self._reads == "embedding"
        reading = self.encoder(views_BCHW) if is_embedding else self.encoder.normalise(views_BCHW).flatten(1)
        return reading, reading


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
    groups = (
        measure_groups(
            space,
            fitted.predicted,
            pair=pair,
            labels=test.by_label,
            num_classes=(len(test.class_names(pair[0])), len(test.class_names(pair[1]))),
            num_left_out=test.num_left_out,
        )
        for pair in pairs
        if space in pair
    )
    right, confusion = {}, {}
    for name, predicted in fitted.predicted.items():
        test_N = target.test_N.to(predicted.device)
        right[name] = pack_right((predicted == test_N)[test_N != NO_LABEL])
        counts = Counter(zip(test_N.tolist(), predicted.tolist(), strict=True))
        confusion[name] = tuple((*pair, num) for pair, num in sorted(counts.items()) if pair[0] != NO_LABEL)
    return ProbeResult(
        label=space,
        title=test.manifest.labels[space].title,
        class_names=test.class_names(space),
        linear=fitted.linear,
        knn=KNNResult(
            accuracy=fitted.knn_accuracy,
            num_neighbors=fitted.num_neighbors,
            temperature=TEMPERATURE,
        ),
        chance=target.chance,
        majority_share=majority_share(target),
        num_train=num_labelled(target.train_N),
        num_test=num_labelled(target.test_N),
        num_unlabelled=len(test) + test.num_left_out - num_labelled(target.test_N),
        groups=tuple(groups),
        right_samples=right,
        confusion=confusion,
        **facts,
    )


def majority_share(target: Target) -> float:
    """Return the test accuracy of a probe that always answers the commonest class of the train set."""
    train_N, test_N = (label_N[label_N != NO_LABEL] for label_N in (target.train_N, target.test_N))
    commonest = torch.bincount(train_N, minlength=target.num_classes).argmax()
    return float((test_N == commonest).float().mean().item())
