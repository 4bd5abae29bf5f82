"""A training step on a GPU's tensors, without a GPU: they have a device, a shape and a type, but no data.

What this shows: everything in a step is made on the device that it is used on, and nothing in it makes the host wait
for the device. What it cannot show: kernels, numbers, and the way back, which torch takes on a real device only; every
parameter is given a gradient instead. Overlays and spectrograms, which are drawn on the device too, are under test too.
"""

from __future__ import annotations

import copy
import re
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from configs import resolve_recipe
from data_pipeline.audio import log_mel
from data_pipeline.audio.log_mel import MelConfig
from data_pipeline.core.batch import Batch
from data_pipeline.core.counter_rng import DrawKeys
from tests.data_pipeline.building.test_overlays import SAVED, some_inputs
from tests.old_versions import needs_gpu_tensors_without_data
from tests.small_encoder import convnet
from trainer.build import assemble
from trainer.config import RunConfig
from trainer.distributed.engines.ddp_engine import DDPEngine
from trainer.distributed.fake_process_group import fake_ranks
from trainer.modules import build_modules, build_run_objective
from trainer.objectives import ObjectiveOutput
from trainer.objectives.objective import OBJECTIVES, PureObjective
from trainer.optim.optimizers import AdamConfig, AdamWConfig, LARSConfig, OptimizerConfig, SGDConfig
from trainer.views.inputs import from_bytes

ROOT = Path(__file__).parents[2]
CUDA = torch.device("cuda", 0)
NUM_ROWS = 8
CONVNET = convnet(32)
aten = torch.ops.aten


class Waits(TorchDispatchMode):
    """Notes, in `found`, which line makes the host wait for the device, and answers where there are no data to do so.

    A number that is asked for; rows that a mask picks, whose number has to be known; a copy to or from the host.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is aten._local_scalar_dense.default:
            self._note(args[0], "asks for a number")
            return False if args[0].dtype == torch.bool else 1
        if func is aten.index.Tensor and any(index is not None and index.dtype == torch.bool for index in args[1]):
            self._note(args[0], "picks rows by a mask")
            return args[0].clone()
        if func in {aten.index.Tensor, aten.index_put_.default} and any(
            index is not None and index.dim() and index.device != args[0].device for index in args[1]
        ):
            self._note(args[0], "copies an index")
        if func is aten._to_copy.default and kwargs.get("device", args[0].device) != args[0].device:
            self._note(args[0], f"copies from {args[0].device} to {kwargs['device']}")
        if func is aten.copy_.default and args[0].device != args[1].device:
            self._note(args[0], f"copies from {args[1].device} to {args[0].device}")
        if re.fullmatch("_fused_.*_", func.overloadpacket.__name__):
            return None  # in place, and some have no form without data
        if func is aten.native_batch_norm.out:  # whose form without data takes milliseconds
            return kwargs["out"], kwargs["save_mean"], kwargs["save_invstd"]
        if func is aten.batch_norm_update_stats.default:  # for which torch has no form without data
            return tuple(torch.empty(args[0].shape[1], device=args[0].device) for _ in range(2))
        return func(*args, **kwargs)

    def _note(self, tensor: Tensor, what: str) -> None:
        if tensor.device.type == "cuda" or "cuda" in what:
            own = {"_note", "__torch_dispatch__"}
            lines = [line for line in traceback.extract_stack() if is_ours(line.filename) and line.name not in own]
            self.found.append(f"{what}, in {Path(lines[-1].filename).name}:{lines[-1].lineno}: {lines[-1].line}")


@contextmanager
def tensors_without_data(*, allow_non_fake_inputs: bool = False) -> Iterator[None]:
    """Enter a `FakeTensorMode`, in the form that torch gives it on a machine without a GPU.

    On a machine with one, torch moves a new tensor to the GPU before any mode sees the copy, so `Waits` would miss it.
    """
    before = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        with FakeTensorMode(allow_non_fake_inputs=allow_non_fake_inputs):
            yield
    finally:
        torch._C._set_only_lift_cpu_tensors(before)


def is_ours(filename: str) -> bool:
    return filename.startswith((str(ROOT / "trainer"), str(ROOT / "data_pipeline"))) or filename.endswith("on_a_gpu.py")


def without_data(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=CUDA)


def filters_on_the_gpu(mel: MelConfig) -> Callable[..., Any]:
    """Return the filters of a spectrogram, which are made once, from numbers."""
    window_W, banks = log_mel._filters(mel, torch.device("cpu"), torch.float32)
    return lambda *_: (without_data(window_W), [(*bounds, without_data(weights_XM)) for *bounds, weights_XM in banks])


def on_the_gpu(module: nn.Module) -> None:
    """Replace a module's tensors by tensors of a GPU without data; to be called inside `tensors_without_data`."""
    for inner in module.modules():
        for name, parameter in inner._parameters.items():
            if parameter is not None:
                inner._parameters[name] = nn.Parameter(without_data(parameter), requires_grad=parameter.requires_grad)
        for name, buffer in inner._buffers.items():
            if buffer is not None:
                inner._buffers[name] = without_data(buffer)


