"""Check before a submission that a job can run on this cluster."""

from __future__ import annotations

import re
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path

from data_pipeline.core.errors import UserError
from launch.job import parse_seconds
from launch.resources import Resources
from launch.slurm_client import has_slurm, outside_any_job, refusal_reason, refused, run_slurm


def check_with_slurm(resources: Resources, *, home: Path, script: str) -> None:
    """Check that Slurm would accept the job of this batch script. Submits nothing.

    Raises `UserError` if there is no Slurm, if it would refuse the job, if the GPUs of the nodes would stay idle, or if
    the nodes cannot see `home`.
    """
    if not has_slurm():
        raise UserError(
            "there is no Slurm on this machine (no sbatch and srun on PATH); run this on a login node of the cluster, "
            "add --dry-run to see the script, or --executor local to train here"
        )
    with outside_any_job():
        nodes = run_slurm("sinfo", "--noheader", "--Node", "--format", "%N %n %P %T %G").stdout
        check_shared(home, [line.split()[1] for line in nodes.splitlines()])
        check_gpus(resources, nodes)
        partitions = run_slurm("scontrol", "show", "partition", "--oneliner").stdout
        check_time_limit(resources, partitions)
        test = run_slurm("sbatch", "--test-only", text=script)
    if test.returncode and (reason := refusal(test.stderr, nodes=nodes, resources=resources)):
        raise refused(reason)


def refusal(said: str, *, nodes: str, resources: Resources) -> str | None:
    """Return the reason if this job can never run; None if it may run later.

    said: the output of `sbatch --test-only`. It also refuses a job whose nodes are down at the moment, although such a
        job may wait in the queue.
    nodes: the lines "name host partition state gres" of sinfo, in which the default partition has a star.
    """
    reason = refusal_reason(said)
    if "down, drained or reserved" in reason:
        return None
    chosen = _nodes_of_partition(resources, nodes)
    names = {row[0] for row in chosen}
    if 0 < len(names) < resources.nodes:
        partition = resources.partition or chosen[0][2].rstrip("*")
        return f"{reason}: --nodes {resources.nodes}, but the partition {partition} has {len(names)}"
    if "node configuration is not available" in reason and not all(_is_up(row[3]) for row in chosen):
        return None
    return reason


def _nodes_of_partition(resources: Resources, nodes: str) -> list[list[str]]:
    """Return the rows of sinfo, as words, for the requested partitions, by default the default one."""
    rows = [line.split() for line in nodes.splitlines()]
    asked = set(resources.partition.split(",")) if resources.partition else None
    return [row for row in rows if (row[2].endswith("*") if asked is None else row[2].rstrip("*") in asked)]


def check_gpus(resources: Resources, nodes: str) -> None:
    """Raise `UserError` if every node of the partition has GPUs, but the request does not mention them.

    Examples:
        >>> asked = Resources(nodes=4, tasks_per_node=1, cpus_per_task=1, threads_per_task=1, time_minutes=60)
        >>> check_gpus(asked, "n0 n0 cpu* idle (null)")
        >>> check_gpus(asked.model_copy(update={"gpus_per_node": 0}), "n0 n0 gpu* idle gpu:a100:8(S:0-1)")
        >>> check_gpus(asked, "n0 n0 gpu* idle gpu:a100:8(S:0-1)")
        Traceback (most recent call last):
        data_pipeline.core.errors.UserError: every node of the partition gpu has GPUs (gpu:a100:8), but none is \
asked for, so 4 ranks would train on the CPU; add --gpus-per-node 8, or --gpus-per-node 0 if the CPU is meant
    """
    if not resources.says_nothing_of_gpus:
        return
    chosen = _nodes_of_partition(resources, nodes)
    found = [re.search(r"\bgpu(?::[^,():]+)*:(\d+)", row[4]) if len(row) > 4 else None for row in chosen]
    if not found or None in found:
        return
    fewest = min((match for match in found if match is not None), key=lambda match: int(match[1]))
    partition = resources.partition or chosen[0][2].rstrip("*")
    raise UserError(
        f"every node of the partition {partition} has GPUs ({fewest[0]}), but none is asked for, so "
        f"{resources.num_ranks} ranks would train on the CPU; add --gpus-per-node {fewest[1]}, or --gpus-per-node 0 if "
        "the CPU is meant"
    )


def _is_up(state: str) -> bool:
    """Tell whether a node in this state of sinfo takes jobs. A star says that the node does not answer."""
    return "*" not in state and state.rstrip("~#!%$@^-+") in {"idle", "mixed", "allocated", "completing", "planned"}


def check_time_limit(resources: Resources, partitions: str) -> None:
    """Raise `UserError` if the job asks for more time than any of its partitions allows.

    Many clusters accept such a job and let it wait for ever. With a QOS, which may allow more time, Slurm decides.
    `partitions` is the output of `scontrol show partition`.

    Examples:
        >>> asked = Resources(nodes=1, tasks_per_node=1, cpus_per_task=1, threads_per_task=1, time_minutes=61)
        >>> check_time_limit(asked, "PartitionName=a Default=YES MaxTime=1-00:00:00")
        >>> check_time_limit(asked, "PartitionName=a Default=YES MaxTime=01:00:00")
        Traceback (most recent call last):
        data_pipeline.core.errors.UserError: --time-minutes 61, but the partition a allows 60; ask for no more: a \
run that takes longer is started again and goes on
    """
    asked = None if resources.partition is None else resources.partition.split(",")
    limits: dict[str, float] = {}
    for line in partitions.splitlines():
        fields = dict(word.split("=", 1) for word in line.split() if "=" in word)
        name = fields.get("PartitionName", "")
        if name in asked if asked is not None else fields.get("Default") == "YES":
            seconds = parse_seconds(fields.get("MaxTime", ""))
            limits[name] = float("inf") if seconds is None else seconds // 60
    if resources.qos is None and limits and max(limits.values()) < resources.time_minutes:
        name = max(limits, key=lambda name: limits[name])
        raise UserError(
            f"--time-minutes {resources.time_minutes}, but the partition {name} allows {limits[name]:.0f}; ask for no "
            "more: a run that takes longer is started again and goes on"
        )


def check_shared(home: Path, hosts: Sequence[str], *, this_host: str | None = None) -> None:
    """Raise `UserError` if `home` is on a local disk of this machine, and a node is another machine."""
    own = (this_host or socket.gethostname()).partition(".")[0]
    others = sorted({host for host in hosts if host.partition(".")[0] != own})
    for private in {"/tmp", "/var/tmp", "/dev/shm", "/run", tempfile.gettempdir()}:
        if others and home.resolve().is_relative_to(private):
            raise UserError(
                f"{home} lies in {private}, which every machine has for itself, so {others[0]} could not write there; "
                "pass a --run-dir or --study-dir on a file system that all nodes share"
            )
