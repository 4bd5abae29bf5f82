"""Views: what is done to a picture before the encoder sees it.

Comes in: pictures (B, C, H, W) float32 in [0, 1] and the keys that fix every random draw. Goes out: one view of each
picture, same shape, not normalised (the encoder normalises). All policies are batched and run on the training device.
What may never happen: a draw from ambient random state, so that a view could differ between one process and many.
"""

from trainer.views.policy import ViewPolicy, ViewsConfig, build_view_policy

__all__ = ["ViewPolicy", "ViewsConfig", "build_view_policy"]
