"""Repeat a skipped step in one process, and find the origin of its first inf or nan.

Input: a run directory with a record of the step (`trainer.fault_tolerance.step_record`), and the shards that its config
names. Output: lines that name the first module with an output that is not finite, and the samples. This one process
runs the run's own training step on the whole global batch. Invariant: the run is not changed.

Shapes: B samples of the global batch, D embedding size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from data_pipeline.core.errors import UserError
from data_pipeline.core.sample import Batch
from data_pipeline.loading.order import BatchOrder, ReadingOrder
from trainer.build import build_training
from trainer.config import RunConfig, read_run_config
from trainer.data import open_stream, read_train_manifest
from trainer.distributed.engines import DDPConfig
from trainer.fault_tolerance.step_record import NonFiniteRecord
from trainer.mixture import num_classes
from trainer.neighbours import in_groups, read_groups
from trainer.open_settings import decide_as_recorded
from trainer.optim.loss_scale import LossScale
from trainer.original_crops import leave_out_crops, original_crops
from trainer.own_code import warn_of_changed_code
from trainer.run_dir import RunDir
from trainer.step import StepOutput

_NUM_SAMPLES_LISTED = 10


class _FirstBad:
    """Hooks on all modules and parameters that keep the first tensor in each direction that is not finite.

    The output of a module comes before the output of the module that contains it, so the innermost one is named.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self.forward = self.backward = ""
        for prefix, whole in modules.items():
            for name, module in whole.named_modules(prefix=prefix):
                label = f"{name} ({type(module).__name__})"
                module.register_forward_hook(partial(self._after, label))
            for name, parameter in whole.named_parameters(prefix=prefix):
                if parameter.requires_grad:
                    hook = partial(self._accumulated, f"the gradient of {name}")
                    parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def _after(self, label: str, _module: nn.Module, _given: Any, output: Any) -> None:
        for tensor in _floats(output):
            self.forward = self.forward or _if_bad(f"the output of {label}", tensor)
            if tensor.requires_grad:
                hook = partial(self._gradient, f"the gradient that reaches the output of {label}")
                tensor.register_hook(hook)  # type: ignore[no-untyped-call]

    def _gradient(self, what: str, gradient: Tensor) -> None:
        self.backward = self.backward or _if_bad(what, gradient)

    def _accumulated(self, what: str, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._gradient(what, parameter.grad)


def replay(
    run_dir: RunDir, record: NonFiniteRecord, states: Mapping[str, Mapping[str, Tensor]], *, device: str
) -> list[str]:
    """Repeat the recorded step in one process, and return what is found, in lines.

    Raises `UserError` if the dataset or the state do not fit the run.
    """
    config = read_run_config(run_dir)
    warn_of_changed_code(run_dir)
    config = config.model_copy(update={"engine": DDPConfig(), "compile": False})  # one process needs no more
    where = torch.device(device)
    train = read_train_manifest(config.data)
    stream = open_stream(
        config.data.model_copy(update={"placement": "stream", "num_workers": 0}),
        global_batch_size=config.global_batch_size,
        seed=config.seed,
        start_step=record.step,
        end_step=record.step + 1,
        device=where,
        manifest=train,
        crops=original_crops(config, train),
    )
    found_in = None if config.neighbours is None else config.neighbours.found_in(record.epoch)
    order: ReadingOrder = stream.order
    if found_in is not None:
        assert isinstance(order, BatchOrder)
        groups_NG = read_groups(run_dir.path, found_in)
        order = in_groups(order, lambda _: groups_NG)
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
        objective.load_state_dict(states["objective"])
    except (KeyError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"the recorded state of step {record.step} does not fit the config ({reason})") from None
    training.step.loss_scale = LossScale(enabled=False, device=where)  # a search for the scale overflows by design
    watched = modules | {"objective": objective}
    if "viewmaker" not in modules:
        watched |= {"views": training.modules.view_policy}
    bad_parameters = {
        f"{part}.{name}": num_bad
        for part, module in watched.items()
        for name, tensor in module.state_dict().items()
        if (num_bad := int((~tensor.isfinite()).sum()))
    }
    first = _FirstBad(watched)
    output = training.step(batch, learning_rates=record.learning_rates)
    lines = [_describe(record, config)]
    if record.state_step != record.step:
        lines.append(
            f"the recorded state may be that after {record.state_step} steps: it is read after the skip is known"
        )
    lines += [f"before the step, {name} held {num} values that are not finite" for name, num in bad_parameters.items()]
    for going, what in (("forward", first.forward), ("back", first.backward)):
        if what:
            lines.append(f"going {going}, the first that is not finite: {what}")
    if not first.forward and not first.backward:
        metrics = {name: float(value) for name, value in output.metrics.items()}
        norms = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items() if name.endswith("_gradient_norm"))
        lines += [
            f"here, on {device} in one process, every number is finite: loss {metrics['train/loss']:.6g}, {norms}",
            "a length that is inf overflows float32; other kernels, ranks and loss scales round differently",
        ]
    return [*lines, *_samples(batch, output)]


def _describe(record: NonFiniteRecord, config: RunConfig) -> str:
    ranks = ", ".join(map(str, record.bad_ranks))
    loss = f"not finite on ranks {ranks}" if ranks else "finite, but a gradient or its length was not"
    return (
        f"step {record.step}, epoch {record.epoch}, seed {config.seed}: {len(record.keys)} samples on "
        f"{len(record.ranks)} ranks, precision {config.precision}; the loss was {loss}"
    )


def _samples(batch: Batch, output: StepOutput) -> Iterator[str]:
    """Yield the samples whose embeddings are not finite, or else those with the largest embeddings."""
    keys = batch.keys
    norm_B = torch.maximum(*(z_BD.double().norm(dim=1) for z_BD in (output.z_a_BD, output.z_b_BD)))
    bad = (~norm_B.isfinite()).nonzero().flatten().tolist()
    rows = bad or norm_B.argsort(descending=True).tolist()
    which = "with embeddings that are not finite" if bad else "with the largest embeddings"
    yield f"samples {which}: {len(bad) or len(keys)} of {len(keys)}, by the length of the longer embedding"
    for row in rows[:_NUM_SAMPLES_LISTED]:
        yield f"  {keys[row]}  {float(norm_B[row]):.4g}"


def _floats(value: Any) -> list[Tensor]:
    """Return the floating-point tensors in the arguments or the output of a module."""
    leaves = tree_leaves(value)
    leaves += [each for leaf in leaves if hasattr(leaf, "loss") for each in tree_leaves(vars(leaf))]
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _if_bad(what: str, tensor: Tensor) -> str:
    """Return a description of the tensor if it has values that are not finite; else ""."""
    share = float((~tensor.detach().isfinite()).double().mean())
    return f"{what}, {share:.3g} of its values" if share else ""
