"""RunConfig: every setting that affects the result of a run. The config of a section is beside the class that uses it.

A recipe (a function in configs/) returns a RunConfig. It is resolved to RUN_DIR/config.json. A run that has begun goes
on with the same config, except for settings that change no result (`trainer.preflight.MAY_CHANGE`, and whether a step
is recorded). Values that depend
on the machine, such as the batch of a rank, are computed from the config and the number of ranks.
"""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import Field, ValidationInfo, model_validator

from data_pipeline.core.errors import UserError
from data_pipeline.core.kinds import KEEP_UNKNOWN, import_code
from data_pipeline.core.plain_text import parse_json, parse_yaml
from data_pipeline.core.schema import Count, Name, Schema, Seed
from data_pipeline.remote.cache import is_command, refuse_untyped_command
from trainer.adversary import AdversaryConfig
from trainer.data import DataConfig
from trainer.distributed.engines import DDPConfig, EngineConfig
from trainer.fault_tolerance.watchdog import WatchdogConfig
from trainer.memory import MemoryConfig
from trainer.models.encoder import EncoderConfig
from trainer.neighbours import NeighboursConfig
from trainer.objectives import ObjectiveConfig
from trainer.observability.alarms import AlarmConfig
from trainer.observability.tracking import TrackingConfig
from trainer.optim.optimizers import OptimizerConfig, SGDConfig
from trainer.probes.linear import ProbeConfig
from trainer.run_dir import RunDir
from trainer.views import ViewsConfig

logger = logging.getLogger(__name__)


