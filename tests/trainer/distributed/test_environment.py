"""The environment reader: variables copied from torchrun and a real Slurm, and every way to set only some of them."""

from __future__ import annotations

import contextlib
import socket
from functools import partial

import pytest
import torch
import torch.distributed as dist

from data_pipeline.core.devices import named_device
from data_pipeline.core.errors import UserError
from launch.here import free_port
from tests.gloo import run_ranks
from trainer.distributed import environment as env_module
from trainer.distributed.collectives import AnyRank
from trainer.distributed.engines import DDPConfig, EngineInputs
from trainer.distributed.environment import (
    WorldEnv,
    choose_device,
    init_process_group,
    process_group,
    read_env,
)
from trainer.fault_tolerance.stalls import lost_another
from trainer.optim.optimizers import SGDConfig

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "2",
    "GROUP_WORLD_SIZE": "4",
    "MASTER_ADDR": "n0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
}
SBATCH_SCRIPT = {  # what Slurm 22.05 sets in a batch script, before any srun
    "SLURM_JOB_ID": "4711",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "7",
    "SLURM_TASKS_PER_NODE": "2(x3),1",
    "SLURM_JOB_NODELIST": "n[0-3]",
}
SRUN_TASK = SBATCH_SCRIPT | {  # and in a task of srun
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "6",
    "SLURM_NODEID": "3",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_NODELIST": "n[0-3]",
}


def test_torchrun() -> None:
    world = read_env(TORCHRUN)
    assert (world.rank, world.world_size, world.local_rank, world.local_world_size) == (5, 8, 1, 2)
    assert (world.master_addr, world.master_port, world.launcher) == ("n0", 29500, "torchrun")


def test_slurm_step() -> None:
    world = read_env(SRUN_TASK)
    assert (world.rank, world.world_size, world.local_rank, world.local_world_size) == (6, 7, 0, 1)
    assert (world.master_addr, world.launcher) == ("n0", "slurm")
    assert read_env(SRUN_TASK | {"SLURM_PROCID": "1", "SLURM_NODEID": "0", "SLURM_LOCALID": "1"}).local_world_size == 2


def test_slurm_port_is_shared_by_the_ranks_and_not_by_other_jobs_or_steps() -> None:
    port = read_env(SRUN_TASK).master_port
    assert 1024 < port < 32768
    assert read_env(SRUN_TASK | {"SLURM_PROCID": "2", "SLURM_NODEID": "1"}).master_port == port
    others = [{"SLURM_JOB_ID": str(4711 + i)} for i in range(1, 50)] + [{"SLURM_STEP_ID": "1"}]
    ports = [read_env(SRUN_TASK | other).master_port for other in others]
    assert len({port, *ports}) == 51
    assert read_env(SRUN_TASK | {"MASTER_PORT": "1234", "MASTER_ADDR": "head"}).master_port == 1234


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"MASTER_PORT": "29500"},
        SBATCH_SCRIPT,
        {"SLURM_JOB_ID": "3", "SLURM_NTASKS": "4", "SLURM_JOB_NODELIST": "n[0-1]"},  # salloc
        SRUN_TASK | {"SLURM_STEP_ID": "4294967290"},  # salloc with LaunchParameters=use_interactive_step
        SBATCH_SCRIPT | {"SLURM_STEP_ID": "-5"},  # Slurm 26.05
    ],
)
def test_without_srun_or_torchrun_it_is_a_single_process(environ: dict[str, str]) -> None:
    assert read_env(environ) == WorldEnv()


