"""Measure the kNN accuracy of a frozen encoder by a weighted vote of the nearest train pictures (Huang et al. 2023).

The search is exact.

With several ranks, each classifies its share of the queries. The result has the same bits on any number of ranks.

Shapes: N bank pictures, Q queries, B queries at a time, C pooled channels, K classes, L labels, R neighbours (the k of
kNN).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from data_pipeline.core.sample import NO_LABEL
from data_pipeline.core.schema import Schema
from trainer.probes.features import LabelSpace, shared_rows
from trainer.probes.linear import Target, best_classes

logger = logging.getLogger(__name__)

TEMPERATURE = 0.1
_QUERIES_AT_ONCE = 512  # a constant, because bits may depend on it


class KNNResult(Schema):
    """Test accuracy in [0, 1] and its settings. `num_neighbors` is that of `neighbors_of`."""

    accuracy: float
    num_neighbors: int
    temperature: float


def neighbors_of(targets: Mapping[LabelSpace, Target], most: int) -> dict[LabelSpace, int]:
    """Return how many neighbours vote on each label: `most`, or the train samples of its smallest class if it has less.

    With more neighbours, pictures of that class would be outvoted however near its samples are. Logs a
    warning for a label that gets less than `most`.
    """
    found = {}
    for name, target in targets.items():
        num_K = torch.bincount(target.train_N[target.train_N != NO_LABEL])
        found[name] = min(most, int(num_K[num_K > 0].min()))
        if found[name] < most:
            logger.warning(
                "kNN of label_%s has k = %d, the train samples of its smallest class, and not %d",
                name,
                found[name],
                most,
            )
    return found


def knn_classes(
    bank_NC: Tensor,
    queries_QC: Tensor,
    target: Target,
    *,
    num_neighbors: int,
    chunk_size: int = _QUERIES_AT_ONCE,
) -> Tensor:
    """Return the class that the vote gives to each test picture, (Q,) int64. Every rank calls this.

    Each neighbour votes with the weight exp(cosine / `TEMPERATURE`); see `best_classes`.

    Takes features of train and test pictures, and normalises them in float32. The device of the train features
    computes. Train pictures without the label are no neighbours.
    """
    label_N = target.train_N.to(bank_NC.device)
    if not target.is_in_all:
        bank_NC, label_N = bank_NC[label_N != NO_LABEL], label_N[label_N != NO_LABEL]
    unit_NC = F.normalize(bank_NC.float(), dim=1)

    def predict(chunk_BC: Tensor) -> list[Tensor]:
        unit_BC = F.normalize(chunk_BC.to(bank_NC.device).float(), dim=1)
        cosine_BR, row_BR = (unit_BC @ unit_NC.T).topk(num_neighbors, dim=1, sorted=False)
        # A product, because a scatter on a GPU adds in another order each time.
        is_class_BRK = F.one_hot(label_N[row_BR], target.num_classes).to(cosine_BR.dtype)
        return [best_classes(torch.einsum("br,brk->bk", (cosine_BR / TEMPERATURE).exp(), is_class_BRK))]

    with torch.no_grad():
        [class_Q] = shared_rows(predict, queries_QC, chunk_size=chunk_size)
    return class_Q
