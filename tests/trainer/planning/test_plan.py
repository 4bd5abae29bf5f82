"""Compare a plan with real steps: bytes of tensors in one process, bytes of collectives on two gloo ranks."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

from configs import resolve_recipe
from data_pipeline.core.errors import UserError
from data_pipeline.core.sample import NO_LABEL, Batch
from data_pipeline.loading.placement import resident_bytes
from data_pipeline.storage.manifest import Manifest
from tests.gloo import run_ranks
from tests.tiny_data import write_tiny_pair
from trainer.build import build_training
from trainer.config import RunConfig
from trainer.data import read_manifests
from trainer.distributed.collectives import is_distributed, rank, world_size
from trainer.distributed.engines.deepspeed_engine import DeepSpeedConfig
from trainer.modules import build_modules
from trainer.planning.accounting import Accounts
from trainer.planning.describe import describe
from trainer.planning.fit import MARGIN, bytes_of_data, plan, room_on, what_fits
from trainer.planning.measure import TrainingPlan
from trainer.views.composed import ByEpochConfig

BATCH_SIZE, NUM_SAMPLES, SHAPE = 16, 40, (3, 16, 16)
NUM_CLASSES = {"base": 2, "overlay": 3}
RUNS = {
    "viewmaker": ("debug:viewmaker", []),
    "viewmaker in turns": ("debug:viewmaker", ["adversary.update=alternating", "adversary.viewmaker_steps=2"]),
    "by epoch": ("debug:viewmaker", ["views={kind: by_epoch, policies: [{kind: viewmaker}, {kind: random_mask}]}"]),
    "chunked": ("debug:image", ["objective.chunk_size=5"]),
    "micro batches": ("debug:viewmaker", ["memory.micro_batches=2", "objective.chunk_size=5"]),
    "checkpointing": ("debug:viewmaker", ["memory.encoder_checkpointing=1", "memory.viewmaker_checkpointing=whole"]),
    "moco": ("debug:viewmaker", ["objective.kind=moco", "objective.queue_size=32"]),
    "simsiam": ("debug:viewmaker", ["objective.kind=simsiam", "precision=float64"]),
    "supervised": ("debug:image", ["objective.kind=supervised"]),
    "multi-crop": ("debug:image", ["objective.kind=dino", "objective.num_prototypes=64", "views.kind=multi_crop"]),
    "bank": ("debug:viewmaker", ["objective.kind=instance_discrimination", "objective.num_negatives=5"]),
    "autocast": ("debug:image", ["precision=bfloat16", "objective.kind=barlow_twins", "channels_last=true"]),
}


def configure(run: str, *more: str) -> RunConfig:
    recipe, overrides = RUNS[run]
    return resolve_recipe(recipe, [f"global_batch_size={BATCH_SIZE}", *overrides, *more])


def planned(config: RunConfig, *, ranks: int = 1, device_gigabytes: float | None = None) -> TrainingPlan:
    return _planned(config.model_dump_json(), ranks, device_gigabytes)


@functools.cache
def _planned(config: str, ranks: int, device_gigabytes: float | None) -> TrainingPlan:
    return plan(
        RunConfig.model_validate_json(config),
        world_size=ranks,
        num_samples=NUM_SAMPLES,
        num_classes=NUM_CLASSES,
        device_gigabytes=device_gigabytes,
        input_shape=SHAPE,
        backend="gloo",
    )


@dataclasses.dataclass(frozen=True)
class Real:
    """Bytes of a real run: `resident_bytes` before its first step, the others in it."""

    resident_bytes: int
    step_bytes: int
    output_bytes: int
    sent_bytes: dict[str, int]


def measured(config: RunConfig, num_before: int = 0) -> Real:
    """Measure a step as `trainer.train` takes it, after `num_before` others."""
    size = config.global_batch_size // world_size()
    draw = torch.Generator().manual_seed(rank())
    pictures = torch.randint(0, 256, (size, *SHAPE), dtype=torch.uint8, generator=draw)
    masks = torch.zeros(size, *SHAPE[1:], dtype=torch.uint8)
    labels = {name: torch.full((size,), NO_LABEL) for name in ("base", "overlay")}
    index_B = torch.arange(size) + rank() * size
    batch = Batch(0, 0, index_B, pictures, pictures, masks, masks, labels)

    training = build_training(config, num_samples=NUM_SAMPLES, num_classes=NUM_CLASSES, device=torch.device("cpu"))
    modules = [*training.modules.trained_modules.values(), training.objective]
    state: list[Any] = [
        *(tensor for module in modules for tensor in [*module.parameters(), *module.buffers()]),
        *(tensor for engine in training.engines.values() for tensor in engine.optimizer_state().values()),
        *(pictures, masks, *labels.values(), index_B),
    ]
    for _ in range(num_before):
        training.step(batch, learning_rates=defaultdict(float))
    with Accounts() as accounts:
        output = training.step(batch, learning_rates=defaultdict(float))
        assert not output.skipped
        at_the_end = accounts.live_bytes
        del output
        output_bytes = at_the_end - accounts.live_bytes
    state = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in state]  # of FSDP
    resident = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in state}
    sent_bytes = {name: num for name, num in accounts.sent_bytes.items() if num}
    return Real(sum(resident.values()), accounts.peak_bytes, output_bytes, sent_bytes)


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
def test_memory_is_that_of_a_real_step(run: str) -> None:
    found, real = planned(configure(run)), measured(configure(run))
    assert found.step_bytes == real.step_bytes
    assert found.module_bytes + found.optimizer_bytes + found.batch_bytes == real.resident_bytes
    assert found.output_bytes == real.output_bytes
    assert found.engine_bytes == found.host_bytes == 0
    assert found.sent_bytes == {}


@pytest.mark.slow
@pytest.mark.parametrize("update", ["simultaneous", "alternating"])
def test_a_plan_counts_what_is_kept_for_the_metrics_of_a_viewmaker_in_a_composition(update: str) -> None:
    views = ("{kind: viewmaker}", "{kind: sequence, parts: [{kind: viewmaker}]}")
    alone, composed = (
        planned(configure("viewmaker", f"views={each}", f"adversary.update={update}")).output_bytes for each in views
    )
    assert composed - alone == 2 * BATCH_SIZE * math.prod(SHAPE) * 4  # both inputs; its views are there in any case


DDP = ("viewmaker in turns", "micro batches", "moco", "simsiam", "supervised", "multi-crop", "bank")
FSDP = ("viewmaker in turns", "micro batches")


def sent_bytes(configs: dict[str, RunConfig], num_before: dict[str, int]) -> dict[str, dict[str, int]]:
    """Return what a step of each config sends, after `num_before` others."""
    return {name: measured(config, num_before.get(name, 0)).sent_bytes for name, config in configs.items()}


@pytest.fixture(scope="module")
def sent_by_ddp() -> list[dict[str, dict[str, int]]]:
    """Return what each of two ranks sends in every run of `DDP`."""
    # DDP plans its buckets anew, once, when a module is called again after its first backward.
    num_before = {"viewmaker in turns": 2}
    return run_ranks(sent_bytes, 2, {run: configure(run) for run in DDP}, num_before, timeout_s=300)


@pytest.mark.ranks
@pytest.mark.parametrize("run", DDP)
def test_what_is_sent_is_what_two_ranks_send(run: str, sent_by_ddp: list[dict[str, dict[str, int]]]) -> None:
    found = planned(configure(run), ranks=2)
    assert [of_rank[run] for of_rank in sent_by_ddp] == [found.sent_bytes] * 2


def zero(stage: int, *, offload: bool = False) -> RunConfig:
    engine = DeepSpeedConfig(zero_stage=stage, offload_optimizer=offload)
    return configure("chunked").model_copy(update={"engine": engine})


@pytest.mark.ranks
def test_what_is_sent_is_what_two_ranks_of_zero_send() -> None:
    pytest.importorskip("deepspeed")
    configs = {f"stage {stage}": zero(stage) for stage in (1, 2)}
    found = {name: planned(config, ranks=2).sent_bytes for name, config in configs.items()}
    assert run_ranks(sent_bytes, 2, configs, dict.fromkeys(configs, 1), timeout_s=300) == [found] * 2


@pytest.mark.ranks
def test_what_is_sent_is_what_two_ranks_of_fsdp_send() -> None:
    configs = {run: configure(run, "engine.kind=fsdp") for run in FSDP}
    plans = {run: planned(config, ranks=2) for run, config in configs.items()}
    sent = {run: found.sent_bytes for run, found in plans.items()}
    assert run_ranks(sent_bytes, 2, configs, dict.fromkeys(configs, 2), timeout_s=300) == [sent] * 2
    for run, found in plans.items():
        of_ddp = planned(configure(run), ranks=2)
        encoder = found.num_parameters["encoder"] * 4
        assert of_ddp.gradient_bytes - found.gradient_bytes == encoder // 2
        assert "all parameters count" in describe(found)


@pytest.mark.slow
def test_zero_cuts_what_its_stage_says() -> None:
    of_ddp, *by_stage = (planned(config, ranks=4) for config in (configure("chunked"), *map(zero, range(4))))
    gradient, optimizer = of_ddp.gradient_bytes, of_ddp.optimizer_bytes
    assert [of_stage.gradient_bytes for of_stage in by_stage] == [gradient, gradient, gradient // 4, gradient // 4]
    assert [of_stage.optimizer_bytes for of_stage in by_stage] == [optimizer, *[optimizer // 4] * 3]
    assert {of_stage.output_bytes for of_stage in by_stage} == {of_ddp.output_bytes}
    assert by_stage[2].step_bytes <= by_stage[1].step_bytes == of_ddp.step_bytes
    offloaded = planned(zero(2, offload=True), ranks=4)
    assert (offloaded.optimizer_bytes, offloaded.host_bytes) == (0, optimizer // 4 + gradient // 4)
    assert "lower bound" in describe(by_stage[3])


def test_a_plan_of_policies_by_epoch_counts_an_epoch_in_which_a_viewmaker_learns() -> None:
    first = configure("by epoch")
    assert isinstance(first.views, ByEpochConfig)
    second = first.model_copy(update={"views": ByEpochConfig(policies=first.views.policies[::-1])})
    assert planned(second).step_bytes == planned(first).step_bytes


def test_the_parts_of_a_step_are_within_it() -> None:
    found = planned(configure("viewmaker"))
    assert 0 < found.loss_bytes < found.step_bytes
    assert found.gradient_bytes < found.activation_bytes < found.step_bytes


@pytest.mark.slow
def test_a_whole_matrix_of_similarities_is_in_the_loss() -> None:
    """The matrix is 2 B by 2 B float32 numbers; a chunked loss has only a tile of it."""
    whole, chunked = (
        plan(
            resolve_recipe("debug:image", ["global_batch_size=128", *more]),
            world_size=1,
            num_samples=None,
            device_gigabytes=None,
        )
        for more in ([], ["objective.chunk_size=64"])
    )
    matrix = (2 * 128) ** 2 * 4
    assert matrix < whole.loss_bytes < 4 * matrix
    assert chunked.loss_bytes < matrix / 2


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_the_optimizer_keeps_its_states(optimizer: str) -> None:
    found = planned(configure("chunked", f"optimizer={{kind: {optimizer}}}"))
    (num,) = found.num_parameters.values()
    num_tensors = sum(1 for _ in build_modules(configure("chunked")).encoder.parameters())
    assert found.optimizer_bytes == (2 * num * 4 + num_tensors * 4 if optimizer == "adam" else num * 4)


@pytest.mark.slow
def test_the_cut_that_fits_is_the_least_that_does() -> None:
    whole, halves, quarters = (configure("chunked", f"memory.micro_batches={number}") for number in (1, 2, 4))
    too_much, enough = planned(whole).peak_bytes, planned(halves).peak_bytes
    gigabytes = (too_much + enough) / 2 / (1 - MARGIN) / 1e9
    assert enough <= room_on(int(gigabytes * 1e9)) < too_much
    for config in (whole, quarters):  # wherever the search starts
        fit = planned(config, device_gigabytes=gigabytes).fit
        assert fit is not None
        assert (fit.micro_batches, fit.peak_bytes) == (2, enough)


def test_what_does_not_fit_is_said_to() -> None:
    found = planned(configure("viewmaker"), device_gigabytes=1e-5)
    assert found.fit is not None
    assert found.fit.micro_batches is None
    assert "does not fit" in describe(found)


@pytest.mark.slow
def test_the_advice_for_a_full_memory_is_what_fits() -> None:
    config, halves = configure("chunked"), configure("chunked", "memory.micro_batches=2")
    between = int((planned(config).peak_bytes + planned(halves).peak_bytes) / 2 / (1 - MARGIN))

    def advice(config: RunConfig, device_bytes: int) -> str:
        return what_fits(config, device_bytes=device_bytes, num_samples=NUM_SAMPLES, input_shape=SHAPE)

    assert advice(config, between).startswith("set memory.micro_batches=2 in another --run-dir, with which it needs ")
    assert "see in nvidia-smi what else uses the GPU" in advice(config, 100 * between)
    assert advice(config, 1000).startswith("no number of micro batches fits its 0.0 GB; use more ranks")


@pytest.mark.slow
def test_data_in_the_memory_of_the_device_count() -> None:
    config, halves = configure("chunked"), configure("chunked", "memory.micro_batches=2")
    whole = planned(config).peak_bytes
    room = int((whole + 1000) / (1 - MARGIN))

    def fit(data_bytes: int) -> TrainingPlan:
        return plan(
            config,
            world_size=1,
            num_samples=NUM_SAMPLES,
            device_gigabytes=room / 1e9,
            input_shape=SHAPE,
            data_bytes=data_bytes,
            backend="gloo",
        )

    without, beside = fit(0), fit(room // 20)
    assert without.fit is not None
    assert beside.fit is not None
    assert (without.fit.micro_batches, beside.fit.micro_batches) == (1, 2)
    assert beside.fit.peak_bytes == planned(halves).peak_bytes + room // 20
    assert "data on the device" in describe(beside)
    assert "data on the device" not in describe(without)
    said = what_fits(config, device_bytes=room, num_samples=NUM_SAMPLES, input_shape=SHAPE, data_bytes=room // 20)
    assert said.startswith("set memory.micro_batches=2 in another --run-dir, ")
    assert said.endswith(", or set data.placement=host, which frees the 0.0 GB of the data")


def test_data_are_kept_on_a_device_as_the_stream_does(tmp_path: Path) -> None:
    data = write_tiny_pair(tmp_path, num_train=8, num_test=4)
    settings = [f"data.{split}_dir={data / split}" for split in ("train", "test")]
    train = read_manifests(resolve_recipe("debug:image", settings).data, makes_index=False).train
    assert isinstance(train, Manifest)
    size = resident_bytes(train)

    def kept(*more: str, device_bytes: int = 2 * size) -> int:
        return bytes_of_data(resolve_recipe("debug:image", [*settings, *more]), train, device_bytes=device_bytes)

    assert (kept(), kept(device_bytes=2 * size - 1)) == (size, 0)
    assert kept("data.resident_gigabytes=0.000001") == 0
    assert kept("data.placement=device", "data.resident_gigabytes=0.000001", device_bytes=1) == size
    assert (kept("data.placement=host"), kept("data.placement=stream")) == (0, 0)


@pytest.mark.slow
def test_ranks_share_the_batch() -> None:
    one, four = planned(configure("viewmaker")), planned(configure("viewmaker"), ranks=4)
    assert (one.rank_batch_size, four.rank_batch_size) == (BATCH_SIZE, BATCH_SIZE // 4)
    assert four.activation_bytes < one.activation_bytes / 2
    assert four.engine_bytes == four.gradient_bytes == one.gradient_bytes
    assert not is_distributed()


@pytest.mark.slow
def test_nccl_reduces_what_gloo_gathers() -> None:
    config = configure("viewmaker")
    gloo = planned(config, ranks=2)
    nccl = plan(config, world_size=2, num_samples=NUM_SAMPLES, device_gigabytes=None, input_shape=SHAPE)
    assert sum(gloo.sent_bytes.values()) == sum(nccl.sent_bytes.values())
    assert nccl.sent_bytes["allreduce"] > nccl.gradient_bytes
    assert "allreduce" not in gloo.sent_bytes


@pytest.mark.slow
def test_steps_are_known_with_the_samples() -> None:
    config = configure("viewmaker", "num_epochs=3")
    found = planned(config)
    assert (found.num_samples, found.steps_per_epoch, found.num_steps) == (NUM_SAMPLES, 2, 6)
    unknown = plan(config, world_size=1, num_samples=None, device_gigabytes=None)
    assert unknown.num_steps is None
    assert unknown.input_shape == (3, 32, 32)
    assert "not known" in describe(unknown)
    assert "assumed" in describe(unknown)
    assert "assumed" not in describe(found)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["debug:audio", "debug:audio_viewmaker"])
def test_sounds_are_planned_by_their_spectrograms(recipe: str) -> None:
    config = resolve_recipe(recipe, ["global_batch_size=4"])
    found = plan(config, world_size=2, num_samples=None, device_gigabytes=None)
    mel = config.data.mel
    assert mel is not None
    assert found.batch_bytes == 2 * (2 * mel.num_points * 4) + 3 * 2 * 8
    assert found.activation_bytes > 2 * 2 * mel.num_mels * mel.num_frames * 4
    assert found.input_shape_is_known


@pytest.mark.parametrize(
    ("run", "more", "ranks", "samples", "reason"),
    [
        ("viewmaker", [], 3, NUM_SAMPLES, "cannot be divided by 3 ranks"),
        ("bank", [], 1, None, "build"),
        ("supervised", [], 1, None, "reads labels, but those of data/debug/train are not known; build it first"),
        ("micro batches", [], 16, NUM_SAMPLES, "micro_batches 2 does not divide the 1 samples"),
    ],
)
def test_what_cannot_be_planned_is_refused(
    run: str, more: list[str], ranks: int, samples: int | None, reason: str
) -> None:
    with pytest.raises(UserError, match=reason):
        plan(configure(run, *more), world_size=ranks, num_samples=samples, device_gigabytes=None)
    assert not is_distributed()
