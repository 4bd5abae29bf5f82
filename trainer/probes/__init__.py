"""Probes measure how well a label can be predicted from the features of a frozen encoder.

Input: a trained encoder, its view policy, and every sample of the train and test shards once (during training, some of
them). Output: for each label the accuracy of a linear probe and of a kNN vote, the trained heads, and curves over
checkpoints.

Invariants: a probe never changes the encoder. It scores every test sample exactly once. Its result does not depend on
the number of ranks. The two label spaces never mix.
"""

from typing import TYPE_CHECKING

from data_pipeline.core.imports import imported_when_used

if TYPE_CHECKING:
    from trainer.probes.any_encoder import Accuracy, probe
    from trainer.probes.linear import ProbeConfig
else:
    __getattr__ = imported_when_used(__name__, {"any_encoder": "Accuracy probe", "linear": "ProbeConfig"})

__all__ = ["Accuracy", "ProbeConfig", "probe"]
