"""Checkpoints: complete or absent, whole, pruned, written in the background, with one sentence for each failure."""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import nn

from configs import resolve_recipe
from data_pipeline.core.errors import UserError
from tests.gloo import run_ranks
from tests.small_encoder import CONVNET
from trainer.build import build_training
from trainer.checkpoint.files import FORMAT_VERSION, read_index, read_states, write_files, write_tensors
from trainer.checkpoint.restore import newest_state, restore
from trainer.checkpoint.save import CheckpointWriter, HostMemory
from trainer.config import RunConfig
from trainer.distributed.collectives import rank
from trainer.distributed.engines import Engine
from trainer.distributed.engines.ddp_engine import DDPEngine
from trainer.models.heads import HeadConfig
from trainer.modules import build_modules
from trainer.objectives import BYOLConfig, ObjectiveConfig, PureObjective, nt_xent_loss
from trainer.objectives.instance_discrimination import InstanceDiscriminationConfig
from trainer.objectives.moco import MoCoConfig
from trainer.optim.optimizers import AdamConfig
from trainer.pretrained import load_modules
from trainer.run_dir import RunDir, write_json

NT_XENT = PureObjective(nt_xent_loss, temperature=0.5)


@pytest.fixture
def config() -> RunConfig:
    return resolve_recipe("debug:viewmaker")


def start(run_dir: RunDir, config: RunConfig) -> dict[str, DDPEngine]:
    if not run_dir.config.is_file():
        write_json(run_dir.config, config.model_dump(mode="json"))
    return {
        name: DDPEngine(module, optimizer=config.engine_optimizers[name])
        for name, module in build_modules(config).trained_modules.items()
    }


def save(run_dir: RunDir, *steps: int, engines: Mapping[str, DDPEngine], keep: int = 2) -> None:
    with CheckpointWriter(run_dir, keep=keep) as writer:
        for step in steps:
            writer.save(step, engines=engines, objective_state={})


def fake_step(engines: Mapping[str, Engine], seed: int) -> None:
    """Take a step with random gradients, so that weights and optimizer state both move."""
    draw = torch.Generator().manual_seed(seed)
    for engine in engines.values():
        for parameter in engine.module.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=draw)
        engine.step(learning_rate=0.01)


def weights(engines: dict[str, DDPEngine]) -> list[torch.Tensor]:
    return [tensor.clone() for engine in engines.values() for tensor in engine.module.state_dict().values()]


