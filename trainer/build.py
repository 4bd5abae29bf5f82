"""Build what takes the steps of a run, from its config: modules, objective, engines, step."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from trainer.config import RunConfig
from trainer.distributed.collectives import on_every_rank, rank, world_size
from trainer.distributed.engines import Engine, EngineInputs
from trainer.models.random_layers import has_random_layers
from trainer.modules import NO_CLASSES, TrainedModules, build_modules, build_run_objective, learned_part
from trainer.objectives import Objective
from trainer.optim.optimizers import learning_rate_at
from trainer.pretrained import load_start
from trainer.recorded_step import CudaGraphs, RecordedStep, why_not_by_default, why_not_recorded
from trainer.step import TrainingStep

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Training:
    """The connected parts of a training on this rank.

    Attributes:
        modules: the encoder and the view policy, on the training device.
        objective: the objective, on the same device.
        engines: "encoder"; "viewmaker" if the views are learned; "objective" if the objective has trained parameters.
        step: the step that trains on a batch.
    """

    modules: TrainedModules
    objective: Objective
    engines: dict[str, Engine]
    step: TrainingStep | RecordedStep

    def learning_rates(self, step: int, *, num_steps: int) -> dict[str, float]:
        """Return the learning rate of each engine at a step, from 0, in a run of `num_steps`."""
        config = self.modules.config
        size, optimizers = config.global_batch_size, config.engine_optimizers
        return {
            name: learning_rate_at(optimizers[name], step=step, num_steps=num_steps, global_batch_size=size)
            for name in self.engines
        }


def build_training(
    config: RunConfig,
    *,
    num_samples: int,
    num_classes: Mapping[str, int] = NO_CLASSES,
    device: torch.device,
    is_new: bool = True,
) -> Training:
    """Return an untrained training. Its weights are a function of the config, and of the weights that it names.

    Every rank must call this at the same time.

    Args:
        config: with no setting of the encoder left open; see `trainer.open_settings`.
        num_samples: the size of the train set.
        num_classes: the number of classes of each of its labels; see `trainer.mixture.num_classes`.
        device: where training happens.
        is_new: whether the encoder begins with the weights that the config names; False if a checkpoint follows.
    """
    modules = build_modules(config).to(device, config.parameter_dtype)
    if is_new and config.encoder.weights is not None:
        # Before an objective copies the encoder, and an engine cuts it.
        said = on_every_rank(lambda: load_start(modules.encoder))
        if rank() == 0:
            logger.info("%s", said)
    objective = build_run_objective(
        config, modules.encoder, num_samples=num_samples, num_classes=num_classes, device=device
    )
    return assemble(config, modules, objective)


def assemble(config: RunConfig, modules: TrainedModules, objective: Objective) -> Training:
    """Put engines around modules that are on the training device, and return the training.

    Every rank must call this at the same time.
    """
    engines = _build_engines(config, modules, objective)
    if config.compiles_networks:
        # Products of matrices stay in float32 on purpose: most of them are in the loss.
        warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")
        modules.encoder.compile()
        if modules.viewmaker is not None:
            learned = learned_part(modules.viewmaker)
            # Learned views of one's own need no such method.
            getattr(learned, "compile_layers", learned.compile)()
    step = TrainingStep(config, engines=engines, view_policy=modules.view_policy, objective=objective)
    return Training(modules, objective, engines, _recorded(step, config, modules, objective))


def _recorded(
    step: TrainingStep, config: RunConfig, modules: TrainedModules, objective: Objective
) -> TrainingStep | RecordedStep:
    """Return a step that records itself, or `step` if the config does not ask for that or it is not possible."""
    device = next(modules.encoder.parameters()).device
    is_random = has_random_layers(modules.encoder)
    reason = why_not_recorded(config, device=device, num_ranks=world_size(), has_random_layers=is_random)
    if reason is None and config.compile == "auto":
        reason = why_not_by_default(config)
    if config.records_step and reason is None:
        return RecordedStep(step, CudaGraphs(), stateful=[*modules.trained_modules.values(), objective])
    if config.records_step and rank() == 0 and (device.type == "cuda" or config.compile != "auto"):
        level = logging.INFO if config.compile == "auto" else logging.WARNING
        logger.log(level, "compile=%s records no step as a CUDA graph here: %s", config.compile, reason)
    return step


def _build_engines(config: RunConfig, modules: TrainedModules, objective: Objective) -> dict[str, Engine]:
    trained: dict[str, nn.Module] = dict(modules.trained_modules)
    if any(parameter.requires_grad for parameter in objective.parameters()):
        trained["objective"] = objective
    optimizers = config.engine_optimizers
    engine = config.engine
    blocks = {"encoder": modules.encoder.trunk.blocks()}
    return {
        name: engine.of_module(name).build(
            module, EngineInputs(optimizers[name], config.global_batch_size, blocks.get(name, ()))
        )
        for name, module in trained.items()
    }
