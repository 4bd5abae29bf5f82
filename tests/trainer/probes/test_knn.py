from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sklearn.neighbors import KNeighborsClassifier

from trainer.probes.features import LabelSpace
from trainer.probes.knn import NUM_NEIGHBORS, knn_accuracies, nearest, vote
from trainer.probes.linear import Target


def random_features(num: int, *, num_channels: int = 12, seed: int) -> torch.Tensor:
    return torch.randn(num, num_channels, generator=torch.Generator().manual_seed(seed)) * 3


BANK, LABELS = random_features(150, seed=0), torch.randint(4, (150,), generator=torch.Generator().manual_seed(1))
QUERIES = random_features(103, seed=2)


def slow_reference(num_neighbors: int) -> list[int]:
    """Sum exp(cosine / 0.1) by class over the nearest pictures, one query at a time, in float64."""
    bank, queries = BANK.double().numpy(), QUERIES.double().numpy()
    bank /= np.linalg.norm(bank, axis=1, keepdims=True)
    predicted = []
    for query in queries / np.linalg.norm(queries, axis=1, keepdims=True):
        cosines = bank @ query
        scores = np.zeros(4)
        for neighbor in np.argsort(-cosines)[:num_neighbors]:
            scores[LABELS[neighbor]] += np.exp(cosines[neighbor] / 0.1)
        predicted.append(int(scores.argmax()))
    return predicted


def predict(bank: torch.Tensor, queries: torch.Tensor, *, num_neighbors: int) -> torch.Tensor:
    cosine_QR, neighbor_QR = nearest(bank, queries, num_neighbors=num_neighbors)
    return vote(cosine_QR, LABELS[neighbor_QR], num_classes=4)


@pytest.mark.parametrize("chunk_size", [10, 512])
def test_the_accuracy_equals_a_slow_float64_loop_in_chunks_of_any_size(chunk_size: int) -> None:
    expected = torch.tensor(slow_reference(NUM_NEIGHBORS))
    half_wrong = torch.where(torch.arange(len(QUERIES)) % 2 == 0, expected, (expected + 1) % 4)
    targets: dict[LabelSpace, Target] = {
        "base": Target(LABELS, expected, num_classes=4),
        "overlay": Target(LABELS, half_wrong, num_classes=4),
    }
    assert knn_accuracies(BANK, QUERIES, targets, chunk_size=chunk_size) == {"base": 1.0, "overlay": 52 / 103}


@pytest.mark.parametrize("num_neighbors", [1, 7, 150])
def test_equals_scikit_learn(num_neighbors: int) -> None:
    """Among unit vectors the Euclidean distance d gives the cosine 1 - d^2 / 2, hence the same neighbours and votes."""

    def weights(distances: NDArray[np.float64]) -> NDArray[np.float64]:
        votes: NDArray[np.float64] = np.exp((1 - distances**2 / 2) / 0.1)
        return votes

    unit_bank, unit_queries = (torch.nn.functional.normalize(x.double(), dim=1).numpy() for x in (BANK, QUERIES))
    peer = KNeighborsClassifier(n_neighbors=num_neighbors, weights=weights, algorithm="brute").fit(unit_bank, LABELS)
    predicted = predict(BANK, QUERIES, num_neighbors=num_neighbors)
    assert predicted.tolist() == peer.predict(unit_queries).tolist()


def test_large_features_do_not_overflow() -> None:
    scaled = predict(BANK * 1e6, QUERIES * 1e-6, num_neighbors=NUM_NEIGHBORS)
    assert torch.equal(scaled, predict(BANK, QUERIES, num_neighbors=NUM_NEIGHBORS))
