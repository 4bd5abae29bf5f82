"""kNN read-out of a frozen encoder as Huang et al. (2021) measure it: a weighted vote of the nearest train pictures.

Shapes: N bank pictures, Q queries, C pooled channels, K classes, R neighbours (the k of kNN).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from data_pipeline.schema import Schema
from trainer.probes.features import FeatureEncoder, LabelSpace, Pictures, extract, frozen
from trainer.probes.linear import Target

NUM_NEIGHBORS = 200
TEMPERATURE = 0.1


class KNNResult(Schema):
    """Test accuracy in [0, 1], and what it was measured with; `num_neighbors` is at most the size of the train set."""

    accuracy: float
    num_neighbors: int
    temperature: float


def knn_predict(
    bank_NC: Tensor,
    bank_label_N: Tensor,
    queries_QC: Tensor,
    *,
    num_classes: int,
    num_neighbors: int = NUM_NEIGHBORS,
    temperature: float = TEMPERATURE,
    chunk_size: int = 512,
) -> Tensor:
    """Predicted classes (Q,) int64: argmax over classes of the sum of exp(cosine / temperature) over the neighbours.

    The neighbours are the `num_neighbors` of the bank (or all, if there are fewer) with the largest cosine. Features
    are brought to unit length here, in float32. At most (chunk_size, N) cosines are held at a time.
    """
    bank_NC, queries_QC = F.normalize(bank_NC.float(), dim=1), F.normalize(queries_QC.float(), dim=1)
    num_neighbors = min(num_neighbors, len(bank_NC))
    predicted = []
    for chunk_BC in torch.split(queries_QC, chunk_size):
        cosine_BR, neighbor_BR = (chunk_BC @ bank_NC.T).topk(num_neighbors, dim=1, sorted=False)
        score_BK = torch.zeros(len(chunk_BC), num_classes, device=chunk_BC.device)
        score_BK.scatter_add_(1, bank_label_N[neighbor_BR], (cosine_BR / temperature).exp())
        predicted.append(score_BK.argmax(1))
    return torch.cat(predicted)


def probe_knn(
    encoder: FeatureEncoder,
    *,
    train: Pictures,
    test: Pictures,
    targets: Mapping[LabelSpace, Target],
    device: torch.device,
) -> dict[LabelSpace, KNNResult]:
    """kNN accuracy for every target, from pooled features of the pictures without views; the encoder is unchanged."""
    with frozen(encoder):
        bank_NC = extract(encoder.pooled, train.images_NCHW, device=device)
        queries_QC = extract(encoder.pooled, test.images_NCHW, device=device)
    results: dict[LabelSpace, KNNResult] = {}
    for name, target in targets.items():
        predicted_Q = knn_predict(bank_NC, target.train_N.to(device), queries_QC, num_classes=target.num_classes)
        results[name] = KNNResult(
            accuracy=float((predicted_Q == target.test_N.to(device)).sum().item()) / len(predicted_Q),
            num_neighbors=min(NUM_NEIGHBORS, len(bank_NC)),
            temperature=TEMPERATURE,
        )
    return results