def test_a_restored_run_goes_on_bit_for_bit(config: RunConfig, tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    engines = start(run_dir, config)
    fake_step(engines, 0)
    with CheckpointWriter(run_dir, keep=2) as writer:
        writer.save(1, engines=engines, objective_state={})
    again = start(run_dir, config)
    assert restore(run_dir, again, NT_XENT).step == 1
    for each in (engines, again):
        fake_step(each, 1)  # momentum and Adam's moments matter here
    assert all(map(torch.equal, weights(engines), weights(again)))


def test_step_0_is_the_untrained_encoder_whatever_the_ambient_random_state(config: RunConfig, tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    start(run_dir, config)
    states = []
    for ambient in (1, 2):
        torch.manual_seed(ambient)
        states.append(load_modules(run_dir, step=0).encoder.state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_a_checkpoint_of_another_run_is_refused(config: RunConfig, tmp_path: Path) -> None:
    runs = [RunDir(tmp_path / name) for name in ("a", "b")]
    for run_dir in runs:
        engines = start(run_dir, config)
        write_json(run_dir.provenance, {"run_id": run_dir.path.name * 32})
        save(run_dir, 1, engines=engines)
    one, other = runs
    shutil.copytree(one.path, tmp_path / "copy")
    assert load_modules(RunDir(tmp_path / "copy")).step == 1, "a copy of the whole directory"
    shutil.rmtree(one.checkpoints)
    shutil.copytree(other.checkpoints, one.checkpoints)
    for step in (None, 1):
        with pytest.raises(UserError, match="step_00000001 is a checkpoint of another run"):
            load_modules(one, step=step)
    with pytest.raises(UserError, match=r"its run_id is bbb.*has aaa.*put the run's own checkpoints back"):
        newest_state(one)
    one.provenance.unlink()
    assert load_modules(one).step == 1, "provenance.json is lost"


def test_a_step_that_is_not_there_names_those_that_are(config: RunConfig, tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    save(run_dir, 7, engines=start(run_dir, config), keep=1)
    for step in (3, -1, -7):
        with pytest.raises(UserError, match=f"no checkpoint of step {step}; it has checkpoints of steps 0, 7"):
            load_modules(run_dir, step=step)


def tiny(seed: int = 0, *, num_columns: int = 3) -> dict[str, DDPEngine]:
    """Return an engine whose state takes a millisecond to write."""
    torch.manual_seed(seed)
    return {"encoder": DDPEngine(nn.Linear(num_columns, 2), optimizer=AdamConfig())}


def restore_tiny(run_dir: RunDir) -> int:
    return restore(run_dir, tiny(1), NT_XENT).step


def test_a_file_is_recorded_as_it_is_and_is_for_all_who_may_read_its_folder(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "plain").touch()
    tensors = {"weight": torch.ones(3, 5), "scalar": torch.tensor(7), "empty": torch.empty(0, 4)}
    record = write_tensors(checkpoint / "ours.safetensors", tensors)
    content = (checkpoint / "ours.safetensors").read_bytes()
    assert (record.num_bytes, record.sha256) == (len(content), sha256(content).hexdigest())
    assert (checkpoint / "ours.safetensors").stat().st_mode == (checkpoint / "plain").stat().st_mode
    found = safetensors.torch.load(content)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_a_copy_is_of_the_moment_and_contiguous() -> None:
    memory = HostMemory()
    pictures = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    expected = pictures.clone()
    copy = memory.copy({"a": {"pictures": pictures, "step": torch.tensor(3)}, "b": {"flags": torch.ones(3) > 0}})
    pictures.zero_()
    memory.wait()
    assert torch.equal(copy["a"]["pictures"], expected)
    assert copy["a"]["pictures"].is_contiguous()
    assert copy["a"]["step"].item() == 3
    assert copy["b"]["flags"].tolist() == [True] * 3
    first = copy["a"]["pictures"].data_ptr()
    assert memory.copy({"a": {"pictures": expected}})["a"]["pictures"].data_ptr() == first  # no new memory


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_copy_from_a_gpu_is_of_the_moment_too(tmp_path: Path) -> None:
    """The state is overwritten by kernels that are queued behind the copy, before it can have ended."""
    weight = torch.full((64, 1 << 20), 1.0, device="cuda")
    torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]
    began = time.perf_counter()
    memory = HostMemory()
    copy = memory.copy({"a": {"weight": weight, "turned": weight[:8, :8].T, "host": torch.ones(2)}})
    weight.fill_(2.0)
    assert time.perf_counter() - began < 1.0
    memory.wait()
    assert copy["a"]["weight"].is_pinned()
    assert all((tensor == 1).all() for tensor in copy["a"].values())


def test_training_goes_on_while_a_checkpoint_is_written_and_the_next_save_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, entered = threading.Event(), threading.Event()

    def gated(*args: Any, **kwargs: Any) -> int:
        entered.set()
        assert gate.wait(10)
        return write_files(*args, **kwargs)

    monkeypatch.setattr("trainer.checkpoint.save.write_files", gated)
    monkeypatch.setattr("trainer.checkpoint.save._ROUND_SECONDS", 0.02)
    run_dir, engines = RunDir(tmp_path), tiny()
    before = {name: tensor.clone() for name, tensor in engines["encoder"].module_state().items()}
    with CheckpointWriter(run_dir, keep=2) as writer:
        writer.save(1, engines=engines, objective_state={})
        assert entered.wait(10)
        fake_step(engines, 0)  # what is written is the state of the call
        assert run_dir.latest_step() is None
        threading.Timer(0.2, gate.set).start()
        began = time.perf_counter()
        writer.save(2, engines=engines, objective_state={})
        assert time.perf_counter() - began > 0.15
        assert run_dir.checkpoint(1).is_dir()
    assert run_dir.latest_step() == 2
    found = read_states(run_dir.checkpoint(1), read_index(run_dir.checkpoint(1)))["encoder"]
    assert all(torch.equal(found[name], tensor) for name, tensor in before.items())
    assert not torch.equal(before["weight"], engines["encoder"].module_state()["weight"])


def test_an_exception_in_the_loop_still_finishes_what_is_written(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)

    def loop() -> None:
        with CheckpointWriter(run_dir, keep=2) as writer:
            writer.save(7, engines=tiny(), objective_state={})
            raise FloatingPointError

    with pytest.raises(FloatingPointError):
        loop()
    assert restore_tiny(run_dir) == 7


def cut(directory: Path) -> None:
    os.truncate(directory / "encoder.safetensors", 100)


def lose(directory: Path) -> None:
    (directory / "encoder_optimizer.safetensors").unlink()


def flip(directory: Path) -> None:
    path = directory / "encoder_optimizer.safetensors"
    content = bytearray(path.read_bytes())
    content[-5] ^= 16
    path.write_bytes(content)


def spoil_index(directory: Path) -> None:
    (directory / "checkpoint.json").write_text('{"format_version": 3, ')


def swap(directory: Path) -> None:
    shutil.rmtree(directory)
    directory.mkdir()
    write_files(directory, step=7, states={name: {} for name in ("encoder", "encoder_optimizer")})


def forge(directory: Path, **changes: Any) -> None:
    """Change the index, and seal it again."""
    index = json.loads((directory / "checkpoint.json").read_text())
    del index["sha256"]
    fields = json.dumps(index | changes, indent=2).encode().removeprefix(b"{\n")
    seal = b'{ "sha256": "%s",\n' % sha256(fields).hexdigest().encode()
    (directory / "checkpoint.json").write_bytes(seal + fields)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut": (cut, "encoder.safetensors has 100 bytes, but"),
    "lost": (lose, "encoder_optimizer.safetensors is missing"),
    "flipped": (flip, "encoder_optimizer.safetensors has changed since it was written"),
    "index_spoilt": (spoil_index, "checkpoint.json has changed since it was written"),
    "of_another_step": (swap, "checkpoint.json is that of step 7"),
    "index_lost": (lambda directory: (directory / "checkpoint.json").unlink(), "checkpoint.json is missing"),
    "gone": (shutil.rmtree, "it is missing"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_passed_over_and_the_log_says_why(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    act, reason = DAMAGE[damage]
    run_dir, engines = RunDir(tmp_path), tiny()
    save(run_dir, 10, 20, 30, engines=engines, keep=3)
    act(run_dir.checkpoint(30))
    assert restore_tiny(run_dir) == 20
    assert "taking the checkpoint of step 20, because step 30 is damaged: " + reason in caplog.text
    save(run_dir, 30, engines=engines, keep=3)  # the run comes there again
    assert restore_tiny(run_dir) == 30
    for step in (10, 20, 30):
        act(run_dir.checkpoint(step))
    with pytest.raises(UserError, match=r"no checkpoint in .* is whole .*pass another --run-dir"):
        restore_tiny(run_dir)


def test_the_newest_whole_ones_are_kept(tmp_path: Path) -> None:
    run_dir, engines = RunDir(tmp_path), tiny()
    save(run_dir, 5, 10, 20, engines=engines)
    run_dir.latest.unlink()
    assert restore_tiny(run_dir) == 20, "without LATEST, it is the newest"
    cut(run_dir.checkpoint(20))
    save(run_dir, 25, engines=engines)
    assert sorted(path.name for path in run_dir.checkpoints.iterdir()) == ["step_00000010", "step_00000025"]


def test_a_file_system_that_flushes_no_directories_keeps_checkpoints_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flush = os.fsync

    def fsync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    save(RunDir(tmp_path), 1, engines=tiny())
    assert restore_tiny(RunDir(tmp_path)) == 1


def test_what_cannot_be_removed_is_no_reason_not_to_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on NFS, which keeps a directory while a probe on another machine reads it."""

    def rmtree(path: Path, *, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(path))

    run_dir, engines = RunDir(tmp_path), tiny()
    save(run_dir, 5, engines=engines)
    monkeypatch.setattr(shutil, "rmtree", rmtree)
    for step in (10, 20, 20, 30):
        save(run_dir, step, engines=engines, keep=1)
        assert restore_tiny(run_dir) == run_dir.latest_step() == step
    assert "cannot remove" in caplog.text
    monkeypatch.undo()
    save(run_dir, 40, engines=engines, keep=1)
    assert [path.name for path in run_dir.checkpoints.iterdir()] == ["step_00000040"]


def test_a_checkpoint_of_another_version_is_refused_whatever_else_it_says(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    save(run_dir, 10, 20, engines=tiny())
    forge(run_dir.checkpoint(20), format_version=FORMAT_VERSION + 1, layers=[])
    with pytest.raises(UserError, match=r"step_00000020 was written by another version of this project .*format 5;"):
        restore_tiny(run_dir)


def test_no_byte_of_an_index_with_a_flipped_bit_is_accepted(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    write_json(run_dir.provenance, {"run_id": "a" * 32})
    save(run_dir, 10, 20, engines=tiny())
    path = run_dir.checkpoint(20) / "checkpoint.json"
    content = path.read_bytes()
    for place in range(len(content)):
        flipped = bytearray(content)
        flipped[place] ^= 1 << place % 8
        path.write_bytes(flipped)
        assert newest_state(run_dir).step == 10, place


def test_another_architecture_is_named_by_its_first_tensor_and_both_shapes(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    save(run_dir, 10, engines=tiny(num_columns=5))
    with pytest.raises(
        UserError,
        match=r"another architecture .*size mismatch for weight: .* torch\.Size\(\[2, 5\]\) .* torch\.Size\(\[2, 3\]\)",
    ):
        restore_tiny(run_dir)
    bare = {"encoder": DDPEngine(nn.Linear(5, 2, bias=False), optimizer=AdamConfig())}
    with pytest.raises(UserError, match=r'Unexpected key\(s\) in state_dict: "bias"'):
        restore(run_dir, bare, NT_XENT)
    both = {"viewmaker": tiny()["encoder"]}
    with pytest.raises(UserError, match="'viewmaker' is missing"):
        restore(run_dir, both, NT_XENT)


def test_players_are_read_while_training_writes(config: RunConfig, tmp_path: Path) -> None:
    """Every tensor of a checkpoint is its step, so that a mixture of two would show."""
    run_dir = RunDir(tmp_path / "run")
    engines = start(run_dir, config)
    stop = threading.Event()

    def train() -> None:
        step = 0
        with CheckpointWriter(run_dir, keep=1) as writer:
            while not stop.is_set():
                step += 1
                for engine in engines.values():
                    for tensor in engine.module.state_dict().values():
                        tensor.fill_(step)
                writer.save(step, engines=engines, objective_state={})

    thread = threading.Thread(target=train)
    thread.start()
    try:
        while run_dir.latest_step() is None:
            time.sleep(0.01)
        steps: list[int] = []
        deadline = time.monotonic() + 8
        while len(set(steps)) < 4:
            assert time.monotonic() < deadline
            modules = load_modules(run_dir)
            steps.append(modules.step)
            for module in modules.trained_modules.values():
                assert all((tensor == modules.step).all() for tensor in module.state_dict().values())
    finally:
        stop.set()
        thread.join()
    assert steps == sorted(steps)


OBJECTIVES: dict[str, ObjectiveConfig] = {
    "moco": MoCoConfig(queue_size=32),
    "instance_discrimination": InstanceDiscriminationConfig(num_negatives=8),
    "byol": BYOLConfig(predictor=HeadConfig(hidden_sizes=(8,), batch_norm=True)),
}
NUM_SAMPLES = 37


def whole_state(config: RunConfig, run_dir: RunDir, *, trains: bool) -> dict[str, str]:
    """Save a run after a step, or restore it; return the SHA-256 of all its state by name."""
    training = build_training(config, num_samples=NUM_SAMPLES, device=torch.device("cpu"))
    objective, engines = training.objective, training.engines
    if trains:
        fake_step(engines, 0)
        with CheckpointWriter(run_dir, keep=1) as writer:
            writer.save(5, engines=engines, objective_state=objective.saved_state())
    else:
        assert restore(run_dir, engines, objective).step == 5
    states = {f"{name}/module": engine.module_state() for name, engine in engines.items() if name != "objective"}
    states |= {f"{name}/optimizer": engine.optimizer_state() for name, engine in engines.items()}
    states |= {"objective": objective.saved_state()}
    return {
        f"{name}/{key}": sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()
        for name, state in states.items()
        for key, tensor in state.items()
    }


def save_on_four_and_load(directory: Path) -> list[tuple[int, str, dict[str, str]]]:
    """Save and load on eight ranks, of which the first 4, 1, 2 and 8 form a group in turn; new processes are slow."""
    own_rank = dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()
    found = []
    for phase, world_size in enumerate((4, 1, 2, 8)):
        if own_rank >= world_size:
            continue
        store = f"file://{directory / f'store{phase}'}"
        dist.init_process_group("gloo", init_method=store, rank=own_rank, world_size=world_size)
        for kind, objective in OBJECTIVES.items():
            config = resolve_recipe("debug:viewmaker", [CONVNET]).model_copy(update={"objective": objective})
            found.append((world_size, kind, whole_state(config, RunDir(directory / kind), trains=phase == 0)))
        dist.barrier()
        dist.destroy_process_group()
    return found


@pytest.mark.ranks
def test_the_state_of_4_ranks_is_taken_up_by_1_2_and_8(tmp_path: Path) -> None:
    per_rank = run_ranks(save_on_four_and_load, 8, tmp_path)
    saved = {kind: state for world_size, kind, state in per_rank[0] if world_size == 4}
    assert saved.keys() == OBJECTIVES.keys()
    for kind, state in saved.items():
        assert any(name.startswith("objective/") for name in state), kind
        assert any(name.startswith("viewmaker/optimizer/exp_avg_sq/") for name in state), kind
    loads = [load for loads in per_rank for load in loads]
    expected = sorted([1, *[2] * 2, *[4] * 4, *[8] * 8] * len(OBJECTIVES))
    assert sorted(world_size for world_size, _, _ in loads) == expected
    assert all(state == saved[kind] for _, kind, state in loads)


@pytest.mark.parametrize("where", ["exp_avg_sq/weight", "weight"])
def test_a_state_that_is_not_finite_is_not_saved(where: str, tmp_path: Path) -> None:
    """The loss may stay finite: where Adam's second moment is inf, the parameter only stands still."""
    run_dir, engines = RunDir(tmp_path), tiny()
    save(run_dir, 10, engines=engines)
    engine = engines["encoder"]
    (engine.module_state() | engine.optimizer_state())[where].view(-1)[1] = torch.inf
    with pytest.raises(
        UserError, match=rf"after step 20 is not saved, .*: 1 of 6 values of {where} \(encoder\S*\) .* from step 10$"
    ):
        save(run_dir, 20, engines=engines)
    assert [path.name for path in run_dir.checkpoints.iterdir()] == ["step_00000010"]
    assert restore_tiny(run_dir) == 10


def hanging(*_: Any, **__: Any) -> int:
    threading.Event().wait()
    return 0


def fail_together(run_dir: RunDir) -> list[str]:
    """Return this rank's errors if the first one cannot write, at other shapes, and if rank 1 reads other bytes."""
    engines = tiny()
    read_bytes = Path.read_bytes

    def read_other_bytes(path: Path) -> bytes:
        *most, last = read_bytes(path)
        return bytes([*most, last ^ 1])

    def save_twice(step: int) -> None:
        with CheckpointWriter(run_dir, keep=2) as writer:
            writer.save(step, engines=engines, objective_state={})
            writer.save(step + 1, engines=engines, objective_state={})

    def restore_otherwise() -> None:
        with mock.patch.object(Path, "read_bytes", read_other_bytes if rank() == 1 else read_bytes):
            restore_tiny(run_dir)

    def error_of(action: Callable[[], object]) -> str:
        try:
            action()
        except BaseException as error:
            return f"{type(error).__name__}: {error}"
        return ""

    met = [error_of(lambda: save_twice(1))]
    if rank() == 0:
        run_dir.checkpoints.unlink()
    dist.barrier()
    save_twice(3)
    return [
        *met,
        error_of(lambda: restore(run_dir, tiny(num_columns=9), NT_XENT)),
        error_of(restore_otherwise),
        f"step {restore_tiny(run_dir)}",
    ]


@pytest.mark.ranks
def test_what_fails_on_one_rank_ends_all_of_them_at_the_same_call(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.checkpoints.write_text("in the way")
    first, second = run_ranks(fail_together, 2, run_dir)
    assert first[0].startswith("UserError: cannot write the checkpoint of step 1 in ")
    assert first[1].startswith("UserError: ")
    assert "another architecture" in first[1]
    assert "rank 1 on " in second[2]
    assert "encoder.safetensors has changed" in second[2]
    assert [second[0], second[1], first[2]] == ["FirstRankExit: 2"] * 3
    assert first[3] == second[3] == "step 4"


def hang_together(run_dir: RunDir) -> list[str]:
    """Return the errors of this rank if the disk hangs: up to the limit, and until rank 1 is asked to stop."""
    found = []
    calls = itertools.count()
    options_of: list[dict[str, Any]] = [
        {"limit_seconds": 0.3},
        {"is_stopping": lambda: next(calls) > 2 and rank() == 1},  # not before the wait
    ]
    for options in options_of:
        with mock.patch.multiple("trainer.checkpoint.save", write_files=hanging, _ROUND_SECONDS=0.1, _STOP_SECONDS=0.3):
            writer = CheckpointWriter(run_dir, keep=2, **options)
            writer.save(8, engines=tiny(), objective_state={})
            try:
                writer.wait()
            except BaseException as error:
                found.append(f"{type(error).__name__}: {error}")
    return found


@pytest.mark.ranks
def test_a_disk_that_hangs_ends_all_ranks(tmp_path: Path) -> None:
    first, second = run_ranks(hang_together, 2, RunDir(tmp_path), timeout_s=60)
    assert len(first) == 2
    assert all("step 8 in" in error and "was not written in time" in error for error in first)
    assert second == ["FirstRankExit: 2"] * 2


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    mount = tmp_path / "small"
    mount.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(mount)], capture_output=True)
    if done.returncode:
        pytest.skip("needs the right to mount a small tmpfs, to have a disk without room")
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


def test_a_full_disk_is_one_sentence_and_leaves_nothing_half_written(config: RunConfig, small_disk: Path) -> None:
    run_dir = RunDir(small_disk / "run")
    engines = start(run_dir, config)
    (small_disk / "ballast").write_bytes(b"0" * 150_000)
    with pytest.raises(
        UserError, match=r"cannot write the checkpoint of step 4 .*No space left .*make room on a full disk"
    ):
        save(run_dir, 4, engines=engines)
    assert list(run_dir.checkpoints.iterdir()) == []
    assert run_dir.latest_step() is None
    (small_disk / "ballast").unlink()
    save(run_dir, 4, engines=tiny())
    (small_disk / "ballast").write_bytes(b"0" * 150_000)
    with pytest.raises(UserError, match=r"No space left .* goes on from step 4"):
        save(run_dir, 8, engines=engines)
    assert restore_tiny(run_dir) == 4
    (small_disk / "ballast").unlink()
    save(run_dir, 8, engines=tiny())
    assert restore_tiny(run_dir) == 8
