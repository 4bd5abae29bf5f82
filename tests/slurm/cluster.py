"""Start a private Slurm of four nodes on this machine, from Debian's packages, while one command runs.

    python tests/slurm/cluster.py python launch/slurm.py --nodes 4 --config debug:image --wait
    python tests/slurm/cluster.py bash        a shell with sbatch, squeue, scancel ... of that cluster

All files are in a new directory under /tmp: the configuration, the key and the socket of a munge daemon, state and
logs. The ports are free ones. So a Slurm or a munge of the machine itself is never used. Several clusters may run at
once.

Where namespaces can be made (as root), each node is a machine of its own: it has its own network, connected by a
bridge, its own host name and /dev/shm, and the /etc/hosts of Debian, which gives its own name the address 127.0.1.1.
Elsewhere the nodes are addresses of this machine, 127.0.0.2 to 127.0.0.10, which resolve without /etc/hosts.

A job of the partition `urgent` takes nodes away from a job of `debug`, which is warned 30 seconds before. A node that
does not answer for 10 seconds is down. The partition `other` has five nodes of its own, and gives each to one job only.
A requeued job starts again after about 10 seconds, not two minutes. Each node says that it has two GPUs, which are
empty files.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.distributed.environment import PORTS

_NETWORK = "ip link add tried type bridge && ip link add this type veth peer name that"
_TRY = ("unshare", "--net", "--uts", "--mount", "bash", "-c", _NETWORK)
APART = subprocess.run(_TRY, capture_output=True).returncode == 0
NUM_NODES = 4
ALL_NAMES = tuple(f"n{number}" if APART else f"127.0.0.{2 + number}" for number in range(NUM_NODES + 5))
NODE_NAMES, OTHERS = ALL_NAMES[:NUM_NODES], ALL_NAMES[NUM_NODES:]
CPUS_PER_NODE = 4
INSTALL = "apt-get install --yes slurmctld slurmd slurm-client munge iproute2"
PROGRAMS = ("slurmctld", "slurmd", "munged", "srun", "sbatch", "squeue", "scancel", "sinfo")
TIMEOUT_SECONDS = 60

CONF = """\
ClusterName={cluster_name}
FirstJobId={first_job_id}
SlurmctldHost={host}({address})
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket,cred_expire=5
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool/%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.%n.pid
SlurmctldLogFile={directory}/log/slurmctld.log
SlurmdLogFile={directory}/log/slurmd.%n.log
SlurmctldPort={ports[0]}
ProctrackType=proctrack/linuxproc
GresTypes=gpu
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=400
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=1
ReturnToService=2
KillWait=4
MessageTimeout=20
SlurmdTimeout=10
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}
PartitionName=debug Nodes={names} Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=30
PartitionName=urgent Nodes={names} MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
PartitionName=other Nodes={others} MaxTime=24:00:00 State=UP OverSubscribe=EXCLUSIVE
"""
NODE = "NodeName={name} NodeHostname={host} NodeAddr={address} Port={port} CPUs={cpus} RealMemory=4000 Gres=gpu:2"
# Begins slurmd on a machine of its own, whose network `ip` has made.
BOOT = """\
hostname "$0"
mount --bind "$1" /etc/hosts
mount -t tmpfs tmpfs /dev/shm
exec "${@:2}"
"""


def missing_programs() -> list[str]:
    """Return the programs of the Debian packages that this machine lacks; slurmctld and munged are in /usr/sbin."""
    return [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]


def why_not() -> str | None:
    """Return why a private Slurm cannot be started here, and what mends it; None if it can."""
    if missing := missing_programs():
        return f"{', '.join(missing)} not found; install a Slurm with: {INSTALL}"
    if "SLURM_CONF" in os.environ:
        return f"SLURM_CONF={os.environ['SLURM_CONF']} names a cluster already; unset it to start a private one"
    if Path("/etc/slurm/slurm.conf").exists():
        ping = subprocess.run(["scontrol", "ping"], capture_output=True, text=True)
        if "UP" in ping.stdout.split():
            return "this machine belongs to a Slurm cluster (scontrol ping says so); run this on another one"
    return None


class Cluster:
    """The running cluster; `environ` is the environment for commands that use it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._network = _Network(directory) if APART else None
        self._conf = directory / "slurm.conf"
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self.environ = os.environ | {"SLURM_CONF": str(self._conf), "PATH": _path()}

    def start(self) -> None:
        """Start the daemons. Raises RuntimeError with the ends of their logs if the nodes do not become idle."""
        directory = self._directory
        key = directory / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        self._conf.write_text(_configuration(directory, self._network))
        gpus = [directory / f"gpu{number}" for number in range(2)]
        for gpu in gpus:
            gpu.touch()
        (directory / "gres.conf").write_text(f"Name=gpu File={gpus[0]},{gpus[1]}\n")
        if self._network is not None:
            self._network.make()
        munged = ["munged", "--foreground", f"--key-file={key}", f"--socket={directory}/munge.socket"]
        self._start(
            "munged", [*munged, *(f"--{name}-file={directory}/munged.{name}" for name in ("pid", "seed", "log"))]
        )
        self._wait_until(lambda: (directory / "munge.socket").exists())
        self._start("slurmctld", ["slurmctld", "-D", "-f", str(self._conf)])
        for name in ALL_NAMES:
            self._start(name, self._slurmd(name))
        self._wait_until_idle()

    def cancel_all(self) -> None:
        """End all jobs, and wait until they have ended; raises RuntimeError if they do not."""
        self.output("scancel", "--user", getpass.getuser())
        self._wait_until(lambda: self.output("squeue", "-h") == "")

    def stop(self) -> None:
        with contextlib.suppress(RuntimeError):
            self.cancel_all()
        for daemon in reversed(self._daemons.values()):
            daemon.terminate()
        for daemon in reversed(self._daemons.values()):
            try:
                daemon.wait(timeout=15)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        if self._network is not None:
            self._network.remove()

    def output(self, *command: str) -> str | None:
        """Return the output of a Slurm command; None if it fails, as it does until slurmctld is up."""
        done = subprocess.run(command, env=self.environ, capture_output=True, text=True, timeout=60)
        return None if done.returncode else done.stdout.strip()

    def job(self, job_id: str) -> dict[str, str]:
        """Return the fields of `scontrol show job`, such as JobState. Slurm forgets a job minutes after its end."""
        shown = self.output("scontrol", "show", "job", job_id) or ""
        return dict(word.split("=", 1) for word in shown.split() if "=" in word)

    def nodes(self, job_id: str) -> list[str]:
        """Return the nodes of a job; its batch script runs on the first."""
        return (self.output("scontrol", "show", "hostnames", self.job(job_id)["NodeList"]) or "").split()

    def ranks(self, job_id: str) -> list[int]:
        """Return the process ids of the ranks of a job, in rank order: the children of the step's slurmstepds."""
        return [rank.pid for _, rank in sorted(self._tasks(job_id).items())]

    def kill_node(self, name: str) -> None:
        """Do what a power cut does: kill slurmd and all processes of that node."""
        slurmd = self._daemons.pop(name)
        on_node = [process for process in _processes() if self._is_on(process, name)]
        stepds = [process for process in _processes() if process.pid in {child.parent for child in on_node}]
        slurmd.kill()
        for process in [stepd for stepd in stepds if stepd.name.startswith("slurmstepd")] + on_node:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        slurmd.wait()

    def repair_nodes(self) -> None:
        """Undo `kill_node`."""
        for name in ALL_NAMES:
            if name not in self._daemons:
                self._start(name, self._slurmd(name))
        self._wait_until_idle()

    def _slurmd(self, name: str) -> list[str]:
        slurmd = ["slurmd", "-D", "-f", str(self._conf), "-N", name]
        return slurmd if self._network is None else self._network.on_node(name, slurmd)

    def _wait_until_idle(self) -> None:
        idle = f"idle {NUM_NODES}"
        self._wait_until(lambda: self.output("sinfo", "-h", "-p", "debug", "-o", "%T %D") == idle)

    def _tasks(self, job_id: str) -> dict[int, _Process]:
        by_pid = {process.pid: process for process in _processes()}
        return {
            int(process.environ["SLURM_PROCID"]): process
            for process in by_pid.values()
            if process.environ.get("SLURM_JOB_ID") == job_id
            and process.environ.get("SUBMITIT_EXECUTOR") == "slurm"
            and "SLURM_STEP_ID" in process.environ
            and self._is_on(process, process.environ.get("SLURMD_NODENAME", ""))
            and process.parent in by_pid
            and by_pid[process.parent].name.startswith("slurmstepd")
        }

    def _is_on(self, process: _Process, node: str) -> bool:
        environ = process.environ
        return environ.get("SLURM_CONF") == str(self._conf) and environ.get("SLURMD_NODENAME") == node

    def _start(self, name: str, command: list[str]) -> None:
        with (self._directory / "log" / f"{name}.console").open("ab") as console:
            self._daemons[name] = subprocess.Popen(
                command, env=self.environ, cwd=self._directory, stdout=console, stderr=console
            )

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not condition():
            dead = [name for name, daemon in self._daemons.items() if daemon.poll() is not None]
            if dead or time.monotonic() > deadline:
                logs = "\n".join(f"{path.name}: {path.read_text()[-800:]}" for path in self._directory.glob("log/*"))
                problem = f"{dead} ended" if dead else f"not ready after {TIMEOUT_SECONDS} s"
                raise RuntimeError(f"the private Slurm did not start or stop: {problem}\n{logs}")
            time.sleep(0.2)


