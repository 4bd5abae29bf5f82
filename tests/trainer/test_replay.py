"""A step that was not finite: it is recorded with its samples and its state, replayed in one process, and explained."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from configs import resolve_recipe
from data_pipeline.core.errors import UserError
from data_pipeline.loading.order import BatchOrder
from tests.gloo import run_ranks
from tests.tiny_data import write_tiny_dataset, write_tiny_pair
from trainer import replay, step_replay
from trainer.build import Training, build_training
from trainer.config import RunConfig
from trainer.data import open_stream, read_train_manifest
from trainer.fault_tolerance.step_record import MAX_RECORDS, read_record, recorded_steps
from trainer.run_dir import RunDir, write_json
from trainer.skipped_steps import SkippedSteps

NUM_SAMPLES, BATCH_SIZE, BAD_STEP = 35, 16, 3
RATES = {"encoder": 0.01, "viewmaker": 0.001, "objective": 0.01}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_pair(tmp_path_factory.mktemp("data"), num_train=NUM_SAMPLES, num_test=20)


def configure(data: Path, recipe: str, *overrides: str) -> RunConfig:
    return resolve_recipe(
        recipe,
        [
            f"data.train_dir={data / 'train'}",
            f"data.test_dir={data / 'test'}",
            "data.num_workers=0",
            f"global_batch_size={BATCH_SIZE}",
            "tracking.wandb=disabled",
            *overrides,
        ],
    )


def skipped_steps(run_dir: RunDir, training: Training) -> SkippedSteps:
    sha256 = read_train_manifest(training.modules.config.data).sha256
    return SkippedSteps(run_dir, training, device=torch.device("cpu"), train_manifest_sha256=sha256)


def train_into_trouble(config: RunConfig, directory: Path, poisoned: str, value: float, num_steps: int) -> list[bool]:
    """Train; before `BAD_STEP` overwrite one value of a parameter. Return which steps were skipped."""
    run_dir = RunDir(directory)
    classes = {"base": 2, "overlay": 3}
    training = build_training(config, num_samples=NUM_SAMPLES, num_classes=classes, device=torch.device("cpu"))
    modules = training.modules.trained_modules | {"objective": training.objective}
    stream = open_stream(config.data, global_batch_size=config.global_batch_size, seed=config.seed, end_step=num_steps)
    log = skipped_steps(run_dir, training)
    skipped = []
    for batch in stream:
        if batch.step == BAD_STEP:
            player, _, name = poisoned.partition(".")
            parameter = modules[player].get_parameter(name)
            with torch.no_grad():
                parameter.view(-1)[0] = value
        output = training.step(batch, learning_rates=RATES)
        skipped.append(bool(output.skipped))
        log.add(batch, output, RATES)
    return skipped


@pytest.mark.slow
def test_where_players_alternate_what_was_done_before_the_bad_update_stays(data: Path) -> None:
    """All changes of the bad update are undone, so the state is that after the updates before it."""
    bad = configure(data, "debug:viewmaker", "objective.kind=simsiam", "adversary.update=alternating",
                    "adversary.viewmaker_steps=2")  # fmt: skip
    good = bad.override(["adversary.viewmaker_steps=1"], where="x")  # it ends before the bad update
    (batch,) = open_stream(bad.data, global_batch_size=BATCH_SIZE, seed=0, end_step=1)
    states, skipped = [], []
    for config in (bad, good):
        training = build_training(config, num_samples=NUM_SAMPLES, device=torch.device("cpu"))
        engines = training.engines
        calls = 0

        def poison(gradient: Tensor, config: RunConfig = config) -> Tensor:
            nonlocal calls
            calls += 1
            return gradient * math.inf if config is bad and calls == 2 else gradient

        next(engines["viewmaker"].module.parameters()).register_hook(poison)  # type: ignore[no-untyped-call]
        skipped.append(bool(training.step(batch, learning_rates=RATES).skipped))
        states.append({f"{name}.{key}": value.clone() for name, engine in engines.items()
                       for key, value in (engine.module_state() | engine.optimizer_state()).items()})  # fmt: skip
    assert skipped == [True, False]
    assert states[0].keys() == states[1].keys()
    for name, value in states[1].items():
        assert torch.equal(states[0][name], value), name


def explained(
    config: RunConfig, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    """Return the output of the command."""
    write_json(run_dir.config, config.model_dump(mode="json"))
    command = ["replay", str(run_dir.path), "--step", str(BAD_STEP), "--device", "cpu"]
    monkeypatch.setattr("sys.argv", command)
    replay.main()
    return capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "overrides", "poisoned", "value", "found"),
    [
        ("debug:image", [], "encoder.trunk.layer2.0.bn1.weight", 3e38, "trunk.layer2.0.bn1 ("),  # a number still
        ("debug:viewmaker", [], "viewmaker.stem.1.conv.weight", math.inf, "viewmaker.stem.1 (ConvNorm)"),
        ("debug:image", ["objective.kind=supervised"], "objective.classifier.bias", math.inf, "classifier (Linear)"),
        (
            "debug:viewmaker",
            ["objective.kind=simsiam", "adversary.update=alternating", "view_forwards=one"],
            "encoder.trunk.layer3.0.conv2.weight",
            math.inf,
            "trunk.layer3.0.conv2 (Conv2d)",
        ),
    ],
)
def test_the_first_module_that_is_not_finite_is_named(
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    recipe: str,
    overrides: list[str],
    poisoned: str,
    value: float,
    found: str,
) -> None:
    config = configure(data, recipe, *overrides)
    assert train_into_trouble(config, tmp_path, poisoned, value, BAD_STEP + 1) == [False] * BAD_STEP + [True]
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    said = explained(config, RunDir(tmp_path), monkeypatch, capsys)
    assert f"step {BAD_STEP}, epoch 1, seed 0: {BATCH_SIZE} samples on 1 ranks" in said
    first = next(line for line in said.splitlines() if line.startswith("going forward, the first"))
    assert found in first
    assert "the output of" in first
    assert (f"before the step, {poisoned} held 1 values" in said) == (not math.isfinite(value))
    indices = BatchOrder(NUM_SAMPLES, 0, BATCH_SIZE).rows(0, BAD_STEP, bad={}).indices_R
    assert sum(f"{index:08d}  " in said for index in indices.tolist()) == 10
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.ranks
def test_ranks_record_together_what_one_process_replays(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = configure(data, "debug:image")
    poisoned = "encoder.trunk.layer1.0.conv1.weight"
    skipped = run_ranks(train_into_trouble, 2, config, tmp_path, poisoned, math.inf, BAD_STEP + MAX_RECORDS + 2)
    assert skipped == [[False] * BAD_STEP + [True] * (MAX_RECORDS + 2)] * 2
    run_dir = RunDir(tmp_path)
    assert recorded_steps(run_dir) == list(range(BAD_STEP, BAD_STEP + MAX_RECORDS))  # and no more
    record, states = read_record(run_dir, BAD_STEP)
    indices = BatchOrder(NUM_SAMPLES, 0, BATCH_SIZE).rows(0, BAD_STEP, bad={}).indices_R
    assert record.keys == [f"{index:08d}" for index in indices.tolist()]
    assert record.bad_ranks == [0, 1]
    assert {len(values.keys) for values in record.ranks} == {BATCH_SIZE // 2}
    assert record.learning_rates == RATES
    said = explained(config, run_dir, monkeypatch, capsys)
    assert "on 2 ranks" in said
    assert "the loss was not finite on ranks 0, 1" in said
    assert "trunk.layer1.0.conv1 (Conv2d)" in said

    later, _ = read_record(run_dir, BAD_STEP + MAX_RECORDS - 1)
    assert later.keys != record.keys
    poison = states["encoder"]["trunk.layer1.0.conv1.weight"]
    assert int((~poison.isfinite()).sum()) == 1
    states["encoder"]["trunk.layer1.0.conv1.weight"] = poison.nan_to_num(posinf=0.0)
    lines = "\n".join(step_replay.replay(run_dir, record, states, device="cpu"))
    assert "every number is finite: loss " in lines
    assert "samples with the largest embeddings" in lines


@pytest.mark.slow
def test_a_gradient_that_is_finite_but_too_long_for_float32_is_named(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first layer of the head is made tiny and the second huge, so the embedding does not change."""
    config = configure(data, "debug:image", "encoder.head.hidden_sizes=[32]")
    training = build_training(config, num_samples=NUM_SAMPLES, device=torch.device("cpu"))
    with torch.no_grad():
        for name, factor in {"0.weight": 1e-22, "0.bias": 1e-22, "2.weight": 1e22}.items():
            training.modules.encoder.head.get_parameter(name).mul_(factor)
    (batch,) = open_stream(
        config.data, global_batch_size=BATCH_SIZE, seed=0, start_step=BAD_STEP, end_step=BAD_STEP + 1
    )
    log = skipped_steps(RunDir(tmp_path), training)
    output = training.step(batch, learning_rates=RATES)
    log.add(batch, output, RATES)
    assert log.counts.total == 1
    said = explained(config, RunDir(tmp_path), monkeypatch, capsys)
    assert "the loss was finite, but a gradient or its length was not" in said
    assert "train/encoder_gradient_norm inf" in said
    assert "the first that is not finite" not in said


