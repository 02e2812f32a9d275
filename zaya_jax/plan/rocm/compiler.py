"""Compilation of a JAX program for a cluster of AMD GPUs, in a separate process, without a GPU.

A program is named as "package.module:function". The other process calls the function with the abstract
devices of the cluster and the job's arguments; it returns the result of `jax.jit(...).lower(...)`.
"""

import contextlib
import dataclasses
import pathlib
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

from zaya_jax.errors import UserError
from zaya_jax.plan.devices import Cluster
from zaya_jax.plan.rocm.code_objects import Kernel
from zaya_jax.plan.rocm.process import CompilerProcess
from zaya_jax.plan.rocm.wheels import find_plugin

WORKER = "zaya_jax.plan.rocm.worker"
REPORT = "memory-usage-report.txt"
TIME_LIMIT = 600.0
"""Default timeout of a compilation in seconds."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """A program to compile.

    Attributes:
      program: "package.module:function", called as function(devices, **arguments); returns a
        `jax.stages.Lowered`.
      arguments: arguments that pickle supports.
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

    @classmethod
    def of(cls, compiled: Any) -> "Memory":
        """Returns the memory that XLA has planned for a compiled program."""
        planned = compiled.memory_analysis()
        return cls(
            arguments=planned.argument_size_in_bytes,
            outputs=planned.output_size_in_bytes,
            aliased=planned.alias_size_in_bytes,
            temporaries=planned.temp_size_in_bytes,
            code=planned.generated_code_size_in_bytes,
        )

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
    with compiler_output(job, time_limit=time_limit, progress=progress) as (compilation, _):
        return compilation


@contextlib.contextmanager
def compiler_output(
    job: Job, *, time_limit: float = TIME_LIMIT, progress: Callable[[float], None] | None = None
) -> Iterator[tuple[Compilation, pathlib.Path]]:
    """Compiles a program; in its context, a folder has the files that XLA wrote.

    Arguments and errors are those of `compile_program`.
    """
    began = time.monotonic()
    with _process() as process:
        result = process.request(
            job.program, job, time_limit=time_limit, late=_late(time_limit), progress=progress
        )
        yield Compilation(**result, wall_seconds=time.monotonic() - began), process.folder


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
    with _process() as process:
        # XLA would continue to compile kernels for minutes: the process ends before it replies.
        process.request(
            job.program, job, time_limit=time_limit, late=_late(time_limit), progress=progress,
            early=lambda: _laid_out_bytes(process.folder),
        )  # fmt: skip
        num_bytes = _laid_out_bytes(process.folder)
        if num_bytes is None:
            log = process.stop()
            raise UserError(f"{job.program} was compiled without a memory report; its log is {log}")
        return num_bytes


def _process() -> contextlib.closing[CompilerProcess]:
    find_plugin()
    return contextlib.closing(CompilerProcess(WORKER))


def _late(time_limit: float) -> str:
    return f" in {time_limit:.0f} s: raise --time-limit"


def _laid_out_bytes(folder: pathlib.Path) -> int | None:
    """The total of XLA's memory report, if it has been written."""
    for report in (folder / "dump").glob(f"*{REPORT}"):
        # XLA may still be writing the file: without its total it is not complete.
        if totals := re.findall(r"^Total bytes: (\d+)", report.read_text(), re.MULTILINE):
            return sum(map(int, totals))  # of each kind of memory
    return None