class _Network:
    """A bridge of this machine, and a network namespace for each node, which is connected to it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._name = f"s{secrets.token_hex(3)}"  # so short that the names of its interfaces are allowed
        subnet = secrets.randbelow(2**14)
        self._prefix = f"10.{64 + subnet // 256}.{subnet % 256}"
        self.address = f"{self._prefix}.1"  # of this machine

    def address_of(self, node: str) -> str:
        return f"{self._prefix}.{2 + ALL_NAMES.index(node)}"

    def make(self) -> None:
        """Make the namespaces and the links, and write the /etc/hosts of each node."""
        bridge = self._name
        _ip(f"link add {bridge} type bridge", f"addr add {self.address}/24 dev {bridge}", f"link set {bridge} up")
        for node in ALL_NAMES:
            inside = self._inside(node)
            _ip(f"netns add {inside}", f"link add {inside} type veth peer name eth0 netns {inside}")
            _ip(f"link set {inside} master {bridge} up", f"-n {inside} link set lo up")
            _ip(f"-n {inside} addr add {self.address_of(node)}/24 dev eth0", f"-n {inside} link set eth0 up")
            others = [f"{self.address_of(other)} {other}" for other in ALL_NAMES if other != node]
            self._hosts(node).write_text("\n".join(["127.0.0.1 localhost", f"127.0.1.1 {node}", *others, ""]))

    def on_node(self, node: str, command: Sequence[str]) -> list[str]:
        """Return a command that runs `command` on the machine of a node."""
        boot = ["bash", "-ec", BOOT, node, str(self._hosts(node)), *command]
        return ["nsenter", f"--net=/run/netns/{self._inside(node)}", "unshare", "--uts", "--mount", *boot]

    def remove(self) -> None:
        """Remove what `make` has made; also if it failed half way."""
        for made in (*(f"netns delete {self._inside(node)}" for node in ALL_NAMES), f"link delete {self._name}"):
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip(made)

    def _inside(self, node: str) -> str:
        return f"{self._name}-{node}"

    def _hosts(self, node: str) -> Path:
        return self._directory / f"hosts.{node}"


def _ip(*commands: str) -> None:
    for words in commands:
        subprocess.run(["ip", *words.split()], check=True)


@contextlib.contextmanager
def private_slurm() -> Iterator[Cluster]:
    """Start the cluster; at the end cancel its jobs and stop it. Raises RuntimeError if it does not start."""
    directory = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    directory.chmod(0o755)  # munged trusts its socket only in a directory that everyone can enter
    for name in ("state", "spool", "log"):
        (directory / name).mkdir()
    cluster = Cluster(directory)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(directory)


@dataclass(frozen=True)
class _Process:
    pid: int
    parent: int
    name: str
    environ: Mapping[str, str]


def _processes() -> list[_Process]:
    """Return the processes of this machine that this user may inspect, from /proc."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended, or belongs to another user
            entries = (path / "environ").read_bytes().decode(errors="replace").split("\0")
            found.append(
                _Process(
                    pid=int(path.name),
                    parent=int((path / "stat").read_text().rpartition(")")[2].split()[1]),
                    name=(path / "comm").read_text().strip(),
                    environ=dict(entry.split("=", 1) for entry in entries if "=" in entry),
                )
            )
    return found


