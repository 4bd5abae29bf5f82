from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sklearn.neighbors import KNeighborsClassifier

from trainer.probes.knn import knn_classes, neighbors_of
from trainer.probes.linear import Target, accuracy


def random_features(num: int, *, num_channels: int = 12, seed: int) -> torch.Tensor:
    return torch.randn(num, num_channels, generator=torch.Generator().manual_seed(seed)) * 3


BANK, LABELS = random_features(150, seed=0), torch.randint(4, (150,), generator=torch.Generator().manual_seed(1))
QUERIES = random_features(103, seed=2)
TARGET = Target(LABELS, LABELS, num_classes=4)


def test_all_of_four_separated_clusters_are_told_apart(caplog: pytest.LogCaptureFixture) -> None:
    """Features after a ReLU have cosines near 1, so among 120 neighbours the largest class would win everywhere."""
    label_N, test_label_Q = torch.arange(4).repeat_interleave(torch.tensor([20, 20, 20, 60])), torch.arange(40) % 4
    bank_NC, queries_QC = (
        10 + torch.eye(4)[labels] + 0.01 * random_features(len(labels), num_channels=4, seed=seed)
        for seed, labels in enumerate((label_N, test_label_Q))
    )
    targets = {"base": Target(label_N, test_label_Q, num_classes=4)}
    neighbors = neighbors_of(targets, 200)
    assert neighbors == {"base": 20}
    assert "label_base has k = 20" in caplog.text
    [target] = targets.values()

    def found(num_neighbors: int) -> float:
        return accuracy(knn_classes(bank_NC, queries_QC, target, num_neighbors=num_neighbors), test_label_Q)

    assert found(20) == 1.0
    assert KNeighborsClassifier(5).fit(bank_NC, label_N).score(queries_QC, test_label_Q) == 1.0
    assert found(120) == 0.25


def test_a_class_without_train_samples_and_samples_without_the_label_do_not_lower_k() -> None:
    label_N = torch.tensor([0] * 5 + [2] * 7 + [-1] * 2)
    targets = {"base": Target(label_N, label_N, num_classes=3)}
    assert [neighbors_of(targets, most) for most in (4, 200)] == [{"base": 4}, {"base": 5}]


@pytest.mark.parametrize(("num_neighbors", "chunk_size"), [(1, 512), (30, 10), (150, 512)])
def test_equals_scikit_learn(num_neighbors: int, chunk_size: int) -> None:
    """Among unit vectors the Euclidean distance d gives the cosine 1 - d^2 / 2, hence the same neighbours and votes."""

    def weights(distances: NDArray[np.float64]) -> NDArray[np.float64]:
        votes: NDArray[np.float64] = np.exp((1 - distances**2 / 2) / 0.1)
        return votes

    unit_bank, unit_queries = (torch.nn.functional.normalize(x.double(), dim=1).numpy() for x in (BANK, QUERIES))
    peer = KNeighborsClassifier(n_neighbors=num_neighbors, weights=weights, algorithm="brute").fit(unit_bank, LABELS)
    predicted = knn_classes(BANK, QUERIES, TARGET, num_neighbors=num_neighbors, chunk_size=chunk_size)
    assert predicted.tolist() == peer.predict(unit_queries).tolist()


def test_large_features_do_not_overflow() -> None:
    scaled = knn_classes(BANK * 1e6, QUERIES * 1e-6, TARGET, num_neighbors=30)
    assert torch.equal(scaled, knn_classes(BANK, QUERIES, TARGET, num_neighbors=30))
