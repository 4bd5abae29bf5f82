"""RunConfig: every setting that affects the result of a run. The config of a section is beside the class that uses it.

Rules between sections are in `trainer.config_rules`, which training checks. A run is read without them.

A recipe (a function in configs/) returns a RunConfig. It is resolved to RUN_DIR/config.json. A run that has begun goes
on with the same config, except for settings that change no result (`trainer.config_changes`). Values that depend on the
machine, such as the batch of a rank, are computed from the config and the number of ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field

from data_pipeline.core.errors import UserError
from data_pipeline.core.plain_text import parse_json, parse_yaml
from data_pipeline.core.schema import Count, Name, Schema, Seed
from trainer.adversary import AdversaryConfig
from trainer.data import DataConfig
from trainer.distributed.engines import DDPConfig, EngineConfig
from trainer.fault_tolerance.watchdog import WatchdogConfig
from trainer.memory import MemoryConfig
from trainer.models.encoder import EncoderConfig
from trainer.objectives import ObjectiveConfig
from trainer.observability.alarms import AlarmConfig
from trainer.observability.tracking import TrackingConfig
from trainer.optim.optimizers import OptimizerConfig, SGDConfig
from trainer.probes.linear import ProbeConfig
from trainer.run_dir import RunDir
from trainer.views import ViewsConfig


class RunConfig(Schema):
    """The settings of a run.

    global_batch_size: the samples of a step on all ranks together. The result does not depend on the number of ranks.
    precision: the dtype of parameters, embeddings and losses. "bfloat16" means float32 with autocast to bfloat16 inside
        encoder and viewmaker. In float64, runs on different numbers of ranks agree to the last few digits. In lower
        precision, rounding can push a ReLU over zero, and the runs diverge after some steps, like two runs on one rank.
    compile: "auto" compiles nothing. On one GPU, it records the whole step as a CUDA graph and replays it (see
        `trainer.recorded_step`), unless code of others takes part or the precision is float64. "step" records with
        these too, and warns if that is not possible. true compiles encoder and viewmaker with torch.compile; the first
        step then takes a minute or more. "both" compiles and records. false does neither.
    cudnn_benchmark: whether cuDNN times its kernels for each convolution at each start, and takes the fastest. Then
        another start may take others, so a restart on a GPU is the whole run up to rounding.
    max_skipped_in_a_row: the number of skipped steps in a row that ends training. A step is skipped if its loss or
        gradient is not finite.
    checkpoint_every_steps: the steps between two checkpoints; there is also one at the end.
    keep_checkpoints: the number of newest checkpoints to keep.
    log_every_steps: the steps between two lines of metrics.
    """

    name: Name
    seed: Seed = 0
    data: DataConfig
    views: ViewsConfig
    encoder: EncoderConfig
    objective: ObjectiveConfig
    optimizer: OptimizerConfig = SGDConfig()
    adversary: AdversaryConfig | None = None
    engine: EngineConfig = DDPConfig()
    global_batch_size: Annotated[int, Field(ge=2, le=2**24)]
    num_epochs: Count
    memory: MemoryConfig = MemoryConfig()
    precision: Literal["float32", "bfloat16", "float64"] = "float32"
    compile: bool | Literal["auto", "step", "both"] = "auto"
    cudnn_benchmark: bool = False
    max_skipped_in_a_row: Count = 10
    checkpoint_every_steps: Count = 500
    keep_checkpoints: Count = 2
    log_every_steps: Count = 10
    alarms: AlarmConfig = AlarmConfig()
    watchdog: WatchdogConfig = WatchdogConfig()
    probe: ProbeConfig = ProbeConfig()
    tracking: TrackingConfig = TrackingConfig()

    @property
    def parameter_dtype(self) -> torch.dtype:
        return torch.float64 if self.precision == "float64" else torch.float32

    @property
    def compiles_networks(self) -> bool:
        """Return whether encoder and viewmaker are compiled with torch.compile."""
        return self.compile in {True, "both"}

    @property
    def records_step(self) -> bool:
        """Return whether steps are recorded as a CUDA graph if that is possible."""
        return self.compile in {"auto", "step", "both"}

    def may_compile_again(self, step: int, *, steps_per_epoch: int) -> bool:
        """Return whether networks may be compiled in a step that is not the first of a start.

        A compiled encoder is compiled again when the viewmaker freezes, because its input then needs no gradient, and
        when an epoch brings a policy that this start of the run has not used yet.
        """
        freezes = self.adversary is not None and step == self.adversary.freeze_step
        return self.compiles_networks and (freezes or (self.views.changes_with_epoch and step % steps_per_epoch == 0))

    def viewmaker_learns(self, *, step: int, epoch: int) -> bool:
        """Return whether there is a viewmaker that learns in a step."""
        if self.adversary is None or not self.views.learns_in(epoch):
            return False
        return self.adversary.freeze_step is None or step < self.adversary.freeze_step

    @property
    def engine_optimizers(self) -> dict[str, OptimizerConfig]:
        """Return the optimizers of all engines that a run may have, by name."""
        viewmaker = {} if self.adversary is None else {"viewmaker": self.adversary.optimizer}
        return {"encoder": self.optimizer, **viewmaker, "objective": self.optimizer}


def read_config(path: Path) -> RunConfig:
    """Return the RunConfig in a .json or .yaml file.

    Raises `UserError` if the file cannot be read or is not a config. A kind is not known if the code that registers it
    was not imported, such as by `--code`.
    """
    return RunConfig.parse(read_settings(path), where=str(path))


def read_run_config(run_dir: RunDir) -> RunConfig:
    """Return the config of a run, as `read_config` does."""
    return read_config(run_dir.config)


def read_settings(path: Path) -> dict[str, Any]:
    """Return the values in a .json or .yaml file. Raises `UserError` if it cannot be read or holds something else."""
    parse, language = (parse_yaml, "YAML") if path.suffix in {".yaml", ".yml"} else (parse_json, "JSON")
    try:
        value = parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read the config {path}: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{path} is not valid {language}: {error}") from None
    if not isinstance(value, dict | None):
        raise UserError(f"{path} does not hold settings such as `name: value`, one a line")
    return value or {}
