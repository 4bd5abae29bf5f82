"""Accuracies in groups, against a loop over the samples; and probes of labels that some samples lack."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from data_pipeline.core.sample import NO_LABEL
from data_pipeline.loading.decode import DecodedSamples
from tests.trainer.probes.toy import ToyEncoder, toy_pictures
from trainer.probes import groups as groups_module
from trainer.probes.features import Pictures, encode, frozen
from trainer.probes.groups import Groups, measure_groups, pairs_of
from trainer.probes.knn import knn_classes
from trainer.probes.linear import ProbeConfig, Target
from trainer.probes.online import OnlineProbe
from trainer.probes.targets import label_targets

CPU = torch.device("cpu")


def random_case(seed: int) -> tuple[Pictures, dict[str, torch.Tensor]]:
    pictures = toy_pictures(200, seed=seed)
    draw = torch.Generator().manual_seed(seed)
    labels = {name: label_N.clone() for name, label_N in pictures.by_label.items()}
    for label_N in labels.values():
        label_N[torch.rand(200, generator=draw) < 0.1] = NO_LABEL
    labels["base"][labels["overlay"] == 2] = 0  # so that a group is empty
    return pictures, labels


@pytest.mark.parametrize("space", ["base", "overlay"])
def test_the_groups_are_those_of_a_loop(space: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups_module, "LEAST_GROUP", 10)
    _, labels = random_case(3)
    predicted = torch.randint(0, 2, (200,), generator=torch.Generator().manual_seed(1))
    groups = measure_groups(
        space, {"linear": predicted}, pair=("base", "overlay"), labels=labels, num_classes=(2, 3), num_left_out=7
    )
    num: dict[tuple[int, int], int] = {}
    right: dict[tuple[int, int], int] = {}
    unlabelled = 7
    for base, overlay, own, said in zip(
        labels["base"].tolist(), labels["overlay"].tolist(), labels[space].tolist(), predicted.tolist(), strict=True
    ):
        if NO_LABEL in (base, overlay):
            unlabelled += 1
            continue
        num[base, overlay] = num.get((base, overlay), 0) + 1
        right[base, overlay] = right.get((base, overlay), 0) + (own == said)
    assert groups.num_unlabelled == unlabelled > 7
    for base in range(2):
        for overlay in range(3):
            assert groups.num_test[base][overlay] == num.get((base, overlay), 0)
            assert groups.right["linear"][base][overlay] == right.get((base, overlay), 0)
    share, classes = min((right[group] / count, group) for group, count in num.items() if count >= 10)
    worst = groups.worst("linear")
    assert worst is not None
    assert (worst.accuracy, worst.classes, worst.num_test) == (share, classes, num[classes])


def test_if_all_groups_are_small_none_is_the_worst() -> None:
    groups = Groups(labels=("base", "overlay"), num_test=((49, 0),), right={"knn": ((3, 0),)}, num_unlabelled=0)
    assert groups.worst("knn") is None


def test_the_pairs_are_all_or_those_that_are_named() -> None:
    labels = {"base": ("a", "b"), "overlay": ("x", "y", "z"), "site": ("p", "q")}
    assert pairs_of(labels, None) == [("base", "overlay"), ("base", "site"), ("overlay", "site")]
    assert pairs_of(labels, [("site", "base")]) == [("site", "base")]
    many = {"base": tuple(map(str, range(1_000))), "site": tuple(map(str, range(1_000)))}
    assert pairs_of(many, None) == []


def test_labels_and_groups_do_not_change_the_protocol() -> None:
    config = ProbeConfig(labels=("base",), groups=(("base", "overlay"),))
    assert config.protocol == ProbeConfig()


def partial(num: int, *, seed: int, share: float) -> Pictures:
    """Toy pictures of which some have no overlay label."""
    pictures = toy_pictures(num, seed=seed)
    lacks_N = torch.rand(num, generator=torch.Generator().manual_seed(seed)) < share
    overlay_N = torch.where(lacks_N, NO_LABEL, pictures.by_label["overlay"])
    by_label = {"base": pictures.by_label["base"], "overlay": overlay_N}
    assert isinstance(pictures.samples, DecodedSamples)
    return replace(pictures, samples=replace(pictures.samples, labels=by_label), by_label=by_label)


def only(pictures: Pictures, rows_N: torch.Tensor) -> Pictures:
    assert isinstance(pictures.samples, DecodedSamples)
    by_label = {name: label_N[rows_N] for name, label_N in pictures.by_label.items()}
    return replace(pictures, samples=pictures.samples.take(rows_N), by_label=by_label)


def test_samples_without_a_label_are_no_neighbours_and_no_test_samples() -> None:
    """The vote over some labels is that over a dataset of the samples that have them."""
    train, test = partial(203, seed=0, share=0.3), partial(103, seed=1, share=0.3)
    encoder = ToyEncoder()
    with frozen(encoder):
        [bank_NC] = encode(lambda x_BCHW: [encoder.pooled(x_BCHW)], train, device=CPU)
        [queries_QC] = encode(lambda x_BCHW: [encoder.pooled(x_BCHW)], test, device=CPU)
    targets = label_targets(train, test)
    in_train, in_test = (part.by_label["overlay"] != NO_LABEL for part in (train, test))
    whole = Target(train.by_label["overlay"][in_train], test.by_label["overlay"][in_test], num_classes=3)
    expected = knn_classes(bank_NC[in_train], queries_QC[in_test], whole, num_neighbors=9)
    assert torch.equal(knn_classes(bank_NC, queries_QC, targets["overlay"], num_neighbors=9)[in_test], expected)


def test_the_online_probe_leaves_out_samples_without_a_label() -> None:
    train, test = partial(203, seed=0, share=0.3), partial(103, seed=1, share=0.3)
    encoder: Any = ToyEncoder()
    found = OnlineProbe(encoder, train=train, test=test, device=CPU, dtype=torch.float32)()
    in_train, in_test = ((part.by_label["overlay"] != NO_LABEL).nonzero()[:, 0] for part in (train, test))
    alone = OnlineProbe(
        encoder, train=only(train, in_train), test=only(test, in_test), device=CPU, dtype=torch.float32
    )()
    for name in ("probe/overlay/knn", "probe/overlay/ridge"):
        assert found[name] == pytest.approx(alone[name])
    one = OnlineProbe(
        encoder, train=train, test=test, device=CPU, dtype=torch.float32, config=ProbeConfig(labels=("base",))
    )()
    assert "probe/overlay/knn" not in one
    assert one["probe/base/knn"] == found["probe/base/knn"]
