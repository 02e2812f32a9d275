"""Compilation of launched kernels one by one, in a process that stays alive between them."""

import base64
import contextlib
import json
import os
import pathlib
import select
import shutil
import subprocess
import sys
import tempfile
import time
import weakref
from typing import Any

from zaya_jax.errors import UserError
from zaya_jax.plan.gpus import MI300X, Device
from zaya_jax.plan.rocm.compiler import exit_reason, worker_environment
from zaya_jax.plan.rocm.launches.cache import (
    CompiledLaunch,
    default_folder,
    delete_unused,
    key_of,
    read_entry,
    write_entry,
)
from zaya_jax.plan.rocm.wheels import VERSION, find_plugin

WORKER = "zaya_jax.plan.rocm.launches.worker"
LOG = "log.txt"
TIME_LIMIT = 300.0
"""Timeout of one kernel in seconds, including the start of the process."""
EXIT_SECONDS = 2.0
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
        self._device, self._time_limit = device, time_limit
        self._folder = folder or default_folder()
        self._compiled: dict[str, CompiledLaunch] = {}
        self._worker: _Worker | None = None
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
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def _compile(self, name: str, program: bytes, key: str) -> CompiledLaunch:
        began = time.perf_counter()
        fields = self._request(name, program)
        if fields["code"] is None:
            # The process has compiled the same code for another launch and does not write it again.
            self.close()
            fields = self._request(name, program)
        entry = CompiledLaunch.from_fields(fields)
        # Written at once, so that an interrupted run of tests compiles nothing twice.
        if self._folder:
            write_entry(self._folder, key, entry)
        self.num_compiled += 1
        self.compile_seconds += time.perf_counter() - began
        return entry

    def _request(self, name: str, program: bytes) -> dict[str, Any]:
        """Returns the worker's reply; starts it if necessary."""
        if self._worker is None:
            self._worker = _Worker(self._device)
            self.num_workers += 1
        request = {"program": base64.b64encode(program).decode(), "options": OPTIONS}
        try:
            fields = self._worker.request(request, self._time_limit)
        except UserError as error:
            # The process has ended or does not answer. The next kernel gets a new one.
            self._worker = None
            raise UserError(f"{name} was not compiled: {error}") from error
        if "error" in fields:
            raise UserError(f"{name} was not compiled: {fields['error']}")
        return fields


class _Worker:
    """The process that compiles, and its pipes."""

    def __init__(self, device: Device):
        self._folder = pathlib.Path(tempfile.mkdtemp(prefix="zaya_launches_"))
        (self._folder / "code").mkdir()
        environment = worker_environment(self._folder)
        with (self._folder / LOG).open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", WORKER, device.name, str(self._folder)],
                env={name: value for name, value in environment.items() if name not in _UNWANTED},
                # Its end is the end of this process, also after a SIGKILL: then the other one ends too.
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        # The process ends by itself with its input, as this process ends; its folder would remain.
        self._end = weakref.finalize(self, _end, self._process, self._folder)

    def request(self, request: dict[str, Any], time_limit: float) -> dict[str, Any]:
        """Sends a request and returns the reply.

        Raises:
          UserError: if the process ends or does not reply in time. Its log is kept.
        """
        requests, replies = self._process.stdin, self._process.stdout
        assert requests is not None
        assert replies is not None
        try:
            requests.write(json.dumps(request).encode() + b"\n")
            requests.flush()
            return json.loads(self._read_line(replies.fileno(), time_limit))
        except (BrokenPipeError, EOFError):
            log = self._stop() / LOG
            reason = exit_reason(self._process.returncode, log)
            raise UserError(f"{reason}; its log is {log}") from None
        except TimeoutError:
            raise UserError(f"no reply in {time_limit:.0f} s; its log is {self._stop() / LOG}") from None

    def _read_line(self, descriptor: int, time_limit: float) -> bytes:
        # A blocking read could wait for ever, and a buffered one would hide from select what has arrived.
        deadline, parts = time.monotonic() + time_limit, []
        while not parts or not parts[-1].endswith(b"\n"):
            ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError
            parts.append(os.read(descriptor, 2**16))
            if not parts[-1]:
                raise EOFError
        return b"".join(parts)

    def _stop(self) -> pathlib.Path:
        """Ends the process after a failure and returns its folder, which is kept."""
        self._end.detach()
        # A process that has closed its output is about to end; a kill would hide the signal that ends it.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=EXIT_SECONDS)
        self._process.kill()
        self._process.communicate()
        return self._folder

    def close(self) -> None:
        """Ends the process and deletes its folder."""
        self._end()


def _end(process: subprocess.Popen, folder: pathlib.Path) -> None:
    process.kill()
    process.communicate()
    shutil.rmtree(folder, ignore_errors=True)