@pytest.mark.parametrize(
    ("environ", "missing"),
    [
        *((TORCHRUN, name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")),
        *((SRUN_TASK, name) for name in ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_NODELIST")),
        (SRUN_TASK | {"WORLD_SIZE": "1"}, "RANK"),  # left over in a container
    ],
)
def test_an_environment_with_only_some_of_the_variables_is_refused(environ: dict[str, str], missing: str) -> None:
    with pytest.raises(UserError, match=rf"only some of .* and {missing} is missing"):
        read_env({key: value for key, value in environ.items() if key != missing})


def exported(rank: int, world_size: int) -> dict[str, str]:
    """Return the variables that `export RANK=... WORLD_SIZE=...` in a job script sets, without torchrun."""
    return {key: TORCHRUN[key] for key in ("MASTER_ADDR", "MASTER_PORT")} | {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
    }


def test_rank_against_slurm_procid() -> None:
    assert read_env(SRUN_TASK | exported(6, 7)).rank == 6
    for rank, world_size in ((0, 7), (6, 8)):
        with pytest.raises(
            UserError, match=f"RANK={rank} of WORLD_SIZE={world_size} and SLURM_PROCID=6 of .* contradict"
        ):
            read_env(SRUN_TASK | exported(rank, world_size))


def test_one_torchrun_per_slurm_task_is_no_contradiction() -> None:
    four_agents = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "1(x4)", "SLURM_PROCID": "2"}
    assert read_env(SRUN_TASK | four_agents | TORCHRUN).rank == 5
    assert read_env(SBATCH_SCRIPT | TORCHRUN).rank == 5
    stale = TORCHRUN | {"RANK": "0", "GROUP_WORLD_SIZE": "1"}  # sbatch was called inside a torchrun worker
    with pytest.raises(UserError, match="contradict"):
        read_env(SRUN_TASK | four_agents | stale)


def pretend_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def test_device(monkeypatch: pytest.MonkeyPatch) -> None:
    torchrun, slurm = read_env(TORCHRUN), read_env(SRUN_TASK | {"SLURM_LOCALID": "1", "SLURM_NODEID": "0"})
    pretend_gpus(monkeypatch, 0)
    assert choose_device(torchrun) == torch.device("cpu")
    pretend_gpus(monkeypatch, 2)
    assert choose_device(torchrun) == choose_device(slurm) == torch.device("cuda", 1)
    pretend_gpus(monkeypatch, 1)
    assert choose_device(slurm) == torch.device("cuda", 0)  # --gpus-per-task shows each task its own
    with pytest.raises(UserError, match=r"2 ranks on .* but 1 GPU"):
        choose_device(torchrun)


def test_gpus_that_are_promised_but_not_there_are_no_silent_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, 0)
    alone = read_env({})
    for name in ("CUDA_VISIBLE_DEVICES", "SLURM_JOB_GPUS"):
        with monkeypatch.context() as patched:
            patched.setenv(name, "7")
            with pytest.raises(UserError, match=rf"{name}=7 names GPUs, but torch .* sees none"):
                choose_device(alone)
    monkeypatch.setenv("SLURM_JOB_GPUS", "7")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # the user's own word for the CPU
    assert choose_device(alone) == torch.device("cpu")


def test_gpus_that_torch_cannot_use_are_no_silent_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a driver that is older than the CUDA of this torch: the driver's library counts the GPUs all the same."""
    pretend_gpus(monkeypatch, 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for find in (partial(choose_device, read_env({})), partial(named_device, None)):
        with pytest.raises(UserError, match=r"has 2 GPU\(s\), but torch \S+ can use none; see in nvidia-smi"):
            find()
    assert named_device("cpu") == torch.device("cpu")


def test_a_single_process_joins_nothing_and_says_where_it_is(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        init_process_group(WorldEnv(), torch.device("cpu"))
    assert not dist.is_initialized()
    assert f"rank 0 (launcher: none): cpu of {socket.gethostname()}" in caplog.text


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("", 0)) as holder:
        world = WorldEnv(0, 2, master_addr="127.0.0.1", master_port=holder.getsockname()[1])
        with pytest.raises(UserError, match=r"EADDRINUSE.*MASTER_PORT"):
            init_process_group(world, torch.device("cpu"))


def test_a_rank_that_never_comes_is_named_within_the_timeout() -> None:
    world = WorldEnv(1, 2, master_addr="127.0.0.1", master_port=free_port())
    with pytest.raises(UserError, match=r"rank 1 of 2 on \S+ did not meet the others at 127.0.0.1:\d+ within 1 s"):
        init_process_group(world, torch.device("cpu"), timeout_seconds=1)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("error", [None, RuntimeError("of one rank"), SystemExit(2)])
def test_who_leaves_by_an_exception_does_not_wait_for_the_others(
    device: str, error: BaseException | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Destroying NCCL's group waits for all ranks; gloo's must be destroyed before the interpreter ends."""
    done: list[str] = []
    monkeypatch.setattr(env_module, "init_process_group", lambda *_: done.append("joined"))
    monkeypatch.setattr(env_module, "destroy_process_group", lambda: done.append("taken down"))
    with contextlib.suppress(RuntimeError, SystemExit), process_group(read_env({}), torch.device(device)):
        if error is not None:
            raise error
    failed = ["joined"] if device == "cuda" else ["joined", "taken down"]
    assert done == (["joined", "taken down"] if error is None else failed)


def errors_of_the_rank_that_is_left() -> list[bool]:
    """Return whether each error of rank 0 counts as the end of rank 1, which leaves before all of them."""
    engine = DDPConfig().build(torch.nn.Linear(2, 1), EngineInputs(SGDConfig(), 2))
    loss, any_rank = engine(torch.ones(1, 2)).sum(), AnyRank()
    dist.barrier()
    if dist.get_rank() == 1:
        dist.destroy_process_group()
        return []

    def any_rank_answers() -> None:
        any_rank.next(False)
        any_rank.next(False)

    def of_its_own() -> None:
        raise RuntimeError("Connection closed by peer")

    lost = []
    for action in (partial(engine.backward, loss), dist.barrier, any_rank_answers, of_its_own):
        with pytest.raises(RuntimeError) as raised:
            action()
        lost.append(lost_another(raised.value))
    return lost


@pytest.mark.ranks
def test_an_error_is_that_of_another_rank_if_it_comes_from_a_collective_whatever_its_words() -> None:
    assert run_ranks(errors_of_the_rank_that_is_left, 2)[0] == [True, True, True, False]
