"""The server process: it listens at once, loads its model, serves until a signal, and drains."""

import asyncio
import contextlib
import resource
import socket
import sys
from collections.abc import Callable, Iterator, Sequence

import uvicorn

from zaya_jax.errors import UserError
from zaya_jax.inference.engine.engine_thread import EngineThread
from zaya_jax.platform.compile_thread import COMPILE_THREAD
from zaya_jax.serving.http.application import make_application
from zaya_jax.serving.http.connection import Connection
from zaya_jax.serving.http.limits import ServingLimits
from zaya_jax.serving.http.open_connections import OpenConnections
from zaya_jax.serving.http.worker_threads import WorkerThreads
from zaya_jax.serving.loaded_model import LoadedModel
from zaya_jax.serving.service import Service
from zaya_jax.serving.shutdown_signals import count_signals

SWITCH_SECONDS = 0.001
"""Time after which a computing thread hands Python's lock to another. The event loop needs the lock a dozen
times per request, for which Python's default of 5 ms would add up."""
CLOSING_SECONDS = 5
"""Time that uvicorn waits for the errors of cancelled responses to be sent."""
MAX_CONNECTIONS = 4096
MAX_BACKLOG = 512


class _Uvicorn(uvicorn.Server):
    """uvicorn without its signal handlers, which would cancel running responses instead of draining first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(host: str, port: int) -> socket.socket:
    """Opens a listening socket.

    Args:
      host: name or address of a network interface.
      port: number of the port; 0 for any free one.

    Raises:
      UserError: if the address is invalid or in use.
    """
    if not 0 <= port < 2**16:
        raise UserError(f"--port is {port}; it must be 0 to {2**16 - 1}")
    try:
        # Use the first address of the name. create_server can reuse an address that was closed a moment ago.
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=2048)
    except OSError as error:
        raise UserError(
            f"cannot listen on {host}:{port} ({error.strerror}); use another --host or --port"
        ) from error


def run_server(
    load: Callable[[], LoadedModel],
    listening: socket.socket,
    limits: ServingLimits,
    *,
    key: str | None,
    host: str,
    origins: Sequence[str],
) -> None:
    """Serves until SIGTERM, SIGINT or SIGHUP, then waits for running responses; a second signal skips the
    wait.

    Args:
      load: function that loads the model; `/health` reports "loading" until it returns.
      listening: listening socket.
      limits: limits of requests.
      key: key that clients must send; None for none.
      host: host that the socket listens on.
      origins: origins of other web pages that may send requests from a browser (CORS).

    Raises:
      UserError: if `load` raises it.
    """
    # Set for the whole process, because workers and the event loop share one interpreter lock.
    sys.setswitchinterval(SWITCH_SECONDS)
    asyncio.run(_serve(load, listening, limits, key=key, host=host, origins=origins))


async def _serve(
    load: Callable[[], LoadedModel],
    listening: socket.socket,
    limits: ServingLimits,
    *,
    key: str | None,
    host: str,
    origins: Sequence[str],
) -> None:
    service = Service(limits)
    application = make_application(service, key=key, host=host, origins=origins)
    server = _Uvicorn(_uvicorn_config(application, service))
    shutdown_requested = count_signals(asyncio.get_running_loop(), forced_seconds=limits.forced_seconds)
    # Answer /health while the model loads, so that load balancers wait for the server.
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        model = await _load_or_stop(load, shutdown_requested)
        if model is not None:
            await _serve_until_signal(service, model, listening, shutdown_requested)
    finally:
        server.should_exit = True
        await serving
        service.close()


async def _serve_until_signal(
    service: Service, model: LoadedModel, listening: socket.socket, shutdown_requested: asyncio.Semaphore
) -> None:
    # One thread runs all steps of the engine: the device executes one at a time.
    with EngineThread(model.engine) as thread:  # pyright: ignore[reportArgumentType]
        service.set_ready(model, failure=lambda: thread.error)
        host, port = listening.getsockname()[:2]
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        # Scripts wait for this line, and read the URL from it.
        print(f"{model.name} at {url}, OpenAI API at {url}/v1", flush=True)
        await shutdown_requested.acquire()
        draining = asyncio.create_task(service.drain(service.limits.drain_seconds))
        # Wait for the running responses, or for a second signal.
        second_signal = asyncio.create_task(shutdown_requested.acquire())
        await asyncio.wait({draining, second_signal}, return_when=asyncio.FIRST_COMPLETED)
        second_signal.cancel()
        if not draining.done():
            draining.cancel()
            await service.drain(0)


async def _load_or_stop(
    load: Callable[[], LoadedModel], shutdown_requested: asyncio.Semaphore
) -> LoadedModel | None:
    """Returns the loaded model; None if a signal came first."""
    # Loading cannot be interrupted. Its daemon thread does not keep the process alive after a signal, and its
    # name lets the exit of the process skip the compiler.
    loading = asyncio.create_task(WorkerThreads(1, COMPILE_THREAD).call(load))
    signal_received = asyncio.create_task(shutdown_requested.acquire())
    await asyncio.wait({loading, signal_received}, return_when=asyncio.FIRST_COMPLETED)
    if not loading.done():
        loading.cancel()
        return None
    signal_received.cancel()
    return loading.result()


def _uvicorn_config(application: object, service: Service) -> uvicorn.Config:
    # Use at most half of the files that this process may open: the rest is for the run's own files.
    max_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    # A connection is a file to the system.
    max_connections, limits = min(MAX_CONNECTIONS, max_files // 2), service.limits
    # Stay below uvicorn's limit, at which it would answer every client with 503. Connections that were closed
    # in favor of new ones count there until the event loop has processed their end.
    total = max(1, max_connections - max_connections // 8)
    connections = OpenConnections(
        total=total, per_client=min(limits.client_connections, max(1, total // 2)), metrics=service.metrics
    )
    members = {"limits": limits, "open_connections": connections}
    return uvicorn.Config(
        application,  # pyright: ignore[reportArgumentType]
        http=type("LimitedConnection", (Connection,), members),
        # The application uses neither WebSockets nor lifespan events, and asyncio.run has created the loop.
        ws="none",
        loop="none",
        lifespan="off",
        # Nothing is logged per request: it would show prompts' paths and addresses, and /metrics has the
        # counts.
        log_config=None,
        log_level="error",
        access_log=False,
        server_header=False,
        limit_concurrency=max_connections,
        # asyncio accepts this many connections in one go before it processes any of them.
        backlog=max(1, min(MAX_BACKLOG, max_connections // 8)),
        timeout_keep_alive=int(limits.idle_seconds),
        timeout_graceful_shutdown=CLOSING_SECONDS,
    )
