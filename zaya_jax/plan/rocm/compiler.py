"""Compilation of a JAX program for a cluster of AMD GPUs, in a separate process, without a GPU.

A program is named as "package.module:function". The other process calls the function with the abstract
devices of the cluster and the job's arguments; it returns the result of `jax.jit(...).lower(...)`.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

from zaya_jax.errors import UserError
from zaya_jax.plan.devices import Cluster
from zaya_jax.plan.rocm.code_objects import Kernel
from zaya_jax.plan.rocm.machine_code import Loop
from zaya_jax.plan.rocm.wheels import find_plugin

WORKER = "zaya_jax.plan.rocm.worker"
LOG = "log.txt"
REPORT = "memory-usage-report.txt"
POLL_SECONDS = 0.5
TIME_LIMIT = 600.0
"""Default timeout of a compilation in seconds."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """A program to compile.

    Attributes:
      program: "package.module:function", called as function(devices, **arguments); returns a
        `jax.stages.Lowered`.
      arguments: arguments that JSON can represent.
      cluster: cluster to compile for.
      compiler_options: options of XLA, in addition to those in the environment variable XLA_FLAGS.
    """

    program: str
    arguments: dict[str, Any]
    cluster: Cluster
    compiler_options: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Memory of a program on each GPU, in bytes.

    Attributes:
      arguments: inputs.
      outputs: outputs.
      aliased: outputs that alias arguments.
      temporaries: temporary buffers.
      code: code of the kernels.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    code: int

    @property
    def total(self) -> int:
        """Total bytes that exist at the same time."""
        # A donated argument and the output that takes its place are one buffer, which both numbers contain.
        return self.arguments + self.outputs - self.aliased + self.temporaries + self.code


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compilation:
    """Result of compiling a program.

    Attributes:
      memory: memory of a GPU.
      kernels: all kernels that XLA made; library calls are not included.
      hlo: text of the scheduled program.
      buffers: text of XLA's memory report.
      compile_seconds: time that XLA took.
      wall_seconds: time of the whole process.
    """

    memory: Memory
    kernels: tuple[Kernel, ...]
    hlo: str
    buffers: str
    compile_seconds: float
    wall_seconds: float


def compile_program(
    job: Job, *, time_limit: float = TIME_LIMIT, progress: Callable[[float], None] | None = None
) -> Compilation:
    """Compiles a program.

    Args:
      job: program and cluster.
      time_limit: timeout in seconds.
      progress: callback that receives the elapsed seconds, about twice a second.

    Raises:
      UserError: if there is no compiler, it fails, or it exceeds the timeout; the message names its log.
    """
    began = time.monotonic()
    with compiler_output(job, time_limit=time_limit, progress=progress) as folder:
        return _read(folder, wall_seconds=time.monotonic() - began)


@contextlib.contextmanager
def compiler_output(
    job: Job, *, time_limit: float = TIME_LIMIT, progress: Callable[[float], None] | None = None
) -> Iterator[pathlib.Path]:
    """Compiles a program; in its context, a folder has the files of XLA and of the worker.

    Arguments and errors are those of `compile_program`.
    """
    with _folder() as folder:
        _run(folder, job, time_limit, progress, until=lambda: False)
        if not (folder / "result.json").is_file():
            raise UserError(f"{job.program} was not compiled; its log is {folder / LOG}")
        yield folder


def lay_out_program(
    job: Job, *, time_limit: float = TIME_LIMIT, progress: Callable[[float], None] | None = None
) -> int:
    """Returns the bytes of a program on each GPU. XLA knows them long before it has compiled all kernels.

    Args:
      job: program and cluster.
      time_limit: timeout in seconds.
      progress: callback that receives the elapsed seconds, about twice a second.

    Raises:
      UserError: as `compile_program`.
    """
    with _folder() as folder:
        _run(folder, job, time_limit, progress, until=lambda: _laid_out_bytes(folder) is not None)
        num_bytes = _laid_out_bytes(folder)
        if num_bytes is None:
            raise UserError(f"{job.program} was compiled without a memory report; its log is {folder / LOG}")
        return num_bytes


@contextlib.contextmanager
def _folder() -> Iterator[pathlib.Path]:
    """A folder for a compilation's files. After a failure it stays, so that the reason can be found."""
    find_plugin()
    # Not a context manager: after an exception the folder must survive for its log.
    folder = pathlib.Path(tempfile.mkdtemp(prefix="zaya_plan_"))
    yield folder
    shutil.rmtree(folder)


