"""Run training on many processes: environment, collectives, engines.

Each rank has an equal part of a global batch. Loss and gradients equal what one process would compute on the whole
batch. Three conventions guarantee this, and every objective and layer follows them:

- The loss of a rank is the loss of its own anchors against the embeddings of all ranks. The *mean* of the losses of the
  ranks is the global loss.
- A collective is differentiable, and its backward pass is the exact adjoint: the gradients of gathered rows are summed
  at the rank that owns them, and the gradients of a sum are summed again.
- The engine averages parameter gradients over the ranks. With the two points above, this is the gradient of the global
  loss, without a factor anywhere else.

Without a process group, every collective is the identity, so the same code runs in one process. Invariants: only this
folder imports `torch.distributed`; all ranks reach every collective.
"""

from typing import TYPE_CHECKING

from data_pipeline.core.imports import imported_when_used

if TYPE_CHECKING:
    from trainer.distributed.collectives import all_gather_rows, all_reduce_sum, rank, world_size
else:
    __getattr__ = imported_when_used(__name__, {"collectives": "all_gather_rows all_reduce_sum rank world_size"})

__all__ = ["all_gather_rows", "all_reduce_sum", "rank", "world_size"]