class RunConfig(Schema):
    """The settings of a run.

    global_batch_size: the samples of a step on all ranks together. The result does not depend on the number of ranks.
    precision: the dtype of parameters, embeddings and losses. "bfloat16" means float32 with autocast to bfloat16 inside
        encoder and viewmaker. In float64, runs on different numbers of ranks agree to the last few digits. In lower
        precision, rounding can push a ReLU over zero, and the runs diverge after some steps, like two runs on one rank.
    view_forwards: "two" encodes each view in its own forward pass, as published; in "one" pass, batch norm sees both
        views together, as DINO does. A teacher does the same. Predictors and MoCo's key encoder see one view at a time.
    compile: "auto" compiles nothing. On one GPU, it records the whole step as a CUDA graph and replays it (see
        `trainer.recorded_step`), unless code of others takes part or the precision is float64. "step" records with
        these too, and warns if that is not possible. true compiles encoder and viewmaker with torch.compile; the first
        step then takes a minute or more. "both" compiles and records. false does neither.
    max_skipped_in_a_row: the number of skipped steps in a row that ends training. A step is skipped if its loss or
        gradient is not finite. In float16, steps whose gradient is too large only for the loss scale do not count.
    checkpoint_every_steps: the steps between two checkpoints; there is also one at the end.
    keep_checkpoints: the number of newest checkpoints to keep.
    log_every_steps: the steps between two lines of metrics.
    neighbours: batches of near neighbours, see `trainer.neighbours`; None for batches of any samples.
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
    view_forwards: Literal["two", "one"] = "two"
    global_batch_size: Annotated[int, Field(ge=2, le=2**24)]
    num_epochs: Count
    memory: MemoryConfig = MemoryConfig()
    precision: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    channels_last: bool = False
    compile: bool | Literal["auto", "step", "both"] = "auto"
    max_skipped_in_a_row: Count = 10
    checkpoint_every_steps: Count = 500
    keep_checkpoints: Count = 2
    log_every_steps: Count = 10
    alarms: AlarmConfig = AlarmConfig()
    watchdog: WatchdogConfig = WatchdogConfig()
    probe: ProbeConfig = ProbeConfig()
    tracking: TrackingConfig = TrackingConfig()
    neighbours: NeighboursConfig | None = None

    @model_validator(mode="after")
    def _sections_fit(self, info: ValidationInfo) -> Self:
        """Check the sections against each other.

        A run is read as it was trained, with a warning: a rule that is newer than the run must not hide its weights.
        """
        try:
            self._adversary_belongs_to_the_viewmaker()
            self._the_encoder_takes_the_data()
            self._each_section_fits_the_others()
            self._the_objective_takes_all_views()
            self._batch_norm_can_split_all_views()
            self._batches_can_be_grouped()
            self._the_batch_can_be_cut()
            self._the_views_can_be_checkpointed()
        except ValueError as error:
            if info.context != KEEP_UNKNOWN:
                raise
            _warn_once(f"the run {self.name} has settings with which this version does not train: {error}")
        return self

    def _adversary_belongs_to_the_viewmaker(self) -> None:
        if self.views.is_imported and self.views.is_learned != (self.adversary is not None):
            raise ValueError(
                f'views of kind "{self.views.kind}" {"need" if self.adversary is None else "take no"} section '
                "`adversary`, which holds the training of learned views, such as a viewmaker"
            )

    def _the_encoder_takes_the_data(self) -> None:
        if self.data.mel is not None and self.encoder.in_channels != 1:
            raise ValueError(
                f"spectrograms have one channel, but encoder.in_channels is {self.encoder.in_channels}; set "
                "encoder.in_channels=1, and encoder.mean and encoder.std to null"
            )

    def _each_section_fits_the_others(self) -> None:
        for section in (self.views, self.encoder, self.objective, self.engine):
            section.check(self)

    def _the_objective_takes_all_views(self) -> None:
        if self.views.num_further == 0 or not self.objective.is_imported:
            return
        num = 2 + self.views.num_further
        if not self.objective.takes_further_views:
            raise ValueError(
                f"objective.kind={self.objective.kind} takes two views of a sample, but views.kind={self.views.kind} "
                f"makes {num}; set objective.kind=dino, or another views.kind"
            )
        if self.views.is_learned:
            raise ValueError(f"views.kind={self.views.kind} is learned and makes {num} views; learned views are two")

    def _batch_norm_can_split_all_views(self) -> None:
        if self.encoder.batch_norm == "split" and self.view_forwards == "one" and self.views.num_further > 1:
            raise ValueError(
                "encoder.batch_norm=split with view_forwards=one cuts the further views of "
                f"views.kind={self.views.kind} into other groups on another number of ranks; set view_forwards=two"
            )

    def _batches_can_be_grouped(self) -> None:
        if self.neighbours is None:
            return
        size = self.neighbours.group_size
        if self.objective.is_imported and not self.objective.compares_in_groups:
            raise ValueError(
                f"objective.kind={self.objective.kind} does not compare samples in groups, which neighbours needs; set "
                "objective.kind=symmetric_info_nce, or leave out the section neighbours"
            )
        if self.data.mixture is not None:
            raise ValueError(
                "neighbours are found in one train set, but data.mixture has several; train on one of them"
            )
        if self.global_batch_size % size:
            raise ValueError(f"neighbours.group_size {size} does not divide global_batch_size {self.global_batch_size}")
        if self.neighbours.from_epoch >= self.num_epochs:
            raise ValueError(
                f"neighbours.from_epoch is {self.neighbours.from_epoch}, but the last epoch is {self.num_epochs - 1}"
            )

    def _the_batch_can_be_cut(self) -> None:
        if self.global_batch_size % self.memory.micro_batches:
            raise ValueError(
                f"memory.micro_batches {self.memory.micro_batches} does not divide global_batch_size "
                f"{self.global_batch_size}"
            )

    def _the_views_can_be_checkpointed(self) -> None:
        if self.adversary is None and self.memory.viewmaker_checkpointing != "none":
            raise ValueError(
                f'memory.viewmaker_checkpointing needs a viewmaker, but the views have kind "{self.views.kind}"; '
                "set it to none"
            )

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
    def module_optimizers(self) -> dict[str, OptimizerConfig]:
        """Return the optimizers of encoder and viewmaker, by name."""
        viewmaker = {} if self.adversary is None else {"viewmaker": self.adversary.optimizer}
        return {"encoder": self.optimizer, **viewmaker}

    @property
    def engine_optimizers(self) -> dict[str, OptimizerConfig]:
        """Return the optimizers of all engines that a run may have, by name."""
        return self.module_optimizers | {"objective": self.objective.own_optimizer(self.optimizer)}


@functools.cache
def _warn_once(text: str) -> None:
    logger.warning("%s", text)


def read_config(path: Path, *, allow_pipe: bool = False, allow_code: bool = False) -> RunConfig:
    """Return the RunConfig in a .json or .yaml file, such as the config.json of an earlier run.

    The file may come from a stranger. Without `allow_pipe`, reading data from one of its `pipe:` locations therefore
    raises `UserError`; everything else works. Without `allow_code`, the modules of its import paths are not imported;
    then building what they name raises `UserError`, unless this process has imported them already.

    Raises `UserError` if the file cannot be read or is not a config, or if such a module cannot be found.
    """
    value = read_settings(path)
    if allow_code:
        import_code(value)
    return parse_config(value, path, allow_pipe=allow_pipe)


def read_run_config(run_dir: RunDir, *, allow_pipe: bool = False, allow_code: bool = False) -> RunConfig:
    """Return the config of a run, as `read_config` does.

    A run that does not name the version of its order began before there were two, so its order is of version 1. A kind
    that is not known here is that of a package which is not installed; building what it names raises `UserError`.
    Sections that do not fit each other are read as they are, with a warning: an earlier version has trained with them.
    """
    value = read_settings(run_dir.config)
    if allow_code:
        import_code(value)
    if isinstance(value.get("data"), dict):
        value["data"].setdefault("order_version", 1)
    return parse_config(value, run_dir.config, allow_pipe=allow_pipe, context=KEEP_UNKNOWN)


def keep_order_version(config: RunConfig, run_dir: RunDir) -> RunConfig:
    """Return `config` with the version of the order with which the run in `run_dir` began, if there is such a run."""
    if not run_dir.config.is_file():
        return config
    version = read_run_config(run_dir, allow_pipe=True).data.order_version
    return config.model_copy(update={"data": config.data.model_copy(update={"order_version": version})})


def read_settings(path: Path) -> dict[str, Any]:
    """Return the values in a .json or .yaml file. Raises `UserError` if it cannot be read or holds no mapping."""
    value = parse_file(path, what="config", is_yaml=path.suffix in {".yaml", ".yml"})
    if not isinstance(value, dict):
        raise UserError(f"{path} does not hold a mapping of settings; see RunConfig in trainer/config.py")
    return value


def parse_file(path: Path, *, what: str, is_yaml: bool) -> Any:
    """Return the value in a YAML or JSON file.

    Raises:
        UserError: if the file cannot be read, or is not valid. `what` names it, such as "config".
    """
    parse, language = (parse_yaml, "YAML") if is_yaml else (parse_json, "JSON")
    try:
        return parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read the {what} {path}: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{path} is not valid {language}: {error}") from None


def parse_config(value: dict[str, Any], path: Path, *, allow_pipe: bool, context: str | None = None) -> RunConfig:
    """Return the RunConfig of the values in a file: see `read_config`, which reads them."""
    config = RunConfig.parse(value, where=str(path), context=context)
    has_command = any(map(is_command, config.data.locations))
    return _with_origin(config, str(path) if has_command and not allow_pipe else None)


def refuse_commands(config: RunConfig) -> None:
    """Raise `UserError` if a location in the config is a command from a file that was read without `allow_pipe`."""
    for location in config.data.locations:
        refuse_untyped_command(location, config.data.remote)


def _with_origin(config: RunConfig, path: str | None) -> RunConfig:
    if config.data.remote.read_back_from == path:
        return config
    remote = config.data.remote.model_copy(update={"read_back_from": path})
    return config.model_copy(update={"data": config.data.model_copy(update={"remote": remote})})