@pytest.mark.slow
def test_what_cannot_be_replayed_is_said_in_one_sentence(data: Path, tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    (run_dir.path / "nonfinite" / "step_x").mkdir(parents=True)  # is no record
    with pytest.raises(UserError, match="no record of step 2; none of its steps was skipped"):
        read_record(run_dir, 2)
    config = configure(data, "debug:image")
    train_into_trouble(config, run_dir.path, "encoder.trunk.conv1.weight", math.inf, BAD_STEP + 1)
    with pytest.raises(UserError, match=f"it has records of steps {BAD_STEP}"):
        read_record(run_dir, 2)
    record, states = read_record(run_dir, BAD_STEP)
    write_tiny_dataset(tmp_path / "other" / "train", num_samples=NUM_SAMPLES, seed=5)  # the same keys
    write_json(run_dir.config, configure(tmp_path / "other", "debug:image").model_dump(mode="json"))
    with pytest.raises(UserError, match="is not the dataset from which step"):
        step_replay.replay(run_dir, record, states, device="cpu")
    wider = configure(data, "debug:image", "encoder.width=8")
    run_dir.config.unlink()
    write_json(run_dir.config, wider.model_dump(mode="json"))
    with pytest.raises(UserError, match="does not fit the config"):
        step_replay.replay(run_dir, record, states, device="cpu")
