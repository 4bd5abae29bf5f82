"""Train, probe, analyse and report: from batches to a loss, a checkpoint and a report.

An expert policy or a trained viewmaker turns a batch of pictures into two *views*. An *encoder* maps the views to
embeddings, an *objective* compares them, and an *engine* turns the loss into one step of each trained module: the
encoder, and the viewmaker if there is one. A run writes everything into its run directory. Probe, analysis, report and
restart read only this directory. Invariant: results do not depend on the number of ranks.

    batch -> views -> encoder -> objective -> engine -> checkpoint -> probe -> report
"""

from typing import TYPE_CHECKING

from data_pipeline.core.imports import imported_when_used

if TYPE_CHECKING:
    from trainer.adversary import reverse_gradient
    from trainer.exports.encoder import export_onnx, save_encoder, save_pretrained
    from trainer.pretrained import load_encoder, load_published
else:
    __getattr__ = imported_when_used(
        __name__,
        {
            "adversary": "reverse_gradient",
            "exports.encoder": "export_onnx save_encoder save_pretrained",
            "pretrained": "load_encoder load_published",
        },
    )

__version__ = "1.0.0rc1"
__all__ = ["export_onnx", "load_encoder", "load_published", "reverse_gradient", "save_encoder", "save_pretrained"]
