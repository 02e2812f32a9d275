"""The coordination service of jax: a server in a child of process 0, and a client in every process.

`jax.distributed.initialize` would start both, the server in process 0, but it has no option that keeps them
from aborting the process with a C++ stack trace when a peer is lost; so this package starts them. Only this
module and that of the server's process use jax's private names for it.
"""

import contextlib
import ctypes
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax._src import distributed  # the public module does not expose the client
from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

from zaya_jax.parallel.processes.listeners import bind_address
from zaya_jax.parallel.processes.process_group import ProcessGroup
from zaya_jax.parallel.processes.service_process import ServiceProcess

_PARTITION = "JAX_PARTITION_INDEX"
_LOCAL_DEVICES = "JAX_LOCAL_DEVICE_IDS"
_POLL_SECONDS = 0.02


def state() -> Any:
    """Returns jax's record of the processes: `client`, `service`, `process_id`, `num_processes`."""
    return distributed.global_state


@contextlib.contextmanager
def service_process(group: ProcessGroup, *, limit_seconds: float) -> Iterator[ServiceProcess | None]:
    """Yields the process for the service in process 0, and None in others; an error ends it.

    Args:
      group: processes of the run.
      limit_seconds: time in seconds without a heartbeat after which the service reports a process as lost.
    """
    if group.process != 0:
        yield None
        return
    address = bind_address(group.coordinator)
    process = ServiceProcess(address, group.num_processes, limit_seconds=limit_seconds)
    try:
        yield process
    except BaseException:
        process.kill()
        state().service = None  # jax would end it at Python's exit
        raise


def start_service(process: ServiceProcess) -> None:
    """Starts the service in its process, when the coordinator's port is free. Only process 0 calls it.

    Raises:
      UserError: if it cannot listen at that port.
    """
    process.listen()
    state().service = process


def connect(group: ProcessGroup, *, limit_seconds: float, on_loss: Callable[[], None]) -> None:
    """Connects this process to the service. All processes must call it at the same time.

    Args:
      group: processes of the run.
      limit_seconds: time limit in seconds for heartbeats, and for the wait on other processes.
      on_loss: called in a thread of jax when the service reports a lost process, or is lost itself. It must
        not return.

    Raises:
      RuntimeError: if other processes do not connect in time.
    """
    seconds = max(1, int(limit_seconds))
    _select_devices(group)
    record = state()
    record.process_id, record.num_processes = group.process, group.num_processes
    record.coordinator_address = group.coordinator
    if _PARTITION in os.environ:
        record.partition_index = int(os.environ[_PARTITION])
    _install_loss_handler(on_loss)
    record.client = _jax.get_distributed_runtime_client(
        _service_address(group),
        group.process,
        init_timeout=seconds,
        heartbeat_timeout=seconds,
        use_compression=True,
        missed_heartbeat_callback=_not_callable_from_jax,
    )
    record.client.connect()


def put_message(key: str, message: str) -> None:
    """Stores a message in the service, unless it already has one under this key or has ended."""
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        state().client.key_value_set(key, message)


def wait_for_message(key: str, *, limit_seconds: float) -> str | None:
    """Waits for a message in the service; returns None if there is none within the time limit."""
    try:
        return state().client.blocking_key_value_get(key, int(1000 * limit_seconds))
    except jax.errors.JaxRuntimeError:
        time.sleep(_POLL_SECONDS)  # a service that has ended fails at once, and callers poll in a loop
        return None


def delete_message(key: str) -> None:
    """Deletes a message that was read; the service would store it until the end of the run."""
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        state().client.key_value_delete(key)


def _service_address(group: ProcessGroup) -> str:
    """Returns the address at which this process reaches the service.

    Process 0 uses the loopback, so that it does not depend on how the name of its host resolves.
    """
    if group.process != 0 or bind_address(group.coordinator) == group.coordinator:
        return group.coordinator
    return f"127.0.0.1:{group.coordinator.rpartition(':')[2]}"


def _select_devices(group: ProcessGroup) -> None:
    """Restricts jax to this process' share of the GPUs of its node."""
    from_environment = os.environ.get(_LOCAL_DEVICES)
    selected = from_environment if group.local_device is None else str(group.local_device)
    if selected:
        jax.config.update("jax_cuda_visible_devices", selected)
        jax.config.update("jax_rocm_visible_devices", selected)


def _not_callable_from_jax(*_: Any) -> None:
    """Replaces jax's own callback, which logs a stack trace and aborts.

    jaxlib cannot convert the status argument to Python and throws std::bad_cast instead: in `connect` as a
    RuntimeError, and in its own threads uncaught, which calls the terminate handler.
    """
    raise AssertionError("jaxlib has learned to convert its status to Python; revise `_install_loss_handler`")


_HANDLER = ctypes.CFUNCTYPE(None)
# References that keep the handler alive, since C++ may call it at any later time.
_installed: list[Any] = []


def _install_loss_handler(on_loss: Callable[[], None]) -> None:
    """Makes C++ call `on_loss` instead of aborting when jax's callback fails with std::bad_cast."""
    if _installed or sys.platform != "linux":
        return
    runtime = ctypes.CDLL("libstdc++.so.6")  # the library that jaxlib is linked with
    exception_type = runtime.__cxa_current_exception_type
    exception_type.restype = ctypes.c_void_p
    set_terminate = runtime._ZSt13set_terminatePFvvE
    set_terminate.argtypes, set_terminate.restype = [_HANDLER], ctypes.c_void_p

    @_HANDLER
    def handler() -> None:
        if _is_bad_cast(exception_type()):
            on_loss()
        _HANDLER(previous)()  # other exceptions are not ours: they abort the process as before

    previous = set_terminate(handler)
    _installed.append(handler)


def _is_bad_cast(type_info: int | None) -> bool:
    """Returns whether an exception is a std::bad_cast.

    Args:
      type_info: address of the exception's std::type_info, whose second pointer is the type's name; None for
        no exception.
    """
    if not type_info:
        return False
    name = ctypes.c_char_p.from_address(type_info + ctypes.sizeof(ctypes.c_void_p))
    return name.value == b"St8bad_cast"


def pause_thread() -> None:
    """Blocks the calling thread of jax forever without Python's lock, so that other threads continue."""
    pause = ctypes.CDLL(None).pause
    while True:
        pause()


def detach() -> None:
    """Lets this process exit alone: jax would wait at exit for the others, which may wait in a collective."""
    for each in (state().client, state().service):
        # Never freed: when a client is destroyed, it waits for the other processes, and it aborts the process
        # if the service was destroyed first.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))
    state().client = state().service = None
