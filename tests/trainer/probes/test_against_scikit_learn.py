"""Linear heads against scikit-learn's, in a file of their own, because its import takes seconds in every rank."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression, RidgeClassifier

from trainer.probes.linear import ProbeConfig, Target, fit_linear_probe
from trainer.probes.online import ridge_predict


def test_a_head_trained_to_the_end_is_the_logistic_regression_of_scikit_learn() -> None:
    """The classes overlap, so the minimum of the cross entropy is unique up to a common shift of all classes."""
    draw = torch.Generator().manual_seed(0)
    label_N, test_label_M = (torch.randint(3, (num,), generator=draw) for num in (400, 200))
    centre_KF = torch.randn(3, 6, generator=draw)
    train_NF, test_MF = (
        centre_KF[label] + 1.5 * torch.randn(len(label), 6, generator=draw) for label in (label_N, test_label_M)
    )
    [probe] = fit_linear_probe(
        lambda epoch: [(train_NF, {"base": label_N})],
        test_features=lambda: test_MF,
        targets={"base": Target(label_N, test_label_M, num_classes=3)},
        config=ProbeConfig(num_epochs=1000, learning_rate=0.2, milestones=(0.9,)),
    ).values()
    peer = LogisticRegression(C=np.inf, tol=1e-8, max_iter=1000).fit(train_NF.double().numpy(), label_N.numpy())

    def centred(weight: torch.Tensor) -> torch.Tensor:
        return weight - weight.mean(0)

    expected_KF, expected_K = torch.from_numpy(peer.coef_), torch.from_numpy(peer.intercept_)
    torch.testing.assert_close(centred(probe.head.weight_KF).double(), centred(expected_KF), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(centred(probe.head.bias_K).double(), centred(expected_K), rtol=1e-3, atol=1e-3)
    assert probe.result.accuracy == peer.score(test_MF.double().numpy(), test_label_M.numpy())
    assert 0.4 < probe.result.accuracy < 0.9


@pytest.mark.parametrize("num_classes", [2, 7])
def test_ridge_equals_scikit_learn(num_classes: int) -> None:
    draw = torch.Generator().manual_seed(0)
    label_N = torch.randint(num_classes, (300,), generator=draw)
    centre_KC = torch.randn(num_classes, 20, generator=draw)
    train_NC = 5 + 3 * (centre_KC[label_N] + 2 * torch.randn(300, 20, generator=draw))
    test_MC = 5 + 3 * 2 * torch.randn(500, 20, generator=draw)
    scale = (train_NC - train_NC.mean(0)).double().square().mean().sqrt()
    peer = RidgeClassifier(alpha=0.1 * 300, solver="cholesky").fit((train_NC.double() / scale).numpy(), label_N.numpy())
    expected = peer.predict((test_MC.double() / scale).numpy())
    assert len(set(expected.tolist())) == num_classes
    assert ridge_predict(train_NC, label_N, test_MC, num_classes=num_classes, penalty=0.1).tolist() == expected.tolist()
