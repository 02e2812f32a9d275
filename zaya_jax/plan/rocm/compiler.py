"""Compiles a jax program for a cluster of AMD GPUs, in a process of its own, without a GPU.

A program is a function by its name, "package.module:function". It is called in the other process with
the cluster's abstract devices and the job's arguments, and gives what `jax.jit(...).lower(...)` does.
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

from zaya_jax.plan.devices import Cluster
from zaya_jax.plan.rocm.code_objects import Kernel
from zaya_jax.plan.rocm.machine_code import Loop
from zaya_jax.plan.rocm.wheels import find_plugin

WORKER = "zaya_jax.plan.rocm.worker"
LOG = "log.txt"
REPORT = "memory-usage-report.txt"
POLL_SECONDS = 0.5
TIME_LIMIT = 600.0
"""Seconds that a compilation may take."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """A program to compile.

    Attributes:
      program: "package.module:function"; called as function(devices, **arguments), it gives a
        `jax.stages.Lowered`.
      arguments: what JSON can hold.
      cluster: that the program is for.
      compiler_options: of XLA, beside those in the environment variable XLA_FLAGS.
    """

    program: str
    arguments: dict[str, Any]
    cluster: Cluster
    compiler_options: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes that a program takes on each GPU.

    Attributes:
      arguments: what it is given.
      outputs: what it gives.
      aliased: outputs that take the place of arguments.
      temporaries: everything in between.
      code: the kernels.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    code: int

    @property
    def total(self) -> int:
        """All of it at once."""
        return self.arguments + self.outputs - self.aliased + self.temporaries + self.code


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compilation:
    """What compiling a program gave.

    Attributes:
      memory: of a GPU.
      kernels: all that XLA made; library calls are not among them.
      hlo: the scheduled program as text.
      buffers: XLA's report of memory, as text.
      trace_seconds: that JAX took to write the program down.
      compile_seconds: that XLA took.
      wall_seconds: from the start of the process to its end.
    """

    memory: Memory
    kernels: tuple[Kernel, ...]
    hlo: str
    buffers: str
    trace_seconds: float
    compile_seconds: float
    wall_seconds: float


def compile_program(
    job: Job, *, time_limit: float = TIME_LIMIT, progress: Callable[[float], None] | None = None
) -> Compilation:
    """Compiles a program.

    Args:
      job: which, and for what.
      time_limit: in seconds.
      progress: told the seconds so far, about twice a second.

    Raises:
      ValueError: if there is no compiler, it fails, or it takes too long; the sentence names its log.
    """
    with _folder() as folder:
        began = time.monotonic()
        _run(folder, job, time_limit, progress, until=lambda: False)
        if not (folder / "result.json").is_file():
            raise ValueError(f"{job.program} was not compiled; its log is {folder / LOG}")
        return _read(folder, wall_seconds=time.monotonic() - began)


def lay_out_program(
    job: Job, *, time_limit: float = TIME_LIMIT, progress: Callable[[float], None] | None = None
) -> int:
    """Bytes that a program takes on each GPU. XLA knows them long before it has made all kernels.

    Args:
      job: which, and for what.
      time_limit: in seconds.
      progress: told the seconds so far, about twice a second.

    Raises:
      ValueError: as `compile_program` does.
    """
    with _folder() as folder:
        _run(folder, job, time_limit, progress, until=lambda: _laid_out_bytes(folder) is not None)
        num_bytes = _laid_out_bytes(folder)
        if num_bytes is None:
            raise ValueError(
                f"{job.program} was compiled without a report of memory; its log is {folder / LOG}"
            )
        return num_bytes


@contextlib.contextmanager
def _folder() -> Iterator[pathlib.Path]:
    """For a compilation's files. After a failure it stays, for who must find the reason."""
    find_plugin()
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
    """Runs the other process to its end, or until there is what is wanted."""
    (folder / "code").mkdir()
    _write_job(folder, job)
    log = folder / LOG
    began = time.monotonic()
    with log.open("w") as sink:
        process = subprocess.Popen(
            [sys.executable, "-m", WORKER, str(folder)],
            env=_environment(folder),
            stdout=sink,
            stderr=sink,
            stdin=subprocess.DEVNULL,
        )
        try:
            while _is_running(process):
                seconds = time.monotonic() - began
                if until():
                    return
                if seconds > time_limit:
                    raise ValueError(
                        f"{job.program} was not compiled in {time_limit:.0f} s; its log is {log}"
                    )
                if progress:
                    progress(seconds)
        finally:
            # Also when what was wanted came early: XLA would go on making kernels for minutes.
            process.kill()
            process.wait()
    if process.returncode:
        raise ValueError(
            f"{job.program} was not compiled: {_reason(process.returncode, log)}; its log is {log}"
        )


def _laid_out_bytes(folder: pathlib.Path) -> int | None:
    """The total of XLA's report, if it has been written."""
    for report in (folder / "dump").glob(f"*{REPORT}"):
        if found := re.findall(r"^Total bytes: (\d+)", report.read_text(), re.MULTILINE):
            return sum(map(int, found))  # of each kind of memory
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


def _environment(folder: pathlib.Path) -> dict[str, str]:
    package = pathlib.Path(__file__).resolve().parents[3]
    search_path = [str(package), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(search_path),
        # The code objects are read for the kernels' resources; XLA leaves them where temporary files go.
        "TF_ROCM_KEEP_XLA_TEMPFILES": "1",
        "TMPDIR": str(folder / "code"),
    }


def _reason(code: int, log: pathlib.Path) -> str:
    """Why a process failed, in a line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    if code >= 0:
        return lines[-1] if lines else f"the compiler ended with code {code}"
    name = signal.Signals(-code).name
    fatal = [line for line in lines if re.match(r"F\d{4} ", line)]  # how XLA marks a failed check
    hint = " (the machine ran out of memory?)" if name == "SIGKILL" else ""
    return f"the compiler ended with {name}{hint}" + (f", {fatal[-1]}" if fatal else "")


def _read(folder: pathlib.Path, *, wall_seconds: float) -> Compilation:
    values = json.loads((folder / "result.json").read_text())
    reports = sorted((folder / "dump").glob(f"*{REPORT}"), key=lambda path: path.stat().st_size)
    return Compilation(
        memory=Memory(**values["memory"]),
        kernels=tuple(_kernel(**kernel) for kernel in values["kernels"]),
        hlo=(folder / "program.hlo.txt").read_text(),
        buffers=reports[-1].read_text() if reports else "",
        trace_seconds=values["trace_seconds"],
        compile_seconds=values["compile_seconds"],
        wall_seconds=wall_seconds,
    )


def _kernel(*, loop: dict[str, int] | None, **values: Any) -> Kernel:
    return Kernel(**values, loop=None if loop is None else Loop(**loop))
