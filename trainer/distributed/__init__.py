"""Many processes that act as one: what a rank computes, and how the ranks agree.

Comes in: one rank's part of a global batch, all parts of equal size. Goes out: the loss and gradients that one process
would have computed on the whole batch. Three conventions carry this, and every objective and layer keeps to them:

* a rank's loss is the loss of its own anchors against everybody's embeddings, and the *mean* of the rank losses is the
  global loss;
* a collective is differentiable, and its backward is the exact adjoint: what was gathered is summed back to its owner,
  what was summed is summed again;
* the engine averages parameter gradients over the ranks, which turns the two points above into the gradient of the
  global loss, without a factor anywhere else.

Without an initialised process group every collective is the identity, so the same code runs in one plain process. What
may never happen: an import of `torch.distributed` outside this folder, or a collective that only some ranks reach.
"""
