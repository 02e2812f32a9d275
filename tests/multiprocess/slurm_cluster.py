"""A SLURM cluster of four nodes on this machine, for tests: munge, slurmctld, four slurmd and their files.

Nodes are named by loopback addresses, so that their names resolve on any machine.
"""

import contextlib
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import time

NODES = tuple(f"127.0.0.{number}" for number in (11, 12, 13, 14))
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "sinfo", "scancel")
LIMIT_SECONDS = 60


def is_here() -> bool:
    """Returns whether this machine can run one: `slurm-wlm` is installed, and daemons may be started."""
    return all(shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") for name in PROGRAMS) and (
        os.geteuid() == 0
    )


def _configuration(folder: pathlib.Path, port: int) -> str:
    host = socket.gethostname()
    return f"""
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SlurmdTimeout=20
KillWait=20
MpiDefault=none
ReturnToService=0
JobRequeue=1
NodeName=DEFAULT CPUs=16 RealMemory=4000
NodeName=127.0.0.[11-14] NodeHostname={host} NodeAddr=127.0.0.[11-14] Port=[{port + 1}-{port + 4}]
PartitionName=all Nodes=127.0.0.[11-14] Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
"""


class SlurmCluster:
    """Use it as a context.

    Args:
      folder: of its files; a short path, for it has a socket.
    """

    def __init__(self, folder: pathlib.Path):
        self._folder = folder
        self.environment = os.environ | {
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": f"{os.environ['PATH']}:/usr/sbin",
        }

    def __enter__(self) -> "SlurmCluster":
        try:
            self._begin()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _begin(self) -> None:
        self._folder.chmod(0o755)  # munge does not trust a more permissive folder
        for name in ("state", "spool"):
            (self._folder / name).mkdir()
        (self._folder / "slurm.conf").write_text(_configuration(self._folder, 16817))
        (self._folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
        key = self._folder / "key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        files = {"key-file": "key", "socket": "munge.socket"}
        files |= {f"{kind}-file": f"munged.{kind}" for kind in ("pid", "log")}
        options = [f"--{option}={self._folder / name}" for option, name in files.items()]
        self.run("munged", *options, f"--seed-file={self._folder / 'seed'}", "--force")
        self.run("slurmctld")
        for node in NODES:
            self.begin_node(node)
        self._wait_until(lambda: self.run("sinfo", "--noheader", "--format=%t %D").split() == ["idle", "4"])

    def __exit__(self, *exception) -> None:
        self.run("scancel", "--user=root", "--signal=KILL", "--full")
        self.run("scancel", "--user=root")
        daemons = [path for path in self._folder.glob("*.pid") if path.name != "munged.pid"]
        for path in daemons:
            _end(path)
        deadline = time.monotonic() + LIMIT_SECONDS
        while any(path.exists() for path in daemons) and time.monotonic() < deadline:
            time.sleep(0.1)  # each daemon removes its file last
        _end(self._folder / "munged.pid")

    def run(self, *words: str) -> str:
        """Returns the output of a SLURM command."""
        done = subprocess.run(words, env=self.environment, capture_output=True, text=True, check=False)
        return done.stdout

    def begin_node(self, node: str) -> None:
        """Starts the daemon of a node."""
        self.run("slurmd", "-N", node)

    def kill_node(self, node: str) -> None:
        """Kills a node's daemon and all its processes, as a power failure would."""
        pid = int((self._folder / f"slurmd-{node}.pid").read_text())
        for each in (pid, *_of_node(node)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)

    def state(self, node: str) -> str:
        """Returns the state of a node from sinfo."""
        return self.run("sinfo", "--noheader", f"--nodes={node}", "--format=%t").strip()

    def job_state(self, job: str) -> str:
        """Returns the state of a job, such as RUNNING."""
        shown = self.run("scontrol", "show", "job", job)
        return shown.split("JobState=")[1].split()[0] if "JobState=" in shown else "GONE"

    def _wait_until(self, is_so) -> None:
        deadline = time.monotonic() + LIMIT_SECONDS
        while not is_so():
            assert time.monotonic() < deadline, self.run("sinfo")
            time.sleep(0.5)


def _of_node(node: str) -> list[int]:
    """Tasks of a node, and the daemons of its steps, which are their parents."""
    actual = []
    for path in pathlib.Path("/proc").glob("[0-9]*/environ"):
        try:
            variables = path.read_bytes().split(b"\0")
            status = (path.parent / "stat").read_text()
        except OSError:
            continue
        if f"SLURMD_NODENAME={node}".encode() in variables and b"SLURM_STEP_ID" in b"".join(variables):
            actual += [int(path.parent.name), int(status.rsplit(")", 1)[1].split()[1])]
    return [pid for pid in actual if pid > 1]


def _end(path: pathlib.Path) -> None:
    with contextlib.suppress(OSError, ValueError):
        os.kill(int(path.read_text()), signal.SIGTERM)
