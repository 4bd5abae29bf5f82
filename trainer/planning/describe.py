"""Print a training plan as a table."""

from __future__ import annotations

from trainer.planning.fit import MARGIN
from trainer.planning.measure import Fit, TrainingPlan


def describe(plan: TrainingPlan) -> str:
    """Return the plan as a table."""
    shape = " x ".join(map(str, plan.input_shape))
    known = "" if plan.input_shape_is_known else ", assumed, because there are no shards"
    rows = [
        ("ranks", f"{plan.world_size}, engine {plan.engine}"),
        ("global batch", f"{plan.global_batch_size:,} samples of {shape}{known}"),
        ("batch of a rank", f"{plan.rank_batch_size:,}, {plan.micro_batch_size:,} encoded at once"),
        *((f"parameters, {name}", f"{num:,}") for name, num in plan.num_parameters.items()),
        ("", ""),
        ("memory of a rank", ""),
        ("  modules and objective", _bytes(plan.module_bytes)),
        ("  kept by the engine", _bytes(plan.engine_bytes)),
        ("  optimizer", _bytes(plan.optimizer_bytes)),
        ("  batch and last output", _bytes(plan.batch_bytes + plan.output_bytes)),
        *([("  data on the device", _bytes(plan.data_bytes))] if plan.data_bytes else []),
        ("  step, at most", _bytes(plan.step_bytes)),
        ("    gradients", _bytes(plan.gradient_bytes)),
        ("    activations", _bytes(plan.activation_bytes)),
        ("    loss", _bytes(plan.loss_bytes)),
        ("  peak of all tensors", _bytes(plan.peak_bytes)),
        *([("  in host memory", _bytes(plan.host_bytes))] if plan.host_bytes else []),
        ("", ""),
        ("sent by a rank in a step", _bytes(sum(plan.sent_bytes.values()))),
        *((f"  {name}", _bytes(size)) for name, size in sorted(plan.sent_bytes.items())),
        ("", ""),
        ("samples", "not known, because there are no shards" if plan.num_samples is None else f"{plan.num_samples:,}"),
        (
            "steps",
            "not known" if plan.num_steps is None else f"{plan.num_steps:,} ({plan.steps_per_epoch:,} an epoch)",
        ),
    ]
    if plan.device_bytes is not None and plan.fit is not None:
        rows += [("", ""), (f"on {_bytes(plan.device_bytes)}", _fit_in_words(plan, plan.fit))]
    lines = [plan.name, *(f"{name:26}{value}".rstrip() for name, value in rows)]
    return "\n".join([*lines, "", *_not_counted(plan)])


def _fit_in_words(plan: TrainingPlan, fit: Fit) -> str:
    if fit.micro_batches is None or fit.peak_bytes is None:
        return "does not fit with any number of micro batches; use more ranks or a smaller batch"
    size = plan.rank_batch_size // fit.micro_batches
    return f"memory.micro_batches={fit.micro_batches}: {size:,} samples at once, peak {_bytes(fit.peak_bytes)}"


def _not_counted(plan: TrainingPlan) -> list[str]:
    return [
        "These are the bytes of tensors. A GPU also holds the CUDA context, buffers of NCCL, workspaces of cuDNN and",
        f"memory that its allocator cannot use; {MARGIN:.0%} of the memory is left for them. Also not counted: making",
        "expert views, views of your own and spectrograms, batches that the stream has ready, and a checkpoint while",
        "it is copied.",
        *(
            ["ZeRO 3: all parameters count, because a rank may gather them all; the bytes sent are a lower bound."]
            if plan.engine.endswith("ZeRO 3")
            else []
        ),
        *(
            ["FSDP: all parameters count, because a rank builds the whole encoder before it is cut."]
            if plan.engine == "fsdp"
            else []
        ),
    ]


def _bytes(size: int) -> str:
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= factor:
            return f"{size / factor:.2f} {unit}"
    return f"{size} B"
