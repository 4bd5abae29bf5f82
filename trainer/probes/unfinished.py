"""Keep a linear probe that is being fitted, so that one that was stopped goes on, with the bits of one that was not.

RUN_DIR/probes/unfinished_step_00010000.safetensors holds the heads, their velocities and the accuracies so far. It is
written every half minute at most, and removed when the results are there.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from trainer.distributed.collectives import broadcast_object, rank
from trainer.probes.features import LabelSpace
from trainer.probes.linear import FitState
from trainer.run_dir import write_atomically

logger = logging.getLogger(__name__)

_SECONDS_BETWEEN = 30.0


class UnfinishedFit:
    """The file of a fit that is not finished; nothing is kept if `path` is None.

    `identity` returns what is fitted, as JSON. It is called when it is needed, because it reads all weights. A file of
    another fit is of no use, and is replaced.
    """

    def __init__(
        self,
        path: Path | None,
        identity: Callable[[], Mapping[str, Any]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path, self._clock = path, clock
        self._identity = functools.cache(lambda: json.dumps(identity(), sort_keys=True))
        self._last = clock()

    def load(self) -> FitState | None:
        """Return the state that rank 0 finds; None if there is none of this fit. Every rank calls this."""
        state = self._read(self._path) if rank() == 0 and self._path is not None and self._path.is_file() else None
        if state is not None:
            print(f"the probe goes on after its epoch {state.num_epochs}, from {self._path}", file=sys.stderr)
        return broadcast_object(state)

    def keep(self, state: FitState) -> None:
        """Write a state, if the last one is old enough. Only rank 0 writes."""
        if rank() != 0 or self._path is None or self._clock() - self._last < _SECONDS_BETWEEN:
            return
        tensors = {
            f"{space}/{name}": tensor.cpu().contiguous()
            for space, head in state.heads.items()
            for name, tensor in head.items()
        }
        curves = {"test": dict(state.test_accuracy), "train": dict(state.train_accuracy)}
        metadata = {"identity": self._identity(), "accuracies": json.dumps(curves)}
        try:
            write_atomically(self._path, safetensors.torch.save(tensors, metadata))
        except OSError as error:  # the fit itself needs no file
            logger.warning("the probe is not kept while it is fitted: %s", error)
        self._last = self._clock()

    def _read(self, path: Path) -> FitState | None:
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                if metadata["identity"] != self._identity():
                    return None
                curves = json.loads(metadata["accuracies"])
                heads: dict[LabelSpace, dict[str, Tensor]] = {space: {} for space in curves["test"]}
                for key in set(file.keys()):
                    space, name = key.split("/")
                    heads[space][name] = file.get_tensor(key)
            return FitState(heads, curves["test"], curves["train"])
        except (OSError, SafetensorError, KeyError, ValueError):
            return None  # a damaged file: the fit begins again


def digest_of_weights(modules: Mapping[str, nn.Module]) -> str:
    """Return the sha256 of all parameters and buffers."""
    state = {f"{name}/{key}": value for name, module in modules.items() for key, value in module.state_dict().items()}
    tensors = {
        name: value.detach().cpu().contiguous().clone() for name, value in state.items() if isinstance(value, Tensor)
    }
    return hashlib.sha256(safetensors.torch.save(tensors)).hexdigest()
