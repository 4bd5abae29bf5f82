"""Views: what is done to a picture or a sound before the encoder sees it.

Comes in: pictures (B, C, H, W) float32 in [0, 1], or waveforms (B, T), and the keys that fix every random draw. Goes
out: one view of each picture, same shape, not normalised (the encoder normalises); or of each sound, a normalised
log-mel spectrogram (B, 1, M, N). All policies are batched and run on the training device.
What may never happen: a draw from ambient random state, so that a view could differ between one process and many.
"""

from trainer.views.policy import ViewPolicy, ViewsConfig, build_view_policy, check_views_fit

__all__ = ["ViewPolicy", "ViewsConfig", "build_view_policy", "check_views_fit"]