def _free_ports(count: int) -> list[int]:
    """Return different free ports, drawn at random, so that two clusters hardly ever get the same."""
    found: list[int] = []
    for port in random.sample(PORTS, len(PORTS)):
        if len(found) == count:
            break
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            found.append(port)
    return found


def _configuration(directory: Path, network: _Network | None) -> str:
    host = socket.gethostname().partition(".")[0]
    ports = _free_ports(1 + len(ALL_NAMES))
    nodes = [
        NODE.format(
            name=name,
            host=host if network is None else name,
            address="127.0.0.1" if network is None else network.address_of(name),
            port=port,
            cpus=CPUS_PER_NODE,
        )
        for name, port in zip(ALL_NAMES, ports[1:], strict=True)
    ]
    return CONF.format(
        # The ranks of a job find each other by these two, and find no rank of another cluster on this machine.
        cluster_name=f"private{ports[0]}",
        first_job_id=ports[0],
        host=host,
        address="127.0.0.1" if network is None else network.address,
        user=getpass.getuser(),
        directory=directory,
        ports=ports,
        nodes="\n".join(nodes),
        names=",".join(NODE_NAMES),
        others=",".join(OTHERS),
    )


def _path() -> str:
    return os.environ.get("PATH", os.defpath) + ":/usr/local/sbin:/usr/sbin:/sbin"


def main() -> None:
    if len(sys.argv) < 2:
        raise SystemExit(f"usage: {Path(__file__).name} COMMAND...")
    if reason := why_not():
        raise SystemExit(f"error: {reason}")
    with private_slurm() as cluster:
        status = subprocess.run(sys.argv[1:], env=cluster.environ).returncode
    raise SystemExit(status)


if __name__ == "__main__":
    main()
