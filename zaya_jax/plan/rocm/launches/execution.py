"""Execution of launched kernels on the emulator of gfx942: an executor for `pallas_kernels.backend`.

A launch is compiled when it is traced, for MI300X. When the traced function runs, a callback executes the
machine code on the host and returns the arrays that it has written.
"""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from pallas_kernels.backend import execute_launches
from pallas_kernels.emulator import (
    Buffer,
    EmulationError,
    Execution,
    KernelCode,
    KernelLaunch,
    execute,
    read_code_object,
)
from zaya_jax.plan.rocm.launches.cache import CompiledLaunch
from zaya_jax.plan.rocm.launches.compiler import LaunchCompiler
from zaya_jax.plan.rocm.launches.lowering import lower_launch

UNWRITTEN = 0xFF
"""Byte that outputs consist of before a kernel writes them: NaN in both float types, -1 in integers."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExecutedLaunch:
    """One executed launch of a kernel.

    Attributes:
      name: name in `backend.launch`.
      launch: sizes of the launch.
      array_bytes: bytes of all operands and results, the least that the kernel must move.
      execution: counts of the execution, without its outputs.
      seconds: time of the emulation.
    """

    name: str
    launch: KernelLaunch
    array_bytes: int
    execution: Execution
    seconds: float


class EmulatedLaunches:
    """Executor for `pallas_kernels.backend.execute_launches`.

    Attributes:
      executed: launches in the order of their execution.
      failure: error of the first launch that failed; None without.
    """

    def __init__(
        self,
        compiler: LaunchCompiler,
        *,
        may_leave_unwritten: Collection[str] = (),
        count_memory: bool = False,
    ):
        """Uses a compiler for all launches.

        Args:
          compiler: compiler of launches.
          may_leave_unwritten: names of kernels that need not write all bytes of their outputs.
          count_memory: whether memory transactions and bank conflicts are counted too, which takes time.
        """
        self.executed: list[ExecutedLaunch] = []
        self.failure: EmulationError | None = None
        self._compiler, self._count_memory = compiler, count_memory
        self._may_leave_unwritten = frozenset(may_leave_unwritten)
        # jax may run the callbacks of independent launches in several threads.
        self._lock = threading.Lock()

    def clear(self) -> None:
        """Removes the records of executed launches, and the failure of one of them."""
        self.executed, self.failure = [], None

    @contextlib.contextmanager
    def launches(self) -> Iterator[None]:
        """A context in which this executor runs all launches; the results must be awaited inside.

        Raises:
          EmulationError: if a launch fails. JAX reports the error of a callback as text in one of its own.
        """
        self.clear()
        try:
            with execute_launches(self):
                yield
        except jax.errors.JaxRuntimeError as error:
            # Not every error of the runtime comes from a launch.
            if self.failure is not None:
                raise self.failure from error
            raise

    def __call__(
        self,
        call: Callable[..., Any],
        operands: Sequence[jax.Array],
        results: Sequence[jax.ShapeDtypeStruct],
        name: str,
    ) -> Sequence[jax.Array]:
        """Compiles a launch now, and returns arrays that its execution computes.

        Args:
          call: Pallas call of the operands.
          operands: input arrays, or tracers.
          results: shapes and dtypes of the outputs.
          name: name of the kernel.

        Raises:
          UserError: if the kernel cannot be compiled.
          EmulationError: when the launch runs; JAX reports it as text in a JaxRuntimeError.
        """
        # At trace time, so that an error of the compiler has the caller's traceback.
        compiled = self._compiler.compile(name, lower_launch(call, operands))
        kernel = read_code_object(compiled.code)[compiled.kernel]

        def run(*arrays):
            with self._lock:
                return self._execute(name, kernel, compiled, [np.asarray(each) for each in arrays], results)

        shapes = tuple(jax.ShapeDtypeStruct(each.shape, each.dtype) for each in results)
        return jax.pure_callback(run, shapes, *operands)

    def _execute(
        self,
        name: str,
        kernel: KernelCode,
        compiled: CompiledLaunch,
        operands: Sequence[np.ndarray],
        results: Sequence[jax.ShapeDtypeStruct],
    ) -> tuple[np.ndarray, ...]:
        launch = KernelLaunch(compiled.grid, compiled.threads, compiled.lds_bytes)
        # XLA passes the addresses of all operands, then those of all results.
        buffers = [Buffer(np.ascontiguousarray(each), writable=False) for each in operands]
        buffers += [Buffer(_unwritten(each), writable=True) for each in results]
        began = time.perf_counter()
        try:
            execution = execute(kernel, launch, buffers, count_memory=self._count_memory)
            holes = sum(execution.unwritten)
            if holes and name not in self._may_leave_unwritten:
                raise EmulationError("unwritten", f"{holes} bytes of the outputs are never written")
        except EmulationError as error:
            error.args = (f"kernel {name}: {error}",)
            self.failure = self.failure or error
            raise
        self.executed.append(
            ExecutedLaunch(
                name=name,
                launch=launch,
                array_bytes=sum(buffer.array.nbytes for buffer in buffers),
                # A list of launches must not keep all their arrays alive.
                execution=dataclasses.replace(execution, outputs=[]),
                seconds=time.perf_counter() - began,
            )
        )
        return tuple(execution.outputs)


def _unwritten(result: jax.ShapeDtypeStruct) -> np.ndarray:
    # By bytes, because not every dtype has a NaN.
    num_bytes = int(np.prod(result.shape)) * np.dtype(result.dtype).itemsize
    return np.full(num_bytes, UNWRITTEN, np.uint8).view(result.dtype).reshape(result.shape)
