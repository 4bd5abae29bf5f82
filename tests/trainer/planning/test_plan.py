"""Compare a plan with real steps: bytes of tensors in one process."""

from __future__ import annotations

import functools
import tempfile
from collections import defaultdict
from pathlib import Path

import pytest
import torch

from configs import resolve_recipe
from data_pipeline.core.batch import Batch
from data_pipeline.core.errors import UserError
from data_pipeline.core.sample import NO_LABEL
from data_pipeline.loading.placement import resident_bytes
from data_pipeline.storage.manifest import Manifest, load_manifest
from tests.small_encoder import CONVNET
from tests.tiny_data import write_tiny_dataset, write_tiny_pair
from trainer.build import build_training
from trainer.config import RunConfig
from trainer.data import read_manifests
from trainer.distributed.collectives import is_distributed
from trainer.distributed.engines import DDPConfig, DeepSpeedConfig, FSDPConfig
from trainer.planning.live_bytes import LiveBytes, bytes_of
from trainer.planning.plan import MARGIN, TrainingPlan, bytes_of_data, describe, plan

BATCH_SIZE, NUM_SAMPLES, SHAPE = 16, 64, (3, 16, 16)
NUM_CLASSES = {"base": 2, "overlay": 3}
ON_A_CONVNET = {
    "by epoch": ("debug:viewmaker", ["views={kind: by_epoch, policies: [{kind: viewmaker}, {kind: random_mask}]}"]),
    "viewmaker": ("debug:viewmaker", []),
    "chunked": ("debug:image", ["objective.chunk_size=5"]),
    "micro batches": ("debug:viewmaker", ["memory.micro_batches=2"]),
    "moco": ("debug:viewmaker", ["objective.kind=moco", "objective.queue_size=32"]),
    "supervised": ("debug:image", ["objective.kind=supervised", "optimizer={kind: adam}"]),
    "bank": ("debug:viewmaker", ["objective.kind=instance_discrimination", "objective.num_negatives=5"]),
}
RUNS = {name: (recipe, [CONVNET, *overrides]) for name, (recipe, overrides) in ON_A_CONVNET.items()} | {
    "checkpointing": ("debug:viewmaker", ["memory.encoder_checkpointing=1", "memory.viewmaker_checkpointing=whole"]),
    "multi-crop": (
        "debug:image",
        ["objective.kind=dino", "objective.num_prototypes=64", "views={kind: multi_crop, num_local: 2}"],
    ),
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
        train=train_set(),
        device_gigabytes=device_gigabytes,
    )


@functools.cache
def train_set() -> Manifest:
    with tempfile.TemporaryDirectory() as directory:
        return load_manifest(write_tiny_dataset(Path(directory) / "train", num_samples=NUM_SAMPLES))


def measured(config: RunConfig) -> tuple[int, int]:
    """Return the bytes before the first real step, and the most that it adds."""
    pictures = torch.randint(0, 256, (BATCH_SIZE, *SHAPE), dtype=torch.uint8)
    masks = torch.zeros(BATCH_SIZE, *SHAPE[1:], dtype=torch.uint8)
    labels = {name: torch.full((BATCH_SIZE,), NO_LABEL) for name in NUM_CLASSES}
    index_B = torch.arange(BATCH_SIZE)
    batch = Batch(0, 0, index_B, pictures, pictures, masks, masks, labels)
    training = build_training(config, num_samples=NUM_SAMPLES, num_classes=NUM_CLASSES, device=torch.device("cpu"))
    modules = [*training.modules.trained_modules.values(), training.objective]
    state = [
        *(tensor for module in modules for tensor in [*module.parameters(), *module.buffers()]),
        *(tensor for engine in training.engines.values() for tensor in engine.optimizer_state().values()),
        *(pictures, masks, *labels.values(), index_B),
    ]
    with LiveBytes() as live:
        training.step(batch, learning_rates=defaultdict(float))
    return bytes_of(state), live.peak_bytes


@pytest.mark.slow
@pytest.mark.parametrize("run", [run for run in RUNS if run != "viewmaker"])
def test_memory_is_that_of_a_real_step(run: str) -> None:
    found = planned(configure(run))
    resident_bytes, step_bytes = measured(configure(run))
    assert found.step_bytes == step_bytes
    assert found.peak_bytes == resident_bytes + step_bytes


@pytest.mark.slow
def test_each_rank_keeps_its_share_of_the_optimizer() -> None:
    whole, *others = (
        planned(configure("chunked").model_copy(update={"engine": engine}), ranks=4).optimizer_bytes
        for engine in (DDPConfig(), DeepSpeedConfig(zero_stage=1), FSDPConfig())
    )
    assert others == [whole // 4, whole // 4]


@pytest.mark.slow
def test_the_cut_that_fits_is_the_least_that_does() -> None:
    whole, halves, few = (
        resolve_recipe(
            "debug:image",
            [CONVNET, f"global_batch_size={size}", f"memory.micro_batches={parts}", "data.placement=stream"],
        )
        for size, parts in ((64, 1), (64, 2), (2, 1))
    )
    too_much, enough = planned(whole).peak_bytes, planned(halves).peak_bytes
    gigabytes = (too_much + enough) / 2 / (1 - MARGIN) / 1e9
    found = planned(whole, device_gigabytes=gigabytes)
    assert found.fit == (2, enough)
    assert "memory.micro_batches=2" in describe(found, whole, device_gigabytes=gigabytes)
    found = planned(few, device_gigabytes=1e-5)
    assert found.fit is None
    assert "does not fit" in describe(found, few, device_gigabytes=1e-5)


def test_data_are_kept_on_a_device_as_the_stream_does(tmp_path: Path) -> None:
    data = write_tiny_pair(tmp_path, num_train=8, num_test=4)
    settings = [f"data.{split}_dir={data / split}" for split in ("train", "test")]
    train = read_manifests(resolve_recipe("debug:image", settings).data).train
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
    config = configure("viewmaker")
    one, four = planned(config), planned(config, ranks=4)
    assert (one.rank_batch_size, four.rank_batch_size) == (BATCH_SIZE, BATCH_SIZE // 4)
    assert four.step_bytes < one.step_bytes / 2
    assert not is_distributed()
    unknown = plan(resolve_recipe("debug:image"), world_size=1, train=None, device_gigabytes=None)
    assert unknown.input_shape == (3, 32, 32)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["debug:audio", "debug:audio_viewmaker"])
def test_sounds_are_planned_by_their_spectrograms(recipe: str) -> None:
    config = resolve_recipe(recipe, ["global_batch_size=2"])
    found = plan(config, world_size=1, train=None, device_gigabytes=None)
    mel = config.data.mel
    assert mel is not None
    assert found.batch_bytes == 2 * (2 * mel.num_points * 4) + 3 * 2 * 8
    assert found.step_bytes > 2 * 2 * mel.num_mels * mel.num_frames * 4


@pytest.mark.parametrize("run", ["bank", "supervised"])
def test_what_counts_pictures_or_classes_is_not_planned_before_its_dataset_is_built(run: str) -> None:
    with pytest.raises(UserError, match="build it first"):
        plan(configure(run), world_size=1, train=None, device_gigabytes=None)


def test_parts_that_do_not_divide_the_batch_of_a_rank_are_refused() -> None:
    with pytest.raises(UserError, match="micro_batches 2 does not divide the 1 samples of a batch on each of 16 ranks"):
        plan(configure("micro batches"), world_size=16, train=train_set(), device_gigabytes=None)