def _run(
    folder: pathlib.Path,
    job: Job,
    time_limit: float,
    progress: Callable[[float], None] | None,
    *,
    until: Callable[[], bool],
) -> None:
    """Runs the other process until it ends, or until the condition holds."""
    (folder / "code").mkdir()
    _write_job(folder, job)
    log = folder / LOG
    began = time.monotonic()
    with log.open("w") as sink:
        process = subprocess.Popen(
            # XLA may abort the process that compiles, and does not return its memory.
            [sys.executable, "-m", WORKER, str(folder)],
            env=worker_environment(folder),
            stdout=sink,
            stderr=sink,
            # The other process must not take what the user types meanwhile.
            stdin=subprocess.DEVNULL,
        )
        try:
            while _is_running(process):
                seconds = time.monotonic() - began
                if until():
                    return
                if seconds > time_limit:
                    raise UserError(
                        f"{job.program} was not compiled in {time_limit:.0f} s: raise --time-limit; "
                        f"its log is {log}"
                    )
                if progress:
                    progress(seconds)
        finally:
            # Also when the condition holds early: XLA would continue to compile kernels for minutes.
            process.kill()
            process.wait()
    if process.returncode:
        raise UserError(
            f"{job.program} was not compiled: {exit_reason(process.returncode, log)}; its log is {log}"
        )


def _laid_out_bytes(folder: pathlib.Path) -> int | None:
    """The total of XLA's memory report, if it has been written."""
    for report in (folder / "dump").glob(f"*{REPORT}"):
        # XLA may still be writing the file: without its total it is not complete.
        if totals := re.findall(r"^Total bytes: (\d+)", report.read_text(), re.MULTILINE):
            return sum(map(int, totals))  # of each kind of memory
    return None


def _is_running(process: subprocess.Popen) -> bool:
    try:
        process.wait(timeout=POLL_SECONDS)
    except subprocess.TimeoutExpired:
        return True
    return False


def _write_job(folder: pathlib.Path, job: Job) -> None:
    values = {
        "program": job.program,
        "arguments": job.arguments,
        "device": job.cluster.device.name,
        "nodes": job.cluster.nodes,
        "gpus_per_node": job.cluster.gpus_per_node,
        "compiler_options": job.compiler_options,
    }
    (folder / "job.json").write_text(json.dumps(values))


def worker_environment(folder: pathlib.Path) -> dict[str, str]:
    """Environment of a process that compiles.

    Args:
      folder: the process's folder; XLA writes code objects and other files to its folder `code`.
    """
    # The child must import this package also when it is not installed.
    package = pathlib.Path(__file__).resolve().parents[3]
    search_path = [str(package), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {
        # The devices are only described: no backend for this machine's own accelerators may start.
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(search_path),
        # Keep the code objects, which contain the kernels' resources; XLA writes them to the temporary
        # folder.
        "TF_ROCM_KEEP_XLA_TEMPFILES": "1",
        "TMPDIR": str(folder / "code"),
    }


def exit_reason(code: int, log: pathlib.Path) -> str:
    """Returns why a process that compiles failed, in one line.

    Args:
      code: its exit code; a negative one is the signal that ended it.
      log: file of what it printed.
    """
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    if code >= 0:
        return lines[-1] if lines else f"the compiler ended with code {code}"
    # A negative exit code is the signal that ended the process.
    name = signal.Signals(-code).name
    fatal = [line for line in lines if re.match(r"F\d{4} ", line)]  # format of a failed check in XLA
    # Linux ends a process by this signal when the memory is full.
    hint = " (the machine ran out of memory?)" if name == "SIGKILL" else ""
    return f"the compiler ended with {name}{hint}" + (f", {fatal[-1]}" if fatal else "")


def _read(folder: pathlib.Path, *, wall_seconds: float) -> Compilation:
    values = json.loads((folder / "result.json").read_text())
    # XLA writes a report per module; the largest one is the train step's.
    reports = sorted((folder / "dump").glob(f"*{REPORT}"), key=lambda path: path.stat().st_size)
    return Compilation(
        memory=Memory(**values["memory"]),
        kernels=tuple(_kernel(**kernel) for kernel in values["kernels"]),
        hlo=(folder / "program.hlo.txt").read_text(),
        buffers=reports[-1].read_text() if reports else "",
        compile_seconds=values["compile_seconds"],
        wall_seconds=wall_seconds,
    )


def _kernel(*, loop: dict[str, int] | None, **values: Any) -> Kernel:
    return Kernel(**values, loop=None if loop is None else Loop(**loop))
