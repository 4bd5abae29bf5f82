"""`launch/slurm.py` on a real Slurm of four nodes: every launcher gives the same curve."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

import launch.slurm
from tests.commands import Call, Done, float64_recipe
from tests.nursery import run_python
from tests.slurm.cluster import NODE_NAMES
from trainer.distributed.environment import read_env
from trainer.run_dir import RunDir

ROOT = Path(__file__).parents[2]
NUM_STEPS = 8

PRINT_ENVIRONMENT = "import json, os; print(json.dumps(dict(os.environ)))"


@pytest.fixture(scope="session")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return float64_recipe(tmp_path_factory.mktemp("data"))


def run(*command: str | Path, environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in command], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=300
    )


def slurm_py(*arguments: str | Path, environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return run_python([sys.executable, "launch/slurm.py", *arguments], cwd=ROOT, env=environ)


@pytest.fixture
def slurm_py_here(slurm: dict[str, str], monkeypatch: pytest.MonkeyPatch, call: Call) -> Callable[..., Done]:
    """`slurm_py` in this process."""
    monkeypatch.setenv("SLURM_CONF", slurm["SLURM_CONF"])
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return partial(call, launch.slurm.main)


def losses(run_dir: Path) -> list[float]:
    return [line["train/loss"] for line in RunDir(run_dir).read_metrics()]


def test_four_nodes_follow_one_process(slurm: dict[str, str], recipe: list[str], tmp_path: Path) -> None:
    """tests/launch has torchrun and `--executor local`."""
    words: list[str | Path] = [sys.executable, "launch/train.py", *recipe, "--run-dir", tmp_path / "alone"]
    alone = run_python(words, cwd=ROOT, env=slurm | {"OMP_NUM_THREADS": "1"})
    assert alone.returncode == 0, alone.stderr
    run_dir = RunDir(tmp_path / "nodes")
    of_site = {"SBATCH_PARTITION": "nowhere"}  # counts less than the flag
    words = ["--nodes", "4", *recipe, "--partition", "debug", "--run-dir", run_dir.path, "--wait"]
    job = slurm_py(*words, environ=slurm | of_site)
    assert job.returncode == 0, job.stdout + job.stderr
    assert "nodes: running\n" in job.stdout

    assert len(losses(run_dir.path)) == NUM_STEPS
    assert losses(run_dir.path) == pytest.approx(losses(tmp_path / "alone"), rel=1e-9)

    (job_id,) = re.findall(rf"^job (\d+): {run_dir.path}$", job.stdout, re.MULTILINE)
    for rank in range(4):
        log = (run_dir.path / "logs" / f"{job_id}_{rank}_log.out").read_text()
        assert f"global_rank={rank}(4)" in log
        assert "Job completed successfully" in log
        assert f"rank {rank} (launcher: slurm): cpu of " in job.stdout

    assert run_dir.latest_step() == NUM_STEPS
    assert run_dir.checkpoint(NUM_STEPS).is_dir()
    provenance = json.loads(run_dir.provenance.read_text())
    assert provenance["starts"][0]["world_size"] == 4
    assert provenance["finished_step"] == NUM_STEPS
    assert provenance["starts"][0]["slurm_job_id"] == job_id
    assert "launch/slurm.py --nodes 4" in provenance["starts"][0]["command"]


def test_ranks_of_a_real_step_and_of_a_batch_script(slurm: dict[str, str], tmp_path: Path) -> None:
    program = tmp_path / "environment.py"
    program.write_text(PRINT_ENVIRONMENT)
    step = run("srun", "-N4", "-n5", f"--output={tmp_path}/task_%t", sys.executable, program, environ=slurm)
    assert step.returncode == 0, step.stderr
    environs = [json.loads((tmp_path / f"task_{task}").read_text()) for task in range(5)]
    worlds = [read_env(environ) for environ in environs]
    assert [world.rank for world in worlds] == list(range(5))
    assert {(world.world_size, world.master_addr, world.master_port, world.launcher) for world in worlds} == {
        (5, NODE_NAMES[0], worlds[0].master_port, "slurm")
    }
    for node in range(4):
        on_node = [
            world for world, environ in zip(worlds, environs, strict=True) if environ["SLURM_NODEID"] == str(node)
        ]
        assert [world.local_rank for world in on_node] == list(range(len(on_node)))
        assert {world.local_world_size for world in on_node} == {len(on_node)}

    output = tmp_path / "batch.out"
    batch = ["sbatch", "--wait", "-N4", "-n4", "-o", str(output), f"--wrap={sys.executable} {program}"]
    assert run(*batch, environ=slurm).returncode == 0
    world = read_env(json.loads(output.read_text()))
    assert (world.launcher, world.world_size) == ("none", 1), "a batch script is no rank"


def test_the_step_of_a_batch_script(
    slurm: dict[str, str], slurm_py_here: Callable[..., Done], recipe: list[str], tmp_path: Path
) -> None:
    """sbatch alone would set SLURM_CPUS_PER_TASK only for the script; this looks at the step, which has the ranks.

    While the step holds all memory and GPUs of the job, nodes still answer the question whether they are dead.
    """
    (tmp_path / "slurm.yaml").write_text("setup: [export FROM_SETUP=1]\nsrun: ['--export=ALL,FROM_SRUN=2']\n")
    with contextlib.chdir(tmp_path):
        asked = ["--nodes", "2", "--cpus-per-task", "3", "--gpus-per-node", "2", "--tasks-per-node", "1", *recipe]
        script = slurm_py_here(*asked, "--run-dir", tmp_path / "run", "--dry-run").stdout
    (tmp_path / "run/logs").mkdir(parents=True)
    step = "bash -c 'echo $SLURM_CPUS_PER_TASK $SLURM_GPUS_ON_NODE $FROM_SETUP $FROM_SRUN; sleep 5'"
    probe = re.sub(r"^train .*$", f'"${{ranks[@]}}" {step} &', script, flags=re.MULTILINE)
    (tmp_path / "job.sh").write_text(
        f"{probe}\nsleep 2; answer 2 && echo alive; [[ $(jobs -r) ]] && echo still; wait\n"
    )
    assert run("sbatch", "--wait", tmp_path / "job.sh", environ=slurm).returncode == 0
    (first, second) = (path.read_text() for path in sorted((tmp_path / "run/logs").glob("*_log.out")))
    assert sorted(first.splitlines()) == ["3 2 1 2", "alive", "still"]
    assert second == "3 2 1 2\n"
