"""Read and write the trained linear heads, a file beside the results of their probe. Analyses judge views with them.

RUN_DIR/probes/step_00010000/heads.safetensors holds head/base/weight (K, F) and head/base/bias (K,), and the same for
each other label, float32. Logits are the encoder's `features` (B, F) times the weight transposed, plus the bias. The
metadata, a JSON object under "heads", hold how the heads were fitted and on which train set.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open

from data_pipeline.core.errors import UserError
from trainer.probes.features import LabelSpace, label_order
from trainer.probes.linear import LinearHead
from trainer.run_dir import write_atomically

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Heads:
    """Heads of one checkpoint by label; `made_by` says in words how they were fitted."""

    by_label: Mapping[LabelSpace, LinearHead]
    made_by: str
    train_manifest_sha256: str


def write_heads(path: Path, heads: Heads) -> None:
    """Write heads atomically. Heads of other labels in the file stay there if they were made in the same way."""
    with contextlib.suppress(UserError):  # no file, or a damaged one
        there = read_heads(path)
        if (there.made_by, there.train_manifest_sha256) == (heads.made_by, heads.train_manifest_sha256):
            heads = replace(heads, by_label={**there.by_label, **heads.by_label})
    tensors = {
        f"head/{space}/{name}": tensor.cpu().contiguous()
        for space, head in heads.by_label.items()
        for name, tensor in (("weight", head.weight_KF), ("bias", head.bias_K))
    }
    origin = {"made_by": heads.made_by, "train_manifest_sha256": heads.train_manifest_sha256}
    # One entry: several would be written in any order, and the same heads must give the same bytes.
    write_atomically(path, safetensors.torch.save(tensors, {"heads": json.dumps(origin)}))


def read_heads(path: Path, *, device: torch.device = _CPU) -> Heads:
    """Read the heads in a file. Raises `UserError` if there is no such file, or if it is damaged."""
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            names, origin = set(file.keys()), json.loads((file.metadata() or {})["heads"])
            by_label = {
                space: LinearHead(file.get_tensor(f"head/{space}/weight"), file.get_tensor(f"head/{space}/bias"))
                for space in label_order(name.split("/")[1] for name in names if name.count("/") == 2)
            }
        return Heads(by_label, origin["made_by"], origin["train_manifest_sha256"])
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise UserError(f"{path} holds no heads ({error}); fit them again with `python -m trainer.probe`") from None
