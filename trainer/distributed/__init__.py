"""Many processes that act as one: environment, collectives, engines.

Each rank has an equal part of a global batch. Loss and gradients are those that one process would compute on the whole
batch. Three conventions guarantee this, and every objective and layer keeps to them:

* the loss of a rank is the loss of its own anchors against the embeddings of all ranks, and the *mean* of the rank
  losses is the global loss;
* a collective is differentiable, and its backward is the exact adjoint: the gradients of gathered rows are summed at
  the rank that owns them, and the gradients of a sum are summed again;
* the engine averages parameter gradients over the ranks. With the two points above this is the gradient of the global
  loss, without a factor anywhere else.

Without a process group every collective is the identity, so the same code runs in one plain process. Invariants: only
this folder imports `torch.distributed`; every collective is reached by all ranks.
"""
