"""Turn a loss into one step of a module over all ranks, with DistributedDataParallel or DeepSpeed."""

from typing import Annotated

from pydantic import Field

from trainer.distributed.engines.ddp_engine import DDPConfig, DDPEngine
from trainer.distributed.engines.deepspeed_engine import DeepSpeedConfig, DeepSpeedEngine
from trainer.distributed.engines.engine import Engine

EngineConfig = Annotated[DDPConfig | DeepSpeedConfig, Field(discriminator="kind")]

__all__ = ["DDPConfig", "DDPEngine", "DeepSpeedConfig", "DeepSpeedEngine", "Engine", "EngineConfig"]
