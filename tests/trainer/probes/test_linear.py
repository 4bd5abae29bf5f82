from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from data_pipeline.core.counter_rng import DrawKeys
from data_pipeline.core.errors import UserError
from data_pipeline.core.sample import NO_LABEL
from tests.trainer.probes.toy import Spy, ToyEncoder, toy_pictures
from trainer.probes import linear
from trainer.probes.features import LabelSpace
from trainer.probes.fitting import fit
from trainer.probes.knn import knn_classes
from trainer.probes.linear import (
    PROBE_VIEW,
    FeatureBatch,
    LinearHead,
    ProbeConfig,
    Target,
    epoch_rows,
    fit_linear_probe,
)
from trainer.probes.online import ridge_predict
from trainer.views.composed import ByEpoch, Pair

CPU = torch.device("cpu")
TRAIN, TEST = toy_pictures(203, seed=0), toy_pictures(103, seed=1, num_wrong=13)
TARGETS: dict[LabelSpace, Target] = {
    "base": Target(TRAIN.by_label["base"], TEST.by_label["base"], num_classes=2),
    "overlay": Target(TRAIN.by_label["overlay"], TEST.by_label["overlay"], num_classes=3),
}
CONFIG = ProbeConfig(num_epochs=20, batch_size=32)


def run(
    encoder: ToyEncoder, policy: Any = None, *, targets: Mapping[LabelSpace, Target] = TARGETS, **config: Any
) -> Any:
    probes = fit(
        encoder,
        view_policy=policy or Spy(),
        train=TRAIN,
        test=TEST,
        targets=targets,
        config=CONFIG.model_copy(update=config),
        device=CPU,
    )
    return {space: one.linear for space, one in probes.items()}


def feature_batches(train_NF: Tensor, *, epoch: int, config: ProbeConfig) -> list[FeatureBatch]:
    return [
        (train_NF[rows], {name: target.train_N[rows] for name, target in TARGETS.items()})
        for rows in epoch_rows(len(train_NF), epoch=epoch, config=config)
    ]


@pytest.mark.parametrize("views", ["policy", "none"])
@pytest.mark.parametrize("batch_norm", ["eval", "train"])
def test_planted_accuracy_is_reached_exactly(views: str, batch_norm: str) -> None:
    """13 of 103 test labels are wrong by construction, so each picture scored once gives 90/103 and nothing else."""
    results = run(ToyEncoder(), views=views, batch_norm=batch_norm, learning_rate=0.1)
    for result in results.values():
        assert result.accuracy == 90 / 103
        assert result.accuracy_by_epoch[-1] == result.accuracy
        assert len(result.accuracy_by_epoch) == len(result.train_accuracy_by_epoch) == 20


@pytest.mark.parametrize("space", ["base", "overlay"])
def test_each_of_two_heads_equals_a_plain_torch_loop_with_multi_step_schedule(space: LabelSpace) -> None:
    """The reference is nn.Linear with torch's SGD and MultiStepLR, batch by batch, with the accuracy of each epoch."""
    target = TARGETS[space]
    config = ProbeConfig(num_epochs=10, batch_size=32, learning_rate=0.5, milestones=(0.35, 0.8))
    draw = torch.Generator().manual_seed(0)
    train_NF, test_NF = torch.randn(203, 40, generator=draw), torch.randn(103, 40, generator=draw)
    head = nn.Linear(40, target.num_classes)
    initial = torch.Generator().manual_seed(config.seed)
    for parameter in head.parameters():
        nn.init.uniform_(parameter, -1 / math.sqrt(40), 1 / math.sqrt(40), generator=initial)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.5, momentum=0.9)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[3, 8], gamma=0.1)
    expected = []
    for epoch in range(10):
        for rows in epoch_rows(203, epoch=epoch, config=config):
            optimizer.zero_grad()
            torch.autograd.backward(F.cross_entropy(head(train_NF[rows]), target.train_N[rows]))
            optimizer.step()
        schedule.step()
        expected.append(int((head(test_NF).argmax(1) == target.test_N).sum()) / 103)

    results = fit_linear_probe(
        lambda epoch: feature_batches(train_NF, epoch=epoch, config=config),
        test_features=lambda: test_NF,
        targets=TARGETS,
        config=config,
    )
    assert results[space].result.accuracy_by_epoch == tuple(expected)


