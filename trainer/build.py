"""From a config and its players to engines: who steps, by which optimizer, made parallel how."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field
from torch import nn

from data_pipeline.core.schema import Schema
from trainer.distributed.engines import deepspeed_engine
from trainer.distributed.engines.ddp_engine import DDPEngine
from trainer.distributed.engines.deepspeed_engine import DeepSpeedConfig, DeepSpeedEngine
from trainer.distributed.engines.engine import Engine
from trainer.objectives import MoCoConfig, Objective

if TYPE_CHECKING:
    from trainer.config import RunConfig


class DDPConfig(Schema):
    """torch's DistributedDataParallel: every rank keeps everything."""

    kind: Literal["ddp"] = "ddp"


EngineConfig = Annotated[DDPConfig | DeepSpeedConfig, Field(discriminator="kind")]


def check_engine(config: RunConfig) -> None:
    """Raises `UserError` where the engine cannot train the run."""
    if isinstance(config.engine, DeepSpeedConfig):
        deepspeed_engine.check(
            config.engine,
            num_players=len(config.player_optimizers),
            precision=config.precision,
            optimizer_kinds=[optimizer.kind for optimizer in config.engine_optimizers.values()],
            copies_encoder=isinstance(config.objective, MoCoConfig),
        )


def build_engines(config: RunConfig, players: Mapping[str, nn.Module], objective: Objective) -> dict[str, Engine]:
    """An engine for each player, by its name, and "objective" where the objective itself trains something.

    Every rank calls this at the same time, with modules that are on the training device, in training mode.
    """
    modules = dict(players)
    if any(parameter.requires_grad for parameter in objective.parameters()):
        modules["objective"] = objective
    optimizers = config.engine_optimizers
    engines: dict[str, Engine] = {}
    for name, module in modules.items():
        match config.engine:
            case DDPConfig():
                engines[name] = DDPEngine(module, optimizer=optimizers[name])
            case DeepSpeedConfig():
                engines[name] = DeepSpeedEngine(
                    module,
                    optimizer=optimizers[name],
                    config=config.engine,
                    global_batch_size=config.global_batch_size,
                )
    return engines
