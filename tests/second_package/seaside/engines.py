"""An engine under another name: that of torch's DistributedDataParallel."""

from __future__ import annotations

from typing import Literal

from torch import nn

from trainer.distributed.engines import BaseEngineConfig, DDPEngine, EngineInputs


class CalmConfig(BaseEngineConfig):
    kind: Literal["seaside_calm"] = "seaside_calm"

    def build(self, module: nn.Module, given: EngineInputs) -> DDPEngine:
        return DDPEngine(module, optimizer=given.optimizer)