def give_gradients(loss: Tensor) -> None:
    """Give a gradient to every tensor that the loss was made of, as backward would."""
    nodes, seen = [loss.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            variable.grad = torch.zeros_like(variable)
        nodes += [following for following, _ in node.next_functions]


def what_waits(monkeypatch: pytest.MonkeyPatch, recipe: str, overrides: list[str], num_ranks: int) -> list[str]:
    """Return the lines that make the host wait, in a step and in reading its metrics."""
    config = resolve_recipe(
        recipe,
        ["tracking.wandb=disabled", "compile=false", f"global_batch_size={num_ranks * NUM_ROWS}", *overrides],
    )
    modules = build_modules(config)
    with fake_ranks(num_ranks):
        objective = build_run_objective(
            config, modules.encoder, num_samples=64, num_classes={"base": 3}, device=torch.device("cpu")
        )
    monkeypatch.setattr(torch.autograd, "backward", give_gradients)
    if config.data.mel is not None:
        monkeypatch.setattr(log_mel, "_filters", filters_on_the_gpu(config.data.mel))
    with tensors_without_data(), Waits() as waits:
        for module in (modules.encoder, modules.view_policy, objective):
            on_the_gpu(module)
        training = assemble(config, modules, objective)  # outside of the group, where an engine is the bare module
        for engine in training.engines.values():
            monkeypatch.setattr(engine, "step", lambda **_: None)  # a fused kernel
        with fake_ranks(num_ranks, sums_by_gathering=False):
            waits.found.clear()
            training.step(batch(config), learning_rates=defaultdict(float)).read()
    found: list[str] = waits.found
    return found


def batch(config: RunConfig) -> Batch:
    index_B = torch.empty(NUM_ROWS, dtype=torch.int64, device=CUDA)
    if config.data.mel is not None:
        a, b = (torch.empty(NUM_ROWS, config.data.mel.num_points, device=CUDA) for _ in range(2))
        return Batch(0, 0, index_B, a, b, None, None, {})
    pictures = torch.empty(NUM_ROWS, 3, 32, 32, dtype=torch.uint8, device=CUDA)
    labels = {"base": torch.empty_like(index_B)}
    return Batch(0, 0, index_B, pictures, pictures, pictures[:, 0], pictures[:, 0], labels)


@pytest.mark.slow
@needs_gpu_tensors_without_data
@pytest.mark.parametrize(
    ("recipe", "overrides"),
    [
        *[("debug:image", [f"objective.kind={kind}", CONVNET]) for kind in OBJECTIVES if kind not in {"dino", "sieve"}],
        ("debug:image", ["objective.kind=sieve", CONVNET, "encoder.early_head=1"]),
        ("debug:image", ["objective.chunk_size=4", CONVNET]),
        ("debug:image", ["precision=bfloat16", CONVNET]),
        ("debug:image", ["memory.micro_batches=2", "memory.encoder_checkpointing=whole", CONVNET]),
        ("debug:image", ["views.kind=random_mask", CONVNET]),
        ("debug:image", ["views.kind=channel_dropout", CONVNET]),
        ("debug:image", ["views={kind: multi_crop, num_local: 2}", "objective={kind: dino, num_prototypes: 8}"]),
        ("debug:image", ["encoder.batch_norm=split", "encoder.batch_norm_splits=2"]),
        (
            "debug:viewmaker",
            ["adversary.update=alternating", "adversary.viewmaker_steps=2", "objective.kind=simsiam", CONVNET],
        ),
        ("debug:viewmaker", ["views.mask=box", "views.dropout_rate=0.5", "memory.micro_batches=2", CONVNET]),
        ("debug:audio", []),
        ("debug:audio", ["views.kind=waveform"]),
    ],
    ids=lambda value: value.replace("debug:", "") if isinstance(value, str) else ",".join(value)[:60],
)
def test_a_step_makes_the_host_wait_for_nothing(
    monkeypatch: pytest.MonkeyPatch, recipe: str, overrides: list[str]
) -> None:
    """The step runs as rank 0 of two, whose collectives send nothing."""
    assert what_waits(monkeypatch, recipe, overrides, num_ranks=2) == []


@pytest.mark.parametrize("config", [SGDConfig(), AdamConfig(), AdamWConfig()], ids=lambda config: config.kind)
def test_a_fused_optimizer_can_be_recorded(
    config: OptimizerConfig, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """torch refuses to record Adam without a flag, and warns if the flag is set in a step that is not recorded."""
    module = nn.Linear(3, 4)
    with tensors_without_data(), Waits() as waits:
        on_the_gpu(module)
        engine = DDPEngine(module, optimizer=config)
        waits.found.clear()
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        for is_recording in (False, True, False):
            monkeypatch.setattr(
                torch.cuda, "is_current_stream_capturing", lambda is_recording=is_recording: is_recording
            )
            for parameter in module.parameters():
                parameter.grad = torch.empty_like(parameter)
            rate, skip = torch.empty((), device=CUDA), torch.empty((), dtype=torch.bool, device=CUDA)
            engine.step(learning_rate=rate, skip=skip)
    assert waits.found == []
    assert [str(warning.message) for warning in recwarn] == []


def test_an_optimizer_that_is_not_fused_skips_a_step_without_waiting() -> None:
    pytest.importorskip("timm")
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    with tensors_without_data(), Waits() as waits:
        on_the_gpu(module)
        engine = DDPEngine(module, optimizer=LARSConfig())
        for parameter in module.parameters():
            parameter.grad = torch.empty_like(parameter)
        waits.found.clear()
        skip = torch.empty((), dtype=torch.bool, device=CUDA)
        engine.step(learning_rate=0.1, skip=skip)
    assert waits.found == []


@needs_gpu_tensors_without_data
@pytest.mark.parametrize("kind", SAVED)
def test_an_overlay_is_drawn_without_waiting(kind: str) -> None:
    overlay = copy.deepcopy(SAVED[kind]())  # its tensors are replaced
    given = some_inputs(overlay)[:NUM_ROWS]
    with tensors_without_data(), Waits() as waits:
        on_the_gpu(overlay)
        index_B = torch.empty(NUM_ROWS, dtype=torch.int64, device=CUDA)
        inputs = torch.empty(given.shape, dtype=given.dtype, device=CUDA)
        waits.found.clear()
        overlay(inputs, DrawKeys(seed=0, epoch=0, index_B=index_B, view=0), {"base": index_B})
    assert waits.found == []


def test_building_and_loading_modules_leave_the_generators_of_gpus_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop of the user's own may draw there, such as dropout, while it loads an encoder."""
    seeds: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    config = resolve_recipe("debug:viewmaker", ["objective.kind=moco", "objective.queue_size=32"])
    before = torch.get_rng_state()
    first, again = build_modules(config), build_modules(config)
    build_run_objective(config, first.encoder, num_samples=64, num_classes={}, device=torch.device("cpu"))
    assert seeds == []
    assert torch.equal(torch.get_rng_state(), before)
    both = zip(first.encoder.parameters(), again.encoder.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in both)
    torch.manual_seed(0)
    assert seeds == [0]


class Copies(TorchDispatchMode):
    """Notes whether the host waits for each copy to another device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.waits: list[bool] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is aten._to_copy.default:
            self.waits.append(not (kwargs or {}).get("non_blocking", False))
        return func(*args, **(kwargs or {}))


@needs_gpu_tensors_without_data
def test_the_host_waits_for_the_copy_of_a_batch_to_itself_and_for_no_other() -> None:
    """torch gives such a copy pinned memory, which can be read before the GPU has written to it."""
    with tensors_without_data(), Copies() as copies:
        on_the_gpu = batch(resolve_recipe("debug:image", []))
        copies.waits.clear()
        on_the_host = on_the_gpu.to(torch.device("cpu"))
        assert copies.waits == [True] * len(copies.waits) != []
        copies.waits.clear()
        on_the_host.to(CUDA)
        assert copies.waits == [False] * len(copies.waits) != []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_pixels_have_the_bits_of_a_cpu() -> None:
    levels = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(from_bytes(levels.to(CUDA)).cpu(), from_bytes(levels))


@needs_gpu_tensors_without_data
def test_what_waits_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def loss(self: nn.Module, z_a_BD: Tensor, z_b_BD: Tensor, pair: object) -> ObjectiveOutput:
        scale = torch.as_tensor(2.0, device=z_a_BD.device)
        if (z_a_BD * scale).sum().item() > 0:
            z_a_BD = z_a_BD[z_b_BD[:, 0] > 0]
        return ObjectiveOutput(z_a_BD.sum(), {})

    monkeypatch.setattr(PureObjective, "forward", loss)
    found = what_waits(monkeypatch, "debug:image", [], num_ranks=1)
    assert [line.split()[0] for line in found] == ["copies", "asks", "picks"]
