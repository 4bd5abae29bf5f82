"""A private Slurm of four nodes on this one machine, from Debian's packages, for as long as one command runs.

    python tests/slurm/cluster.py python launch/slurm.py --nodes 4 --config debug:image --wait

Everything lies in a fresh directory under /tmp: the configuration, a munge daemon with its own key and socket, state,
logs; the ports are free ones. So a Slurm or a munge that the machine already has is never spoken to. The nodes are
called 127.0.0.2 to 127.0.0.5: names that resolve everywhere, without a line in /etc/hosts.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

NUM_NODES = 4
CPUS_PER_NODE = 4
INSTALL = "apt-get install --yes slurmctld slurmd slurm-client munge"
PROGRAMS = ("slurmctld", "slurmd", "munged", "srun", "sbatch", "squeue", "scancel", "sinfo")
TIMEOUT_SECONDS = 60

CONF = """\
ClusterName=private
SlurmctldHost={host}(127.0.0.1)
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
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=5
MessageTimeout=20
{nodes}
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
NODE = "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cpus} RealMemory=4000"


def missing_programs() -> list[str]:
    """Programs of the Debian packages that are not on this machine; slurmctld and munged live in /usr/sbin."""
    return [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]


def why_not() -> str | None:
    """Why a private Slurm should not be started here, and what to do; None where it may."""
    if missing := missing_programs():
        return f"{', '.join(missing)} not found; install a Slurm with: {INSTALL}"
    if "SLURM_CONF" in os.environ:
        return f"SLURM_CONF={os.environ['SLURM_CONF']} names a cluster already; unset it to start a private one"
    if Path("/etc/slurm/slurm.conf").exists():
        ping = subprocess.run(["scontrol", "ping"], capture_output=True, text=True)
        if "UP" in ping.stdout.split():
            return "this machine belongs to a Slurm cluster (scontrol ping says so); run this on another one"
    return None


@contextlib.contextmanager
def private_slurm() -> Iterator[Path]:
    """Start the cluster and yield its slurm.conf (for SLURM_CONF); at the end cancel its jobs and stop it.

    Raises RuntimeError with the ends of the daemons' logs if the nodes do not become idle.
    """
    directory = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    directory.chmod(0o755)  # munged trusts its socket only in a directory that everyone can reach
    for name in ("state", "spool", "log"):
        (directory / name).mkdir()
    conf = directory / "slurm.conf"
    conf.write_text(_configuration(directory))
    key = directory / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(128))
    environ = os.environ | {"SLURM_CONF": str(conf), "PATH": _path()}
    munged = ["munged", "--foreground", f"--key-file={key}", f"--socket={directory}/munge.socket"]
    munged += [f"--{name}-file={directory}/munged.{name}" for name in ("pid", "seed", "log")]
    daemons = [_start(munged, environ, directory)]
    try:
        _wait_until(lambda: (directory / "munge.socket").exists(), daemons, directory)
        daemons.append(_start(["slurmctld", "-D", "-f", str(conf)], environ, directory))
        for name in _node_names():
            daemons.append(_start(["slurmd", "-D", "-f", str(conf), "-N", name], environ, directory))
        _wait_until(lambda: _output(["sinfo", "-h", "-o", "%T %D"], environ) == f"idle {NUM_NODES}", daemons, directory)
        yield conf
    finally:
        _output(["scancel", "--user", getpass.getuser()], environ)
        with contextlib.suppress(RuntimeError):
            _wait_until(lambda: _output(["squeue", "-h"], environ) == "", daemons, directory)
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in reversed(daemons):
            try:
                daemon.wait(timeout=15)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        shutil.rmtree(directory)


def _start(command: list[str], environ: dict[str, str], directory: Path) -> subprocess.Popen[bytes]:
    with (directory / "log" / f"{command[0]}.console").open("ab") as console:
        return subprocess.Popen(command, env=environ, cwd=directory, stdout=console, stderr=console)


def _output(command: list[str], environ: dict[str, str]) -> str | None:
    """What a Slurm command prints; None if it fails, as it does while slurmctld is not up."""
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    return None if done.returncode else done.stdout.strip()


def _wait_until(condition: Callable[[], bool], daemons: list[subprocess.Popen[bytes]], directory: Path) -> None:
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not condition():
        dead = [daemon.args for daemon in daemons if daemon.poll() is not None]
        if dead or time.monotonic() > deadline:
            logs = "\n".join(f"{path.name}: {path.read_text()[-800:]}" for path in sorted(directory.glob("log/*")))
            problem = f"{dead} ended" if dead else f"not ready after {TIMEOUT_SECONDS} s"
            raise RuntimeError(f"the private Slurm did not start or stop: {problem}\n{logs}")
        time.sleep(0.2)


def _configuration(directory: Path) -> str:
    host = socket.gethostname().partition(".")[0]
    ports = _free_ports(1 + NUM_NODES)
    nodes = [
        NODE.format(name=name, host=host, port=port, cpus=CPUS_PER_NODE)
        for name, port in zip(_node_names(), ports[1:], strict=True)
    ]
    return CONF.format(host=host, user=getpass.getuser(), directory=directory, ports=ports, nodes="\n".join(nodes))


def _node_names() -> list[str]:
    return [f"127.0.0.{2 + node}" for node in range(NUM_NODES)]


def _path() -> str:
    return os.environ.get("PATH", os.defpath) + ":/usr/local/sbin:/usr/sbin:/sbin"


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def main() -> None:
    if len(sys.argv) < 2:
        raise SystemExit(f"usage: {Path(__file__).name} COMMAND...")
    if reason := why_not():
        raise SystemExit(f"error: {reason}")
    with private_slurm() as conf:
        status = subprocess.run(sys.argv[1:], env=os.environ | {"SLURM_CONF": str(conf)}).returncode
    raise SystemExit(status)


if __name__ == "__main__":
    main()
