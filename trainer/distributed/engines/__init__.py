"""Turn a loss into one step of a module over all ranks, with DistributedDataParallel, DeepSpeed or FSDP2."""

from trainer.distributed.engines.ddp_engine import DDPConfig, DDPEngine
from trainer.distributed.engines.deepspeed_engine import DeepSpeedConfig, DeepSpeedEngine
from trainer.distributed.engines.engine import BaseEngineConfig, Engine, EngineConfig, EngineInputs
from trainer.distributed.engines.fsdp_engine import FSDPConfig, FSDPEngine

__all__ = [
    "BaseEngineConfig",
    "DDPConfig",
    "DDPEngine",
    "DeepSpeedConfig",
    "DeepSpeedEngine",
    "Engine",
    "EngineConfig",
    "EngineInputs",
    "FSDPConfig",
    "FSDPEngine",
]
