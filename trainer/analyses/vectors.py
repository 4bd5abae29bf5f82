"""Vectors of samples and of their views in the two spaces that analyses look at: the embedding and the pooled features.

Shapes: N samples, V views of each, D dimensions of a space, C pooled features.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from data_pipeline.core.progress import Progress
from trainer.analyses.analysis import LoadedRun
from trainer.probes.features import Pictures, extract, frozen
from trainer.probes.view_batches import view_batches

Space = Literal["embedding", "pooled"]
SPACES: tuple[Space, ...] = ("embedding", "pooled")


def plain_vectors(loaded: LoadedRun, rows_N: Tensor) -> dict[Space, Tensor]:
    """Return the vectors (N, D) of test samples without views in every space."""
    encoder = loaded.modules.encoder
    with frozen(encoder):
        pooled_NC = extract(encoder.pooled, loaded.test.images(rows_N), device=loaded.device)
        return {"embedding": encoder.head(pooled_NC), "pooled": pooled_NC}


def view_vectors(loaded: LoadedRun, pictures: Pictures, rows_N: Tensor, *, num_views: int) -> dict[Space, Tensor]:
    """Return the vectors (N, V, D) of `num_views` views of each sample in every space."""
    encoder, policy = loaded.modules.encoder, loaded.modules.view_policy
    by_view: dict[Space, list[Tensor]] = {space: [] for space in SPACES}
    with frozen(encoder), Progress("views encoded", total=num_views * len(rows_N)) as progress:
        for view in range(num_views):
            parts = []
            for batch in view_batches(policy, pictures, rows_N, seed=loaded.seed, view=view, device=loaded.device):
                parts.append(encoder.pooled(batch.views_BCHW))
                progress.advance(len(batch.views_BCHW))
            by_view["pooled"].append(torch.cat(parts))
            by_view["embedding"].append(encoder.head(by_view["pooled"][-1]))
    return {space: torch.stack(views, dim=1) for space, views in by_view.items()}
