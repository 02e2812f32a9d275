"""Compilation of launched kernels one by one, in a process that stays alive between them."""

import pathlib
import time

from zaya_jax.errors import UserError
from zaya_jax.plan.devices import Cluster
from zaya_jax.plan.gpus import MI300X, Device
from zaya_jax.plan.rocm.launches.cache import (
    CompiledLaunch,
    default_folder,
    delete_unused,
    key_of,
    read_entry,
    write_entry,
)
from zaya_jax.plan.rocm.process import CompilerProcess
from zaya_jax.plan.rocm.wheels import VERSION, find_plugin

WORKER = "zaya_jax.plan.rocm.launches.worker"
TIME_LIMIT = 300.0
"""Timeout of one kernel in seconds, including the start of the process."""
# Tests set a lower level in XLA_FLAGS for speed; it would yield other machine code than on a cluster.
OPTIONS = {"xla_backend_optimization_level": 3}
"""Options of XLA with which kernels are compiled."""
_UNWANTED = ("XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR")
"""Environment variables that would change the code, or read it instead of compiling it."""


class LaunchCompiler:
    """Compiles programs of one launch, and keeps the results in memory and on disk.

    Attributes:
      num_compiled: number of launches that were compiled rather than read from the cache.
      compile_seconds: total time of these compilations.
      num_workers: number of processes that were started for it.
    """

    def __init__(
        self,
        device: Device = MI300X,
        *,
        folder: pathlib.Path | None = None,
        time_limit: float = TIME_LIMIT,
    ):
        """Finds the plugin; the process starts with the first launch that has to be compiled.

        Args:
          device: GPU to compile for.
          folder: folder of compiled launches; None is the user's, which an environment variable selects.
          time_limit: timeout of one kernel in seconds.

        Raises:
          UserError: if the plugin is missing, or the compiler does not support the device.
        """
        self.num_compiled, self.compile_seconds, self.num_workers = 0, 0.0, 0
        # All that the machine code depends on, besides the program.
        self._conditions = {
            "jaxlib": VERSION,
            "plugin": find_plugin().versions,
            "target": device.need_core().target,
            "options": OPTIONS,
        }
        self._cluster = Cluster(device=device, nodes=1, gpus_per_node=1)
        self._time_limit = time_limit
        self._folder = folder or default_folder()
        self._compiled: dict[str, CompiledLaunch] = {}
        self._process: CompilerProcess | None = None
        if self._folder:
            delete_unused(self._folder)

    def compile(self, name: str, program: bytes) -> CompiledLaunch:
        """Returns the machine code of a launch.

        Args:
          name: name of the kernel for messages.
          program: program of `lower_launch`.

        Raises:
          UserError: if the kernel cannot be compiled, or takes too long.
        """
        # A loop traces one launch many times; memory saves reading its file each time.
        key = key_of(program, **self._conditions)
        if key not in self._compiled:
            kept = read_entry(self._folder, key) if self._folder else None
            self._compiled[key] = kept or self._compile(name, program, key)
        return self._compiled[key]

    def close(self) -> None:
        """Ends the process that compiles."""
        if self._process is not None:
            self._process.close()
            self._process = None

    def _compile(self, name: str, program: bytes, key: str) -> CompiledLaunch:
        began = time.perf_counter()
        entry = self._request(name, program)
        if entry is None:
            # The process has compiled the same code for another launch and does not write it again.
            self.close()
            entry = self._request(name, program)
        assert entry is not None, "a new process remembers no code"
        # Written at once, so that an interrupted run of tests compiles nothing twice.
        if self._folder:
            write_entry(self._folder, key, entry)
        self.num_compiled += 1
        self.compile_seconds += time.perf_counter() - began
        return entry

    def _request(self, name: str, program: bytes) -> CompiledLaunch | None:
        """Returns the worker's reply; starts it if necessary."""
        if self._process is None:
            self._process = CompilerProcess(WORKER, without=_UNWANTED)
            self.num_workers += 1
        message, late = (self._cluster, program, OPTIONS), f": no reply in {self._time_limit:.0f} s"
        try:
            reply = self._process.request(name, message, time_limit=self._time_limit, late=late)
        except UserError:
            # The process has ended or does not answer. The next kernel gets a new one.
            self._process = None
            raise
        if isinstance(reply, str):
            raise UserError(f"{name} was not compiled: {reply}")
        return reply
