"""Repeat a skipped step in one process, and find the origin of its first inf or nan.

Input: a run directory with a record of the step (`trainer.fault_tolerance.step_record`), and the shards that its config
names. Output: lines that name the first module with an output that is not finite, and the samples. This one process
runs the run's own training step on the whole global batch. Invariant: the run is not changed.

Shapes: B samples of the global batch, D embedding size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sized
from dataclasses import dataclass

import torch
from torch import Tensor

from data_pipeline.core.errors import UserError
from data_pipeline.core.sample import Batch
from data_pipeline.loading.reading_order import DatasetOrder
from trainer.build import build_training
from trainer.config import read_run_config
from trainer.data import open_stream, read_train_manifest
from trainer.distributed.engines import DDPConfig
from trainer.fault_tolerance.first_nonfinite import Inspector, Length, num_bad
from trainer.fault_tolerance.step_record import NonFiniteRecord
from trainer.mixture import num_classes
from trainer.neighbours import NeighbourOrder, read_groups
from trainer.open_settings import decide_as_recorded
from trainer.optim.loss_scale import LossScale
from trainer.original_crops import leave_out_crops, original_crops
from trainer.run_dir import RunDir
from trainer.step import StepOutput

_NUM_SAMPLES_LISTED = 10
_NUM_PARAMETERS_LISTED = 3


@dataclass(frozen=True)
class Replay:
    """The result of a replayed step.

    bad_parameters: before the step, the number of values that are not finite, for each parameter that has some.
    found: the first values that are not finite, as the hooks saw them.
    """

    batch: Batch
    output: StepOutput
    bad_parameters: Mapping[str, int]
    found: Inspector

    @property
    def too_long(self) -> list[str]:
        """The engines whose gradient is finite, but whose length overflows float32."""
        norms = {name: value for name, value in self.output.metrics.items() if name.endswith("_gradient_norm")}
        too_long = [name for name, norm in norms.items() if self.found.backward is None and not norm.isfinite()]
        return [name.removeprefix("train/").removesuffix("_gradient_norm") for name in too_long]


def replay(
    run_dir: RunDir,
    record: NonFiniteRecord,
    states: Mapping[str, Mapping[str, Tensor]],
    *,
    device: str,
) -> Replay:
    """Repeat the recorded step in one process. Raises `UserError` if the dataset or the state do not fit the run."""
    config = read_run_config(run_dir)
    config = config.model_copy(update={"engine": DDPConfig(), "compile": False})  # one process needs no more
    where = torch.device(device)
    train = read_train_manifest(config.data)
    stream = open_stream(
        config.data.model_copy(update={"placement": "stream", "num_workers": 0}),
        global_batch_size=config.global_batch_size,
        seed=record.seed,
        start_step=record.step,
        end_step=record.step + 1,
        device=where,
        manifest=train,
        crops=original_crops(config, train),
    )
    epoch = record.step // stream.num_steps_per_epoch
    found_in = None if config.neighbours is None else config.neighbours.found_in(epoch)
    order = stream.order
    if found_in is not None:
        assert isinstance(order, DatasetOrder)
        groups_NG = read_groups(run_dir.path, found_in)
        order = NeighbourOrder(order.order, lambda _: groups_NG)
    batch = next(stream.batches(range(record.step, record.step + 1), order=order))
    if batch.keys != record.keys or record.train_manifest_sha256 != train.sha256:
        raise UserError(
            f"{config.data.train_name} is not the dataset from which step {record.step} was recorded; put it back"
        )
    decided = leave_out_crops(decide_as_recorded(config, run_dir), train)
    training = build_training(decided, num_samples=train.num_samples, num_classes=num_classes(train), device=where)
    modules, objective = training.modules.trained_modules, training.objective
    try:
        for name, module in modules.items():
            module.load_state_dict(states[name])
        objective.load_saved(states["objective"])
    except (KeyError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"the recorded state of step {record.step} does not fit the config ({reason})") from None
    training.step.loss_scale = LossScale(enabled=False, device=where)  # a search for the scale overflows by design
    watched = {"views": training.modules.view_policy} | modules | {"objective": objective}
    if "viewmaker" in modules:
        del watched["views"]
    bad_parameters = {
        f"{player}.{name}": bad
        for player, module in watched.items()
        for name, tensor in module.state_dict().items()
        if (bad := num_bad(tensor))
    }
    inspector = Inspector(
        watched,
        batch_size=len(batch),
        num_parts=config.memory.micro_batches,
        num_views=2 + config.views.num_further,
    )
    output = training.step(batch, learning_rates=record.learning_rates)
    return Replay(batch, output, bad_parameters, inspector)


def explain(record: NonFiniteRecord, result: Replay, *, device: str) -> Iterator[str]:
    """Yield the result in lines."""
    found, bad_ranks = result.found, record.bad_ranks
    losses = (
        f"the loss of rank{_s(bad_ranks)} {', '.join(map(str, bad_ranks))} was not finite"
        if bad_ranks
        else "every loss was finite, a gradient or its length was not"
    )
    yield (
        f"step {record.step}, epoch {record.epoch}, seed {record.seed}: {len(record.keys)} samples on "
        f"{len(record.ranks)} rank{_s(record.ranks)}, precision {record.precision}; {losses}"
    )
    if record.state_step != record.step:
        yield (
            f"the recorded state is that after {record.state_step} steps: the run had gone on before it knew of the "
            "skip, or the encoder had stepped before the viewmaker's step was skipped"
        )
    for name, count in result.bad_parameters.items():
        values = f"{count} values that are" if count > 1 else "1 value that is"
        yield f"before the step, {name} held {values} not finite"
    for engine in result.too_long:
        yield from _too_long(engine, found.lengths)
    for going, finding in (("forward", found.forward), ("back", found.backward)):
        if finding is not None:
            yield f"going {going}, the first that is not finite: {finding.what}, {finding.share:.3g} of its values"
            if finding.given:
                yield f"  {finding.given}"
    if found.forward is None and found.backward is None and not result.too_long:
        loss = float(result.output.metrics["train/loss"])
        yield f"here, on {device} in one process, everything is finite: loss {loss:.6g}"
        yield (
            "the run may have had other kernels (a GPU), another number of ranks (whose sums round differently), "
            "another loss scale (float16), or an earlier state"
        )
    yield from _samples(result)


def _too_long(engine: str, lengths: Mapping[str, Length]) -> Iterator[str]:
    """Yield lines on the parameters that make a gradient too long for float32."""
    own = {name: length for name, length in lengths.items() if name.partition(".")[0] == engine}
    whole = math.hypot(*(length.length for length in own.values()))
    yield (
        f"going back, every gradient is finite, but the length of the whole gradient of {engine} is {whole:.4g}; its "
        f"sum of squares is above {torch.finfo(torch.float32).max:.4g}, the largest float32"
    )
    for name in sorted(own, key=lambda name: own[name].length, reverse=True)[:_NUM_PARAMETERS_LISTED]:
        yield f"  the gradient of {name} has length {own[name].length:.4g}, its largest number {own[name].largest:.4g}"


def _samples(result: Replay) -> Iterator[str]:
    """Yield lines on the samples that are not finite, or else on the samples with the largest embeddings."""
    keys = result.batch.keys
    norm_a_B, norm_b_B = (z_BD.double().norm(dim=1) for z_BD in (result.output.z_a_BD, result.output.z_b_BD))
    rows = list(result.found.forward.rows) if result.found.forward is not None else []
    if rows := rows or (~(norm_a_B + norm_b_B).isfinite()).nonzero().flatten().tolist():
        yield f"samples with values that are not finite: {len(rows)} of {len(keys)}"
    else:
        yield f"samples with the largest embeddings, of {len(keys)}"
        rows = torch.maximum(norm_a_B, norm_b_B).argsort(descending=True).tolist()
    yield "  key       length of embedding a, b"
    for row in rows[:_NUM_SAMPLES_LISTED]:
        yield f"  {keys[row]}  {float(norm_a_B[row]):.4g}, {float(norm_b_B[row]):.4g}"
    if len(rows) > _NUM_SAMPLES_LISTED:
        yield f"  and {len(rows) - _NUM_SAMPLES_LISTED} more"


def _s(several: Sized) -> str:
    return "s" if len(several) > 1 else ""