def test_batch_norm_mode_is_the_one_asked_for() -> None:
    """The original code normalises by the batch while it fits, and tests with statistics that have moved."""
    encoder = ToyEncoder()
    run(encoder, batch_norm="eval", num_epochs=3)
    assert {training for _, training in encoder.seen} == {False}

    means: list[Tensor] = []
    seen: list[tuple[int, bool]] = []  # outlives the copy that is probed

    class Recording(ToyEncoder):
        def features_and_pooled(self, views_BCHW: Tensor) -> tuple[Tensor, Tensor]:
            assert self.norm.running_mean is not None
            means.append(self.norm.running_mean.clone())
            seen.append((len(views_BCHW), self.norm.training))
            return super().features_and_pooled(views_BCHW)

    run(Recording(), batch_norm="train", num_epochs=3)
    assert sum(num for num, training in seen if training) == 3 * (203 // 32) * 32
    assert sum(num for num, training in seen if not training) == 3 * 103 + 103 + 203  # and once for kNN
    assert not torch.allclose(means[0], means[-1])


def test_every_view_has_its_own_key_and_no_picture_comes_twice_in_an_epoch() -> None:
    spy = Spy()
    run(ToyEncoder(), spy, num_epochs=3, seed=7)
    by_epoch = {epoch: torch.cat([k.index_B for k in spy.keys if k.epoch == epoch]).tolist() for epoch in range(3)}
    assert {(keys.seed, keys.view) for keys in spy.keys} == {(7, PROBE_VIEW)}
    for indices in by_epoch.values():
        assert len(indices) == len(set(indices)) == 203 // 32 * 32
    assert by_epoch[0] != by_epoch[1] != by_epoch[2]


def test_policies_by_epoch_take_the_epochs_of_the_fit_and_of_a_pair_only_the_first_is_fitted() -> None:
    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.spy = Spy()

        def forward(self, images_BCHW: Tensor, keys: DrawKeys, masks_BHW: Tensor | None) -> Tensor:
            return self.spy(images_BCHW, keys, masks_BHW)

    policies = [Policy() for _ in range(4)]
    run(ToyEncoder(), ByEpoch(policies[:2]), num_epochs=3)
    run(ToyEncoder(), Pair(*policies[2:]), num_epochs=3)
    epochs = [sorted({keys.epoch for keys in policy.spy.keys}) for policy in policies]
    assert epochs == [[0, 2], [1], [0, 1, 2], []]


def test_same_seed_same_bits_whatever_the_ambient_random_state() -> None:
    torch.manual_seed(1)
    first = run(ToyEncoder(), num_epochs=3, learning_rate=0.001)
    torch.manual_seed(2)
    assert run(ToyEncoder(), num_epochs=3, learning_rate=0.001) == first
    assert run(ToyEncoder(), num_epochs=3, learning_rate=0.001, seed=1) != first


class Loud(ToyEncoder):
    """An encoder with features so large that a step overflows."""

    def features_and_pooled(self, views_BCHW: Tensor) -> tuple[Tensor, Tensor]:
        features_BF, pooled_BC = super().features_and_pooled(views_BCHW)
        return 1e10 * features_BF, pooled_BC


def test_divergence_is_said_in_one_sentence() -> None:
    with pytest.raises(
        UserError, match=r"linear probe of label_base diverged in its epoch .* lower probe\.learning_rate"
    ):
        run(Loud(), learning_rate=1e30)


def test_scores_that_are_not_finite_have_no_class_and_no_accuracy() -> None:
    """The argmax of nan is class 0, so without a check the accuracy would be the share of that class."""
    label_N = torch.tensor([0, 0, 1, NO_LABEL])
    score_NK = torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [torch.nan, 0.0]])
    assert linear.accuracy(linear.best_classes(score_NK), label_N) == 2 / 3  # the last sample takes no part
    for value in (torch.nan, torch.inf, -torch.inf):
        score_NK[2, 1] = value
        assert math.isnan(linear.accuracy(linear.best_classes(score_NK), label_N))
    bad_NF, good_NF = torch.full((6, 4), torch.nan), torch.eye(6, 4)
    label_N = torch.arange(6) % 2
    assert math.isnan(linear.accuracy(LinearHead(torch.ones(2, 4), torch.zeros(2)).classes(bad_NF), label_N))
    target = Target(label_N, label_N, num_classes=2)
    one_bad_NF = good_NF.clone()
    one_bad_NF[3, 0] = torch.nan
    for bank_NF, query_NF in ((good_NF, bad_NF), (one_bad_NF, good_NF)):
        assert math.isnan(linear.accuracy(knn_classes(bank_NF, query_NF, target, num_neighbors=1), label_N))
        assert (ridge_predict(bank_NF, label_N, query_NF, num_classes=2) < 0).all()
